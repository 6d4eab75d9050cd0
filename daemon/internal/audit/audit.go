// Package audit is the daemon's append-only log of who was granted, used, was
// refused and returned what: one JSON object a line, rotated by size.
package audit

// The log at PATH is three series of files, each rotated by its own size:
//
//	PATH            leases: what was granted, changed and returned
//	PATH.sessions   what programs did with leases
//	PATH.refused    what was asked for in vain
//
// Any user can cause lines of the last two, in any number: they cannot rotate away who
// had which GPU. All lines are numbered together, and Read puts them in order again.
//
// A line is one write to a file opened with O_APPEND, under mu, so lines are
// whole and in the order of their numbers. A write that the disk cut short is
// taken back; what a crash cut short is closed at the next start
// and skipped by readers. Sync has the lines written so far survive a crash of the
// machine as well. After a failed sync the kernel takes the pages for clean, and the next
// sync says that all is well: so the lines since the last good one are written again first.
//
// Each line that was written is also given to the collector, where there is one, in the same order. It waits for nothing there.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/syslog"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Events.
const (
	Reserve       = "reserve"        // room is kept for a lease for a short time
	Grant         = "grant"          // a lease begins
	Refuse        = "refuse"         // a lease was asked for and not given
	Attach        = "attach"         // a node took over what its controller's daemon got for it
	RenewLost     = "renew-lost"     // a host's lease that its owner no longer has
	Set           = "set"            // a living lease has another share or policy; the line has all its grants
	Idle          = "idle"           // a lease has had no work for longer than the site says
	Overrun       = "overrun"        // work of a lease that stayed on its GPU beyond the site's limit
	Release       = "release"        // a lease ended at its host's request
	Reclaim       = "reclaim"        // a lease ended by its owner
	Drain         = "drain"          // a GPU, or all of an owner, gets no new leases
	Resume        = "resume"         // and gets them again
	SessionOpen   = "session-open"   // a client process got a worker
	SessionEnd    = "session-end"    // and left it
	SessionRefuse = "session-refuse" // a client process asked and got none
	TicketRefuse  = "ticket-refuse"  // a data connection without a good ticket
	PeerRefuse    = "peer-refuse"    // a daemon or user that may not ask
)

// Events are all of them, as they are written.
func Events() []string {
	return []string{Reserve, Grant, Refuse, Attach, RenewLost, Set, Idle, Overrun, Release, Reclaim, Drain, Resume, SessionOpen, SessionEnd, SessionRefuse, TicketRefuse, PeerRefuse}
}

// class is a series of files; its value is what the names of its files add to the log's.
type class string

const (
	leases   class = ""
	sessions class = ".sessions"
	refusals class = ".refused"
)

var classes = []class{leases, sessions, refusals}

// classOf is where an event is written.
func classOf(event string) class {
	switch event {
	case SessionOpen, SessionEnd, Overrun, Idle:
		return sessions
	case Refuse, SessionRefuse, TicketRefuse, PeerRefuse:
		return refusals
	}
	return leases
}

// Event is a line of the log. Everything but time, seq and event is optional.
type Event struct {
	Time  time.Time `json:"time"`
	Seq   uint64    `json:"seq"` // counts this log's lines
	Event string    `json:"event"`
	Lease string    `json:"lease,omitempty"`
	Key   string    `json:"key,omitempty"` // CLUSTER/JOB@NODE
	// Incarnation is the key's.
	Incarnation uint64        `json:"incarnation,omitempty"`
	UID         *uint32       `json:"uid,omitempty"`
	Host        string        `json:"host,omitempty"`
	Owner       string        `json:"owner,omitempty"`
	GPUs        []lease.Grant `json:"gpus,omitempty"`
	Session     string        `json:"session,omitempty"`
	PID         uint32        `json:"pid,omitempty"` // of the client, on its host
	Program     string        `json:"program,omitempty"`
	Peer        string        `json:"peer,omitempty"` // address or process that asked
	Reason      string        `json:"reason,omitempty"`
	// Change counts the changes of a lease, from 1.
	Change uint64 `json:"change,omitempty"`
	// Over says that the key is not given anything any more.
	Over bool `json:"over,omitempty"`
	// Skipped counts refusals of the same source that were left out before this one.
	Skipped uint64 `json:"skipped,omitempty"`
	// Times is the number of attempts that one line stands for: a caller that retries by itself writes its last refusal only.
	Times uint64 `json:"times,omitempty"`
}

