// Package exchange passes handles between the session processes of one lease: what one has
// exported (memory or an event that a program shares between its processes), another opens. The
// program has tokens, which are random, and mean something within their lease alone.
package exchange

// How an export is opened.
//
//	Add     exporter: a token with a secret and the number of the exporter's session in the
//	        lease's account
//	Open    another session: asks the lease's broker for a connection to the session of that
//	        number, and sends the token over it
//	serve   exporter: gets the other end from the broker, looks the secret up, and answers with
//	        the driver's handle, or with a file descriptor. The connection stays as long as the
//	        other session uses the export, so each side learns of the other's end
//
// A session has no socket of its own to reach others by, because its sandbox refuses all that make one. It is started with
// a Link to the Broker, which is in the daemon or the supervisor. The broker knows by the link whose request
// it reads, and connects sessions of one lease only; it sees no token and no handle. Sessions outlive daemons: a
// session of a daemon's listens at its link for the next one, and a connection that has been made needs no broker.
//
// The handles of another session of the lease are worth as much as that session is: what they
// can do is what the driver lets any process of that user do with them.

import (
	"crypto/rand"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Kinds of exports.
const (
	Memory  uint32 = 1 + iota // the handle is the driver's, of memory
	Event                     // of an event
	File                      // a file descriptor, of memory
	Pool                      // a file descriptor, of a memory pool
	Pointer                   // the driver's handle, of an allocation of a pool
)

// hasFile reports whether a file descriptor comes with an export.
func hasFile(kind uint32) bool { return kind == File || kind == Pool }

// Errors.
var (
	// ErrToken says that a token is none, has been withdrawn, or is another lease's.
	ErrToken = errors.New("no such export in this lease")
	// ErrOwn says that a token is of the session itself.
	ErrOwn = errors.New("an export of this session")
)

const (
	openTime = 5 * time.Second
	// maxConns bounds the connections of an exporter, and with them its threads' memory.
	maxConns = 8192
)

// Token names an export. The program has it as a handle of CUDA's, whose 64 bytes it fills.
type Token [wire.ExportTokenSize]byte

func (t *Token) read() (m wire.ExportToken) {
	m.Decode(wire.NewDecoder(t[:]))
	return m
}

func (t *Token) secret() [16]byte { return t.read().Secret }

// Slot is the number of the exporter's session.
func (t *Token) Slot() int { return int(t.read().Slot) }

// Kind is that of the export.
func (t *Token) Kind() uint32 { return t.read().Kind }

// plain reports whether nothing stands where nothing belongs.
func (t *Token) plain() bool {
	m := t.read()
	return wire.Plain(&m, t[:])
}

// Item is what is exported.
type Item struct {
	Kind         uint32
	Device       int
	Offset, Size uint64 // of the program's memory within the driver's allocation
	Charged      uint64 // bytes that the lease is charged for the whole allocation
	Pool         uint64 // of a Pool or Pointer: which one of the exporter's pools
	Handle       [64]byte
	FD           int // of a File or Pool: the exporter's own, which stays open until Remove
	// Used is told of each session that begins (1) or ends (-1) to use it; it must not wait.
	Used func(int)
}

// Exports are a session's. Safe for concurrent use.
type Exports struct {
	log  *slog.Logger
	slot int
	link *Link

	mu    sync.Mutex
	items map[[16]byte]*Item
	conns map[*net.UnixConn]bool // of sessions that use an export
}

// New makes the exports of the session in a slot of its lease's account, empty.
func New(log *slog.Logger, slot int, link *Link) *Exports {
	e := &Exports{log: log, slot: slot, link: link, items: make(map[[16]byte]*Item), conns: make(map[*net.UnixConn]bool)}
	link.serve(e.called)
	return e
}

// OnAttach has f called with new connections of the session's client, see Link.OnAttach.
func (e *Exports) OnAttach(f func(fd int, raw bool)) { e.link.OnAttach(f) }

// OnTrace has f called with connections over which a trace of the session is wanted, see Link.OnTrace.
func (e *Exports) OnTrace(f func(fd int)) { e.link.OnTrace(f) }

// OnBulk has f called with bulk connections of the session's client, see Link.OnBulk.
func (e *Exports) OnBulk(f func(fd int, raw bool)) { e.link.OnBulk(f) }

// Slot is the number of this session in its lease's account.
func (e *Exports) Slot() int { return e.slot }

// Add exports an item.
func (e *Exports) Add(it *Item) (t Token) {
	e.mu.Lock()
	defer e.mu.Unlock()
	m := wire.ExportToken{Slot: uint32(e.slot), Kind: it.Kind}
	_, _ = rand.Read(m.Secret[:])
	var enc wire.Encoder
	m.Encode(&enc)
	copy(t[:], enc.Buf())
	e.items[m.Secret] = it
	return t
}

// Remove withdraws an export. Sessions that have opened it keep it.
func (e *Exports) Remove(t Token) {
	e.mu.Lock()
	defer e.mu.Unlock()
	it := e.items[t.secret()]
	if it == nil {
		return
	}
	delete(e.items, t.secret())
	if hasFile(it.Kind) {
		unix.Close(it.FD)
	}
}

// Own gives the item of a token that this session made itself; nil if there is none.
func (e *Exports) Own(t Token) *Item {
	e.mu.Lock()
	defer e.mu.Unlock()
	if it := e.items[t.secret()]; it != nil && t.Slot() == e.slot && t.Kind() == it.Kind && t.plain() {
		return it
	}
	return nil
}

// Withdraw withdraws all exports for good. Sessions that have opened one keep it.
func (e *Exports) Withdraw() {
	e.link.Close()
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.items)
}

