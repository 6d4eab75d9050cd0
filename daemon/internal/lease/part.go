package lease

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Part is what a step of a job may have of the job's lease: all its sessions together.
//
// Of a lease of one GPU it has percent and memory. Mem is a limit within the lease's, and Percent are taken from those of the lease for as long as
// the part has sessions.
//
// Of a lease of several GPUs it has whole GPUs: no other step with a part has them, and the step's programs are told so. Owners forbid the
// others nothing. Percent is 100 for each of them then, and Mem is 0, so that an owner that does not know GPUs refuses the part.
type Part struct {
	Step    uint32 `json:"step"`           // Slurm's number of it
	Percent uint32 `json:"percent"`        // 0: nothing
	Mem     uint64 `json:"mem"`            // bytes, whole granules
	GPUs    uint32 `json:"gpus,omitempty"` // bit i: GPU i of Devices; 0: a part of a lease of one GPU
}

func (p Part) String() string {
	if p.GPUs != 0 {
		return fmt.Sprintf("step %d: GPU %s", p.Step, p.Devices())
	}
	return fmt.Sprintf("step %d: %d%%, %d MiB", p.Step, p.Percent, p.Mem>>20)
}

// OnGPUs says whether the part has whole GPUs.
func (p Part) OnGPUs() bool { return p.GPUs != 0 }

// Devices is the part's GPUs as CUDA_VISIBLE_DEVICES lists them: "0,2".
func (p Part) Devices() string { return devices(p.GPUs) }

func devices(gpus uint32) string {
	var list []string
	for ; gpus != 0; gpus &= gpus - 1 {
		list = append(list, strconv.Itoa(bits.TrailingZeros32(gpus)))
	}
	return strings.Join(list, ",")
}

// Devices returns grants in the order in which a program numbers its GPUs: those of one owner after the other, in the order of Owners.
func Devices(grants []Grant) []Grant {
	list := make([]Grant, 0, len(grants))
	for _, owner := range Owners(grants) {
		for _, g := range grants {
			if g.Owner == owner {
				list = append(list, g)
			}
		}
	}
	return list
}

// WholeGPUs returns the GPUs that were granted to a lease whole, as a mask like Part.GPUs.
func WholeGPUs(grants []Grant) (gpus uint32) {
	for i, g := range Devices(grants) {
		if g.Paid() == 100 {
			gpus |= 1 << i
		}
	}
	return gpus
}

// ChooseGPUs gives a part its GPUs: as many of the lease's whole GPUs as its percent say, none of which the parts of other steps have. They are of
// one owner if one has enough, because only such GPUs reach each other's memory, and of that with the fewest free. If one of the parts
// is the same step's, and has as many, the step keeps those: it has asked twice. It is refused with code NoRoom if too few are free.
func (l *Lease) ChooseGPUs(p Part, parts []Part) (Part, error) {
	free, want := WholeGPUs(l.Grants), int(p.Percent/100)
	whole := bits.OnesCount32(free)
	var names []string
	for _, o := range parts {
		switch {
		case o.Step == p.Step:
			p.GPUs = o.GPUs
		case o.OnGPUs():
			free &^= o.GPUs
			names = append(names, o.String())
		}
	}
	if bits.OnesCount32(p.GPUs) == want && p.GPUs&^free == 0 {
		return p, nil
	}
	if n := bits.OnesCount32(free); n < want {
		left, less := "none", ""
		if n > 0 {
			left, less = "GPU "+devices(free), fmt.Sprintf("with --gres=%s:%d, or ", form.Gres, 100*n)
		}
		return p, Errorf(NoRoom, "--gres=%s:%d of step %d: its job has %d whole GPUs on this node, and other steps leave %s (%s); start it %swhen another step has ended",
			form.Gres, p.Percent, p.Step, whole, left, strings.Join(names, "; "), less)
	}
	p.GPUs = lowest(fewest(l.Grants, free, want), want)
	return p, nil
}

// fewest are the free GPUs of the owner that has the fewest of those that have enough, or all free GPUs if no owner has enough.
func fewest(grants []Grant, free uint32, enough int) uint32 {
	of := map[string]uint32{}
	for i, g := range Devices(grants) {
		of[g.Owner] |= free & (1 << i)
	}
	best := free
	for _, owner := range Owners(grants) {
		if n := bits.OnesCount32(of[owner]); n >= enough && n < bits.OnesCount32(best) {
			best = of[owner]
		}
	}
	return best
}

// lowest are the n lowest bits of a mask that has as many.
func lowest(mask uint32, n int) (low uint32) {
	for range n {
		low |= mask & -mask
		mask &= mask - 1
	}
	return low
}
