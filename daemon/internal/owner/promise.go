package owner

// Promises to controllers, see lease.Promiser: no Reserve of a reservation is answered before every controller that has a promise
// has heard of it, or its promise has run out.
//
//	WatchHeld   what the controller says that it knows is noted; its answer renews the promise. The promise is noted before what
//	            has changed is read, so that a change is in the answer, or finds the promise
//	Reserve     the reservation is in the ledger and in memory; then those watches answer at once, and it waits for the next ones
//	HeldEverywhere   a question of a node goes with the next answer to one controller, and comes back with its next watch
//
// A promise outlives the process that made it, since the controller goes by it: before a controller gets its first one, the ledger
// says that it may have one, and the next process begins as if it had given one in that moment.
//
// Owner.mu guards all of it, and Owner.write the notes.

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// promiseTime is how long a promise holds, and thereby how long a Reserve waits at most for a controller that has fallen silent:
	// less than hosts wait for an answer to Reserve.
	promiseTime = 4 * time.Second
	// promiseNote begins the names of notes of controllers that may have a promise.
	promiseNote = "promise/"
	// answerTime is how long a controller has to answer a question before the question is put to the others too, and half of how long an answer
	// may take.
	answerTime = 500 * time.Millisecond
	// maxQuestions is the most questions that wait at a time.
	maxQuestions = 256
	// maxQuestionsOfOne is the most of them that are one node's.
	maxQuestionsOfOne = 16
	// maxQuestionsAtOnce is the most of them in one answer to a controller.
	maxQuestionsAtOnce = 32
)

// promises are those that this owner has made.
type promises struct {
	to        map[string]*promised // by controller
	pressing  uint64               // the last change of the journal that a Reserve waits to have heard of
	heard     chan struct{}        // closed when a controller says what it knows
	questions []*question
	last      uint64 // id of a question; those of another process differ
}

// promised is what a controller was promised.
type promised struct {
	until time.Duration // since boot
	noted bool          // the ledger says that there may be a promise
	knows uint64        // the changes until then, by what it said to this process
	asked time.Duration // since boot: when it was last heard
	spoke time.Duration // since boot: when it was last answered
}

// question is one of a node, until it is answered.
type question struct {
	lease.HeldQuestion
	from string          // the node that asks
	to   string          // the controller that is asked; "" each
	put  map[string]bool // controllers that have it
	got  chan lease.HeldSum
}

// WatchHeld implements lease.Promiser.
func (o *Owner) WatchHeld(ctx context.Context, host string, q lease.HeldWatch) (lease.HeldChanges, error) {
	if !o.Controller(host) {
		return lease.HeldChanges{}, lease.Errorf(lease.Denied, "%s asks to be told what users hold: only a controller may; see slurm.controllers in sluice.yaml of %s", host, o.cfg.Name)
	}
	begun := o.clock.Up()
	noted, spoke := o.heed(host, &q)
	if !noted {
		if err := o.notePromise(host); err != nil {
			return lease.HeldChanges{}, err
		}
	}
	until := begun + max(0, min(q.Wait, maxWatch))
	for {
		news, next := o.news(host, q.Since)
		now := o.clock.Up()
		if now >= until || news && now >= spoke+q.Gap || o.presses(host, q.Since) {
			return o.promise(host, q.Since, begun), nil
		}
		wait := min(deviceLook, until-now)
		if news {
			wait = min(wait, spoke+q.Gap-now)
		}
		if err := o.watchFor(ctx, next, wait); err != nil {
			return lease.HeldChanges{}, err
		}
	}
}

// heed notes what a controller says that it knows, and takes its answers. It returns whether the ledger says that the controller may have a
// promise, and when the controller was last answered.
func (o *Owner) heed(host string, q *lease.HeldWatch) (noted bool, spoke time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.promises.of(host)
	p.asked = o.clock.Up()
	if q.Since.Epoch == o.life && q.Since.Seq <= o.journal.seq {
		p.knows = max(p.knows, q.Since.Seq)
	}
	o.promises.wake()
	for _, a := range q.Answers {
		i := slices.IndexFunc(o.promises.questions, func(x *question) bool { return x.ID == a.ID })
		if i < 0 {
			continue
		}
		if x := o.promises.questions[i]; !a.Sum.Known && x.to != "" && len(o.promises.to) > 1 {
			x.to = ""
			o.journal.wake() // another controller may know
			continue
		}
		o.promises.questions[i].got <- a.Sum
		o.promises.questions = slices.Delete(o.promises.questions, i, i+1)
	}
	return p.noted, p.spoke
}

