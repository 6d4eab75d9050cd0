// Package store keeps module images by their SHA-256 in a directory that
// outlives sessions, so that an image crosses the network once per node.
package store

// An image is written to a temporary file, hashed on the way, synced and only
// then renamed to its hash: a name that exists is whole and right. Several
// processes share the directory; a rename onto an equal file is harmless.
// When the directory passes its limit, the images used longest ago go; one
// that is mapped stays readable, because removing a name leaves the file.

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Sum is an image's SHA-256.
type Sum [sha256.Size]byte

func (s Sum) String() string { return hex.EncodeToString(s[:]) }

// Errors of the store.
var (
	// ErrNotFound says that the image must be uploaded.
	ErrNotFound = errors.New("store: image not found")
	// ErrMismatch says that uploaded bytes do not have the announced hash,
	// size or order.
	ErrMismatch = errors.New("store: upload does not match its announcement")
	// ErrTooLarge says that an image is beyond the limit.
	ErrTooLarge = errors.New("store: image too large")
)

// Store is a directory of images.
type Store struct {
	dir   string
	limit int64
}

// Open opens or makes the directory, mode 0700. limit is the most bytes it may
// hold.
func Open(dir string, limit int64) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	fi, err := os.Lstat(dir)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	if !fi.IsDir() {
		return nil, fmt.Errorf("store: %s is not a directory", dir)
	}
	if fi.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("store: %s is open to others (mode %04o): chmod 0700 it, images in it are executed", dir, fi.Mode().Perm())
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	if st.Uid != uint32(os.Geteuid()) {
		return nil, fmt.Errorf("store: %s belongs to user %d, not to %d", dir, st.Uid, os.Geteuid())
	}
	return &Store{dir: dir, limit: limit}, nil
}

// Clean removes what uploads have left behind that died an hour ago or more.
func (s *Store) Clean(now time.Time) error {
	if err := safefile.Sweep(s.dir, func(_ string, fi fs.FileInfo) bool { return now.Sub(fi.ModTime()) > time.Hour }); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	return nil
}

func (s *Store) path(sum Sum) string { return filepath.Join(s.dir, sum.String()) }

// Image is a mapped image. A NUL byte follows its last byte, as text images
// need.
type Image struct {
	mem  []byte // the whole mapping
	size int
}

// Bytes is the image.
func (m *Image) Bytes() []byte { return m.mem[:m.size:m.size] }

// Close unmaps the image.
func (m *Image) Close() error {
	if m.mem == nil {
		return nil
	}
	err := unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(m.mem)), uintptr(cap(m.mem)))
	m.mem = nil
	return err
}

// Get maps an image of so many bytes, or says ErrNotFound.
func (s *Store) Get(sum Sum, size uint64) (*Image, error) {
	fd, err := unix.Open(s.path(sum), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("store: open %s: %w", sum, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("store: stat %s: %w", sum, err)
	}
	if uint64(st.Size) != size || size == 0 {
		return nil, fmt.Errorf("%w: image %s has %d bytes, %d asked", ErrMismatch, sum, st.Size, size)
	}
	// Anonymous memory one byte longer than the file lies beneath, so that
	// there is a zero byte behind a file that fills its last page.
	whole := (int(size) + 1 + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(whole), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("store: map %s: %w", sum, err)
	}
	if _, err := unix.MmapPtr(fd, 0, p, uintptr(size), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		_ = unix.MunmapPtr(p, uintptr(whole))
		return nil, fmt.Errorf("store: map %s: %w", sum, err)
	}
	now := time.Now()
	_ = os.Chtimes(s.path(sum), now, now) // used now: the last to be evicted
	return &Image{mem: unsafe.Slice((*byte)(p), whole), size: int(size)}, nil
}

// Upload is an image on its way in.
type Upload struct {
	s     *Store
	sum   Sum
	total uint64
	have  uint64
	hash  hash.Hash
	f     *safefile.Pending
}

// Begin starts an upload of total bytes.
func (s *Store) Begin(sum Sum, total uint64) (*Upload, error) {
	if total == 0 || int64(total) < 0 || int64(total) > s.limit {
		return nil, fmt.Errorf("%w: %d bytes, the store may hold %d", ErrTooLarge, total, s.limit)
	}
	f, err := safefile.Create(s.path(sum), safefile.How{Mode: 0o600})
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	return &Upload{s: s, sum: sum, total: total, hash: sha256.New(), f: f}, nil
}

// Sum is the hash announced.
func (u *Upload) Sum() Sum { return u.sum }

// Total is the size announced, in bytes.
func (u *Upload) Total() uint64 { return u.total }

// Write adds the bytes at offset, which must be where the last ones ended.
func (u *Upload) Write(offset uint64, b []byte) error {
	if offset != u.have || uint64(len(b)) > u.total-u.have {
		return fmt.Errorf("%w: %d bytes at %d of %d, %d expected", ErrMismatch, len(b), offset, u.total, u.have)
	}
	if _, err := u.f.Write(b); err != nil {
		return fmt.Errorf("store: write: %w", err)
	}
	u.hash.Write(b)
	u.have += uint64(len(b))
	return nil
}

// Complete says whether all bytes are there.
func (u *Upload) Complete() bool { return u.have == u.total }

// Abort drops the upload.
func (u *Upload) Abort() {
	_ = u.f.Close()
}

// Commit checks the hash and puts the image in its place.
func (u *Upload) Commit() error {
	if !u.Complete() || Sum(u.hash.Sum(nil)) != u.sum {
		u.Abort()
		return fmt.Errorf("%w: image %s", ErrMismatch, u.sum)
	}
	if err := errors.Join(u.f.Commit(), u.f.Close()); err != nil {
		return fmt.Errorf("store: %w", err)
	}
	return u.s.evict(u.sum.String())
}

// evict removes the images used longest ago until the limit is kept.
func (s *Store) evict(keep string) error {
	es, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	var files []fs.FileInfo
	var sum int64
	for _, e := range es {
		fi, err := e.Info()
		if _, half := safefile.Unfinished(e.Name()); half || err != nil || !fi.Mode().IsRegular() {
			continue
		}
		files = append(files, fi)
		sum += fi.Size()
	}
	sort.Slice(files, func(i, j int) bool { return files[i].ModTime().Before(files[j].ModTime()) })
	for _, fi := range files {
		if sum <= s.limit {
			break
		}
		if fi.Name() == keep {
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, fi.Name())); err == nil {
			sum -= fi.Size()
		}
	}
	return nil
}
