package rpc

import (
	"context"
	"net"
	"time"
)

// A connection attempt is made anew after each again, at most attempts times, beside those before.
// The kernel repeats an attempt that nobody answers after 1, 3, 7 seconds: a network that is back is not
// noticed until then. A new attempt is answered at once.
const (
	again    = 200 * time.Millisecond
	attempts = 30
)

// dialSoon connects by TCP, within again and a round trip of the time when the other side can be
// reached. It returns the first connection or the first error.
func dialSoon(ctx context.Context, addr string) (net.Conn, error) {
	type result struct {
		c   net.Conn
		err error
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan result) // attempts that come late find nobody here
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
	t := time.NewTicker(again)
	defer t.Stop()
	for n := 1; ; {
		select {
		case r := <-done:
			return r.c, r.err
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-t.C:
			if n < attempts {
				n++
				go try()
			}
		}
	}
}