type later struct{}

// Later is for callers that repeat a refused request: the refusals are not written one by one. The
// caller has the last one written when it gives up.
func Later(ctx context.Context) context.Context { return context.WithValue(ctx, later{}, true) }

// IsLater says whether refusals of requests with ctx are the caller's to write.
func IsLater(ctx context.Context) bool { return ctx.Value(later{}) != nil }

// UID makes the pointer that Event wants, so that root's 0 is seen.
func UID(uid uint32) *uint32 { return &uid }

// Of is an event about a lease.
func Of(event string, l *lease.Lease, reason string) Event {
	return Event{Event: event, Lease: l.ID, Key: l.Request.Key.String(), Incarnation: l.Request.Key.Incarnation,
		UID: UID(l.Request.UID), Host: l.Host, GPUs: l.Grants, Reason: reason}
}

// Options of a log.
type Options struct {
	MaxSize int64 // bytes of one file, 0 for 64 MiB
	Keep    int   // older files kept, at least 1
	Log     *slog.Logger
	Forward *syslog.Sender // gets each line that was written; nil for none
}

// Log is an open audit log. Its methods may be called from several goroutines.
type Log struct {
	path string
	o    Options

	syncing sync.Mutex // held for the whole of a Sync; before mu

	mu     sync.Mutex
	series map[class]*series // nil once the log is closed
	seq    uint64

	failed atomic.Uint64
	lines  atomic.Uint64
	silent time.Time // when a failure was logged last
}

// series is the files of a class. The log's mu guards it.
type series struct {
	path   string
	o      Options
	f      file
	size   int64
	synced int64 // how much of the file is known to be on the disk
	torn   bool  // the file ends in half a line
	dirty  bool  // lines have been written since the last sync
	lost   bool  // a sync failed: what is behind synced may never reach the disk by another one
}

// file is an open file of the log.
type file interface {
	io.Writer
	io.Seeker
	io.ReaderAt
	io.WriterAt
	io.Closer
	Fd() uintptr
	Sync() error
	Truncate(size int64) error
}

// openFile opens a file of the log, as os.OpenFile does. Tests have disks that fail.
var openFile = func(path string, flag int) (file, error) {
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return nil, err // and no file that is a nil *os.File
	}
	return f, nil
}

// maxLine is longer than any line that Write makes.
const maxLine = 1 << 16

// cutShort ends a line that is not whole. All of it may be there but its end, and yet it was never taken: with this it cannot be decoded.
const cutShort = " cut short\n"

// tail is how much of the end of a file is looked at for the lines of the last
// moments, in bytes.
const tail = 1 << 20