// of returns what a controller was promised. mu is held.
func (p *promises) of(host string) *promised {
	if p.to == nil {
		p.to = make(map[string]*promised)
	}
	if p.to[host] == nil {
		p.to[host] = &promised{}
	}
	return p.to[host]
}

// wake has those look again who wait for controllers. mu is held.
func (p *promises) wake() {
	if p.heard != nil {
		close(p.heard)
		p.heard = nil
	}
}

// notePromise has the ledger say that a controller may have a promise.
func (o *Owner) notePromise(host string) error {
	o.write.Lock()
	defer o.write.Unlock()
	if err := o.cfg.Ledger.Put(ledger.Notes, promiseNote+host, struct{}{}); err != nil {
		return lease.Errorf(lease.Internal, "owner %s can promise nothing: %v", o.cfg.Name, err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.promises.of(host).noted = true
	return nil
}

// loadPromises begins with the promises of an earlier process, as if they were made now.
func (o *Owner) loadPromises() error {
	return o.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.All(ledger.Notes, func(key string, _ json.RawMessage) error {
			if host, ok := strings.CutPrefix(key, promiseNote); ok {
				*o.promises.of(host) = promised{until: o.clock.Up() + promiseTime, noted: true}
			}
			return nil
		})
	})
}

// forgetTime is how long a controller is remembered that asks no more: longer than a watch may wait.
const forgetTime = maxWatch + 10*time.Second

// forgetPromises deletes the notes of controllers that have not asked for a promise for a while: after a start nothing has to wait for them.
func (o *Owner) forgetPromises() {
	o.write.Lock() // otherwise a note that another call makes meanwhile would be deleted
	defer o.write.Unlock()
	now := o.clock.Up()
	var old []string
	o.mu.Lock()
	for host, p := range o.promises.to {
		if now >= p.until && now-p.asked > forgetTime {
			old = append(old, host)
			delete(o.promises.to, host)
		}
	}
	o.mu.Unlock()
	for _, host := range old {
		if err := o.cfg.Ledger.Delete(ledger.Notes, promiseNote+host); err != nil {
			o.log.Warn("note of a controller stays", "controller", host, "error", err)
		}
	}
}

// presses says whether a controller has to be answered at once: it does not know this process, a Reserve waits for it, or a question is for it.
func (o *Owner) presses(host string, since lease.Mark) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return since.Epoch != o.life || since.Seq > o.journal.seq || since.Seq < o.promises.pressing ||
		slices.ContainsFunc(o.promises.questions, func(q *question) bool { return q.isFor(host) })
}

// isFor says whether a controller is to get the question.
func (q *question) isFor(host string) bool { return !q.put[host] && (q.to == "" || q.to == host) }

// watchFor waits for the next change, or for d.
func (o *Owner) watchFor(ctx context.Context, next <-chan struct{}, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-next:
		return nil
	case <-t.C:
		return nil
	case <-ctx.Done():
		return lease.Errorf(lease.Down, "the caller gave up")
	case <-o.ctx.Done():
	case <-o.unwatch:
	}
	return lease.Errorf(lease.Down, "owner %s is stopping", o.cfg.Name)
}

// promise makes a promise and answers what has changed, in this order.
func (o *Owner) promise(host string, since lease.Mark, begun time.Duration) lease.HeldChanges {
	o.mu.Lock()
	now := o.clock.Up()
	p := o.promises.of(host)
	p.until, p.spoke = now+promiseTime, now
	c := lease.HeldChanges{Promise: promiseTime, Waited: now - begun}
	for _, q := range o.promises.questions {
		if q.isFor(host) && len(c.Questions) < maxQuestionsAtOnce { // others go with the next answer
			q.put[host] = true
			c.Questions = append(c.Questions, q.HeldQuestion)
		}
	}
	o.mu.Unlock()
	c.Changes = o.changes(since)
	live := make(map[string]bool, len(c.Leases))
	for _, r := range c.Leases {
		live[r.ID] = true
	}
	o.mu.RLock()
	defer o.mu.RUnlock()
	for id := range live {
		if e := o.leases[id]; e != nil {
			c.Parts = append(c.Parts, lease.HeldPartOf(&e.rec.Lease, e.rec.Lease.Grants))
		}
	}
	return c
}

