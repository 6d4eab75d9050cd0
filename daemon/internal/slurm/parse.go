package slurm

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Limits of what is believed.
const (
	maxNodes = 1 << 16
	maxItems = 4096
	maxCount = 1 << 32 // Slurm's own counts are 32 bits wide, or 64 for gres
)

// Gres is one request for a generic resource.
type Gres struct {
	Name  string
	Type  string // "" any
	Count uint64
	Bare  bool // the request says no count, which is 1 for Slurm
}

// none is what Slurm prints where there is nothing.
func none(s string) bool { return s == "" || s == "(null)" || s == "N/A" || s == "none" }

// items splits a list at commas that are not in brackets.
func items(s string) []string {
	var out []string
	depth, from := 0, 0
	for i := range len(s) {
		switch s[i] {
		case '[', '(':
			depth++
		case ']', ')':
			depth--
		case ',':
			if depth == 0 {
				out = append(out, s[from:i])
				from = i + 1
			}
		}
	}
	return append(out, s[from:])
}

// ParseGres reads a request for generic resources as any release writes it:
// "gres:rgpu:50", "gres/rgpu:h200:50", "rgpu=50", "rgpu:h200", several with commas. A count
// left out is 1.
func ParseGres(s string) ([]Gres, error) {
	if s = strings.TrimSpace(s); none(s) {
		return nil, nil
	}
	list := items(s)
	if len(list) > maxItems {
		return nil, fmt.Errorf("gres of %d items, and %d is the most", len(list), maxItems)
	}
	var out []Gres
	for _, item := range list {
		text := strings.TrimSpace(item)
		if i := strings.IndexByte(text, '('); i >= 0 { // rgpu:50(S:0-1), as some lists print it
			text = text[:i]
		}
		for _, prefix := range []string{"gres:", "gres/"} {
			text = strings.TrimPrefix(text, prefix)
		}
		if none(text) {
			continue
		}
		f := strings.FieldsFunc(text, func(r rune) bool { return r == ':' || r == '=' || r == '/' })
		if len(f) == 0 || len(f) > 3 || strings.ContainsAny(text, " \t\n,[]()") {
			return nil, fmt.Errorf("gres %q: want NAME, NAME:COUNT or NAME:TYPE:COUNT", item)
		}
		g := Gres{Name: f[0], Count: 1}
		last := f[len(f)-1]
		switch n, isCount := parseCount(last); {
		case len(f) == 1:
			g.Bare = true
		case len(f) == 2 && isCount:
			g.Count = n
		case len(f) == 2 && !startsDigit(last):
			g.Type, g.Bare = last, true
		case len(f) == 3 && isCount:
			g.Type, g.Count = f[1], n
		default:
			return nil, fmt.Errorf("gres %q: %q is no count", item, last)
		}
		out = append(out, g)
	}
	return out, nil
}

func startsDigit(s string) bool {
	return s != "" && s[0] >= '0' && s[0] <= '9' || strings.HasPrefix(s, "-")
}

// parseCount reads Slurm's counts: digits, and K, M, G, T, P for powers of 1024.
func parseCount(s string) (uint64, bool) {
	shift := 0
	if s != "" {
		if i := strings.IndexByte("kmgtp", s[len(s)-1]|0x20); i >= 0 {
			shift, s = 10*(i+1), s[:len(s)-1]
		}
	}
	if s == "" || !startsDigit(s) || s[0] == '-' {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil || n > math.MaxUint64>>shift || n<<shift > maxCount<<shift {
		return 0, false
	}
	return n << shift, true
}

// ParseLicences reads SLURM_JOB_LICENSES or a job's Licenses: "rgpu:100,matlab", also with
// "@SERVER". What is an alternative of several is refused.
func ParseLicences(s string) (Counts, error) {
	out := Counts{}
	if s = strings.TrimSpace(s); none(s) {
		return out, nil
	}
	if strings.ContainsAny(s, "|[]") {
		return nil, fmt.Errorf("licences %q are alternatives; ask for one of them", s)
	}
	list := strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ';' })
	if len(list) > maxItems {
		return nil, fmt.Errorf("%d licences, and %d is the most", len(list), maxItems)
	}
	for _, item := range list {
		name, count := strings.TrimSpace(item), uint64(1)
		if i := strings.LastIndexAny(name, ":="); i >= 0 {
			n, err := strconv.ParseUint(name[i+1:], 10, 64)
			if err != nil || n > maxCount {
				return nil, fmt.Errorf("licence %q: %q is no count", item, name[i+1:])
			}
			name, count = name[:i], n
		}
		if name == "" {
			return nil, fmt.Errorf("licences %q: one has no name", s)
		}
		if out[name] += count; out[name] > maxCount {
			return nil, fmt.Errorf("licence %s: more than %d", name, maxCount)
		}
	}
	return out, nil
}

