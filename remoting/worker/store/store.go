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
	"os"
	"path/filepath"
	"slices"
	"sync"
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

	// Relist is how old a process's count of the files in the directory may be when it adds another one, as a directory of thousands of
	// files takes milliseconds to read. Within that time several processes may exceed Limit. 0: it reads the directory each time.
	Relist time.Duration

	Damaged func(error) // is called for each damaged file; may be nil
}

// Store is a directory of images.
type Store struct {
	dir string
	Bounds
	open tally         // uploads into the directory
	boot func() string // names this boot of the machine, "" if nobody says
	late late

	creating sync.Mutex // guards what follows, and the begin of an upload
	listed   time.Time  // when the directory was read
	has      int64      // bytes in it, by that and what was added since
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
	s := &Store{dir: dir, Bounds: b, boot: sync.OnceValue(bootID)}
	s.late.init()
	return s, nil
}

// Clean removes what uploads have left behind that died an hour ago or more.
func (s *Store) Clean(now time.Time) error {
	d, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	defer d.Close()
	all, err := list(d)
	if err != nil {
		return err
	}
	clean(d, all, now.Add(-time.Hour))
	return nil
}

// file is a file of the store: an image or an unfinished upload.
type file struct {
	name string
	size int64     // bytes
	used time.Time // of an image: when it was last used
}

// image says whether the file is a whole image.
func (f file) image() bool { return isImage(f.name) }

// list lists the store's files in an open directory. Files with other names are not the store's.
// They are not counted and never removed: an admin may have given a directory that has other uses.
func list(d *os.File) (all []file, err error) {
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	for _, name := range names {
		if !isImage(name) && !isUnfinished(name) {
			continue
		}
		var st unix.Stat_t
		if unix.Fstatat(int(d.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
			all = append(all, file{name, st.Size, time.Unix(st.Mtim.Unix())})
		}
	}
	slices.SortFunc(all, func(a, b file) int { return a.used.Compare(b.used) })
	return all, nil
}

// remove removes a file of an open directory, and says whether it is gone.
func remove(d *os.File, f file) bool {
	err := unix.Unlinkat(int(d.Fd()), f.name, 0)
	return err == nil || errors.Is(err, unix.ENOENT)
}

// clean removes the unfinished uploads that were last written before a time, and gives the other
// files. Only file systems without unnamed files keep them when an upload dies.
func clean(d *os.File, all []file, before time.Time) []file {
	return slices.DeleteFunc(all, func(f file) bool {
		return !f.image() && f.used.Before(before) && remove(d, f)
	})
}

// isImage says whether a name in a directory is an image's: its hash as Sum.String writes it.
func isImage(name string) bool {
	var s Sum
	n, err := hex.Decode(s[:], []byte(name[:min(len(name), 2*len(s))]))
	return err == nil && n == len(s) && name == s.String()
}

// isUnfinished says whether a name in a directory is that of an image's upload.
func isUnfinished(name string) bool {
	of, ok := safefile.Unfinished(name)
	return ok && isImage(of)
}

func (s *Store) path(sum Sum) string { return filepath.Join(s.dir, sum.String()) }

// Image is a mapped image. A NUL byte follows its last byte, as text images
// need.
type Image struct {
	mem    []byte // the whole mapping
	size   int
	stored bool
	facts  string  // facts.go
	up     *Upload // whose Publish is to come, with the facts that are noted before it
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
	s.late.wait(sum)
	fd, err := s.openFile(sum)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return s.mapChecked(fd, sum, size)
}

// Hold opens an image as Get does, for one who reads its file. It stays readable whatever becomes of the store.
func (s *Store) Hold(sum Sum, size uint64) (*os.File, error) {
	s.late.wait(sum)
	fd, err := s.openFile(sum)
	if err != nil {
		return nil, err
	}
	m, err := s.mapChecked(fd, sum, size)
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	_ = m.Close()
	return os.NewFile(uintptr(fd), s.path(sum)), nil
}

func (s *Store) openFile(sum Sum) (int, error) {
	fd, err := unix.Open(s.path(sum), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return -1, ErrNotFound
	}
	if err != nil {
		return -1, fmt.Errorf("store: open %s: %w", sum, err)
	}
	return fd, nil
}

// mapChecked maps an image's open file, and hashes it unless that has been done since it was changed.
func (s *Store) mapChecked(fd int, sum Sum, size uint64) (*Image, error) {
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
	m.facts = readFacts(fd, sum)
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

// size adds up the sizes of files, in bytes.
func size(all []file) (sum int64) {
	for _, f := range all {
		sum += f.size
	}
	return sum
}

// within removes images until the directory has at most room bytes, and returns how many it has. Where the directory is not listed for
// each piece, it removes more than is needed. creating is held.
func (s *Store) within(room int64) (int64, error) {
	if s.has <= room && time.Since(s.listed) < s.Relist {
		return s.has, nil
	}
	var err error
	s.has, err = s.evict(room)
	if s.Relist > 0 && s.has > room-room/64 {
		s.has, err = s.evict(room - room/16)
	}
	s.listed = time.Now()
	return s.has, err
}

// evict removes the images used longest ago until the directory takes no more than room
// bytes, and says what it takes then.
func (s *Store) evict(room int64) (int64, error) {
	d, err := os.Open(s.dir)
	if err != nil {
		return 0, fmt.Errorf("store: %w", err)
	}
	defer d.Close()
	all, err := list(d)
	if err != nil {
		return 0, err
	}
	sum := size(all)
	for _, f := range all {
		if sum <= room {
			break
		}
		if f.image() && unix.Unlinkat(int(d.Fd()), f.name, 0) == nil {
			sum -= f.size
			if s.Shared != nil {
				s.Shared.add(-f.size)
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
