package trace

// How a trace is made.
//
//	executor, waiters   Begin and End around work on the GPU: an event on either side; the record is pending until the GPU has reached
//	                    the second. Everything else is a record at once, when it has ended
//	collector           one thread: asks which pending records are complete, and turns the GPU's times into the trace's (clock.go)
//	sender              one goroutine: hands full buffers to the trace's reader, who may be slow
//
// Memory is bounded: bufferMost bytes wait for the sender, maxPending records for the GPU, and maxNames names are known. What does
// not fit is counted, and the trace says how many records are missing.
//
// Locking: mu guards what all threads touch and is held for moments only. gpu is held by the collector while it asks the driver,
// and by Forget, so that no context goes under the collector. gpu is taken before mu.

import (
	"encoding/binary"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/gate"
)

const (
	bufferMost = 4 << 20 // bytes of records that have not been sent
	sendAt     = 64 << 10
	sendEvery  = 100 * time.Millisecond
	maxPending = 8192 // records whose end the GPU has not reached
	maxNames   = 8192
	maxCalls   = 1 << 16 // calls without an answer
	// stopTime is how long the end of a trace waits for work that is on the GPU.
	stopTime = time.Second
)

// Config is what a trace needs to know.
type Config struct {
	Driver Driver
	Head   wire.TraceHead // Wall is filled in
	// Write hands bytes of the trace to its reader. It is called by one goroutine, and may wait. After an error nothing more is written.
	Write func(p []byte, last bool) error
	// Limit is the most bytes of the trace; 0 means wire.MaxTrace.
	Limit int
}

// A Recorder makes the trace of one session. Safe for concurrent use.
type Recorder struct {
	cfg   Config
	began time.Time
	stop  chan struct{} // closed by Stop
	full  chan struct{} // there is enough to send
	done  chan struct{} // closed when all has been written

	gpu   sync.Mutex
	bases map[uint64]*base    // by context; gpu's
	ends  map[[2]uint64]int64 // by context and stream, when its last work ended; gpu's

	mu      sync.Mutex
	closed  bool // no record is taken any more
	ended   bool // nothing is pending any more
	buf     []byte
	room    int    // bytes that the trace may still have
	lost    uint64 // records since the last one that was kept
	pending []pending
	events  map[uint64][]uint64 // for reuse, by context
	names   map[string]uint32
	calls   map[uint32]call
	hostfns map[uint32][]uint64
	open    map[state]uint64
	enc     wire.Encoder
}

// A call is one that the client waits for.
type call struct {
	begin uint64
	name  uint32
}

// A state lasts for a while, one of each at a time.
type state struct {
	kind   uint16
	device int
}

// Start begins a trace.
func Start(cfg Config) *Recorder {
	if cfg.Limit == 0 {
		cfg.Limit = wire.MaxTrace
	}
	r := &Recorder{
		cfg: cfg, began: time.Now(), room: cfg.Limit, stop: make(chan struct{}), full: make(chan struct{}, 1), done: make(chan struct{}),
		bases: make(map[uint64]*base), ends: make(map[[2]uint64]int64), events: make(map[uint64][]uint64), names: make(map[string]uint32), calls: make(map[uint32]call),
		hostfns: make(map[uint32][]uint64), open: make(map[state]uint64),
	}
	h := cfg.Head
	h.Magic, h.Version, h.Wall = wire.TraceMagic, wire.TraceVersion, uint64(r.began.UnixNano())
	var e wire.Encoder
	h.Encode(&e)
	r.buf = append(r.buf, e.Buf()...)
	r.room -= len(r.buf)
	go r.collect()
	go r.send()
	return r
}

// Stop ends the trace: no further records are taken, and what has been taken is written. What has begun and not ended has a record
// up to now. Stop does not wait; Done says when all has been written.
func (r *Recorder) Stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	now := r.now()
	open := func(m wire.TraceRecord) {
		m.Given, m.End, m.Flags = m.Begin, now, wire.TraceOpen
		r.add(&m, "")
	}
	for st, begin := range r.open {
		open(wire.TraceRecord{Kind: st.kind, Device: uint32(st.device), Begin: begin})
	}
	for _, c := range r.calls {
		open(wire.TraceRecord{Kind: wire.SpanWait, Name: c.name, Begin: c.begin})
	}
	for _, begins := range r.hostfns {
		for _, begin := range begins {
			open(wire.TraceRecord{Kind: wire.SpanHostFn, Begin: begin})
		}
	}
	r.closed = true
	close(r.stop)
}

// Done is closed once all of the trace has been written.
func (r *Recorder) Done() <-chan struct{} { return r.done }

// now is the trace's time, ns.
func (r *Recorder) now() uint64 { return uint64(time.Since(r.began)) }

