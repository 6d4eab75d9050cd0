// Package timeline makes a timeline for ui.perfetto.dev and chrome://tracing, in the Trace Event Format, of the traces that sessions
// write (docs/protocol.md, "Traces"). It trusts no byte of a trace: names in it come from strangers' programs.
package timeline

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// A timeline is written as its traces are read, so it costs memory for names and tracks alone:
//
//	New -> Add, one trace after the other -> Close
//
// Each session is a process of the timeline, and each stream a thread of it, as are turns and waits of each device and the calls that
// the client waited for.

// DefaultMost is the most bytes of a timeline: what ui.perfetto.dev takes well.
const DefaultMost = 512 << 20

// What a track of a session is about; tracks of one session are shown in this order.
const (
	trackStream = iota
	trackTurns
	trackThrottle
	trackWaits
	trackHostFns
	trackCut
	trackUntimed // work whose time on the GPU is not known
	trackLost
)

// maxLanes bounds the tracks of calls that overlap; further ones share the last.
const maxLanes = 64

// Writer writes a timeline. Not safe for concurrent use.
type Writer struct {
	w       *bufio.Writer
	most    int64
	written int64
	events  int
	began   time.Time // of the first session; all times are since then
	traces  int
	err     error

	// Dropped is how many events had no room in the file, and Lost how many the workers had none for.
	Dropped, Lost uint64
}

// New begins a timeline of at most most bytes.
func New(w io.Writer, most int64) *Writer {
	t := &Writer{w: bufio.NewWriterSize(w, 1<<20), most: most}
	t.raw(`{"displayTimeUnit":"ms","traceEvents":[`)
	return t
}

func (t *Writer) raw(s string) {
	if t.err == nil {
		_, t.err = t.w.WriteString(s)
		t.written += int64(len(s))
	}
}

// event is one of the format's: ph X lasts, M names something, i is an instant.
type event struct {
	Name string         `json:"name"`
	Cat  string         `json:"cat,omitempty"`
	Ph   string         `json:"ph"`
	TS   json.Number    `json:"ts,omitempty"`  // µs
	Dur  json.Number    `json:"dur,omitempty"` // µs
	PID  int            `json:"pid"`
	TID  int            `json:"tid"`
	S    string         `json:"s,omitempty"`
	Args map[string]any `json:"args,omitempty"`
}

// put writes an event, unless the file is full. What names tracks is written in any case: there are few of those.
func (t *Writer) put(e *event) {
	b, err := json.Marshal(e)
	if err != nil {
		t.err = errors.Join(t.err, err)
		return
	}
	if e.Ph != "M" && t.written+int64(len(b)) > t.most-tailRoom {
		t.Dropped++
		return
	}
	if t.events++; t.events > 1 {
		t.raw(",\n")
	}
	t.raw(string(b))
}

// tailRoom is for names of tracks and the end of the file.
const tailRoom = 64 << 10

// Close ends the file. Its otherData say how many events are missing.
func (t *Writer) Close() error {
	other, err := json.Marshal(map[string]any{"made_by": "sluice trace", "sessions": t.traces, "events_dropped_for_size": t.Dropped, "records_lost_by_workers": t.Lost})
	if err != nil {
		return err
	}
	t.raw(`],"otherData":` + string(other) + "}\n")
	if t.err == nil {
		t.err = t.w.Flush()
	}
	return t.err
}

// Sessions is how many traces have been added.
func (t *Writer) Sessions() int { return t.traces }

// Events is how many events the file has, names of tracks among them.
func (t *Writer) Events() int { return t.events }

// ErrNotTrace says that a file is no trace, or one of a release that this one does not know.
var ErrNotTrace = errors.New("no trace of this release")

// Began is when a trace began, by the clock of its worker's machine: traces are added in that order, so that no time is negative.
// A file without a whole head, as of a program that was killed at once, has no such time.
func Began(r io.Reader) (at uint64, ok bool) {
	h, err := readHead(r)
	return h.Wall, err == nil
}

func readHead(r io.Reader) (h wire.TraceHead, err error) {
	var b [wire.TraceHeadSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return h, fmt.Errorf("%w: it ends within its head", ErrNotTrace)
	}
	h.Decode(wire.NewDecoder(b[:]))
	if h.Magic != wire.TraceMagic || h.Version != wire.TraceVersion {
		return h, fmt.Errorf("%w: it begins with %#x, version %d", ErrNotTrace, h.Magic, h.Version)
	}
	return h, nil
}

