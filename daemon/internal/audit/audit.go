// Package audit is the daemon's append-only log of who was granted, used, was
// refused and returned what: one JSON object a line, rotated by size.
package audit

// A line is one write to a file opened with O_APPEND, under mu, so lines are
// whole and in the order of their numbers. A write that the disk cut short is
// taken back; what a crash cut short is closed by a newline at the next start
// and skipped by readers.

import (
	"bufio"
	"bytes"
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
	Overrun       = "overrun"        // work of a lease that stayed on its GPU beyond the site's limit
	Release       = "release"        // a lease ended by its host's wish
	Reclaim       = "reclaim"        // a lease ended by its owner
	SessionOpen   = "session-open"   // a client process got a worker
	SessionEnd    = "session-end"    // and left it
	SessionRefuse = "session-refuse" // a client process asked and got none
	TicketRefuse  = "ticket-refuse"  // a data connection without a good ticket
	PeerRefuse    = "peer-refuse"    // a daemon or user that may not ask
)

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
}

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
}

// Log is an open audit log. Its methods may be called from several goroutines.
type Log struct {
	path string
	o    Options

	mu   sync.Mutex
	f    *os.File
	size int64
	torn bool // the file ends in half a line
	seq  uint64

	failed atomic.Uint64
	lines  atomic.Uint64
	silent time.Time // when a failure was logged last
}

// maxLine is longer than any line that Write makes.
const maxLine = 1 << 16

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
	l := &Log{path: path, o: o}
	if err := l.open(); err != nil {
		return nil, err
	}
	for i := range 2 { // right after a rotation the last line is in the older file
		err := scan(l.name(i), 2*maxLine, "", func(e *Event) bool { l.seq = max(l.seq, e.Seq); return true })
		if err != nil {
			l.f.Close()
			return nil, err
		}
		if l.seq > 0 {
			break
		}
	}
	return l, nil
}

// Check refuses a log that others could write.
func Check(path string) error {
	if err := safefile.Dir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	if err := safefile.File(path, 0o022); err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	return nil
}

func (l *Log) name(i int) string {
	if i == 0 {
		return l.path
	}
	return l.path + "." + strconv.Itoa(i)
}

// open opens the current file and closes a line that a crash left open.
func (l *Log) open() error {
	f, err := os.OpenFile(l.path, os.O_RDWR|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil && size > 0 {
		var last [1]byte
		if _, err = f.ReadAt(last[:], size-1); err == nil && last[0] != '\n' {
			if _, err = f.Write([]byte{'\n'}); err == nil {
				size++
			}
		}
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("audit log %s: %w", l.path, err)
	}
	l.f, l.size = f, size
	return nil
}

// Write appends e, with its number and, if it has none, the time. The line is
// the kernel's when Write returns nil: a crash of the daemon does not lose it.
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
	if l.f == nil {
		return os.ErrClosed
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC()
	e.Seq = l.seq + 1
	e.Reason, e.Program = form.Line(e.Reason, 4096), form.Line(e.Program, form.MaxName)
	b, err := json.Marshal(&e)
	if err != nil {
		return err
	}
	b = append(b, '\n')
	if l.torn {
		b = append([]byte{'\n'}, b...)
	}
	if len(b) > maxLine {
		return fmt.Errorf("line of %d bytes", len(b))
	}
	if l.size > 0 && l.size+int64(len(b)) > l.o.MaxSize {
		if err := l.rotate(); err != nil {
			return err
		}
	}
	n, err := l.f.Write(b)
	if err != nil {
		if n > 0 {
			if l.f.Truncate(l.size) != nil {
				l.torn = true
				l.size += int64(n)
			}
		}
		return err
	}
	l.size += int64(n)
	l.torn = false
	l.seq++
	return nil
}

// rotate renames the files, the oldest first. When it fails the current file
// goes on growing: a line is worth more than its place.
func (l *Log) rotate() error {
	for i := l.o.Keep - 1; i >= 0; i-- {
		if err := safefile.Move(l.name(i), l.name(i+1)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.o.Log.Warn("the audit log is not rotated", "error", err)
			return nil
		}
	}
	old := l.f
	if err := l.open(); err != nil {
		l.f = old // renamed, and still good to write to
		l.o.Log.Warn("the audit log is not rotated", "error", err)
		return nil
	}
	return old.Close()
}

// Has says whether the log's last part has owner's line of this event about this
// lease: after a crash, whether the line of the last change was written; change is the
// line's own. A host writes lines of its own about the same lease, which name no owner.
func (l *Log) Has(event, id, owner string, change uint64) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := false
	for i := range 2 {
		err := scan(l.name(i), tail, id, func(e *Event) bool {
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

// Close closes the file.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.f == nil {
		return nil
	}
	err := l.f.Close()
	l.f = nil
	return err
}

// Read calls f for every line of the log at path, older files first, until f
// returns false. Lines that are not whole are skipped.
func Read(path string, f func(*Event) bool) error {
	l := &Log{path: path}
	oldest := 0
	for {
		if _, err := os.Lstat(l.name(oldest + 1)); err != nil {
			break
		}
		oldest++
	}
	more := true
	for i := oldest; i >= 0 && more; i-- {
		if err := scan(l.name(i), 0, "", func(e *Event) bool { more = f(e); return more }); err != nil {
			return err
		}
	}
	return nil
}

// scan reads the lines of a file that have part in them, or those of its last
// part of the size last if that is not 0.
func scan(path string, last int64, part string, f func(*Event) bool) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	defer file.Close()
	fi, err := file.Stat()
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	skip := false
	if last > 0 && fi.Size() > last {
		if _, err := file.Seek(-last, io.SeekEnd); err != nil {
			return fmt.Errorf("audit log %s: %w", path, err)
		}
		skip = true // the first line is likely not whole
	}
	s := bufio.NewScanner(file)
	s.Buffer(make([]byte, 0, 4096), 2*maxLine)
	for s.Scan() {
		b := bytes.TrimSpace(s.Bytes())
		if skip || len(b) == 0 || !bytes.Contains(b, []byte(part)) {
			skip = false
			continue
		}
		var e Event
		if json.Unmarshal(b, &e) != nil {
			continue
		}
		if !f(&e) {
			return nil
		}
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("audit log %s: %w", path, err)
	}
	return nil
}
