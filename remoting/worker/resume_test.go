package worker

import (
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/boottime"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// resumable is a session that outlives its connection, from the client's side.
type resumable struct {
	t    *testing.T
	addr string
	c    net.Conn
	wire.Resumable
	got  uint64 // bytes of the stream
	sent uint64
}

func (r *resumable) write(flags uint32, data []byte) error {
	var h [wire.PieceSize]byte
	binary.LittleEndian.PutUint64(h[:], r.got)
	binary.LittleEndian.PutUint32(h[8:], uint32(len(data)))
	binary.LittleEndian.PutUint32(h[12:], flags)
	_, err := r.c.Write(append(h[:], data...))
	r.sent += uint64(len(data))
	return err
}

// ask has the worker answer a call, and reports whether it has.
func (r *resumable) ask(call uint32) bool {
	r.t.Helper()
	var h [wire.RequestSize]byte
	(&wire.Request{Op: wire.OpBeat, Flags: wire.FlagWait, Call: call}).Encode(&h)
	if r.write(0, h[:]) != nil {
		return false
	}
	return r.answer(call)
}

func (r *resumable) answer(call uint32) bool {
	_ = r.c.SetReadDeadline(time.Now().Add(10 * time.Second))
	var frames []byte
	for {
		var h [wire.PieceSize]byte
		if _, err := io.ReadFull(r.c, h[:]); err != nil {
			return false
		}
		p := make([]byte, binary.LittleEndian.Uint32(h[8:]))
		if _, err := io.ReadFull(r.c, p); err != nil {
			return false
		}
		r.got += uint64(len(p))
		frames = append(frames, p...)
		for len(frames) >= wire.ReplySize {
			var f wire.Reply
			if err := f.Decode((*[wire.ReplySize]byte)(frames)); err != nil {
				r.t.Fatal(err)
			}
			frames = frames[wire.ReplySize+int(f.Size):]
			if f.Kind == wire.FrameReply && f.Call == call {
				return true
			}
		}
	}
}

func startResumable(t *testing.T, addr string) *resumable {
	t.Helper()
	h := testHello(wire.SessionCompute)
	h.Features = wire.FeatureResume
	c, p, err := dialHello(addr, h)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	var snap wire.Snapshot
	if err := snap.Decode(p); err != nil || snap.Features&wire.FeatureResume == 0 {
		t.Fatalf("features %#x, %v", snap.Features, err)
	}
	r := &resumable{t: t, addr: addr, c: c}
	var b [wire.ResumableSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatal(err)
	}
	r.Decode(wire.NewDecoder(b[:]))
	return r
}

// attach asks to go on, with a key and a position.
func (r *resumable) attach(session uint32, key [16]byte, received uint64) (net.Conn, wire.Attached, error) {
	var a wire.Attached
	c, err := connect(r.addr)
	if err != nil {
		return nil, a, err
	}
	h := testHello(wire.SessionAttach)
	h.Mem = uint64(session)
	var b [wire.HelloSize]byte
	h.Encode(&b)
	var e wire.Encoder
	(&wire.Attach{Key: key, Received: received}).Encode(&e)
	_, err = c.Write(append(b[:], e.Buf()...))
	if err == nil {
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		var p []byte
		if p, err = wire.ReadWelcome(c); err == nil {
			d := wire.NewDecoder(p)
			a.Decode(d)
			err = d.Done()
		}
	}
	if err != nil {
		c.Close()
		return nil, a, err
	}
	r.t.Cleanup(func() { c.Close() })
	return c, a, nil
}

// goOn makes the connection again.
func (r *resumable) goOn() {
	r.t.Helper()
	c, a, err := r.attach(r.Session, r.Key, r.got)
	if err != nil {
		r.t.Fatal(err)
	}
	if a.Received > r.sent {
		r.t.Fatalf("received %d of %d", a.Received, r.sent)
	}
	r.c, r.Key = c, a.Key
}

// goOnSoon makes the connection again after a flood of others, as a client does: attempts of the flood that the worker sees later may
// end one of its own.
func (r *resumable) goOnSoon() {
	r.t.Helper()
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		c, a, err := r.attach(r.Session, r.Key, r.got)
		if err == nil {
			r.c, r.Key = c, a.Key
			return
		}
		if time.Now().After(until) {
			r.t.Fatalf("10 s after a flood: %v", err)
		}
	}
}

