package jobreport

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

func TestVerdict(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	one := func(node string, percent uint32, mem, peak uint64, took, gpu time.Duration) lease.Report {
		return lease.Report{Lease: node, Key: lease.Key{Job: "7", Node: node, Incarnation: 1}, Grants: []lease.Grant{{Percent: percent, Mem: mem}},
			Use: []lease.Use{{Peak: peak}}, Sessions: 1, GPUTime: gpu, Made: at, Ended: at.Add(took)}
	}
	unused := one("n1", 50, 70<<30, 0, time.Hour, 0)
	unused.Sessions = 0
	lost := one("n1", 50, 70<<30, 0, time.Hour, 0)
	lost.Sessions, lost.Lost, lost.Owner = 0, true, "gpu01"
	since := one("n2", 50, 70<<30, 1<<30, time.Hour, time.Minute) // a program that began after the reboot
	since.Lost, since.Owner = true, "gpu02"
	live := one("n1", 50, 70<<30, 1<<30, 0, 0)
	live.Ended = time.Time{}
	for _, c := range []struct {
		in   []lease.Report
		want string
	}{
		{nil, ""},
		{[]lease.Report{live}, ""},
		{[]lease.Report{unused}, "no program of the job used its fraction: leave --gres=rgpu out, or see that the program finds a GPU"},
		{[]lease.Report{lost}, "what the job used is not known: counts were lost with the reboot of gpu01"},
		{[]lease.Report{lost, since, lost, one("n3", 50, 70<<30, 1<<30, time.Hour, time.Minute)}, "what the job used is not known: counts were lost with the reboot of gpu01, gpu02"},
		{[]lease.Report{one("n1", 100, 140<<30, 4<<30, time.Hour, 3*time.Minute)}, "2 % of the memory used, GPU computed for 5 % of the time: ask for --gres=rgpu:7 --rgpu-mem=5G the next time"},
		{[]lease.Report{one("n1", 50, 70<<30, 60<<30, time.Hour, 50*time.Minute)}, "85 % of the memory used, GPU computed for 83 % of the time: it fits"},
		{[]lease.Report{one("n1", 50, 70<<30, 10<<30, time.Hour, 30*time.Minute)}, "14 % of the memory used, GPU computed for 50 % of the time: ask for --rgpu-mem=13G the next time"},
		{[]lease.Report{one("n1", 50, 70<<30, 2<<20, 5*time.Second, 0)}, "0 % of the memory used: ask for --rgpu-mem=1G the next time"},
		{[]lease.Report{one("n1", 50, 8<<30, 2<<30, time.Hour, 6*time.Minute), one("n2", 50, 8<<30, 2<<30, time.Hour, 6*time.Minute)},
			"25 % of the memory used, GPU computed for 10 % of the time: ask for --gres=rgpu:15 --rgpu-mem=3G the next time"},
	} {
		if got := Verdict(c.in); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// A requeued job's use is not lost: Slurm has one comment for all of its runs.
func TestLineOfRequeued(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	run := func(n uint64, gpu time.Duration) lease.Report {
		begin := at.Add(time.Duration(n) * time.Hour)
		return lease.Report{Lease: string(rune('a' + n)), Key: lease.Key{Job: "7", Node: "n1", Incarnation: n}, Grants: []lease.Grant{{Percent: 50, Mem: 1 << 30}}, GPUTime: gpu, Made: begin, Ended: begin.Add(time.Minute)}
	}
	if got := Line([]lease.Report{run(1, 3*time.Second), run(2, 4*time.Second), run(3, 10*time.Second)}); !strings.Contains(got, " gpu 10s ") || !strings.HasSuffix(got, " earlier-runs 2 earlier-gpu 7s") {
		t.Error(got)
	}
	if got := Line([]lease.Report{run(3, 10*time.Second)}); strings.Contains(got, "earlier") {
		t.Error(got)
	}
}
