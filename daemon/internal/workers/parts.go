package workers

// Parts of a lease: what a step of its job may have, where the step has asked for less than the job has.
//
// A part exists from its first session to the end of its last one. Meanwhile it is a tenant beside its lease on the GPU's schedule, and the
// lease's tenant, which the sessions without a part belong to, has the rest of the lease's percent. So a lease and its parts never have more
// together than was granted. The memory of a part is a cap within the lease's: its file, DIR/LEASE/part-STEP, names the slots of
// the account that are the part's, and its sessions look at both caps.
//
//	Start        claims a slot and adds it to the part, which the first session makes
//	startTurns   makes the part a tenant, and takes its percent and its share of the lease's debt from the lease's
//	forget       ends the part with its last session, and gives both back to the lease's
//
// A part that has whole GPUs of a lease is none of these: its sessions are as those without a part, and their records name it.
//
// The next daemon finds parts by the records of their sessions. A part whose last session ended while no daemon ran ends then.

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// partPrefix begins the names of the parts' files. The number of the step follows.
const partPrefix = "part-"

// part is a part of a lease with at least one session.
type part struct {
	lease.Part
	file *account.Part
}

func (p *Pool) partPath(id string, step uint32) string {
	return filepath.Join(p.cfg.Dir, id, partPrefix+strconv.FormatUint(uint64(step), 10))
}

// partOf returns the part of a lease that a session is for, nil for none, and refuses a session for which the lease has nothing left.
// overhead is what a context takes, in bytes. mu is held.
func (p *Pool) partOf(a *leased, l *lease.Lease, r *lease.SessionRequest, overhead uint64) (*part, error) {
	if t := p.tenancies[l.ID]; t != nil && len(t.lease.Grants) > 0 {
		l = &t.lease // it may have been changed since the caller read it
	}
	q := r.Part
	if q == nil || q.OnGPUs() {
		if sum := a.inParts(); sum > 0 && wire.SessionComputes(r.Kind) && sum >= l.Grants[0].Percent {
			return nil, lease.Errorf(lease.NoRoom, "all %d%% of lease %s are those of its job's steps with a --gres of their own: %s; start this program in one of them, or when one has ended",
				l.Grants[0].Percent, l.ID, a.partsText())
		}
		return nil, nil
	}
	if x := a.parts[q.Step]; x != nil {
		if x.Part != *q {
			return nil, lease.Errorf(lease.Conflict, "lease %s: %v, and its programs that run have %v", l.ID, *q, x.Part)
		}
		return x, nil
	}
	if len(l.Grants) != 1 {
		return nil, lease.Errorf(lease.Invalid, "lease %s has %d GPUs here, and a step has a part of a lease of one GPU only; start the step without --gres", l.ID, len(l.Grants))
	}
	g := l.Grants[0]
	if q.Percent == 0 || q.Percent > g.Percent || q.Mem < form.Granule || q.Mem > g.Mem {
		return nil, lease.Errorf(lease.Invalid, "lease %s has %d%% and %d MiB: %v", l.ID, g.Percent, g.Mem>>20, *q)
	}
	if q.Mem < overhead+form.Granule { // a program could allocate nothing
		return nil, lease.Errorf(lease.Invalid, "%v, and a program's context alone takes %d MiB there; start the step with a larger --gres=%s or with --rgpu-mem=%dM or more", *q, form.MiB(overhead), form.Gres, form.MiB(overhead+form.Granule))
	}
	if sum := a.inParts(); sum+q.Percent > g.Percent {
		return nil, lease.Errorf(lease.NoRoom, "%v, and of the %d%% of lease %s %d are left beside the parts of other steps: %s; start it with less, or when one has ended",
			*q, g.Percent, l.ID, g.Percent-min(sum, g.Percent), a.partsText())
	} else if sum+q.Percent == g.Percent && a.computesWithout() {
		return nil, lease.Errorf(lease.NoRoom, "%v is all that is left of the %d%% of lease %s, and programs of its job that have no part use the GPU too; start it with less, or when they have ended", *q, g.Percent, l.ID)
	}
	x := &part{Part: *q}
	var err error
	path := p.partPath(l.ID, q.Step)
	if x.file, err = account.CreatePart(path, []uint64{q.Mem}); errors.Is(err, os.ErrExist) { // its last session was not started, or a daemon died
		if err = os.Remove(path); err == nil {
			x.file, err = account.CreatePart(path, []uint64{q.Mem})
		}
	}
	if err != nil {
		return nil, lease.Errorf(lease.Internal, "lease %s: %v", l.ID, err)
	}
	a.parts[q.Step] = x
	return x, nil
}

