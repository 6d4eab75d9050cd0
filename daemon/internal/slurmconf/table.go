// Package slurmconf makes what Slurm has to be told of a site's GPU pools, pieces of
// slurm.conf and the table of the job_submit script, and checks what a site has done.
package slurmconf

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/placement"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	// Gres is the generic resource by which jobs ask.
	Gres = form.Gres
	// ceiling is what a node says that it has of it: the most that one lease holds. The pool
	// is counted by licences, so it needs no change when GPUs come and go.
	ceiling = form.MaxPercent
)

// Amount is a set of GPUs as Slurm's licences count it.
type Amount struct {
	Licence string
	GPUs    int
	Mem     uint64 // bytes that the smallest of them grants
	// Least is the smallest fraction that fits on any of them, in bytes and in percent; 0 if that is not known.
	Least        uint64
	LeastPercent uint32
}

// Units are the licences: one is one percent of a GPU.
func (a Amount) Units() int { return a.GPUs * 100 }

// Pool is a pool and those of its types of GPU that the configuration names.
type Pool struct {
	Amount
	Types map[string]Amount
}

// Table is what Slurm's side needs to know of a site.
type Table struct {
	Pools      map[string]Pool
	Partitions map[string]config.Partition
}

// New counts what the owners have. All of them have to answer, and each GPU to be
// known: a table made without one would refuse jobs, or charge them wrongly.
func New(cfg *config.Config, have []rpc.Pool) (Table, error) {
	t := Table{Pools: map[string]Pool{}, Partitions: cfg.Partitions}
	live := map[string]rpc.Pool{}
	for _, p := range have {
		live[p.Name] = p
	}
	for _, name := range cfg.PoolNames() {
		p, ok := live[name]
		if !ok {
			return t, fmt.Errorf("pool %s is in sluice.yaml, and sluiced does not know it: systemctl reload sluiced", name)
		}
		pool := Pool{Amount: Amount{Licence: cfg.Pools[name].Licence}, Types: map[string]Amount{}}
		for typ, licence := range cfg.Pools[name].Types {
			pool.Types[typ] = Amount{Licence: licence}
		}
		for _, o := range p.Owners {
			if o.Error != "" {
				return t, fmt.Errorf("owner %s of pool %s does not answer (%s); start it, or take it out of the pool", o.Name, name, o.Error)
			}
			for _, g := range o.Inventory.GPUs {
				if g.Mem == 0 {
					return t, fmt.Errorf("gpu %s of owner %s: its memory is not known yet (%s); see sluice health there", g.UUID, o.Name, g.Why)
				}
				pool.add(g)
			}
		}
		if pool.GPUs == 0 {
			return t, fmt.Errorf("pool %s has no GPU; see sluice gpus", name)
		}
		for typ, a := range pool.Types {
			if a.GPUs == 0 {
				return t, fmt.Errorf("pool %s has no GPU of type %s; see the names in sluice gpus", name, typ)
			}
		}
		t.Pools[name] = pool
	}
	return t, nil
}

func (p *Pool) add(g lease.GPU) {
	p.count(g)
	for typ, a := range p.Types {
		if g.IsType(typ) {
			a.count(g)
			p.Types[typ] = a
		}
	}
}

func (a *Amount) count(g lease.GPU) {
	first := a.GPUs == 0
	if a.GPUs++; first || g.Mem < a.Mem {
		a.Mem = g.Mem
	}
	bytes, percent, ok := placement.Least(&g)
	switch {
	case !ok || !first && a.Least == 0: // one of them may take anything
		a.Least, a.LeastPercent = 0, 0
	case first:
		a.Least, a.LeastPercent = bytes, percent
	default:
		a.Least, a.LeastPercent = min(a.Least, bytes), min(a.LeastPercent, percent)
	}
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// Lua is the table for job_submit.lua. Equal sites give equal text.
func (t Table) Lua() []byte {
	var b strings.Builder
	b.WriteString("-- The GPU pools, for sluice.lua in slurmctld. Made by `sluice slurm lua`; do not edit.\nreturn {\n  version = 1,\n  pools = {\n")
	for _, name := range sorted(t.Pools) {
		p := t.Pools[name]
		fmt.Fprintf(&b, "    [%q] = { %s, types = {", name, p.lua())
		for _, typ := range sorted(p.Types) {
			fmt.Fprintf(&b, "\n      [%q] = { %s },", typ, p.Types[typ].lua())
		}
		b.WriteString(" } },\n")
	}
	b.WriteString("  },\n  partitions = {\n")
	for _, name := range sorted(t.Partitions) {
		p := t.Partitions[name]
		pool := p.Pool
		if pool == "" {
			pool = "default"
		}
		fmt.Fprintf(&b, "    [%q] = { pool = %q", name, pool)
		if p.Mem > 0 {
			fmt.Fprintf(&b, ", mem = %d", form.MiB(uint64(p.Mem)))
		}
		b.WriteString(" },\n")
	}
	b.WriteString("  },\n}\n")
	return []byte(b.String())
}

// Memory is in MiB, and rounded so that no job is charged too little.
func (a Amount) lua() string {
	s := fmt.Sprintf("licence = %q, gpus = %d, mem = %d", a.Licence, a.GPUs, a.Mem>>20)
	if a.Least > 0 {
		s += fmt.Sprintf(", least = %d, least_percent = %d", a.Least>>20, a.LeastPercent)
	}
	return s
}

// Licences are all licences with the number that Slurm has to have of each.
func (t Table) Licences() map[string]int {
	out := map[string]int{}
	for _, p := range t.Pools {
		out[p.Licence] = p.Units()
		for _, a := range p.Types {
			out[a.Licence] = a.Units()
		}
	}
	return out
}

// types are those of all pools: Slurm knows a type by the nodes that have it, and
// refuses to start where some of a node's have one and some have none.
func (t Table) types() []string {
	all := map[string]bool{}
	for _, p := range t.Pools {
		for typ := range p.Types {
			all[typ] = true
		}
	}
	return sorted(all)
}

// NodeGres is what every node whose jobs may ask has at Gres=.
func (t Table) NodeGres() string {
	types := t.types()
	if len(types) == 0 {
		return fmt.Sprintf("%s:no_consume:%d", Gres, ceiling)
	}
	for i, typ := range types {
		types[i] = fmt.Sprintf("%s:%s:no_consume:%d", Gres, typ, ceiling)
	}
	return strings.Join(types, ",")
}
