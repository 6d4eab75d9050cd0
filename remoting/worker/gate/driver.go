package gate

// A Driver is what a gate needs of a device's driver: contexts, streams and events by their
// handles. Its methods may be called from several threads at a time. A context is current on
// the thread that made it so.
type Driver interface {
	// SetContext makes a context current; false: it could not.
	SetContext(ctx uint64) bool
	// NewEvent makes an event of the current context that takes the time; 0: it could not.
	NewEvent() uint64
	// Record puts an event into a stream of the current context; false: it could not.
	Record(event, stream uint64) bool
	// Query says how far an event is.
	Query(event uint64) State
	// Elapsed gives the time from one event that was reached to another, ns; false: it is
	// not known.
	Elapsed(from, to uint64) (ns int64, ok bool)
	// RelaxCapture lets the calling thread query events while a stream is being captured.
	RelaxCapture()
}

// State is how far an event is.
type State int

// The states of an event.
const (
	Reached State = iota
	Pending
	Failed // the driver does not say
)