// ParseHosts expands a list of nodes: "n1,gpu[01-04,7],r[1-2]n[1-3]".
func ParseHosts(s string) ([]string, error) {
	if s = strings.TrimSpace(s); none(s) {
		return nil, nil
	}
	var out []string
	for _, item := range items(s) {
		list, err := expandHosts(item, maxNodes-len(out))
		if err != nil {
			return nil, fmt.Errorf("nodes %q: %w", s, err)
		}
		out = append(out, list...)
	}
	return out, nil
}

// expandHosts expands one name, its last bracket first.
func expandHosts(s string, room int) ([]string, error) {
	open := strings.IndexByte(s, '[')
	if open < 0 {
		if s == "" || strings.ContainsAny(s, "],() \t\n/") {
			return nil, fmt.Errorf("%q is not a name", s)
		}
		if room < 1 {
			return nil, fmt.Errorf("more than %d", maxNodes)
		}
		return []string{s}, nil
	}
	width := strings.IndexByte(s[open:], ']')
	if width < 0 {
		return nil, fmt.Errorf("%q has no ]", s)
	}
	head, inner, tail := s[:open], s[open+1:open+width], s[open+width+1:]
	if strings.ContainsAny(head, "],() \t\n/") {
		return nil, fmt.Errorf("%q is not a name", s)
	}
	ends := []string{""}
	if tail != "" {
		var err error
		if ends, err = expandHosts(tail, room); err != nil {
			return nil, err
		}
	}
	var out []string
	for _, r := range strings.Split(inner, ",") {
		lo, hi, isRange := strings.Cut(r, "-")
		if !isRange {
			hi = lo
		}
		a, errA := strconv.ParseUint(lo, 10, 32)
		b, errB := strconv.ParseUint(hi, 10, 32)
		if errA != nil || errB != nil || a > b || len(lo) > 10 {
			return nil, fmt.Errorf("%q is no range", r)
		}
		if (b-a+1)*uint64(len(ends)) > uint64(max(0, room-len(out))) {
			return nil, fmt.Errorf("more than %d", maxNodes)
		}
		for n := a; n <= b; n++ {
			for _, e := range ends {
				out = append(out, fmt.Sprintf("%s%0*d%s", head, len(lo), n, e))
			}
		}
	}
	return out, nil
}

// fields that squeue is asked for, each with its column of jobFormat.
const (
	fID = iota
	fRestarts
	fState
	fNodes
	fUID
	fGID
	fBatch
	fRequeue
	fPartition
	fLicences
	fPerNode
	fPerJob
	fPerSocket
	fPerTask
	fCount
)

// jobFormat and stateFormat are for squeue -O. "|" ends each field, whatever its length,
// and is in none of them but an AdminComment, which is therefore the last. A job's name, account and other comments
// are not asked for.
const (
	stateFormat = "JobID:|,RestartCnt:|,State:|,NodeList:|"
	jobFormat   = stateFormat + ",UserID:|,GroupID:|,BatchFlag:|,Requeue:|,Partition:|,Licenses:|" +
		",tres-per-node:|,tres-per-job:|,tres-per-socket:|,tres-per-task:|"
	taskFormat    = "JobID:|,ArrayJobID:|,ArrayTaskID:|"
	commentFormat = taskFormat + ",admin_comment:|"
)

// parseState reads the first fields of both formats.
func parseState(f []string) (JobState, error) {
	if _, err := form.ParseJobID(f[fID]); err != nil {
		return JobState{}, fmt.Errorf("squeue: %w", err)
	}
	n, err := strconv.ParseUint(f[fRestarts], 10, 32)
	if err != nil {
		return JobState{}, fmt.Errorf("squeue: job %s: restart count %q", f[fID], f[fRestarts])
	}
	if f[fState] == "" {
		return JobState{}, fmt.Errorf("squeue: job %s has no state", f[fID])
	}
	nodes, err := ParseHosts(f[fNodes])
	if err != nil {
		return JobState{}, fmt.Errorf("squeue: job %s: %w", f[fID], err)
	}
	return JobState{State(f[fState]), uint32(n), nodes}, nil
}

