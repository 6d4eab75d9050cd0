package wire

import "testing"

// What is asked for beside a kind of session is told from it, and from each other.
func TestAskedKinds(t *testing.T) {
	const pidMost = 1 << 22 // of Linux
	for _, pid := range []uint32{1, 255, 256, pidMost} {
		k := TraceKind(pid)
		if got, ok := Traces(k); got != pid || !ok {
			t.Errorf("process %d: %d, %v", pid, got, ok)
		}
		if _, ok := Attaches(k); ok || !SessionAsked(k) || SessionOpens(k) || SessionComputes(k) {
			t.Errorf("process %d: %#x is something else as well", pid, k)
		}
	}
	for _, k := range []uint32{SessionTrace, SessionCompute, SessionObserve, AttachKind(0), AttachKind(7), BulkKind(0), BulkKind(7)} {
		if _, ok := Traces(k); ok {
			t.Errorf("%#x asks for no trace", k)
		}
	}
	for _, n := range []uint32{0, 7, 255} {
		k := BulkKind(n)
		if got, ok := Bulks(k); got != n || !ok || !SessionAsked(k) || SessionOpens(k) {
			t.Errorf("session %d: %d, %v", n, got, ok)
		}
		if _, ok := Attaches(k); ok {
			t.Errorf("session %d: %#x attaches as well", n, k)
		}
	}
	if SessionAsked(SessionTrace) || SessionAsked(SessionLease) || !SessionAsked(AttachKind(3)) || SessionMay(SessionTrace, OpBeat) || SessionMay(SessionBulk, OpBeat) {
		t.Error("a kind may what it should not")
	}
}
