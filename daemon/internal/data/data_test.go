package data

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
)

// The test's own program is the relay, as sluiced is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "relay" {
		if err := RelayMain(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// rig is an owner with its data port. Sessions go to worker.
type rig struct {
	lease.Owner
	*Server
	addr    string
	mu      sync.Mutex
	refused []string
	admits  int
	worker  func(c net.Conn)
	fail    error
	twist   func(o *lease.Offer)
}

func newRig(t testing.TB, bounds limit.Bounds) *rig {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(l.Addr().String())
	g := &rig{addr: l.Addr().String(), worker: echo}
	g.Server = NewServer(Config{Addr: ":" + port, PerLease: 4, Bounds: bounds, Admit: g.admit,
		Refused: func(_ net.Addr, _ lease.SessionRequest, reason string) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.refused = append(g.refused, reason)
		}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return g
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

func (g *rig) admit(_ context.Context, r lease.SessionRequest, f *os.File) error {
	defer f.Close()
	g.mu.Lock()
	g.admits++
	g.mu.Unlock()
	if g.fail != nil {
		return g.fail
	}
	c, err := net.FileConn(f)
	if err != nil {
		return err
	}
	go func() {
		defer c.Close()
		g.worker(c)
	}()
	return nil
}

func (g *rig) Offer(_ context.Context, _ string, r lease.SessionRequest) (lease.Offer, error) {
	o, err := g.Server.Offer(r)
	if g.twist != nil {
		g.twist(&o)
	}
	return o, err
}

func (g *rig) open(t testing.TB, d Dialer) (net.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	f, err := d.Open(ctx, g, g.addr, "node01", lease.SessionRequest{Lease: "l1", Kind: 1, UID: 1234, Program: "a.out"})
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if fl, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0); err != nil || fl&unix.O_NONBLOCK != 0 {
		t.Errorf("the client's socket is not blocking: %#x, %v", fl, err)
	}
	return net.FileConn(f)
}

// eventually waits for a fact.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// last waits for a refusal with the words and forgets it.
func (g *rig) last(t *testing.T, words string) {
	t.Helper()
	eventually(t, "no refusal: "+words, func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, r := range g.refused {
			if strings.Contains(r, words) {
				g.refused = nil
				return true
			}
		}
		return false
	})
}

func roundTrip(t *testing.T, c net.Conn, n int) {
	t.Helper()
	out := make([]byte, n)
	_, _ = rand.Read(out)
	go func() {
		_, _ = c.Write(out)
		_ = c.(halfCloser).CloseWrite()
	}()
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	in, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(in, out) {
		t.Errorf("%d of %d bytes came back right or wrong: %v", len(in), n, err)
	}
}

func TestPlain(t *testing.T) {
	g := newRig(t, limit.Bounds{})
	c, err := g.open(t, Dialer{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	roundTrip(t, c, 8<<20)

	g.fail = errors.New("no worker\x1b[2J: the GPU is on fire")
	if _, err := g.open(t, Dialer{}); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "the GPU is on fire") || strings.Contains(err.Error(), "\x1b") {
		t.Errorf("%v", err)
	}
	g.last(t, "on fire")
}

// wiretap forwards to addr and keeps what it saw.
type wiretap struct {
	mu   sync.Mutex
	seen bytes.Buffer
}

func (w *wiretap) start(t *testing.T, addr string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", addr)
			if err != nil {
				_ = a.Close()
				continue
			}
			move := func(dst, src net.Conn) {
				_, _ = io.Copy(io.MultiWriter(dst, w), src)
				_ = dst.(halfCloser).CloseWrite()
			}
			go move(a, b)
			go move(b, a)
		}
	}()
	return l.Addr().String()
}

func (w *wiretap) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.seen.Write(b)
}

func (w *wiretap) saw(b []byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return bytes.Contains(w.seen.Bytes(), b)
}