// add appends a record, or counts it as lost. mu is held.
func (r *Recorder) add(m *wire.TraceRecord, text string) bool {
	var b [wire.TraceRecordSize + 4 + wire.MaxTraceName + 8]byte
	n := wire.TraceRecordSize
	if m.Kind == wire.SpanName {
		binary.LittleEndian.PutUint32(b[n:], uint32(len(text)))
		n += (4 + copy(b[n+4:], text) + 7) &^ 7
	}
	need := n
	if r.lost > 0 {
		need += wire.TraceRecordSize
	}
	// The last record of all is one that says what is missing.
	if len(r.buf)+need > bufferMost || need+wire.TraceRecordSize > r.room {
		r.lost++
		return false
	}
	r.addLost()
	r.put(m, b[:n])
	if len(r.buf) >= sendAt {
		select {
		case r.full <- struct{}{}:
		default:
		}
	}
	return true
}

// addLost says how many records are missing. mu is held.
func (r *Recorder) addLost() {
	if r.lost == 0 || r.room < wire.TraceRecordSize {
		return
	}
	var b [wire.TraceRecordSize]byte
	now := r.now()
	r.put(&wire.TraceRecord{Kind: wire.SpanLost, Given: now, Begin: now, End: now, Amount: r.lost}, b[:])
	r.lost = 0
}

// put appends a record, whose bytes behind the fixed part are in b already. mu is held.
func (r *Recorder) put(m *wire.TraceRecord, b []byte) {
	m.Size = uint32(len(b))
	r.enc.Reset()
	m.Encode(&r.enc)
	copy(b, r.enc.Buf())
	r.buf = append(r.buf, b...)
	r.room -= len(b)
}

// name returns the number of a name, and writes the name to the trace first; 0 for one that does not fit. mu is held.
func (r *Recorder) name(text string) uint32 {
	if len(text) > wire.MaxTraceName {
		text = text[:wire.MaxTraceName]
	}
	if n, ok := r.names[text]; ok {
		return n
	}
	if len(r.names) >= maxNames {
		return 0
	}
	n := uint32(len(r.names) + 1)
	now := r.now()
	if !r.add(&wire.TraceRecord{Kind: wire.SpanName, Name: n, Given: now, Begin: now, End: now}, text) {
		r.lost-- // it is no record of something that happened
		return 0
	}
	r.names[text] = n
	return n
}

// CallBegins notes the arrival of a call that the client waits for.
func (r *Recorder) CallBegins(number uint32, name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.calls) < maxCalls && !r.closed {
		r.calls[number] = call{r.now(), r.name(name)}
	}
}

// CallEnds notes its answer.
func (r *Recorder) CallEnds(number uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.calls[number]
	delete(r.calls, number)
	if ok && !r.closed {
		r.add(&wire.TraceRecord{Kind: wire.SpanWait, Name: c.name, Given: c.begin, Begin: c.begin, End: r.now()}, "")
	}
}

// HostFnBegins notes that the client was told to call a host function.
func (r *Recorder) HostFnBegins(id uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.hostfns[id]) < maxCalls && len(r.hostfns) < maxCalls && !r.closed {
		r.hostfns[id] = append(r.hostfns[id], r.now())
	}
}

// HostFnEnds notes that it has been called.
func (r *Recorder) HostFnEnds(id uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.hostfns[id]
	if len(l) == 0 || r.closed {
		return
	}
	if r.hostfns[id] = l[1:]; len(l) == 1 {
		delete(r.hostfns, id)
	}
	r.add(&wire.TraceRecord{Kind: wire.SpanHostFn, Given: l[0], Begin: l[0], End: r.now()}, "")
}

// turnKinds are the records of what gates tell.
var turnKinds = map[gate.Phase]uint16{gate.InTurn: wire.SpanTurn, gate.AwaitsTurn: wire.SpanTurnWait, gate.Throttled: wire.SpanThrottle}

// Turn notes the begin or the end of what a gate tells. One whose begin was before the trace's begins with it.
func (r *Recorder) Turn(device int, p gate.Phase, begins bool) {
	r.state(state{turnKinds[p], device}, begins)
}

// Cut notes that the connection to the client was lost, or is there again.
func (r *Recorder) Cut(begins bool) { r.state(state{wire.SpanCut, 0}, begins) }

func (r *Recorder) state(st state, begins bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	if r.closed {
		return
	}
	if begins {
		r.open[st] = now
		return
	}
	begin := r.open[st]
	delete(r.open, st)
	r.add(&wire.TraceRecord{Kind: st.kind, Device: uint32(st.device), Given: begin, Begin: begin, End: now}, "")
}

// send writes what there is until the trace has ended.
func (r *Recorder) send() {
	defer close(r.done)
	tick := time.NewTicker(sendEvery)
	defer tick.Stop()
	var spare []byte
	for {
		select {
		case <-r.full:
		case <-tick.C:
		}
		r.mu.Lock()
		last := r.ended
		if last {
			r.addLost()
		}
		b := r.buf
		r.buf = spare[:0]
		r.mu.Unlock()
		if len(b) > 0 || last {
			if err := r.cfg.Write(b, last); err != nil {
				r.Stop()
				return
			}
		}
		if last {
			return
		}
		spare = b
	}
}
