package worker

import (
	"net"
	"slices"
	"sync"
)

// silentConns are the connections that have not said HELLO yet, the oldest first.
type silentConns struct {
	mu  sync.Mutex
	all []net.Conn
}

// add takes a connection in. The oldest makes room for it: a client that means well has said HELLO by
// then. The oldest is closed without a refusal, for which the others would have to wait.
func (s *silentConns) add(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) == maxHellos {
		s.all[0].Close()
		s.all = slices.Delete(s.all, 0, 1)
	}
	s.all = append(s.all, c)
}

// remove is for one that has said HELLO, or is gone.
func (s *silentConns) remove(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.all, c); i >= 0 {
		s.all = slices.Delete(s.all, i, i+1)
	}
}
