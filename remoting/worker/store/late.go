package store

import (
	"sync"
	"time"
)

// A session does not wait until the disk has a small image. The image is published on another goroutine: a disk takes some 20 ms
// for that, and a program that compiles its kernels as it runs would wait so long for each of them.

// lateMost is the size in bytes up to which an upload is kept in memory as well as in its file, so that its session can load it before
// the file is on the disk. A larger image takes so long to send that the wait for the disk matters little. Tests set it.
var lateMost uint64 = 4 << 20

// placing is how many images may be published at the same time, each by a thread of its own. Later waits while there are that many.
const placing = 8

// late knows which images are being published.
type late struct {
	mu   sync.Mutex
	cond *sync.Cond
	sums map[Sum]int
	n    int
}

func (l *late) init() {
	l.cond = sync.NewCond(&l.mu)
	l.sums = make(map[Sum]int)
}

// wait returns when the image is not being published.
func (l *late) wait(sum Sum) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.sums[sum] > 0 {
		l.cond.Wait()
	}
}

func (l *late) ended(sum Sum) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n--
	if l.sums[sum]--; l.sums[sum] == 0 {
		delete(l.sums, sum)
	}
	l.cond.Broadcast()
}

// Later runs place on another goroutine. place calls Publish of an upload of that sum; until it returns, Get of that sum waits.
func (s *Store) Later(sum Sum, place func()) {
	l := &s.late
	l.mu.Lock()
	for l.n >= placing {
		l.cond.Wait()
	}
	l.n++
	l.sums[sum]++
	l.mu.Unlock()
	go func() {
		defer l.ended(sum)
		place()
	}()
}

// Settle waits until no image is being published, but no longer than for the time given.
func (s *Store) Settle(most time.Duration) {
	l := &s.late
	over := time.Now().Add(most)
	t := time.AfterFunc(most, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.cond.Broadcast()
	})
	defer t.Stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.n > 0 && time.Now().Before(over) {
		l.cond.Wait()
	}
}
