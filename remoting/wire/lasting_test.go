package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// link gives both ends of a TCP connection: the stream's, as a descriptor, and the client's.
func link(t testing.TB) (int, *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	f, err := a.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	a.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	return fd, c.(*net.TCPConn)
}

func lasting(t testing.TB) (*LastingStream, *net.TCPConn) {
	t.Helper()
	fd, c := link(t)
	s, err := NewLastingStream(fd, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, c
}

func piece(received uint64, flags uint32, data []byte) []byte {
	var h [PieceSize]byte
	binary.LittleEndian.PutUint64(h[:], received)
	binary.LittleEndian.PutUint32(h[8:], uint32(len(data)))
	binary.LittleEndian.PutUint32(h[12:], flags)
	return append(h[:], data...)
}

// modelClient is the client's side, written as plainly as can be: it has everything in memory.
type modelClient struct {
	t    testing.TB
	s    *LastingStream
	rand *rand.Rand

	mu    sync.Mutex
	cond  sync.Cond
	c     *net.TCPConn
	gen   int
	out   []byte // everything that is to be sent
	sent  int    // over this connection, or arrived over earlier ones
	acked int
	in    []byte // everything that has come
	over  bool   // receive has returned: it makes no connection again
}

// send writes pieces until everything has been sent and acknowledged.
func (m *modelClient) send(done chan<- struct{}) {
	defer close(done)
	m.mu.Lock()
	defer m.mu.Unlock()
	told := 0
	for m.acked < len(m.out) || len(m.in) > told {
		n := min(len(m.out)-m.sent, PieceWindow-(m.sent-m.acked), 1+m.rand.IntN(300<<10))
		if n == 0 && len(m.in) == told {
			m.cond.Wait()
			continue
		}
		told = len(m.in)
		p, c, gen := piece(uint64(told), 0, m.out[m.sent:m.sent+n]), m.c, m.gen
		m.mu.Unlock()
		_, err := c.Write(p)
		m.mu.Lock()
		if gen == m.gen && err == nil {
			m.sent += n
		}
		for gen == m.gen && err != nil && !m.over {
			m.cond.Wait()
		}
		if gen == m.gen && err != nil {
			m.mu.Unlock()
			m.again()
			m.mu.Lock()
		}
	}
}

// receive reads want bytes of the stream, and makes connections again.
func (m *modelClient) receive(want int) {
	for len(m.in) < want || m.acked < len(m.out) {
		var h [PieceSize]byte
		_, err := io.ReadFull(m.c, h[:])
		if err == nil {
			n := int(binary.LittleEndian.Uint32(h[8:]))
			m.mu.Lock()
			if acked := int(binary.LittleEndian.Uint64(h[:])); acked < m.acked {
				m.t.Errorf("%d bytes received, after %d", acked, m.acked)
			} else {
				m.acked = acked
			}
			m.cond.Broadcast()
			m.mu.Unlock()
			b := make([]byte, n)
			n, err = io.ReadFull(m.c, b)
			m.mu.Lock()
			m.in = append(m.in, b[:n]...)
			m.cond.Broadcast()
			m.mu.Unlock()
		}
		if err != nil {
			m.again()
		}
	}
	m.mu.Lock()
	m.over = true
	m.cond.Broadcast()
	m.mu.Unlock()
}

// again makes a connection in the place of one that was lost. Attach tells what has arrived.
func (m *modelClient) again() {
	m.c.Close()
	fd, c := link(m.t)
	var at uint64
	if _, err := m.s.Attach(fd, uint64(len(m.in)), true, func(received uint64, _ error) error { at = received; return nil }); err != nil {
		m.t.Errorf("attach: %v", err)
		panic(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.c, m.sent, m.acked = c, int(at), int(at)
	m.gen++
	m.cond.Broadcast()
}

// cut ends the present connection in one of the ways in which that happens.
func (m *modelClient) cut(how int) {
	m.mu.Lock()
	c := m.c
	m.mu.Unlock()
	switch how {
	case 0:
		_ = c.SetLinger(0)
		c.Close()
	case 1:
		c.Close()
	case 2:
		_ = c.CloseWrite()
		time.Sleep(time.Millisecond)
		c.Close()
	case 3: // half-open: only the client knows
		_ = c.CloseRead()
	}
}

// TestLastingModel moves random bytes both ways while connections are cut at random moments, and the worker's reader
// is at times busy with writing. SLUICE_CUTS sets the number of cuts.
func TestLastingModel(t *testing.T) {
	cuts := 100
	if n, err := strconv.Atoi(os.Getenv("SLUICE_CUTS")); err == nil {
		cuts = n
	}
	if testing.Short() {
		cuts /= 10
	}
	for made, seed := 0, uint64(0); made < cuts && !t.Failed(); seed++ {
		made += lastingRun(t, seed)
	}
}

func lastingRun(t *testing.T, seed uint64) (cuts int) {
	s, c := lasting(t)
	rnd := rand.New(rand.NewPCG(seed, 1))
	up, down := make([]byte, rnd.IntN(24<<20)), make([]byte, rnd.IntN(24<<20))
	for _, b := range [][]byte{up, down} {
		for i := 0; i+8 <= len(b); i += 8 {
			binary.LittleEndian.PutUint64(b[i:], rnd.Uint64())
		}
	}
	m := &modelClient{t: t, s: s, rand: rand.New(rand.NewPCG(seed, 2)), c: c, out: up}
	m.cond.L = &m.mu
	stop := make(chan struct{})
	var cutter, worker sync.WaitGroup
	cutter.Add(1)
	go func() {
		defer cutter.Done()
		rnd := rand.New(rand.NewPCG(seed, 3))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rnd.IntN(1+rnd.IntN(4000))) * time.Microsecond):
				m.cut(rnd.IntN(4))
				cuts++
			}
		}
	}()
	// The worker: one goroutine that reads, and writes some of what is to be sent, as the executor does; one that writes.
	var wmu sync.Mutex
	rest := down
	write := func(n int) bool {
		wmu.Lock()
		defer wmu.Unlock()
		n = min(n, len(rest))
		k := n / 3
		if err := s.Write([][]byte{rest[:k], nil, rest[k:n]}); err != nil {
			t.Errorf("write: %v", err)
			return false
		}
		rest = rest[n:]
		return len(rest) > 0
	}
	var got []byte
	worker.Add(2)
	go func() {
		defer worker.Done()
		rnd := rand.New(rand.NewPCG(seed, 4))
		b := make([]byte, 512<<10)
		for len(got) < len(up) {
			n, err := s.Read2(b[:1+rnd.IntN(len(b))], nil)
			if err != nil {
				t.Errorf("read: %v", err)
				return
			}
			got = append(got, b[:n]...)
			if rnd.IntN(4) == 0 {
				write(1 + rnd.IntN(2<<20))
			}
		}
	}()
	go func() {
		defer worker.Done()
		rnd := rand.New(rand.NewPCG(seed, 5))
		for write(1 + rnd.IntN(1<<20)) {
		}
	}()
	sent := make(chan struct{})
	go m.send(sent)
	m.receive(len(down))
	<-sent
	worker.Wait()
	close(stop)
	cutter.Wait()
	if !bytes.Equal(got, up) || !bytes.Equal(m.in, down) {
		t.Errorf("seed %d: %d of %d bytes up, %d of %d down, or others than were sent", seed, len(got), len(up), len(m.in), len(down))
	}
	return cuts
}

