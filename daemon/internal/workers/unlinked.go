package workers

// Files without a name. A session can remove a file and keep it open or mapped: the file takes room, and is in no directory. A session
// cannot fork, so its files are those of one process. What its threads have open is one table, unless a thread was made that
// has a table of its own. Root's files do not count: the daemon makes them, and sessions of several leases have the same ones.
// A file that is neither open nor mapped, but on its way through a socket, is not found.

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/process"
)

// maxLooks is how many descriptors are looked at in the tables that threads of a session have of their own. A session of ours has
// none, and one that was taken over could make as many as it has threads.
const maxLooks = 1 << 17

// unlinked counts the files without a name on a file system.
type unlinked struct {
	dev  uint64
	most room // when more is found, the rest is not looked at
	room
	seen map[uint64]bool // inodes that are counted
	left int             // how many entries may still be looked at; a session with more counts as one that has more than most
}

// addUnlinked counts in r what sessions hold of dir's file system without a name, until that is more than most.
func (r *room) addUnlinked(dir *os.File, sessions []lease.Process, most room) {
	var st unix.Stat_t
	if unix.Fstat(int(dir.Fd()), &st) != nil {
		return
	}
	u := unlinked{dev: st.Dev, most: most, room: *r, seen: map[uint64]bool{}}
	for _, s := range sessions {
		u.session(s)
	}
	*r = u.room
}

// session counts what a session holds.
func (u *unlinked) session(s lease.Process) {
	proc, err := os.Open(fmt.Sprintf("/proc/%d", s.PID))
	if err != nil {
		return
	}
	defer proc.Close()
	// proc is of the process that has this pid now. If that one is the session, it stays so: once it has ended, nothing opens below proc.
	if start, err := process.Start(s.PID); err != nil || start != s.Start {
		return
	}
	u.left = math.MaxInt // the system's limits bound these
	u.links(proc, "fd")
	u.links(proc, "map_files")
	u.left = maxLooks
	tasks, err := openDir(proc, "task")
	if err != nil {
		return
	}
	defer tasks.Close()
	for {
		names, err := tasks.Readdirnames(256)
		if err != nil {
			return
		}
		for _, n := range names {
			if tid, err := strconv.Atoi(n); err == nil && ownTable(s.PID, tid) {
				u.links(tasks, filepath.Join(n, "fd"))
			}
		}
	}
}

// ownTable says whether a thread has another table of descriptors than the process's first thread, kcmp(2).
func ownTable(pid, tid int) bool {
	const files = 2 // KCMP_FILES
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(pid), uintptr(tid), files, 0, 0, 0)
	return errno == 0 && r != 0
}

// links counts the files that the links in a directory of /proc lead to.
func (u *unlinked) links(proc *os.File, name string) {
	dir, err := openDir(proc, name)
	if err != nil {
		return
	}
	defer dir.Close()
	for u.bytes <= u.most.bytes && (u.most.files == 0 || u.files <= u.most.files) {
		names, err := dir.Readdirnames(256)
		if err != nil {
			return
		}
		for _, n := range names {
			if u.left--; u.left < 0 {
				u.bytes, u.files = u.most.bytes+1, u.most.files+1
				return
			}
			// A file server that is away is not asked.
			var st unix.Statx_t
			if unix.Statx(int(dir.Fd()), n, unix.AT_STATX_DONT_SYNC, unix.STATX_NLINK|unix.STATX_UID|unix.STATX_INO|unix.STATX_BLOCKS, &st) != nil {
				continue // just closed
			}
			if st.Nlink == 0 && st.Uid != 0 && unix.Mkdev(st.Dev_major, st.Dev_minor) == u.dev && !u.seen[st.Ino] {
				u.seen[st.Ino] = true
				u.files++
				u.bytes += st.Blocks * 512
			}
		}
	}
}

// openDir opens a directory in another one.
func openDir(in *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(in.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: filepath.Join(in.Name(), name), Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}
