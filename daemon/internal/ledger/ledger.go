// Package ledger is the one place where the daemon keeps what must survive a
// crash: a bbolt file of small checksummed JSON records. A change is on the disk
// when Update returns nil, whole or not at all.
package ledger

// Format 1:
//
//	bucket meta         format, owner, epoch, id, count of records: plain text;
//	                    digest: see below
//	bucket leases       what holds now
//	bucket tombstones   what has ended and must not come back
//	bucket outbox       lines for the audit log, by sequence number, from the
//	                    change that caused them until they are known to be written
//	bucket notes        other things that the host has to remember
//
// A value is CRC-32C (4 bytes, big endian) over bucket, 0, key, 0 and the JSON
// that follows. bbolt checksums its two meta pages only; the sum here is over
// what decides who has a GPU. The digest is the exclusive or of the first 16
// bytes of each record's SHA-256, so that a record that is lost, or comes back,
// is seen too.
//
// A change that fails has been made or not. If the sync of its meta page failed, it can be read, and the disk need not have it: the ledger is in
// doubt until the meta pages have been written and synced once more, which the next change begins with. Without that it would write over
// pages that the meta page on the disk still refers to.
//
// Locking: bbolt has one writer and any number of readers. mu guards done.

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Format is the version of what is on the disk.
const Format = 1

// Bucket names a set of records.
type Bucket string

// The buckets.
const (
	Leases     Bucket = "leases"
	Tombstones Bucket = "tombstones"
	Outbox     Bucket = "outbox"
	Notes      Bucket = "notes"
	meta       Bucket = "meta"
)

var buckets = []Bucket{Leases, Tombstones, Outbox, Notes}

// Errors that a caller may ask for.
var (
	ErrCorrupt = errors.New("corrupt")
	ErrFormat  = errors.New("written by another version")
	ErrOwner   = errors.New("written by another node")
	ErrInUse   = errors.New("in use by another process")
	ErrOther   = errors.New("not the ledger that was used before")
)

// Limits of a record, in bytes.
const (
	maxKey    = 4096
	maxRecord = 1 << 20
)

// Options of a ledger.
type Options struct {
	// NoSync leaves out fsync: for tests that do not pull the plug.
	NoSync bool
	// Wait is how long another process may hold the file, 0 for 2 s: a daemon
	// that was killed is gone at once, one that is stopping needs a moment.
	Wait time.Duration
	// ID is the identity that the ledger must have, "" for any. Open refuses a
	// ledger with another identity, or none, before it writes to it.
	ID string
}

// Ledger is an open ledger. Its methods may be called from several goroutines.
type Ledger struct {
	db    *bolt.DB
	path  string
	owner string
	epoch uint64
	id    string

	doubt atomic.Bool // the disk may be behind what can be read

	mu   sync.Mutex
	done []uint64 // outbox entries that the next change removes
}

// Open opens or creates the ledger at path for the node owner, verifies every
// record, and counts its epoch up by one. What is corrupt is named and not
// repaired: a lease forgotten is a GPU granted twice.
func Open(path, owner string, o Options) (*Ledger, error) {
	if err := Missing(path); o.ID != "" && err != nil {
		return nil, err
	}
	db, err := open(path, o, false)
	if err != nil {
		return nil, err
	}
	l := &Ledger{db: db, path: path, owner: owner}
	l.doubt.Store(true) // another process may have left it so
	if err := l.begin(o.ID); err != nil {
		db.Close()
		return nil, err
	}
	return l, nil
}

// Missing returns an error that wraps ErrOther if there is no ledger at path, or an
// empty file that a daemon left which was killed while it created the ledger.
func Missing(path string) error {
	fi, err := os.Stat(path)
	if err == nil && fi.Size() == 0 {
		err = errors.New("it is empty")
	}
	if err != nil {
		return fmt.Errorf("ledger %s: %w: %w", path, ErrOther, err)
	}
	return nil
}

// Check verifies the ledger at path, and that its identity is id unless id is "",
// without changing it. A ledger that is not there passes if id is "", since a start
// would make it.
func Check(path, owner, id string) error {
	if err := Missing(path); err != nil && id != "" {
		return err
	}
	if err := safefile.Dir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	if fi, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) || err == nil && fi.Size() == 0 {
		return nil
	}
	db, err := open(path, Options{}, true)
	if err != nil {
		return err
	}
	defer db.Close()
	l := &Ledger{db: db, path: path, owner: owner}
	return guard(path, func() error {
		return db.View(func(tx *bolt.Tx) error {
			if err := checkPages(tx, path); err != nil {
				return err
			}
			m := tx.Bucket([]byte(meta))
			if m == nil {
				return l.is(nil, id) // created and not begun
			}
			if _, err := l.readMeta(tx); err != nil {
				return err
			}
			if err := l.is(m.Get([]byte("id")), id); err != nil {
				return err
			}
			_, err := l.verify(tx)
			return err
		})
	})
}

