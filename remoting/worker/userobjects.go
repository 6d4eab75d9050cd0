package worker

// User objects. The driver counts who holds one; the client calls what is to be called at its end. The driver tells that an
// object has ended from a thread of its own, and a client that has given up an object can name it before that: so what
// the client and its graphs hold is counted here as well, and an object that nobody holds never reaches the driver again.
// Only the executor is here.

/*
#include "driver.h"
*/
import "C"

import "github.com/sluice-hpc/sluice/remoting/wire"

// userObject is one of the client's.
type userObject struct {
	fn     uint32            // id of its function
	held   uint64            // by the client
	graphs map[uint32]uint64 // by graphs, by their ids; a graph's copies hold what it held
}

func (s *session) cuUserObjectCreate(id uint32, o *C.uint64_t, fn, refs, _ uint32) C.CUresult {
	s.forgetObjects()
	f, rc := s.inGraph(fn)
	if rc != 0 {
		return C.CUresult(rc)
	}
	h := &s.hostfns
	h.mu.Lock()
	h.objects[fn] = id
	h.mu.Unlock()
	if rc := C.sl_user_object(o, f.c, C.uint32_t(refs)); rc != 0 {
		h.mu.Lock()
		delete(h.objects, fn)
		h.mu.Unlock()
		s.notInGraph(fn, f)
		return C.CUresult(rc)
	}
	s.objects[uint64(*o)] = &userObject{fn: fn, held: uint64(refs), graphs: make(map[uint32]uint64)}
	return 0
}

// object returns a user object that the client or a graph holds. Without a holder it is gone, whether or not its
// function has been called yet.
func (s *session) object(h href) *userObject {
	u := s.objects[h.real]
	if u == nil {
		return nil
	}
	for id := range u.graphs {
		if s.tables[wire.KindGraph].live(id) == nil {
			delete(u.graphs, id)
		}
	}
	if u.held > 0 || len(u.graphs) > 0 {
		return u
	}
	delete(s.objects, h.real)
	s.hostfns.mu.Lock()
	if s.hostfns.objects[u.fn] == h.id {
		delete(s.hostfns.objects, u.fn)
	}
	s.hostfns.mu.Unlock()
	s.unbind(wire.KindUserObj, h.id)
	return nil
}

func (s *session) cuUserObjectRetain(h href, n uint32) C.CUresult {
	u := s.object(h)
	if u == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.call_cuUserObjectRetain(C.uint64_t(h.real), C.uint(n))
	if rc == 0 {
		u.held += uint64(n)
	}
	return rc
}

func (s *session) cuUserObjectRelease(h href, n uint32) C.CUresult {
	u := s.object(h)
	if u == nil || uint64(n) > u.held {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.call_cuUserObjectRelease(C.uint64_t(h.real), C.uint(n))
	if rc == 0 {
		u.held -= uint64(n)
		s.object(h)
	}
	return rc
}

func (s *session) cuGraphRetainUserObject(g, h href, n, flags uint32) C.CUresult {
	u := s.object(h)
	moves := flags&C.CU_GRAPH_USER_OBJECT_MOVE != 0
	if u == nil || moves && uint64(n) > u.held {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.call_cuGraphRetainUserObject(C.uint64_t(g.real), C.uint64_t(h.real), C.uint(n), C.uint(flags))
	if rc == 0 {
		u.graphs[g.id] += uint64(n)
		if moves {
			u.held -= uint64(n)
		}
	}
	return rc
}

func (s *session) cuGraphReleaseUserObject(g, h href, n uint32) C.CUresult {
	u := s.object(h)
	if u == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.call_cuGraphReleaseUserObject(C.uint64_t(g.real), C.uint64_t(h.real), C.uint(n))
	if rc == 0 { // a copy of a graph has what the graph had, and is not counted here
		if u.graphs[g.id] -= min(uint64(n), u.graphs[g.id]); u.graphs[g.id] == 0 {
			delete(u.graphs, g.id)
		}
		s.object(h)
	}
	return rc
}

// forgetObjects forgets the user objects that have ended.
func (s *session) forgetObjects() {
	h := &s.hostfns
	h.mu.Lock()
	ended := h.ended
	h.ended = nil
	h.mu.Unlock()
	for _, id := range ended {
		if p := s.tables[wire.KindUserObj].live(id); p != nil {
			delete(s.objects, p.real)
		}
		s.unbind(wire.KindUserObj, id)
	}
}
