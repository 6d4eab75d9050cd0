package workers

// The store of module images. Each user has a directory, which the user's sessions write
// themselves. One file counts the images of all users. The daemon sweeps the store at intervals.

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// storeSweep is the time between two sweeps.
const storeSweep = 30 * time.Second

// leftover is the age at which an unfinished upload counts as abandoned: a session that stores an image
// writes to it all the time.
const leftover = time.Hour

// storeCount returns the path of the file that counts all images. It is next to the directory of the
// leases, on a file system in memory, so that a daemon starts even if the disk is full.
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

// warnOfMemory logs a warning if the store is on a file system in memory: the images then count as host
// memory of the sessions that sent them.
func (p *Pool) warnOfMemory() {
	if inMemory(p.cfg.Store) {
		p.log.Warn("module images are kept in memory: they count towards worker.memory_max of the sessions that send them. Set owner.store to a directory on a disk", "directory", p.cfg.Store)
	}
}

// keepStore sweeps the store now and at intervals until stopStore.
func (p *Pool) keepStore() error {
	p.warnOfMemory()
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
	// Without a live session nobody is storing an image, so every unfinished one is abandoned.
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

// sweepStore sweeps once, and reports whether too little space is free for images. low is what the
// previous call returned; a change is logged.
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
