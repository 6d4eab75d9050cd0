package workers

// Room on the file system of run_dir, which is in memory, and which sessions can fill: each has the directory of its lease for /dev/shm.
// A program has a few small files there, of the driver's. A session that has been taken over may make any number of
// any size, of which its memory is charged to it only as long as it lives. The accounts and the records of all sessions are on the
// same file system, and usually files of the whole system's, so a lease that fills it ends.

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	roomEvery = time.Second // between two looks
	// The file system is short of room when less than this part of it is free.
	roomFree = 4
	// Only a lease that has more than this part of all of it is to blame.
	roomPart = 16
	// roomDepth is how deep directories are looked into. One that is deeper is none of the driver's.
	roomDepth = 32
)

// room is what a directory takes of its file system, or what that has.
type room struct{ bytes, files uint64 }

// roomOf says what the file system of a directory has, and what of it is free. Without a bound on files, it has none.
func roomOf(dir string) (all, free room, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return all, free, fmt.Errorf("%s: %w", dir, err)
	}
	size := uint64(st.Bsize)
	return room{st.Blocks * size, st.Files}, room{st.Bavail * size, st.Ffree}, nil
}

// short reports whether too little is free.
func short(all, free room) bool {
	return free.bytes < all.bytes/roomFree || free.files < all.files/roomFree
}

// part is the larger one of the parts that a directory takes of a file system's bytes and files.
func (r room) part(all room) float64 {
	of := func(n, all uint64) float64 {
		if all == 0 {
			return 0
		}
		return float64(n) / float64(all)
	}
	return max(of(r.bytes, all.bytes), of(r.files, all.files))
}

// add counts what is in a directory, until that is more than most. What cannot be read counts as nothing: it is just being removed, and whoever
// removes and makes things all the time must not keep the rest from being counted.
func (r *room) add(dir *os.File, depth int, most room) {
	for r.bytes <= most.bytes && (most.files == 0 || r.files <= most.files) {
		names, err := dir.Readdirnames(256)
		if err != nil {
			return
		}
		for _, n := range names {
			var st unix.Stat_t
			if unix.Fstatat(int(dir.Fd()), n, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
				continue // just removed
			}
			r.files++
			r.bytes += uint64(st.Blocks) * 512
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				continue
			}
			if depth == 0 {
				r.bytes, r.files = most.bytes+1, most.files+1
				return
			}
			fd, err := unix.Openat(int(dir.Fd()), n, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
			if err != nil {
				continue
			}
			f := os.NewFile(uintptr(fd), n)
			r.add(f, depth-1, most)
			f.Close()
		}
	}
}

// keepRoom looks after the room at intervals until stopRoom.
func (p *Pool) keepRoom() {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(roomEvery)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				p.makeRoom()
			case <-stop:
				return
			}
		}
	}()
	p.stopRoom = sync.OnceFunc(func() {
		close(stop)
		<-done
	})
}

// makeRoom ends the sessions of the lease that takes most, if there is too little room and the lease is to blame.
func (p *Pool) makeRoom() {
	all, free, err := roomOf(p.cfg.Shared)
	if err != nil || !short(all, free) {
		return
	}
	id, most := p.fullest(all)
	if id == "" {
		return
	}
	why := fmt.Sprintf("its lease has filled /dev/shm with %d MiB in %d files or more, a sixteenth of the file system of run_dir, of which less than a quarter was free", most.bytes>>20, most.files)
	p.mu.Lock()
	some := p.endOverrun(id, 0, why)
	p.removeShared(id) // under mu: a session that has no process yet opens a new one
	p.mu.Unlock()
	p.log.Warn("the file system of run_dir is short of room", "lease", id, "reason", why, "sessions_ended", some)
}

// fullest is the lease whose directory takes the largest part of the file system, of those that take more than a sixteenth; "" for none.
func (p *Pool) fullest(all room) (id string, most room) {
	entries, err := os.ReadDir(p.cfg.Shared)
	if err != nil {
		return "", most
	}
	// Beyond a quarter one is like another.
	bound := room{all.bytes / 4, all.files / 4}
	for _, e := range entries {
		if !form.IsLeaseID(e.Name()) {
			continue
		}
		f, err := os.OpenFile(filepath.Join(p.cfg.Shared, e.Name()), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			continue
		}
		var r room
		r.add(f, roomDepth, bound)
		f.Close()
		if r.part(all) > 1.0/roomPart && r.part(all) > most.part(all) {
			id, most = e.Name(), r
		}
	}
	return id, most
}