func TestEncrypted(t *testing.T) {
	g := newRig(t, limit.Bounds{})
	secret := []byte("what the program computes is nobody's business")
	for _, encrypt := range []bool{false, true} {
		tap := &wiretap{}
		via := tap.start(t, g.addr)
		g.twist = func(o *lease.Offer) { o.Addr = via }
		c, err := g.open(t, Dialer{Encrypt: encrypt})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(secret); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(secret))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, secret) {
			t.Fatalf("%q, %v", got, err)
		}
		if tap.saw(secret) == encrypt {
			t.Errorf("encrypt %v, and the network saw it: %v", encrypt, !encrypt)
		}
		roundTrip(t, c, 4<<20)
		_ = c.Close()
	}
	g.twist = nil

	// The relays run as the lease's user.
	if os.Geteuid() == 0 {
		c, err := g.open(t, Dialer{Encrypt: true})
		if err != nil {
			t.Fatal(err)
		}
		// The host's end may answer before the owner's relay has become the user's.
		eventually(t, "fewer than two relays of the lease's user", func() bool { return relaysOf(1234) >= 2 })
		// The client is gone: both relays go, and the worker sees the end.
		_ = c.Close()
		eventually(t, "relays outlive their session", func() bool { return relaysOf(1234) == 0 })
	}

	// The worker is gone: the client sees the end, after the last words.
	g.worker = func(c net.Conn) { _, _ = c.Write([]byte("bye")) }
	c, err := g.open(t, Dialer{Encrypt: true})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Errorf("%q, %v", b, err)
	}
	_ = c.Close()

	// Somebody in the middle has another certificate than was announced.
	g.worker = echo
	g.twist = func(o *lease.Offer) { o.CertHash[3]++ }
	if _, err := g.open(t, Dialer{Encrypt: true}); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "another certificate") {
		t.Errorf("%v", err)
	}
	g.twist = nil
	g.cfg.Encrypt = func() bool { return true }
	if _, err := g.open(t, Dialer{}); err == nil || !strings.Contains(err.Error(), "encrypted sessions only") {
		t.Errorf("%v", err)
	}
	if _, err := g.Server.Offer(lease.SessionRequest{Encrypt: true, CertHash: []byte("short")}); err == nil {
		t.Error("a short hash passes")
	}
}

// relaysOf counts this test's relays of a user.
func relaysOf(uid uint32) (n int) {
	dirs, _ := os.ReadDir("/proc")
	for _, d := range dirs {
		b, err := os.ReadFile("/proc/" + d.Name() + "/status")
		if err != nil || !bytes.Contains(b, []byte("\nUid:\t1234\t1234\t1234\t1234\n")) || uid != 1234 {
			continue
		}
		if bytes.Contains(b, []byte("State:\tZ")) || !bytes.Contains(b, []byte("NoNewPrivs:\t1")) {
			continue
		}
		if c, _ := os.ReadFile("/proc/" + d.Name() + "/cmdline"); bytes.HasSuffix(c, []byte("\x00relay\x00")) {
			n++
		}
	}
	return n
}

func BenchmarkOpen(b *testing.B) {
	for _, encrypt := range []bool{false, true} {
		b.Run(map[bool]string{false: "plain", true: "encrypted"}[encrypt], func(b *testing.B) {
			g := newRig(b, limit.Bounds{})
			for b.Loop() {
				c, err := g.open(b, Dialer{Encrypt: encrypt})
				if err != nil {
					b.Fatal(err)
				}
				_ = c.Close()
			}
		})
	}
}

func BenchmarkStream(b *testing.B) {
	for _, encrypt := range []bool{false, true} {
		b.Run(map[bool]string{false: "plain", true: "encrypted"}[encrypt], func(b *testing.B) {
			g := newRig(b, limit.Bounds{})
			g.worker = func(c net.Conn) { _, _ = io.Copy(io.Discard, struct{ io.Reader }{c}) }
			c, err := g.open(b, Dialer{Encrypt: encrypt})
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			buf := make([]byte, 4<<20)
			b.SetBytes(int64(len(buf)))
			for b.Loop() {
				if _, err := c.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// If another process answers in the owner's place, the client tells it nothing that it could use.
func TestFalseOwner(t *testing.T) {
	g := newRig(t, limit.Bounds{})
	g.twist = func(o *lease.Offer) { o.Secret[0] ^= 1 }
	if _, err := g.open(t, Dialer{}); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "not the owner") {
		t.Error(err)
	}
	// No process listens there, or one that says nothing.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.twist = func(o *lease.Offer) { o.Addr = l.Addr().String() }
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := (&Dialer{}).Open(ctx, g, g.addr, "node01", lease.SessionRequest{Lease: "l9"}); err == nil {
		t.Error("silence is taken for an answer")
	}
	_ = l.Close()
	if _, err := g.open(t, Dialer{}); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Error(err)
	}
}

func TestRelayAlone(t *testing.T) {
	if err := relay(strings.NewReader("{}"), nil, -1, -1); err == nil {
		t.Error("a relay without sockets runs")
	}
	fds := func() (int, int) {
		a, b, err := socketPair()
		if err != nil {
			t.Fatal(err)
		}
		x, _ := unix.Dup(int(a.Fd()))
		y, _ := unix.Dup(int(b.Fd()))
		_, _ = a.Close(), b.Close()
		return x, y
	}
	for _, conf := range []string{"", "[]", `{"key":"AAAA"}`} {
		n, s := fds()
		if err := relay(strings.NewReader(conf), nil, n, s); err == nil {
			t.Errorf("configuration %q passes", conf)
		}
	}
}
