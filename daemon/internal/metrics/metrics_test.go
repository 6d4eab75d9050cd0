package metrics

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// full is an owner with 8 GPUs, 192 fractions and a session on each.
func full() Source {
	var gpus []lease.GPU
	s := &inventory.Sample{At: time.Now()}
	var leases []lease.Status
	for i := range 8 {
		uuid := fmt.Sprintf("GPU-%d", i)
		gpus = append(gpus, lease.GPU{UUID: uuid, Index: i, Name: "A", Mem: 80 << 30, FreeMem: 8 << 30, FreePercent: 4, Healthy: true, Leases: 24})
		ecc, slow := uint64(i), uint32(89)
		s.GPUs = append(s.GPUs, inventory.Device{UUID: uuid, Total: 80 << 30, Used: 1 << 30,
			Faults: inventory.Faults{Uncorrected: &ecc, SlowdownAt: &slow, Rows: &inventory.Rows{Pending: i == 1, Failed: i == 2}, Slowdown: &inventory.Slowdown{Any: i == 3}}})
	}
	for i := range 192 {
		id := fmt.Sprintf("%032d", i)
		leases = append(leases, lease.Status{Idle: 90 * time.Second,
			Lease: lease.Lease{ID: id, State: lease.Granted, Grants: []lease.Grant{{GPU: gpus[i%8].UUID, Percent: 4, Mem: 3 << 30}},
				Request: lease.Request{Key: lease.Key{Job: strconv.Itoa(i)}, JobName: "bad\xff"}},
			Shares:   []lease.Share{{Due: 400, Held: 2 * time.Second, Lent: time.Millisecond, Turns: 200, Overruns: 1}},
			Use:      []lease.Use{{Granted: 3 << 30, Used: 4 << 30, Peak: 4 << 30}}, // overhead by force
			Sessions: []lease.Session{{ID: "s" + id, Program: "python3", Use: []lease.Use{{Used: 1 << 30}}}},
		})
	}
	return Source{
		Node: "n", Version: "v",
		GPUs:   func() []lease.GPU { return gpus },
		Sample: func() *inventory.Sample { return s },
		Age:    func() (time.Duration, bool, string) { return time.Second, true, "" },
		Leases: func() []lease.Status { return leases },
		Total: func(string) lease.Total {
			return lease.Total{Counts: lease.Counts{Calls: 9, BytesOut: 10, Throttle: time.Second, Cuts: 2, CutTime: 41500 * time.Millisecond, Saved: 77}, Sessions: 5, Failed: 3, GPUTime: 1500 * time.Millisecond}
		},
		Mismatch: func() []Mismatch { return []Mismatch{{"l", "GPU-0", -4096}} },
		Counters: func() []Counter {
			return []Counter{{Name: "things_total", Help: "Things.", Value: 7}, {Name: "things_wrong", Help: "Wrong.", Value: 1, Gauge: true}}
		},
	}
}

func scrape(t testing.TB, addr string) string {
	t.Helper()
	r, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != 200 {
		t.Fatal(r.Status, err, string(b))
	}
	return string(b)
}

func start(t testing.TB, s Source) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, Registry(s), slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

func TestNothingKnownIsLeftOut(t *testing.T) {
	s := full()
	s.Age = func() (time.Duration, bool, string) { return 0, false, "hangs" }
	s.Sample = func() *inventory.Sample { return nil }
	text := scrape(t, start(t, s))
	if !strings.Contains(text, "sluice_nvml_up 0\n") {
		t.Error("a hanging NVML is not told")
	}
	for _, no := range []string{"sluice_nvml_age_seconds ", "sluice_gpu_temperature", "sluice_gpu_utilisation", "sluice_gpu_nvml", "sluice_gpu_ecc", "sluice_gpu_remap", "sluice_gpu_hardware"} {
		if strings.Contains(text, "\n"+no) {
			t.Errorf("%s is exported without being known", no)
		}
	}
}

