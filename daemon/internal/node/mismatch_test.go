package node

import (
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/metrics"
)

const mib = 1 << 20

// sampleOf is a sample of NVML's in which processes, by their ids, hold so many MiB of GPU-a.
func sampleOf(held map[int]uint64) *inventory.Sample {
	d := inventory.Device{UUID: "GPU-a"}
	for pid, n := range held {
		b := n * mib
		d.Processes = append(d.Processes, inventory.Memory{PID: pid, Used: &b})
	}
	return &inventory.Sample{GPUs: []inventory.Device{d}}
}

// accountsOf is a lease whose processes have so many MiB in their accounts.
func accountsOf(used map[int]uint64) []lease.Status {
	l := lease.Status{Lease: lease.Lease{ID: "l", Grants: []lease.Grant{{GPU: "GPU-a"}}}}
	for pid, n := range used {
		l.Sessions = append(l.Sessions, lease.Session{Worker: lease.Process{PID: pid}, Use: []lease.Use{{Used: n * mib}}})
	}
	return []lease.Status{l}
}

func TestComparison(t *testing.T) {
	is := func(mib int64) []metrics.Mismatch {
		return []metrics.Mismatch{{Lease: "l", GPU: "GPU-a", Bytes: mib << 20}}
	}
	type look struct{ account, nvml map[int]uint64 }
	type m = map[int]uint64
	for what, c := range map[string]struct {
		looks []look
		want  []metrics.Mismatch
	}{
		"more than the account": {[]look{{m{1: 30}, m{1: 100}}, {m{1: 40}, m{1: 110}}, {m{1: 30}, m{1: 90}}}, is(50)},
		"less":                  {[]look{{m{1: 30}, m{1: 10}}, {m{1: 30}, m{1: 20}}, {m{1: 40}, m{1: 5}}}, is(-10)},
		"at two looks only":     {[]look{{m{1: 30}, m{1: 30}}, {m{1: 30}, m{1: 900}}, {m{1: 30}, m{1: 900}}}, is(0)},
		"a session that begins": {[]look{{m{1: 30}, m{1: 30}}, {m{1: 30}, m{1: 30}}, {m{1: 30, 2: 0}, m{1: 30, 2: 1600}}}, is(0)},
		"all of a lease":        {[]look{{m{1: 0, 2: 0}, m{1: 10, 2: 20}}, {m{1: 0, 2: 0}, m{1: 10, 2: 20}}, {m{1: 0, 2: 0}, m{1: 10, 2: 20}}}, is(30)},
		"not told by NVML":      {[]look{{m{1: 30}, nil}, {m{1: 30}, m{2: 9}}, {m{1: 30}, nil}}, []metrics.Mismatch{}},
		"told anew":             {[]look{{m{1: 0}, m{1: 70}}, {m{1: 0}, nil}, {m{1: 0}, m{1: 70}}}, []metrics.Mismatch{}},
	} {
		c1 := comparison{}
		var got []metrics.Mismatch
		for _, l := range c.looks {
			c1.account(accountsOf(l.account))
			got = c1.sample(sampleOf(l.nvml))
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v", what, got)
		}
		if c1.account(nil); len(c1) != 0 {
			t.Errorf("%s: a lease that ended is remembered", what)
		}
	}
}

// A program that allocates and frees a GiB all the time, read at random moments, is no thief; one that holds as much
// beside its account is found.
func TestComparisonSaw(t *testing.T) {
	saw, thief := comparison{}, comparison{}
	r := rand.New(rand.NewPCG(1, 2))
	level := func() uint64 { return 16 + 1024*r.Uint64N(2) }
	for n := range 2000 {
		for range readings {
			saw.account(accountsOf(map[int]uint64{1: level()}))
			thief.account(accountsOf(map[int]uint64{1: level()}))
		}
		for _, m := range saw.sample(sampleOf(map[int]uint64{1: level()})) {
			if m.Bytes != 0 {
				t.Fatalf("sample %d: %d bytes", n, m.Bytes)
			}
		}
		for _, m := range thief.sample(sampleOf(map[int]uint64{1: level() + 2048})) {
			if m.Bytes < 1024*mib {
				t.Fatalf("sample %d of a thief: %d bytes", n, m.Bytes)
			}
		}
	}
}
