package cli

// A lease of the daemon for sluice run.
//
//	Acquire (our pid is its holder) -> lease socket's path -> program -> Release
//
// No connection to the daemon is open while the program runs, so a restart of the daemon
// disturbs nothing. The daemon watches this process, and ends the lease if the process is
// killed. The daemon removes the lease's directory with the lease, and keeps it across
// restarts: this process sees by it that the lease has ended early, by root or by its --time.
//
// One goroutine looks at the directory. It ends when stop is closed, and shares no other state.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

const (
	// restartTime is how long a daemon may be away before that is an error.
	restartTime = 5 * time.Second
	restartStep = 100 * time.Millisecond
	// lookEvery is the time between two looks at the lease's directory.
	lookEvery = time.Second
	// farewell bounds the Release. The daemon ends the lease by itself once this process has
	// ended.
	farewell = 5 * time.Second
)

type heldLease struct {
	id     string
	job    string
	path   string // of the lease's socket
	socket string // the daemon's
	say    func(string, ...any)
	ends   time.Time     // by its life time; zero: it does not
	warn   time.Duration // how long before ends the user is warned
	stop   chan struct{}
	looked chan struct{} // closed when the goroutine has ended; nil before watch
}

// hold asks the daemon for a lease. A repeated request with the same key returns the same
// lease, so a call that a restart of the daemon cut off is repeated.
func hold(ctx context.Context, socket string, r lease.Request, say func(string, ...any)) (granted, error) {
	l, path, err := acquire(ctx, socket, r)
	if err == nil && path == "" {
		err = errors.New("sluiced granted a lease without a socket; run the same version of sluice and sluiced")
	}
	if err != nil {
		return nil, fmt.Errorf("no lease: %w", err)
	}
	h := &heldLease{id: l.ID, job: l.Request.Key.Job, path: path, socket: socket, say: say, stop: make(chan struct{}), ends: l.Expires, warn: min(lifeWarning, l.Request.Life/10)}
	if l.Request.Life > 0 && (r.Life == 0 || l.Request.Life < r.Life) {
		say("the lease ends after %v, by the site's users.max_life or lease.max_life", l.Request.Life)
	}
	return h, nil
}

// lifeWarning is the most time before the end of a lease's life time at which the user is warned.
const lifeWarning = 10 * time.Minute

// warned tells the user once that the lease ends soon.
func (h *heldLease) warned(now time.Time) {
	if left := h.ends.Sub(now); !h.ends.IsZero() && left <= h.warn {
		h.say("lease %s ends in %v, at %s: its life time is nearly over; save your work", short(h.id), max(0, left).Round(time.Second), h.ends.Local().Format(time.TimeOnly))
		h.ends = time.Time{}
	}
}

func acquire(ctx context.Context, socket string, r lease.Request) (lease.Lease, string, error) {
	end := time.Now().Add(restartTime)
	again := true // whether to repeat a call that was cut off
	for {
		d, socket, err := dial(socket) // each time: a connection that failed would wait before it tries again
		if err != nil {
			return lease.Lease{}, "", err
		}
		try, cancel := context.WithTimeout(ctx, callTime)
		l, path, err := d.Acquire(try, r)
		cancel()
		_ = d.Close()
		var e *lease.Error
		if err == nil || !errors.As(err, &e) || e.Code != lease.Down {
			if err != nil {
				err = daemonError(socket, err)
			}
			return l, path, err
		}
		switch unreached := reach(socket); {
		case unreached == nil && !again:
			return l, path, daemonError(socket, err)
		case unreached == nil:
			again = false
		case !errors.Is(unreached, unix.ECONNREFUSED) || time.Now().After(end):
			// A daemon that restarts leaves a socket without a listener. Where no socket
			// exists, no daemon is about to come.
			return l, path, unreached
		}
		select {
		case <-ctx.Done():
			return l, path, ctx.Err()
		case <-time.After(restartStep):
		}
	}
}

func (h *heldLease) env() map[string]string { return map[string]string{"SLUICE_SOCKET": h.path} }

func (h *heldLease) watch(lost func(reason string)) {
	h.looked = make(chan struct{})
	go func() {
		defer close(h.looked)
		dir := filepath.Dir(h.path)
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for {
			select {
			case <-h.stop:
				return
			case <-tick.C:
			}
			h.warned(time.Now())
			if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
				lost(fmt.Sprintf("lease %s has ended; sluice explain %s says why", short(h.id), h.job) + callsFail)
				return
			}
		}
	}()
}

func (h *heldLease) release() {
	close(h.stop)
	if h.looked != nil {
		<-h.looked
	}
	d, _, err := dial(h.socket)
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		defer d.Close()
		err = d.Release(ctx, h.id, lease.Key{}, "sluice run: the program has ended")
	}
	var e *lease.Error
	if err == nil || errors.As(err, &e) && (e.Code == lease.NotFound || e.Code == lease.Over || e.Code == lease.Down) {
		return // Down: a daemon that comes back finds that this process has ended
	}
	h.say("lease %s was not returned: %v; use sluice release %s", short(h.id), err, short(h.id))
}
