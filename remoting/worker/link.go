package worker

// Linking at run time. The driver compiles and links: LINK_CREATE begins, each LINK_ADD gives it an
// input, LINK_COMPLETE has it link, and LINK_READ reads the result. An input travels as a module's image
// does, by its SHA-256. The driver takes what it needs of it at once.
//
// A link state's options and its logs are the driver's to use until the link state ends.

/*
#include "driver.h"
#include <stdlib.h>
*/
import "C"

import (
	"errors"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/cubin"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// maxLinking bounds what a session's link states were given, in bytes. The driver has it in host memory.
const maxLinking = 512 << 20

// linkCost is what a link state or an input takes besides its bytes.
const linkCost = 4096

// link is a link state.
type link struct {
	opts   []*jit // of the link state, then of its inputs
	names  []unsafe.Pointer
	cost   int // counted in session.linking
	result unsafe.Pointer
	size   uint64 // of result
}

func (s *session) linkFrame(p []byte) int32 {
	switch s.hdr.Op {
	case wire.OpLinkCreate:
		return s.linkCreate(p)
	case wire.OpLinkAdd:
		return s.linkAdd(p)
	case wire.OpLinkComplete:
		return s.linkComplete(p)
	default:
		return s.linkRead(p)
	}
}

// takeLinking reports whether a link state may have so many bytes more, and counts them if so.
func (s *session) takeLinking(l *link, n int) bool {
	if n > maxLinking-s.linking {
		s.log.Warn("refused: the session links too much at a time", "bytes", n, "linking_mib", s.linking>>20, "limit_mib", maxLinking>>20)
		return false
	}
	s.linking += n
	l.cost += n
	return true
}

// freeLink lets go of what a link state held, once the driver does not use it any more.
func (s *session) freeLink(l *link) {
	for _, j := range l.opts {
		j.free()
	}
	for _, p := range l.names {
		C.free(p)
	}
	s.linking -= l.cost
	*l = link{}
}

func (s *session) linkCreate(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.LinkCreate
	m.Decode(d)
	n := d.Elements(m.NOptions, wire.JITOptionSize, wire.MaxJITOptions)
	if d.Err() != nil {
		return s.malformed()
	}
	j, rc := s.jitOptions(n)
	l := &link{opts: []*jit{j}}
	if rc == 0 && d.Done() != nil {
		rc = s.malformed()
	}
	if rc == 0 && !s.takeLinking(l, linkCost+int(j.infoRoom+j.errRoom)) {
		rc = C.CUDA_ERROR_OUT_OF_MEMORY
	}
	var real C.uint64_t
	if rc == 0 {
		rc = int32(C.sl_link_create(&real, C.uint32_t(j.n), j.opts, j.vals))
	}
	if rc != 0 {
		s.freeLink(l)
		s.bind(wire.KindLink, m.ID, 0, C.CUresult(rc))
		return rc
	}
	s.bindObj(wire.KindLink, m.ID, uint64(real), l)
	j.appendLogs(&s.enc)
	return 0
}

// link gives a link state and the driver's name for it.
func (s *session) link(id uint32) (*link, uint64) {
	if p := s.tables[wire.KindLink].live(id); p != nil && p.err == 0 {
		if l, ok := p.obj.(*link); ok {
			return l, p.real
		}
	}
	return nil, 0
}

func (s *session) linkAdd(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.LinkAdd
	m.Decode(d)
	n := d.Elements(m.NOptions, wire.JITOptionSize, wire.MaxJITOptions)
	if d.Err() != nil || m.Size == 0 || m.Size > wire.MaxImage || m.Nname > wire.MaxLinkName {
		return s.malformed()
	}
	l, real := s.link(m.ID)
	if l == nil {
		return s.badHandle(wire.KindLink, m.ID)
	}
	defer s.placeImage()
	sum := store.Sum(m.Sum)
	mem, err := s.openImage(sum, m.Size)
	if errors.Is(err, store.ErrNotFound) {
		return wire.ResultNotInStore
	}
	if err != nil {
		s.log.Error("input not linked", "image", sum, "error", err)
		return C.CUDA_ERROR_INVALID_IMAGE
	}
	defer mem.Close()
	j, rc := s.jitOptions(n)
	l.opts = append(l.opts, j)
	name := string(d.Bytes(int(m.Nname)))
	if rc == 0 && d.Done() != nil {
		rc = s.malformed()
	}
	if rc == 0 && j.logs {
		rc = C.CUDA_ERROR_INVALID_VALUE // the link state's are the logs
	}
	if rc == 0 {
		if err := cubin.CheckInput(mem.Bytes()); err != nil {
			s.log.Error("input not linked", "image", sum, "error", err)
			rc = C.CUDA_ERROR_INVALID_IMAGE
		}
	}
	if rc == 0 && !s.takeLinking(l, linkCost+int(m.Size)) {
		rc = C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if rc == 0 {
		text := unsafe.Pointer(C.CString(name))
		l.names = append(l.names, text)
		rc = int32(C.sl_link_add(C.uint64_t(real), C.uint32_t(m.Type), at(mem.Bytes()), C.uint64_t(m.Size), (*C.char)(text), C.uint32_t(j.n), j.opts, j.vals))
	}
	l.opts[0].appendLogs(&s.enc)
	return rc
}

func (s *session) linkComplete(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.LinkComplete
	m.Decode(d)
	if d.Done() != nil {
		return s.malformed()
	}
	l, real := s.link(m.ID)
	if l == nil {
		return s.badHandle(wire.KindLink, m.ID)
	}
	var image unsafe.Pointer
	var size C.uint64_t
	rc := int32(C.sl_link_complete(C.uint64_t(real), &image, &size))
	if rc == 0 && (image == nil || size == 0 || size > wire.MaxImage) {
		s.log.Error("linked image not taken", "bytes", uint64(size))
		rc = C.CUDA_ERROR_UNKNOWN
	}
	if rc == 0 {
		l.result, l.size = image, uint64(size)
		(&wire.LinkCompleteReply{Size: uint64(size)}).Encode(&s.enc)
	}
	l.opts[0].appendLogs(&s.enc)
	return rc
}

func (s *session) linkRead(p []byte) int32 {
	d := &s.dec
	d.Reset(p)
	var m wire.LinkRead
	m.Decode(d)
	if d.Done() != nil || m.Size > wire.MaxLinkRead {
		return s.malformed()
	}
	l, _ := s.link(m.ID)
	if l == nil {
		return s.badHandle(wire.KindLink, m.ID)
	}
	if m.Offset > l.size || m.Size > l.size-m.Offset {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	s.enc.Bytes(unsafe.Slice((*byte)(l.result), l.size)[m.Offset:][:m.Size])
	return 0
}

func (s *session) cuLinkDestroy(h href) C.CUresult {
	rc := C.call_cuLinkDestroy(C.uint64_t(h.real))
	if l, _ := s.link(h.id); l != nil {
		s.freeLink(l)
	}
	s.unbind(wire.KindLink, h.id)
	return rc
}
