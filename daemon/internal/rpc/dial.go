package rpc

import (
	"context"
	"net"
	"time"
)

// The kernel repeats a SYN that gets no answer after 1, 3 and 7 seconds, so a connection attempt notices late
// that the network is back. dialSoon starts a further attempt every dialInterval, up to dialAttempts in all.
const (
	dialInterval = 200 * time.Millisecond
	dialAttempts = 30
)

// dialSoon connects by TCP. It succeeds at most dialInterval and one round trip after the other side has
// become reachable. It returns the result of the attempt that ends first.
func dialSoon(ctx context.Context, addr string) (net.Conn, error) {
	type result struct {
		c   net.Conn
		err error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan result) // has no buffer: an attempt that ends later closes its own connection
	try := func() {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		select {
		case done <- result{c, err}:
		case <-ctx.Done():
			if c != nil {
				_ = c.Close()
			}
		}
	}
	go try()
	t := time.NewTicker(dialInterval)
	defer t.Stop()
	for n := 1; ; {
		select {
		case r := <-done:
			return r.c, r.err
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-t.C:
			if n < dialAttempts {
				n++
				go try()
			}
		}
	}
}
