package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

const (
	idA = "aaaa1111222233334444555566667777"
	idB = "aaaa2111222233334444555566667777"
)

func TestListAndRelease(t *testing.T) {
	d := startDaemon(t)
	d.add(idA, "4711")
	d.add(idB, "4712")
	out, errs, status := d.call("list", "--sessions")
	for _, w := range []string{"LEASE", "aaaa11112222", "4711", "4712", "50%:20G", "gpu01", "3G", "py?[2Jthon", "1:00:0", " CUTS ", "41.5s", " IDLE ", "3:00:05"} {
		if !strings.Contains(out, w) {
			t.Errorf("list lacks %q:\n%s", w, out)
		}
	}
	if status != 0 || errs != "" || strings.Contains(out, "\x1b") {
		t.Errorf("list: exit status %d, stderr %q, stdout %q", status, errs, out)
	}
	var ls []lease.Status
	if out, _, _ = d.call("list", "--json"); json.Unmarshal([]byte(out), &ls) != nil || len(ls) != 2 {
		t.Errorf("list --json: %s", out)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"release"}, "use sluice release LEASE"},
		{[]string{"release", "aaaa"}, "matches 2 leases"},
		{[]string{"release", "4711", "9999"}, `no lease "9999"`},
	} {
		if _, errs, status = d.call(c.args...); status != 1 || !strings.Contains(errs, c.want) {
			t.Errorf("%q: exit status %d, %q", c.args, status, errs)
		}
	}
	if len(d.leases) != 2 {
		t.Fatalf("a release that failed ended a lease: %v", d.released)
	}
	if _, errs, status = d.call("release", "--reason", "down", "4711", idB, idB); status != 0 || len(d.leases) != 0 || d.why(idA) != "down" {
		t.Errorf("release: exit status %d, %q; left %v", status, errs, d.leases)
	}
	if _, errs, status = d.call("release", idA); status != 0 {
		t.Errorf("releasing twice: exit status %d, %q", status, errs)
	}
	d.refuse = lease.Errorf(lease.Denied, "lease is another user's")
	if _, errs, status = d.call("release", idA); status != 1 || !strings.Contains(errs, "ask root") {
		t.Errorf("denied: exit status %d, %q", status, errs)
	}
	if out, _, _ = d.call("list", "--json"); out != "[]\n" {
		t.Errorf("no leases: %q", out)
	}
}

func TestGPUs(t *testing.T) {
	d := startDaemon(t)
	d.pools = []rpc.Pool{{Name: "default", Owners: []rpc.PoolOwner{
		{Name: "gpu01", Inventory: lease.Inventory{Owner: "gpu01", GPUs: []lease.GPU{{Owner: "gpu01", Index: 0, Name: "NVIDIA H200", Mem: 140 << 30, FreeMem: 100 << 30, FreePercent: 70, Healthy: true, Leases: 1},
			{Owner: "gpu01", Index: 1, Name: "NVIDIA H200", Mem: 140 << 30, Why: "Xid 79"},
			{Owner: "gpu01", Index: 2, Name: "NVIDIA H200", Mem: 140 << 30, Healthy: true, Drain: lease.Drain{By: "0@ctl", Since: time.Unix(1.8e9, 0), Reason: "ticket 4711"}}}}},
		{Name: "gpu02", Error: "does not answer in time"}}}}
	out, _, status := d.call("gpus")
	for _, w := range []string{"NVIDIA H200", "140G", "100G", "70%", "unhealthy: Xid 79", "drained since 2027-01-15T08:00:00Z by 0@ctl: ticket 4711", "owner gpu02 of pool default does not answer"} {
		if !strings.Contains(out, w) {
			t.Errorf("gpus lacks %q:\n%s", w, out)
		}
	}
	if status != 0 {
		t.Errorf("exit status %d", status)
	}
	if _, errs, status := d.call("gpus", "--pool", "nope"); status != 1 || !strings.Contains(errs, `pool "nope"`) {
		t.Errorf("unknown pool: exit status %d, %q", status, errs)
	}
	if out, _, _ := d.call("__complete", "run", "--pool", ""); !strings.Contains(out, "default\n") {
		t.Errorf("completion of --pool: %q", out)
	}
}

