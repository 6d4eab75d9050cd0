// Package exchange passes handles between the session processes of one lease: what one has
// exported (memory or an event that a program shares between its processes), another opens. The
// program has tokens, which are random, and mean something within their lease alone.
package exchange

// How an export is opened.
//
//	Add     exporter: a token with a secret and the number of the exporter's session in the
//	        lease's account. The first export opens a socket, whose random name stands in the account
//	Open    another session: finds the name by the number, connects, and sends the secret
//	serve   exporter: looks the secret up, and answers with the driver's handle, or with a
//	        file descriptor. The connection stays as long as the other session uses the
//	        export, so each side learns of the other's end
//
// No daemon takes part: sessions outlive daemons. Only sessions of the lease can read its account,
// so nobody else knows the names; besides, each side compares the other's process with the account.
// The handles of another session of the lease are worth as much as that session is: what they
// can do is what the driver lets any process of that user do with them.

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/unixsock"
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
	maxConns  = 8192
	replySize = 96
)

// Directory is a lease's account as a session of it sees it.
type Directory interface {
	Slot() int
	Publish(name [2]uint64)
	Find(slot int) (name [2]uint64, pid int, ok bool)
	Member(pid int) bool
}

// Token names an export. The program has it as a handle of CUDA's, whose 64 bytes it fills.
type Token [64]byte

func (t *Token) secret() (s [16]byte) { copy(s[:], t[:16]); return s }

// Slot is the number of the exporter's session.
func (t *Token) Slot() int { return int(binary.LittleEndian.Uint32(t[16:])) }

// Kind is that of the export.
func (t *Token) Kind() uint32 { return binary.LittleEndian.Uint32(t[20:]) }

// plain reports whether nothing stands where nothing belongs.
func (t *Token) plain() bool {
	for _, b := range t[24:] {
		if b != 0 {
			return false
		}
	}
	return true
}

// Item is what is exported.
type Item struct {
	Kind         uint32
	Device       int
	Offset, Size uint64 // of the program's memory within the driver's allocation
	Charged      uint64 // bytes that the lease is charged for the whole allocation
	Handle       [64]byte
	FD           int // of a File or Pool: the exporter's own, which stays open until Remove
	// Used is told of each session that begins (1) or ends (-1) to use it; it must not wait.
	Used func(int)
}

// Exports are a session's. Safe for concurrent use.
type Exports struct {
	log *slog.Logger
	dir Directory

	mu    sync.Mutex
	l     *net.UnixListener
	items map[[16]byte]*Item
	conns int
}

// New makes an empty set; it opens nothing yet.
func New(log *slog.Logger, dir Directory) *Exports {
	return &Exports{log: log, dir: dir, items: make(map[[16]byte]*Item)}
}

// abstract is the name under which an exchange listens: in the abstract namespace, since sessions have no
// directory that they may write to.
func abstract(name [2]uint64) string {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], name[0])
	binary.LittleEndian.PutUint64(b[8:], name[1])
	return "sluice-exchange-" + hex.EncodeToString(b[:])
}

// listen opens the socket; mu is held.
func (e *Exports) listen() error {
	if e.l != nil {
		return nil
	}
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	name := [2]uint64{binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])}
	l, err := unixsock.ListenAbstract(abstract(name))
	if err != nil {
		return fmt.Errorf("exchange: %w", err)
	}
	e.l = l
	go e.accept(l)
	e.dir.Publish(name)
	return nil
}

// Add exports an item.
func (e *Exports) Add(it *Item) (t Token, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.listen(); err != nil {
		return t, err
	}
	_, _ = rand.Read(t[:16])
	binary.LittleEndian.PutUint32(t[16:], uint32(e.dir.Slot()))
	binary.LittleEndian.PutUint32(t[20:], it.Kind)
	e.items[t.secret()] = it
	return t, nil
}

// Remove withdraws an export. Who has opened it already keeps it.
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
	if it := e.items[t.secret()]; it != nil && t.Slot() == e.dir.Slot() && t.Kind() == it.Kind && t.plain() {
		return it
	}
	return nil
}

// Close ends the exchange, for those who run several sessions in one process.
func (e *Exports) Close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.l != nil {
		e.l.Close()
	}
}