// inParts is the percent that the lease's parts have together. mu is held.
func (l *leased) inParts() (sum uint32) {
	for _, x := range l.parts {
		sum += x.Percent
	}
	return sum
}

func (l *leased) partsText() string {
	var all []string
	for _, step := range slices.Sorted(maps.Keys(l.parts)) {
		all = append(all, l.parts[step].String())
	}
	return strings.Join(all, "; ")
}

// computesWithout says whether a session without a part computes. mu is held.
func (l *leased) computesWithout() bool {
	for s := range l.sessions {
		if s.part == nil && wire.SessionComputes(s.Kind) {
			return true
		}
	}
	return false
}

// leavePart ends a part with its last session. mu is held.
func (p *Pool) leavePart(a *leased, x *part) {
	if x == nil || a.parts[x.Step] != x {
		return
	}
	for s := range a.sessions {
		if s.part == x {
			return
		}
	}
	delete(a.parts, x.Step)
	if !p.closed { // the next daemon does it
		p.endPart(a.id, x.Step)
	}
	_ = x.file.Close()
	if err := os.Remove(p.partPath(a.id, x.Step)); err != nil && !errors.Is(err, os.ErrNotExist) {
		p.log.Warn("file of a step's part", "lease", a.id, "error", err)
	}
}

// endPart takes a part off the schedules, and gives the lease back what the part had of it. mu is held.
func (p *Pool) endPart(id string, step uint32) {
	t := p.tenancies[id]
	if t == nil {
		return
	}
	for gpu, n := range t.parts[step] {
		b, rest := p.schedules[gpu], -1
		if i, ok := t.tenants[gpu]; ok {
			rest = i
		}
		switch {
		case b == nil:
		case rest >= 0:
			b.RemovePart(n, rest)
		default: // a daemon died while it took the lease off
			b.Remove(n)
		}
	}
	delete(t.parts, step)
	if len(t.lease.Grants) == 0 { // the daemon has just started; Share gives it back
		return
	}
	if err := p.share(t.lease); err != nil {
		p.log.Error("a lease's share of compute time cannot be kept", "lease", id, "error", err)
	}
}

// divide returns the policies of a lease on a GPU and of its parts, by step, whose weights add up to the lease's. mu is held.
func (p *Pool) divide(l *lease.Lease, g lease.Grant) (rest turns.Policy, of map[uint32]turns.Policy) {
	rest = p.policy(l, g)
	a := p.leases[l.ID]
	if a == nil || len(a.parts) == 0 {
		return rest, nil
	}
	of = map[uint32]turns.Policy{}
	all, whole := rest.Weight, max(g.Percent, a.inParts()) // sluice set may have left the lease less than its parts had
	for step, x := range a.parts {
		pol := rest
		pol.Weight = max(all*x.Percent/whole, 1)
		of[step] = pol
	}
	for _, pol := range of {
		rest.Weight -= min(pol.Weight, rest.Weight)
	}
	rest.Weight = max(rest.Weight, 1)
	return rest, of
}

// shareParts makes a lease's parts tenants of a GPU's schedule beside the lease's tenant. mu is held.
func (p *Pool) shareParts(t *tenancy, gpu string, rest turns.Policy, of map[uint32]turns.Policy) error {
	b, lease := p.schedules[gpu], t.tenants[gpu]
	for step, pol := range of {
		n, err := b.AddPart(lease, strconv.FormatUint(uint64(step), 10), pol)
		if err != nil {
			return fmt.Errorf("gpu %s: step %d: %w", gpu, step, err)
		}
		if t.parts[step] == nil {
			t.parts[step] = map[string]int{}
		}
		if _, old := t.parts[step][gpu]; old {
			continue
		}
		t.parts[step][gpu] = n
		p.keepDebts(t.lease.ID)
		b.MoveDebt(lease, n, pol.Weight, rest.Weight+pol.Weight)
	}
	return nil
}

// adoptPart finds the part of a session that an earlier daemon started. mu need not be held yet.
func (p *Pool) adoptPart(l *leased, s *session) {
	q := s.Part
	if q == nil || q.OnGPUs() {
		return
	}
	x := l.parts[q.Step]
	if x == nil {
		file, err := account.OpenPart(p.partPath(l.id, q.Step), []uint64{q.Mem})
		if err != nil {
			p.log.Error("a step's part of a lease: its debts are not known", "lease", l.id, "error", err)
			return
		}
		x = &part{*q, file}
		l.parts[q.Step] = x
	}
	s.part = x
}

// endLostParts ends the parts whose last session ended while no daemon ran.
func (p *Pool) endLostParts() {
	for id, t := range p.tenancies {
		for step := range maps.Clone(t.parts) {
			if l := p.leases[id]; l == nil || l.parts[step] == nil {
				p.endPart(id, step)
			}
		}
	}
}
