package wire

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// shmPair returns both ends over one memory: the peer sees the directions swapped.
func shmPair(t *testing.T, keepalive time.Duration) (a, b *shmStream) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s, pass, err := NewShmStream(fds[0], keepalive)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(pass)
	a = s.(*shmStream)
	b = newShmStream(fds[1], a.mem, keepalive)
	b.in, b.out = b.out, b.in
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func TestShmCarriesBytesInOrder(t *testing.T) {
	a, b := shmPair(t, time.Second)
	sent := make([]byte, 3*ShmRing+12345)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range sent {
		sent[i] = byte(rng.Uint32())
	}
	go func() {
		for p := sent; len(p) > 0; {
			k := min(1+rng.IntN(100000), len(p))
			if err := a.Write([][]byte{p[:k/2], p[k/2 : k]}); err != nil {
				t.Error(err)
				return
			}
			p = p[k:]
		}
	}()
	got := make([]byte, 0, len(sent))
	x, y := make([]byte, 30000), make([]byte, 50000)
	for len(got) < len(sent) {
		n, err := b.Read2(x, y)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, x[:min(n, len(x))]...)
		if n > len(x) {
			got = append(got, y[:n-len(x)]...)
		}
	}
	if !bytes.Equal(got, sent) {
		t.Fatal("bytes differ")
	}
}

func TestShmStalledReaderEndsTheWrite(t *testing.T) {
	a, _ := shmPair(t, 50*time.Millisecond)
	if err := a.Write([][]byte{make([]byte, ShmRing+1)}); !errors.Is(err, ErrStalled) {
		t.Fatalf("error %v, want ErrStalled", err)
	}
}

func TestShmHostileCounts(t *testing.T) {
	a, _ := shmPair(t, time.Second)
	a.in.head.Store(ShmRing + 1)
	if _, err := a.Read2(make([]byte, 10), nil); !errors.Is(err, ErrShm) {
		t.Fatalf("read: error %v, want ErrShm", err)
	}
	a.out.tail.Store(1 << 60)
	if err := a.Write([][]byte{{1}}); !errors.Is(err, ErrShm) {
		t.Fatalf("write: error %v, want ErrShm", err)
	}
}

func TestShmCloseWakesTheReader(t *testing.T) {
	a, _ := shmPair(t, time.Second)
	done := make(chan error, 1)
	go func() {
		_, err := a.Read2(make([]byte, 1), nil)
		done <- err
	}()
	a.closed.Store(true)
	futex(a.in.readerSleeps, futexWake, 1<<30, 0)
	select {
	case err := <-done:
		if !errors.Is(err, io.EOF) {
			t.Fatalf("error %v, want EOF", err)
		}
	case <-time.After(2 * time.Second):
		t.Fatal("reader still sleeps")
	}
}
