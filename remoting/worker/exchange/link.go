package exchange

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// errBroker says that no broker has answered. There is none while the daemon restarts.
var errBroker = errors.New("exchange: the daemon does not answer")

// Link is a session's way to the broker of its lease. Safe for concurrent use.
type Link struct {
	l *net.UnixListener // nil for a link that lasts as long as its first connection

	mu      sync.Mutex
	c       *net.UnixConn         // nil while there is no broker
	changed chan struct{}         // closed when c changes
	number  uint32                // of the last request
	wait    map[uint32]chan reply // of requests without an answer
	call    func(*net.UnixConn)   // is given the connections of sessions that want an export
	attach  func(int, bool)       // is given new connections of the session's client
	early   []newcomer            // those that came before attach was there
	trace   func(int)             // is given connections of clients that want a trace
	bulk    func(int, bool)       // is given bulk connections of the session's client
}

// maxEarly bounds the connections that wait for OnAttach.
const maxEarly = 8

// A newcomer is a new connection of the session's client.
type newcomer struct {
	fd  int
	raw bool // its HELLO has still to be read
}

// A reply is an answer, or the loss of the connection.
type reply struct {
	status uint32
	fd     int // with statusOpen
	lost   bool
}

// NewLink takes over the descriptor that the session was started with: a connection to the broker, or a socket at
// which each broker in turn connects.
func NewLink(fd int) (*Link, error) {
	k := &Link{changed: make(chan struct{}), wait: make(map[uint32]chan reply)}
	listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err == nil && listens != 0 {
		f := os.NewFile(uintptr(fd), "exchange")
		defer f.Close()
		l, err := net.FileListener(f)
		if err != nil {
			return nil, fmt.Errorf("exchange: %w", err)
		}
		var ok bool
		if k.l, ok = l.(*net.UnixListener); !ok {
			l.Close()
			return nil, fmt.Errorf("exchange: a listener of %T", l)
		}
		go k.accept()
		return k, nil
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("exchange: %w", err)
	}
	c, err := packetConn(fd)
	if err != nil {
		return nil, err
	}
	k.use(c)
	return k, nil
}

// packetConn makes a connection of a descriptor, which it takes over.
func packetConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "exchange")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("exchange: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("exchange: a connection of %T", c)
	}
	return u, nil
}

// accept waits for brokers. The newest is the daemon's: an earlier one has ended.
func (k *Link) accept() {
	for {
		c, err := k.l.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			time.Sleep(10 * time.Millisecond) // descriptors or memory have run out
		default:
			k.use(c)
		}
	}
}

// use makes c the connection to the broker.
func (k *Link) use(c *net.UnixConn) {
	k.mu.Lock()
	old := k.c
	k.set(c)
	k.mu.Unlock()
	if old != nil {
		old.Close()
	}
	go k.read(c)
}

// set changes the connection; the answers of the one before will not come. mu is held.
func (k *Link) set(c *net.UnixConn) {
	k.c = c
	close(k.changed)
	k.changed = make(chan struct{})
	for n, ch := range k.wait {
		ch <- reply{lost: true}
		delete(k.wait, n)
	}
}

