package placement

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// explain says why a request has no place, by how much not, and where it came
// closest.
func explain(gpus []lease.GPU, cs []candidate, r lease.Request) error {
	whole := candidates(gpus, r, true)
	if len(whole) == 0 {
		return lease.Errorf(lease.Never, "%s: %s", what(r), noSuch(gpus, r))
	}
	if choose(whole, r, lease.BestFit) == nil {
		return lease.Errorf(lease.Never, "%s", neverFits(whole, r))
	}
	// It would fit the empty pool: what is in the way now?
	if len(cs) == 0 {
		return lease.Errorf(lease.NoRoom, "%s: none of the %s is lent now (%s: %s); see sluice gpus", what(r), count(len(whole)), name(whole[0].gpu), whole[0].gpu.WhyNot())
	}
	for i := range cs {
		cs[i].taken = -1
	}
	for _, f := range r.Fractions {
		if text := shortBy(cs, f); text != "" {
			return lease.Errorf(lease.NoRoom, "%s; wait, or see sluice gpus", text)
		}
	}
	if r.SameOwner && choose(cs, without(r), lease.BestFit) != nil {
		return lease.Errorf(lease.NoRoom, "%s: there is room, but not at one owner; wait, or ask without --same-owner", what(r))
	}
	most := 0
	for n := len(r.Fractions) - 1; n > 0 && most == 0; n-- {
		part := without(r)
		part.Fractions = r.Fractions[:n]
		if choose(cs, part, lease.BestFit) != nil {
			most = n
		}
	}
	return lease.Errorf(lease.NoRoom, "%s: there is room for the first %d of the %d fractions, each needing a GPU of its own; wait, or see sluice gpus", what(r), most, len(r.Fractions))
}

func without(r lease.Request) lease.Request {
	r.SameOwner = false
	return r
}

// noSuch says why no GPU is even looked at.
func noSuch(gpus []lease.GPU, r lease.Request) string {
	if len(gpus) == 0 {
		return "the pool has no GPU; see sluice health"
	}
	match := typeMatch(r.Type)
	var names []string
	var largest *lease.GPU
	for i := range gpus {
		if !slices.Contains(names, gpus[i].Name) {
			names = append(names, gpus[i].Name)
		}
		if match(&gpus[i]) && (largest == nil || gpus[i].Mem > largest.Mem) {
			largest = &gpus[i]
		}
	}
	if largest == nil {
		slices.Sort(names)
		if len(names) > 8 {
			names = append(names[:8], "...")
		}
		return fmt.Sprintf("no GPU is of type %q; there are %s", r.Type, strings.Join(names, ", "))
	}
	return fmt.Sprintf("%d MiB at least are asked of the whole GPU, and the largest, %s, has %d MiB", form.MiB(r.MinMem), name(largest), form.MiB(largest.Mem))
}

// neverFits says why r does not fit the pool even if it were empty.
func neverFits(whole []candidate, r lease.Request) string {
	for _, f := range r.Fractions {
		if text := shortBy(whole, f); text != "" {
			return text
		}
	}
	if r.SameOwner && choose(whole, without(r), lease.BestFit) != nil {
		most, at := 0, ""
		for _, own := range byOwner(whole) {
			if len(own) > most {
				most, at = len(own), own[0].gpu.Owner
			}
		}
		return fmt.Sprintf("%s: no owner has GPUs for them all, the most are %d at %s; ask without --same-owner", what(r), most, at)
	}
	return fmt.Sprintf("%s: each needs a GPU of its own, and there are %s; ask for fewer", what(r), count(len(whole)))
}

// shortBy is "" when a candidate has room for f, else by how much not, and where
// the best place was.
func shortBy(cs []candidate, f lease.Fraction) string {
	var best *candidate
	var bestShort, bestPoints uint64
	for i := range cs {
		c := &cs[i]
		if c.fits(f) {
			return ""
		}
		percent, mem := Share(f, c.gpu.Mem)
		short := over(mem, c.freeMem) + over(least(c.gpu), mem)
		points := over(uint64(percent), uint64(c.freePercent))
		if best == nil || short < bestShort || short == bestShort && points < bestPoints {
			best, bestShort, bestPoints = c, short, points
		}
	}
	percent, mem := Share(f, best.gpu.Mem)
	ask := fmt.Sprintf("fraction %s", fraction(f, mem))
	at := "the nearest is " + name(best.gpu)
	var why []string
	if min := least(best.gpu); mem < min {
		why = append(why, fmt.Sprintf("its context alone takes %d MiB, so a fraction needs %d MiB at least, %d more", form.MiB(best.gpu.Overhead), form.MiB(min), form.MiB(min-mem)))
	}
	if mem > best.freeMem {
		why = append(why, fmt.Sprintf("%d MiB free of %d, %d MiB too little", form.MiB(best.freeMem), form.MiB(best.gpu.Mem), form.MiB(mem-best.freeMem)))
	}
	if percent > best.freePercent {
		why = append(why, fmt.Sprintf("%d%% free, %d%% too little", best.freePercent, percent-best.freePercent))
	}
	return fmt.Sprintf("%s: no GPU has room for it; %s: %s", ask, at, strings.Join(why, "; "))
}

func over(want, have uint64) uint64 {
	if want > have {
		return want - have
	}
	return 0
}

func fraction(f lease.Fraction, mem uint64) string {
	if f.Percent == 0 {
		return fmt.Sprintf("of %d MiB", form.MiB(mem))
	}
	return fmt.Sprintf("%d%% with %d MiB", f.Percent, form.MiB(mem))
}

// what names the request.
func what(r lease.Request) string {
	var parts []string
	for i, f := range r.Fractions {
		if i == 8 {
			parts = append(parts, "...")
			break
		}
		switch {
		case f.Mem == 0:
			parts = append(parts, fmt.Sprintf("%d%%", f.Percent))
		default:
			parts = append(parts, fraction(f, f.Mem))
		}
	}
	s := "fraction "
	if len(r.Fractions) > 1 {
		s = fmt.Sprintf("%d fractions ", len(r.Fractions))
	}
	return s + strings.Join(parts, ",")
}

func count(n int) string {
	if n == 1 {
		return "1 GPU"
	}
	return fmt.Sprintf("%d GPUs", n)
}

func name(g *lease.GPU) string { return fmt.Sprintf("gpu %d of %s (%s)", g.Index, g.Owner, g.Name) }