func TestHealth(t *testing.T) {
	d := startDaemon(t)
	ok, warn, bad := rpc.Check{Name: "ledger", Level: rpc.OK, Text: "writable"}, rpc.Check{Name: "nvml", Level: rpc.Warn, Text: "silent for 40s", Remedy: "look at dmesg"}, rpc.Check{Name: "owner gpu02", Level: rpc.Fail, Text: "down"}
	for _, c := range []struct {
		checks []rpc.Check
		status int
		quiet  string
	}{{[]rpc.Check{ok}, 0, ""}, {[]rpc.Check{warn, ok}, 1, "silent for 40s; look at dmesg"}, {[]rpc.Check{bad, warn, ok}, 2, "owner gpu02"}, {nil, 3, ""}} {
		d.checks = c.checks
		if _, errs, status := d.call("health"); status != c.status {
			t.Errorf("%v: exit status %d, %q", c.checks, status, errs)
		}
		out, _, _ := d.call("health", "--quiet")
		if strings.Contains(out, "writable") || !strings.Contains(out, c.quiet) || c.quiet == "" && out != "" {
			t.Errorf("%v: --quiet says %q", c.checks, out)
		}
	}
	d.kill()
	if _, errs, status := d.call("health"); status != 3 || !strings.Contains(errs, "has stopped") {
		t.Errorf("no daemon: exit status %d, %q", status, errs)
	}
}

func TestExplain(t *testing.T) {
	d := startDaemon(t)
	d.events = []rpc.Event{{Time: time.Unix(1, 0), Event: "grant", Lease: idA, UID: 4242424, GPUs: []string{"GPU-1"}}, {Time: time.Unix(2, 0), Event: "release", Lease: idA, Reason: "epilog"},
		{Time: time.Unix(0, 0), Event: "refuse", Reason: "no room", Times: 21}, {Time: time.Unix(1, 0), Event: "grant", Lease: idA, Key: lease.Key{Node: "node01"}, Grants: []lease.Grant{{Owner: "gpu07", Percent: 60, Mem: 5 << 30}}}}
	out, _, status := d.call("explain", "4711")
	if status != 0 || !strings.Contains(out, "grant") || !strings.Contains(out, "4242424") || strings.Index(out, "grant") > strings.Index(out, "epilog") {
		t.Errorf("exit status %d:\n%s", status, out)
	}
	for _, want := range []string{"(asked 21 times, this is the last answer)", "60%:5G", "gpu07", "node01"} {
		if !strings.Contains(out, want) {
			t.Errorf("explain lacks %q:\n%s", want, out)
		}
	}
	if _, errs, status := d.call("explain", "1"); status != 1 || !strings.Contains(errs, `nothing about job "1"`) {
		t.Errorf("unknown job: exit status %d, %q", status, errs)
	}
}