// records are the lines of squeue's answer, cut into so many fields. An answer that is
// not wholly such lines says nothing: neither of the jobs in it nor of those that are
// missing.
func records(text string, fields int) ([][]string, error) {
	var out [][]string
	for line := range strings.Lines(text) {
		whole, ok := strings.CutSuffix(line, "\n")
		if strings.TrimSpace(whole) == "" && ok {
			continue
		}
		f := strings.Split(whole, "|")
		for i := range f {
			f[i] = strings.TrimSpace(f[i])
		}
		// Each field has a bar behind it.
		if !ok || len(f) != fields+1 || f[fields] != "" || !form.JobID(f[fID]).Valid() {
			return nil, fmt.Errorf("squeue: its answer is cut short or damaged, %d fields of %d in %.60q; see that squeue works here", len(f)-1, fields, line)
		}
		out = append(out, f)
	}
	return out, nil
}

// parseJobs reads squeue's answer in stateFormat.
func parseJobs(text string) (map[string]JobState, error) {
	list, err := records(text, fNodes+1)
	if err != nil {
		return nil, err
	}
	out := map[string]JobState{}
	for _, f := range list {
		if out[f[fID]], err = parseState(f); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// oneJob is the record of a job in squeue's answer about it, which may list the tasks of
// an array that have ids of their own besides. slurmctld says by an error that there is no
// such job, so an answer without any line is none.
func oneJob(id, text string, fields int) ([]string, error) {
	list, err := records(text, fields)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("squeue: its answer about job %s is empty; see that squeue works here", id)
	}
	for _, f := range list {
		if f[fID] == id {
			return f, nil
		}
	}
	return nil, fmt.Errorf("job %s: %w", id, ErrGone)
}

// parseJob reads squeue's answer in jobFormat for one job.
func parseJob(id, text string) (Job, error) {
	f, err := oneJob(id, text, fCount)
	if err != nil {
		return Job{}, err
	}
	j := Job{ID: id, Batch: f[fBatch] == "1", Requeue: f[fRequeue] == "1", Partition: f[fPartition]}
	if j.JobState, err = parseState(f); err != nil {
		return Job{}, err
	}
	uid, errU := strconv.ParseUint(f[fUID], 10, 32)
	gid, errG := strconv.ParseUint(f[fGID], 10, 32)
	if errU != nil || errG != nil {
		return Job{}, fmt.Errorf("squeue: job %s: user %q, group %q", id, f[fUID], f[fGID])
	}
	j.UID, j.GID = uint32(uid), uint32(gid)
	if j.Licences, err = ParseLicences(f[fLicences]); err != nil {
		return Job{}, fmt.Errorf("squeue: job %s: %w", id, err)
	}
	if j.Gres, err = ParseGres(f[fPerNode]); err != nil {
		return Job{}, fmt.Errorf("squeue: job %s: %w", id, err)
	}
	for _, other := range f[fPerJob:fCount] {
		if !none(other) {
			j.Others = append(j.Others, other)
		}
	}
	return j, nil
}

// parseStep reads scontrol's answer about one step, a line of KEY=VALUE. About a task of an array 22.05 answers with all steps of the task, and a
// component of a heterogeneous job may have another name there. The step's name, which its user chooses, may have anything in it. The network stands
// behind it, and before what is read here.
func parseStep(id, text string) (Step, error) {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if len(lines) > 1 {
		lines = slices.DeleteFunc(lines, func(l string) bool { return !strings.HasPrefix(l, "StepId="+id+" ") })
	}
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "StepId=") {
		return Step{}, fmt.Errorf("scontrol show step %s: %.60q", id, text)
	}
	line := lines[0]
	var s Step
	var err error
	keys := map[string]string{}
	for _, w := range strings.Fields(line[max(strings.LastIndex(line, " Network="), 0):]) {
		if k, v, ok := strings.Cut(w, "="); ok {
			keys[k] = v
		}
	}
	if s.Gres, err = ParseGres(keys["TresPerNode"]); err != nil {
		return Step{}, fmt.Errorf("scontrol show step %s: %w", id, err)
	}
	for _, k := range []string{"TresPerStep", "TresPerSocket", "TresPerTask"} {
		if v := keys[k]; !none(v) {
			s.Others = append(s.Others, v)
		}
	}
	return s, nil
}

