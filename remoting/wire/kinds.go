package wire

import (
	"fmt"
	"slices"
)

// sessionKinds says what a session of each kind may do. HELLO is refused if it asks for a
// kind that has no row here. A row that does not compute lists every operation that it
// allows, so that a new operation is allowed to nobody else until it is added here.
var sessionKinds = [...]struct {
	name     string
	computes bool     // allows every operation; the session takes turns where its owner keeps them
	ops      []uint16 // operations that a session allows that does not compute
}{
	SessionCompute: {name: "compute", computes: true},
	SessionObserve: {name: "observe", ops: []uint16{OpObserve, OpObserveMore, OpObserveLinks, OpObserveText, OpObserveFacts, OpBeat}},
	SessionLease:   {name: "lease"},  // carries no frames
	SessionAttach:  {name: "attach"}, // goes on with a compute session
	SessionTrace:   {name: "trace"},  // carries the trace of a compute session
	SessionBulk:    {name: "bulk"},   // carries data of a compute session's copies
}

// SessionKnown reports whether HELLO may ask for a session of the kind.
func SessionKnown(kind uint32) bool {
	return kind < uint32(len(sessionKinds)) && sessionKinds[kind].name != ""
}

// SessionOpens reports whether sessions of the kind send frames, and so need a process.
func SessionOpens(kind uint32) bool {
	return SessionKnown(kind) && (sessionKinds[kind].computes || len(sessionKinds[kind].ops) > 0)
}

// AttachKind is what the socket of a lease, and its owner, are asked for by the client of a session whose connection was lost.
func AttachKind(session uint32) uint32 { return SessionAttach | session<<LeaseKindShift }

// Attaches gives the session of an AttachKind.
func Attaches(kind uint32) (session uint32, ok bool) {
	return kind >> LeaseKindShift, kind&(1<<LeaseKindShift-1) == SessionAttach
}

// TraceKind is what the socket of a lease, and its owner, are asked for by somebody who wants a trace of the session of a process.
// pid is as the process's node sees it.
func TraceKind(pid uint32) uint32 { return SessionTrace | pid<<LeaseKindShift }

// Traces gives the process of a TraceKind.
func Traces(kind uint32) (pid uint32, ok bool) {
	return kind >> LeaseKindShift, kind&(1<<LeaseKindShift-1) == SessionTrace && kind>>LeaseKindShift != 0
}

// BulkKind is what the socket of a lease, and its owner, are asked for by the client of a session that wants a bulk connection.
func BulkKind(session uint32) uint32 { return SessionBulk | session<<LeaseKindShift }

// Bulks gives the session of a BulkKind.
func Bulks(kind uint32) (session uint32, ok bool) {
	return kind >> LeaseKindShift, kind&(1<<LeaseKindShift-1) == SessionBulk
}

// SessionAsked reports whether a client asks a lease's socket or an owner for this: a session, to go on with one, a trace of one, or a bulk
// connection for one.
func SessionAsked(kind uint32) bool {
	_, attaches := Attaches(kind)
	_, traces := Traces(kind)
	_, bulk := Bulks(kind)
	return attaches || traces || bulk || SessionOpens(kind)
}

// SessionComputes reports whether sessions of the kind may start work on a device.
func SessionComputes(kind uint32) bool {
	return kind < uint32(len(sessionKinds)) && sessionKinds[kind].computes
}

// SessionMay reports whether a session of the kind may send the operation.
func SessionMay(kind uint32, op uint16) bool {
	return SessionComputes(kind) || kind < uint32(len(sessionKinds)) && slices.Contains(sessionKinds[kind].ops, op)
}

// SessionName names a kind of session for messages.
func SessionName(kind uint32) string {
	if SessionKnown(kind) {
		return sessionKinds[kind].name
	}
	return fmt.Sprintf("kind %d", kind)
}