func open(path string, o Options, readOnly bool) (*bolt.DB, error) {
	if err := safefile.Dir(filepath.Dir(path)); err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	if err := safefile.File(path, 0o077); err != nil {
		return nil, fmt.Errorf("ledger: %w", err)
	}
	if o.Wait == 0 {
		o.Wait = 2 * time.Second
	}
	if !readOnly {
		if err := create(path); err != nil {
			return nil, fmt.Errorf("ledger %s: cannot be created: %w", path, err)
		}
	}
	var db *bolt.DB
	err := guard(path, func() error {
		var err error
		db, err = bolt.Open(path, 0o600, &bolt.Options{Timeout: o.Wait, NoSync: o.NoSync, ReadOnly: readOnly, FreelistType: bolt.FreelistMapType})
		return err
	})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return nil, fmt.Errorf("ledger %s: %w; is another sluiced running?", path, ErrInUse)
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrChecksum), errors.Is(err, bolterrors.ErrVersionMismatch):
		return nil, fmt.Errorf("ledger %s: %w: %w; %s", path, ErrCorrupt, err, remedy)
	case err != nil:
		return nil, fmt.Errorf("ledger %s: %w", path, err)
	}
	return db, nil
}

// create makes a ledger without any bucket at path, unless there is a file. bbolt writes the first pages of a file in place: half of
// them would be taken for a ledger that was damaged.
func create(path string) error {
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		return nil // or an error that opening it gives as well
	}
	p, err := safefile.Create(path, safefile.How{Mode: 0o600, Unnamed: true})
	if err != nil {
		return err
	}
	defer p.Close()
	db, err := bolt.Open(path, 0o600, &bolt.Options{OpenFile: func(string, int, os.FileMode) (*os.File, error) {
		fd, err := unix.FcntlInt(p.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		return os.NewFile(uintptr(fd), path), err
	}})
	if err == nil {
		err = db.Close()
	}
	if err != nil {
		return err
	}
	if err := p.CommitNew(); !errors.Is(err, os.ErrExist) { // another process may have been faster
		return err
	}
	return nil
}

const remedy = "restore it from a backup; or end all sessions of this node, move the file away, remove its .id file from run_dir, and start again"

// guard turns what bbolt does with a damaged file, panics and faults in its
// mapping, into an error.
func guard(path string, f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("ledger %s: %w: %v; %s", path, ErrCorrupt, p, remedy)
		}
	}()
	return f()
}

// is returns an error if the ledger has the identity have and want is another.
func (l *Ledger) is(have []byte, want string) error {
	if want == "" || string(have) == want {
		return nil
	}
	return fmt.Errorf("ledger %s: %w: its identity is %q, and that one's is %q", l.path, ErrOther, have, want)
}

// begin makes or verifies what is there, and counts the epoch. Its identity has to be
// want, unless want is "".
func (l *Ledger) begin(want string) error {
	err := guard(l.path, func() error {
		if err := l.db.View(func(tx *bolt.Tx) error { return checkPages(tx, l.path) }); err != nil {
			return err
		}
		return l.db.Update(func(tx *bolt.Tx) error {
			if err := l.settleMeta(); err != nil {
				return err
			}
			fresh := tx.Bucket([]byte(meta)) == nil
			for _, b := range append([]Bucket{meta}, buckets...) {
				if _, err := tx.CreateBucketIfNotExists([]byte(b)); err != nil {
					return fmt.Errorf("ledger %s: %w", l.path, err)
				}
			}
			m := tx.Bucket([]byte(meta))
			if err := l.is(m.Get([]byte("id")), want); err != nil {
				return err
			}
			if fresh {
				if err := errors.Join(m.Put([]byte("format"), []byte(strconv.Itoa(Format))), m.Put([]byte("owner"), []byte(l.owner)), m.Put([]byte("epoch"), []byte("0")), m.Put([]byte("digest"), make([]byte, len(digest{}))), m.Put([]byte("count"), []byte("0"))); err != nil {
					return fmt.Errorf("ledger %s: %w", l.path, err)
				}
			}
			epoch, err := l.readMeta(tx)
			if err != nil {
				return err
			}
			n, err := l.verify(tx)
			if err != nil {
				return err
			}
			if m.Get([]byte("count")) == nil { // of a release that did not count them
				if err := m.Put([]byte("count"), []byte(strconv.Itoa(n))); err != nil {
					return err
				}
			}
			l.epoch = epoch + 1
			l.id = string(m.Get([]byte("id")))
			if l.id == "" { // new, or of a release that gave it none
				l.id = rand.Text()
				if err := m.Put([]byte("id"), []byte(l.id)); err != nil {
					return err
				}
			}
			return m.Put([]byte("epoch"), []byte(strconv.FormatUint(l.epoch, 10)))
		})
	})
	if err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrFormat) && !errors.Is(err, ErrOwner) && !errors.Is(err, ErrOther) {
		return fmt.Errorf("ledger %s: cannot be written: %w", l.path, err)
	}
	return err
}

