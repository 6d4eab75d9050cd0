package workers

import (
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// A lease's own grace goes before the site's.
func TestGrace(t *testing.T) {
	p := &Pool{cfg: Config{Grace: time.Minute}}
	for asked, want := range map[time.Duration]time.Duration{0: time.Minute, lease.NoGrace: 0, time.Hour: time.Hour} {
		if got := p.grace(lease.Lease{Request: lease.Request{Grace: asked}}); got != want {
			t.Errorf("a lease with grace %v: %v, want %v", asked, got, want)
		}
	}
}
