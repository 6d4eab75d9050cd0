// Command relay passes TCP connections on as a slower, longer network would: it
// adds a delay and caps the rate of each direction. It stands between a program
// and a worker on one machine, so that a benchmark can show what distance costs.
//
// The rate counts the bytes that the programs send, not the headers of packets.
//
// With --cuts it also fails as networks do, on command: a line of standard input is the network's state from then on,
// reset, drop, silence or mend.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "relay: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	f := flag.NewFlagSet("relay", flag.ContinueOnError)
	listen := f.String("listen", "127.0.0.1:0", "`HOST:PORT` to listen on; port 0 takes a free one")
	to := f.String("to", "", "`HOST:PORT` to pass connections on to")
	rtt := f.Duration("rtt", 0, "round trip time to add, half of it in each direction")
	rate := f.String("rate", "0", "bits a second in each direction, as 100M or 1G (powers of 1000); 0 for no limit")
	cuts := f.Bool("cuts", false, "follow standard input, of which each line is one of: "+
		"reset (connections are reset, also new ones), drop (bytes are lost; at the end all are reset), silence (bytes are held back), mend")
	if err := f.Parse(args); err != nil {
		return err
	}
	bits, err := parseRate(*rate)
	switch {
	case err != nil:
		return err
	case *to == "" || f.NArg() > 0:
		return errors.New("say --to HOST:PORT, and nothing beside the flags")
	case *rtt < 0:
		return fmt.Errorf("round trip time %v is negative", *rtt)
	}
	ln, err := net.Listen("tcp", *listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", *listen, err)
	}
	r := &relay{link: link{delay: *rtt / 2, rate: bits / 8}, net: newNetwork(), to: *to, out: out}
	fmt.Fprintf(out, "listening %s\n", ln.Addr())
	if *cuts {
		go r.net.read(in, r.say)
	}
	return r.serve(ctx, ln)
}

// parseRate reads bits a second.
func parseRate(s string) (float64, error) {
	digits, factor := s, 1.0
	if n := len(s); n > 0 {
		if i := strings.IndexByte("KMG", s[n-1]&^0x20); i >= 0 {
			digits, factor = s[:n-1], []float64{1e3, 1e6, 1e9}[i]
		}
	}
	v, err := strconv.ParseFloat(digits, 64)
	if err != nil || v < 0 || v > 1e6 && factor > 1e6 {
		return 0, fmt.Errorf("rate %q is none of: bits a second, or a number with K, M or G as 100M or 1G; 0 for no limit", s)
	}
	return v * factor, nil
}

type relay struct {
	link
	net      *network
	to       string
	up, down way // to the target, and back

	mu  sync.Mutex
	out io.Writer
}

// way is a direction.
type way struct {
	sender
	bytes atomic.Int64
}

func (r *relay) say(format string, a ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.out, format+"\n", a...)
}

// serve passes connections on until ctx ends, then cuts those that are left.
func (r *relay) serve(ctx context.Context, ln net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	var conns sync.WaitGroup
	for id := 1; ; id++ {
		c, err := ln.Accept()
		if err != nil {
			cancel()
			r.net.become(mended) // nobody waits for the end of a cut any more
			conns.Wait()
			r.say("total to=%d from=%d", r.up.bytes.Load(), r.down.bytes.Load())
			if errors.Is(err, net.ErrClosed) {
				return nil
			}
			return fmt.Errorf("accept: %w", err)
		}
		conns.Go(func() { r.pass(ctx, id, c.(*net.TCPConn)) })
	}
}

// pass serves one connection until both directions have ended.
func (r *relay) pass(ctx context.Context, id int, near *net.TCPConn) {
	a, err := newEnd(near)
	_ = near.Close() // the end has a descriptor of its own
	if err != nil {
		r.say("connection %d: %v", id, err)
		return
	}
	p := &passage{near: a}
	defer a.close()
	defer r.net.end(p)
	if !r.net.begin(p) {
		a.reset()
		return
	}
	c, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp", r.to)
	if err != nil {
		r.say("connection %d: %v", id, err)
		return
	}
	b, err := newEnd(c.(*net.TCPConn))
	_ = c.Close()
	if err != nil {
		r.say("connection %d: %v", id, err)
		return
	}
	defer b.close()
	r.net.reach(p, b)
	defer context.AfterFunc(ctx, func() { a.cut(); b.cut() })()

	var up, down int64
	var g sync.WaitGroup
	for _, d := range []struct {
		from, to faulty
		n        *int64
		way      *way
	}{{faulty{a, r.net, p}, faulty{b, r.net, p}, &up, &r.up}, {faulty{b, r.net, p}, faulty{a, r.net, p}, &down, &r.down}} {
		q := newLine(r.room())
		g.Go(func() {
			n, err := r.take(d.from, &d.way.sender, q)
			*d.n = n
			d.way.bytes.Add(n)
			if err != nil { // broken on one side: so shall the other see it
				r.say("connection %d: %v", id, err)
				a.cut()
				b.cut()
			}
		})
		g.Go(func() {
			if err := r.give(d.to, q); err != nil {
				r.say("connection %d: %v", id, err)
				a.cut()
				b.cut()
				return
			}
			d.to.shut()
		})
	}
	g.Wait()
	r.say("connection %d: to=%d from=%d", id, up, down)
}