func TestTop(t *testing.T) {
	d := startDaemon(t)
	d.stats = rpc.Stats{Node: "gpu01", Version: "1", Time: time.Now(), GPUs: []rpc.GPUStats{
		{GPU: lease.GPU{Index: 0, Name: "NVIDIA H200", Mem: 140 << 30, FreePercent: 30, Healthy: true, Leases: 1}, Known: true, Utilisation: 63, MemUsed: 41 << 30, MemTotal: 141 << 30, GrantedMem: 98 << 30, UsedMem: 40 << 30},
		{GPU: lease.GPU{Index: 1, Name: "NVIDIA H200", Mem: 140 << 30, FreePercent: 100, Healthy: true}}},
		Leases: []lease.Status{{Lease: lease.Lease{ID: idA, Request: lease.Request{Key: lease.Key{Job: "4711"}}}, Sessions: []lease.Session{{ID: "s", Program: "python", Counts: lease.Counts{Calls: 100}}}}}}
	out, _, status := d.call("top")
	for _, w := range []string{"2 GPUs, 1 leases, 1 sessions", "63%", "98G", "41G", "70%", "4711", "python"} {
		if !strings.Contains(out, w) {
			t.Errorf("top lacks %q:\n%s", w, out)
		}
	}
	if status != 0 || strings.Contains(out, "\x1b") {
		t.Errorf("top to a pipe: exit status %d, %q", status, out)
	}
	var s rpc.Stats
	if out, _, _ := d.call("top", "--once", "--json"); json.Unmarshal([]byte(out), &s) != nil || len(s.GPUs) != 2 {
		t.Errorf("top --json: %s", out)
	}
	before := d.stats
	after := before
	after.Time = before.Time.Add(2 * time.Second)
	after.Leases = []lease.Status{{Lease: before.Leases[0].Lease, Sessions: []lease.Session{{ID: "s", Counts: lease.Counts{Calls: 1100}}, {ID: "new", Counts: lease.Counts{Calls: 10}}}}}
	if row := topRows(after, &before)[0]; row[12] != "505" || strings.Join(row[4:9], " ") != "best-effort - - - -" {
		t.Errorf("calls/s %s, want 505; %v", row[12], row)
	}
	// Of two GPUs, in two seconds.
	before.Leases[0].Shares = []lease.Share{{Held: time.Second, Waited: time.Second}, {}}
	after.Leases[0].Shares = []lease.Share{{Due: 2500, Held: 1500 * time.Millisecond, Waited: time.Second, Throttled: 300 * time.Millisecond, Overruns: 2}, {Due: 1000, Held: 250 * time.Millisecond, Waited: 20 * time.Millisecond}}
	after.Leases[0].Request.Policy, after.Leases[0].Request.Lend = lease.Fixed, lease.LendYes
	if row := topRows(after, &before)[0]; strings.Join(row[4:9], " ") != "fixed-lend 35.0% 37.5% 1.0% 2" || row[17] != "300ms" {
		t.Errorf("%q", row)
	}
}

// On a terminal top paints until ^C, a restart of the daemon included, and gives
// the cursor back.
func TestTopLive(t *testing.T) {
	d := startDaemon(t)
	d.stats = rpc.Stats{Node: "gpu01", Time: time.Now()}
	ptmx, tty := openPTY(t)
	cmd := d.command("top", "--interval", "100ms")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	tty.Close()
	seen := func(what string) {
		t.Helper()
		var all []byte
		b := make([]byte, 4096)
		for !bytes.Contains(all, []byte(what)) {
			n, err := ptmx.Read(b)
			if err != nil {
				t.Fatalf("%v before %q in %q", err, what, all)
			}
			all = append(all, b[:n]...)
		}
	}
	seen("on gpu01")
	d.kill()
	seen("has stopped")
	d.mu.Lock()
	d.stats.Node = "again"
	d.mu.Unlock()
	d.start()
	seen("on again")
	if _, err := ptmx.Write([]byte{3}); err != nil {
		t.Fatal(err)
	}
	seen(showCursor)
	if got := exitStatus(t, cmd.Wait()); got != 0 {
		t.Fatalf("exit status %d", got)
	}
}