// Close ends the link, for those who run several sessions in one process.
func (k *Link) Close() {
	if k.l != nil {
		k.l.Close()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.c != nil {
		k.c.Close()
	}
	for _, n := range k.early {
		unix.Close(n.fd)
	}
	k.early = nil
}

// read takes what a broker sends until its end.
func (k *Link) read(c *net.UnixConn) {
	defer c.Close()
	for {
		p, fd, err := receive(c, wire.BrokeredSize)
		if err != nil {
			break
		}
		var m wire.Brokered
		m.Decode(wire.NewDecoder(p))
		switch {
		case m.Kind == packetCall && fd >= 0:
			k.called(fd)
		case m.Kind == packetAttach && fd >= 0:
			k.attached(newcomer{fd, m.Status == packetRaw})
		case m.Kind == packetTrace && fd >= 0:
			k.traced(fd)
		case m.Kind == packetBulk && fd >= 0:
			k.bulked(newcomer{fd, m.Status == packetRaw})
		case m.Kind == packetAnswer && (m.Status == statusOpen) == (fd >= 0):
			k.answered(c, m.Number, reply{status: m.Status, fd: fd})
		case fd >= 0:
			unix.Close(fd)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.c == c {
		k.set(nil)
	}
}

// attached passes a new connection of the client on, or keeps it until OnAttach.
func (k *Link) attached(n newcomer) {
	k.mu.Lock()
	attach, keep := k.attach, len(k.early) < maxEarly
	if attach == nil && keep {
		k.early = append(k.early, n)
	}
	k.mu.Unlock()
	if attach != nil {
		attach(n.fd, n.raw)
	} else if !keep {
		unix.Close(n.fd)
	}
}

// traced passes a connection on over which a trace is wanted.
func (k *Link) traced(fd int) {
	k.mu.Lock()
	trace := k.trace
	k.mu.Unlock()
	if trace == nil { // the session has not begun
		unix.Close(fd)
		return
	}
	trace(fd)
}

// OnTrace has f called with each connection over which a client wants a trace, which is f's to close. It must not wait.
func (k *Link) OnTrace(f func(fd int)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.trace = f
}

// bulked passes a bulk connection on.
func (k *Link) bulked(n newcomer) {
	k.mu.Lock()
	bulk := k.bulk
	k.mu.Unlock()
	if bulk == nil { // nobody has been given a key
		unix.Close(n.fd)
		return
	}
	bulk(n.fd, n.raw)
}

// OnBulk has f called with each bulk connection of the session's client, as OnAttach does. It must not wait.
func (k *Link) OnBulk(f func(fd int, raw bool)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.bulk = f
}

func (k *Link) called(fd int) {
	c, err := packetConn(fd)
	if err != nil {
		return
	}
	k.mu.Lock()
	call := k.call
	k.mu.Unlock()
	if call == nil { // nothing has been exported
		c.Close()
		return
	}
	call(c)
}

func (k *Link) answered(c *net.UnixConn, number uint32, r reply) {
	k.mu.Lock()
	ch := k.wait[number]
	if k.c != c {
		ch = nil
	}
	delete(k.wait, number)
	k.mu.Unlock()
	if ch != nil {
		ch <- r
	} else if r.fd >= 0 {
		unix.Close(r.fd)
	}
}

// serve has f called with the connections of sessions that want an export. It must not wait.
func (k *Link) serve(f func(*net.UnixConn)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.call = f
}

// OnAttach has f called with each new connection of the session's client, which is f's to close, and whether its HELLO has still
// to be read. It must not wait.
func (k *Link) OnAttach(f func(fd int, raw bool)) {
	k.mu.Lock()
	early := k.early
	k.attach, k.early = f, nil
	k.mu.Unlock()
	for _, n := range early {
		f(n.fd, n.raw)
	}
}

// dial connects to the session in a slot of the lease. A broker that is not there is waited for until the time, as
// is a session that is busy.
func (k *Link) dial(slot int, until time.Time) (*net.UnixConn, error) {
	for {
		r, err := k.ask(slot, until)
		switch {
		case err != nil:
			return nil, err
		case r.lost:
			continue
		case r.status == statusOpen:
			return packetConn(r.fd)
		case r.status != statusFull:
			return nil, ErrToken
		case time.Now().After(until):
			return nil, errBroker
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// ask sends one request and waits for its answer.
func (k *Link) ask(slot int, until time.Time) (reply, error) {
	end := time.NewTimer(time.Until(until))
	defer end.Stop()
	k.mu.Lock()
	c, changed := k.c, k.changed
	if c == nil {
		k.mu.Unlock()
		if k.l == nil {
			return reply{}, errBroker
		}
		select {
		case <-changed:
			return reply{lost: true}, nil
		case <-end.C:
			return reply{}, errBroker
		}
	}
	k.number++
	number, ch := k.number, make(chan reply, 1)
	k.wait[number] = ch
	k.mu.Unlock()
	var req wire.Encoder
	(&wire.ExporterWanted{Number: number, Slot: uint32(slot)}).Encode(&req)
	if _, err := c.Write(req.Buf()); err != nil {
		c.Close() // its reader sees that, and says that the connection is lost
	}
	select {
	case r := <-ch:
		return r, nil
	case <-end.C:
	}
	k.mu.Lock()
	delete(k.wait, number)
	k.mu.Unlock()
	select {
	case r := <-ch: // just now
		return r, nil
	default:
		return reply{}, errBroker
	}
}

// receive reads a packet of one of these sizes, in bytes, and the descriptor that came with it, -1 for none. Any other packet is an error.
func receive(c *net.UnixConn, sizes ...int) (b []byte, fd int, err error) {
	b = make([]byte, slices.Max(sizes)+1)
	oob := make([]byte, unix.CmsgSpace(4))
	got, on, flags, _, err := c.ReadMsgUnix(b, oob)
	var fds []int
	if msgs, perr := unix.ParseSocketControlMessage(oob[:on]); perr == nil {
		for _, m := range msgs {
			f, _ := unix.ParseUnixRights(&m)
			fds = append(fds, f...)
		}
	}
	if err == nil && slices.Contains(sizes, got) && len(fds) <= 1 && flags&unix.MSG_CTRUNC == 0 {
		if len(fds) == 1 {
			return b[:got], fds[0], nil
		}
		return b[:got], -1, nil
	}
	for _, f := range fds {
		unix.Close(f)
	}
	if err == nil {
		err = fmt.Errorf("exchange: a packet of %d bytes with %d descriptors", got, len(fds))
	}
	return nil, -1, err
}