// A goodbye ends the stream, also where nobody reads; a connection that is lost without one does after the grace.
func TestLastingEnds(t *testing.T) {
	ends := func(s *LastingStream, grace time.Duration) error {
		end := make(chan error, 1)
		go func() { end <- s.Watch(grace, func(time.Duration) {}, func(time.Duration) {}, func(time.Duration) {}) }()
		select {
		case err := <-end:
			return err
		case <-time.After(10 * time.Second):
			return errors.New("no end")
		}
	}
	s, c := lasting(t)
	_, _ = c.Write(append(piece(0, 0, make([]byte, 32<<10)), piece(0, PieceBye, nil)...))
	c.Close()
	if err := ends(s, time.Hour); !errors.Is(err, io.EOF) {
		t.Errorf("goodbye behind what nobody reads: %v", err)
	}
	s, c = lasting(t)
	_, _ = c.Write(piece(0, PieceBye, nil))
	_ = c.CloseWrite()
	if err := ends(s, time.Hour); !errors.Is(err, io.EOF) {
		t.Errorf("goodbye of a client that waits: %v", err)
	}
	_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("its connection ends before the process does: %v", err)
	}
	s, c = lasting(t)
	began := time.Now()
	c.Close()
	if err := ends(s, 50*time.Millisecond); !errors.Is(err, ErrGrace) || time.Since(began) < 50*time.Millisecond {
		t.Errorf("no goodbye: %v after %v", err, time.Since(began))
	}
	if err := s.Write([][]byte{{1}}); !errors.Is(err, ErrGrace) {
		t.Errorf("write after the end: %v", err)
	}
	if _, err := s.Read2(make([]byte, 1), nil); !errors.Is(err, ErrGrace) {
		t.Errorf("read after the end: %v", err)
	}
}

