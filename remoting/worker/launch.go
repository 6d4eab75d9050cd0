package worker

// Launches of kernels.

/*
#include "driver.h"
*/
import "C"

import (
	"encoding/binary"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Offsets in a LAUNCH payload.
const (
	launchHead  = 8 // kernel and stream id
	launchFixed = launchHead + 36
	launchAttr  = 72
)

// launch runs a kernel. It is the busiest operation: no allocation, one call
// into C.
func (s *session) launch(p []byte) int32 {
	if len(p) < launchFixed {
		return s.malformed(s.hdr.Op)
	}
	le := func(o int) uint32 { return *(*uint32)(unsafe.Pointer(&p[o])) }
	s.given = le(4)
	nattr := int(*(*uint16)(unsafe.Pointer(&p[36])))
	nparam := le(40)
	if uint64(len(p)) != launchFixed+uint64(nparam)+uint64(nattr)*launchAttr {
		return s.malformed(s.hdr.Op)
	}
	var fn uint64
	q := s.tables[wire.KindKernel].live(le(0))
	var k *kernel
	if q != nil && q.real != 0 {
		k = q.obj.(*kernel)
	}
	if k != nil && !k.img.dead {
		fn = q.real
	} else {
		s.gates.StepOut()
		var rc int32
		if k, rc = s.kernel(le(0)); rc != 0 {
			return rc
		}
		fn = k.real
		// A first launch makes the driver load the kernel, and the first of an
		// image all that the image needs.
		if k.img.used {
			defer s.mem.measureSoon()
		} else {
			k.img.used = true
			defer s.mem.measureAll()
		}
		defer s.gates.StepOut() // before that
	}
	if k.local > defaultStack {
		s.gates.StepOut()
		if rc := s.takeLocal(k.local); rc != 0 {
			return rc
		}
	}
	var stream uint64
	if id := le(4); id != 0 {
		q := s.tables[wire.KindStream].live(id)
		if q == nil || q.err != 0 {
			return s.badHandle(wire.KindStream, id)
		}
		if s.gates.Kept() {
			if rc := s.wantCtx(q.ctx); rc != 0 { // as gateOf
				return rc
			}
		}
		stream = q.real
	}
	if nattr > 0 {
		if rc := s.launchAttrs(p[launchFixed+int(nparam):]); rc != 0 {
			return rc
		}
	}
	g := s.gateHere(stream)
	if g != nil && !g.Enter(fn, gridSize(p), stream) {
		return s.noTurn()
	}
	rc := int32(C.sl_launch(C.uint64_t(fn), C.uint64_t(stream), (*C.uint8_t)(at(p[launchHead:]))))
	if g != nil && len(s.captures) > 0 {
		s.passed(g) // else the executor stays inside
	}
	return rc
}

// gridSize is the number of blocks of a LAUNCH payload.
func gridSize(p []byte) uint64 {
	x := binary.LittleEndian.Uint32(p[launchHead:])
	y := binary.LittleEndian.Uint32(p[launchHead+4:])
	z := binary.LittleEndian.Uint32(p[launchHead+8:])
	return uint64(x) * uint64(y) * uint64(z)
}

// launchAttrs puts real handles into launch attributes, in place.
func (s *session) launchAttrs(p []byte) int32 {
	for ; len(p) > 0; p = p[launchAttr:] {
		switch id := *(*uint32)(unsafe.Pointer(&p[0])); id {
		case C.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT, C.CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
			ev := (*uint64)(unsafe.Pointer(&p[8]))
			real, ok := s.handle(wire.KindCUEvent, uint32(*ev))
			if !ok {
				return s.badHandle(wire.KindCUEvent, uint32(*ev))
			}
			*ev = real
		case C.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE:
			return s.refuse("launch attribute DEVICE_UPDATABLE_KERNEL_NODE")
		}
	}
	return 0
}
