package worker

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// comeBack has the client come with a key over a new connection, and returns its end of it.
func comeBack(t *testing.T, r *resumption, key [16]byte) int {
	t.Helper()
	near, far := socketPair(t)
	if err := r.join(near, &wire.Attach{Key: key}); err != nil {
		t.Fatal(err)
	}
	return far
}

// TestResumeForever: a client that connects again and again and sends nothing occupies maxKeys keys and one connection at most. Its first key stays
// valid until the client sends something.
func TestResumeForever(t *testing.T) {
	r, client := resumptionOf(t)
	unix.Close(client)
	first := r.keys[0]
	fds := func() int {
		d, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(d)
	}
	before := fds()
	for range 10 * maxKeys {
		unix.Close(comeBack(t, r, first))
		if len(r.keys) > maxKeys {
			t.Fatalf("%d keys are good at once", len(r.keys))
		}
	}
	if more := fds() - before; more > 4 {
		t.Errorf("%d more descriptors", more)
	}
	far := comeBack(t, r, first)
	defer unix.Close(far)
	newest := r.keys[len(r.keys)-1]
	var e wire.Encoder
	(&wire.Piece{}).Encode(&e)
	if _, err := unix.Write(far, append(e.Buf(), e.Buf()...)); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = r.stream.Read2(make([]byte, 1), nil) }()
	for until := time.Now().Add(5 * time.Second); !r.stream.Heard(); time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the client is not heard")
		}
	}
	near, end := socketPair(t)
	defer unix.Close(end)
	if err := r.join(near, &wire.Attach{Key: first}); !errors.Is(err, errKey) {
		t.Errorf("the first key after the client was heard: %v", err)
	}
	if unix.Close(comeBack(t, r, newest)); len(r.keys) != 2 {
		t.Errorf("%d keys are good, want the one that the client came with and the next", len(r.keys))
	}
}

// TestResumePace: the limit on attempts per time holds for those with the right key, too. An attempt above it is answered with busy.
func TestResumePace(t *testing.T) {
	r, client := resumptionOf(t)
	defer unix.Close(client)
	key, began := r.keys[0], time.Now()
	taken, busy := 0, 0
	for range 3 * attachBurst {
		near, far := socketPair(t)
		f := os.NewFile(uintptr(far), "client")
		var e wire.Encoder
		(&wire.Attach{Key: key}).Encode(&e)
		if _, err := f.Write(e.Buf()); err != nil {
			t.Fatal(err)
		}
		r.take(near, false)
		_, err := wire.ReadWelcome(f)
		var no *wire.Refusal
		switch {
		case err == nil:
			taken++
		case errors.As(err, &no) && no.Status == wire.StatusBusy:
			busy++
		case !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET): // others than the first few may lose the reason
			t.Fatal(err)
		}
		f.Close()
	}
	if most := attachBurst + int(time.Since(began)/attachPace) + 1; taken < attachBurst || taken > most || busy == 0 {
		t.Errorf("of %d attempts %d were taken, at most %d may be, and %d were told to try again", 3*attachBurst, taken, most, busy)
	}
}
