package store

// How several processes count the bytes that they are about to store.
//
// Each upload holds a lock on as many bytes of one file as its image will have. Only the lengths
// of the locks mean anything. The kernel keeps them (open file description locks, fcntl(2)), and
// drops them when their process ends, however it ends.

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// maxLocks bounds how many locks of others a count looks at.
const maxLocks = 4096

// tally is such a file as one process has opened it.
type tally struct {
	f *os.File

	mu    sync.Mutex
	own   []span    // locks of this process do not hinder it, so the kernel does not tell of them
	again time.Time // until then nobody waits for the gate, which was not free in time
}

// span is a range of the file.
type span struct{ at, n int64 }

func (a span) end() int64 { return a.at + a.n }

// uploads is the part of the file that uploads are in. The byte behind it is the gate: a process holds
// a lock on it while it adds an upload.
const uploads = 1 << 62

// gate is the byte behind the uploads.
var gate = span{uploads, 1}

// gateTime bounds the wait for the gate, which is held for microseconds. Tests with many processes on few
// processors set it.
var gateTime = 200 * time.Millisecond

// gateRest is how long no image waits for the gate after one has waited in vain: the process that holds it was
// stopped, or means harm.
const gateRest = 10 * time.Second

// errFull says that an upload does not fit into the room.
var errFull = errors.New("store: uploads have no room")

// take adds an upload of n bytes. If all uploads together would have more than room bytes, the error
// is errFull.
func (t *tally) take(n, room int64) (span, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n > room {
		return span{}, errFull
	}
	if err := t.enter(); err != nil {
		return span{}, err
	}
	defer func() { _ = t.lock(gate, unix.F_UNLCK) }()
	sum, end, err := t.others()
	if err != nil {
		return span{}, err
	}
	for _, o := range t.own {
		sum, end = sum+o.n, max(end, o.end())
	}
	if sum > room-n {
		return span{}, errFull
	}
	s := span{end, n}
	if err := t.lock(s, unix.F_WRLCK); err != nil {
		return span{}, noLock(err)
	}
	t.own = append(t.own, s)
	return s, nil
}

// enter waits for the gate.
func (t *tally) enter() error {
	now := time.Now()
	for until := now.Add(gateTime); now.After(t.again); time.Sleep(100 * time.Microsecond) {
		err := t.lock(gate, unix.F_WRLCK)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			return noLock(err)
		}
		if now = time.Now(); now.After(until) {
			t.again = now.Add(gateRest)
		}
	}
	return fmt.Errorf("another session has held the lock of the image store for more than %v: the next image tries again after %v", gateTime, gateRest)
}

// noLock says that uploads cannot be counted, for instance because the file system has no locks (ENOLCK,
// ENOSYS).
func noLock(err error) error {
	return fmt.Errorf("lock in the image store: %w: if its file system has no file locks, put the store (owner.store, or sluice-worker --store) on a local disk", err)
}

func ownBytes(own []span) (sum int64) {
	for _, o := range own {
		sum += o.n
	}
	return sum
}

// bytes is what this process's uploads have taken.
func (t *tally) bytes() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return ownBytes(t.own)
}

// drop ends an upload.
func (t *tally) drop(s span) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, o := range t.own {
		if o == s {
			_ = t.lock(s, unix.F_UNLCK)
			t.own = append(t.own[:i], t.own[i+1:]...)
			return
		}
	}
}

func (t *tally) lock(s span, kind int16) error {
	return unix.FcntlFlock(t.f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Start: s.at, Len: s.n})
}

// others adds up the locks of other processes, and gives the end of the last.
func (t *tally) others() (sum, end int64, err error) {
	todo := []span{{0, uploads}}
	for n := 0; len(todo) > 0; n++ {
		if n > 2*maxLocks {
			return 0, 0, errors.New("too many uploads at once")
		}
		s := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: s.at, Len: s.n}
		if err := unix.FcntlFlock(t.f.Fd(), unix.F_OFD_GETLK, &l); err != nil {
			return 0, 0, noLock(err)
		}
		if l.Type == unix.F_UNLCK {
			continue
		}
		// The kernel may name any lock of the range, not only the first: look before and behind it.
		to := s.end()
		if l.Len > 0 {
			to = min(to, l.Start+l.Len)
		}
		from := max(l.Start, s.at)
		sum, end = sum+to-from, max(end, to)
		if from > s.at {
			todo = append(todo, span{s.at, from - s.at})
		}
		if to < s.end() {
			todo = append(todo, span{to, s.end() - to})
		}
	}
	return sum, end, nil
}

// Shared counts the images of all users, for those who may see only their own. Its file has the bytes
// stored, and the locks of the uploads under way.
type Shared struct {
	tally
	mem []byte
}

// sharedSize is the size of the file in bytes; the first 8 are the count.
const sharedSize = 4096

// CreateShared opens the file at path, or makes it. Every process must have opened it by itself
// before it is passed on: a lock belongs to an open file, not to a process.
func CreateShared(path string) (*os.File, error) {
	how := safefile.How{Mode: 0o600, Volatile: true}
	for range 3 {
		f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		switch {
		case err == nil:
			// A session may have cut it short. It is mended and not replaced: others have it open.
			if fi, err := f.Stat(); err == nil && fi.Mode().IsRegular() && (fi.Size() == sharedSize || f.Truncate(sharedSize) == nil) {
				return f, nil
			}
			f.Close()
			err = safefile.Write(path, make([]byte, sharedSize), how)
		case errors.Is(err, os.ErrNotExist):
			// Several may come at once: all must have the same file.
			if err = safefile.WriteNew(path, make([]byte, sharedSize), how); errors.Is(err, os.ErrExist) {
				err = nil
			}
		}
		if err != nil {
			return nil, fmt.Errorf("store: %w", err)
		}
	}
	return nil, fmt.Errorf("store: %s is replaced by somebody else", path)
}

// TrimShared frees what sessions, which can write the file that CreateShared makes, have had it take beyond its length.
func TrimShared(path string) error {
	f, err := CreateShared(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(sharedSize), f.Close())
}

// OpenShared takes over an open file that CreateShared gave.
func OpenShared(f *os.File) (*Shared, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, sharedSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("store: map the count of all images: %w", err)
	}
	return &Shared{tally: tally{f: f}, mem: b}, nil
}

// Close gives the file up.
func (s *Shared) Close() error { return errors.Join(unix.Munmap(s.mem), s.f.Close()) }

func (s *Shared) count() *int64 { return (*int64)(unsafe.Pointer(&s.mem[0])) }

// guard has f look at the count, and says whether it did. Any session can cut the file short, which makes
// the count fault: it gets its length back then, and counts from zero until the next sweep.
func (s *Shared) guard(f func()) bool {
	return noFault(f) || s.f.Truncate(sharedSize) == nil && noFault(f)
}

// noFault calls f, and says whether it ended without a fault of memory.
func noFault(f func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			if _, fault := r.(interface{ Addr() uintptr }); !fault {
				panic(r)
			}
		}
	}()
	f()
	return true
}

// stored is the size of all images, in bytes. A count that cannot be read has no room for any.
func (s *Shared) stored() int64 {
	var n int64
	if !s.guard(func() { n = atomic.LoadInt64(s.count()) }) {
		return math.MaxInt64
	}
	return max(0, n)
}

func (s *Shared) add(n int64) { s.guard(func() { atomic.AddInt64(s.count(), n) }) }

func (s *Shared) set(n int64) { s.guard(func() { atomic.StoreInt64(s.count(), n) }) }
