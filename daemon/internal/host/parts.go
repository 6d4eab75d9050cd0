package host

// Parts: what a step of a job may have of the job's lease, where the step has asked for less with a --gres of its own.
//
// Package jobnode says so when the step begins. The lease's record keeps it, so a restart forgets none. The kernel says to which step the process
// of a session belongs, and the owner gives the session that step's part. Owners enforce parts. Here they are added up: a step for which the others
// leave too little is refused when it begins. In a lease of several GPUs a part is whole GPUs, which are chosen here (lease.ChooseGPUs). Nobody
// enforces those: the step's programs get their numbers.

import (
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// GivePart says what a step of the job with this key may have of the lease: part, with the GPUs that are chosen for it if the lease has several.
// The parts of steps that here does not know are dropped; it is asked while no other part is given. It is
// refused with code NoRoom where those of the others leave too little, and changes nothing then.
func (h *Host) GivePart(key lease.Key, part lease.Part, here func(step uint32) bool) (lease.Part, error) {
	err := h.changeParts(key, func(l *lease.Lease, parts []lease.Part) (_ []lease.Part, err error) {
		parts = slices.DeleteFunc(parts, func(p lease.Part) bool { return p.Step != part.Step && !here(p.Step) })
		others := slices.DeleteFunc(slices.Clone(parts), func(p lease.Part) bool { return p.Step == part.Step })
		switch {
		case part.Percent == 0:
		case len(l.Grants) > 1:
			part, err = l.ChooseGPUs(part, parts)
		default:
			err = fits(l, part, others)
		}
		return append(others, part), err
	})
	return part, err
}

// DropParts drops the parts of steps that here does not know.
func (h *Host) DropParts(key lease.Key, here func(step uint32) bool) error {
	h.mu.Lock()
	hd := h.keys[nameOf(h.full(key))]
	none := hd == nil || len(hd.rec.Parts) == 0
	h.mu.Unlock()
	if none { // as a rule: the lease's release is not waited for
		return nil
	}
	return h.changeParts(key, func(_ *lease.Lease, parts []lease.Part) ([]lease.Part, error) {
		return slices.DeleteFunc(parts, func(p lease.Part) bool { return !here(p.Step) }), nil
	})
}

// changeParts changes the parts of a key's lease, in the ledger too.
func (h *Host) changeParts(key lease.Key, change func(*lease.Lease, []lease.Part) ([]lease.Part, error)) error {
	h.mu.Lock()
	hd := h.keys[nameOf(h.full(key))]
	h.mu.Unlock()
	if hd == nil {
		return lease.Errorf(lease.Over, "the lease of job %s has ended", key.Job)
	}
	// As a change of its share does: the later write has the phase of its time.
	hd.deliver.Lock()
	defer hd.deliver.Unlock()
	h.mu.Lock()
	rec := hd.rec
	h.mu.Unlock()
	if rec.Phase != granted {
		return lease.Errorf(lease.Over, "the lease of job %s has ended", key.Job)
	}
	parts, err := change(&rec.Lease, slices.Clone(rec.Parts))
	if err != nil || slices.Equal(parts, rec.Parts) {
		return err
	}
	rec.Parts = parts
	if err := h.put(&rec); err != nil {
		return err
	}
	h.mu.Lock()
	hd.rec.Parts = parts
	h.mu.Unlock()
	return nil
}

// fits says whether a part of a lease of one GPU has room beside the others.
func fits(l *lease.Lease, part lease.Part, others []lease.Part) error {
	g := l.Grants[0]
	left, mem := int64(g.Percent), int64(g.Mem)
	var names []string
	for _, p := range others {
		left, mem = left-int64(p.Percent), mem-int64(p.Mem)
		if p.Percent > 0 {
			names = append(names, p.String())
		}
	}
	if int64(part.Percent) <= left && int64(part.Mem) <= mem {
		return nil
	}
	beside := ""
	if len(names) > 0 {
		beside = " beside other steps (" + strings.Join(names, "; ") + ")"
	}
	return lease.Errorf(lease.NoRoom, "step %d asks for %d%% and %d MiB, and of its job's %d%% and %d MiB on this node %d%% and %d MiB are left%s; start it with less, --gres=%s:N --rgpu-mem=SIZE, or when another step has ended",
		part.Step, part.Percent, part.Mem>>20, g.Percent, g.Mem>>20, max(left, 0), max(mem, 0)>>20, beside, form.Gres)
}

// partOf returns the part that a session is to have, nil for all of the lease. It is an error if the session's step may have nothing.
func (h *Host) partOf(r *lease.SessionRequest) (*lease.Part, error) {
	_, attaches := wire.Attaches(r.Kind)
	_, bulk := wire.Bulks(r.Kind)
	_, traces := wire.Traces(r.Kind)
	if attaches || bulk || traces { // its session has it
		return nil, nil
	}
	h.mu.Lock()
	var parts []lease.Part
	if hd := h.leases[r.Lease]; hd != nil {
		parts = hd.rec.Parts
	}
	h.mu.Unlock()
	// A part of whole GPUs takes nothing from the programs that have none, whichever step they are of.
	limits := slices.ContainsFunc(parts, func(p lease.Part) bool { return !p.OnGPUs() })
	if len(parts) == 0 || r.Step == "" && (!limits || !wire.SessionComputes(r.Kind)) {
		return nil, nil
	}
	if r.Step == "" {
		return nil, lease.Errorf(lease.Denied, "lease %s: the kernel does not show to which step of its job this process belongs, and steps of the job have a --gres of their own: %v. Start it in a step, as a process of Slurm's control group, or when those have ended", r.Lease, parts)
	}
	step, err := strconv.ParseUint(r.Step, 10, 32)
	if err != nil { // the batch script and such
		return nil, nil
	}
	for _, p := range parts {
		switch {
		case uint64(p.Step) != step:
		case p.Percent == 0:
			return nil, lease.Errorf(lease.Denied, "step %d was started with --gres=none, or with a --gres without %s, and has no fraction; start it without --gres, or with --gres=%[2]s:N too", step, form.Gres)
		default:
			return &p, nil
		}
	}
	return nil, nil
}