// Open opens or creates the log at path and goes on with its numbering. A file
// or directory that others can write is refused.
func Open(path string, o Options) (*Log, error) {
	if o.MaxSize == 0 {
		o.MaxSize = 64 << 20
	}
	o.Keep = max(1, o.Keep)
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if err := Check(path); err != nil {
		return nil, err
	}
	l := &Log{path: path, o: o, series: make(map[class]*series)}
	for _, c := range classes {
		sr := &series{path: path + string(c), o: o}
		err := sr.open()
		if err == nil {
			l.series[c] = sr
			var last uint64
			if last, err = sr.last(); err == nil {
				l.seq = max(l.seq, last)
				continue
			}
		}
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

// Check refuses a log that others could write.
func Check(path string) error {
	if err := safefile.Dir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	for _, c := range classes {
		if err := safefile.File(path+string(c), 0o022); err != nil {
			return fmt.Errorf("audit log: %w", err)
		}
	}
	return nil
}

// name is that of the i-th older file, and of the current one for 0.
func (s *series) name(i int) string {
	if i == 0 {
		return s.path
	}
	return s.path + "." + strconv.Itoa(i)
}

// last is the number of the last line, 0 if there is none.
func (s *series) last() (seq uint64, err error) {
	for i := range 2 { // right after a rotation the last line is in the older file
		for _, part := range []int64{2 * maxLine, 0} { // a crash of the machine may have left any length of zeros at the end
			err = scan(context.Background(), s.name(i), part, every, func(e *Event) bool { seq = max(seq, e.Seq); return true })
			if err != nil || seq > 0 {
				return seq, err
			}
		}
	}
	return 0, nil
}

// open opens the current file and closes a line that a crash left open.
func (s *series) open() error {
	f, err := openFile(s.path, os.O_RDWR|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil && size > 0 {
		var last [1]byte
		if _, err = f.ReadAt(last[:], size-1); err == nil && last[0] != '\n' {
			if _, err = f.Write([]byte(cutShort)); err == nil {
				size += int64(len(cutShort))
			}
		}
	}
	if err == nil && size == 0 {
		err = safefile.SyncDir(filepath.Dir(s.path)) // or a crash may lose the file with all its lines
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("audit log %s: %w", s.path, err)
	}
	// What an earlier daemon wrote may not be on the disk yet.
	s.f, s.size, s.synced, s.torn, s.dirty, s.lost = f, size, 0, false, size > 0, false
	return nil
}

// Write appends e, with its number and, if it has none, the time. The line is
// the kernel's when Write returns nil: a crash of the daemon does not lose it, and
// after Sync neither does a crash of the machine.
func (l *Log) Write(e Event) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.write(e)
	if err == nil {
		l.lines.Add(1)
		return nil
	}
	l.failed.Add(1)
	err = fmt.Errorf("audit log %s: %w; see that its disk has room", l.path, err)
	if now := time.Now(); now.Sub(l.silent) > time.Minute {
		l.silent = now
		l.o.Log.Error("the audit log cannot be written, so nothing new is granted", "error", err, "lost", l.failed.Load())
	}
	return err
}

func (l *Log) write(e Event) error {
	if l.series == nil {
		return os.ErrClosed
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC()
	e.Seq = l.seq + 1
	e.Reason, e.Program = form.Line(e.Reason, 4096), form.Name(e.Program)
	b, err := json.Marshal(&e)
	if err != nil {
		return err
	}
	c := classOf(e.Event)
	if err := l.series[c].write(append(b, '\n')); err != nil {
		return err
	}
	l.seq++
	l.forward(c, &e, b)
	return nil
}

// forward gives a line that was written to the collector. What any user can cause never takes the room of who had which GPU there either.
func (l *Log) forward(c class, e *Event, line []byte) {
	if l.o.Forward == nil {
		return
	}
	m := syslog.Message{Time: e.Time, ID: e.Event, Severity: syslog.Info, Text: line, Fill: 100}
	switch c {
	case sessions:
		m.Fill = 75
	case refusals:
		m.Fill, m.Severity = 50, syslog.Notice
	}
	l.o.Forward.Send(m)
}

func (s *series) write(b []byte) error {
	if s.torn {
		b = append([]byte(cutShort), b...)
	}
	if len(b) > maxLine {
		return fmt.Errorf("line of %d bytes", len(b))
	}
	if s.size > 0 && s.size+int64(len(b)) > s.o.MaxSize {
		s.rotate()
	}
	n, err := s.f.Write(b)
	if err != nil {
		if n > 0 {
			if s.f.Truncate(s.size) != nil {
				s.torn = true
				s.size += int64(n)
			}
		}
		return err
	}
	s.size += int64(n)
	s.torn, s.dirty = false, true
	return nil
}

// Sync writes the lines so far to the disk. Refusals may wait for the kernel. A caller
// waits for the Sync of another, since its own lines may be among those that one writes.
func (l *Log) Sync() error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	for _, c := range []class{leases, sessions} {
		l.mu.Lock()
		if l.series == nil {
			l.mu.Unlock()
			return os.ErrClosed
		}
		s := l.series[c]
		err := s.restore()
		f, size, dirty := s.f, s.size, s.dirty
		s.dirty = dirty && err != nil
		l.mu.Unlock()
		if err != nil {
			return err
		}
		if !dirty {
			continue
		}
		// A file that is closed meanwhile has been synced by rotate.
		if err = f.Sync(); errors.Is(err, os.ErrClosed) {
			continue
		}
		l.mu.Lock()
		if err == nil && s.f == f {
			s.synced = size
		} else if err != nil {
			s.dirty, s.lost = true, true
		}
		l.mu.Unlock()
		if err != nil {
			return fmt.Errorf("audit log %s: %w", s.path, err)
		}
	}
	return nil
}

// restore writes the lines once more that a failed sync may have lost. The kernel's pages still have them.
func (s *series) restore() error {
	if !s.lost {
		return nil
	}
	f, err := openFile(fmt.Sprintf("/proc/self/fd/%d", s.f.Fd()), os.O_RDWR) // where O_APPEND is set, WriteAt appends
	if err == nil {
		b := make([]byte, s.size-s.synced)
		if _, err = f.ReadAt(b, s.synced); err == nil {
			_, err = f.WriteAt(b, s.synced)
		}
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("audit log %s: lines that a failed sync may have lost: %w", s.path, err)
	}
	s.lost = false
	return nil
}

// rotate renames the files, the oldest first. When it fails the current file
// goes on growing: a line is worth more than its place. The file is synced first, since
// Sync does not come back to it.
func (s *series) rotate() {
	old := s.f
	err := s.restore()
	if err == nil {
		if err = old.Sync(); err != nil {
			s.dirty, s.lost = true, true
		}
	}
	if err != nil {
		s.o.Log.Warn("the audit log is not rotated", "error", err)
		return
	}
	// The first free name is the last that is needed: of the current file where it was renamed before and no new one could be made.
	free := 0
	for free < s.o.Keep {
		if _, err := os.Lstat(s.name(free)); errors.Is(err, fs.ErrNotExist) {
			break
		}
		free++
	}
	for i := free - 1; i >= 0; i-- {
		if err := safefile.Move(s.name(i), s.name(i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.o.Log.Warn("the audit log is not rotated", "error", err)
			return
		}
	}
	if err := s.open(); err != nil {
		s.f = old // renamed, and still good to write to
		s.o.Log.Warn("the audit log is not rotated", "error", err)
		return
	}
	_ = old.Close() // what it has is on the disk
}

// Has says whether the log's last part has owner's line of this event about this
// lease: after a crash, whether the line of the last change was written; change is the
// line's own. A host writes lines of its own about the same lease, which name no owner.
func (l *Log) Has(event, id, owner string, change uint64) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := false
	s := &series{path: l.path + string(classOf(event))}
	for i := range 2 {
		about := func(line []byte) bool { return bytes.Contains(line, []byte(id)) }
		err := scan(context.Background(), s.name(i), tail, about, func(e *Event) bool {
			found = found || e.Event == event && e.Lease == id && e.Owner == owner && e.Change == change
			return !found
		})
		if err != nil || found {
			return found, err
		}
	}
	return false, nil
}

// Failed counts the lines that could not be written.
func (l *Log) Failed() uint64 { return l.failed.Load() }

// Lines counts the lines written by this process.
func (l *Log) Lines() uint64 { return l.lines.Load() }

// Close syncs and closes the files.
func (l *Log) Close() error {
	l.syncing.Lock()
	defer l.syncing.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, s := range l.series {
		errs = append(errs, s.restore(), s.f.Sync(), s.f.Close())
	}
	l.series = nil
	return errors.Join(errs...)
}
