package wire

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// look says for a test whether reads look before they sleep.
func look(t *testing.T, on bool) {
	t.Helper()
	was := spare
	spare = on
	t.Cleanup(func() { spare = was })
}

func oneEnd(t *testing.T) (s Stream, peer *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if s, err = NewSocketStream(fds[0], time.Second); err != nil {
		t.Fatal(err)
	}
	peer = os.NewFile(uintptr(fds[1]), "peer")
	t.Cleanup(func() {
		_ = s.Close()
		_ = peer.Close()
	})
	return s, peer
}

// A read gives what is there, what comes, and the end, whether it looks first or not.
func TestReadLooks(t *testing.T) {
	for _, on := range []bool{true, false} {
		look(t, on)
		s, peer := oneEnd(t)
		var a, b [4]byte
		if _, err := peer.WriteString("abcdefgh"); err != nil {
			t.Fatal(err)
		}
		n, err := s.Read2(a[:], b[:])
		for n < 8 && err == nil {
			var k int
			k, err = s.Read2(a[n%4:n%4], b[n-4:])
			n += k
		}
		if err != nil || string(a[:])+string(b[:]) != "abcdefgh" {
			t.Errorf("look %v: read %q %q: %v", on, a, b, err)
		}
		if n, err := s.Read2(nil, nil); n != 0 || err != nil {
			t.Errorf("look %v: nothing asked: %d bytes, %v", on, n, err)
		}
		// It sleeps after a while, and is woken.
		type result struct {
			n   int
			err error
		}
		got := make(chan result)
		read := func() {
			n, err := s.Read2(a[:], nil)
			got <- result{n, err}
		}
		for _, late := range []bool{false, true} {
			go read()
			if late {
				asleep(t, s)
			}
			if _, err := peer.WriteString("x"); err != nil {
				t.Fatal(err)
			}
			if r := <-got; r.n != 1 || r.err != nil || a[0] != 'x' {
				t.Errorf("look %v, late %v: %d bytes, %v", on, late, r.n, r.err)
			}
		}
		go read()
		asleep(t, s)
		_ = peer.Close()
		if r := <-got; r.n != 0 || !errors.Is(r.err, io.EOF) {
			t.Errorf("look %v, asleep at the end: %d bytes, %v", on, r.n, r.err)
		}
		if n, err := s.Read2(a[:], b[:]); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("look %v, after the end: %d bytes, %v", on, n, err)
		}
	}
}

// asleep waits until a reader has had the time to fall asleep: it has none to look for.
func asleep(t *testing.T, s Stream) {
	t.Helper()
	for until := time.Now().Add(5 * lookMost); time.Now().Before(until); {
		if s.Readable(0) {
			t.Fatal("something to read")
		}
	}
}

// A connection that was reset is told as that, not as one that was closed: the kernel
// tells an error only once.
func TestReadTellsErrors(t *testing.T) {
	for _, on := range []bool{true, false} {
		look(t, on)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		peer, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		f, err := c.(*net.TCPConn).File()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		s, err := NewSocketStream(int(f.Fd()), time.Second)
		if err != nil {
			t.Fatal(err)
		}
		_ = peer.(*net.TCPConn).SetLinger(0)
		_ = peer.Close()
		var b [4]byte
		if n, err := s.Read2(b[:], nil); n != 0 || !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("look %v: %d bytes, %v", on, n, err)
		}
		_ = f.Close()
	}
}