func openPTY(t *testing.T) (ptmx, tty *os.File) {
	t.Helper()
	ptmx, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ptmx.Close() })
	n, err := unix.IoctlGetInt(int(ptmx.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(ptmx.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return ptmx, tty
}

func TestLife(t *testing.T) {
	for s, want := range map[string]time.Duration{"90": 90 * time.Minute, "1:30": 90 * time.Second, "1:30:00": 90 * time.Minute, "1-12": 36 * time.Hour,
		"2-0:30": 48*time.Hour + 30*time.Minute, "1-1:1:1": 25*time.Hour + time.Minute + time.Second, "36h": 36 * time.Hour, "90m": 90 * time.Minute} {
		if got, err := parseLife(s); err != nil || got != want {
			t.Errorf("%q is %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "0", "-1", "1:2:3:4", "x", "0:0", "-5m", "1ns", "99999999999999999999-0"} {
		if got, err := parseLife(s); err == nil {
			t.Errorf("%q was taken as %v", s, got)
		}
	}
}

func TestCA(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"ca", "issue", "--dir", dir, "gpu01"}, 1, "ca"},
		{[]string{"ca", "init", "--dir", dir}, 0, "ca.pem"},
		{[]string{"ca", "init", "--dir", dir}, 1, "exists"},
		{[]string{"ca", "issue", "--dir", dir}, 1, "no node given"},
		{[]string{"ca", "issue", "--dir", dir, "gpu01", "gpu02"}, 0, "gpu02.key"},
		{[]string{"ca", "issue", "--dir", dir, "../x"}, 1, "../x"},
	} {
		out, err := sluice(c.args...).CombinedOutput()
		if got := exitStatus(t, err); got != c.status || !strings.Contains(string(out), c.want) {
			t.Errorf("%q: exit status %d, %q", c.args, got, out)
		}
	}
}

// Every command has a manual page and an example or a description of its own.
func TestMan(t *testing.T) {
	dir := t.TempDir()
	if out, err := sluice("man", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, name := range []string{"sluice", "sluice-run", "sluice-list", "sluice-top", "sluice-gpus", "sluice-release", "sluice-health", "sluice-explain", "sluice-audit", "sluice-bugreport", "sluice-ca-issue", "sluice-completion-bash"} {
		b, err := os.ReadFile(filepath.Join(dir, name+".1"))
		if err != nil || !bytes.Contains(b, []byte(".TH")) {
			t.Errorf("manual page %s: %v", name, err)
		}
		if bytes.Contains(b, []byte(dir)) || bytes.Contains(b, []byte(os.TempDir()+"/slu")) {
			t.Errorf("manual page %s tells of the machine it was made on", name)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out, err := sluice("completion", shell).Output(); err != nil || len(out) < 100 {
			t.Errorf("completion for %s: %v", shell, err)
		}
	}
}

// Every finding that the daemon can have is explained at the place that sluice health names.
func TestHealthPage(t *testing.T) {
	page, err := os.ReadFile("../../../docs/health.md")
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^## (\S+)$`).FindAllStringSubmatch(string(page), -1) {
		explained[m[1]] = false
	}
	name := regexp.MustCompile(`(?:Check\{Name: |[^.]add\((?:rpc\.\w+, )?|Found\()"([a-z]+)[" ]`)
	for _, dir := range []string{".", "../node", "../host", "../jobctld", "../jobnode", "../containers"} {
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			for _, m := range name.FindAllStringSubmatch(string(text), -1) {
				if _, ok := explained[anchor(m[1])]; !ok {
					t.Errorf("docs/health.md has no heading %q, a finding of %s", m[1], f)
				}
				explained[m[1]] = true
			}
		}
	}
	for what, found := range explained {
		if !found {
			t.Errorf("docs/health.md explains %q, which is never found", what)
		}
	}
}

// nodes is a Slurm with one node.
type nodes struct{ state, reason string }

func (n *nodes) NodeState(context.Context, string) (string, string, error) {
	return n.state, n.reason, nil
}
func (n *nodes) DrainNode(_ context.Context, _, reason string) error {
	n.state, n.reason = strings.TrimSuffix(n.state, "+DRAIN")+"+DRAIN", reason
	return nil
}

func (n *nodes) ResumeNode(context.Context, string) error {
	n.state, n.reason = strings.TrimSuffix(n.state, "+DRAIN"), ""
	return nil
}

func TestTellSlurm(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("root only")
	}
	const x3, x4 = "GPU-a (3): Xid ", "GPU-b (4): Xid "
	full := nodeState{found: []rpc.Check{{Name: "disk", Level: rpc.Fail, Node: true, Text: "full", Remedy: "make room"}}}
	bad := nodeState{found: []rpc.Check{full.found[0], {Name: "xid", Level: rpc.Fail, Node: true, Text: x3 + "79", Remedy: "reset"}}}
	unknown := nodeState{unknown: []rpc.Check{{Name: "nvml", Level: rpc.Fail, Unknown: true}}}
	state := func(well ...string) nodeState {
		return nodeState{xids: nodeXids{well: well, forgotten: map[string]string{x4: "the log is short"}}}
	}
	const disk, xid3 = "disk: full; make room (docs/health.md#disk)", "xid: GPU-a (3): Xid 79; reset (docs/health.md#xid)"
	drained := func(reason string) nodes { return nodes{"IDLE+DRAIN", reason} }
	for what, c := range map[string]struct {
		has  nodes
		is   nodeState
		stay bool
		want nodes
	}{
		"all is well":                    {nodes{"IDLE", ""}, nodeState{}, false, nodes{"IDLE", ""}},
		"a finding":                      {nodes{"IDLE", ""}, full, false, drained("sluice: " + disk)},
		"an old reason":                  {nodes{"ALLOCATED", "an old reason"}, full, false, nodes{"ALLOCATED+DRAIN", "sluice: " + disk}},
		"drained for it":                 {drained("sluice: disk: full"), full, false, drained("sluice: disk: full")},
		"mended":                         {drained("sluice: disk: full"), nodeState{}, false, nodes{"IDLE", ""}},
		"mended, --no-resume":            {drained("sluice: disk: full"), nodeState{}, true, drained("sluice: disk: full")},
		"another's drain":                {drained("ticket 4711"), nodeState{}, false, drained("ticket 4711")},
		"another's drain, and a finding": {drained("ticket 4711"), bad, false, drained("ticket 4711")},
		"down":                           {nodes{"DOWN", "Not responding"}, nodeState{}, false, nodes{"DOWN", "Not responding"}},

		"not known":                       {nodes{"IDLE", ""}, unknown, false, nodes{"IDLE", ""}},
		"drained, not known":              {drained("sluice: disk: full"), unknown, false, drained("sluice: disk: full")},
		"drained by another, not known":   {drained("ticket 4711"), unknown, false, drained("ticket 4711")},
		"Xids come first":                 {nodes{"IDLE", ""}, bad, false, drained("sluice: " + xid3 + "; " + disk)},
		"drained, and then an Xid":        {drained("sluice: disk: full"), bad, false, drained("sluice: " + xid3 + "; disk: full")},
		"the Xid is named":                {drained("sluice: " + xid3), bad, false, drained("sluice: " + xid3)},
		"an Xid of another GPU was named": {drained("sluice: xid: " + x4 + "79"), bad, false, drained("sluice: " + xid3 + "; xid: " + x4 + "79")},

		"a short log, and no Xid":      {drained("sluice: disk: full"), state(x3), false, nodes{"IDLE", ""}},
		"a short log":                  {drained("sluice: xid: " + x4 + "79"), state(x3), false, drained("sluice: xid: " + x4 + "79")},
		"the GPU is well":              {drained("sluice: " + xid3), state(x3), false, nodes{"IDLE", ""}},
		"one of two is well":           {drained("sluice: " + xid3 + "; xid: " + x4 + "79"), state(x3), false, drained("sluice: " + xid3 + "; xid: " + x4 + "79")},
		"both are well":                {drained("sluice: " + xid3 + "; xid: " + x4 + "79"), nodeState{xids: nodeXids{well: []string{x3, x4}}}, false, nodes{"IDLE", ""}},
		"a GPU that sluiced lost":      {drained("sluice: xid: GPU-c (5): Xid 79"), state(x3), false, drained("sluice: xid: GPU-c (5): Xid 79")},
		"a GPU beside one that it has": {drained("sluice: " + xid3 + "; xid: GPU-c (5): Xid 79"), state(x3), false, drained("sluice: " + xid3 + "; xid: GPU-c (5): Xid 79")},
		"a node that lends none":       {drained("sluice: " + xid3), nodeState{}, false, drained("sluice: " + xid3)},
		"a reason that may be cut":     {drained("sluice: " + xid3 + strings.Repeat("x", longReason)), state(x3), false, drained("sluice: " + xid3 + strings.Repeat("x", longReason))},
	} {
		has := c.has
		cmd := newHealth()
		cmd.SetContext(context.Background())
		cmd.SetOut(io.Discard)
		if err := (&nodeHealth{drain: true, stay: c.stay}).tellSlurm(cmd, &has, "n1", c.is); err != nil || has != c.want {
			t.Errorf("%s: %+v, want %+v (%v)", what, has, c.want, err)
		}
	}
}