func TestNoSentinels(t *testing.T) {
	text := scrape(t, start(t, full()))
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") || strings.HasPrefix(line, "go_") {
			continue
		}
		f := strings.Fields(line)
		v, err := strconv.ParseFloat(f[len(f)-1], 64)
		if err != nil || math.IsNaN(v) || v > 1<<62 || v < 0 && !strings.HasPrefix(line, "sluice_lease_memory_mismatch") {
			t.Errorf("%q is no measurement", line)
		}
	}
	for _, want := range []string{
		"sluice_things_total 7", "# TYPE sluice_things_wrong gauge", "sluice_things_wrong 1", `sluice_lease_memory_mismatch_bytes{gpu="GPU-0",lease="l"} -4096`,
		`sluice_lease_memory_free_bytes{gpu="GPU-0",lease="00000000000000000000000000000000"} 0`, `program="python3"`,
		`sluice_lease_share_seconds_total{gpu="GPU-0",kind="held",lease="00000000000000000000000000000000"} 2`, `sluice_lease_due_ratio{gpu="GPU-0",lease="00000000000000000000000000000000"} 0.04`,
		`sluice_lease_turns_total{gpu="GPU-0",lease="00000000000000000000000000000000"} 200`,
		"sluice_gpu_granted_ratio{gpu=\"GPU-3\"} 0.96",
		`sluice_gpu_ecc_uncorrected_errors_total{gpu="GPU-3"} 3`, `sluice_gpu_temperature_slowdown_celsius{gpu="GPU-0"} 89`, `sluice_gpu_remap_pending{gpu="GPU-1"} 1`,
		`sluice_gpu_remap_failed{gpu="GPU-2"} 1`, `sluice_gpu_hardware_slowdown{gpu="GPU-3"} 1`, `sluice_gpu_hardware_slowdown{gpu="GPU-2"} 0`,
		`sluice_lease_gpu_seconds_total{lease="00000000000000000000000000000000"} 1.5`, `sluice_lease_sessions_total{lease="00000000000000000000000000000191"} 5`,
		`sluice_lease_sessions_failed_total{lease="00000000000000000000000000000191"} 3`,
		`sluice_lease_idle_seconds{lease="00000000000000000000000000000000"} 90`,
		`sluice_lease_cuts_total{lease="00000000000000000000000000000000"} 2`, `sluice_lease_cut_seconds_total{lease="00000000000000000000000000000000"} 41.5`,
		`sluice_lease_saved_bytes_total{lease="00000000000000000000000000000000"} 77`, `sluice_session_saved_bytes_total{session="s00000000000000000000000000000000"} 0`,
		`sluice_session_cuts_total{session="s00000000000000000000000000000000"} 0`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is missing", want)
		}
	}
	if strings.Contains(text, "\xff") {
		t.Error("a label that is no UTF-8")
	}
}

// Where a site wants it so, the metrics say how much is used and not by whom.
func TestNameless(t *testing.T) {
	s := full()
	ls := s.Leases()
	for i := range ls {
		ls[i].Request.Key.Job, ls[i].Request.JobName, ls[i].Request.Account, ls[i].Request.UID = "job-4711", "secret", "project", 1234567
		ls[i].Sessions[0].Client = 7654321
	}
	for _, nameless := range []bool{false, true} {
		s.Nameless = nameless
		text := scrape(t, start(t, s))
		for _, word := range []string{"job-4711", "secret", "project", "1234567", "7654321", "python3"} {
			if strings.Contains(text, word) == nameless {
				t.Errorf("nameless %v: %s is there: %v", nameless, word, !nameless)
			}
		}
		if !strings.Contains(text, `policy="`) || !strings.Contains(text, "sluice_session_memory_used_bytes{") {
			t.Errorf("nameless %v: figures are missing", nameless)
		}
	}
}

// TestLabels: each figure has the labels that its description names, and an answer is compressed.
func TestLabels(t *testing.T) {
	s := full()
	seen := map[string]bool{}
	ch := make(chan prometheus.Metric, 1<<16)
	collector{s}.Collect(ch)
	close(ch)
	for m := range ch {
		var out dto.Metric
		if err := m.Write(&out); err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range out.GetLabel() {
			names = append(names, l.GetName())
		}
		if !slices.IsSorted(names) {
			t.Errorf("%s: labels %q are not in order", m.Desc(), names)
		}
		// A Desc tells its labels by its text alone: {name1,name2}, in the order of desc's arguments.
		text := m.Desc().String()
		want := strings.FieldsFunc(text[strings.LastIndex(text, "variableLabels: {")+len("variableLabels: {"):], func(r rune) bool { return r == ',' || r == '}' })
		slices.Sort(want)
		if !slices.Equal(names, want) {
			t.Errorf("%s: labels %q", text, names)
		}
		seen[text] = true
	}
	if len(seen) < 50 {
		t.Errorf("%d kinds of figures", len(seen))
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+start(t, s)+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept-Encoding", "gzip")
	answer, err := http.DefaultTransport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if got := answer.Header.Get("Content-Encoding"); got != "gzip" || answer.StatusCode != http.StatusOK {
		t.Errorf("%s, encoding %q", answer.Status, got)
	}
}

// TestScrapeCost bounds what a scrape allocates, which most of its time is for: a busy machine and the race detector do not change that.
// docs/benchmarks.md has the time that it takes.
func TestScrapeCost(t *testing.T) {
	const scrapes, leases = 10, 192
	addr := start(t, full())
	scrape(t, addr)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	at := time.Now()
	for range scrapes {
		scrape(t, addr)
	}
	took := time.Since(at) / scrapes
	runtime.ReadMemStats(&after)
	objects, bytes := (after.Mallocs-before.Mallocs)/scrapes, (after.TotalAlloc-before.TotalAlloc)/scrapes
	t.Logf("%d objects and %d bytes for a scrape of %d leases, in %v", objects, bytes, leases, took)
	if objects > 400*leases || bytes > 48<<10*leases {
		t.Errorf("a scrape of %d leases allocates %d objects and %d bytes", leases, objects, bytes)
	}
}

func TestIdleConnectionsKeepNobodyOut(t *testing.T) {
	addr := start(t, full())
	for range 200 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	scrape(t, addr)
}
