package firstday

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

const (
	rulesFile = "../../../etc/prometheus/sluice.rules.yaml"
	boardFile = "../../../etc/grafana/sluice.json"
)

// prometheus is the folder of a real Prometheus and its promtool.
func prometheus(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("../../../test/prometheus.sh")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("test/prometheus.sh: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// alerts are series with which each alert is raised at the time given, and one with which it is not.
var alerts = map[string]struct{ at, bad, good string }{
	"SluiceDaemonDown":          {"10m", `up{job="sluice", instance="a"}|0x20`, `up{job="sluice", instance="a"}|1x20`},
	"SluiceNVMLDown":            {"10m", `sluice_nvml_up{instance="a"}|0x20`, `sluice_nvml_up{instance="a"}|1x20`},
	"SluiceGPUIll":              {"15m", `sluice_gpu_healthy{instance="a", gpu="g"}|0x20`, `sluice_gpu_healthy{instance="a", gpu="g"}|0x8 1x12`},
	"SluiceGPUDrainedLong":      {"8d", `sluice_gpu_drained_timestamp_seconds{instance="a", gpu="g", by="0@a", reason="r"}|0x300`, `sluice_gpu_drained_timestamp_seconds{instance="a", gpu="g", by="0@a", reason="r"}|600000x300`},
	"SluiceGPUHot":              {"15m", `sluice_gpu_temperature_celsius{instance="a", gpu="g"}|88x20; sluice_gpu_temperature_slowdown_celsius{instance="a", gpu="g"}|87x20`, `sluice_gpu_temperature_celsius{instance="a", gpu="g"}|92x20; sluice_gpu_temperature_slowdown_celsius{instance="a", gpu="g"}|95x20; sluice_gpu_temperature_celsius{instance="a", gpu="h"}|85x20`},
	"SluiceGPURemap":            {"10m", `sluice_gpu_remap_pending{instance="a", gpu="g"}|0x20; sluice_gpu_remap_failed{instance="a", gpu="g"}|1x20`, `sluice_gpu_remap_pending{instance="a", gpu="g"}|0x20; sluice_gpu_remap_failed{instance="a", gpu="g"}|0x20`},
	"SluiceGPUUncorrected":      {"10m", `sluice_gpu_ecc_uncorrected_errors_total{instance="a", gpu="g"}|0x3 2x17`, `sluice_gpu_ecc_uncorrected_errors_total{instance="a", gpu="g"}|7x20`},
	"SluiceMemoryBeyondAccount": {"5m", `sluice_lease_memory_mismatch_bytes{instance="a", lease="l", gpu="g"}|100e6x20`, `sluice_lease_memory_mismatch_bytes{instance="a", lease="l", gpu="g"}|-100e6x20`},
	"SluiceAuditFails":          {"5m", `sluice_audit_failed_total{instance="a"}|0+1x20`, `sluice_audit_failed_total{instance="a"}|7x20`},
	"SluiceAuditNotForwarded":   {"8m", `sluice_audit_forward_waiting{instance="a"}|3x20; sluice_audit_forward_dropped_total{instance="a"}|0x20`, `sluice_audit_forward_waiting{instance="a"}|0x4 3x2 0x14; sluice_audit_forward_dropped_total{instance="a"}|7x20`},
	"SluiceReloadFailed":        {"10m", `sluice_config_reload_failed{instance="a"}|1x20`, `sluice_config_reload_failed{instance="a"}|0x20`},
	"SluiceVersionsDiffer":      {"2h", `sluice_build_info{instance="a", version="1"}|1x200; sluice_build_info{instance="b", version="2"}|1x200`, `sluice_build_info{instance="a", version="1"}|1x200; sluice_build_info{instance="b", version="1"}|1x200`},
	"SluiceJobsRefused":         {"40m", `sluice_jobs_refused_total{instance="a"}|0+1x60`, `sluice_jobs_refused_total{instance="a"}|0x20 1x40`},
	"SluiceJobsRequeued":        {"2h", `sluice_jobs_requeued_total{instance="a"}|0+1x200`, `sluice_jobs_requeued_total{instance="a"}|0x60 1x140`},
	"SluiceStrayLeases":         {"2h", `sluice_jobs_stray_total{instance="a"}|0+1x200`, `sluice_jobs_stray_total{instance="a"}|9x200`},
	"SluiceLeasesReclaimed":     {"2h", `sluice_owner_reclaimed_total{instance="a"}|0+1x200`, `sluice_owner_reclaimed_total{instance="a"}|9x200`},
	"SluiceOverruns":            {"30m", `sluice_owner_overruns_total{instance="a"}|0+2x60`, `sluice_owner_overruns_total{instance="a"}|9x60`},
	"SluicePoolFull":            {"2d", `sluice_gpu_granted_ratio{instance="a", gpu="g"}|1x300`, `sluice_gpu_granted_ratio{instance="a", gpu="g"}|0.5x300`},
}

// TestRules: promtool takes the rules; each alert is raised by what it is for, and not otherwise; and what it names is explained.
func TestRules(t *testing.T) {
	t.Parallel()
	bin := prometheus(t)
	promtool := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(filepath.Join(bin, "promtool"), args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	promtool("check", "rules", rulesFile)
	text, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	tests := map[string]*strings.Builder{} // by the interval of samples: an alert of days has few
	for _, every := range []string{"1m", "1h"} {
		tests[every] = &strings.Builder{}
		fmt.Fprintf(tests[every], "rule_files: [%s]\nevaluation_interval: %s\ntests:\n", rules, every)
	}
	for _, m := range regexp.MustCompile(`(?m)^ +- alert: (\w+)$`).FindAllStringSubmatch(string(text), -1) {
		names = append(names, m[1])
		a, ok := alerts[m[1]]
		if !ok {
			t.Errorf("alert %s has no test", m[1])
			continue
		}
		every := "1m"
		if strings.HasSuffix(a.at, "d") {
			every = "1h"
		}
		b := tests[every]
		for _, x := range []struct{ series, want string }{{a.bad, "> 0"}, {a.good, ""}} {
			fmt.Fprintf(b, "  - interval: %s\n    input_series:\n", every)
			for s := range strings.SplitSeq(x.series, "; ") {
				name, values, _ := strings.Cut(s, "|")
				fmt.Fprintf(b, "      - {series: '%s', values: '%s'}\n", name, values)
			}
			samples := "[]"
			if x.want != "" {
				samples = "[{labels: '{}', value: 1}]"
			}
			fmt.Fprintf(b, "    promql_expr_test:\n      - {expr: 'sum(ALERTS{alertname=\"%s\", alertstate=\"firing\"}) > bool 0', eval_time: %s, exp_samples: %s}\n", m[1], a.at, samples)
		}
	}
	for every, b := range tests {
		file := filepath.Join(t.TempDir(), every+".yaml")
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		promtool("test", "rules", file)
	}
	if len(names) != len(alerts) {
		t.Errorf("%d alerts, and tests of %d", len(names), len(alerts))
	}
	runbooks := regexp.MustCompile(`runbook_url: (\S+)`).FindAllStringSubmatch(string(text), -1)
	if len(runbooks) != len(alerts) {
		t.Errorf("%d alerts, and %d runbooks", len(alerts), len(runbooks))
	}
	for _, m := range runbooks {
		place, ok := strings.CutPrefix(m[1], "https://github.com/sluice-hpc/sluice/blob/main/")
		file, heading, _ := strings.Cut(place, "#")
		page, err := os.ReadFile(filepath.Join("../../..", file))
		if !ok || err != nil || !slices.Contains(headings(string(page)), heading) {
			t.Errorf("%s is no heading of a page of ours (%v)", m[1], err)
		}
	}
}

// headings are the anchors of a page.
func headings(page string) []string {
	var out []string
	for _, m := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(page, -1) {
		s := regexp.MustCompile(`[^a-z0-9 _-]`).ReplaceAllString(strings.ToLower(m[1]), "")
		out = append(out, strings.ReplaceAll(s, " ", "-"))
	}
	return out
}

// TestBoard: a real Prometheus scrapes the daemons of a site where a job computes. It answers each query of the board, and
// evaluates each rule.
func TestBoard(t *testing.T) {
	t.Parallel()
	bin := prometheus(t)
	r := newRig(t).begin(t)
	id := ""
	submit := func() {
		var err error
		id, err = r.Sbatch(r.ctx, lab.Alice, r.Built("test/cuda-"+r.Options.CUDA+"/steady")+" 60", "--gres=rgpu:50", "--nodelist="+r.job.Name)
		r.must(err)
	}
	submit()
	if _, err := r.WaitJob(r.ctx, id, 20*time.Second, "RUNNING"); err != nil {
		t.Fatal(err)
	}
	var targets []string
	for _, n := range []*lab.Node{r.Ctl, r.own, r.job} {
		yaml, err := os.ReadFile(filepath.Join(n.Dir, "etc/sluice.yaml"))
		r.must(err)
		targets = append(targets, fmt.Sprintf("%q", regexp.MustCompile(`metrics: "([^"]+)"`).FindStringSubmatch(string(yaml))[1]))
	}
	rules, err := os.ReadFile(rulesFile)
	r.must(err)
	r.must(os.WriteFile(filepath.Join(r.dir, "sluice.rules.yaml"), rules, 0o644))
	scrape, err := os.ReadFile("../../../etc/prometheus/scrape.yaml")
	r.must(err)
	conf := strings.NewReplacer("/etc/prometheus/sluice.rules.yaml", filepath.Join(r.dir, "sluice.rules.yaml"), "scrape_interval: 15s", "scrape_interval: 1s").Replace(string(scrape))
	conf = "global: {evaluation_interval: 1s}\n" + regexp.MustCompile(`targets: \[.*\]`).ReplaceAllString(conf, "targets: ["+strings.Join(targets, ", ")+"]")
	file := filepath.Join(r.dir, "prometheus.yml")
	r.must(os.WriteFile(file, []byte(conf), 0o644))
	if out, err := exec.Command(filepath.Join(bin, "promtool"), "check", "config", file).CombinedOutput(); err != nil {
		t.Fatalf("promtool check config: %v\n%s\n%s", err, out, conf)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	addr := l.Addr().String()
	r.must(l.Close())
	cmd := exec.CommandContext(r.ctx, filepath.Join(bin, "prometheus"), "--config.file="+file, "--storage.tsdb.path="+filepath.Join(r.dir, "tsdb"), "--web.listen-address="+addr, "--log.level=warn")
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	r.must(cmd.Start())
	r.undo(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	ask := func(path string, v any) error {
		q, err := (&http.Client{Timeout: 5 * time.Second}).Get("http://" + addr + path)
		if err != nil {
			return err
		}
		defer q.Body.Close()
		text, err := io.ReadAll(q.Body)
		if err == nil && q.StatusCode != http.StatusOK {
			err = errors.New(string(text))
		}
		if err != nil {
			return err
		}
		return json.Unmarshal(text, v)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	text, err := os.ReadFile(boardFile)
	r.must(err)
	r.must(json.Unmarshal(text, &board))
	waiting := map[string]string{} // query: its panel
	for _, p := range board.Panels {
		for _, g := range p.Targets {
			waiting[strings.NewReplacer("$__rate_interval", "10s", "$node", ".*").Replace(g.Expr)] = p.Title
		}
	}
	queries := len(waiting)
	again := 0
	_ = lab.Until(r.ctx, time.Minute, "an answer to each query", func() error {
		// On a busy machine slurmstepd of 22.05 has been seen not to find the cgroup that it had just made, and to end the job at once.
		if out := r.Output(lab.Alice, id); strings.Contains(out, "_cgroup_procs_check: failed") && again < 3 {
			again++
			t.Logf("job %s has ended, another one is submitted: %s", id, out)
			submit()
		}
		for expr := range waiting {
			var a struct {
				Data struct{ Result []any }
			}
			if ask("/api/v1/query?query="+url.QueryEscape(expr), &a) == nil && len(a.Data.Result) > 0 {
				delete(waiting, expr)
			}
		}
		if len(waiting) > 0 {
			return fmt.Errorf("%d are not answered", len(waiting))
		}
		return nil
	})
	if len(waiting) > 0 {
		j, _ := r.Job(r.ctx, id)
		t.Logf("the job is %s: %s", j["JobState"], r.Output(lab.Alice, id))
	}
	for expr, panel := range waiting {
		t.Errorf("panel %s: nothing answers %s", panel, expr)
	}
	if queries < 30 {
		t.Errorf("the board has %d queries", queries)
	}
	var got struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError, State string }
			}
		}
	}
	r.must(ask("/api/v1/rules", &got))
	n := 0
	for _, g := range got.Data.Groups {
		for _, x := range g.Rules {
			n++
			if x.Health != "ok" || x.State != "inactive" {
				t.Errorf("rule %s of a good site: %s, %s %s", x.Name, x.State, x.Health, x.LastError)
			}
		}
	}
	if n != len(alerts) {
		t.Errorf("%d rules are evaluated, want %d\n%s", n, len(alerts), said.String())
	}
	// A daemon that ends is seen.
	r.must(r.job.Stop("sluiced"))
	if err := lab.Until(r.ctx, 20*time.Second, "the alert", func() error {
		r.must(ask("/api/v1/rules", &got))
		for _, x := range got.Data.Groups[0].Rules {
			if x.Name == "SluiceDaemonDown" && x.State == "pending" {
				return nil
			}
		}
		return errors.New("no alert is pending")
	}); err != nil {
		t.Error(err)
	}
	r.must(r.job.StartSluiced(r.ctx))
	r.on(r.Ctl, "scancel", id)
}
