package faults

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// run is what sacct has of one run of a job.
type run struct {
	job, name, state string
	start, end       time.Time
	submitted        time.Time
	again            bool // the job has had a later run
	units            int  // of the licence
	nodes            string
	tres, comment    string
}

// runs asks sacct for all of them, the requeued ones too.
func (c *chaos) runs() []run {
	c.t.Helper()
	out, err := c.Ctl.Run(c.ctx, lab.Root, "env", "SLURM_TIME_FORMAT=%s", "sacct", "-a", "-D", "-X", "-n", "-P", "-S", "now-2hours",
		"-o", "JobIDRaw,JobName,State,Submit,Start,End,AllocTRES,NodeList,AdminComment")
	if err != nil {
		c.t.Fatal(err)
	}
	var all []run
	for line := range strings.Lines(out) {
		f := strings.SplitN(strings.TrimSpace(line), "|", 9)
		if len(f) < 9 {
			c.t.Fatalf("sacct: %q", line)
		}
		r := run{job: f[0], name: f[1], state: f[2], submitted: unix(f[3]), start: unix(f[4]), end: unix(f[5]), tres: f[6], nodes: f[7], comment: f[8]}
		for tres := range strings.SplitSeq(f[6], ",") {
			if n, ok := strings.CutPrefix(tres, "license/rgpu="); ok {
				r.units, _ = strconv.Atoi(n)
			}
		}
		all = append(all, r)
	}
	last := map[string]time.Time{}
	for _, r := range all {
		if r.submitted.After(last[r.job]) {
			last[r.job] = r.submitted
		}
	}
	for i, r := range all {
		all[i].again = r.submitted.Before(last[r.job])
	}
	return all
}

// reported says whether its AdminComment says what it has used.
func (r run) reported() bool { return strings.Contains(r.comment, "asked ") }

// excused says why a run rightly has no report, "" if it must have one.
func (c *chaos) excused(r run) string {
	switch {
	case r.again:
		// It was requeued as it completed, or after. slurmctld has one AdminComment for all runs of a job and takes the report
		// for the next run, and what is changed in the accounting is the last run's.
		return "requeued after its end"
	case c.inGap(r) && !c.heard(r):
		return "nobody there to write it"
	case c.overwritten(r):
		return "overwritten by Slurm"
	}
	return ""
}

// heard says whether the EpilogSlurmctld of a job's last run came through while slurmctld and the daemon beside it were
// both there. The daemon then writes the report, whatever becomes of them.
func (c *chaos) heard(r run) bool {
	var began, ended time.Time
	for _, e := range c.events(r.job) {
		switch at := unixFloat(e.at); {
		case e.hook != "EpilogSlurmctld" || at.Before(r.end):
		case e.end:
			ended = at
		default:
			began, ended = at, time.Time{}
		}
	}
	return !began.IsZero() && !ended.IsZero() && !slices.ContainsFunc(c.gaps, func(g [2]time.Time) bool {
		return began.Before(g[1]) && ended.After(g[0])
	})
}

// overwritten says whether Slurm has put an older comment in the report's place, see restartReported.
func (c *chaos) overwritten(r run) bool {
	return strings.HasPrefix(r.comment, requeuedFor) && c.anew.After(r.end)
}

func unix(s string) time.Time {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(n, 0)
}

// loan is a lease as its owner's audit log has it.
type loan struct {
	id, owner, job, node string
	gpus                 map[string]int // percent
	from, to             time.Time
}

// loans reads the owners' audit logs.
func (c *chaos) loans() []*loan {
	c.t.Helper()
	var all []*loan
	for _, n := range c.Nodes {
		open := map[string]*loan{}
		files, _ := filepath.Glob(filepath.Join(n.Dir, "log", "audit.log*"))
		slices.Sort(files)
		for _, path := range files {
			f, err := os.Open(path)
			if err != nil {
				c.t.Fatal(err)
			}
			s := bufio.NewScanner(f)
			s.Buffer(nil, 1<<20)
			for s.Scan() {
				var e struct {
					Time              time.Time
					Event, Lease, Key string
					Owner             string
					GPUs              []struct {
						Owner, GPU string
						Percent    int
					}
				}
				if json.Unmarshal(s.Bytes(), &e) != nil || e.Owner != n.Name {
					continue
				}
				switch e.Event {
				case "grant":
					_, rest, _ := strings.Cut(e.Key, "/")
					job, node, _ := strings.Cut(rest, "@")
					l := &loan{id: e.Lease, owner: n.Name, job: job, node: node, gpus: map[string]int{}, from: e.Time}
					for _, g := range e.GPUs {
						if g.Owner == n.Name {
							l.gpus[g.GPU] += g.Percent
						}
					}
					if open[e.Lease] == nil {
						open[e.Lease] = l
						all = append(all, l)
					}
				case "release", "reclaim":
					if l := open[e.Lease]; l != nil && l.to.IsZero() {
						l.to = e.Time
					}
				}
			}
			_ = f.Close()
		}
	}
	return all
}

