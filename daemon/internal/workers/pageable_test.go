package workers

import (
	"errors"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// A GPU whose kernels reach all memory of their session is lent in a whole sandbox, or where the site allows it.
func TestPageable(t *testing.T) {
	broken := errors.New("no Landlock")
	for _, c := range []struct {
		lends      string
		mode, want sandbox.Mode
		try        error
		err        string
	}{
		{"auto", sandbox.On, sandbox.On, nil, ""},
		{"auto", sandbox.Auto, sandbox.On, nil, ""},
		{"auto", sandbox.Auto, sandbox.Auto, broken, "no Landlock"},
		{"auto", sandbox.Off, sandbox.Off, nil, "have no sandbox"},
		{"auto", sandbox.Log, sandbox.Log, nil, "have no sandbox"},
		{"allow", sandbox.Off, sandbox.Off, nil, ""},
		{"allow", sandbox.Auto, sandbox.Auto, broken, ""},
		{"refuse", sandbox.On, sandbox.On, nil, "worker.pageable is refuse"},
	} {
		mode, err := pageable(c.lends, c.mode, func(m sandbox.Mode) error {
			if m != sandbox.On {
				t.Errorf("tried in sandbox %s", m)
			}
			return c.try
		})
		if mode != c.want || (err == nil) != (c.err == "") || err != nil && !(strings.Contains(err.Error(), c.err) && strings.Contains(err.Error(), "uvm_disable_hmm=1")) {
			t.Errorf("%s in sandbox %s: %s, %v", c.lends, c.mode, mode, err)
		}
	}
}

// The driver says that it is such a GPU, and sessions have what was decided.
func TestPageableGPU(t *testing.T) {
	dir := setup(t)
	t.Setenv("SLUICE_SIM_PAGEABLE", "1")
	for _, c := range []struct {
		mode, want sandbox.Mode
		lends, err string
	}{
		{sandbox.Off, "", "auto", "HMM or ATS"},
		{sandbox.Off, sandbox.Off, "allow", ""},
		{sandbox.Auto, "", "refuse", "worker.pageable is refuse"},
		{sandbox.Auto, sandbox.On, "auto", ""},
		{sandbox.Auto, sandbox.On, "auto", ""}, // from what the pool before has kept
	} {
		p := newPool(t, dir, func(cfg *Config) { cfg.Sandbox, cfg.Pageable, cfg.Warm = c.mode, c.lends, 0 })
		err := p.Probe(t.Context(), gpus(0))
		_, unlent := p.Overhead(simUUID(0))
		if !errors.Is(err, unlent) || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), "gpu "+simUUID(0)+": its kernels") {
			t.Errorf("sandbox %s, %s: %v, %v", c.mode, c.lends, err, unlent)
		}
		if err != nil {
			_, w := pair(t)
			if _, err := p.Start(t.Context(), testLease("a", 0), request("a"), w, gpus(0)); lease.CodeOf(err) != lease.Down || !strings.Contains(err.Error(), c.err) {
				t.Errorf("sandbox %s, %s: a session: %v", c.mode, c.lends, err)
			}
		} else if got := p.sandboxOf(gpus(0, 1)); got != c.want {
			t.Errorf("sandbox %s, %s: sessions have %s", c.mode, c.lends, got)
		}
		p.Close()
	}
}
