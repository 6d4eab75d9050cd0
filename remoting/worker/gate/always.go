//go:build !gateswitch

package gate

// Here gives the gate of the current context's device, or nil if none is kept.
func (s *Set) Here() *Gate { return s.here }
