package turns

import (
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Monotonic is the machine's clock, the same for all processes.
type Monotonic struct{}

var (
	started = time.Now()
	offset  = firstOffset()
)

// firstOffset returns CLOCK_MONOTONIC at the time of started. Go's monotonic clock is the same
// one, counted from an unknown point, and takes no system call to read.
func firstOffset() int64 {
	best, at := int64(1<<62), int64(0)
	for range 8 {
		a := time.Since(started)
		var ts unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
		b := time.Since(started)
		if int64(b-a) < best {
			best, at = int64(b-a), ts.Nano()-int64(a+b)/2
		}
	}
	return at
}

func monotonic() int64 { return offset + int64(time.Since(started)) }

// Now is CLOCK_MONOTONIC.
func (Monotonic) Now() int64 { return monotonic() }

// Spins says yes.
func (Monotonic) Spins() bool { return true }

// Wait waits for a futex with a time limit, or sleeps.
func (Monotonic) Wait(word *uint32, old uint32, until int64, _ bool) {
	d := until - monotonic()
	if d <= 0 {
		return
	}
	ts := unix.NsecToTimespec(d)
	if word == nil {
		_ = unix.Nanosleep(&ts, nil)
		return
	}
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), 0 /* FUTEX_WAIT */, uintptr(old), uintptr(unsafe.Pointer(&ts)), 0, 0)
}

// wake changes a futex word and wakes those who wait for that.
func wake(w *atomic.Uint32) {
	w.Add(1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(w)), 1 /* FUTEX_WAKE */, 1<<30, 0, 0, 0)
}
