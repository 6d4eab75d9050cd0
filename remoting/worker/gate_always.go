//go:build !gateswitch

package worker

// gateNow is the current context's gate.
func (s *session) gateNow() *gate { return s.gate }
