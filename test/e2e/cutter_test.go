package e2e

import (
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// cutter stands between programs and a worker, and cuts their connections at random bytes.
type cutter struct {
	l  net.Listener
	to string

	mu     sync.Mutex
	rand   *rand.Rand
	left   int               // cuts still to be made
	silent int               // percent of the cuts after which both sides hear nothing more, and are told nothing
	most   int               // bytes until a cut
	bulk   bool              // bulk connections are cut, too
	only   bool              // ... and no others
	keep   map[net.Conn]bool // open
	down   bool              // new connections are closed
	early  atomic.Bool       // connections are also cut before the client has the WELCOME
	attach func()            // called for each connection that goes on with a session, before anything is passed on
	cuts   atomic.Int64
	first  atomic.Int64 // connections that began a session
	again  atomic.Int64 // connections that went on with one
	bulks  atomic.Int64 // bulk connections
}

// newCutter makes so many cuts, each after up to most bytes of a connection.
func newCutter(t testing.TB, w *worker, seed uint64, cuts, most, silent int) *cutter {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{l: l, to: strings.TrimPrefix(w.addr, "tcp:"), rand: rand.New(rand.NewPCG(seed, 18)), left: cuts, most: most, silent: silent, keep: map[net.Conn]bool{}}
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			go c.relay(a.(*net.TCPConn))
		}
	}()
	t.Cleanup(c.close)
	return c
}

func (c *cutter) addr() string { return "tcp:" + c.l.Addr().String() }

func (c *cutter) close() {
	c.l.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.keep {
		k.Close()
	}
}

// cutAll cuts all connections, and refuses new ones for as long as down says.
func (c *cutter) cutAll(down bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down = down
	for k := range c.keep {
		c.cuts.Add(1)
		k.Close()
	}
	clear(c.keep)
}

// plan says after how many bytes in which direction a connection is cut, and how; 0 bytes for never.
func (c *cutter) plan() (bytes int64, up bool, how string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left <= 0 {
		return 0, false, ""
	}
	c.left--
	how = []string{"close", "reset"}[c.rand.IntN(2)]
	if c.rand.IntN(100) < c.silent {
		how = "silent"
	}
	// Of every magnitude: some within the handshake.
	limit := 1 + c.rand.IntN(c.most)
	for c.rand.IntN(2) == 0 && limit > 64 {
		limit /= 8
	}
	return int64(1 + c.rand.IntN(limit)), c.rand.IntN(2) == 0, how
}

// cutBulk has bulk connections cut, and no others if only.
func (c *cutter) cutBulk(only bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bulk, c.only = true, only
}

func (c *cutter) cutsKind(kind uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if kind == wire.SessionBulk {
		return c.bulk
	}
	return !c.only && (kind == wire.SessionAttach || kind == wire.SessionCompute)
}

// relay passes one connection on until it is cut.
func (c *cutter) relay(client *net.TCPConn) {
	c.mu.Lock()
	to := c.to
	c.mu.Unlock()
	server, err := net.Dial("tcp", to)
	if err != nil {
		client.Close()
		return
	}
	c.mu.Lock()
	down := c.down
	if !down {
		c.keep[client], c.keep[server] = true, true
	}
	c.mu.Unlock()
	if down {
		client.Close()
		server.Close()
		return
	}
	var hello [wire.HelloSize]byte
	if err := readFull(client, hello[:]); err != nil {
		client.Close()
		server.Close()
		return
	}
	var h wire.Hello
	_ = h.Decode(&hello)
	var armed atomic.Bool
	switch h.Kind {
	case wire.SessionAttach:
		c.again.Add(1)
		armed.Store(true)
		if c.attach != nil {
			c.attach()
		}
	case wire.SessionBulk:
		c.bulks.Add(1)
		armed.Store(true)
	default:
		c.first.Add(1)
	}
	var limit int64
	var up bool
	var how string
	if c.cutsKind(h.Kind) {
		limit, up, how = c.plan()
	}
	var once sync.Once
	var mute atomic.Bool
	cut := func() {
		once.Do(func() {
			c.cuts.Add(1)
			switch how {
			case "silent":
				mute.Store(true)
				return
			case "reset":
				_ = client.SetLinger(0)
				_ = server.(*net.TCPConn).SetLinger(0)
			}
			client.Close()
			server.Close()
		})
	}
	var passed [2]atomic.Int64
	pump := func(to, from net.Conn, mine bool, n *atomic.Int64) {
		b := make([]byte, 64<<10)
		for {
			k, err := from.Read(b)
			if err != nil {
				if t, ok := to.(*net.TCPConn); ok && !mute.Load() {
					_ = t.CloseWrite()
				}
				return
			}
			p := b[:k]
			if mute.Load() {
				continue
			}
			if armed.Load() && mine && limit > 0 && n.Load()+int64(k) >= limit {
				p = b[:max(limit-n.Load(), 0)]
				_, _ = to.Write(p)
				cut()
				continue
			}
			if armed.Load() {
				n.Add(int64(k))
			}
			if _, err := to.Write(p); err != nil {
				return
			}
		}
	}
	if _, err := server.Write(hello[:]); err != nil {
		return
	}
	// Every other one, and three in a row at most, since the client gives up in the end. It does so, too, if it has waited long for a WELCOME.
	if h.Kind == wire.SessionCompute && c.early.Load() && limit%2 == 0 && how != "silent" && c.first.Load() <= 3 {
		limit, up = 1+limit/2%2048, false
		armed.Store(true)
	}
	if h.Kind == wire.SessionCompute {
		// The first byte after HELLO says that the client has WELCOME.
		go func() {
			pump(client, server, !up, &passed[1])
		}()
		b := make([]byte, 1)
		if err := readFull(client, b); err == nil {
			_, _ = server.Write(b)
			armed.Store(true)
		}
		pump(server, client, up, &passed[0])
	} else {
		go pump(client, server, !up, &passed[1])
		pump(server, client, up, &passed[0])
	}
	if !mute.Load() {
		time.Sleep(10 * time.Millisecond)
	}
}

func readFull(c net.Conn, b []byte) error {
	for n := 0; n < len(b); {
		k, err := c.Read(b[n:])
		if err != nil {
			return err
		}
		n += k
	}
	return nil
}
