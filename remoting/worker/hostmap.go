package worker

// Host memory that kernels reach.
//
// Page-locked memory of the client has a copy here, registered with the driver: kernels read
// and write this copy. It has the client's address, or another one where that is in use
// here. The client keeps both equal. It sends what its program has written (HOST_WRITE,
// HOST_MERGE) before work that could read it. It fetches what the GPU has written (HOST_READ)
// after a wait, or gets it unasked (hostwatch.go). Device memory that the program writes to
// is also written by HOST_WRITE, and read by COPY_OUT.
//
// The executor does all of this in the order of the frames, with one exception. A function of
// the client that a stream calls reads and writes this memory, and what it has written must
// be here before the stream goes on. The executor may be stuck behind it. So the thread
// that reads ahead for the function's answer (hostfns.go) carries out the writes that it finds
// on the way. That is why the reader stays locked until bytes are written.

/*
#include "driver.h"
*/
import "C"

import (
	"bytes"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	hostPage = 4096
	// hostTop is the end of the addresses that a process of this machine may have.
	hostTop = 1 << 47
)

// hostMap is one HOST_MAP's memory.
type hostMap struct {
	base   uint64
	mem    []byte
	shared bool // the client's own memory (hostshare.go)
}

// hostMaps has a session's maps by their addresses.
type hostMaps struct {
	mu    sync.Mutex // guards maps, which the executor alone changes
	maps  []hostMap
	bytes uint64 // of the maps that are this process's memory
	moved uint64 // of the executor: where the next map goes whose address is in use here

	shared atomic.Uint64 // bytes of the maps that are the client's memory

	watch hostWatches
}

// find gives the place of the first map that ends above p. The lock is held.
func (h *hostMaps) find(p uint64) int {
	i, _ := slices.BinarySearchFunc(h.maps, p, func(m hostMap, p uint64) int {
		if m.base+uint64(len(m.mem)) <= p {
			return -1
		}
		return 1
	})
	return i
}

// at calls f with n bytes from p on, which stay mapped until f has returned. It is false
// if not all of them are. They may lie in several maps that follow on each other.
func (h *hostMaps) at(p, n uint64, f func(mem []byte)) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := h.find(p)
	if i == len(h.maps) || h.maps[i].base > p || n > hostTop {
		return false
	}
	first := h.maps[i].mem[p-h.maps[i].base:]
	for end := p + uint64(len(first)); end < p+n; end += uint64(len(h.maps[i].mem)) {
		if i++; i == len(h.maps) || h.maps[i].base != end {
			return false
		}
	}
	f(unsafe.Slice(unsafe.SliceData(first), n))
	return true
}

// has says whether p lies in a map.
func (h *hostMaps) has(p uint64) bool { return h.at(p, 1, func([]byte) {}) }

