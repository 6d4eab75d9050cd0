package worker

// Handles that are part of other handles: a graph's nodes, a node's child graph, the levels of
// a mipmapped array, the planes of an array, a library's modules and kernels. The driver frees
// them with the whole, so their ids end with its id, and never reach the driver again. Only
// the executor is here.

import "slices"

// A ref names a handle of any kind: the kind, then the id.
type ref uint64

func refOf(kind int, id uint32) ref { return ref(kind)<<32 | ref(id) }

func (r ref) kind() int  { return int(r >> 32) }
func (r ref) id() uint32 { return uint32(r) }

// slot gives the slot of a handle that exists, or nil.
func (s *session) slot(r ref) *slot { return s.tables[r.kind()].live(r.id()) }

// own makes a handle part of another one.
func (s *session) own(whole ref, kind int, id uint32) {
	r := refOf(kind, id)
	p := s.slot(r)
	if p == nil || s.slot(whole) == nil || r == whole {
		return
	}
	p.kind, p.of = uint8(whole.kind()), whole.id()
	l := s.parts[whole]
	if len(l) > 0 && len(l) == cap(l) { // those that have ended by themselves make room
		l = slices.DeleteFunc(l, func(r ref) bool { return s.owner(r) != whole })
		l = slices.Grow(l, len(l)+1)
	}
	s.parts[whole] = append(l, r)
}

// owner gives what a handle is part of; 0: nothing.
func (s *session) owner(r ref) ref {
	if p := s.slot(r); p != nil && p.kind != 0 {
		return refOf(int(p.kind), p.of)
	}
	return 0
}

// partOf reports whether a handle is part of one of a kind.
func (s *session) partOf(r ref, kind int) bool { return s.owner(r).kind() == kind }

// outPart is outHandle for a handle that is part of another one.
func (s *session) outPart(whole ref, kind int, real uint64) uint32 {
	if id, known := s.tables[kind].ids[real]; known {
		return id
	}
	id := s.newHandle(kind, real)
	if id != 0 {
		s.own(whole, kind, id)
	}
	return id
}

// drop forgets an id and the ids of all that is part of its handle.
func (s *session) drop(r ref) {
	for todo := []ref{r}; len(todo) > 0; {
		r, todo = todo[len(todo)-1], todo[:len(todo)-1]
		p := s.slot(r)
		if p == nil {
			continue
		}
		for _, part := range s.parts[r] {
			if s.owner(part) == r {
				todo = append(todo, part)
			}
		}
		delete(s.parts, r)
		s.tables[r.kind()].clear(r.id(), p)
	}
}

// dropReal is unbind for a handle by the driver's name.
func (s *session) dropReal(kind int, real uint64) {
	if id, ok := s.tables[kind].ids[real]; ok && real != 0 {
		s.unbind(kind, id)
	}
}
