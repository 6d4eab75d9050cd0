package store

import (
	"sync"
	"time"
)

// Images that are put in their place while their session goes on: a disk takes some 20 ms for that, which a program that compiles
// its kernels as it runs would wait for with each of them.

// lateMost is the size in bytes up to which an image is in memory as well while it comes in, so that its session has it before
// its file is on the disk. For larger ones the disk takes little of the time that they take anyway. Tests set it.
var lateMost uint64 = 4 << 20

// placing bounds the images that are put in their place at the same time: each has a thread. One more waits for another.
const placing = 8

// late knows which images are on the way to their place.
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

// wait returns when an image is not on its way.
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

// Later runs place, which calls Publish of an upload of that sum, on another goroutine. Get of that sum waits for it meanwhile.
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

// Settle waits until no image is on its way, but no longer than for the time given.
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
