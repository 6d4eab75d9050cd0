// Package placement chooses GPUs for a request. It is pure: the same GPUs and
// request give the same grants, and the owner, who alone decides, checks them
// again.
package placement

// Flow:
//
//	Validate      the request by itself
//	candidates    GPUs of the right type and size, and what is free of them
//	assign        each fraction its best GPU, the largest fraction first; when
//	              one finds none, earlier ones move (augmenting paths), so a
//	              placement is found whenever there is one
//	explain       when there is none: Never if it would not fit even the empty
//	              pool, else NoRoom; by how much not, and where it came closest

import (
	"cmp"
	"slices"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Validate refuses a request that makes no sense on any GPU. Errors are
// *lease.Error with code Invalid.
func Validate(r lease.Request) error {
	if n := len(r.Fractions); n == 0 || n > form.MaxDevices {
		return lease.Errorf(lease.Invalid, "%v", form.TooMany(n))
	}
	for _, f := range r.Fractions {
		switch {
		case f.Percent > 100:
			return lease.Errorf(lease.Invalid, "fraction %d%%: a fraction is 1 to 100 percent of one GPU; ask for several fractions", f.Percent)
		case f.Percent == 0 && f.Mem == 0:
			return lease.Errorf(lease.Invalid, "fraction 0%%: say a share of 1 to 100 percent, or memory")
		case f.Mem > form.MaxGPUMem:
			return lease.Errorf(lease.Invalid, "fraction with %d MiB: no GPU has as much", f.Mem>>20)
		}
	}
	if r.MinMem > form.MaxGPUMem {
		return lease.Errorf(lease.Invalid, "minimum memory %d MiB: no GPU has as much", r.MinMem>>20)
	}
	switch r.Place {
	case "", lease.BestFit, lease.Spread:
	default:
		return lease.Errorf(lease.Invalid, "placement %q: say %s or %s", r.Place, lease.BestFit, lease.Spread)
	}
	switch r.Policy {
	case "", lease.BestEffort, lease.Equal, lease.Fixed:
	default:
		return lease.Errorf(lease.Invalid, "policy %q: say %s, %s or %s", r.Policy, lease.BestEffort, lease.Equal, lease.Fixed)
	}
	switch r.Lend {
	case lease.LendSite, lease.LendYes, lease.LendNo:
	default:
		return lease.Errorf(lease.Invalid, "lend %q: say %s or %s, or nothing", r.Lend, lease.LendYes, lease.LendNo)
	}
	if r.Grace < lease.NoGrace || r.Grace > lease.MaxGrace {
		return lease.Errorf(lease.Invalid, "grace %v: give at most %v", r.Grace, lease.MaxGrace)
	}
	return nil
}

// Share is what fraction f is on a GPU that can grant mem bytes: bytes in whole
// granules, rounded up if bytes were asked for and down if percent, and percent,
// which follow the bytes (rounded up) where none were asked for.
func Share(f lease.Fraction, mem uint64) (percent uint32, bytes uint64) {
	all := mem / lease.Granule
	n := all * uint64(f.Percent) / 100
	if f.Mem != 0 {
		n = (min(f.Mem, form.MaxGPUMem) + lease.Granule - 1) / lease.Granule
	}
	percent = f.Percent
	if percent == 0 && all > 0 {
		percent = uint32(min(101, max(1, (n*100+all-1)/all))) // 101: more than there is
	}
	return percent, n * lease.Granule
}

// Least is what a fraction of a GPU has to be for a session's context to fit: bytes, and the percent that are as much where
// no bytes are asked for. ok is false if the GPU's contexts have not been measured.
func Least(g *lease.GPU) (bytes uint64, percent uint32, ok bool) {
	bytes = (least(g) + lease.Granule - 1) / lease.Granule * lease.Granule
	for percent = 1; percent < 100; percent++ {
		if _, b := Share(lease.Fraction{Percent: percent}, g.Mem); b >= bytes {
			break
		}
	}
	return bytes, percent, g.Overhead > 0
}

// candidate is a GPU that the request may use.
type candidate struct {
	gpu         *lease.GPU
	freePercent uint32
	freeMem     uint64
	empty       bool
	taken       int // index of the fraction that has it, -1 for none
}

// Place chooses a GPU for each of r's fractions, all or nothing, each another
// one. r.Place goes before place, and best fit is what neither says. The grants
// are in the order of the fractions. Errors are *lease.Error with code Invalid,
// NoRoom or Never.
func Place(gpus []lease.GPU, r lease.Request, place lease.Place) ([]lease.Grant, error) {
	if err := Validate(r); err != nil {
		return nil, err
	}
	if r.Place != "" {
		place = r.Place
	}
	var a []*candidate
	if len(r.Fractions) == 1 {
		a = chooseOne(gpus, r, place)
	} else {
		a = choose(candidates(gpus, r, false), r, place)
	}
	if a == nil {
		return nil, explain(gpus, candidates(gpus, r, false), r)
	}
	grants := make([]lease.Grant, len(r.Fractions))
	for i, c := range a {
		percent, mem := Share(r.Fractions[i], c.gpu.Mem)
		grants[i] = lease.Grant{Owner: c.gpu.Owner, GPU: c.gpu.UUID, Percent: percent, Mem: mem, Order: i}
	}
	return grants, nil
}

// candidates are the GPUs lent that r's type and size allow, or with whole
// all that they allow, as if they were empty.
func candidates(gpus []lease.GPU, r lease.Request, whole bool) []candidate {
	cs := make([]candidate, 0, len(gpus))
	match := typeMatch(r.Type)
	for i := range gpus {
		if c, ok := candidateOf(&gpus[i], &r, match, whole); ok {
			cs = append(cs, c)
		}
	}
	return cs
}

func candidateOf(g *lease.GPU, r *lease.Request, match func(*lease.GPU) bool, whole bool) (c candidate, ok bool) {
	if g.Mem < r.MinMem || !whole && !g.Lends() || !match(g) {
		return c, false
	}
	c = candidate{gpu: g, freePercent: g.FreePercent, freeMem: min(g.FreeMem, g.Mem), empty: g.Leases == 0, taken: -1}
	if whole {
		c.freePercent, c.freeMem, c.empty = 100, g.Mem, true
	}
	return c, true
}

// chooseOne is choose for a request of one fraction, the usual one: a pool may have thousands
// of GPUs, of which it makes no list.
func chooseOne(gpus []lease.GPU, r lease.Request, place lease.Place) []*candidate {
	var best candidate
	match := typeMatch(r.Type)
	for i := range gpus {
		c, ok := candidateOf(&gpus[i], &r, match, false)
		if ok && c.fits(r.Fractions[0]) && (best.gpu == nil || before(&c, &best, place)) {
			best = c
		}
	}
	if best.gpu == nil {
		return nil
	}
	return []*candidate{&best}
}

// typeMatch is GPU.IsType. GPUs of a pool have few names, so the last answer is kept.
func typeMatch(typ string) func(*lease.GPU) bool {
	if typ == "" {
		return func(*lease.GPU) bool { return true }
	}
	var last string
	var was, asked bool
	return func(g *lease.GPU) bool {
		if !asked || g.Name != last {
			asked, last, was = true, g.Name, g.IsType(typ)
		}
		return was
	}
}

// fits says whether c has room for f.
func (c *candidate) fits(f lease.Fraction) bool {
	percent, mem := Share(f, c.gpu.Mem)
	return percent <= c.freePercent && mem <= c.freeMem && mem >= least(c.gpu)
}

// least is the smallest grant of a GPU that a program can do anything with: a
// session's context and a granule.
func least(g *lease.GPU) uint64 {
	return (g.Overhead+lease.Granule-1)/lease.Granule*lease.Granule + lease.Granule
}

// choose gives each fraction a candidate, or nil.
func choose(cs []candidate, r lease.Request, place lease.Place) []*candidate {
	if len(r.Fractions) == 1 {
		return assign(cs, r.Fractions, place)
	}
	if !r.SameOwner && place == lease.Spread {
		return assign(cs, r.Fractions, place)
	}
	// One owner means one session with several devices; where that breaks no
	// whole GPU that several owners would have left whole, it is the better fit.
	var best []*candidate
	bestScore := 0
	if !r.SameOwner {
		if best = assign(cs, r.Fractions, place); best == nil {
			return nil
		}
		bestScore = broken(best, r.Fractions)
		if owners(best) == 1 {
			return best
		}
	}
	for _, own := range byOwner(cs) {
		if len(own) < len(r.Fractions) {
			continue
		}
		a := assign(own, r.Fractions, place)
		if a == nil {
			continue
		}
		s := broken(a, r.Fractions)
		better := best == nil || s < bestScore || s == bestScore && owners(best) > 1
		if !better && s == bestScore && place == lease.Spread {
			better = free(a) > free(best)
		} else if !better && s == bestScore {
			better = free(a) < free(best)
		}
		if better {
			best, bestScore = a, s
		}
	}
	return best
}

// broken counts the empty GPUs that an assignment takes only a part of.
func broken(a []*candidate, fs []lease.Fraction) int {
	n := 0
	for i, c := range a {
		if percent, _ := Share(fs[i], c.gpu.Mem); c.empty && percent < 100 {
			n++
		}
	}
	return n
}

func owners(a []*candidate) int {
	seen := make(map[string]bool, 4)
	for _, c := range a {
		seen[c.gpu.Owner] = true
	}
	return len(seen)
}

// free is the percentage that an assignment's GPUs have free before it.
func free(a []*candidate) (sum uint32) {
	for _, c := range a {
		sum += c.freePercent
	}
	return sum
}

// byOwner splits candidates by owner, in the order of the owners' names.
func byOwner(cs []candidate) [][]candidate {
	s := append([]candidate(nil), cs...)
	slices.SortStableFunc(s, func(a, b candidate) int { return cmp.Compare(a.gpu.Owner, b.gpu.Owner) })
	var all [][]candidate
	for len(s) > 0 {
		n := 1
		for n < len(s) && s[n].gpu.Owner == s[0].gpu.Owner {
			n++
		}
		all = append(all, s[:n:n])
		s = s[n:]
	}
	return all
}

// assign is the matching: each fraction a candidate of its own, or nil.
func assign(cs []candidate, fs []lease.Fraction, place lease.Place) []*candidate {
	if len(fs) > len(cs) {
		return nil
	}
	for i := range cs {
		cs[i].taken = -1
	}
	got := make([]*candidate, len(fs))
	order := make([]int, len(fs))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(fs[b].Mem, fs[a].Mem), cmp.Compare(fs[b].Percent, fs[a].Percent))
	})
	var seen []bool
	for _, i := range order {
		var best *candidate
		for j := range cs {
			c := &cs[j]
			if c.taken < 0 && c.fits(fs[i]) && (best == nil || before(c, best, place)) {
				best = c
			}
		}
		if best != nil {
			best.taken, got[i] = i, best
			continue
		}
		if seen == nil {
			seen = make([]bool, len(cs))
		}
		clear(seen)
		if !augment(cs, fs, got, seen, i) {
			return nil
		}
	}
	return got
}