func graceWorker(t *testing.T, grace time.Duration) string {
	_, addr := startWorker(t, func(c *Config) { c.Listen, c.Grace = "tcp:127.0.0.1:0", grace })
	return addr
}

func wantRefused(t *testing.T, what string, err error) {
	t.Helper()
	var no *wire.Refusal
	if !errors.As(err, &no) || no.Status != wire.StatusLease {
		t.Errorf("%s: %v", what, err)
	}
}

// TestResumeKeys: who has no right to a session, or not any more, does not get it and does not disturb it.
func TestResumeKeys(t *testing.T) {
	addr := graceWorker(t, time.Minute)
	r, other := startResumable(t, addr), startResumable(t, addr)
	if !r.ask(1) || !other.ask(1) {
		t.Fatal("no answer")
	}
	for i := range r.Key {
		guess := r.Key
		guess[i] ^= 1
		_, _, err := r.attach(r.Session, guess, r.got)
		wantRefused(t, "a key that is wrong by one bit", err)
	}
	_, _, err := r.attach(r.Session, other.Key, r.got)
	wantRefused(t, "another session's key", err)
	_, _, err = r.attach(other.Session, r.Key, r.got)
	wantRefused(t, "a key at another session", err)
	for _, n := range []uint32{200, 1 << 31} {
		_, _, err = r.attach(n, r.Key, r.got)
		wantRefused(t, "no such session", err)
	}
	if !r.ask(2) {
		t.Fatal("the session was disturbed")
	}
	first := r.Key
	r.goOn()
	// The WELCOME may have been lost: the key before is good until a piece has come. Or this attempt is one that the client has given
	// up, and that comes late: then the client has the other key.
	var late [][16]byte
	for range 3 {
		_, a, err := r.attach(r.Session, first, r.got)
		if err != nil {
			t.Fatalf("the handshake again: %v", err)
		}
		late = append(late, a.Key)
	}
	r.goOn()
	_, _, err = r.attach(r.Session, first, r.got)
	wantRefused(t, "a key from before the one that the client has come with", err)
	if !r.ask(3) {
		t.Fatal("no answer")
	}
	for _, key := range append(late, first) {
		_, _, err = r.attach(r.Session, key, r.got)
		wantRefused(t, "a key that was used, or is older than one that was", err)
	}
	if !r.ask(4) {
		t.Fatal("the session was disturbed")
	}
	// Two at once with the same good key: one of them has it.
	var wg sync.WaitGroup
	conns := make([]net.Conn, 8)
	answers := make([]wire.Attached, 8)
	for i := range conns {
		wg.Add(1)
		go func() {
			defer wg.Done()
			conns[i], answers[i], _ = r.attach(r.Session, r.Key, r.got)
		}()
	}
	wg.Wait()
	works := 0
	for i, c := range conns {
		if c == nil {
			continue
		}
		try := *r
		try.c, try.Key = c, answers[i].Key
		if try.ask(5) {
			works++
			*r = try
		}
	}
	if works != 1 || !r.ask(6) {
		t.Errorf("%d of 8 clients with the same key have the session", works)
	}
	if !other.ask(2) {
		t.Error("another session was disturbed")
	}
	if err := r.write(wire.PieceBye, nil); err != nil {
		t.Fatal(err)
	}
	for until := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, _, err = r.attach(r.Session, r.Key, r.got); err != nil && strings.Contains(err.Error(), "ended") {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("after the goodbye: %v", err)
		}
	}
}

