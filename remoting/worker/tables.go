package worker

/*
#include "driver.h"
*/
import "C"

import (
	"fmt"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Handle tables: what the client calls things, and what the driver calls them.
// Only the executor touches them. An id is an index with a generation, so that
// an id used after its handle was destroyed is an error and never somebody
// else's handle.

const (
	indexMask = wire.HandleIndex
	genShift  = wire.HandleShift
	pageShift = 12
	// maxPages bounds the memory that a client can make the tables take: 4
	// million handles of all kinds, in 160 MiB.
	maxPages = 1024
	// noCtx stands for "no context of ours is current on the thread".
	noCtx = 0xffffffff
)

type slot struct {
	real uint64
	obj  any    // what the worker knows about it: *kernel, *image and so on
	ctx  uint32 // id of the context it was made in
	err  int32  // of its creation, when that failed
	gen  uint8
	live bool
	kind uint8 // what it is part of: 0 nothing, else the kind and id of a handle
	of   uint32
}

type table struct {
	pages [(indexMask + 1) >> pageShift]*[1 << pageShift]slot
	ids   map[uint64]uint32 // real handle to id, for handles that the driver names
	next  uint32            // next index of ours
	free  []uint32          // indices of ours to use again
}

// at returns the slot of an id, or nil when there never was one.
func (t *table) at(id uint32) *slot {
	i := id & indexMask
	p := t.pages[i>>pageShift]
	if p == nil {
		return nil
	}
	return &p[i&(1<<pageShift-1)]
}

// live returns the slot of a handle that exists, or nil.
func (t *table) live(id uint32) *slot {
	if p := t.at(id); p != nil && p.live && p.gen == uint8(id>>genShift) {
		return p
	}
	return nil
}

func (s *session) makeSlot(kind int, id uint32) *slot {
	t := &s.tables[kind]
	p := &t.pages[id&indexMask>>pageShift]
	if *p == nil {
		if s.npages == maxPages {
			return nil
		}
		s.npages++
		*p = new([1 << pageShift]slot)
	}
	return &(*p)[id&indexMask&(1<<pageShift-1)]
}

// handle gives the driver's handle for an id. Stream 0 is the default stream
// of the current context.
func (s *session) handle(kind int, id uint32) (uint64, bool) {
	if kind == wire.KindStream && id == 0 {
		return 0, true
	}
	if kind == wire.KindKernel {
		return s.kernelHandle(id)
	}
	if p := s.tables[kind].live(id); p != nil && p.err == 0 {
		return p.real, true
	}
	return 0, false
}

// badHandle is the error for an id that handle did not find: the one its
// creation ended with, or what CUDA says to a handle it does not know.
func (s *session) badHandle(kind int, id uint32) int32 {
	if p := s.tables[kind].live(id); p != nil && p.err != 0 {
		return p.err
	}
	if kind == wire.KindCtx {
		return C.CUDA_ERROR_INVALID_CONTEXT
	}
	return C.CUDA_ERROR_INVALID_HANDLE
}

// bind gives a client-chosen id its handle, or remembers why there is none.
func (s *session) bind(kind int, id uint32, real uint64, rc C.CUresult) {
	if id == 0 || id&indexMask >= wire.WorkerIndex {
		s.violation(fmt.Sprintf("handle id %#x is not the client's to choose", id))
		return
	}
	p := s.makeSlot(kind, id)
	if p == nil {
		s.violation("too many handles")
		return
	}
	if p.live && p.err == 0 {
		s.violation(fmt.Sprintf("handle id %#x is in use", id))
		return
	}
	*p = slot{real: real, ctx: s.hdr.Ctx, err: int32(rc), gen: uint8(id >> genShift), live: true}
	// Each id of memory and of an imported pool is a use of it, which ends by itself: the driver counts them.
	if pool := s.mem.pools[real]; rc != 0 || kind == wire.KindMemHandle || kind == wire.KindPool && pool != nil && pool.imported() {
		return
	}
	// The driver may name a handle again that the client has an id for: both end together.
	if old, ok := s.tables[kind].ids[real]; ok && old != id {
		s.own(refOf(kind, id), kind, old)
	}
	s.tables[kind].setID(real, id)
}

// bindObj is bind with what the worker wants to know of the handle later.
func (s *session) bindObj(kind int, id uint32, real uint64, obj any) {
	s.bind(kind, id, real, 0)
	if p := s.tables[kind].live(id); p != nil {
		p.obj = obj
	}
}

func (t *table) setID(real uint64, id uint32) {
	if real == 0 {
		return
	}
	if t.ids == nil {
		t.ids = make(map[uint64]uint32)
	}
	t.ids[real] = id
}

// unbind forgets an id whose handle the driver has freed: all ids of that handle, and of all
// that was part of it.
func (s *session) unbind(kind int, id uint32) {
	p := s.tables[kind].live(id)
	if p == nil {
		return
	}
	if newest, ok := s.tables[kind].ids[p.real]; ok && newest != id {
		s.drop(refOf(kind, newest))
	}
	s.drop(refOf(kind, id))
}

// clear empties the slot of an id.
func (t *table) clear(id uint32, p *slot) {
	if t.ids[p.real] == id {
		delete(t.ids, p.real)
	}
	*p = slot{gen: p.gen + 1}
	if id&indexMask >= wire.WorkerIndex {
		t.free = append(t.free, id&indexMask)
	}
}

// outHandle gives the id under which the client shall know a handle that came
// from the driver: the one it has already, or a new one.
func (s *session) outHandle(kind int, real uint64) uint32 {
	if id, ok := s.tables[kind].ids[real]; ok {
		return id
	}
	switch kind {
	case wire.KindEvent, wire.KindArray, wire.KindMipmap:
		// The client made all that there are, or asked for them as parts of what it made: this one was destroyed. Graphs and
		// references of textures go on naming such handles.
		return 0
	}
	return s.newHandle(kind, real)
}

// newHandle gives a new id to a handle that came from the driver.
func (s *session) newHandle(kind int, real uint64) uint32 {
	if real == 0 {
		return 0
	}
	t := &s.tables[kind]
	var i uint32
	if n := len(t.free); n > 0 {
		i, t.free = t.free[n-1], t.free[:n-1]
	} else {
		i = wire.WorkerIndex + t.next
		t.next++
	}
	p := s.makeSlot(kind, i)
	if i > indexMask || p == nil {
		s.violation("too many handles")
		return 0
	}
	*p = slot{real: real, ctx: s.hdr.Ctx, gen: p.gen, live: true}
	id := uint32(p.gen)<<genShift | i
	t.setID(real, id)
	return id
}

// each calls f for every live handle of a kind.
func (t *table) each(f func(id uint32, p *slot)) {
	for n, page := range &t.pages {
		if page == nil {
			continue
		}
		for i := range page {
			if p := &page[i]; p.live {
				f(uint32(p.gen)<<genShift|uint32(n<<pageShift|i), p)
			}
		}
	}
}