// addUp compares what the jobs asked for, what Slurm accounted, and what the owners lent.
func (c *chaos) addUp(jobs int) {
	t := c.t
	var runs []run
	// A report is written aside, and again where Slurm does not take it at once.
	if err := lab.Until(c.ctx, 90*time.Second, "every run has its report", func() error {
		runs = c.runs()
		var without []string
		for _, r := range runs {
			if r.state == "COMPLETED" && r.units > 0 && !r.reported() && c.excused(r) == "" {
				without = append(without, r.job)
			}
		}
		if len(without) > 0 {
			return fmt.Errorf("jobs %v have none", without)
		}
		return nil
	}); err != nil {
		t.Errorf("%v", err)
	}
	loans := c.loans()
	byJob := map[string][]*loan{}
	never, lentSeconds := 0, 0.0
	for _, l := range loans {
		byJob[l.job] = append(byJob[l.job], l)
		if l.to.IsZero() {
			never++
			continue
		}
		for _, p := range l.gpus {
			lentSeconds += float64(p) * l.to.Sub(l.from).Seconds()
		}
	}
	if never > 0 {
		t.Errorf("%d of %d leases have no end in the audit logs", never, len(loans))
	}
	c.overlent(loans)

	ids := map[string]bool{}
	billed, whole, reported, missed := 0.0, 0, 0, map[string]int{}
	wholeBilled, wholeLent := 0.0, 0.0
	for _, r := range runs {
		ids[r.job] = true
		var percent, nodes int
		if _, err := fmt.Sscanf(r.name, "c-%d-%d", &percent, &nodes); err != nil {
			t.Errorf("job %s is named %q", r.job, r.name)
			continue
		}
		if !strings.Contains(r.tres, "node=") {
			continue // it was cancelled before it had one
		}
		if r.units != percent*nodes {
			t.Errorf("job %s (%s) asked for %d%% on %d nodes and was charged %d: %s", r.job, r.state, percent, nodes, r.units, r.tres)
		}
		if r.start.IsZero() || r.end.IsZero() {
			// A restart of slurmctld in the midst of a requeue or a node's failure makes Slurm forget.
			if r.state == "COMPLETED" {
				t.Errorf("job %s has no times in the accounting", r.job)
			}
			continue
		}
		billed += float64(r.units) * r.end.Sub(r.start).Seconds()
		if percent == 0 && len(byJob[r.job]) > 0 {
			t.Errorf("job %s asked for nothing and had leases", r.job)
		}
		if r.state != "COMPLETED" || percent == 0 {
			continue
		}
		// A run that came through had its lease on each node from its beginning to its end.
		got, seconds := lentTo(byJob[r.job], r)
		got += c.without(r, percent, byJob[r.job])
		took := r.end.Sub(r.start).Seconds()
		if got != r.units {
			t.Errorf("job %s (%s to %s) ran on %d units and was lent %d", r.job, r.start.Format(time.TimeOnly), r.end.Format(time.TimeOnly), r.units, got)
		}
		// Slurm counts from the allocation, its Prologs included, which wait for daemons that are away and for room.
		if short := float64(r.units)*(took-c.before(r).Seconds()) - seconds; short > 3*float64(r.units) {
			t.Logf("job %s (%s to %s) ran on %d units for %.0f s, which its leases fall short of by %.0f", r.job, r.start.Format(time.TimeOnly), r.end.Format(time.TimeOnly), r.units, took, short)
			for _, e := range c.events(r.job) {
				t.Logf("  %s end %t on %s, restart %s, at %s", e.hook, e.end, e.node, e.restart, unixFloat(e.at).Format(timeMilli))
			}
			for _, l := range byJob[r.job] {
				t.Logf("  lease %s on %s of %s, %s to %s: %v", l.id, l.node, l.owner, l.from.Format(timeMilli), l.to.Format(timeMilli), l.gpus)
			}
		}
		wholeBilled += float64(r.units) * took
		wholeLent += seconds
		whole++
		if r.reported() {
			reported++
		} else if why := c.excused(r); why != "" {
			missed[why]++
		} else {
			t.Logf("job %s, ended at %s, has no report but %q", r.job, r.end.UTC().Format(time.TimeOnly), r.comment)
		}
	}
	t.Logf("%d jobs, %d runs, %d leases; %d runs came through with their fractions, %d of them with a report, without one for a reason: %v", len(ids), len(runs), len(loans), whole, reported, missed)
	t.Logf("percent-seconds: %.0f billed by Slurm, %.0f lent by the owners; of those runs %.0f and %.0f", billed, lentSeconds, wholeBilled, wholeLent)
	if len(ids) < jobs*9/10 {
		t.Errorf("sacct knows %d jobs of %d", len(ids), jobs)
	}
}