// session is the trace that is being added.
type session struct {
	t     *Writer
	pid   int
	shift int64 // of its times, ns
	names map[uint32]string
	tids  map[track]int
	ends  map[int]uint64 // when the last event of a track ended, ns
	lanes []uint64       // when the last call of each track of waits ended
}

type track struct {
	kind           int
	device, stream uint32
	lane           int
}

// Add adds a trace. where, if not "", says whose it is beside its program. A trace that ends within a record, as that of a program
// that was killed, is added up to there.
func (t *Writer) Add(r io.Reader, where string) error {
	in := bufio.NewReaderSize(r, 1<<20)
	h, err := readHead(in)
	if err != nil {
		return err
	}
	began := time.Unix(0, int64(h.Wall&(1<<63-1)))
	if t.traces++; t.traces == 1 {
		t.began = began
	}
	s := &session{t: t, pid: t.traces, shift: int64(began.Sub(t.began)), names: map[uint32]string{}, tids: map[track]int{}, ends: map[int]uint64{}}
	title := fmt.Sprintf("%s (%d)", text(h.Program), h.PID)
	if where != "" {
		title += " " + text(where)
	}
	t.put(&event{Name: "process_name", Ph: "M", PID: s.pid, Args: map[string]any{"name": title}})
	for {
		switch err := s.record(in); {
		case errors.Is(err, io.EOF):
			return t.err
		case err != nil:
			return err
		}
	}
}

// maxRecord is the largest record that is read, in bytes.
const maxRecord = wire.TraceRecordSize + 4 + wire.MaxTraceName + 8

// maxNames bounds the names that are kept of a trace.
const maxNames = 1 << 16

// record reads one record; io.EOF at the end of the trace.
func (s *session) record(in *bufio.Reader) error {
	var b [maxRecord]byte
	if _, err := io.ReadFull(in, b[:wire.TraceRecordSize]); err != nil {
		return io.EOF
	}
	var m wire.TraceRecord
	m.Decode(wire.NewDecoder(b[:wire.TraceRecordSize]))
	if m.Size < wire.TraceRecordSize || m.Size > maxRecord || m.Size%8 != 0 {
		return fmt.Errorf("%w: a record of %d bytes", ErrNotTrace, m.Size)
	}
	rest := b[wire.TraceRecordSize:m.Size]
	if _, err := io.ReadFull(in, rest); err != nil {
		return io.EOF
	}
	if m.Kind == wire.SpanName {
		if n := uint32(0); len(rest) >= 4 && len(s.names) < maxNames {
			if n = binary.LittleEndian.Uint32(rest); uint64(n) <= uint64(len(rest)-4) {
				s.names[m.Name] = text(string(rest[4 : 4+n]))
			}
		}
		return nil
	}
	s.add(&m)
	return nil
}

// text is a stranger's as the format can have it: JSON has Unicode only.
func text(s string) string { return strings.ToValidUTF8(s, "\ufffd") }

// add writes the event of a record.
func (s *session) add(m *wire.TraceRecord) {
	m.End = max(m.End, m.Begin)
	e := event{Ph: "X", PID: s.pid, Args: map[string]any{}}
	tr := track{kind: trackStream, device: m.Device, stream: m.Stream}
	switch m.Kind {
	case wire.SpanKernel:
		e.Name, e.Cat = s.name(m.Name, "kernel"), "kernel"
		e.Args["grid"], e.Args["block"], e.Args["shared bytes"] = m.Grid, m.Block, m.Amount
	case wire.SpanCopyIn, wire.SpanCopyOut, wire.SpanCopy:
		e.Name, e.Cat = copyNames[m.Kind], "copy"
		e.Args["bytes"] = m.Amount
	case wire.SpanFill:
		e.Name, e.Cat = "fill", "fill"
		e.Args["bytes"] = m.Amount
	case wire.SpanGraph:
		e.Name, e.Cat = "graph", "graph"
	case wire.SpanWait:
		tr = track{kind: trackWaits, lane: s.lane(m)}
		e.Name, e.Cat = s.name(m.Name, "call"), "wait"
	case wire.SpanHostFn:
		tr = track{kind: trackHostFns}
		e.Name, e.Cat = "host function", "hostfn"
	case wire.SpanTurn, wire.SpanTurnWait:
		tr = track{kind: trackTurns, device: m.Device}
		e.Name, e.Cat = map[uint16]string{wire.SpanTurn: "turn", wire.SpanTurnWait: "waits for a turn"}[m.Kind], "turn"
	case wire.SpanThrottle:
		tr = track{kind: trackThrottle, device: m.Device}
		e.Name, e.Cat = "throttled", "turn"
	case wire.SpanCut:
		tr = track{kind: trackCut}
		e.Name, e.Cat = "no connection", "cut"
	case wire.SpanLost:
		tr = track{kind: trackLost}
		s.t.Lost += m.Amount
		e.Name, e.Ph, e.S = fmt.Sprintf("%d records lost", m.Amount), "i", "p"
	default:
		return // of a later release
	}
	if m.Flags&wire.TraceOpen != 0 {
		e.Args["unfinished"] = true // when the trace was stopped
	}
	if tr.kind == trackStream {
		if m.Flags&wire.TraceGPU == 0 {
			tr = track{kind: trackUntimed}
			e.Args["stream"] = m.Stream
		} else {
			e.Args["given"] = json.Number(s.at(m.Given)) // when the worker gave it to the driver
		}
	}
	s.write(&e, m, tr)
}

