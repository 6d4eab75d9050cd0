package worker

import (
	"sync"
	"testing"
	"testing/synctest"
)

// TestLeaveWaits: a context is not left while a waiter has a job of it, running or queued behind more jobs than there are threads.
func TestLeaveWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w waiters
		w.init(nil)
		defer w.stop()
		var mu sync.Mutex
		left, ran, hold := false, 0, make(chan struct{})
		for range maxWaiters + 5 {
			w.do(job{0, func() {
				<-hold
				mu.Lock()
				defer mu.Unlock()
				if ran++; left {
					t.Error("the context was left before its jobs had ended")
				}
			}})
		}
		go func() {
			w.leave(0)
			mu.Lock()
			left = true
			mu.Unlock()
		}()
		synctest.Wait()
		if left {
			t.Error("the context was left while its jobs run")
		}
		close(hold)
		synctest.Wait()
		if !left || ran != maxWaiters+5 {
			t.Errorf("left: %v, %d jobs of %d ended", left, ran, maxWaiters+5)
		}
		w.leave(0) // has none
	})
}
