package store

// Whether a stored image is still what its name says. Its hash costs about as much time as sending it
// to the GPU, so it is made once in each boot: the file then carries a mark (an extended attribute) of
// the boot, its size and the time of its last write, which is set to the present time with it. A write to the file changes that
// time. Whoever writes can set it back, but that changes the time at which the file was last changed in any way, which nobody can set:
// it has to be that of the mark as well. What a crash of the machine or its disk made of the file is found after the boot. A
// file system without such attributes has every session hash what it reads. Processes of the file's owner can write the mark too.

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// markName is the attribute's name.
const markName = "user.sluice.checked"

// fresh is how old the note of an image's last use may be before it is written again.
const fresh = time.Minute

// marking is how long after the time in a mark the file may have been changed for the last time, since writing the mark changes it. It is long
// enough for a busy machine; where it takes longer, the next user hashes the file again.
const marking = 100 * time.Millisecond

func bootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func mark(boot string, st *unix.Stat_t) string {
	return fmt.Sprintf("%s %d %d", boot, st.Size, st.Mtim.Nano())
}

// checked says whether a file has been hashed since it was last changed, in this boot.
func (s *Store) checked(fd int, st *unix.Stat_t) bool {
	boot := s.boot()
	if boot == "" {
		return false
	}
	var b [128]byte
	n, err := unix.Fgetxattr(fd, markName, b[:])
	since := time.Duration(st.Ctim.Nano() - st.Mtim.Nano()) // less than 0 where the kernel's clock for files is behind by a tick
	return err == nil && string(b[:n]) == mark(boot, st) && since.Abs() <= marking
}

// used notes that a file is right as it was at st, and is used now: it is the last to be evicted.
func (s *Store) used(fd int, st *unix.Stat_t) {
	if s.checked(fd, st) && time.Since(time.Unix(st.Mtim.Unix())) < fresh {
		return
	}
	boot := s.boot()
	var now unix.Stat_t
	if unix.Fstat(fd, &now) != nil || now.Ctim != st.Ctim {
		return // somebody has written it meanwhile, or noted the same
	}
	err := touch(fd, time.Now())
	if err == nil && unix.Fstat(fd, &now) == nil && now.Size == st.Size && boot != "" {
		_ = unix.Fsetxattr(fd, markName, []byte(mark(boot, &now)), 0)
	}
}

// touch sets the times of an open file. A session in a sandbox may not do so by a file's name.
func touch(fd int, at time.Time) error {
	now := unix.NsecToTimespec(at.UnixNano())
	both := [2]unix.Timespec{now, now}
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&both)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// errDamaged says that an image is not what its name says.
var errDamaged = errors.New("it does not have its hash")

// check hashes an image. A file that cannot be read, or that is cut short meanwhile, fails it.
func (m *Image) check(sum Sum) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("it cannot be read: %v", r)
		}
	}()
	const piece = 1 << 20 // in pieces: the collector waits for each
	h := sha256.New()
	for b := m.Bytes(); len(b) > 0; {
		n := min(len(b), piece)
		h.Write(b[:n])
		b = b[n:]
	}
	if Sum(h.Sum(nil)) != sum {
		return errDamaged
	}
	return nil
}

// damaged removes a file, so that its image is sent again.
func (s *Store) damaged(sum Sum, size int64, why error) error {
	err := os.Remove(s.path(sum))
	if err == nil && s.Shared != nil {
		s.Shared.add(-size)
	}
	if s.Damaged != nil {
		s.Damaged(fmt.Errorf("store: image %s of %d bytes is damaged and has been removed: %w", sum, size, errors.Join(why, err)))
	}
	return ErrNotFound
}
