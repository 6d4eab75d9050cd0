package worker

// The clock of a simulated GPU.

/*
#include "simclock.h"
*/
import "C"

import (
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// simClock is the clock of a simulated device.
type simClock struct{ dev C.int }

// deviceClock returns the clock that a device's turns are measured by: the simulated GPU's
// own, or the machine's.
func deviceClock(dev int) turns.Clock {
	var ns C.uint64_t
	if C.sl_sim_clock(C.int(dev), &ns) == 0 {
		return simClock{C.int(dev)}
	}
	return turns.Monotonic{}
}

func (c simClock) Now() int64 {
	var ns C.uint64_t
	C.sl_sim_clock(c.dev, &ns)
	return int64(ns)
}

// Spins says no: looking at a clock that jumps is no way to wait for it.
func (c simClock) Spins() bool { return false }

func (c simClock) Wait(word *uint32, old uint32, until int64, blocked bool) {
	b := C.int(0)
	if blocked {
		b = 1
	}
	C.sl_sim_wait(c.dev, (*C.uint32_t)(unsafe.Pointer(word)), C.uint32_t(old), C.uint64_t(max(until, 0)), b)
}
