package worker

/*
#include "gate.h"
*/
import "C"

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// simClock is the clock of a simulated device.
type simClock struct{ dev C.int }

// gateClock gives the clock that a device's turns are measured by.
func gateClock(dev int) turns.Clock {
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

// Spins says no: a clock that jumps is not waited for by looking at it.
func (c simClock) Spins() bool { return false }

func (c simClock) Wait(word *uint32, old uint32, until int64, blocked bool) {
	b := C.int(0)
	if blocked {
		b = 1
	}
	C.sl_sim_wait(c.dev, (*C.uint32_t)(unsafe.Pointer(word)), C.uint32_t(old), C.uint64_t(max(until, 0)), b)
}

// sharpSleep lets the calling thread's short sleeps end on time: the kernel rounds them
// up by 50 us otherwise.
func sharpSleep() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) }

// nap sleeps in real time, however a device counts its own.
func nap(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil)
}
