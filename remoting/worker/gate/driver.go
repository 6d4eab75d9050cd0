package gate

// A Driver is what a gate needs of a device's driver. Contexts, streams and events are named by their
// handles. Several threads may call it at the same time. A context is current on the thread that
// made it so.
type Driver interface {
	// SetContext makes a context current, and says whether it could.
	SetContext(ctx uint64) bool
	// NewEvent makes an event of the current context that takes the time. It returns 0 on failure.
	NewEvent() uint64
	// Record puts an event into a stream of the current context, and says whether it could.
	Record(event, stream uint64) bool
	// Query returns the state of an event.
	Query(event uint64) State
	// Elapsed returns the time between two events that have been reached, ns, and whether it is
	// known.
	Elapsed(from, to uint64) (ns int64, ok bool)
	// RelaxCapture lets the calling thread query events while a stream is being captured.
	RelaxCapture()
}

// State is the state of an event.
type State int

// The states of an event.
const (
	Reached State = iota
	Pending
	Failed // the driver cannot say
)
