package workers

// The stores of module images, and of content that programs have copied to GPUs. In each a user has a directory, which the user's sessions write
// themselves. One file counts what all users have. The daemon sweeps the stores at intervals.

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

// A userStores is a store with a directory for each user.
type userStores struct {
	what            string // for messages
	key             string // that names the directory in the configuration; _keep_free behind it names the floor
	dir             string
	count           string // the file that counts what all users have
	total, keepFree int64  // bytes
}

// images is the store of module images. The file that counts them is next to the directory of the
// leases, on a file system in memory, so that a daemon starts even if the disk is full.
func (p *Pool) images() userStores {
	return userStores{"module images", "owner.store", p.cfg.Store, filepath.Clean(p.cfg.Dir) + "-images", p.cfg.StoreTotal, p.cfg.StoreKeepFree}
}

// content is the store of content; it is not used if ContentLimit is 0.
func (p *Pool) content() userStores {
	return userStores{"content of copies to GPUs", "owner.content", p.cfg.Content, filepath.Clean(p.cfg.Dir) + "-content", p.cfg.ContentTotal, p.cfg.ContentKeepFree}
}

// open opens a user's part of a store.
func (u *userStores) open(uid, gid uint32) (*os.File, error) {
	f, err := dirOf(filepath.Join(u.dir, fmt.Sprint(uid)), uid, gid)
	if errors.Is(err, errNotTheirs) {
		return nil, fmt.Errorf("store of %s: %w: move it away, or set %s to a directory of its own", u.what, err, u.key)
	} else if err != nil {
		return nil, fmt.Errorf("store of %s: %w", u.what, err)
	}
	return f, nil
}

// warnOfMemory logs a warning if a store is on a file system in memory: what is in it then counts as host
// memory of the sessions that sent it.
func (p *Pool) warnOfMemory(u userStores) {
	if inMemory(u.dir) {
		p.log.Warn(u.what+" are kept in memory: they count towards worker.memory_max of the sessions that send them. Set "+u.key+" to a directory on a disk", "directory", u.dir)
	}
}

// keepStores sweeps the stores now and at intervals until stopStores.
func (p *Pool) keepStores() error {
	all := []userStores{p.images()}
	if p.cfg.ContentLimit > 0 {
		all = append(all, p.content())
	}
	// Without a live session nobody is storing anything, so all that is unfinished is abandoned.
	before := time.Now()
	p.mu.Lock()
	for _, l := range p.leases {
		if len(l.sessions) > 0 {
			before = before.Add(-leftover)
			break
		}
	}
	p.mu.Unlock()
	var stops []func()
	p.stopStores = sync.OnceFunc(func() {
		for _, stop := range stops {
			stop()
		}
	})
	for _, u := range all {
		stop, err := p.keepStore(u, before)
		if err != nil {
			p.stopStores()
			return err
		}
		stops = append(stops, stop)
	}
	return nil
}

// keepStore sweeps a store now and at intervals until stop is called; what is unfinished since before is abandoned.
func (p *Pool) keepStore(u userStores, before time.Time) (func(), error) {
	p.warnOfMemory(u)
	f, err := store.CreateShared(u.count)
	if err != nil {
		return nil, err
	}
	shared, err := store.OpenShared(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	k := &store.Keeper{Dir: u.dir, Total: u.total, KeepFree: u.keepFree, Shared: shared}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t := time.NewTicker(storeSweep)
		defer t.Stop()
		low := false
		for {
			low = p.sweepStore(u, k, before, low)
			select {
			case now := <-t.C:
				before = now.Add(-leftover)
			case <-stop:
				return
			}
		}
	}()
	return func() {
		close(stop)
		<-done
		shared.Close()
	}, nil
}

// sweepStore sweeps once, and reports whether too little space is free for more. low is what the
// previous call returned; a change is logged.
func (p *Pool) sweepStore(u userStores, k *store.Keeper, before time.Time, low bool) bool {
	is, err := k.Sweep(before)
	if err != nil {
		p.log.Error("store of "+u.what, "directory", k.Dir, "error", err)
		return low
	}
	switch now := is.Free < k.KeepFree; {
	case now && !low:
		p.log.Warn(u.what+" are not stored: programs send them again each time. Make room, lower "+u.key+"_keep_free, or move "+u.key,
			"directory", k.Dir, "free_mib", is.Free>>20, "keep_free_mib", k.KeepFree>>20, "stored_mib", is.Images>>20)
		return true
	case !now && low:
		p.log.Info(u.what+" are stored again", "directory", k.Dir, "free_mib", is.Free>>20)
		return false
	}
	return low
}
