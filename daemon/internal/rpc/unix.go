package rpc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
)

// ListenLocal makes the local socket, mode 0666 because the kernel tells who
// calls, in a directory that is root's business. One left behind by a daemon that
// is gone is replaced, one that answers is not. Each user has a bounded number of
// connections.
func ListenLocal(ctx context.Context, path string) (net.Listener, error) {
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("local socket %s: the path exists and is no socket; remove it or set run_dir", path)
		}
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			_ = c.Close()
		}
		// Any other error (a full backlog, mostly) is of one that is there.
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, fmt.Errorf("local socket %s: another sluiced answers there; stop it first", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("local socket: remove what an earlier daemon left: %w", err)
		}
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("local socket: %w", err)
	}
	// The file stays when the daemon stops: what replaces it is the next one.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o666); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("local socket: %w", err)
	}
	return &localListener{
		Listener: l,
		root:     limit.New(limit.Bounds{TrustedKey: 1024}),
		users:    limit.New(limit.Bounds{Trusted: 1024, TrustedKey: 64}),
	}, nil
}

// localListener counts connections by user. Root's places are apart from all
// others: who has many uids (a subordinate range will do) fills only those.
type localListener struct {
	net.Listener
	root, users *limit.Table
}

func (l *localListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	p, err := peerOf(c)
	switch {
	case err != nil:
		return l.users.Add(c, "?"), nil // LocalCreds refuses it
	case p.UID == 0:
		return l.root.Add(c, "0"), nil
	}
	return l.users.Add(c, strconv.FormatUint(uint64(p.UID), 10)), nil
}

// peerOf is who made the connection, by SO_PEERCRED: the credentials at the time
// of connect(2), in this process's namespaces.
func peerOf(c net.Conn) (Peer, error) {
	if l, ok := c.(*limit.Conn); ok {
		c = l.Conn
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return Peer{}, errors.New("not a socket")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return Peer{}, err
	}
	var cred *unix.Ucred
	var cerr error
	if err := raw.Control(func(fd uintptr) {
		cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Peer{}, err
	}
	if cerr != nil {
		return Peer{}, fmt.Errorf("SO_PEERCRED: %w", cerr)
	}
	return Peer{UID: cred.Uid, GID: cred.Gid, PID: int(cred.Pid)}, nil
}

// LocalCreds are the credentials of a server on the local socket.
func LocalCreds() credentials.TransportCredentials { return unixCreds{} }

type unixCreds struct{}

type unixInfo struct {
	credentials.CommonAuthInfo
	peer Peer
}

func (unixInfo) AuthType() string { return "unix" }

func (unixCreds) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	p, err := peerOf(c)
	if err != nil {
		return nil, nil, fmt.Errorf("local socket: who calls: %w", err)
	}
	if l, ok := c.(*limit.Conn); ok && !l.Trust(strconv.FormatUint(uint64(p.UID), 10)) {
		return nil, nil, fmt.Errorf("local socket: uid %d has too many connections", p.UID)
	}
	return c, unixInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, p}, nil
}

func (unixCreds) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("local socket: credentials of a server")
}

func (unixCreds) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (c unixCreds) Clone() credentials.TransportCredentials { return c }
func (unixCreds) OverrideServerName(string) error           { return nil }
