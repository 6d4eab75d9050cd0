// Package jobreport words what a job has used, for people and for Slurm's accounting,
// and writes it at the end of the job's own output.
package jobreport

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
)

// slack is how far the clocks of two owners may be apart, for Last.
const slack = 2 * time.Second

// Last are the reports of a job's last run: a job that was requeued has several runs,
// of which each has leases of its own.
func Last(all []lease.Report) []lease.Report {
	newest := map[string]uint64{} // by node
	var begun time.Time           // the last lease of all
	for _, r := range all {
		if n, ok := newest[r.Key.Node]; !ok || r.Key.Incarnation > n {
			newest[r.Key.Node] = r.Key.Incarnation
		}
		if r.Made.After(begun) {
			begun = r.Made
		}
	}
	var out []lease.Report
	for _, r := range all {
		if r.Key.Incarnation != newest[r.Key.Node] {
			continue
		}
		// A node of an earlier run that the last one has not.
		if !r.Ended.IsZero() && r.Ended.Add(slack).Before(begun) {
			continue
		}
		out = append(out, r)
	}
	return out
}

// Sum is what the leases of some reports used together.
type Sum struct {
	Nodes    int
	Asked    uint32 // percent, all nodes together
	AskedMem uint64 // bytes, 0 where none was named
	Granted  uint32
	Mem      uint64 // bytes granted
	Peak     uint64 // bytes; of each fraction its own highest
	GPUTime  time.Duration
	Counts   lease.Counts
	Sessions uint64
	Share    lease.Share // of all fractions; Due means nothing
	Turns    bool        // the time of one was shared
	Live     bool        // one has not ended
	Lost     int         // reports that do not have all that was used
}

// Add sums up reports.
func Add(reports []lease.Report) Sum {
	var s Sum
	var nodes, leases []string
	for _, r := range reports {
		if !slices.Contains(nodes, r.Key.Node) {
			nodes = append(nodes, r.Key.Node)
		}
		if !slices.Contains(leases, r.Lease) { // each of its owners repeats what was asked
			leases = append(leases, r.Lease)
			for _, f := range r.Asked {
				s.Asked += f.Percent
				s.AskedMem += f.Mem
			}
		}
		for _, g := range r.Grants {
			s.Granted += g.Percent
			s.Mem += g.Mem
		}
		for _, u := range r.Use {
			s.Peak += u.Peak
		}
		c := r.Counts
		s.Counts.Calls += c.Calls
		s.Counts.Waits += c.Waits
		s.Counts.BytesIn += c.BytesIn
		s.Counts.BytesOut += c.BytesOut
		s.Counts.Launches += c.Launches
		s.Counts.Errors += c.Errors
		s.Counts.Cuts += c.Cuts
		s.Counts.CutTime += c.CutTime
		s.Counts.Saved += c.Saved
		if len(r.Shares) == 0 {
			s.Share.Throttled += c.Throttle
		}
		for _, x := range r.Shares {
			s.Share, s.Turns = s.Share.Add(x), true
		}
		s.GPUTime += r.GPUTime
		s.Sessions += r.Sessions
		s.Live = s.Live || r.Ended.IsZero()
		if r.Lost {
			s.Lost++
		}
	}
	s.Nodes = len(nodes)
	return s
}

// Line is the last run of a job in one line of words and numbers in turn, for Slurm's
// AdminComment and the job's output; "" without reports. It says the same when it is
// written small throughout, as sacctmgr does: no unit is told by its case alone.
func Line(all []lease.Report) string {
	reports := Last(all)
	if len(reports) == 0 {
		return ""
	}
	s := Add(reports)
	var b strings.Builder
	b.WriteString(slurm.OwnPrefix)
	if s.Nodes > 1 {
		fmt.Fprintf(&b, " nodes %d", s.Nodes)
	}
	fmt.Fprintf(&b, " asked %d%%", s.Asked)
	if s.AskedMem > 0 {
		fmt.Fprintf(&b, " %dMiB", s.AskedMem>>20)
	}
	fmt.Fprintf(&b, " granted %d%% %dMiB peak %dMiB gpu %s throttled %s calls %d waits %d in %s out %s",
		s.Granted, s.Mem>>20, form.MiB(s.Peak), Duration(s.GPUTime), Duration(s.Share.Throttled),
		s.Counts.Calls, s.Counts.Waits, binary(s.Counts.BytesIn), binary(s.Counts.BytesOut))
	if s.Turns {
		fmt.Fprintf(&b, " held %s waited %s", Duration(s.Share.Held), Duration(s.Share.Waited))
	}
	if s.Share.Overruns > 0 {
		fmt.Fprintf(&b, " overruns %d", s.Share.Overruns)
	}
	if s.Counts.Errors > 0 {
		fmt.Fprintf(&b, " errors %d", s.Counts.Errors)
	}
	if s.Counts.Saved > 0 {
		fmt.Fprintf(&b, " saved %s", binary(s.Counts.Saved))
	}
	if s.Counts.Cuts > 0 {
		fmt.Fprintf(&b, " cuts %d cut-time %s", s.Counts.Cuts, Duration(s.Counts.CutTime))
	}
	switch {
	case s.Lost > 0:
		fmt.Fprintf(&b, " lost %d", s.Lost)
	case s.Sessions == 0:
		b.WriteString(" unused")
	}
	if runs, gpu := earlier(all, reports); runs > 0 {
		fmt.Fprintf(&b, " earlier-runs %d earlier-gpu %s", runs, Duration(gpu))
	}
	return b.String()
}