// taskFields are those of taskFormat.
const taskFields = 3

// parseTask reads squeue's answer in taskFormat: 7, or 7_2 for a task of an array.
func parseTask(id, text string) (string, error) {
	f, err := oneJob(id, text, taskFields)
	if err != nil {
		return "", err
	}
	if _, err := strconv.ParseUint(f[2], 10, 32); err != nil || !form.JobID(f[1]).Valid() {
		return id, nil
	}
	return f[1] + "_" + f[2], nil
}

// parseCommented reads squeue's answer in commentFormat: the job's name as parseTask has it, and its AdminComment.
func parseCommented(id, text string) (name, comment string, err error) {
	var tasks strings.Builder // the same answer in taskFormat
	for line := range strings.Lines(text) {
		whole, ended := strings.CutSuffix(line, "|\n")
		f := strings.SplitN(whole, "|", taskFields+1)
		if !ended || len(f) != taskFields+1 || !form.JobID(strings.TrimSpace(f[fID])).Valid() {
			return "", "", fmt.Errorf("squeue: its answer about job %s is cut short, or its AdminComment has several lines and is left alone: %.60q", id, line)
		}
		if strings.TrimSpace(f[fID]) == id {
			comment = strings.TrimSpace(f[taskFields])
		}
		tasks.WriteString(strings.Join(f[:taskFields], "|") + "|\n")
	}
	name, err = parseTask(id, tasks.String())
	return name, comment, err
}

// parseAccounted reads sacct's list of raw and other numbers, with their AdminComments.
func parseAccounted(id, text string) (name, comment string, err error) {
	for line := range strings.Lines(text) {
		if f := strings.SplitN(strings.TrimSpace(line), "|", 3); len(f) == 3 && f[0] == id {
			return f[1], f[2], nil
		}
	}
	return "", "", ErrGone
}

// parseParts reads sacct's list of raw and other numbers. Lines that are no parts of the job are left out.
func parseParts(id, text string) []Part {
	var parts []Part
	number := func(p Part) uint64 { // that of tasks that wait comes last
		n, err := strconv.ParseUint(p.Name[len(id)+1:], 10, 32)
		if err != nil {
			return math.MaxUint64
		}
		return n
	}
	for line := range strings.Lines(text) {
		raw, name, _ := strings.Cut(strings.TrimSpace(line), "|")
		task, ok := strings.CutPrefix(name, id)
		waits := strings.HasPrefix(task, "_[") && strings.HasSuffix(task, "]")
		if ok && form.JobID(raw).Valid() && (waits || IsTask(name) && !form.JobID(name[:len(id)+1]).Valid()) {
			parts = append(parts, Part{raw, name})
		}
	}
	slices.SortStableFunc(parts, func(a, b Part) int { return cmp.Compare(number(a), number(b)) })
	return parts
}

// parseLicenceList reads `scontrol -o show licenses`.
func parseLicenceList(text string) (map[string]Licence, error) {
	out := map[string]Licence{}
	for line := range strings.Lines(text) {
		kv := map[string]string{}
		for _, f := range strings.Fields(line) {
			if k, v, ok := strings.Cut(f, "="); ok {
				kv[k] = v
			}
		}
		name := kv["LicenseName"]
		if name == "" {
			continue // "No licenses configured in Slurm."
		}
		var l Licence
		for k, p := range map[string]*uint64{"Total": &l.Total, "Used": &l.Used, "Free": &l.Free, "Reserved": &l.Reserved} {
			n, err := strconv.ParseUint(kv[k], 10, 64)
			if err != nil && k == "Total" {
				return nil, fmt.Errorf("scontrol show licenses: %s: total %q", name, kv[k])
			}
			*p = n
		}
		out[name] = l
	}
	return out, nil
}

// parseConfig reads `scontrol show config`.
func parseConfig(text string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(text) {
		if k, v, ok := strings.Cut(line, "="); ok {
			if v = strings.TrimSpace(v); none(v) {
				v = ""
			}
			out[strings.TrimSpace(k)] = v
		}
	}
	return out
}
