package probe

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/data"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// The test's own program is the relay of encrypted connections, as sluiced is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "relay" {
		if err := data.RelayMain(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// short is a plan for tests.
var short = Plan{exchanges: 20, exchanging: 100 * time.Millisecond, flow: 60 * time.Millisecond, bytes: 4 << 20, bounded: true}

// port is an owner's data port with its admission.
type port struct {
	*Admission
	server *data.Server
	addr   string
}

func newPort(t *testing.T) *port {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &port{Admission: NewAdmission("gpu01", slog.New(slog.DiscardHandler)), addr: l.Addr().String()}
	p.server = data.NewServer(data.Config{Addr: p.addr, PerLease: 1, Admit: func(context.Context, lease.SessionRequest, *os.File) error {
		t.Error("a probe's connection became a session's")
		return errors.New("no session here")
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

// Probe implements lease.Prober as an owner does.
func (p *port) Probe(ctx context.Context, host string, r lease.ProbeRequest) ([]lease.Offer, error) {
	slot, err := p.Begin(context.WithoutCancel(ctx), host, r)
	if err != nil {
		return nil, err
	}
	return p.server.OfferProbe(r, slot.Take)
}

func (p *port) dial(t *testing.T, encrypt bool) []*Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	d := data.Dialer{Encrypt: encrypt}
	files, err := d.Probe(ctx, p, p.addr, "node01", lease.ProbeRequest{UID: 1000, Connections: Connections})
	if err != nil {
		t.Fatal(err)
	}
	var conns []*Conn
	for _, f := range files {
		c, err := NewConn(f.Conn, f.TCP)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		conns = append(conns, c)
	}
	return conns
}

// begin begins one as an owner does.
func (a *port) begin(t *testing.T, r lease.ProbeRequest) *Slot {
	t.Helper()
	a.Await(t.Context(), "node02", r.UID)
	s, err := a.Begin(t.Context(), "node02", r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// idle waits until the owner would take another probe.
func (p *port) idle(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		who := p.who
		p.mu.Unlock()
		if who == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the owner is still probed by %s", who)
		}
	}
}

// A probe through the data port of an owner, over loopback, finds all that it looks for.
func TestMeasure(t *testing.T) {
	for _, encrypt := range []bool{false, true} {
		p := newPort(t)
		conns := p.dial(t, encrypt)
		ctx, cancel := context.WithTimeout(t.Context(), Life)
		v, err := Measure(ctx, conns, short)
		cancel()
		if err != nil {
			t.Fatalf("encrypt %v: %v", encrypt, err)
		}
		if v.Exchanges < leastExchanges || v.RoundTrip <= 0 || v.RoundTripMedian < v.RoundTrip || v.RoundTrip99 < v.RoundTripMedian {
			t.Errorf("round trips %+v", v)
		}
		if v.Ahead.Abs() > v.RoundTrip { // it is one machine
			t.Errorf("a clock that is %v ahead of itself, with a round trip of %v", v.Ahead, v.RoundTrip)
		}
		var got []lease.ProbeFlow
		for _, f := range v.Flows {
			if f.Bytes == 0 || f.Segments == 0 || f.Bytes > uint64(short.bytes)+Connections*bufferSize {
				t.Errorf("encrypt %v: a flow of %+v", encrypt, f)
			}
			got = append(got, lease.ProbeFlow{Up: f.Up, Connections: f.Connections})
		}
		if want := []lease.ProbeFlow{{Up: true, Connections: 1}, {Connections: 1}, {Up: true, Connections: 4}, {Connections: 4}}; len(got) != 4 || got[0] != want[0] || got[1] != want[1] || got[2] != want[2] || got[3] != want[3] {
			t.Errorf("flows %+v", got)
		}
		for _, e := range []lease.ProbeEnd{v.From, v.To} {
			if e.Device != "lo" || e.DeviceMTU == 0 || e.PathMTU == 0 || e.Segment == 0 || e.SendBuffer == 0 || e.ReceiveBuffer == 0 || e.DeviceSpeed != 0 {
				t.Errorf("an end of %+v", e)
			}
		}
		for _, c := range conns {
			_ = c.Close()
		}
		p.idle(t)
	}
}

// A second probe is refused with the first one's name, whoever asks; the end of one connection ends a probe, and a user's next one has to wait.
func TestOneAtATime(t *testing.T) {
	p := newPort(t)
	conns := p.dial(t, false)
	refused := func(uid uint32, want string) {
		t.Helper()
		_, err := p.Begin(t.Context(), "node02", lease.ProbeRequest{UID: uid, Connections: 4})
		if lease.CodeOf(err) != lease.Conflict || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	refused(0, "gpu01 is being probed from node01; try again in at most ")
	refused(1000, "gpu01 is being probed from node01")
	if _, err := conns[0].Write(append(message(kindData, []byte("hello")), message(kindEnd, nil)...)); err != nil {
		t.Fatal(err)
	}
	_ = conns[0].SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := expect(conns[0].in, kindSamples); err != nil {
		t.Fatal(err)
	}
	_ = conns[2].Close()
	for i, c := range conns {
		if i == 2 {
			continue
		}
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("connection %d: %v", i, err)
		}
	}
	p.idle(t)
	refused(1000, "has just been probed; try again in ")
	// Root's next one has to wait only until relays would have ended, and is not refused for that.
	s := p.begin(t, lease.ProbeRequest{Connections: 4})
	s.End()
	// One to which nobody came leaves no pause.
	s = p.begin(t, lease.ProbeRequest{Connections: 4})
	s.End()
	p.idle(t)
	for _, r := range []lease.ProbeRequest{{}, {Connections: 5}, {Connections: 1 << 31}, {Connections: 2, Encrypt: true, CertHashes: make([][]byte, 1)}} {
		if _, err := p.Begin(t.Context(), "node02", r); lease.CodeOf(err) != lease.Invalid {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

// A connection that comes when the probe is over, or beyond those that were asked for, is closed.
func TestLateConnection(t *testing.T) {
	p := NewAdmission("gpu01", slog.New(slog.DiscardHandler))
	s, err := p.Begin(t.Context(), "node01", lease.ProbeRequest{Connections: 1})
	if err != nil {
		t.Fatal(err)
	}
	take := func() (net.Conn, error) {
		a, conn, tcp := pair(t)
		free, err := s.Take(conn, tcp)
		if err == nil {
			free()
		}
		return a, err
	}
	first, err := take()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := take(); !errors.Is(err, errOver) {
		t.Errorf("one too many: %v", err)
	}
	_ = first.Close()
	<-s.ctx.Done()
	if _, err := take(); !errors.Is(err, errOver) {
		t.Errorf("one too late: %v", err)
	}
}

// A probe whose connections do not come is over long before its time.
func TestNobodyComes(t *testing.T) {
	p := &port{Admission: NewAdmission("gpu01", slog.New(slog.DiscardHandler))}
	for _, come := range []int{0, 1} {
		s := p.begin(t, lease.ProbeRequest{Connections: 2})
		s.mu.Lock()
		s.gather.Reset(time.Millisecond) // instead of seconds
		s.mu.Unlock()
		for range come {
			_, conn, tcp := pair(t)
			if free, err := s.Take(conn, tcp); err == nil {
				free()
			}
			s.mu.Lock()
			s.gather.Reset(time.Millisecond)
			s.mu.Unlock()
		}
		<-s.ctx.Done()
		if err := s.ctx.Err(); !errors.Is(err, context.Canceled) {
			t.Errorf("%d of 2 connections came: %v", come, err)
		}
		p.idle(t)
	}
}

// The gate stays shut while a relay still carries a connection of the probe.
func TestRelayed(t *testing.T) {
	p := &port{Admission: NewAdmission("gpu01", slog.New(slog.DiscardHandler))}
	s := p.begin(t, lease.ProbeRequest{Connections: 1})
	_, conn, tcp := pair(t)
	free, err := s.Take(conn, tcp)
	if err != nil {
		t.Fatal(err)
	}
	s.End()
	over := make(chan struct{})
	go func() {
		defer close(over)
		s.serving.Wait()
	}()
	select {
	case <-over:
		t.Error("the probe is over, and its relay is not")
	case <-time.After(50 * time.Millisecond):
	}
	if _, err := p.Begin(t.Context(), "node02", lease.ProbeRequest{Connections: 1}); lease.CodeOf(err) != lease.Conflict {
		t.Errorf("%v", err)
	}
	free()
	free()
	<-over
	p.idle(t)
}

// pair is a connection of TCP, and its other end as two files.
func pair(t *testing.T) (here net.Conn, conn, tcp *os.File) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if here, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = here.Close() })
	there, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	for _, f := range []**os.File{&conn, &tcp} {
		if *f, err = there.(*net.TCPConn).File(); err != nil {
			t.Fatal(err)
		}
	}
	return here, conn, tcp
}

// line passes connections of TCP on as a slower, longer link would.
type line struct {
	rate  float64       // bytes a second, in each direction, of all connections
	delay time.Duration // in each direction
	mu    [2]sync.Mutex
	free  [2]time.Time // when the link can take the next byte
}

// carry moves one direction of a connection.
func (l *line) carry(way int, dst, src net.Conn) {
	type piece struct {
		due time.Time
		b   []byte
	}
	ch := make(chan piece, 4096)
	go func() {
		for p := range ch {
			time.Sleep(time.Until(p.due))
			if _, err := dst.Write(p.b); err != nil {
				break
			}
		}
		_ = dst.Close()
		for range ch { // so that the reader does not wait
		}
	}()
	defer close(ch)
	for {
		b := make([]byte, 8<<10)
		n, err := src.Read(b)
		if err != nil {
			return
		}
		l.mu[way].Lock()
		if now := time.Now(); l.free[way].Before(now) {
			l.free[way] = now
		}
		l.free[way] = l.free[way].Add(time.Duration(float64(n) / l.rate * float64(time.Second)))
		at := l.free[way]
		l.mu[way].Unlock()
		time.Sleep(time.Until(at))
		ch <- piece{at.Add(l.delay), b[:n]}
	}
}

// through makes a probe's connections, whose other ends are the slot's, over the line.
func (l *line) through(t *testing.T, s *Slot, n int) []*Conn {
	t.Helper()
	var conns []*Conn
	for range n {
		here, conn, tcp := pair(t)
		there, ownersConn, ownersTCP := pair(t)
		go l.carry(0, there, here)
		go l.carry(1, here, there)
		free, err := s.Take(ownersConn, ownersTCP)
		if err != nil {
			t.Fatal(err)
		}
		free()
		c, err := NewConn(conn, tcp)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		conns = append(conns, c)
	}
	return conns
}

// The rate and the round trip of a link that is slow and long are found. What can be said whatever else the machine does: the rate is not above
// the link's, and the round trip is not below.
func TestLine(t *testing.T) {
	l := &line{rate: 20e6, delay: 2 * time.Millisecond}
	a := NewAdmission("gpu01", slog.New(slog.DiscardHandler))
	s, err := a.Begin(t.Context(), "node01", lease.ProbeRequest{Connections: 2})
	if err != nil {
		t.Fatal(err)
	}
	plan := short
	plan.flow = 100 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), Life)
	defer cancel()
	v, err := Measure(ctx, l.through(t, s, 2), plan)
	if err != nil {
		t.Fatal(err)
	}
	if v.RoundTrip < 2*l.delay {
		t.Errorf("a round trip of %v over a link of %v", v.RoundTrip, 2*l.delay)
	}
	for _, f := range v.Flows {
		if float64(f.Rate) > 1.1*l.rate || f.Rate == 0 {
			t.Errorf("%+v over a link of %.0f bytes a second", f, l.rate)
		}
	}
}

// One connection of several ends in the middle: so does the probe, at both sides, with what it was doing.
func TestOneFails(t *testing.T) {
	for _, encrypt := range []bool{false, true} {
		p := newPort(t)
		conns := p.dial(t, encrypt)
		plan := short
		plan.Moves = func() { _ = conns[2].Close() }
		ctx, cancel := context.WithTimeout(t.Context(), Life)
		v, err := Measure(ctx, conns, plan)
		cancel()
		var stopped *Stopped
		if !errors.As(err, &stopped) || !strings.HasPrefix(err.Error(), "copies ") || len(v.Flows) == 4 {
			t.Errorf("encrypt %v: %v, %+v", encrypt, err, v.Flows)
		}
		p.idle(t)
	}
}

// script is an owner that says anything: what is written to it is dropped, once it has begun to answer.
type script struct {
	net.Conn
	in    io.Reader
	quiet func() // nil, or called before a read that nothing comes to
	end   chan struct{}
	at    sync.Once
}

func newScript(in io.Reader) *script { return &script{in: in, end: make(chan struct{})} }

func (s *script) Read(b []byte) (int, error) {
	select {
	case <-s.end:
		return 0, os.ErrDeadlineExceeded
	default:
	}
	n, err := s.in.Read(b)
	if n == 0 && err == errSilent {
		if s.quiet != nil {
			s.quiet()
		}
		<-s.end
		return 0, os.ErrDeadlineExceeded
	}
	return n, err
}
func (s *script) Write(b []byte) (int, error) { return len(b), nil }
func (s *script) Close() error                { return nil }

// SetDeadline ends the script when the time has come already, as the end of a context does it.
func (s *script) SetDeadline(t time.Time) error {
	if time.Now().After(t) {
		s.at.Do(func() { close(s.end) })
	}
	return nil
}

var errSilent = errors.New("silent")

// silent is a reader that never has anything.
type silent struct{}

func (silent) Read([]byte) (int, error) { return 0, errSilent }

func (s *script) conn() *Conn { return &Conn{Conn: s, in: reader(s)} }

// endless repeats b.
type endless struct{ b []byte }

func (e endless) Read(p []byte) (int, error) {
	n := 0
	for n+len(e.b) <= len(p) {
		n += copy(p[n:], e.b)
	}
	return n, nil
}

// pongs are right answers to the first pings.
func pongs(n int) []byte {
	var b []byte
	for i := range n {
		b = append(b, message(kindPong, append([]byte{byte(i), 0, 0, 0, 0, 0, 0, 0}, make([]byte, 8)...))...)
	}
	return b
}

// Whatever an owner does, the probe ends, and says so.
func TestStrangeOwner(t *testing.T) {
	few := Plan{exchanges: 3, exchanging: time.Hour, flow: time.Millisecond, bytes: 1 << 20}
	answers := func(more ...[]byte) io.Reader {
		return bytes.NewReader(append(pongs(warmUp+3), bytes.Join(more, nil)...))
	}
	samples := func(list ...sample) []byte { return message(kindSamples, encodeSamples(list)) }
	st := message(kindState, new(state).encode())
	for what, c := range map[string]struct {
		in   io.Reader
		want string
	}{
		"nothing":               {silent{}, "round trips: no answer in time"},
		"an end":                {bytes.NewReader(nil), "round trips: the owner ended the connection"},
		"half a head":           {bytes.NewReader([]byte{2, 0}), "round trips: the owner ended the connection"},
		"garbage":               {endless{[]byte("GET / HTTP/1.1\r\n")}, "round trips: not a message of a probe"},
		"a large head":          {bytes.NewReader(message(kindPong, make([]byte, 1<<16))), "not a message of a probe: kind 2 with 65536 bytes"},
		"a wrong number":        {bytes.NewReader(message(kindPong, []byte("12345678abcdefgh"))), "answer 4050765991979987505 to number 0"},
		"another answer":        {bytes.NewReader(st), "kind 4, and 2 was due"},
		"pongs for ever":        {endless{message(kindPong, make([]byte, pongSize))}, "to number 1"},
		"no samples":            {io.MultiReader(answers(), silent{}), "copies to the owner: no answer in time"},
		"the end in the middle": {answers(), "copies to the owner: the owner ended the connection"},
		"too many":              {answers(samples(make([]sample, maxSamples+1)...)), "kind 8 with"},
		"backwards":             {answers(samples(sample{2, 1}, sample{1, 2})), "samples that go backwards"},
		"negative":              {answers(samples(sample{-1, 1})), "samples that go backwards"},
		"more than sent":        {answers(samples(sample{1, 0}, sample{2, 1 << 40})), "more has arrived than was sent"},
		"data for ever":         {io.MultiReader(answers(samples(), st), endless{message(kindData, make([]byte, dataSize))}), "copies from the owner: not a message of a probe: more DATA than was asked for"},
		"no data":               {io.MultiReader(answers(samples(), st), silent{}), "copies from the owner: no answer in time"},
		"no end":                {io.MultiReader(answers(samples(), st, message(kindData, make([]byte, 100))), silent{}), "copies from the owner: no answer in time"},
		"pong as data":          {answers(samples(), st, pongs(1)), "kind 2 within DATA"},
		"no state":              {answers(samples(), st, message(kindEnd, nil), pongs(1)), "kind 2, and 4 was due"},
	} {
		t.Run(what, func(t *testing.T) {
			s := newScript(c.in)
			ctx, cancel := context.WithCancel(t.Context())
			if strings.Contains(c.want, "in time") {
				s.quiet = cancel
			}
			_, err := Measure(ctx, []*Conn{s.conn()}, few)
			cancel()
			var stopped *Stopped
			if !errors.As(err, &stopped) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// What a node may make an owner do is bounded.
func TestStrangeNode(t *testing.T) {
	serve := func(uid uint32, in io.Reader) error {
		t.Helper()
		a := NewAdmission("gpu01", slog.New(slog.DiscardHandler))
		s, err := a.Begin(t.Context(), "node01", lease.ProbeRequest{UID: uid, Connections: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer s.End()
		return s.serve(newScript(in).conn())
	}
	ping := message(kindPing, make([]byte, pingSize))
	whole := message(kindData, make([]byte, dataSize))
	for what, c := range map[string]struct {
		uid  uint32
		in   io.Reader
		want error
	}{
		"nothing":           {0, bytes.NewReader(nil), io.EOF},
		"garbage":           {0, endless{[]byte("GET / HTTP/1.1\r\n")}, errGarbage},
		"an owner's answer": {0, bytes.NewReader(pongs(1)), errGarbage},
		"half a ping":       {0, bytes.NewReader(ping[:10]), io.ErrUnexpectedEOF},
		"pings for ever":    {0, endless{ping}, errGarbage},
		"a user's data":     {1000, endless{whole}, errGarbage},
		"no data":           {0, endless{message(kindData, nil)}, errGarbage},
		"a byte of data":    {0, endless{message(kindData, []byte{1})}, errGarbage},
		"flows of nothing":  {0, endless{append(message(kindData, nil), message(kindEnd, nil)...)}, errGarbage},
		"orders of nothing": {0, endless{message(kindSend, make([]byte, sendSize))}, errGarbage},
		"state for ever":    {0, endless{message(kindStateOf, nil)}, errGarbage},
		"a ping in data":    {1000, bytes.NewReader(append(whole, ping...)), errGarbage},
		"half of the data":  {1000, bytes.NewReader(whole[:100]), io.EOF},
		"an end":            {1000, bytes.NewReader(message(kindEnd, nil)), errGarbage},
	} {
		if err := serve(c.uid, c.in); !errors.Is(err, c.want) && !(c.want == io.EOF && errors.Is(err, io.ErrUnexpectedEOF)) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	// A user's probe is sent what one probe needs, however often it asks.
	a := NewAdmission("gpu01", slog.New(slog.DiscardHandler))
	s, err := a.Begin(t.Context(), "node01", lease.ProbeRequest{UID: 1000, Connections: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.End()
	out := newScript(endless{message(kindSend, []byte{0xff, 0xff, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff})})
	count := &counting{script: out, most: 400}
	if err := s.serve(&Conn{Conn: count, in: reader(count)}); err == nil {
		t.Error("it never ended")
	}
	if count.n > flows*(userBytes+Connections*bufferSize)+bufferSize+1e5 {
		t.Errorf("%d bytes were sent", count.n)
	}
	// What it sends is counted with the heads.
	s.left.Store(3 * (headSize + dataSize))
	if err := s.serve(newScript(bytes.NewReader(bytes.Repeat(whole, 3))).conn()); s.left.Load() != 0 {
		t.Errorf("%d bytes left, %v", s.left.Load(), err)
	}
}

// counting counts what is written, and ends after so many reads.
type counting struct {
	*script
	n, reads, most int
}

func (c *counting) Write(b []byte) (int, error) { c.n += len(b); return len(b), nil }

func (c *counting) Read(b []byte) (int, error) {
	if c.reads++; c.reads > c.most {
		return 0, io.EOF
	}
	return c.script.Read(b[:min(len(b), 16)])
}

// A connection on which nothing comes is closed when the probe's time is over.
func TestIdleConnection(t *testing.T) {
	a := NewAdmission("gpu01", slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	s, err := a.Begin(ctx, "node01", lease.ProbeRequest{Connections: 1})
	if err != nil {
		t.Fatal(err)
	}
	c, conn, tcp := pair(t)
	free, err := s.Take(conn, tcp)
	if err != nil {
		t.Fatal(err)
	}
	free()
	cancel() // as its time does
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	(&port{Admission: a}).idle(t)
}

// FuzzServe is a node that says anything to an owner.
func FuzzServe(f *testing.F) {
	f.Add(message(kindPing, make([]byte, pingSize)))
	f.Add(append(message(kindStateOf, nil), message(kindSend, []byte{1, 0, 0, 0, 1, 0, 0, 0})...))
	f.Add(append(message(kindData, make([]byte, 10)), message(kindEnd, nil)...))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := &Slot{epoch: time.Now()}
		s.left.Store(1 << 16)
		if err := s.serve(newScript(bytes.NewReader(in)).conn()); err == nil {
			t.Fatal("it ended without an error")
		}
		if s.left.Load() < -dataSize {
			t.Fatalf("%d bytes left", s.left.Load())
		}
	})
}

// FuzzMeasure is an owner that says anything to a node. What it says of itself is shown to people.
func FuzzMeasure(f *testing.F) {
	st := message(kindState, new(state).encode())
	samples := message(kindSamples, encodeSamples([]sample{{1, 1}, {20e6, 5000}}))
	all := bytes.Join([][]byte{pongs(2), samples, st, message(kindData, make([]byte, 9)), message(kindEnd, nil), st, st}, nil)
	f.Add(all)
	f.Add(all[:len(all)/2])
	f.Fuzz(func(t *testing.T, in []byte) {
		v, err := Measure(t.Context(), []*Conn{newScript(bytes.NewReader(in)).conn()}, Plan{exchanges: 2, exchanging: time.Microsecond, flow: time.Microsecond, bytes: 1 << 16})
		if err != nil {
			return
		}
		v.Node, v.Owner = "node01", "gpu01"
		said := Expect(&v)
		for _, c := range Findings(&v) {
			said = append(said, c.Text, c.Remedy)
		}
		for _, s := range said {
			if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' }) {
				t.Errorf("%q", s)
			}
		}
	})
}
