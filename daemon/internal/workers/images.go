package workers

// The store of module images: a directory for each user, which that user's sessions write by
// themselves, and a file that counts what all have. This daemon sweeps them at intervals.

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
