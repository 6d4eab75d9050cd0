package cluster

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// TestPageable: a GPU whose kernels reach all memory of their session is lent by a daemon as it is installed, which has its sessions in a
// whole sandbox. Without one it is lent only if the site says so, and host, owner and log say why it is not.
func TestPageable(t *testing.T) {
	t.Parallel()
	s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 1})
	h, o := s.Hosts[0], s.Owners[0]
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	const why = "HMM or ATS: PAGEABLE_MEMORY_ACCESS is 1), and sessions on it have no sandbox; load nvidia_uvm with uvm_disable_hmm=1"
	for _, c := range []struct {
		config map[string]string
		lent   bool
	}{
		{nil, true},
		{map[string]string{"session.rdma": "on"}, false},
		{map[string]string{"worker.sandbox": "off"}, false},
		{map[string]string{"worker.sandbox": "off", "worker.pageable": "allow"}, true},
	} {
		if err := o.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := o.Configure(c.config); err != nil {
			t.Fatal(err)
		}
		if _, err := o.Up(ctx, "SLUICE_SIM_PAGEABLE=1"); err != nil {
			t.Fatal(err)
		}
		eventually(t, 30*time.Second, fmt.Sprintf("%v: lent: %v", c.config, c.lent), func() error {
			gpus, err := pool(h)
			if err != nil {
				return err
			}
			if len(gpus) != 1 || gpus[0].Healthy != c.lent || strings.Contains(gpus[0].Why, why) == c.lent {
				return fmt.Errorf("%+v", gpus)
			}
			return nil
		})
		health, _ := o.Node.Run(ctx, sluice(s, o, 0, "health", "--config", o.Config))
		if strings.Contains(health, why) == c.lent || !c.lent && !strings.Contains(site.Tail(o.Log, 40), why) {
			t.Errorf("%v: %s", c.config, health)
		}
		out, err := h.Node.Run(ctx, h.Run(user, "--fraction", "40", "--", s.Program("vecadd")))
		if (err == nil) != c.lent {
			t.Errorf("%v: %v: %s", c.config, err, out)
		}
	}
}
