package rootfs

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Tree is a copy of a mount of the host's, not attached anywhere yet.
type Tree struct{ f *os.File }

// Clone takes a private copy of the mount at h, from h downwards and without what is
// mounted below it, that forbids set-user-id programs and devices, and writing if ro.
// Nobody can exchange what it shows.
func Clone(h *os.File, ro bool) (*Tree, error) {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if ro {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	return clone(h, &attr)
}

func clone(h *os.File, attr *unix.MountAttr) (*Tree, error) {
	fd, err := unix.OpenTree(int(h.Fd()), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return nil, fmt.Errorf("copy of the mount of %s: %w%s", h.Name(), err, old(err))
	}
	t := &Tree{os.NewFile(uintptr(fd), h.Name())}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		t.Close()
		return nil, fmt.Errorf("attributes of the mount of %s: %w%s", h.Name(), err, old(err))
	}
	return t, nil
}

// old explains what a kernel before 5.12 answers.
func old(err error) string {
	if errors.Is(err, unix.ENOSYS) {
		return "; Linux 5.12 or newer is needed"
	}
	return ""
}

// File gives the tree's descriptor, which stays the tree's.
func (t *Tree) File() *os.File { return t.f }

// Close lets go of the tree; once attached it stays where it is.
func (t *Tree) Close() { _ = t.f.Close() }

// Attach mounts the tree on what at is a handle of.
func (t *Tree) Attach(at *os.File) error {
	if err := unix.MoveMount(int(t.f.Fd()), "", int(at.Fd()), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s on %s: %w", t.f.Name(), at.Name(), err)
	}
	return nil
}

// Copy takes a copy of the root alone, without what is mounted into it, that can be
// written if the file system can, and on which no program can be run and no device
// opened: for making what is missing, and for work that reads what an image names.
func (r *Root) Copy() (*Tree, error) {
	return clone(r.dir, &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
		Attr_clr:    unix.MOUNT_ATTR_RDONLY,
		Propagation: unix.MS_PRIVATE,
	})
}

// Private makes sure that what is mounted in the root is not mounted in other mount
// namespaces too. A runtime that shares the root's mounts with the host, because a
// volume asks for that, says so again when it has entered the root.
func (r *Root) Private() error {
	shared, err := sharedMounts()
	if err != nil {
		return err
	}
	if !shared[r.mount] {
		return nil
	}
	attr := unix.MountAttr{Propagation: unix.MS_SLAVE}
	if err := unix.MountSetattr(int(r.dir.Fd()), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("propagation of the container's root: %w%s", err, old(err))
	}
	return nil
}

// Cover mounts a copy of the host's file src on the regular file at path, if there is one. What it covers may
// lie on another mount of the container's, since nothing is written: but on none that
// tells the host of its mounts.
func (r *Root) Cover(path string, src *os.File) (bool, error) {
	h, err := r.Find(path)
	if err != nil {
		return false, nil // nothing is there that could be loaded
	}
	defer h.Close()
	if !regular(h) || sameFile(h, src) {
		return false, nil
	}
	id, err := mountID(int(h.Fd()))
	if err != nil {
		return false, err
	}
	if id != r.mount {
		shared, err := sharedMounts()
		if err != nil {
			return false, err
		}
		if shared[id] {
			return false, fmt.Errorf("%s in the container: %w, and it is shared with the host; take it out of LD_LIBRARY_PATH", path, ErrOutside)
		}
	}
	t, err := Clone(src, true)
	if err != nil {
		return false, err
	}
	defer t.Close()
	if err := t.Attach(h); err != nil {
		return false, err
	}
	return true, nil
}

func sameFile(a, b *os.File) bool {
	var x, y unix.Stat_t
	return unix.Fstat(int(a.Fd()), &x) == nil && unix.Fstat(int(b.Fd()), &y) == nil && x.Dev == y.Dev && x.Ino == y.Ino
}

// mountID is the kernel's number of the mount that fd is on.
func mountID(fd int) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return 0, fmt.Errorf("mount of a descriptor: %w", err)
	}
	if st.Mask&unix.STATX_MNT_ID == 0 {
		return 0, errors.New("the kernel does not say on which mount a file is; Linux 5.8 or newer is needed")
	}
	return st.Mnt_id, nil
}

// sharedMounts are those of this mount namespace that propagate to others.
func sharedMounts() (map[uint64]bool, error) {
	f, err := os.Open("/proc/thread-self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	out := map[uint64]bool{}
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		fields := strings.Fields(s.Text())
		if len(fields) < 7 {
			continue
		}
		id, err := strconv.ParseUint(fields[0], 10, 64)
		if err != nil {
			continue
		}
		for _, opt := range fields[6:] {
			if opt == "-" {
				break
			}
			if strings.HasPrefix(opt, "shared:") {
				out[id] = true
			}
		}
	}
	return out, s.Err()
}
