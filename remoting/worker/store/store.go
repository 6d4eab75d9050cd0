// Package store keeps module images by their SHA-256 in a directory that
// outlives sessions, so that an image crosses the network once per node.
package store

// An upload is an unnamed file, which is hashed on the way, synced, and only then linked to
// the name of its hash. A name that exists is whole, and a process that dies leaves
// nothing. Several processes share the directory.
//
// An image is stored only within three bounds: of the directory, of all users' directories
// (Shared), and of the free space that must be left. Uploads under way count. The images used
// longest ago make room. One that is mapped stays readable, because removing a name leaves
// the file. An image for which there is no room is kept in memory for the session that sent it.

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
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
	// ErrTooLarge says that an image has an impossible size.
	ErrTooLarge = errors.New("store: image too large")
	// ErrNoRoom says why an image is not stored.
	ErrNoRoom = errors.New("no room")
)

// Bounds say how much is stored. Sizes are bytes.
type Bounds struct {
	Limit    int64   // images in the directory
	Total    int64   // images of all directories; used with Shared
	KeepFree int64   // space of the file system that images leave free
	Shared   *Shared // nil where there is one directory only

	Damaged func(error) // is told of damaged files; may be nil
}

// Store is a directory of images.
type Store struct {
	dir string
	Bounds
	open tally         // uploads into the directory
	boot func() string // names this boot of the machine, "" if nobody says
}

// tallyName is the file whose locks count the uploads into a directory.
const tallyName = ".uploads"

// Open opens or makes the directory, mode 0700.
func Open(dir string, b Bounds) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, fmt.Errorf("store: %s is not a directory", dir)
	}
	if st.Mode&0o077 != 0 {
		return nil, fmt.Errorf("store: %s is open to others (mode %04o): chmod 0700 it, images in it are executed", dir, st.Mode&0o777)
	}
	if st.Uid != uint32(os.Geteuid()) {
		return nil, fmt.Errorf("store: %s belongs to user %d, not to %d", dir, st.Uid, os.Geteuid())
	}
	return &Store{dir: dir, Bounds: b, boot: sync.OnceValue(bootID)}, nil
}

// Clean removes what uploads have left behind that died an hour ago or more.
func (s *Store) Clean(now time.Time) error { return clean(s.dir, now.Add(-time.Hour)) }

// clean removes files of a directory that are no images and older than a time: what older
// versions left of uploads, and file systems without unnamed files.
func clean(dir string, before time.Time) error {
	es, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	for _, e := range es {
		if isImage(e.Name()) || e.Name() == tallyName || !e.Type().IsRegular() {
			continue
		}
		if fi, err := e.Info(); err == nil && fi.ModTime().Before(before) {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
	return nil
}

// isImage says whether a name in a directory is an image's.
func isImage(name string) bool {
	b, err := hex.DecodeString(name)
	return err == nil && len(b) == sha256.Size
}

func (s *Store) path(sum Sum) string { return filepath.Join(s.dir, sum.String()) }

// Image is a mapped image. A NUL byte follows its last byte, as text images
// need.
type Image struct {
	mem    []byte // the whole mapping
	size   int
	stored bool
}

// Bytes is the image.
func (m *Image) Bytes() []byte { return m.mem[:m.size:m.size] }

// Stored says whether the store has the image, or only this process.
func (m *Image) Stored() bool { return m.stored }

// Close unmaps the image.
func (m *Image) Close() error {
	if m.mem == nil {
		return nil
	}
	err := unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(m.mem)), uintptr(cap(m.mem)))
	m.mem = nil
	return err
}

// Get maps an image of so many bytes, or says ErrNotFound. A file that is not what its name says is
// removed, and not found.
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
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size <= 0 {
		return nil, s.damaged(sum, st.Size, errors.New("no regular file, or an empty one"))
	}
	m, err := mapImage(fd, uint64(st.Size))
	if err != nil {
		return nil, fmt.Errorf("store: map %s: %w", sum, err)
	}
	if !s.checked(fd, &st) {
		if err := m.check(sum); err != nil {
			_ = m.Close()
			return nil, s.damaged(sum, st.Size, err)
		}
	}
	if uint64(st.Size) != size {
		_ = m.Close()
		return nil, fmt.Errorf("%w: image %s has %d bytes, %d asked", ErrMismatch, sum, st.Size, size)
	}
	s.used(fd, &st)
	return m, nil
}

// mapImage maps a file of so many bytes.
func mapImage(fd int, size uint64) (*Image, error) {
	// Anonymous memory one byte longer than the file lies beneath, so that
	// there is a zero byte behind a file that fills its last page.
	m, err := newImage(size, unix.PROT_READ)
	if err != nil {
		return nil, err
	}
	p := unsafe.Pointer(unsafe.SliceData(m.mem))
	if _, err := unix.MmapPtr(fd, 0, p, uintptr(size), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		_ = m.Close()
		return nil, err
	}
	m.stored = true
	return m, nil
}

// newImage gives memory for an image, and a zero byte.
func newImage(size uint64, prot int) (*Image, error) {
	whole := (int(size) + 1 + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(whole), prot, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	return &Image{mem: unsafe.Slice((*byte)(p), whole), size: int(size)}, nil
}

// images lists a directory's images, used longest ago first, and adds up the sizes of all its
// files, in bytes.
func images(dir string) (all []fs.FileInfo, sum int64, err error) {
	es, err := os.ReadDir(dir)
	if err != nil {
		return nil, 0, fmt.Errorf("store: %w", err)
	}
	for _, e := range es {
		fi, err := e.Info()
		if err != nil || !fi.Mode().IsRegular() {
			continue
		}
		sum += fi.Size()
		if isImage(e.Name()) {
			all = append(all, fi)
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].ModTime().Before(all[j].ModTime()) })
	return all, sum, nil
}

// evict removes the images used longest ago until the directory takes no more than room
// bytes, and says what it takes then.
func (s *Store) evict(room int64) (int64, error) {
	all, sum, err := images(s.dir)
	if err != nil {
		return 0, err
	}
	for _, fi := range all {
		if sum <= room {
			break
		}
		if err := os.Remove(filepath.Join(s.dir, fi.Name())); err == nil {
			sum -= fi.Size()
			if s.Shared != nil {
				s.Shared.add(-fi.Size())
			}
		}
	}
	return sum, nil
}

// free is the space that a directory's file system has for its users, in bytes.
func free(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}
