package workers

// The store of module images: a directory for each user, which that user's sessions write by
// themselves, and a file that counts what all have. This daemon sweeps them at intervals.

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// storeSweep is the time between two sweeps.
const storeSweep = 30 * time.Second

// leftover is the age at which an unfinished upload is taken for dead: a session that sends an image
// writes all the time.
const leftover = time.Hour

// storeCount is the path of the file that counts all images. It lies beside the directory of the
// leases, in memory: a daemon starts on a full disk too.
func (p *Pool) storeCount() string { return filepath.Clean(p.cfg.Dir) + "-images" }

// userStore opens the user's part of the image store.
func (p *Pool) userStore(uid, gid uint32) (*os.File, error) {
	f, err := dirOf(filepath.Join(p.cfg.Store, fmt.Sprint(uid)), uid, gid)
	if errors.Is(err, errNotTheirs) {
		return nil, fmt.Errorf("image store: %w: move it away, or set owner.store to a directory of its own", err)
	} else if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	return f, nil
}

// sessionFiles opens what a session has of its user's and its lease's, in the order of START: the user's images, the file that
// counts all images and, with a /dev of its own, the directory for /dev/shm. The caller closes them, also after an error.
func (p *Pool) sessionFiles(s *session, st *control.Start) (files []*os.File, err error) {
	open := func(f *os.File, e error) {
		if err = errors.Join(err, e); e == nil {
			files = append(files, f)
		}
	}
	open(p.userStore(st.Bind.UID, st.Bind.GID))
	open(store.CreateShared(p.storeCount()))
	if p.cfg.ConfineDev {
		open(p.sharedDir(s.Lease, st.Bind.UID, st.Bind.GID))
		st.SharedDir = true
	}
	return files, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// sharedDir opens the directory that is /dev/shm for the sessions of a lease, and makes it first if it must.
func (p *Pool) sharedDir(id string, uid, gid uint32) (*os.File, error) {
	f, err := dirOf(filepath.Join(p.cfg.Shared, id), uid, gid)
	if err != nil {
		return nil, fmt.Errorf("directory for /dev/shm: %w", err)
	}
	return f, nil
}

// warnOfDisk says that the driver cannot share events from a directory on a disk: it has the GPU write to the file, and the kernel
// pins no pages of a disk's files for good.
func (p *Pool) warnOfDisk() {
	if p.cfg.ConfineDev && !inMemory(p.cfg.Shared) {
		p.log.Warn("run_dir is not on a file system in memory: events cannot be shared between processes of a program, as torch.multiprocessing does. Set run_dir to a directory below /run", "directory", p.cfg.Shared)
	}
}

// inMemory reports whether a directory is on a file system in memory.
func inMemory(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && (st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC)
}

// removeShared removes what sharedDir made, without waiting: a session may have made any number of files.
func (p *Pool) removeShared(id string) {
	path := filepath.Join(p.cfg.Shared, id)
	if _, err := os.Lstat(path); err != nil {
		return
	}
	go func() {
		if err := os.RemoveAll(path); err != nil {
			p.log.Warn("directory of an ended lease", "lease", id, "error", err)
		}
	}()
}

// sweepShared removes the directories of leases that are no more. An earlier daemon has made them.
func (p *Pool) sweepShared() error {
	dirs, err := os.ReadDir(p.cfg.Shared)
	for _, d := range dirs {
		if l := p.leases[d.Name()]; form.IsLeaseID(d.Name()) && (l == nil || l.file == nil) {
			p.removeShared(d.Name())
		}
	}
	return err
}

// dirOf opens a directory of a user's, and makes it first if it must.
func dirOf(path string, uid, gid uint32) (*os.File, error) {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := giveDir(f, uid, gid); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// errNotTheirs says that a directory is another user's.
var errNotTheirs = errors.New("is another user's")

// giveDir gives a user a directory that was made for it just now, or by a daemon that died before it gave it: that is root's, and
// empty. The directory of somebody else stays that.
func giveDir(f *os.File, uid, gid uint32) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Uid == uid {
		return nil
	}
	if _, err := f.Readdirnames(1); st.Uid != uint32(os.Geteuid()) || !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s %w: it belongs to user %d, not to %d", f.Name(), errNotTheirs, st.Uid, uid)
	}
	return f.Chown(int(uid), int(gid))
}

// warnOfMemory says that images on a file system in memory count as the host memory of the session that
// sent them.
func (p *Pool) warnOfMemory() {
	if inMemory(p.cfg.Store) {
		p.log.Warn("module images are kept in memory: they count to worker.memory_max of the sessions that send them. Set owner.store to a directory on a disk", "directory", p.cfg.Store)
	}
}

// keepStore sweeps the store now and at intervals until stopStore.
func (p *Pool) keepStore() error {
	p.warnOfMemory()
	p.warnOfDisk()
	f, err := store.CreateShared(p.storeCount())
	if err != nil {
		return err
	}
	shared, err := store.OpenShared(f)
	if err != nil {
		f.Close()
		return err
	}
	k := &store.Keeper{Dir: p.cfg.Store, Total: p.cfg.StoreTotal, KeepFree: p.cfg.StoreKeepFree, Shared: shared}
	// Where no session lives, nobody is uploading: what is there was left by the dead.
	before := time.Now()
	p.mu.Lock()
	for _, l := range p.leases {
		if len(l.sessions) > 0 {
			before = before.Add(-leftover)
			break
		}
	}
	p.mu.Unlock()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(storeSweep)
		defer t.Stop()
		low := false
		for {
			low = p.sweepStore(k, before, low)
			select {
			case now := <-t.C:
				before = now.Add(-leftover)
			case <-stop:
				return
			}
		}
	}()
	p.stopStore = sync.OnceFunc(func() {
		close(stop)
		<-done
		shared.Close()
	})
	return nil
}

// sweepStore sweeps once, and says whether too little space is free for images. A change of that is
// logged.
func (p *Pool) sweepStore(k *store.Keeper, before time.Time, low bool) bool {
	u, err := k.Sweep(before)
	if err != nil {
		p.log.Error("image store", "directory", k.Dir, "error", err)
		return low
	}
	switch now := u.Free < p.cfg.StoreKeepFree; {
	case now && !low:
		p.log.Warn("module images are not stored: programs send them again each time. Make room, lower owner.store_keep_free, or move owner.store",
			"directory", k.Dir, "free_mib", u.Free>>20, "keep_free_mib", p.cfg.StoreKeepFree>>20, "images_mib", u.Images>>20)
		return true
	case !now && low:
		p.log.Info("module images are stored again", "directory", k.Dir, "free_mib", u.Free>>20)
		return false
	}
	return low
}
