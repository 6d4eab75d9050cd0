package store

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Upload is an image on its way in.
type Upload struct {
	s     *Store
	sum   Sum
	total uint64
	have  uint64
	hash  hash.Hash

	f        *safefile.Pending // nil for an image that is not stored
	open     span              // of the store's tally
	shared   span
	mem      *Image // the image, if it is not stored or is stored later, see late.go
	facts    string // to be noted with it
	unstored error  // why it is not stored
}

// Begin starts an upload of total bytes. The image is kept in memory if it cannot be stored, see
// Unstored.
func (s *Store) Begin(sum Sum, total uint64) (*Upload, error) {
	if total == 0 || total > 1<<40 {
		return nil, fmt.Errorf("%w: %d bytes", ErrTooLarge, total)
	}
	u := &Upload{s: s, sum: sum, total: total, hash: sha256.New()}
	if err := u.create(); err != nil {
		if err := u.spill(err); err != nil {
			return nil, err
		}
	} else if total <= lateMost {
		// Without that memory the commit waits for the disk.
		u.mem, _ = newImage(total, unix.PROT_READ|unix.PROT_WRITE)
	}
	return u, nil
}

// create begins the file, if its image has room.
func (u *Upload) create() error {
	s, n := u.s, int64(u.total)
	s.creating.Lock()
	defer s.creating.Unlock()
	if s.open.f == nil {
		f, err := os.OpenFile(filepath.Join(s.dir, tallyName), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		s.open.f = f
	}
	var err error
	// The uploads under way cannot be evicted; what is stored gives way to all of them.
	if u.open, err = s.open.take(n, s.Limit); errors.Is(err, errFull) {
		return fmt.Errorf("%w: with %d bytes of this image and of uploads under way, the user's images would have more than %d", ErrNoRoom, n, s.Limit)
	} else if err != nil {
		return err
	}
	under, _, err := s.open.others()
	if err != nil {
		return err
	}
	room := s.Limit - under - s.open.bytes()
	has, err := s.within(room)
	if err != nil {
		return err
	}
	if has > room {
		return fmt.Errorf("%w: the user's images have %d bytes of %d", ErrNoRoom, has, s.Limit)
	}
	if s.Shared != nil {
		if u.shared, err = s.Shared.take(n, s.Total-s.Shared.stored()); errors.Is(err, errFull) {
			return fmt.Errorf("%w: with %d bytes of this image, all images would have more than %d", ErrNoRoom, n, s.Total)
		} else if err != nil {
			return err
		}
	}
	if err := s.leaves(n, has); err != nil {
		return err
	}
	if u.f, err = safefile.Create(s.path(u.sum), safefile.How{Mode: 0o600, Unnamed: true}); err != nil {
		return err
	}
	// The space is taken now, so that it is there for the last byte as well, and those who
	// come at the same time see each other.
	if err := unix.Fallocate(int(u.f.Fd()), 0, 0, n); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return &fs.PathError{Op: "reserve space for", Path: u.f.Name(), Err: err}
	}
	s.has += n
	return s.leaves(0, 0)
}

// spare is what eviction frees beyond what an image asks for, in bytes: file systems give space in blocks,
// and take some for themselves.
const spare = 1 << 20

// leaves says whether so many bytes more leave the free space that must be left. The user's own images,
// which have own bytes, are evicted once if that can make the room.
func (s *Store) leaves(n, own int64) error {
	for evicted := false; ; evicted = true {
		has, err := free(s.dir)
		if err != nil {
			return err
		}
		short := s.KeepFree + n - has
		if short <= 0 {
			return nil
		}
		if evicted || short > own {
			return fmt.Errorf("%w: %d bytes are free at the image store, %d must stay free", ErrNoRoom, has, s.KeepFree)
		}
		if _, err := s.evict(max(0, own-short-spare)); err != nil {
			return err
		}
	}
}

// errForgotten says that a file has other bytes than were written to it.
var errForgotten = errors.New("what was written is not what is read back")

// spill goes on in memory.
func (u *Upload) spill(why error) error {
	u.unstored = why
	if u.mem != nil {
		u.release()
		return nil
	}
	m, err := newImage(u.total, unix.PROT_READ|unix.PROT_WRITE)
	if err == nil && u.have > 0 {
		_, err = io.ReadFull(io.NewSectionReader(u.f, 0, int64(u.have)), m.mem[:u.have])
		// A kernel that could not write a page may have dropped it.
		h := sha256.New()
		h.Write(m.mem[:u.have])
		if err == nil && !bytes.Equal(h.Sum(nil), u.hash.Sum(nil)) {
			err = errForgotten
		}
	}
	u.release()
	if err != nil {
		if m != nil {
			_ = m.Close()
		}
		return fmt.Errorf("store: %w; and in memory: %w", why, err)
	}
	u.mem = m
	return nil
}