// told waits until each controller that has a promise has heard of all changes until now.
func (o *Owner) told(ctx context.Context) error {
	o.mu.Lock()
	seq := o.journal.seq
	for {
		left, n := o.promises.unaware(seq, o.clock.Up())
		if n == 0 {
			o.mu.Unlock()
			return nil
		}
		if o.promises.pressing < seq {
			o.promises.pressing = seq
			o.journal.wake()
		}
		if o.promises.heard == nil {
			o.promises.heard = make(chan struct{})
		}
		heard := o.promises.heard
		o.mu.Unlock()
		if err := o.watchFor(ctx, heard, left); err != nil {
			return err
		}
		o.mu.Lock()
	}
}

// unaware is how many controllers with promises have not heard of a change, and how long the first of these promises still holds. mu is held.
func (p *promises) unaware(seq uint64, now time.Duration) (left time.Duration, n int) {
	for _, c := range p.to {
		if c.knows >= seq || now >= c.until {
			continue
		}
		if n++; n == 1 || c.until-now < left {
			left = c.until - now
		}
	}
	return left, n
}

// HeldEverywhere implements lease.Promiser. Any node whose daemon this one knows may ask, as it may ask Held of each owner.
func (o *Owner) HeldEverywhere(ctx context.Context, host string, hq lease.HeldQuestion) (lease.HeldSum, error) {
	if len(hq.Holdings) > lease.MaxHoldings {
		return lease.HeldSum{}, lease.Errorf(lease.Invalid, "%d holdings in one question: at most %d", len(hq.Holdings), lease.MaxHoldings)
	}
	for _, h := range hq.Holdings { // they wait here, and go to the controller
		if n := max(len(h.Cluster), len(h.Account), len(h.Pool), len(h.Except)); n > form.MaxName {
			return lease.HeldSum{}, lease.Errorf(lease.Invalid, "a name of %d bytes in a question: at most %d", n, form.MaxName)
		}
	}
	q := o.put(host, hq)
	if q == nil {
		return lease.HeldSum{}, lease.Errorf(lease.NotFound, "no controller watches owner %s for quotas, or too many questions wait", o.cfg.Name)
	}
	defer o.withdraw(q)
	for range 2 {
		t := time.NewTimer(answerTime)
		select {
		case sum := <-q.got:
			t.Stop()
			if !sum.Known {
				return lease.HeldSum{}, lease.Errorf(lease.NotFound, "no controller of owner %s knows what all owners of these pools have", o.cfg.Name)
			}
			return sum, nil
		case <-ctx.Done():
			t.Stop()
			return lease.HeldSum{}, lease.Errorf(lease.Down, "the caller gave up")
		case <-t.C:
		}
		o.mu.Lock()
		q.to = ""
		clear(q.put) // an answer that carried it may be lost
		o.journal.wake()
		o.mu.Unlock()
	}
	return lease.HeldSum{}, lease.Errorf(lease.NotFound, "no controller answers owner %s", o.cfg.Name)
}

// put has a question wait for the controller that was heard last, nil if there is none.
func (o *Owner) put(from string, hq lease.HeldQuestion) *question {
	o.mu.Lock()
	defer o.mu.Unlock()
	ps := &o.promises
	asked := 0
	for _, q := range ps.questions {
		if q.from == from {
			asked++
		}
	}
	var best string
	now := o.clock.Up()
	for host, p := range ps.to {
		if now < p.until && o.control[host] && p.spoke > 0 && (best == "" || p.asked > ps.to[best].asked) {
			best = host
		}
	}
	if best == "" || asked >= maxQuestionsOfOne || len(ps.questions) >= maxQuestions {
		return nil
	}
	ps.last++
	hq.ID = ps.last
	q := &question{HeldQuestion: hq, from: from, to: best, put: make(map[string]bool), got: make(chan lease.HeldSum, 1)}
	ps.questions = append(ps.questions, q)
	o.journal.wake()
	return q
}

func (o *Owner) withdraw(q *question) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.promises.questions = slices.DeleteFunc(o.promises.questions, func(x *question) bool { return x == q })
}

var _ lease.Promiser = (*Owner)(nil)
