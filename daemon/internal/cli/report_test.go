package cli

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// reportDaemon knows the reports of one job.
type reportDaemon struct {
	rpc.LocalService
	rpc.JobService
	list []lease.Report
}

func (d *reportDaemon) Report(_ context.Context, _ rpc.Peer, job string) ([]lease.Report, error) {
	switch job {
	case "4711":
		return d.list, nil
	case "1":
		return nil, lease.Errorf(lease.Down, "owner gpu02 does not answer")
	}
	return nil, nil
}

// startReportDaemon returns the socket of a reportDaemon.
func startReportDaemon(t *testing.T, list ...lease.Report) (socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "slu")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket = filepath.Join(dir, "s")
	l, err := rpc.ListenLocal(socket, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	d := &reportDaemon{list: list}
	s := rpc.NewServer(rpc.LocalCreds(), "test")
	rpc.ServeLocal(s, d)
	rpc.ServeJobs(s, d)
	go func(l net.Listener) { _ = s.Serve(l) }(l)
	t.Cleanup(s.Stop)
	return socket
}

func TestReport(t *testing.T) {
	made := time.Now().Add(-time.Hour)
	run := func(n uint64, at time.Duration, reason string) lease.Report {
		return lease.Report{
			Lease: idA[:31] + string(rune('0'+n)), Key: lease.Key{Cluster: "c", Job: "4711", Node: "n1", Incarnation: n}, Owner: "gpu01", UID: 4242424,
			Account: "phys", JobName: "tr\x1b[2Jain", Asked: []lease.Fraction{{Percent: 100}, {Percent: 50, Mem: 20 << 30}},
			Grants: []lease.Grant{{GPU: "GPU-1", Percent: 100, Mem: 140 << 30}, {GPU: "GPU-2", Percent: 50, Mem: 20 << 30}},
			Use:    []lease.Use{{Peak: 3 << 30}, {Peak: 1 << 30}}, Counts: lease.Counts{Calls: 1_200_000, Waits: 12, BytesIn: 5 << 20, Throttle: time.Hour},
			Policy: lease.Fixed, Shares: []lease.Share{{Held: 13 * time.Minute, Waited: 5 * time.Second, Throttled: 1500 * time.Millisecond}, {Throttled: 500 * time.Millisecond, Overruns: 1}},
			Sessions: 3, GPUTime: 723 * time.Second, Made: made.Add(at), Ended: made.Add(at + 10*time.Minute), Reason: reason,
		}
	}
	live := run(2, 30*time.Minute, "")
	live.Failed, live.Failure = 1, "python3 (process 7): killed by signal 9 (killed)"
	live.Ended = time.Time{}
	socket := startReportDaemon(t, live, run(1, 0, "epilog"))
	call := func(args ...string) (string, int) {
		b, err := sluice(append([]string{"report", "--socket", socket}, args...)...).CombinedOutput()
		return string(b), exitStatus(t, err)
	}
	out, status := call("4711")
	for _, w := range []string{"job 4711 (tr?[2Jain) of 4242424, account phys", "100%,50%:20G", "100%:140G,50%:20G", "4G", "12m03s", "2s", "1.2M", "ended: epilog", "lives", "\nlease " + short(idA) + " at gpu01: 1 of 3 sessions failed, the last one of python3 (process 7): killed by signal 9 (killed)\n", "0:10:00", "0:30:0",
		"\nsluice: asked 150% 20480MiB granted 150% 163840MiB peak 4096MiB gpu 12m03s throttled 2s calls 1200000 waits 12 in 5MiB out 0B held 13m00s waited 5s overruns 1 earlier-runs 1 earlier-gpu 12m03s\n", " fixed "} {
		if !strings.Contains(out, w) {
			t.Errorf("report lacks %q:\n%s", w, out)
		}
	}
	if status != 0 || strings.Contains(out, "\x1b") || strings.Index(out, "ended: epilog") > strings.Index(out, "lives") {
		t.Errorf("exit status %d:\n%s", status, out)
	}
	lost := run(3, 0, "the host was silent")
	lost.Lost, lost.Sessions = true, 0
	var text strings.Builder
	if err := printReports(&text, []lease.Report{lost}, time.Now()); err != nil || !strings.Contains(strings.Join(strings.Fields(text.String()), " "), "50%:20G fixed - - - - - - - - - - 0:10:00 ended: the host was silent ") ||
		!strings.Contains(text.String(), " lost 1\nverdict: what the job used is not known: counts were lost with the reboot of gpu01\n") || strings.Contains(text.String(), "unused") {
		t.Errorf("%v:\n%s", err, &text)
	}
	var rs []lease.Report
	if out, _ := call("--json", "4711"); json.Unmarshal([]byte(out), &rs) != nil || len(rs) != 2 || rs[0].GPUTime != 723*time.Second {
		t.Errorf("--json: %s", out)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"1", "2"}, "use sluice report JOB"},
		{[]string{"4711_3"}, "JobIDRaw"},
		{[]string{"9"}, "sacct -j 9"},
		{[]string{"1"}, "gpu02 does not answer"},
	} {
		if out, status := call(c.args...); status != 1 || !strings.Contains(out, c.want) {
			t.Errorf("%q: exit status %d, %s", c.args, status, out)
		}
	}
}
