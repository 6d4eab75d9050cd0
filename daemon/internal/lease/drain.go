package lease

import (
	"fmt"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Drain says that no new lease gets a GPU, since when, by whom and why. Leases that have it
// keep it. The zero Drain is none.
type Drain struct {
	By     string    `json:"by"` // as uid@NODE
	Since  time.Time `json:"since"`
	Reason string    `json:"reason"`
}

// IsZero says that the GPU is not drained.
func (d Drain) IsZero() bool { return d.Since.IsZero() }

func (d Drain) String() string {
	return fmt.Sprintf("drained since %s by %s: %s", d.Since.UTC().Format(time.RFC3339), d.By, d.Reason)
}

// Lends says whether new leases may get the GPU.
func (g *GPU) Lends() bool { return g.Healthy && g.Drain.IsZero() }

// WhyNot is why new leases may not, "" if they may.
func (g *GPU) WhyNot() string {
	switch {
	case !g.Healthy:
		return "unhealthy: " + g.Why
	case !g.Drain.IsZero():
		return g.Drain.String()
	}
	return ""
}

// DrainOrder drains a GPU of an owner, or lends it again.
type DrainOrder struct {
	Owner  string
	GPU    string // UUID, or number in PCI order; "" all of the owner's, also those that come later
	Resume bool
	Reason string // of a drain
	By     uint32 // uid
}

// Validate checks what depends on the order alone.
func (d *DrainOrder) Validate() error {
	switch {
	case d.Owner == "" || !form.IsLine(d.Owner, form.MaxName) || !form.IsLine(d.GPU, form.MaxName):
		return Errorf(Invalid, "owner %q, gpu %q: want the name of an owner and of one of its GPUs; see sluice gpus", form.Name(d.Owner), form.Name(d.GPU))
	case d.Resume && d.Reason != "":
		return Errorf(Invalid, "a resume has no reason")
	case !d.Resume && (d.Reason == "" || !form.IsLine(d.Reason, form.MaxName)):
		return Errorf(Invalid, "a drain needs a reason of at most %d bytes, in one line, for those who find the GPU drained", form.MaxName)
	}
	return nil
}
