// Package unixsock makes Unix sockets that other users may connect to, and says who is at
// the other end of a connection.
package unixsock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Errors of Listen.
var (
	// ErrNoSocket says that the path is taken by something other than a socket.
	ErrNoSocket = errors.New("the path exists and is no socket")
	// ErrInUse says that another process listens there.
	ErrInUse = errors.New("another process answers there")
)

// How says how a socket is made.
type How struct {
	// Mode is the socket's mode, whatever the umask. Connecting takes write permission.
	Mode fs.FileMode
	// Chown gives the socket to UID and GID.
	Chown    bool
	UID, GID uint32
	// Staging is the directory in which the socket is made before it is renamed, on the same
	// file system. Empty means the socket's own directory. It is for a socket in a directory
	// that somebody else may have written: whatever has the socket's name there is replaced.
	Staging string
	// Alone refuses with ErrInUse where another process listens at the path. Otherwise the
	// new socket replaces the old one. Not with Staging.
	Alone bool
}

// Listen makes the socket at path. It is made under another name and renamed, so nobody
// finds the path without a listener or with another mode. A socket that an earlier process
// left there is replaced. The path may be longer than the 107 bytes of an address, and it
// stays when the listener is closed: those who connect then are refused at once.
func Listen(path string, how How) (*net.UnixListener, error) {
	staging := how.Staging
	if staging == "" {
		staging = filepath.Dir(path)
	}
	dir, err := os.Open(staging)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if fi, err := os.Lstat(path); err == nil && how.Staging == "" {
		if fi.Mode().Type() != fs.ModeSocket {
			return nil, ErrNoSocket
		}
		if how.Alone && answers(dir, filepath.Base(path)) {
			return nil, ErrInUse
		}
	}
	name := "." + filepath.Base(path) + ".new"
	if how.Staging != "" {
		name = filepath.Base(filepath.Dir(path)) + name // the base alone need not be unique there
	}
	made := filepath.Join(staging, name)
	if err := os.Remove(made); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := bind("unix", address(dir, name), how.Mode.Perm())
	if err != nil {
		return nil, err
	}
	if err = os.Chmod(made, how.Mode.Perm()); err == nil && how.Chown {
		err = os.Lchown(made, int(how.UID), int(how.GID))
	}
	if err == nil {
		err = safefile.Move(made, path)
	}
	if err != nil {
		_ = l.Close()
		_ = os.Remove(made)
		return nil, err
	}
	return l, nil
}

// address is that of a socket in a directory, which is short however long the path is.
func address(dir *os.File, name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), name)
}

// bind makes a socket whose mode is at most mode from the begin: bind(2) takes the mode of
// the socket's descriptor, less the umask.
func bind(network, address string, mode fs.FileMode) (*net.UnixListener, error) {
	c := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var cerr error
		err := raw.Control(func(fd uintptr) { cerr = unix.Fchmod(int(fd), uint32(mode)) })
		return errors.Join(err, cerr)
	}}
	l, err := c.Listen(context.Background(), network, address)
	if err != nil {
		return nil, err
	}
	u := l.(*net.UnixListener)
	u.SetUnlinkOnClose(false)
	return u, nil
}

// answers says whether somebody listens at a socket in a directory. Any error but
// ECONNREFUSED, and ENOENT if it has just been removed, is that of a living listener, mostly
// one with a full backlog.
func answers(dir *os.File, name string) bool {
	c, err := net.DialTimeout("unix", address(dir, name), time.Second)
	if err == nil {
		_ = c.Close()
	}
	return !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ENOENT)
}

// ListenPackets makes a socket of packets (SOCK_SEQPACKET) at path, mode 0600, in a directory that nobody else may write.
// What was there is removed. The path may be long, and stays when the listener is closed.
func ListenPackets(path string) (*net.UnixListener, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return bind("unixpacket", address(dir, filepath.Base(path)), 0o600)
}

// DialPackets connects to a socket of ListenPackets.
func DialPackets(path string) (*net.UnixConn, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: address(dir, filepath.Base(path))})
}

// Peer is the process at the other end of a connection, as it was when it called
// connect(2), seen from this process's namespaces.
type Peer struct {
	UID, GID uint32
	PID      int // 0: in a PID namespace that cannot be seen from here
}

// PeerOf asks the kernel who is at the other end of c (SO_PEERCRED, unix(7)).
func PeerOf(c syscall.Conn) (Peer, error) {
	p, _, err := open(c, false)
	return p, err
}

// OpenPeer is PeerOf with a pidfd of the process, which stays the peer's even when its id
// is given to another process. The caller closes it; it is -1 where the kernel has none to
// give.
func OpenPeer(c syscall.Conn) (p Peer, pidfd int, err error) { return open(c, true) }

const soPeerPidfd = 77 // SO_PEERPIDFD, Linux 6.5

func open(c syscall.Conn, process bool) (p Peer, pidfd int, err error) {
	pidfd = -1
	raw, err := c.SyscallConn()
	if err != nil {
		return p, pidfd, err
	}
	var cerr error
	err = raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); cerr != nil {
			return
		}
		p = Peer{UID: cred.Uid, GID: cred.Gid, PID: int(cred.Pid)}
		if !process {
			return
		}
		n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, soPeerPidfd)
		if err != nil && p.PID > 0 {
			n, err = unix.PidfdOpen(p.PID, 0)
		}
		if err == nil {
			pidfd = n
		}
	})
	if err == nil && cerr != nil {
		err = fmt.Errorf("SO_PEERCRED: %w", cerr)
	}
	return p, pidfd, err
}