// release gives up the file and what was reserved for it.
func (u *Upload) release() {
	if u.f != nil {
		_ = u.f.Close()
		u.f = nil
	}
	if u.open.n > 0 {
		u.s.open.drop(u.open)
		u.open = span{}
	}
	if u.shared.n > 0 {
		u.s.Shared.drop(u.shared)
		u.shared = span{}
	}
}

// Sum is the hash announced.
func (u *Upload) Sum() Sum { return u.sum }

// Total is the size announced, in bytes.
func (u *Upload) Total() uint64 { return u.total }

// Unstored says why the image is kept in memory; nil if it is stored.
func (u *Upload) Unstored() error { return u.unstored }

// Write adds the bytes at offset, which must be where the last ones ended.
func (u *Upload) Write(offset uint64, b []byte) error {
	if offset != u.have || uint64(len(b)) > u.total-u.have {
		return fmt.Errorf("%w: %d bytes at %d of %d, %d expected", ErrMismatch, len(b), offset, u.total, u.have)
	}
	if u.f != nil {
		if _, err := u.f.WriteAt(b, int64(offset)); err != nil {
			if err := u.spill(err); err != nil {
				return err
			}
		}
	}
	if u.mem != nil {
		copy(u.mem.mem[offset:], b)
	}
	u.hash.Write(b)
	u.have += uint64(len(b))
	return nil
}

// Complete says whether all bytes are there.
func (u *Upload) Complete() bool { return u.have == u.total }

// Abort drops the upload.
func (u *Upload) Abort() {
	u.release()
	if u.mem != nil {
		_ = u.mem.Close()
		u.mem = nil
	}
}

// Commit checks the hash and gives the image. It publishes a large image; the caller must call Publish for a small one.
func (u *Upload) Commit() (*Image, error) {
	if !u.Complete() || Sum(u.hash.Sum(nil)) != u.sum {
		u.Abort()
		return nil, fmt.Errorf("%w: image %s", ErrMismatch, u.sum)
	}
	if u.f != nil && u.mem == nil {
		m, err := mapImage(int(u.f.Fd()), u.total)
		if err == nil {
			if err = u.publish(); err == nil {
				u.Abort()
				return m, nil
			}
			_ = m.Close()
		}
		if err := u.spill(err); err != nil {
			u.Abort()
			return nil, err
		}
	}
	m := u.mem
	u.mem = nil
	if u.f != nil {
		m.up = u
	}
	return m, nil
}

// Put stores an image that is in memory, unless the store has it.
func (s *Store) Put(b []byte) error {
	sum := sumBeside(b)
	if f, err := s.Hold(sum, uint64(len(b))); err == nil {
		return f.Close()
	}
	u := &Upload{s: s, sum: sum, total: uint64(len(b))}
	defer u.release()
	if err := u.create(); err != nil {
		return err
	}
	if _, err := u.f.WriteAt(b, 0); err != nil {
		return err
	}
	return u.publish()
}

// sumBeside hashes bytes and gives way to other goroutines often: the hash of a piece is not preempted, and on few processors a session's
// executor would wait for it.
func sumBeside(b []byte) (sum Sum) {
	const step = 128 << 10
	h := sha256.New()
	for ; len(b) > 0; b = b[min(step, len(b)):] {
		h.Write(b[:min(step, len(b))])
		runtime.Gosched()
	}
	h.Sum(sum[:0])
	return sum
}

// Publish gives the image its name in the store, unless Commit has done so. Afterwards Unstored says whether that worked. Publish may
// run on another goroutine than the other methods; SetFact must not be called for the image once it has begun.
func (u *Upload) Publish() {
	if u.f == nil {
		return
	}
	defer u.Abort()
	u.unstored = u.publish()
}

// publish gives the file its name.
func (u *Upload) publish() error {
	fd := int(u.f.Fd())
	if u.facts != "" {
		writeFacts(fd, u.sum, u.facts)
	}
	err := u.f.CommitNew()
	if errors.Is(err, fs.ErrExist) { // another session was faster
		return nil
	}
	if err != nil {
		return err
	}
	if u.s.Shared != nil {
		u.s.Shared.add(int64(u.total))
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil {
		u.s.used(fd, &st)
	}
	return nil
}
