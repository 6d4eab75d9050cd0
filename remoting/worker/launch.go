package worker

// Launches of kernels.

/*
#include "driver.h"
*/
import "C"

import (
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// launch runs a kernel. It is the busiest operation: no allocation, one call
// into C.
func (s *session) launch(p []byte) int32 {
	var m wire.Launch
	s.dec.Reset(p)
	m.Decode(&s.dec)
	s.give(m.Stream)
	if s.dec.Err() != nil || uint64(s.dec.Left()) != uint64(m.NParam)+uint64(m.NAttrs)*wire.LaunchAttrSize {
		return s.malformed()
	}
	if m.NAttrs == 0 {
		return s.launchKernel(&m, p)
	}
	events, rc := s.launchAttrs(p[wire.LaunchSize+int(m.NParam):])
	if rc == 0 {
		rc = s.launchKernel(&m, p)
	}
	for _, id := range events {
		s.recorded(id, m.Stream, rc)
	}
	return rc
}

// launchKernel is a launch of the message p, decoded in m, whose attributes are the driver's already.
func (s *session) launchKernel(m *wire.Launch, p []byte) int32 {
	var fn uint64
	q := s.tables[wire.KindKernel].live(m.Kernel)
	var k *kernel
	if q != nil && q.real != 0 {
		k = q.obj.(*kernel)
	}
	if k != nil && !k.img.dead {
		fn = q.real
	} else {
		s.gates.StepOut()
		var rc int32
		if k, rc = s.kernel(m.Kernel); rc != 0 {
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
	if id := m.Stream; id != 0 {
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
	g := s.gateHere(stream)
	if g != nil && !g.Enter(fn, uint64(m.Grid[0])*uint64(m.Grid[1])*uint64(m.Grid[2]), stream) {
		return s.noTurn()
	}
	var rc int32
	if s.tracing.now.Load() == nil {
		rc = int32(C.sl_launch(C.uint64_t(fn), C.uint64_t(stream), (*C.uint8_t)(at(p))))
	} else {
		rc = s.traceLaunch(m, k, fn, stream, p)
	}
	if g != nil && len(s.captures) > 0 {
		s.passed(g) // otherwise the executor stays inside the gate
	}
	return rc
}
