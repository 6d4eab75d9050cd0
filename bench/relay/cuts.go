package main

// Cuts: what a network does to connections when a switch restarts or an address changes.
//
// Both ends of a connection are read and written through faulty, which holds the bytes back or loses them while a cut
// lasts. So the delay and the rate of the link know nothing of cuts.

import (
	"bufio"
	"io"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// outage is the kind of a cut.
type outage string

const (
	mended  outage = "mend"
	reset   outage = "reset"   // connections are reset at once, new ones as soon as they are made
	drop    outage = "drop"    // bytes are lost, new connections hear nothing; all are reset when the cut is over
	silence outage = "silence" // bytes are held back, and go on when the cut is over
)

// network is the state that all connections of a relay share.
type network struct {
	mu      sync.Mutex
	changed sync.Cond
	now     outage
	open    map[*passage]bool
}

// passage is one connection: the end at the program's side and, once there is one, that at the target's.
type passage struct {
	near, far *end
	lossy     bool // bytes of it are lost: it is reset, not gone on with
}

func newNetwork() *network {
	n := &network{now: mended, open: map[*passage]bool{}}
	n.changed.L = &n.mu
	return n
}

// read follows the lines of in, each the name of an outage or mend, and says of each when it holds.
func (n *network) read(in io.Reader, say func(format string, a ...any)) {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		to := outage(strings.TrimSpace(lines.Text()))
		switch to {
		case mended, reset, drop, silence:
			n.become(to)
			say("network %s", to)
		default:
			say("network: %q is none of mend, reset, drop, silence", to)
		}
	}
}

func (n *network) become(to outage) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.now = to
	for p := range n.open {
		if to == reset || p.lossy && to != drop {
			p.reset()
		}
		p.lossy = p.lossy || to == drop
	}
	n.changed.Broadcast()
}

// begin waits until a new connection may be passed on, and reports false if it is to be reset instead.
func (n *network) begin(p *passage) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open[p] = true
	if n.now == drop {
		p.lossy = true
	}
	for n.now == silence || n.now == drop {
		n.changed.Wait()
	}
	return n.now == mended && !p.lossy
}

// reach adds the target's end to p, which may have been cut since it began.
func (n *network) reach(p *passage, far *end) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p.far = far
	if n.now == reset {
		p.reset()
	}
	p.lossy = p.lossy || n.now == drop
}

func (n *network) end(p *passage) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.open, p)
}

// passes waits while the network holds bytes back, and reports false if those of p are lost.
func (n *network) passes(p *passage) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for n.now == silence && !p.lossy {
		n.changed.Wait()
	}
	return !p.lossy
}

func (p *passage) reset() {
	p.near.reset()
	if p.far != nil {
		p.far.reset()
	}
}

// faulty is one end of a connection as the network lets it be seen.
type faulty struct {
	*end
	n *network
	p *passage
}

func (f faulty) readIdle(b []byte) (int, bool, error) {
	for {
		n, idle, err := f.end.readIdle(b)
		if f.n.passes(f.p) || err != nil {
			return n, idle, err
		}
	}
}

func (f faulty) Write(b []byte) (int, error) {
	if !f.n.passes(f.p) {
		return len(b), nil
	}
	return f.end.Write(b)
}

// shut is lost as bytes are.
func (f faulty) shut() {
	if f.n.passes(f.p) {
		f.end.shut()
	}
}

// reset has the kernel send a reset (RST), and wakes whoever reads or writes.
func (e *end) reset() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return
	}
	// Connecting to no address disconnects, which resets a connection that stands. Linux 6.4 and 6.5 refuse it while
	// somebody waits for the socket.
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(e.fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)); errno != 0 {
		_ = unix.Shutdown(e.fd, unix.SHUT_RDWR)
	}
}