// TestResumeAbandoned: an attempt that its client has closed is not taken, and the session goes on over the connection that it has.
func TestResumeAbandoned(t *testing.T) {
	r, client := resumptionOf(t)
	defer unix.Close(client)
	fd, far := socketPair(t)
	var e wire.Encoder
	(&wire.Attach{Key: r.keys[0]}).Encode(&e)
	if _, err := unix.Write(far, e.Buf()); err != nil {
		t.Fatal(err)
	}
	unix.Close(far)
	r.handle(&attaching{fd: fd}, false)
	if len(r.keys) != 1 {
		t.Error("it was taken")
	}
}

// TestResumeLies: positions outside of what is kept end the session.
func TestResumeLies(t *testing.T) {
	addr := graceWorker(t, time.Minute)
	for _, lie := range []uint64{1 << 20, 1 << 63} {
		r := startResumable(t, addr)
		if !r.ask(1) {
			t.Fatal("no answer")
		}
		_, _, err := r.attach(r.Session, r.Key, r.got+lie)
		wantRefused(t, "a lie", err)
		if r.ask(2) {
			t.Error("the session of a liar goes on")
		}
	}
}

// TestAttachRefused: whoever cannot go on with a session is told why, over a network and over a Unix socket.
func TestAttachRefused(t *testing.T) {
	// Sessions without a grace, or over shared memory, end with their connections.
	_, local := startWorker(t, func(c *Config) { c.Grace = time.Minute })
	for _, addr := range []string{graceWorker(t, 0), local} {
		k := dialRaw(t, addr, [16]byte{})
		r := &resumable{t: t, addr: addr}
		for range 2 * attachBurst { // one after another
			_, _, err := r.attach(0, [16]byte{1}, 0)
			wantRefused(t, addr, err)
			if err == nil || !strings.Contains(err.Error(), "ends with its connection") {
				t.Fatalf("%s: %v", addr, err)
			}
		}
		if re := k.wait(wire.OpBeat, 0, nil); re.result != 0 {
			t.Errorf("the session was disturbed: %d", re.result)
		}
	}
	addr := graceWorker(t, time.Minute)
	r := startResumable(t, addr)
	h := testHello(wire.SessionAttach)
	h.Mem = uint64(r.Session)
	answers := make(chan error, maxAttaching+1)
	for range maxAttaching + 1 {
		c, err := connect(addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var b [wire.HelloSize]byte
		h.Encode(&b)
		_, _ = c.Write(b[:]) // and no ATTACH
		_ = c.SetReadDeadline(time.Now().Add(helloTime - time.Second))
		go func() { _, err := wire.ReadWelcome(c); answers <- err }()
	}
	var no *wire.Refusal
	// The session's oldest, which need not be the first of these: the supervisor hands them on beside each other.
	if err := <-answers; !errors.As(err, &no) || no.Status != wire.StatusBusy {
		t.Errorf("one of %d that say nothing: %v", maxAttaching+1, err)
	}
	busy := false
	for range 2 * attachBurst {
		_, _, err := r.attach(r.Session, [16]byte{1}, 0)
		if !errors.As(err, &no) || no.Status != wire.StatusLease && no.Status != wire.StatusBusy {
			t.Fatalf("one of many attempts: %v", err)
		}
		busy = busy || no.Status == wire.StatusBusy
	}
	if !busy || !r.ask(1) {
		t.Errorf("of many attempts some were refused by their number: %v, or the session was disturbed", busy)
	}
}

// TestRefusedAfterDataPort: the daemon's data port writes its answer into a socket that the session has already. Whatever a session refuses
// before the client's HELLO, its reason comes after that answer.
func TestRefusedAfterDataPort(t *testing.T) {
	late, end := resumptionOf(t)
	defer unix.Close(end)
	late.paid = time.Now().Add(time.Hour)
	s := &session{}
	s.tracing.asking.Store(maxAsking)
	for _, c := range []struct {
		what   string
		kind   uint32
		give   func(fd int)
		status uint32
	}{
		{"more attempts than the pace", wire.SessionAttach, func(fd int) { late.take(fd, true) }, wire.StatusBusy},
		{"a session that ends with its connection", wire.SessionAttach, func(fd int) { new(client).attachable()(fd, true) }, wire.StatusLease},
		{"more traces than one at a time", wire.SessionTrace, s.traceTo, wire.StatusBusy},
	} {
		near, far := socketPair(t)
		port, err := unix.Dup(near)
		if err != nil {
			t.Fatal(err)
		}
		c.give(near)
		answer := []byte("answer of the data port")
		if _, err := unix.Write(port, answer); err != nil {
			t.Fatal(err)
		}
		unix.Close(port)
		f := os.NewFile(uintptr(far), "client")
		defer f.Close()
		got := make([]byte, len(answer))
		if _, err := io.ReadFull(f, got); err != nil || string(got) != string(answer) {
			t.Fatalf("%s: %q comes first, error %v", c.what, got, err)
		}
		h := testHello(c.kind)
		var b [wire.HelloSize]byte
		h.Encode(&b)
		if _, err := f.Write(b[:]); err != nil {
			t.Fatal(err)
		}
		_, err = wire.ReadWelcome(f)
		if no := (*wire.Refusal)(nil); !errors.As(err, &no) || no.Status != c.status {
			t.Errorf("%s: %v", c.what, err)
		}
	}
}

// TestCrowdedBeforeHello: a connection that makes room before its HELLO came is closed, and nothing is written before that.
func TestCrowdedBeforeHello(t *testing.T) {
	r, client := resumptionOf(t)
	defer unix.Close(client)
	var oldest *os.File
	for i := range maxAttaching + 1 {
		near, far := socketPair(t)
		f := os.NewFile(uintptr(far), "client")
		defer f.Close()
		if i == 0 {
			oldest = f
		}
		r.take(near, true)
	}
	if b, err := io.ReadAll(oldest); err != nil || len(b) > 0 {
		t.Errorf("%q, error %v", b, err)
	}
}

// TestResumeFlood: connections that say nothing, and endless attempts, keep nobody from its session for long.
func TestResumeFlood(t *testing.T) {
	addr := graceWorker(t, time.Minute)
	r := startResumable(t, addr)
	if !r.ask(1) {
		t.Fatal("no answer")
	}
	h := testHello(wire.SessionAttach)
	h.Mem = uint64(r.Session)
	var b [wire.HelloSize]byte
	h.Encode(&b)
	for range 30 {
		c, err := connect(addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write(b[:]) // and no ATTACH
	}
	r.goOnSoon()
	for range 200 {
		if c, _, err := r.attach(r.Session, [16]byte{}, 0); err == nil {
			c.Close()
			t.Fatal("welcome without a key")
		}
	}
	if !r.ask(2) {
		t.Fatal("the session was disturbed")
	}
	r.goOnSoon()
	if !r.ask(3) {
		t.Fatal("no answer")
	}
}

// TestGrace: a session whose connection is lost lives for the grace and no longer; without one it ends at once, and is not offered.
func TestGrace(t *testing.T) {
	r := startResumable(t, graceWorker(t, time.Minute))
	if !r.ask(1) {
		t.Fatal("no answer")
	}
	r.c.Close()
	r.goOn()
	if !r.ask(2) {
		t.Fatal("no answer after the connection was made again")
	}
	addr := graceWorker(t, 300*time.Millisecond)
	r = startResumable(t, addr)
	if !r.ask(1) {
		t.Fatal("no answer")
	}
	lost := time.Now()
	r.c.Close()
	for {
		c, err := connect(addr)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		// A wrong key is no way to go on, and says whether there is a session.
		_, _, err = r.attach(r.Session, [16]byte{1}, 0)
		if err != nil && strings.Contains(err.Error(), "ended") {
			break
		}
		if time.Since(lost) > 5*time.Second {
			t.Fatalf("a session in its grace of 300ms after 5 s: %v", err)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if took := time.Since(lost); took < 300*time.Millisecond {
		t.Errorf("ended after %v", took)
	}
	h := testHello(wire.SessionCompute)
	h.Features = wire.FeatureResume
	c, p, err := dialHello(graceWorker(t, 0), h)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var snap wire.Snapshot
	if err := snap.Decode(p); err != nil || snap.Features != 0 {
		t.Errorf("without grace: features %#x, %v", snap.Features, err)
	}
}

func socketPair(t *testing.T) (int, int) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return p[0], p[1]
}

// accountedSession is a session with its part of an account, and the account's file as the daemon reads it.
func accountedSession(t *testing.T) (*session, *account.Session, *account.File) {
	t.Helper()
	loadFakeDriver(t)
	l, err := account.NewBook([]uint64{testMem}).Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	s, acct := fakeSessionOf(t, l, nil, nil)
	t.Cleanup(func() { s.rd.Close(); acct.Close() })
	fd, err := unix.Dup(l.FD())
	if err != nil {
		t.Fatal(err)
	}
	file, err := account.FromFD(fd, []uint64{testMem})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	return s, acct, file
}

// Cuts are counted in the account with their time: one after which the client was back, and one that it did not come back from.
func TestCutsCounted(t *testing.T) {
	s, acct, file := accountedSession(t)
	const grace = 100 * time.Millisecond
	count := func(want uint64, least time.Duration) {
		t.Helper()
		slot, err := file.Slot(0)
		if err != nil || slot.Cuts != want || slot.CutTime < least || slot.CutTime > 10*time.Second {
			t.Errorf("%d cuts, %v, error %v: want %d, at least %v", slot.Cuts, slot.CutTime, err, want, least)
		}
	}
	old, client := socketPair(t)
	st := &control.Start{GraceMS: uint32(grace / time.Millisecond), Exchange: true, Hello: wire.Hello{Kind: wire.SessionCompute, Features: wire.FeatureResume}}
	r, err := newResumption(slog.New(slog.DiscardHandler), st, old, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer r.stream.Close()
	r.cuts = acct.Cuts()
	noted := make(chan time.Duration, 8)
	r.cut = func(since time.Duration) {
		acct.Cut(since)
		slot, err := file.Slot(0)
		if err != nil {
			t.Error(err)
		}
		noted <- slot.Cut
	}
	next, far := socketPair(t)
	if err := r.join(next, &wire.Attach{Key: r.keys[0]}); err != nil {
		t.Fatal(err)
	}
	unix.Close(client)
	count(1, 1)
	// The client did not hear of that connection, and comes with the key that it has: the cut went on.
	before, err := file.Slot(0)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(far)
	next, far = socketPair(t)
	if err := r.join(next, &wire.Attach{Key: r.keys[0]}); err != nil {
		t.Fatal(err)
	}
	count(1, before.CutTime+1)
	over := make(chan int, 1)
	s.exit = func(status int) { over <- status }
	go s.outlive(r)
	unix.Close(far)
	if began := <-noted; began <= 0 || began > boottime.Now() {
		t.Errorf("the account says that the cut began at %v", began)
	}
	next, far = socketPair(t)
	if err := r.join(next, &wire.Attach{Key: r.keys[len(r.keys)-1]}); err != nil {
		t.Fatal(err)
	}
	if began := <-noted; began != 0 {
		t.Errorf("the client is back, and the account says that the cut began at %v", began)
	}
	unix.Close(far)
	<-over
	count(3, grace)
}

// The account has the round trip of a connection over a network; a Unix socket has none.
func TestLinkNoted(t *testing.T) {
	s, acct, file := accountedSession(t)
	s.network = acct.Link()
	noted := func(fd int) time.Duration {
		t.Helper()
		stream, err := wire.NewSocketStream(fd, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		defer stream.Close()
		s.stream = stream
		s.noteLink()
		slot, err := file.Slot(0)
		if err != nil {
			t.Fatal(err)
		}
		return slot.RoundTrip
	}
	near, far := socketPair(t)
	defer unix.Close(far)
	if d := noted(near); d != 0 {
		t.Errorf("a Unix socket has a round trip of %v", d)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	conn, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	f, err := conn.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	conn.Close()
	tcp, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if d := noted(tcp); d <= 0 || d > time.Minute {
		t.Errorf("loopback has a round trip of %v", d)
	}
}

// resumptionOf returns the worker's side of a session, and the client's end of its connection.
func resumptionOf(t *testing.T) (r *resumption, client int) {
	t.Helper()
	old, client := socketPair(t)
	st := &control.Start{GraceMS: 1000, Exchange: true, Hello: wire.Hello{Kind: wire.SessionCompute, Features: wire.FeatureResume}}
	r, err := newResumption(slog.New(slog.DiscardHandler), st, old, time.Second)
	if err != nil || r == nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.stream.Close() })
	return r, client
}

// FuzzAttach is what may come where a lost connection is made again: nothing but the key gets the session, and no position that is not kept.
func FuzzAttach(f *testing.F) {
	hello := func(kind uint32) []byte {
		h := wire.Hello{Version: wire.Version, Kind: kind, Fingerprint: apiFingerprint}
		var b [wire.HelloSize]byte
		h.Encode(&b)
		return b[:]
	}
	key := [16]byte{1, 2, 3}
	attach := func(k [16]byte, at uint64) []byte {
		var e wire.Encoder
		(&wire.Attach{Key: k, Received: at}).Encode(&e)
		return e.Buf()
	}
	f.Add(append(hello(wire.SessionAttach), attach(key, 0)...), true)
	f.Add(append(hello(wire.SessionCompute), attach(key, 0)...), true)
	f.Add(attach(key, 10), false)
	f.Add(attach(key, 11), false)
	f.Add(attach([16]byte{9}, 0), false)
	f.Add(attach(key, 0)[:20], false)
	f.Fuzz(func(t *testing.T, in []byte, raw bool) {
		r, client := resumptionOf(t)
		defer unix.Close(client)
		r.keys[0] = key
		if err := r.stream.Write([][]byte{make([]byte, 10)}); err != nil {
			t.Fatal(err)
		}
		fd, far := socketPair(t)
		defer func() { unix.Close(far) }()
		_, _ = unix.Write(far, in)
		whole := wire.AttachSize
		if raw {
			whole += wire.HelloSize
		}
		if len(in) < whole {
			_ = unix.Shutdown(far, unix.SHUT_WR) // nothing more is waited for
		}
		r.handle(&attaching{fd: fd}, raw)
		a := in
		if raw {
			var h wire.Hello
			if len(in) < wire.HelloSize || h.Decode((*[wire.HelloSize]byte)(in)) != nil || h.Version != wire.Version || h.Kind != wire.SessionAttach {
				a = nil
			} else {
				a = in[wire.HelloSize:]
			}
		}
		good := len(a) >= wire.AttachSize && [16]byte(a) == key && binary.LittleEndian.Uint64(a[16:]) <= 10
		if taken := len(r.keys) > 1; taken != good {
			t.Fatalf("taken: %v, good: %v", taken, good)
		}
		if len(a) >= wire.AttachSize { // a whole ATTACH is answered, whatever it says
			if err := unix.SetsockoptTimeval(far, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
				t.Fatal(err)
			}
			f := os.NewFile(uintptr(far), "client")
			defer func() { far = -1; f.Close() }()
			_, err := wire.ReadWelcome(f)
			if no := (*wire.Refusal)(nil); good != (err == nil) || err != nil && (!errors.As(err, &no) || no.Status != wire.StatusLease) {
				t.Fatalf("good: %v, answered: %v", good, err)
			}
		}
		_ = r.stream.Close()
	})
}