// earlier is how many runs there were before the last, and the time in which GPUs computed for them. Slurm has one
// comment for all runs of a job that was requeued, and writes it at the last.
func earlier(all, last []lease.Report) (runs int, gpu time.Duration) {
	var seen []uint64
	for _, r := range all {
		if r.Lease == "" || slices.ContainsFunc(last, func(l lease.Report) bool { return l.Lease == r.Lease || l.Key.Incarnation == r.Key.Incarnation }) {
			continue
		}
		gpu += r.GPUTime
		if !slices.Contains(seen, r.Key.Incarnation) {
			seen = append(seen, r.Key.Incarnation)
		}
	}
	return len(seen), gpu
}

// shortJob is how long a job must have run before its GPU time says something about the next one.
const shortJob = time.Minute

// Verdict says whether the last run of a job used what it had, and what to ask for the next time; "" while it runs.
// Advice is given where less than half was used. It leaves a quarter more memory, and half as much time again, as
// were used.
func Verdict(reports []lease.Report) string {
	last := Last(reports)
	s := Add(last)
	if len(last) == 0 || s.Live || s.Granted == 0 || s.Mem == 0 {
		return ""
	}
	if s.Lost > 0 {
		return "what the job used is not known: counts were lost with the reboot of " + strings.Join(rebooted(last), ", ")
	}
	if s.Sessions == 0 {
		return "no program of the job used its fraction: leave --gres=rgpu out, or see that the program finds a GPU"
	}
	var took time.Duration
	for _, r := range last {
		took = max(took, r.Ended.Sub(r.Made))
	}
	text, advice := s.fit(took, len(last[0].Grants) == 1)
	if len(advice) == 0 {
		return strings.Join(text, ", ") + ": it fits"
	}
	return strings.Join(text, ", ") + ": ask for " + strings.Join(advice, " ") + " the next time"
}

// rebooted are the owners whose machines were started again while they had a lease of the job.
func rebooted(reports []lease.Report) []string {
	var owners []string
	for _, r := range reports {
		if r.Lost && !slices.Contains(owners, r.Owner) {
			owners = append(owners, r.Owner)
		}
	}
	return owners
}

// Advice is the end of Verdict, for a table: what to ask for the next time. took is how long the run took. A line does
// not say on how many GPUs of a node a job was; up to 100 percent are on one.
func (p *Past) Advice(took time.Duration) string {
	switch {
	case p.Granted == 0 || p.Mem == 0 || p.Nodes == 0:
		return ""
	case p.Lost > 0:
		return "use not known"
	case p.Sessions == 0:
		return "unused: leave --gres=rgpu out"
	}
	_, advice := p.fit(took, uint64(p.Granted) <= 100*uint64(p.Nodes))
	if len(advice) == 0 {
		return "it fits"
	}
	return "ask for " + strings.Join(advice, " ")
}

// fit says how much was used, and what would have done. one: each node had one GPU.
func (s *Sum) fit(took time.Duration, one bool) (text, advice []string) {
	nodes := uint64(s.Nodes)
	memory := s.Peak * 100 / s.Mem
	text = append(text, fmt.Sprintf("%d %% of the memory used", memory))
	if took >= shortJob {
		busy := uint64(s.GPUTime / (took / 100)) // percent of one GPU, all nodes together
		text = append(text, fmt.Sprintf("GPU computed for %d %% of the time", busy/nodes))
		if want := max(1, (busy*3/2+nodes-1)/nodes); want*nodes*2 < uint64(s.Granted) {
			advice = append(advice, fmt.Sprintf("--gres=rgpu:%d", want))
		}
	}
	if memory < 50 && one {
		const gib = 1 << 30
		peak := s.Peak / nodes
		advice = append(advice, fmt.Sprintf("--rgpu-mem=%dG", max(1, (peak+peak/4+gib-1)/gib)))
	}
	return text, advice
}

// Duration is d as 0s, 3.2s, 12m03s, 1h02m03s.
func Duration(d time.Duration) string {
	if d <= 0 {
		return "0s"
	}
	if d < 59950*time.Millisecond {
		s := strconv.FormatFloat(max(d.Seconds(), 0.1), 'f', 1, 64)
		return strings.TrimSuffix(s, ".0") + "s"
	}
	n := int64((d + time.Second/2) / time.Second)
	if n < 3600 {
		return fmt.Sprintf("%dm%02ds", n/60, n%60)
	}
	return fmt.Sprintf("%dh%02dm%02ds", n/3600, n%3600/60, n%60)
}

// binary is n bytes with their unit in full: 3.4GiB, 12B.
func binary(n uint64) string {
	if n < 1024 {
		return strconv.FormatUint(n, 10) + "B"
	}
	return form.ShortBytes(n) + "iB"
}