// What a client must not do ends the stream, or is not taken.
func TestLastingHostile(t *testing.T) {
	for name, p := range map[string][]byte{
		"acknowledges what was not sent": piece(101, 0, nil),
		"unknown flag":                   piece(0, 2, nil),
		"goodbye with bytes":             piece(0, PieceBye, []byte{1}),
		"beyond the window":              func() []byte { p := piece(0, 0, nil); binary.LittleEndian.PutUint32(p[8:], PieceWindow+1); return p }(),
		"takes back":                     append(piece(50, 0, nil), piece(49, 0, nil)...),
	} {
		s, c := lasting(t)
		if err := s.Write([][]byte{make([]byte, 100)}); err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(p)
		if n, err := s.Read2(make([]byte, 1), nil); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: %d bytes, %v", name, n, err)
		}
	}
	// Nobody reads, and a writer waits for room: what comes is kept, but not without a limit.
	s, c := lasting(t)
	go func() { _, _ = io.Copy(io.Discard, c) }()
	go func() {
		for {
			if _, err := c.Write(piece(0, 0, make([]byte, 1<<20))); err != nil {
				return
			}
		}
	}()
	if err := s.Write([][]byte{make([]byte, PieceWindow+1)}); !errors.Is(err, errAhead) {
		t.Errorf("a client that sends without end: %v", err)
	}
	// Positions of a new connection.
	for _, at := range []uint64{49, 101, 1 << 63} {
		s, c := lasting(t)
		if err := s.Write([][]byte{make([]byte, 100)}); err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(piece(50, 0, []byte{1}))
		if _, err := s.Read2(make([]byte, 1), nil); err != nil {
			t.Fatal(err)
		}
		fd, _ := link(t)
		var told error
		if _, err := s.Attach(fd, at, true, func(_ uint64, err error) error { told = err; return nil }); !errors.Is(err, ErrPosition) || !errors.Is(told, ErrPosition) {
			t.Errorf("received %d of 100, 50 acknowledged: %v, the client was told %v", at, err, told)
		}
	}
}

// TestLateAttempt: an attempt that the client made before the connection that it has ends neither that stream nor, once something has come
// over it, takes its place.
func TestLateAttempt(t *testing.T) {
	s, _ := lasting(t)
	if err := s.Write([][]byte{make([]byte, 100)}); err != nil {
		t.Fatal(err)
	}
	attach := func(at uint64, newest bool) (net.Conn, error) {
		fd, c := link(t)
		_, err := s.Attach(fd, at, newest, func(uint64, error) error { return nil })
		return c, err
	}
	if _, err := attach(60, true); err != nil {
		t.Fatal(err)
	}
	if _, err := attach(50, false); !errors.Is(err, ErrLate) {
		t.Errorf("less than the client has said since: %v", err)
	}
	c, err := attach(60, false)
	if err != nil {
		t.Fatalf("the same position: %v", err)
	}
	if _, err := c.Write(piece(70, 0, []byte{1})); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read2(make([]byte, 1), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := attach(70, false); !errors.Is(err, ErrLate) {
		t.Errorf("after something has come: %v", err)
	}
	if _, err := attach(70, true); err != nil {
		t.Errorf("the client's own next attempt: %v", err)
	}
}

// TestWatchOver: Watch calls over once, when the grace has ended, and readers have no error before over has returned.
func TestWatchOver(t *testing.T) {
	s, c := lasting(t)
	c.Close()
	read := make(chan error, 1)
	go func() {
		_, err := s.Read2(make([]byte, 1), nil)
		read <- err
	}()
	var calls int
	err := s.Watch(20*time.Millisecond, func(time.Duration) {}, func(time.Duration) {}, func(time.Duration) {
		calls++
		select {
		case err := <-read:
			t.Errorf("a reader has %v before over has returned", err)
		case <-time.After(20 * time.Millisecond):
		}
	})
	if !errors.Is(err, ErrGrace) || calls != 1 {
		t.Errorf("Watch: %v after %d calls of over", err, calls)
	}
	if err := <-read; !errors.Is(err, ErrGrace) {
		t.Errorf("the reader: %v", err)
	}
}

// TestWatchOfAnother: Watch sees the end of the last connection of many that took each other's place while it looked.
func TestWatchOfAnother(t *testing.T) {
	s, c := lasting(t)
	watched := make(chan error, 1)
	go func() {
		watched <- s.Watch(100*time.Millisecond, func(time.Duration) {}, func(time.Duration) {}, func(time.Duration) {})
	}()
	for i := range 300 {
		fd, next := link(t)
		if _, err := s.Attach(fd, 0, true, func(uint64, error) error { return nil }); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		c.Close()
		c = next
		time.Sleep(time.Duration(i%20) * 10 * time.Microsecond)
	}
	c.Close()
	// The executor's read finds the end, as Watch does.
	if _, err := s.Read2(make([]byte, 1), nil); !errors.Is(err, ErrGrace) {
		t.Errorf("a read after the end: %v", err)
	}
	select {
	case err := <-watched:
		if !errors.Is(err, ErrGrace) {
			t.Errorf("Watch: %v", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("Watch does not see the end of the last connection")
	}
}
