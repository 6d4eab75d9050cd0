package wire

import (
	"testing"
	"time"
)

// A reader looks for longer while bytes come soon, and for less once they do not.
func TestLookout(t *testing.T) {
	defer func(was bool) { spare = was }(spare)
	spare = true
	var l lookout
	for _, c := range []struct {
		after time.Duration // the bytes came
		want  time.Duration
	}{
		{80 * time.Microsecond, 100 * time.Microsecond},
		{150 * time.Microsecond, 200 * time.Microsecond},
		{500 * time.Microsecond, 400 * time.Microsecond},
		{time.Second, 200 * time.Microsecond},
		{time.Second, 100 * time.Microsecond},
		{time.Second, lookLeast},
		{time.Second, lookLeast},
	} {
		l.slept(time.Now().Add(-c.after))
		if l.limit != c.want {
			t.Errorf("bytes after %v: looks for %v, want %v", c.after, l.limit, c.want)
		}
	}
	for range 20 {
		l.slept(time.Now())
	}
	if l.limit != lookMost {
		t.Errorf("bytes come at once: looks for %v, want %v", l.limit, lookMost)
	}

	n := 0
	if _, ok := l.look(func() bool { n++; return n == 3 }); !ok || n != 3 {
		t.Errorf("found at the third look: %v after %d", ok, n)
	}
	begun, ok := l.look(func() bool { return false })
	if took := time.Since(begun); ok || took < lookLeast {
		t.Errorf("nothing came: %v after %v", ok, took)
	}
	// Another thread had the processor meanwhile.
	l.limit = lookMost
	if _, ok := l.look(func() bool { time.Sleep(2 * preempted); return false }); ok || l.limit != lookLeast {
		t.Errorf("not running: %v, looks for %v from now on", ok, l.limit)
	}
	spare = false
	n = 0
	if _, ok := l.look(func() bool { n++; return false }); ok || n != 1 {
		t.Errorf("no processors to spare: %v after %d looks", ok, n)
	}
}