// augment finds fraction i a candidate by moving others (Kuhn's algorithm).
func augment(cs []candidate, fs []lease.Fraction, got []*candidate, seen []bool, i int) bool {
	for j := range cs {
		c := &cs[j]
		if seen[j] || !c.fits(fs[i]) {
			continue
		}
		seen[j] = true
		if c.taken < 0 || augment(cs, fs, got, seen, c.taken) {
			c.taken, got[i] = i, c
			return true
		}
	}
	return false
}

// before says which of two GPUs that both have room is taken.
func before(a, b *candidate, place lease.Place) bool {
	if place == lease.Spread {
		return cmp.Or(cmp.Compare(b.freePercent, a.freePercent), cmp.Compare(b.freeMem, a.freeMem), cmp.Compare(a.gpu.Leases, b.gpu.Leases), tie(a, b)) < 0
	}
	if a.empty != b.empty {
		return b.empty
	}
	// What is left of two GPUs differs as what is free of them does. A GPU
	// larger than needed is kept for requests that need it.
	return cmp.Or(cmp.Compare(a.freePercent, b.freePercent), cmp.Compare(a.freeMem, b.freeMem), tie(a, b)) < 0
}

func tie(a, b *candidate) int {
	return cmp.Or(cmp.Compare(a.gpu.Owner, b.gpu.Owner), cmp.Compare(a.gpu.Index, b.gpu.Index), cmp.Compare(a.gpu.UUID, b.gpu.UUID))
}