// Close ends the link and all uses of exports, as the end of the process does. It is for those who run several sessions in
// one process.
func (e *Exports) Close() {
	e.Withdraw()
	e.mu.Lock()
	defer e.mu.Unlock()
	for c := range e.conns {
		c.Close()
	}
}

// called answers a session of the lease.
func (e *Exports) called(c *net.UnixConn) {
	e.mu.Lock()
	full := len(e.conns) >= maxConns
	if !full {
		e.conns[c] = true
	}
	e.mu.Unlock()
	if full {
		c.Close()
		return
	}
	go func() {
		e.serve(c)
		c.Close()
		e.mu.Lock()
		delete(e.conns, c)
		e.mu.Unlock()
	}()
}

// serve answers one session, and stays until it has no more use for the export.
func (e *Exports) serve(c *net.UnixConn) {
	_ = c.SetDeadline(time.Now().Add(openTime))
	var t Token
	if n, err := c.Read(t[:]); err != nil || n != len(t) {
		return
	}
	e.mu.Lock()
	it := e.items[t.secret()]
	if it == nil || t.Slot() != e.slot || t.Kind() != it.Kind || !t.plain() {
		e.mu.Unlock()
		_, _ = c.Write([]byte{0})
		return
	}
	var oob []byte
	if hasFile(it.Kind) {
		// The descriptor must not be closed, and its number another's, before it has been sent.
		fd, err := unix.FcntlInt(uintptr(it.FD), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			e.mu.Unlock()
			e.log.Error("exchange", "error", err)
			return
		}
		defer unix.Close(fd)
		oob = unix.UnixRights(fd)
	}
	it.Used(1)
	e.mu.Unlock()
	defer it.Used(-1)
	if _, _, err := c.WriteMsgUnix(encode(it), oob, nil); err != nil {
		return
	}
	_ = c.SetDeadline(time.Time{})
	_, _ = c.Read(t[:]) // the end
}

// encode makes the answer of an item: a POOL_EXPORT only where there is a pool, since sessions of an earlier release, which know EXPORT
// alone, can share a lease with those of this one while a node is upgraded.
func encode(it *Item) []byte {
	m := wire.Export{
		Kind: it.Kind, Device: uint32(it.Device), Offset: it.Offset, Size: it.Size, Charged: it.Charged, Handle: it.Handle,
	}
	var e wire.Encoder
	if it.Pool == 0 {
		m.Encode(&e)
	} else {
		(&wire.PoolExport{Export: m, Pool: it.Pool}).Encode(&e)
	}
	return e.Buf()
}

// decode reads an EXPORT or a POOL_EXPORT.
func decode(b []byte) *Item {
	var m wire.PoolExport
	if d := wire.NewDecoder(b); len(b) == wire.PoolExportSize {
		m.Decode(d)
	} else {
		m.Export.Decode(d)
	}
	x := &m.Export
	return &Item{
		Kind: x.Kind, Device: int(x.Device), Offset: x.Offset, Size: x.Size, Charged: x.Charged, Pool: m.Pool, Handle: x.Handle, FD: -1,
	}
}

// Use is another session's export that this one uses.
type Use struct{ c *net.UnixConn }

// Close ends the use.
func (u *Use) Close() { u.c.Close() }

// Wait returns once the exporter has ended, or after Close.
func (u *Use) Wait() {
	var b [1]byte
	_, _ = u.c.Read(b[:])
}

// Open opens another session's export. A descriptor that comes with it is the caller's.
func (e *Exports) Open(t Token) (*Use, *Item, error) {
	if t.Slot() == e.slot {
		return nil, nil, ErrOwn
	}
	if !t.plain() {
		return nil, nil, ErrToken
	}
	until := time.Now().Add(openTime)
	c, err := e.link.dial(t.Slot(), until)
	if err != nil {
		return nil, nil, err
	}
	_ = c.SetDeadline(until)
	it, err := ask(c, t)
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	_ = c.SetDeadline(time.Time{})
	return &Use{c}, it, nil
}

func ask(c *net.UnixConn, t Token) (*Item, error) {
	if _, err := c.Write(t[:]); err != nil {
		return nil, ErrToken
	}
	b, fd, err := receive(c, wire.ExportSize, wire.PoolExportSize)
	if err != nil {
		return nil, ErrToken // it has ended, or has no such export
	}
	it := decode(b)
	it.FD = fd
	if it.Kind != t.Kind() || hasFile(it.Kind) != (fd >= 0) {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, ErrToken
	}
	return it, nil
}
