package account

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// The control messages between a session process and its supervisor: one
// request, one reply, each one packet of a SOCK_SEQPACKET socket. The session
// process parses an untrusted client's bytes, so the supervisor trusts no
// message either: the worst one can do is to give its own memory back early.

// Requests.
const (
	opReserve   = 1 // dev, bytes -> ok, info
	opRelease   = 2 // dev, bytes -> info
	opInfo      = 3 // dev -> info
	opOverhead  = 4 // dev, bytes, flag force -> ok, info
	opProcesses = 5 // dev -> n, n * (pid, used, name[40])
)

const requestSize = 24
const flagForce = 1

// MaxMessage is the largest control message, in bytes.
const MaxMessage = 8 << 10

// maxListed keeps a process list within one message.
const maxListed = 128

// ErrMessage says that a control message is malformed.
var ErrMessage = errors.New("account: malformed control message")

// Serve answers one request on behalf of a session; reply is appended to buf.
func Serve(s *Session, req, buf []byte) ([]byte, error) {
	if len(req) != requestSize {
		return nil, fmt.Errorf("%w: %d bytes", ErrMessage, len(req))
	}
	op := binary.LittleEndian.Uint32(req[0:])
	dev := binary.LittleEndian.Uint32(req[4:])
	bytes := binary.LittleEndian.Uint64(req[8:])
	flags := binary.LittleEndian.Uint32(req[16:])
	if dev >= uint32(s.lease.book.Devices()) || flags&^flagForce != 0 {
		return nil, fmt.Errorf("%w: device %d flags %#x", ErrMessage, dev, flags)
	}
	d := int(dev)
	e := wire.NewEncoder(buf)
	ok := uint32(1)
	switch op {
	case opReserve:
		if !s.Reserve(d, bytes) {
			ok = 0
		}
	case opRelease:
		s.Release(d, bytes)
	case opInfo:
	case opOverhead:
		if !s.Overhead(d, bytes, flags&flagForce != 0) {
			ok = 0
		}
	case opProcesses:
		ps := s.Processes(d)
		ps = ps[:min(len(ps), maxListed)]
		e.U32(uint32(len(ps)))
		for _, p := range ps {
			e.U32(p.PID)
			e.U64(p.Used)
			e.Fixed(p.Name, 40)
		}
		return e.Buf(), nil
	default:
		return nil, fmt.Errorf("%w: request %d", ErrMessage, op)
	}
	i := s.Info(d)
	e.U32(ok)
	e.U32(i.Sessions)
	e.U64(i.Total)
	e.U64(i.Used)
	return e.Buf(), nil
}

// Remote is a session's account kept by the supervisor, reached by messages.
// Safe for concurrent use.
type Remote struct {
	mu  sync.Mutex
	rt  func(req, reply []byte) (int, error)
	bad func(error)
	buf [MaxMessage]byte
}

// NewRemote returns an account that does its round trips with rt. bad is
// called when one fails: the account is lost and the process must end.
func NewRemote(rt func(req, reply []byte) (int, error), bad func(error)) *Remote {
	return &Remote{rt: rt, bad: bad}
}

// call does one round trip; use reads the reply under the lock.
func (r *Remote) call(op, dev int, bytes uint64, flags uint32, use func(d *wire.Decoder)) {
	var req [requestSize]byte
	binary.LittleEndian.PutUint32(req[0:], uint32(op))
	binary.LittleEndian.PutUint32(req[4:], uint32(dev))
	binary.LittleEndian.PutUint64(req[8:], bytes)
	binary.LittleEndian.PutUint32(req[16:], flags)
	r.mu.Lock()
	defer r.mu.Unlock()
	n, err := r.rt(req[:], r.buf[:])
	if err != nil {
		r.bad(err)
		return
	}
	d := wire.NewDecoder(r.buf[:n])
	use(d)
	if err := d.Done(); err != nil {
		r.bad(err)
	}
}

func (r *Remote) state(op, dev int, bytes uint64, flags uint32) (ok bool, i Info) {
	r.call(op, dev, bytes, flags, func(d *wire.Decoder) {
		ok = d.U32() != 0
		i.Sessions = d.U32()
		i.Total = d.U64()
		i.Used = d.U64()
	})
	return ok, i
}

// Reserve is Session.Reserve.
func (r *Remote) Reserve(dev int, bytes uint64) bool {
	ok, _ := r.state(opReserve, dev, bytes, 0)
	return ok
}

// Release is Session.Release.
func (r *Remote) Release(dev int, bytes uint64) { r.state(opRelease, dev, bytes, 0) }

// Overhead is Session.Overhead.
func (r *Remote) Overhead(dev int, bytes uint64, force bool) bool {
	f := uint32(0)
	if force {
		f = flagForce
	}
	ok, _ := r.state(opOverhead, dev, bytes, f)
	return ok
}

// Info is Session.Info.
func (r *Remote) Info(dev int) Info {
	_, i := r.state(opInfo, dev, 0, 0)
	return i
}

// Processes is Session.Processes.
func (r *Remote) Processes(dev int) (ps []Process) {
	r.call(opProcesses, dev, 0, 0, func(d *wire.Decoder) {
		n := d.Count(52, maxListed)
		for range n {
			var p Process
			p.PID = d.U32()
			p.Used = d.U64()
			name := d.Bytes(40)
			for i, c := range name {
				if c == 0 {
					name = name[:i]
					break
				}
			}
			p.Name = string(name)
			ps = append(ps, p)
		}
	})
	return ps
}