func (l *Ledger) readMeta(tx *bolt.Tx) (uint64, error) {
	m := tx.Bucket([]byte(meta))
	if v := string(m.Get([]byte("format"))); v != strconv.Itoa(Format) {
		return 0, fmt.Errorf("ledger %s: %w: format %q, this release reads %d; install the release that wrote it", l.path, ErrFormat, v, Format)
	}
	if v := string(m.Get([]byte("owner"))); v != l.owner {
		return 0, fmt.Errorf("ledger %s: %w: it is node %q's, and this is %q; set node in sluice.yaml, or move the file away", l.path, ErrOwner, v, l.owner)
	}
	epoch, err := strconv.ParseUint(string(m.Get([]byte("epoch"))), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("ledger %s: %w: epoch %q; %s", l.path, ErrCorrupt, m.Get([]byte("epoch")), remedy)
	}
	return epoch, nil
}

// verify reads every record, and has bbolt check its own structure; checkPages came before.
// It returns how many records there are.
func (l *Ledger) verify(tx *bolt.Tx) (n int, _ error) {
	t := &Tx{tx: tx, l: l}
	known := 0
	err := tx.ForEach(func(name []byte, _ *bolt.Bucket) error {
		if len(name) > maxKey || Bucket(name) != meta && !slices.Contains(buckets, Bucket(name)) {
			return fmt.Errorf("ledger %s: %w: bucket %.40q is not ours; %s", l.path, ErrCorrupt, name, remedy)
		}
		known++
		return nil
	})
	if err != nil {
		return 0, err
	}
	if known != len(buckets)+1 {
		return 0, fmt.Errorf("ledger %s: %w: it has %d buckets of %d; %s", l.path, ErrCorrupt, known, len(buckets)+1, remedy)
	}
	var all digest
	for _, b := range buckets {
		err := t.All(b, func(key string, raw json.RawMessage) error {
			n++
			all.toggle(b, key, raw)
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	if have := tx.Bucket([]byte(meta)).Get([]byte("digest")); !bytes.Equal(have, all[:]) {
		return 0, fmt.Errorf("ledger %s: %w: records are missing, or back from before; %s", l.path, ErrCorrupt, remedy)
	}
	// The digest alone would not see a record that is there twice more.
	if have := tx.Bucket([]byte(meta)).Get([]byte("count")); have != nil && string(have) != strconv.Itoa(n) {
		return 0, fmt.Errorf("ledger %s: %w: it has %d records of %s; %s", l.path, ErrCorrupt, n, have, remedy)
	}
	// bbolt checks its pages on a goroutine of its own, where a fault could not
	// be caught: so only what has just been walked through.
	// All errors are received, since bbolt reads the transaction until it has sent the last.
	var first error
	for err := range tx.Check() {
		if first == nil {
			first = err
		}
	}
	if first != nil {
		return 0, fmt.Errorf("ledger %s: %w: %w; %s", l.path, ErrCorrupt, first, remedy)
	}
	return n, nil
}

// digest is over a set of records.
type digest [16]byte

// toggle puts a record into the set, or takes it out.
func (d *digest) toggle(b Bucket, key string, raw []byte) {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%s\x00", b, key)
	h.Write(raw)
	for i, c := range h.Sum(nil)[:len(d)] {
		d[i] ^= c
	}
}

// Close closes the file.
func (l *Ledger) Close() error {
	if err := l.db.Close(); err != nil {
		return fmt.Errorf("ledger %s: %w", l.path, err)
	}
	return nil
}

// Epoch is how often the ledger has been opened, this time included.
func (l *Ledger) Epoch() uint64 { return l.epoch }

// ID is the ledger's identity: a random text that it gets when it is created and keeps.
func (l *Ledger) ID() string { return l.id }

// Path is where the ledger is.
func (l *Ledger) Path() string { return l.path }

// Update makes one change of all that f does. An error means that the change
// was not made, unless it was the disk's: then only a View tells.
func (l *Ledger) Update(f func(*Tx) error) error {
	l.mu.Lock()
	done := l.done
	l.mu.Unlock()
	var own error
	err := guard(l.path, func() error {
		return l.db.Update(func(tx *bolt.Tx) error {
			if err := l.settleMeta(); err != nil {
				return err
			}
			t := &Tx{tx: tx, l: l}
			for _, seq := range done {
				if own = t.Delete(Outbox, outboxKey(seq)); own != nil {
					return own
				}
			}
			if own = f(t); own != nil || t.changed == (digest{}) {
				return own
			}
			m := tx.Bucket([]byte(meta))
			all := append([]byte(nil), m.Get([]byte("digest"))...)
			subtle.XORBytes(all, all, t.changed[:])
			if err := m.Put([]byte("digest"), all); err != nil || t.added == 0 {
				return err
			}
			n, err := strconv.Atoi(string(m.Get([]byte("count"))))
			if err != nil {
				return fmt.Errorf("the count of records: %w", err)
			}
			return m.Put([]byte("count"), []byte(strconv.Itoa(n+t.added)))
		})
	})
	switch {
	case err == nil:
		l.mu.Lock()
		l.done = l.done[len(done):]
		l.mu.Unlock()
		return nil
	case own != nil:
		return own
	}
	l.doubt.Store(true)
	return fmt.Errorf("ledger %s: cannot be written: %w; see that its disk is sound and has room", l.path, err)
}

// Sure has what View reads on the disk. It does nothing unless a change has failed since the last one that did not.
func (l *Ledger) Sure() error {
	if !l.doubt.Load() {
		return nil
	}
	return l.Update(func(*Tx) error { return nil })
}

// settleMeta ends the doubt: it writes the two meta pages again as they can be read, and syncs them. A kernel that could not sync
// a page takes it for written. bbolt's lock of the writer is held.
func (l *Ledger) settleMeta() error {
	if !l.doubt.Load() {
		return nil
	}
	if !l.db.NoSync {
		f, err := os.OpenFile(l.path, os.O_RDWR|unix.O_NOFOLLOW, 0) // bbolt's lock is of its own open file
		if err != nil {
			return err
		}
		defer f.Close()
		b := make([]byte, 2*l.db.Info().PageSize)
		if _, err := f.ReadAt(b, 0); err != nil {
			return err
		}
		if _, err := f.WriteAt(b, 0); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
	}
	l.doubt.Store(false)
	return nil
}

// View reads a consistent state.
func (l *Ledger) View(f func(*Tx) error) error {
	return guard(l.path, func() error { return l.db.View(func(tx *bolt.Tx) error { return f(&Tx{tx: tx, l: l}) }) })
}

// Flushed has the next change remove an entry of the outbox: a change of its own
// would cost another fsync.
func (l *Ledger) Flushed(seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.done = append(l.done, seq)
}

// Settle removes now what Flushed named, if there is any.
func (l *Ledger) Settle() error {
	l.mu.Lock()
	n := len(l.done)
	l.mu.Unlock()
	if n == 0 {
		return nil
	}
	return l.Update(func(*Tx) error { return nil })
}

// Put writes one record.
func (l *Ledger) Put(b Bucket, key string, v any) error {
	return l.Update(func(t *Tx) error { return t.Put(b, key, v) })
}

// Get reads one record into v, and says whether there is one.
func (l *Ledger) Get(b Bucket, key string, v any) (ok bool, err error) {
	err = l.View(func(t *Tx) error { ok, err = t.Get(b, key, v); return err })
	return ok, err
}

// Delete removes one record, if it is there.
func (l *Ledger) Delete(b Bucket, key string) error {
	return l.Update(func(t *Tx) error { return t.Delete(b, key) })
}

// All reads a bucket whose records are all of type T.
func All[T any](l *Ledger, b Bucket) (map[string]T, error) {
	all := make(map[string]T)
	err := l.View(func(t *Tx) error {
		return t.All(b, func(key string, raw json.RawMessage) error {
			var v T
			if err := json.Unmarshal(raw, &v); err != nil {
				return fmt.Errorf("ledger %s: %s %q: %w: %w; %s", l.path, b, key, ErrCorrupt, err, remedy)
			}
			all[key] = v
			return nil
		})
	})
	return all, err
}
