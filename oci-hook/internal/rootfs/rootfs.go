// Package rootfs touches a container's root the safe way: every name in it is resolved
// by the kernel inside of it, and what is mounted is mounted on handles. What is made is
// made in a copy of the root's mount that nobody else has, in which nothing else is
// mounted: no link in an image leads a write to the host or to a user's volume. The copy
// can be written where the runtime has the root read-only already, as crun does.
package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	pathrs "github.com/cyphar/filepath-securejoin/pathrs-lite"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// ErrOutside is wrapped where a path in a container leads to something mounted into it.
var ErrOutside = errors.New("not on the container's own root")

// Root is a container's root, before the runtime enters it.
type Root struct {
	dir   *os.File // O_PATH, as the container will see it
	mount uint64
	own   *Tree // the same files, for writing
}

// Open opens the root at a path that the runtime gave.
func Open(path string) (*Root, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("root of the container %s: %w", path, err)
	}
	r := &Root{dir: os.NewFile(uintptr(fd), path)}
	if r.mount, err = mountID(fd); err != nil {
		_ = r.dir.Close()
		return nil, fmt.Errorf("root of the container %s: %w", path, err)
	}
	if r.own, err = r.Copy(); err != nil {
		_ = r.dir.Close()
		return nil, err
	}
	return r, nil
}

// Close closes the handles.
func (r *Root) Close() {
	r.own.Close()
	_ = r.dir.Close()
}

// Find opens what is at path, links followed inside the root, with O_PATH, wherever it is mounted.
func (r *Root) Find(path string) (*os.File, error) { return find(r.dir, path) }

func find(root *os.File, path string) (*os.File, error) {
	h, err := pathrs.OpenatInRoot(root, path)
	if err != nil {
		return nil, fmt.Errorf("%s in the container: %w", path, err)
	}
	return h, nil
}

// Has says whether there is something at path.
func (r *Root) Has(path string) bool {
	h, err := r.Find(path)
	if err == nil {
		h.Close()
	}
	return err == nil
}

// Shows says whether the container sees the host's h at path.
func (r *Root) Shows(path string, h *os.File) bool {
	v, err := r.Find(path)
	if err != nil {
		return false
	}
	defer v.Close()
	return sameFile(v, h)
}

// seen opens what the container will see at path, and refuses anything but the file that
// h, a handle in our copy, is of.
func (r *Root) seen(h *os.File, path string) (*os.File, error) {
	v, err := r.Find(path)
	if err != nil {
		return nil, err
	}
	id, err := mountID(int(v.Fd()))
	if err == nil && (id != r.mount || !sameFile(v, h)) {
		err = fmt.Errorf("%w: something is mounted there, or a link leads to where something is", ErrOutside)
	}
	if err != nil {
		v.Close()
		return nil, fmt.Errorf("%s in the container: %w", path, err)
	}
	return v, nil
}

// Dir opens the directory at path on the container's own root, and makes what is missing
// of it, one name at a time, each below a handle.
func (r *Root) Dir(path string) (*os.File, error) {
	at, err := dup(r.own.f)
	if err != nil {
		return nil, err
	}
	sofar := ""
	for name := range strings.SplitSeq(strings.Trim(filepath.Clean(path), "/"), "/") {
		sofar += "/" + name
		next, err := find(r.own.f, sofar)
		if errors.Is(err, unix.ENOENT) {
			next, err = mkdir(at, name, sofar)
		}
		at.Close()
		if err != nil {
			return nil, err
		}
		at = next
	}
	defer at.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(at.Fd()), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, fmt.Errorf("%s in the container: %w", path, unix.ENOTDIR)
	}
	return r.seen(at, path)
}

// mkdir makes a directory, and opens what is then there unless it is a link.
func mkdir(at *os.File, name, path string) (*os.File, error) {
	if err := unix.Mkdirat(int(at.Fd()), name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("make %s in the container: %w", path, err)
	}
	fd, err := unix.Openat(int(at.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s in the container: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// File opens the regular file at path for mounting on it, and makes an empty one, below
// a directory that is there, if there is none.
func (r *Root) File(path string) (*os.File, error) {
	h, err := find(r.own.f, path)
	if errors.Is(err, unix.ENOENT) {
		h, err = r.create(path)
	}
	if err != nil {
		return nil, err
	}
	defer h.Close()
	if !regular(h) {
		return nil, fmt.Errorf("%s in the container: not a regular file", path)
	}
	return r.seen(h, path)
}

func (r *Root) create(path string) (*os.File, error) {
	dir, err := find(r.own.f, filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	v, err := r.seen(dir, filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	v.Close()
	fd, err := unix.Openat(int(dir.Fd()), filepath.Base(path), unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, fmt.Errorf("make %s in the container: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Write writes a file of the given content at dir/name. It opens nothing of the image, and
// so follows no link and waits for no FIFO.
func (r *Root) Write(dir, name, content string) error {
	d, err := find(r.own.f, dir)
	if err != nil {
		return err
	}
	defer d.Close()
	v, err := r.seen(d, dir)
	if err != nil {
		return err
	}
	v.Close()
	if err := safefile.WriteAt(d, name, []byte(content), safefile.How{Mode: 0o644, Volatile: true}); err != nil {
		return fmt.Errorf("write %s/%s in the container: %w", dir, name, err)
	}
	return nil
}

// Names lists at most n names of the directory at path; none if there is no such directory.
func (r *Root) Names(path string, n int) []string {
	h, err := r.Find(path)
	if err != nil {
		return nil
	}
	defer h.Close()
	// Directories alone are opened for more than their path: a FIFO would hang, a device might act.
	fd, err := unix.Openat(int(h.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	d := os.NewFile(uintptr(fd), path)
	defer d.Close()
	names, _ := d.Readdirnames(n)
	return names
}

func regular(h *os.File) bool {
	var st unix.Stat_t
	return unix.Fstat(int(h.Fd()), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("descriptor: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
