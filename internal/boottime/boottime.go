// Package boottime reads the clock that counts from the boot of the machine.
package boottime

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time since the machine booted, including the time that it was suspended (CLOCK_BOOTTIME, clock_gettime(2)).
// All processes share it, and nobody can set it.
func Now() time.Duration {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		panic("boottime: the kernel has no CLOCK_BOOTTIME") // since Linux 2.6.39
	}
	return time.Duration(t.Nano())
}