func (s *session) hostMap(p []byte) int32 {
	var m wire.HostMap
	s.dec.Reset(p)
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if !wholePages(m.Address, m.Size) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	h := &s.host
	if m.Size > wire.MaxHostMap-h.bytes {
		s.log.Warn("host memory that kernels reach is refused", "bytes", m.Size, "has", h.bytes, "limit", uint64(wire.MaxHostMap))
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	base, rc := s.addHostMap(&m, -1)
	(&wire.HostMapReply{Address: base}).Encode(&s.enc)
	return rc
}

// wholePages says whether n bytes from an address on are pages that a client may have.
func wholePages(addr, n uint64) bool {
	return n != 0 && (addr|n)%hostPage == 0 && addr >= hostPage && addr < hostTop && n <= hostTop-addr
}

// addHostMap carries out a HOST_MAP, or with the descriptor of the client's memory a HOST_SHARE.
func (s *session) addHostMap(m *wire.HostMap, fd int) (base uint64, rc int32) {
	h := &s.host
	mem, rc := mapAt(m.Address, m.Size, fd)
	if rc == C.CUDA_ERROR_NOT_SUPPORTED && m.Move != 0 {
		mem, rc = h.mapElsewhere(m.Size, fd)
	}
	if rc != 0 {
		s.log.Warn("host memory that kernels reach is refused", "bytes", m.Size, "address", m.Address, "result", rc)
		return 0, rc
	}
	base = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	h.mu.Lock()
	defer h.mu.Unlock()
	n := hostMap{base, mem, fd >= 0}
	h.count(&n, m.Size)
	h.maps = slices.Insert(h.maps, h.find(base), n)
	return base, 0
}

// count adds to the bytes of the maps of a map's kind. The lock is held.
func (h *hostMaps) count(m *hostMap, bytes uint64) {
	if m.shared {
		h.shared.Add(bytes)
	} else {
		h.bytes += bytes
	}
}

// Addresses for memory whose own is in use here: nobody is known to use them, and the
// client places its memory below them.
const (
	movedLo  = 0x6c0000000000
	movedHi  = 0x700000000000
	movedGap = 2 << 20
)

// mapElsewhere is mapAt for an address of its own choice.
func (h *hostMaps) mapElsewhere(size uint64, fd int) (mem []byte, rc int32) {
	for range 16 {
		if h.moved < movedLo || h.moved+size > movedHi {
			h.moved = movedLo
		}
		mem, rc = mapAt(h.moved, size, fd)
		h.moved += (size + movedGap - 1) / movedGap * movedGap
		if rc != C.CUDA_ERROR_NOT_SUPPORTED {
			break
		}
	}
	return mem, rc
}

// mapAt maps and registers memory at an address that nothing else of this process has.
func mapAt(addr, size uint64, fd int) ([]byte, int32) {
	var p unsafe.Pointer
	if rc := int32(C.sl_host_map(&p, C.uint64_t(addr), C.uint64_t(size), C.int(fd))); rc != 0 {
		return nil, rc
	}
	return unsafe.Slice((*byte)(p), size), 0
}

func (s *session) hostUnmap(p []byte) int32 {
	var m wire.HostUnmap
	s.dec.Reset(p)
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	s.host.dropWatches(m.Address)
	mem := s.host.remove(m.Address)
	if mem == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	// The driver may wait for a host function, and so for the goroutine that reads ahead for its answer.
	if rc := C.sl_host_unmap(unsafe.Pointer(unsafe.SliceData(mem)), C.uint64_t(len(mem))); rc != 0 {
		s.host.bytes += uint64(len(mem)) // it stays, though the client has no name for it
		return int32(rc)
	}
	return 0
}

// remove takes the map at an address out, nil if there is none; nobody uses it then.
func (h *hostMaps) remove(base uint64) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := h.find(base)
	if i == len(h.maps) || h.maps[i].base != base {
		return nil
	}
	m := h.maps[i]
	h.maps = slices.Delete(h.maps, i, i+1)
	h.count(&m, -uint64(len(m.mem)))
	return m.mem
}

// hostWriteFrame writes a frame's bytes to memory that kernels reach. The reader is
// locked when it begins, and unlocked when it returns.
func (s *session) hostWriteFrame() (int32, error) {
	p, err := s.rd.Peek(wire.HostWriteSize)
	if err != nil || s.rd.Left() > wire.MaxCopyIn {
		s.rd.Done()
		return s.malformed(), nil
	}
	var m wire.HostWrite
	s.dec.Reset(p)
	m.Decode(&s.dec)
	if s.host.has(m.Dst) {
		f := source{rd: s.rd}
		if !s.host.at(m.Dst, uint64(f.left()), func(mem []byte) { err = f.read(mem) }) {
			return C.CUDA_ERROR_INVALID_VALUE, f.end()
		}
		return 0, errors.Join(err, f.end())
	}
	f, err := s.source()
	if err != nil {
		return 0, err
	}
	s.given = m.Stream
	rc, err := s.copyIn(&f, &wire.CopyIn{Dst: m.Dst, Stream: m.Stream})
	if err = errors.Join(err, f.end()); rc != 0 || err != nil {
		return rc, err
	}
	s.in.close(s)
	stream, _ := s.handle(wire.KindStream, m.Stream)
	s.gates.StepOut()
	return int32(C.sl_stream_sync(C.uint64_t(stream))), nil
}

// hostMergeFrame writes the bytes that the client's program has changed, and leaves
// their neighbours to the GPU. The reader is locked when it begins, and unlocked when it
// returns.
func (s *session) hostMergeFrame() (int32, error) {
	defer s.rd.Done()
	p, err := s.rd.Payload()
	if err != nil {
		return 0, err
	}
	s.dec.Reset(p)
	rc, ok := s.host.merge(&s.dec, false)
	if !ok {
		return s.malformed(), nil
	}
	return rc, nil
}