const timeMilli = "15:04:05.000"

func unixFloat(at float64) time.Time { return time.UnixMilli(int64(at * 1000)).UTC() }

// before is how long a run's first Prolog took to end, from the allocation on.
func (c *chaos) before(r run) time.Duration {
	for _, e := range c.events(r.job) {
		if at := unixFloat(e.at); e.hook == "Prolog" && e.end && !at.Before(r.start) && at.Before(r.end.Add(time.Second)) {
			return at.Sub(r.start)
		}
	}
	return 0
}

// without are the percent of a run's nodes that rightly had no lease, for nothing of it ever ran there: its batch script
// ended before that node's Prolog, or Slurm has left the Prolog out, see prologLeftOutBySlurm.
func (c *chaos) without(r run, percent int, ls []*loan) (sum int) {
	names, err := c.Scontrol(c.ctx, "show", "hostnames", r.nodes)
	if err != nil {
		c.t.Fatal(err)
	}
	over := r.end.Add(time.Second)
	for _, e := range c.events(r.job) {
		if at := unixFloat(e.at); e.hook == "EpilogSlurmctld" && !e.end && !at.Before(r.start) && at.Before(over) {
			over = at
		}
	}
	for name := range strings.FieldsSeq(names) {
		if slices.ContainsFunc(ls, func(l *loan) bool { return l.node == name && l.during(r) }) {
			continue
		}
		began, ended := false, false
		for _, e := range c.events(r.job) {
			if at := unixFloat(e.at); e.hook == "Prolog" && e.node == name && !at.Before(r.start) && at.Before(over) {
				began, ended = began || !e.end, ended || e.end
			}
		}
		switch n := c.Node(name); {
		case began && !ended:
			c.did("Prolog after the end")
		case !began && reissued(n, r):
			c.did("Prolog left out by Slurm")
		default:
			continue
		}
		sum += percent
	}
	return sum
}

// reissued says whether slurmd took a run's credential for an ended one's that was given anew.
func reissued(n *lab.Node, r run) bool {
	for _, at := range slurmdSaid(n, "reissued job credential for job "+r.job) {
		if !at.Before(r.start) && at.Before(r.end.Add(time.Second)) {
			return true
		}
	}
	return false
}

// slurmdSaid is when slurmd wrote lines that end so.
func slurmdSaid(n *lab.Node, what string) (at []time.Time) {
	b, _ := os.ReadFile(filepath.Join(n.Dir, "log", "slurmd.log"))
	for line := range strings.Lines(string(b)) {
		stamp, text, _ := strings.Cut(strings.TrimSpace(line), "] ")
		if !strings.HasSuffix(text, what) {
			continue
		}
		if x, err := time.ParseInLocation("[2006-01-02T15:04:05.000", stamp, time.Local); err == nil {
			at = append(at, x)
		}
	}
	return at
}

// during says whether a lease was there at some time of a run. Slurm counts whole seconds.
func (l *loan) during(r run) bool {
	return l.from.Before(r.end.Add(time.Second)) && l.to.After(r.start.Add(-50*time.Millisecond))
}

// lentTo is how many percent a run had, and percent-seconds.
func lentTo(ls []*loan, r run) (percent int, seconds float64) {
	byNode := map[string]map[string]int{} // a lease may be of two owners, and a node may have two, of two runs
	for _, l := range ls {
		if !l.during(r) {
			continue
		}
		if byNode[l.node] == nil {
			byNode[l.node] = map[string]int{}
		}
		for _, p := range l.gpus {
			byNode[l.node][l.id] += p
			seconds += float64(p) * l.to.Sub(l.from).Seconds()
		}
	}
	for _, leases := range byNode {
		most := 0
		for _, p := range leases {
			most = max(most, p)
		}
		percent += most
	}
	return percent, seconds
}

// overlent looks that no GPU was ever lent for more than all of it.
func (c *chaos) overlent(loans []*loan) {
	type change struct {
		at time.Time
		by int
	}
	gpus := map[string][]change{}
	for _, l := range loans {
		for g, p := range l.gpus {
			gpus[l.owner+" "+g] = append(gpus[l.owner+" "+g], change{l.from, p}, change{l.to, -p})
		}
	}
	for g, cs := range gpus {
		slices.SortFunc(cs, func(a, b change) int {
			if d := a.at.Compare(b.at); d != 0 {
				return d
			}
			return a.by - b.by
		})
		sum := 0
		for _, x := range cs {
			if sum += x.by; sum > 100 {
				c.t.Errorf("gpu %s was lent for %d%% at %s", g, sum, x.at)
				break
			}
		}
	}
}
