package cli

import (
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

func TestPartText(t *testing.T) {
	for want, p := range map[string]*lease.Part{
		"-": nil, "10%+8G": {Percent: 10, Mem: 8 << 30}, "GPU0,3": {Percent: 200, GPUs: 9},
	} {
		if got := partText(p); got != want {
			t.Errorf("%+v: %s, want %s", p, got, want)
		}
	}
}