func (e *Exports) accept(l *net.UnixListener) {
	for {
		c, err := l.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			e.log.Warn("exchange", "error", err)
			time.Sleep(10 * time.Millisecond) // descriptors or memory have run out
			continue
		}
		e.mu.Lock()
		full := e.conns >= maxConns
		if !full {
			e.conns++
		}
		e.mu.Unlock()
		if full {
			c.Close()
			continue
		}
		go func() {
			e.serve(c)
			c.Close()
			e.mu.Lock()
			e.conns--
			e.mu.Unlock()
		}()
	}
}

// serve answers one session, and stays until it has no more use for the export.
func (e *Exports) serve(c *net.UnixConn) {
	if p, err := unixsock.PeerOf(c); err != nil || !e.dir.Member(p.PID) {
		e.log.Warn("exchange refused: the caller is no session of the lease", "pid", p.PID, "error", err)
		return
	}
	_ = c.SetDeadline(time.Now().Add(openTime))
	var t Token
	if n, err := c.Read(t[:]); err != nil || n != len(t) {
		return
	}
	e.mu.Lock()
	it := e.items[t.secret()]
	if it == nil || t.Slot() != e.dir.Slot() || t.Kind() != it.Kind || !t.plain() {
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

// An answer: kind and device, offset, size, charge, handle.
func encode(it *Item) []byte {
	b := make([]byte, replySize)
	binary.LittleEndian.PutUint32(b, it.Kind)
	binary.LittleEndian.PutUint32(b[4:], uint32(it.Device))
	binary.LittleEndian.PutUint64(b[8:], it.Offset)
	binary.LittleEndian.PutUint64(b[16:], it.Size)
	binary.LittleEndian.PutUint64(b[24:], it.Charged)
	copy(b[32:], it.Handle[:])
	return b
}

func decode(b []byte) *Item {
	it := &Item{
		Kind: binary.LittleEndian.Uint32(b), Device: int(binary.LittleEndian.Uint32(b[4:])), Offset: binary.LittleEndian.Uint64(b[8:]),
		Size: binary.LittleEndian.Uint64(b[16:]), Charged: binary.LittleEndian.Uint64(b[24:]), FD: -1,
	}
	copy(it.Handle[:], b[32:])
	return it
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
func Open(dir Directory, t Token) (*Use, *Item, error) {
	if t.Slot() == dir.Slot() {
		return nil, nil, ErrOwn
	}
	name, pid, ok := dir.Find(t.Slot())
	if !ok || !t.plain() {
		return nil, nil, ErrToken
	}
	c, err := dial(name)
	switch {
	case errors.Is(err, unix.EPERM):
		return nil, nil, fmt.Errorf("exchange: %w", err)
	case err != nil:
		return nil, nil, ErrToken // it has ended
	}
	_ = c.SetDeadline(time.Now().Add(openTime))
	if p, err := unixsock.PeerOf(c); err != nil || p.PID != pid {
		c.Close()
		return nil, nil, ErrToken
	}
	it, err := ask(c, t)
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	_ = c.SetDeadline(time.Time{})
	return &Use{c}, it, nil
}

// dial connects. A queue of connections that is full is waited for.
func dial(name [2]uint64) (*net.UnixConn, error) {
	for until := time.Now().Add(openTime); ; {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: "@" + abstract(name)})
		if !errors.Is(err, unix.EAGAIN) || time.Now().After(until) {
			return c, err
		}
		time.Sleep(time.Millisecond)
	}
}

func ask(c *net.UnixConn, t Token) (*Item, error) {
	if _, err := c.Write(t[:]); err != nil {
		return nil, ErrToken
	}
	b := make([]byte, replySize)
	oob := make([]byte, unix.CmsgSpace(4))
	n, on, _, _, err := c.ReadMsgUnix(b, oob)
	var fds []int
	if msgs, perr := unix.ParseSocketControlMessage(oob[:on]); perr == nil {
		for _, m := range msgs {
			f, _ := unix.ParseUnixRights(&m)
			fds = append(fds, f...)
		}
	}
	it := decode(b)
	if err == nil && n == replySize && it.Kind == t.Kind() && hasFile(it.Kind) == (len(fds) == 1) {
		if len(fds) == 1 {
			it.FD = fds[0]
		}
		return it, nil
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	return nil, ErrToken
}
