package unixsock

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func listen(t *testing.T, path string, how How) *net.UnixListener {
	t.Helper()
	l, err := Listen(path, how)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// mode is what a path has: mode, and owner.
func mode(t *testing.T, path string) (os.FileMode, uint32, uint32) {
	t.Helper()
	fi, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	st := fi.Sys().(*syscall.Stat_t)
	return fi.Mode(), st.Uid, st.Gid
}

func TestListen(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	dir, staging := t.TempDir(), t.TempDir()
	path := filepath.Join(dir, "sock")
	first := listen(t, path, How{Mode: 0o666, Alone: true})
	if m, _, _ := mode(t, path); m != os.ModeSocket|0o666 {
		t.Errorf("mode %v", m)
	}
	if _, err := Listen(path, How{Mode: 0o666, Alone: true}); !errors.Is(err, ErrInUse) {
		t.Errorf("a second one: %v", err)
	}
	// Replaced while the first still listens.
	second := listen(t, path, How{Mode: 0o660, Chown: true, UID: 1000, GID: 1001, Staging: staging})
	if m, uid, gid := mode(t, path); m != os.ModeSocket|0o660 || uid != 1000 || gid != 1001 {
		t.Errorf("mode %v of %d:%d", m, uid, gid)
	}
	_ = first.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the first listener has removed the second's path: %v", err)
	}
	_ = second.Close()
	if _, err := net.Dial("unix", path); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the end: %v", err)
	}
	listen(t, path, How{Mode: 0o666, Alone: true})
	for _, d := range []string{dir, staging} {
		if all, _ := filepath.Glob(d + "/.*"); len(all) > 0 {
			t.Errorf("left: %v", all)
		}
	}

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(file, How{Mode: 0o666}); !errors.Is(err, ErrNoSocket) {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "mine" {
		t.Errorf("the file has %q", b)
	}
	listen(t, file, How{Mode: 0o666, Staging: staging})
	if m, _, _ := mode(t, file); m.Type() != os.ModeSocket {
		t.Errorf("what somebody else wrote stays, with mode %v", m)
	}
}

// No umask lets others in before the socket has its mode.
func TestBind(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "sock")
	l, err := bind("unix", path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if m, _, _ := mode(t, path); m != os.ModeSocket|0o600 {
		t.Errorf("mode %v", m)
	}
}

// A path may be longer than an address, and what a crash left is replaced.
func TestListenDeep(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("deep/", 30))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sock")
	listen(t, filepath.Join(dir, ".sock.new"), How{Mode: 0o600})
	l := listen(t, path, How{Mode: 0o666})
	t.Chdir(dir)
	c, err := net.Dial("unix", "sock")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := l.Accept(); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, How{Mode: 0o666, Alone: true}); !errors.Is(err, ErrInUse) {
		t.Errorf("a second one: %v", err)
	}
	_ = l.Close()
	listen(t, path, How{Mode: 0o666, Alone: true})
}

func TestPeer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sock")
	l := listen(t, path, How{Mode: 0o666})
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	want := Peer{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), PID: os.Getpid()}
	if p, err := PeerOf(s); p != want || err != nil {
		t.Errorf("%+v, %v; want %+v", p, err, want)
	}
	p, fd, err := OpenPeer(s)
	if p != want || err != nil || fd < 0 {
		t.Fatalf("%+v, %v, %v", p, fd, err)
	}
	_ = syscall.Close(fd)
}

// Another user's process, by the kernel's word alone.
func TestPeerOfAnother(t *testing.T) {
	dir := t.TempDir()
	for d := dir; d != "/tmp" && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "sock")
	l := listen(t, path, How{Mode: 0o666})
	cmd := exec.Command("perl", "-MSocket", "-e", `socket(S,AF_UNIX,SOCK_STREAM,0); connect(S,sockaddr_un($ARGV[0])) or die; sysread(S,$b,1)`, path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4712}, Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	p, err := PeerOf(s)
	if want := (Peer{4711, 4712, cmd.Process.Pid}); p != want || err != nil {
		t.Errorf("%+v, %v; want %+v", p, err, want)
	}
	_ = s.Close()
	_ = cmd.Wait()
}
