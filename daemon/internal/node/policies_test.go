package node

import (
	"reflect"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/owner"
)

// What the file says of quotas and idle leases reaches the two roles.
func TestPolicies(t *testing.T) {
	cfg, err := config.Parse("f.yaml", []byte(`
node: n
users: {max_life: 8h}
lease: {idle: {after: 1h, command: /mail}}
pools:
  default: {owners: [n]}
  batch: {owners: [n], idle: {after: 10m, action: lend, command: /other}}
  free: {owners: [n], idle: {after: 0s}}
quotas: [{user: alice, pool: batch, percent: 50, mem: 4G, leases: 2}, {account: Phys, leases: 1}]
`))
	if err != nil {
		t.Fatal(err)
	}
	l := limits(cfg)
	want := owner.Idles{Default: owner.Idle{After: time.Hour, Action: owner.IdleNote, Command: "/mail"}, Pools: map[string]owner.Idle{
		"batch": {After: 10 * time.Minute, Action: owner.IdleLend, Command: "/other"}, "free": {Action: owner.IdleNote, Command: "/mail"},
	}}
	if !reflect.DeepEqual(l.Idle, want) || l.RunLife != 8*time.Hour {
		t.Errorf("%+v, %v", l.Idle, l.RunLife)
	}
	if got := commands(cfg); !reflect.DeepEqual(got, []string{"/mail", "/other"}) {
		t.Errorf("%q", got)
	}
	q := quotas(cfg)
	if len(q) != 2 || q[0].User != "alice" || q[0].Pool != "batch" || q[0].Jobs || *q[0].Percent != 50 || *q[0].Mem != 4<<30 || *q[0].Leases != 2 ||
		q[0].Whose != "user alice" || q[0].Of != "pool batch, outside of Slurm's jobs" || q[1].Account != "phys" || !q[1].Jobs || q[1].Percent != nil {
		t.Errorf("%+v", q)
	}
	if got := commands(&config.Config{}); len(got) > 0 {
		t.Errorf("%q", got)
	}
}
