package jobreport

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// What Line writes is read back, also when sacctmgr has written it in lower case.
func TestParse(t *testing.T) {
	at := time.Unix(1_700_000_000, 0)
	report := func(node string) lease.Report {
		return lease.Report{
			Lease: node, Key: lease.Key{Job: "7", Node: node, Incarnation: 1}, Asked: []lease.Fraction{{Percent: 50, Mem: 8 << 30}},
			Grants: []lease.Grant{{Percent: 50, Mem: 8 << 30}}, Use: []lease.Use{{Peak: 2 << 30}}, Sessions: 2, GPUTime: 31 * time.Minute,
			Counts: lease.Counts{Calls: 5, Waits: 3, BytesIn: 3 << 30, Errors: 2, Cuts: 4, CutTime: 90 * time.Second, Saved: 1 << 20},
			Shares: []lease.Share{{Held: time.Hour, Waited: 3200 * time.Millisecond, Throttled: time.Second, Overruns: 1}},
			Made:   at, Ended: at.Add(time.Hour),
		}
	}
	unused := report("n1")
	unused.Sessions, unused.Asked = 0, []lease.Fraction{{Percent: 50}}
	lost := report("n1")
	lost.Sessions, lost.Lost = 0, true
	for _, in := range [][]lease.Report{{report("n1")}, {report("n1"), report("n2")}, {unused}, {lost}, {lost, report("n2")}} {
		want := Add(in)
		for _, line := range []string{Line(in), strings.ToLower(Line(in))} {
			p, err := Parse(line)
			if err != nil {
				t.Errorf("%s: %v", line, err)
				continue
			}
			if p.Nodes != want.Nodes || p.Asked != want.Asked || p.AskedMem != want.AskedMem || p.Granted != want.Granted || p.Mem != want.Mem || p.Peak != want.Peak ||
				p.GPUTime != want.GPUTime || p.Counts.Calls != want.Counts.Calls || p.Counts.Waits != want.Counts.Waits || p.Counts.Errors != want.Counts.Errors ||
				p.Counts.Cuts != want.Counts.Cuts || p.Counts.CutTime != want.Counts.CutTime || p.Share.Held != want.Share.Held || p.Share.Waited != want.Share.Waited ||
				p.Share.Throttled != want.Share.Throttled || p.Share.Overruns != want.Share.Overruns || p.Lost != want.Lost || (p.Sessions == 0) != (want.Sessions == 0 && want.Lost == 0) {
				t.Errorf("%s: %+v, want %+v", line, p, want)
			}
			// The advice is that of the verdict.
			if v, a := Verdict(in), p.Advice(time.Hour); want.Sessions > 0 && want.Lost == 0 && !strings.Contains(v, a) {
				t.Errorf("%s: %q, and the verdict is %q", line, a, v)
			}
		}
	}
	if p, err := Parse("sluice: asked 50% granted 50% 100MiB peak 1MiB gpu 1s earlier-runs 2 earlier-gpu 7s news of-later"); err != nil || p.EarlierRuns != 2 || p.EarlierGPU != 7*time.Second {
		t.Error(p, err)
	}
}

func TestParseDamaged(t *testing.T) {
	const good = "sluice: asked 50% granted 50% 100MiB peak 1MiB gpu 1s"
	if _, err := Parse(good); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{
		"", "sluice:", "sluice: idle: its GPU on gpu01 has had no work", "asked 50%",
		"sluice: asked 50%", good + " calls", good + " calls -1", good + " calls 1e9", good + " gpu 2s", good + " waited -3s", good + " waited 99999999h",
		good + " nodes 0", good + " cuts 99999999999999999999",
		strings.Replace(good, "50%", "50", 1), strings.Replace(good, "50%", "-5%", 1), strings.Replace(good, "50%", "99999999999%", 1),
		strings.Replace(good, "100MiB", "18446744073709551615MiB", 1), strings.Replace(good, "1MiB", "1GiB", 1), strings.Replace(good, " gpu 1s", "", 1), good[:len(good)-2],
	} {
		if p, err := Parse(bad); err == nil {
			t.Errorf("%q: %+v", bad, p)
		}
	}
}

func TestAdvice(t *testing.T) {
	for _, c := range []struct {
		line string
		took time.Duration
		want string
	}{
		{"sluice: asked 100% granted 100% 143360MiB peak 4096MiB gpu 3m00s", time.Hour, "ask for --gres=rgpu:7 --rgpu-mem=5G"},
		{"sluice: asked 50% granted 50% 71680MiB peak 61440MiB gpu 50m00s", time.Hour, "it fits"},
		{"sluice: asked 50% granted 50% 71680MiB peak 0MiB gpu 0s unused", time.Hour, "unused: leave --gres=rgpu out"},
		{"sluice: asked 50% granted 50% 71680MiB peak 0MiB gpu 0s lost 1", time.Hour, "use not known"},
		{"sluice: nodes 2 asked 100% granted 100% 16384MiB peak 4096MiB gpu 12m00s", time.Hour, "ask for --gres=rgpu:15 --rgpu-mem=3G"},
		{"sluice: asked 150% granted 150% 150000MiB peak 1MiB gpu 1h00m00s", time.Hour, "it fits"}, // on two GPUs: memory is not advised
		{"sluice: asked 0% granted 0% 0MiB peak 0MiB gpu 0s", time.Hour, ""},
		{"sluice: asked 50% granted 50% 68719476736MiB peak 68719476736MiB gpu 870000h00m00s", time.Minute, "it fits"},
	} {
		p, err := Parse(c.line)
		if got := p.Advice(c.took); err != nil && c.want != "" || got != c.want {
			t.Errorf("%s: %q, %v, want %q", c.line, got, err, c.want)
		}
	}
}