var copyNames = map[uint16]string{wire.SpanCopyIn: "copy to the GPU", wire.SpanCopyOut: "copy from the GPU", wire.SpanCopy: "copy within GPUs"}

// write puts an event into its track. Events of a track must not overlap, and those of a stream do not, but for what their times
// are inexact by.
func (s *session) write(e *event, m *wire.TraceRecord, tr track) {
	e.TID = s.tid(tr)
	begin, end := m.Begin, m.End
	if last := s.ends[e.TID]; tr.kind != trackHostFns && begin < last && last-begin < uint64(time.Millisecond) {
		begin, end = last, max(end, last)
	}
	s.ends[e.TID] = max(s.ends[e.TID], end)
	e.TS = json.Number(s.at(begin))
	if e.Ph == "X" {
		e.Dur = json.Number(micros(int64(min(end-begin, 1<<62))))
	}
	if len(e.Args) == 0 {
		e.Args = nil
	}
	s.t.put(e)
}

// at is a time of the session's trace on the timeline, µs.
func (s *session) at(ns uint64) string { return micros(int64(ns&(1<<62-1)) + s.shift) }

func micros(ns int64) string {
	sign, u := "", uint64(ns)
	if ns < 0 {
		sign, u = "-", -u // also of the least number, which has no positive one
	}
	return fmt.Sprintf("%s%d.%03d", sign, u/1000, u%1000)
}

func (s *session) name(n uint32, otherwise string) string {
	if name := s.names[n]; name != "" {
		return name
	}
	return otherwise
}

// lane finds a track for a call: calls of several threads overlap.
func (s *session) lane(m *wire.TraceRecord) int {
	for i, end := range s.lanes {
		if end <= m.Begin {
			s.lanes[i] = m.End
			return i
		}
	}
	if len(s.lanes) < maxLanes {
		s.lanes = append(s.lanes, m.End)
		return len(s.lanes) - 1
	}
	s.lanes[maxLanes-1] = max(s.lanes[maxLanes-1], m.End)
	return maxLanes - 1
}

// maxTracks bounds the tracks of a session; what belongs to further ones shares one.
const maxTracks = 4096

// tid is the number of a track, which the timeline is told first.
func (s *session) tid(tr track) int {
	if n, ok := s.tids[tr]; ok {
		return n
	}
	if len(s.tids) >= maxTracks {
		return maxTracks + 1
	}
	n := len(s.tids) + 1
	s.tids[tr] = n
	s.t.put(&event{Name: "thread_name", Ph: "M", PID: s.pid, TID: n, Args: map[string]any{"name": tr.title()}})
	s.t.put(&event{Name: "thread_sort_index", Ph: "M", PID: s.pid, TID: n, Args: map[string]any{"sort_index": tr.kind<<20 | int(tr.device)<<16 | n}})
	return n
}

func (tr track) title() string {
	switch tr.kind {
	case trackStream:
		if tr.stream == 0 {
			return fmt.Sprintf("GPU %d, default stream", tr.device)
		}
		return fmt.Sprintf("GPU %d, stream %d", tr.device, tr.stream)
	case trackTurns:
		return fmt.Sprintf("GPU %d, turns", tr.device)
	case trackThrottle:
		return fmt.Sprintf("GPU %d, throttled", tr.device)
	case trackWaits:
		return "calls that the program waited for"
	case trackHostFns:
		return "host functions"
	case trackCut:
		return "connection"
	case trackUntimed:
		return "work whose time on the GPU is not known"
	default:
		return "records lost"
	}
}
