package owner

// Drain: GPUs that no new lease gets. What is drained stands in the ledger's notes, so that a
// restart does not lend a broken GPU again; by the GPU's UUID, or for the whole owner.

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/form"
)

// drainNote begins the names of drains in the ledger; the GPU's UUID follows, or nothing.
const drainNote = "drain/"

// Drain implements lease.Owner: for this node's root and for controllers.
func (o *Owner) Drain(ctx context.Context, host string, d lease.DrainOrder) ([]lease.GPU, error) {
	if err := o.drain(host, d); err != nil {
		if skipped, ok := o.refusal(host, d.By); ok {
			o.log.Info("drain refused", "gpu", form.Name(d.GPU), "uid", d.By, "host", host, "reason", err, "skipped", skipped)
			_ = o.cfg.Audit.Write(audit.Event{Event: audit.Refuse, Time: o.clock.Now(), UID: audit.UID(d.By), Host: host, Owner: o.cfg.Name, Reason: "drain: " + err.Error(), Skipped: skipped})
		}
		return nil, err
	}
	inv, err := o.Inventory(ctx)
	return inv.GPUs, err
}

func (o *Owner) drain(host string, d lease.DrainOrder) error {
	if err := d.Validate(); err != nil {
		return err
	}
	if host != o.cfg.Name && !o.Controller(host) {
		return lease.Errorf(lease.Denied, "%s drains nothing at %s: only %[2]s itself and a controller may; see slurm.controllers in sluice.yaml there", host, o.cfg.Name)
	}
	o.write.Lock()
	defer o.write.Unlock()
	if err := o.sure(); err != nil {
		return err
	}
	uuid, err := o.uuid(d.GPU)
	if err != nil {
		return err
	}
	at := lease.Drain{By: fmt.Sprintf("%d@%s", d.By, form.Name(host)), Since: o.clock.Now().UTC(), Reason: d.Reason}
	o.mu.RLock()
	_, whole := o.drains[""]
	was, have := o.drains[uuid]
	o.mu.RUnlock()
	switch {
	case d.Resume && uuid != "" && whole:
		return lease.Errorf(lease.Conflict, "%s is drained as a whole; resume all of it, and drain the other GPUs one by one", o.cfg.Name)
	case !d.Resume && have && was.Reason == d.Reason:
		return nil // said again
	}
	drains, place := o.drainsThen(uuid, at, d.Resume), o.indexOf(uuid)
	err = o.cfg.Ledger.Update(func(tx *ledger.Tx) error {
		for name := range o.drains {
			if _, ok := drains[name]; !ok {
				if err := tx.Delete(ledger.Notes, drainNote+name); err != nil {
					return err
				}
			}
		}
		if d.Resume {
			return nil
		}
		return tx.Put(ledger.Notes, drainNote+uuid, drainKept{at, place})
	})
	if err != nil {
		// The ledger alone knows whether the change was made.
		if lerr := o.loadDrains(); lerr != nil {
			o.log.Error("ledger cannot be read back", "error", lerr)
		}
		return lease.Errorf(lease.Internal, "drain of %s cannot be kept: %v", o.cfg.Name, err)
	}
	o.mu.Lock()
	o.drains = drains
	if place != nil {
		o.places[uuid] = *place
	}
	o.journal.add(change{})
	o.mu.Unlock()
	event, what := audit.Drain, "drained"
	if d.Resume {
		event, what = audit.Resume, "resumed"
	}
	ev := audit.Event{Event: event, Time: o.clock.Now(), UID: audit.UID(d.By), Host: host, Owner: o.cfg.Name, Reason: d.Reason}
	if uuid != "" {
		ev.GPUs = []lease.Grant{{Owner: o.cfg.Name, GPU: uuid}}
	}
	_ = o.cfg.Audit.Write(ev) // the audit log counts the lines that it loses
	o.log.Info("GPUs "+what, "gpu", uuid, "uid", d.By, "host", host, "reason", d.Reason)
	return nil
}

// drainsThen returns what is drained after a change. A drain or a resume of all replaces those
// of single GPUs. write is held.
func (o *Owner) drainsThen(uuid string, at lease.Drain, resume bool) map[string]lease.Drain {
	then := map[string]lease.Drain{}
	if uuid != "" {
		for name, d := range o.drains {
			then[name] = d
		}
	}
	delete(then, uuid)
	if !resume {
		then[uuid] = at
	}
	return then
}

// uuid finds one of this node's GPUs; "" is all.
func (o *Owner) uuid(gpu string) (string, error) {
	if gpu == "" {
		return "", nil
	}
	known, _ := o.cfg.Devices()
	for _, g := range known {
		if gpu == strconv.Itoa(g.Index) || strings.EqualFold(gpu, g.UUID) {
			return g.UUID, nil
		}
	}
	if _, ok := o.drains[gpu]; ok {
		return gpu, nil // one that is gone, and is to be forgotten
	}
	return "", lease.Errorf(lease.NotFound, "owner %s has no GPU %q: want its number or its UUID; see sluice gpus", o.cfg.Name, form.Name(gpu))
}

// drainKept is a drain in the ledger, with the GPU's index at that time.
type drainKept struct {
	lease.Drain
	Index *int `json:"index,omitempty"`
}

// indexOf is the index of one of this node's GPUs, nil for one that is not here and for all.
func (o *Owner) indexOf(uuid string) *int {
	known, _ := o.cfg.Devices()
	for _, g := range known {
		if g.UUID == uuid {
			return &g.Index
		}
	}
	return nil
}

// DrainedAt says whether a GPU without a UUID is drained, by the index that it had when it was drained: after a restart of the daemon
// NVML does not tell which one a lost GPU is.
func (o *Owner) DrainedAt(index int) bool {
	known, _ := o.cfg.Devices()
	o.mu.RLock()
	defer o.mu.RUnlock()
	if _, all := o.drains[""]; all {
		return true
	}
	for uuid := range o.drains {
		i, ok := o.places[uuid]
		if ok && i == index && !slices.ContainsFunc(known, func(g lease.GPU) bool { return g.UUID == uuid }) {
			return true
		}
	}
	return false
}

// drainOf is the drain of a GPU. mu is held.
func (o *Owner) drainOf(uuid string) lease.Drain {
	if d, ok := o.drains[uuid]; ok {
		return d
	}
	return o.drains[""]
}

// loadDrains reads the ledger.
func (o *Owner) loadDrains() error {
	drains, places := map[string]lease.Drain{}, map[string]int{}
	err := o.cfg.Ledger.View(func(tx *ledger.Tx) error {
		return tx.All(ledger.Notes, func(key string, raw json.RawMessage) error {
			name, ok := strings.CutPrefix(key, drainNote)
			if !ok {
				return nil
			}
			var d drainKept
			if err := json.Unmarshal(raw, &d); err != nil {
				return fmt.Errorf("ledger %s: %s: %w", o.cfg.Ledger.Path(), form.Name(key), err)
			}
			drains[name] = d.Drain
			if d.Index != nil {
				places[name] = *d.Index
			}
			return nil
		})
	})
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.drains, o.places = drains, places
	return nil
}