// merge carries out a HOST_MERGE. It is false if the payload is malformed. If the GPU has changed the same bytes to other
// values, the client's win and the result is an error; ahead of the executor nothing is then done, so that the executor finds
// the same.
func (h *hostMaps) merge(d *wire.Decoder, ahead bool) (int32, bool) {
	var m wire.HostMerge
	m.Decode(d)
	n := int(m.Size)
	if d.Err() != nil || n == 0 || n%8 != 0 || n > wire.MaxMerge || m.Checked > 1 || d.Left() != n/8+n+int(m.Checked)*n {
		return 0, false
	}
	mask, was, b := d.Bytes(n/8), d.Bytes(int(m.Checked)*n), d.Bytes(n)
	clash := false
	put := merge
	if m.Dst%8 == 0 && h.watch.has(m.Dst) {
		put = func(mem, b, mask []byte) {
			mergeTurns(mem, b, mask, func(k int) bool { return h.watch.changedLast(m.Dst + uint64(8*k)) })
		}
	}
	if !h.watch.merged(m.Dst, b, mask, func() bool {
		return h.at(m.Dst, uint64(n), func(mem []byte) {
			clash = m.Checked == 1 && clashes(mem, b, was, mask)
			if !clash || !ahead {
				put(mem, b, mask)
			}
		})
	}) {
		return C.CUDA_ERROR_INVALID_VALUE, true
	}
	if clash {
		return C.CUDA_ERROR_NOT_SUPPORTED, true
	}
	return 0, true
}

// clashes reports whether mem no longer has what it had in bytes whose bits are set in mask, and has not what b has either.
func clashes(mem, b, was, mask []byte) bool {
	if bytes.Equal(mem, was) {
		return false
	}
	for i := range mem {
		if mask[i/8]>>(i%8)&1 != 0 && mem[i] != was[i] && mem[i] != b[i] {
			return true
		}
	}
	return false
}

// hostRead answers with the bytes of memory that kernels reach.
func (s *session) hostRead(call uint32, d *wire.Decoder) (int32, bool) {
	var m wire.HostRead
	m.Decode(d)
	if d.Done() != nil || call == 0 || m.Size == 0 || m.Size > wire.MaxCopyIn {
		return 0, false
	}
	var b []byte
	if !s.host.at(m.Src, m.Size, func(mem []byte) { b = bytes.Clone(mem) }) {
		return C.CUDA_ERROR_INVALID_VALUE, true
	}
	if err := s.reply(wire.OpHostRead, call, 0, b); err != nil {
		s.leave("reply", err)
	}
	return 0, true
}

// hostReadFrame is hostRead for the executor.
func (s *session) hostReadFrame(p []byte) int32 {
	s.dec.Reset(p)
	rc, ok := s.hostRead(s.hdr.Call, &s.dec)
	if !ok {
		return s.malformed()
	}
	s.pending = rc == 0
	return rc
}

// hostAhead carries out an operation that was read ahead of a stuck executor, if that
// needs no driver. The reader is locked.
func (s *session) hostAhead(r *wire.Request, payload []byte) bool {
	d, h := wire.NewDecoder(payload), &s.host
	switch r.Op {
	case wire.OpHostRead:
		rc, ok := s.hostRead(r.Call, d)
		return ok && rc == 0
	case wire.OpHostWrite:
		var m wire.HostWrite
		m.Decode(d)
		b := d.Rest()
		return d.Err() == nil && h.at(m.Dst, uint64(len(b)), func(mem []byte) { copy(mem, b) })
	case wire.OpHostMerge:
		rc, ok := h.merge(d, true)
		return ok && rc == 0
	}
	return false
}

// merge copies the bytes of b whose bits are set in mask.
func merge(mem, b, mask []byte) {
	for k, bits := range mask {
		to, from := mem[8*k:8*k+8], b[8*k:8*k+8]
		switch bits {
		case 0:
		case 0xff:
			copy(to, from)
		default:
			for i := range to {
				if bits>>i&1 != 0 {
					to[i] = from[i]
				}
			}
		}
	}
}
