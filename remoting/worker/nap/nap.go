// Package nap sleeps for fractions of a millisecond, in real time and on the calling thread.
package nap

import (
	"time"

	"golang.org/x/sys/unix"
)

// Sharpen lets the calling thread's short sleeps end on time: the kernel rounds them up by
// 50 us otherwise (PR_SET_TIMERSLACK in prctl(2)).
func Sharpen() { _ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0) }

// For sleeps for d, or until a signal comes.
func For(d time.Duration) {
	ts := unix.NsecToTimespec(int64(d))
	_ = unix.Nanosleep(&ts, nil)
}
