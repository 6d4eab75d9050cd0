package worker

/*
#include "driver.h"
*/
import "C"

import (
	"fmt"

	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// cudaContext is what the worker knows of a context.
type cudaContext struct {
	dev     int
	real    uint64
	created bool // by cuCtxCreate, not a primary one
}

// newContext makes a context on a device: the primary one if flags is nil, else one of the
// client's. Every context of a session comes from here, and without a context the driver
// starts nothing on a device; so this is where a session is held to its turns.
func (s *session) newContext(dev int, flags *uint32) (*cudaContext, int32) {
	if !s.mayWork(dev) {
		s.violation(fmt.Sprintf("the session has no turns on device %d", dev))
		return nil, C.CUDA_ERROR_DEVICE_UNAVAILABLE
	}
	s.gates.AwaitPaid(dev)
	s.awaitArrived(true) // other streams are not ordered behind the new context's
	if !s.mem.chargeContext(dev) {
		return nil, C.CUDA_ERROR_OUT_OF_MEMORY
	}
	var real C.uint64_t
	var rc C.CUresult
	if flags == nil {
		rc = C.sl_ctx_retain(&real, C.int(dev))
	} else {
		rc = C.sl_ctx_create(&real, C.uint32_t(*flags), C.int(dev))
	}
	if rc != 0 {
		s.mem.unchargeContext(dev)
		return nil, int32(rc)
	}
	c := &cudaContext{dev: dev, real: uint64(real), created: flags != nil}
	s.ctxs[c.real] = c
	s.tracing.devices.Store(c.real, dev)
	return c, 0
}

// mayWork reports whether work may start on a device: the session takes turns there, or
// its owner said that no turns are kept.
func (s *session) mayWork(dev int) bool {
	if dev >= len(s.turns) {
		return false
	}
	return s.turns[dev].Tenant == control.NoSchedule || s.gates.Has(dev)
}
