package workers

// Free space on the file system of run_dir. It is in memory, and sessions can fill it: the directory of a session's lease is its
// /dev/shm. An ordinary program has a few small files there, which the driver makes. A session that was taken over by an attacker can
// make any number of files of any size, also without a name, and their memory is charged to it only while it lives. The accounts and records of all
// sessions are on the same file system, and usually files of the whole system are too. So a lease that fills it is ended. The files
// that count what all users have stored are written by every session; what they take beyond their length is freed.

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

const (
	roomEvery = time.Second // between two checks
	// The file system is short of room if less than a quarter of it is free.
	roomFree = 4
	// A lease is to blame only if it has more than a sixteenth of the whole file system.
	roomPart = 16
	// After a look that found nobody to blame there is none until roomStep of the whole has gone since, or roomRest has passed: a file system
	// that others have filled stays so, and a look reads the directories of all leases.
	roomStep = 64
	roomRest = 30 * time.Second
	// roomDepth is the deepest level of directories that is counted. The driver makes none that are deeper.
	roomDepth = 32
)

// room is an amount of space: what a directory takes of its file system, what the file system has, or what is free.
type room struct{ bytes, files uint64 }

// roomOf returns the size of a directory's file system, and how much of it is free. The number of files is 0 if it is not limited.
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

// fruitless is a look that found no lease to blame.
type fruitless struct {
	at   time.Time
	free room // what was free then
}

// holds reports whether the next look can be left out, because too little has changed since.
func (f fruitless) holds(now time.Time, all, free room) bool {
	return now.Sub(f.at) < roomRest && free.bytes+all.bytes/roomStep >= f.free.bytes && free.files+all.files/roomStep >= f.free.files
}

// part returns which part of a file system r is: of its bytes or of its files, whichever is larger.
func (r room) part(all room) float64 {
	of := func(n, all uint64) float64 {
		if all == 0 {
			return 0
		}
		return float64(n) / float64(all)
	}
	return max(of(r.bytes, all.bytes), of(r.files, all.files))
}

// add counts what is in a directory, until that is more than most. Entries that cannot be read count as nothing: they are just being
// removed, and a program that makes and removes files all the time must not keep the other files from being counted.
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

// keepRoom calls makeRoom at intervals until stopRoom is called.
func (p *Pool) keepRoom() {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(roomEvery)
		defer t.Stop()
		var last fruitless
		for {
			select {
			case <-t.C:
				p.makeRoom(&last)
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

// makeRoom ends the sessions of the lease that takes the most space, if too little is free and that lease is to blame. last is the last
// look that found none.
func (p *Pool) makeRoom(last *fruitless) {
	all, free, err := roomOf(p.cfg.Shared)
	if err != nil || !short(all, free) {
		return
	}
	for _, count := range []string{p.images().count, p.content().count} {
		if err := store.TrimShared(count); err != nil {
			p.log.Warn("the file system of run_dir is short of room, and a file there cannot be made shorter", "error", err)
		}
	}
	if all, free, err = roomOf(p.cfg.Shared); err != nil || !short(all, free) {
		return
	}
	if last.holds(time.Now(), all, free) {
		return
	}
	id, most := p.fullest(all)
	if id == "" {
		*last = fruitless{time.Now(), free}
		return
	}
	why := fmt.Sprintf("its lease has filled /dev/shm: at least %d MiB in %d files, more than a sixteenth of the file system of run_dir, of which less than a quarter was free", most.bytes>>20, most.files)
	p.mu.Lock()
	some := p.endOverrun(id, 0, why)
	p.removeShared(id) // mu is held: a session that has no process yet opens a new directory
	p.mu.Unlock()
	p.log.Warn("the file system of run_dir is short of room", "lease", id, "reason", why, "sessions_ended", some)
}

// processes returns the processes of each lease's sessions.
func (p *Pool) processes() map[string][]lease.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := map[string][]lease.Process{}
	for id, l := range p.leases {
		for s := range l.sessions {
			if s.Worker.PID != 0 { // one without a process is only being started
				all[id] = append(all[id], s.Worker)
			}
		}
	}
	return all
}

// fullest returns the lease whose directory, with what its sessions hold without a name, takes the largest part of the file system. It returns "" if none takes more than a sixteenth.
func (p *Pool) fullest(all room) (id string, most room) {
	entries, err := os.ReadDir(p.cfg.Shared)
	if err != nil {
		return "", most
	}
	sessions := p.processes()
	// Counting further than a quarter of the file system would not change the outcome.
	bound := room{all.bytes / 4, all.files / 4}
	for _, e := range entries {
		if !form.LeaseID(e.Name()).Valid() {
			continue
		}
		f, err := os.OpenFile(filepath.Join(p.cfg.Shared, e.Name()), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			continue
		}
		var r room
		r.add(f, roomDepth, bound)
		r.addUnlinked(f, sessions[e.Name()], bound)
		f.Close()
		if r.part(all) > 1.0/roomPart && r.part(all) > most.part(all) {
			id, most = e.Name(), r
		}
	}
	return id, most
}
