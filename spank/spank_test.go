package spank_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/internal/form/formtest"
	"github.com/sluice-hpc/sluice/spank"
	"github.com/sluice-hpc/sluice/spank/options"
)

const (
	job   = 4711
	batch = 0xfffffffb
)

// daemon answers at a socket with what say gives for the request, and closes.
func daemon(t testing.TB, say func(request string, c net.Conn)) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "slu")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "job.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 256)
				n, _ := c.Read(b)
				say(string(b[:n]), c)
			}()
		}
	}()
	return path
}

func says(text string) func(string, net.Conn) {
	return func(_ string, c net.Conn) { _, _ = io.WriteString(c, text) }
}

func ok(body string) string { return fmt.Sprintf("ok %d\n%s", len(body), body) }

// TestBind: the tasks of a node share the GPUs of its lease out, or those of its step, if that was asked for.
func TestBind(t *testing.T) {
	const untouched = "7"
	for _, c := range []struct {
		gpus        string
		tasks       int
		step        uint32
		option, env string // of the step
		jobs        string // what the job asked for
		want        string // of each task, separated by spaces
		own         string // the step's own GPUs
	}{
		{"2", 2, 0, "task", "", "", "0 1", ""},
		{"4", 2, 0, "task", "", "", "0,1 2,3", ""},
		{"2", 4, 0, "task", "", "", "0 0 1 1", ""},
		{"3", 2, 0, "task", "", "", "0 1,2", ""},
		{"1", 3, 0, "task", "", "", "0 0 0", ""},
		{"16", 1, 0, "task", "", "", "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15", ""},
		{"2", 2, 0, "", "task", "", "0 1", ""},
		{"2", 2, 0, "", "", "task", "0 1", ""},
		{"2", 2, 0, "all", "", "task", "7 7", ""},
		{"2", 2, 0, "", "all", "task", "7 7", ""},
		{"2", 2, 0, "task", "", "all", "0 1", ""},
		{"2", 2, 0, "task", "all", "task", "7 7", ""},
		{"2", 2, 0, "", "nonsense", "task", "0 1", ""},
		{"2", 2, 0, "", "", "", "7 7", ""},
		{"", 2, 0, "task", "", "", "7 7", ""},
		{"17", 1, 0, "task", "", "", "7", ""},
		{"2x", 1, 0, "task", "", "", "7", ""},
		{"-1", 1, 0, "task", "", "", "7", ""},
		{"2", 1, batch, "task", "", "task", "7", ""},
		{"2", 1, 0xfffffffa, "task", "", "task", "7", ""},
		{"4", 2, 0, "task", "", "", "1 3", "1,3"},
		{"4", 1, 0, "task", "", "", "2", "2"},
		{"4", 2, 0, "task", "", "", "2 2", "2"},
		{"4", 3, 0, "task", "", "", "0 1 3", "0,1,3"},
		{"16", 1, 0, "task", "", "", "10,11,12,13,14,15", "10,11,12,13,14,15"},
		{"4", 2, 0, "", "", "", "7 7", "1,3"},
		{"4", 2, 0, "task", "", "", "7 7", "1,4"},
		{"4", 2, 0, "task", "", "", "7 7", "1,,3"},
		{"2", 2, 0, "task", "", "", "7 7", "0,1,0"},
		{"4", 2, 0, "task", "", "", "7 7", "1;3"},
		{"", 2, 0, "task", "", "", "7 7", "0,1"},
	} {
		var have []string
		for task := range c.tasks {
			p, _ := spank.Start(spank.Remote, job, c.step, task, "socket="+daemon(t, says("none\n")))
			p.Tasks(c.tasks)
			for name, value := range map[string]string{"SLUICE_GPUS": c.gpus, "SLURM_RGPU_BIND": c.env, "SLUICE_BIND": c.jobs, "SLUICE_STEP_DEVICES": c.own, "CUDA_VISIBLE_DEVICES": untouched} {
				if value != "" {
					p.Setenv(name, value)
				}
			}
			if c.option != "" {
				if rc := p.Option("rgpu-bind", c.option, false, true); rc != 0 {
					t.Fatal(rc)
				}
			}
			if p.UserInit() != 0 || p.TaskInit() != 0 {
				t.Fatalf("%+v: task %d fails: %s", c, task, p.Log())
			}
			have = append(have, p.Getenv("CUDA_VISIBLE_DEVICES"))
		}
		if got := strings.Join(have, " "); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
	// A step may be given it, without a word, and its option overrides its variable.
	t.Setenv("SLURM_JOB_ID", "1")
	t.Setenv("SLURM_RGPU_BIND", "all")
	p, _ := spank.Start(spank.Local, 0, 0, 0)
	if p.InitPostOpt() != 0 || p.OwnEnv("SLURM_RGPU_BIND") != "all" {
		t.Errorf("the variable alone is %q", p.OwnEnv("SLURM_RGPU_BIND"))
	}
	if p.Option("rgpu-bind", "task", false, false) != 0 || p.InitPostOpt() != 0 || p.Log() != "" || p.OwnEnv("SLURM_RGPU_BIND") != "" {
		t.Errorf("for a step: %q, %s", p.OwnEnv("SLURM_RGPU_BIND"), p.Log())
	}
}

func TestVersion(t *testing.T) {
	if major, minor := spank.Version(); major != 24 || minor != 11 {
		t.Errorf("in a Slurm of API 42 the plug-in is of %d.%02d", major, minor)
	}
}

func TestSettings(t *testing.T) {
	long := "/" + strings.Repeat("x", 107)
	for _, c := range []struct {
		args             string
		socket, complain string
	}{
		{"", "/run/sluice/job.sock", ""},
		{"socket=/a/b", "/a/b", ""},
		{"socket=/a/b frobnicate", "/a/b", "unknown argument frobnicate"},
		{"socket=a/b", "/run/sluice/job.sock", "absolute path of at most 107 bytes; using /run/sluice/job.sock"},
		{"socket=" + long, "/run/sluice/job.sock", "absolute path"},
		{"socket=" + long[:107], long[:107], ""},
	} {
		socket, log := spank.Socket(strings.Fields(c.args)...)
		if socket != c.socket || !strings.Contains(log, c.complain) || c.complain == "" && log != "" {
			t.Errorf("%q: socket %s, said %q", c.args, socket, log)
		}
	}
	// Wrong arguments disturb no user, and nothing fails.
	for _, where := range []spank.Context{spank.Local, spank.Allocator, spank.Remote, spank.Slurmd, spank.JobScript} {
		if _, rc := spank.Start(where, job, 0, 0, "nonsense", "socket="); rc != 0 {
			t.Errorf("context %d: init answers %d", where, rc)
		}
	}
}

func TestOptions(t *testing.T) {
	if os.Getenv("SLURM_JOB_ID") != "" { // Setenv so that it is put back
		t.Setenv("SLURM_JOB_ID", "")
		os.Unsetenv("SLURM_JOB_ID")
	}
	for _, where := range []spank.Context{spank.Local, spank.Allocator} {
		p, _ := spank.Start(where, 0, 0, 0)
		for name, value := range map[string]string{"rgpu-mem": "020g", "rgpu-policy": "equal", "rgpu-pool": "a100.big"} {
			if rc := p.Option(name, value, false, false); rc != 0 {
				t.Errorf("--%s=%s: %d, %s", name, value, rc, p.Log())
			}
		}
		if rc := p.Option("rgpu-spread", "", true, false); rc != 0 {
			t.Errorf("--rgpu-spread: %d, %s", rc, p.Log())
		}
		if rc := p.InitPostOpt(); rc != 0 || p.Log() != "" {
			t.Errorf("init_post_opt: %d, %q", rc, p.Log())
		}
		for name, want := range map[string]string{"RGPU_MEM": "20G", "RGPU_POLICY": "equal", "RGPU_POOL": "a100.big", "RGPU_SPREAD": "1", "RGPU_REPORT": ""} {
			if have := p.Control(name); have != want {
				t.Errorf("context %d: %s is %q, want %q", where, name, have, want)
			}
		}
	}
	formtest.Each(t, "sizes.txt", func(value, want string) {
		p, _ := spank.Start(spank.Allocator, 0, 0, 0)
		rc := p.Option("rgpu-mem", value, false, false)
		if want == "-" {
			if rc != -1 {
				t.Errorf("--rgpu-mem=%s is taken", value)
			}
			return
		}
		// What is passed on is another form of the same size, for which the others have it.
		p.InitPostOpt()
		if n, ok := options.MiB(p.Control("RGPU_MEM")); rc != 0 || !ok || fmt.Sprint(n) != want {
			t.Errorf("--rgpu-mem=%s: %d, passed on as %q; want %s MiB", value, rc, p.Control("RGPU_MEM"), want)
		}
	})
	formtest.Each(t, "times.txt", func(value, want string) {
		p, _ := spank.Start(spank.Allocator, 0, 0, 0)
		rc := p.Option("rgpu-grace", value, false, false)
		p.InitPostOpt()
		if have := p.Control("RGPU_GRACE"); want == "-" && rc != -1 || want != "-" && (rc != 0 || have != value) {
			t.Errorf("--rgpu-grace=%s: %d, passed on as %q; want %s s", value, rc, have, want)
		}
	})
	p, _ := spank.Start(spank.Allocator, 0, 0, 0)
	if rc := p.Option("rgpu-mem", "1M", false, false); rc != -1 || p.Log() != "sluice: --rgpu-mem=1M: want a whole number with M, G or T behind it (powers of 1024) from 2M to 16T, as 20G\n" {
		t.Errorf("--rgpu-mem=1M: %d, %q", rc, p.Log())
	}
	p.Option("rgpu-mem", "2M", false, false)
	p.Full()
	if rc := p.InitPostOpt(); rc != -1 || !strings.Contains(p.Log(), "Slurm cannot pass it on") {
		t.Errorf("an option that is lost: %d, %q", rc, p.Log())
	}
	// Too late to refuse: the daemon looks at it again.
	p, _ = spank.Start(spank.Remote, job, 0, 0)
	if rc := p.Option("rgpu-mem", "1M", false, true); rc != 0 || p.Log() != "" {
		t.Errorf("--rgpu-mem=1M in slurmstepd: %d, %q", rc, p.Log())
	}
}

// Jobs that are submitted within a job do not inherit its options, which Slurm calls back
// for before those that were given.
func TestInheritedOptions(t *testing.T) {
	t.Setenv("SLURM_JOB_ID", "4711")
	t.Setenv("SLURM_SPANK__SLURM_SPANK_OPTION_sluice_rgpu_mem", "20g")
	t.Setenv("SLURM_SPANK__SLURM_SPANK_OPTION_sluice_rgpu_spread", "(null)")
	p, _ := spank.Start(spank.Allocator, 0, 0, 0)
	p.Option("rgpu-mem", "20g", false, false)
	p.Option("rgpu-spread", "(null)", false, false)
	if rc := p.InitPostOpt(); rc != 0 || p.Control("RGPU_MEM") != "" || p.Control("RGPU_SPREAD") != "" {
		t.Errorf("inherited: %d, %q %q", rc, p.Control("RGPU_MEM"), p.Control("RGPU_SPREAD"))
	}
	p.Option("rgpu-mem", "20g", false, false)
	p.Option("rgpu-policy", "fixed", false, false)
	if rc := p.InitPostOpt(); rc != 0 || p.Control("RGPU_MEM") != "20G" || p.Control("RGPU_SPREAD") != "" || p.Control("RGPU_POLICY") != "fixed" {
		t.Errorf("given: %d, %q %q %q", rc, p.Control("RGPU_MEM"), p.Control("RGPU_SPREAD"), p.Control("RGPU_POLICY"))
	}
	// A step says of what was given that it comes too late.
	p, _ = spank.Start(spank.Local, 0, 0, 0)
	p.Option("rgpu-mem", "20g", false, false)
	if rc := p.InitPostOpt(); rc != 0 || p.Log() != "" || p.Control("RGPU_MEM") != "" {
		t.Errorf("a step: %d, %q", rc, p.Log())
	}
	p.Option("rgpu-policy", "equal", false, false)
	if rc := p.InitPostOpt(); rc != 0 || p.Control("RGPU_POLICY") != "" || p.Log() != "sluice: --rgpu-policy has no effect on a step: its job has its lease already; give the option to sbatch or salloc\n" {
		t.Errorf("a step's own: %d, %q", rc, p.Log())
	}
}

// srun tells slurmstepd that the step may have a gres of its own, and slurmstepd the daemon.
func TestStepGres(t *testing.T) {
	t.Setenv("SLURM_JOB_ID", "4711")
	for _, c := range []struct{ env, mem, want string }{{"", "", ""}, {"none", "", "gres"}, {"rgpu:10", "5g", "gres:5G"}, {"", "5G", "gres:5G"}} {
		t.Setenv("SLURM_RGPU_STEP", "gres:7G") // an outer step's
		t.Setenv("SLURM_STEP_GRES", c.env)
		if c.env == "" {
			os.Unsetenv("SLURM_STEP_GRES")
		}
		p, _ := spank.Start(spank.Local, 0, 0, 0)
		if c.mem != "" && p.Option("rgpu-mem", c.mem, false, false) != 0 {
			t.Fatal(p.Log())
		}
		if rc := p.InitPostOpt(); rc != 0 || p.Log() != "" || p.OwnEnv("SLURM_RGPU_STEP") != c.want {
			t.Errorf("%+v: %d, %q, %q", c, rc, p.OwnEnv("SLURM_RGPU_STEP"), p.Log())
		}
	}
	asked := make(chan string, 1)
	path := daemon(t, func(request string, c net.Conn) {
		asked <- request
		_, _ = io.WriteString(c, "none\n")
	})
	for _, c := range []struct {
		step      uint32
		env, want string
	}{
		{3, "", "SLUICE-J 1 env 4711 3\n"},
		{3, "gres", "SLUICE-J 1 env 4711 3 gres\n"},
		{3, "gres:5g", "SLUICE-J 1 env 4711 3 gres mem=5G\n"},
		{3, "gres:5g\nx", "SLUICE-J 1 env 4711 3 gres\n"},
		{3, "gres:" + strings.Repeat("9", 200), "SLUICE-J 1 env 4711 3\n"},
		{3, "x", "SLUICE-J 1 env 4711 3\n"},
		{batch, "gres", "SLUICE-J 1 env 4711 4294967291\n"},
	} {
		p, _ := spank.Start(spank.Remote, job, c.step, 0, "socket="+path)
		if c.env != "" {
			p.Setenv("SLURM_RGPU_STEP", c.env)
		}
		if rc := p.UserInit(); rc != 0 || p.Getenv("SLURM_RGPU_STEP") != "" {
			t.Errorf("%+v: %d, %q", c, rc, p.Getenv("SLURM_RGPU_STEP"))
		}
		if r := <-asked; r != c.want {
			t.Errorf("%+v: request %q", c, r)
		}
	}
}

// What was not given on the command line or in the script may stand in the environment. Slurm ignores that an optional plug-in fails, so a bad
// value there goes to slurmctld, which refuses it (prolog/sluice.lua), together with all others.
func TestOptionVariables(t *testing.T) {
	t.Setenv("SBATCH_RGPU_MEM", "20g")
	t.Setenv("SBATCH_RGPU_POLICY", "fixed")
	t.Setenv("SBATCH_RGPU_SPREAD", "yes")
	t.Setenv("SBATCH_RGPU_REPORT", "0")
	t.Setenv("SLURM_RGPU_MEM", "1G")
	p, _ := spank.Start(spank.Allocator, 0, 0, 0)
	p.Option("rgpu-policy", "equal", false, false)
	if rc := p.InitPostOpt(); rc != 0 || p.Log() != "" {
		t.Errorf("%d, %q", rc, p.Log())
	}
	for name, want := range map[string]string{"RGPU_MEM": "20G", "RGPU_POLICY": "equal", "RGPU_SPREAD": "1", "RGPU_REPORT": "", "RGPU_POOL": ""} {
		if have := p.Control(name); have != want {
			t.Errorf("%s is %q, want %q", name, have, want)
		}
	}
	p, _ = spank.Start(spank.Local, 0, 0, 0) // srun outside of a job
	if rc := p.InitPostOpt(); rc != 0 || p.Control("RGPU_MEM") != "1G" || p.Control("RGPU_POLICY") != "" {
		t.Errorf("srun: %d, %q %q", rc, p.Control("RGPU_MEM"), p.Control("RGPU_POLICY"))
	}
	t.Setenv("SBATCH_RGPU_MEM", "2.5G")
	p, _ = spank.Start(spank.Allocator, 0, 0, 0)
	if rc := p.InitPostOpt(); rc != 0 || p.Control("RGPU_MEM") != "2.5G" || p.Control("RGPU_POLICY") != "fixed" || !strings.HasPrefix(p.Log(), "sluice: SBATCH_RGPU_MEM=2.5G: want a whole number") {
		t.Errorf("a bad value: %d, %q, %q and %q", rc, p.Log(), p.Control("RGPU_MEM"), p.Control("RGPU_POLICY"))
	}
	t.Setenv("SBATCH_RGPU_MEM", strings.Repeat("x", 200))
	p, _ = spank.Start(spank.Allocator, 0, 0, 0)
	if rc := p.InitPostOpt(); rc != 0 || p.Control("RGPU_MEM") != strings.Repeat("x", 79) {
		t.Errorf("a long bad value: %d, %q", rc, p.Control("RGPU_MEM"))
	}
	// Of a step only SLURM_RGPU_BIND counts.
	t.Setenv("SLURM_JOB_ID", "7")
	t.Setenv("SLURM_RGPU_MEM", "2.5G")
	t.Setenv("SLURM_RGPU_BIND", "tasks")
	p, _ = spank.Start(spank.Local, 0, 0, 0)
	if rc := p.InitPostOpt(); rc != 0 || p.Log() != "sluice: SLURM_RGPU_BIND=tasks: want one of all, task\n" {
		t.Errorf("a step: %d, %q", rc, p.Log())
	}
}

func TestEnvironment(t *testing.T) {
	asked := make(chan string, 1)
	path := daemon(t, func(request string, c net.Conn) {
		asked <- request
		_, _ = io.WriteString(c, ok("set SLUICE_SOCKET=/run/a=b\nprepend LD_LIBRARY_PATH=/usr/lib/sluice\nbind APPTAINER_BINDPATH=/l\nprepend NEW=x\n"))
	})
	p, _ := spank.Start(spank.Remote, job, batch, 0, "socket="+path)
	long := strings.Repeat("/opt/some/library:", 5000)
	p.Setenv("LD_LIBRARY_PATH", long)
	p.Setenv("APPTAINER_BINDPATH", "/scratch,/l,/home")
	if rc := p.UserInit(); rc != 0 || p.Log() != "" {
		t.Errorf("user_init: %d, %q", rc, p.Log())
	}
	for name, want := range map[string]string{"SLUICE_SOCKET": "/run/a=b", "LD_LIBRARY_PATH": "/usr/lib/sluice:" + long, "APPTAINER_BINDPATH": "/l,/scratch,/home", "NEW": "x"} {
		if have := p.Getenv(name); have != want {
			t.Errorf("%s is %.60q (%d), want %.60q (%d)", name, have, len(have), want, len(want))
		}
	}
	if rc := p.TaskInit(); rc != 0 || p.Log() != "" {
		t.Errorf("task_init: %d, %q", rc, p.Log())
	}
	if r := <-asked; r != "SLUICE-J 1 env 4711 4294967291\n" {
		t.Errorf("request %q", r)
	}
}

// What a job submits inherits its environment, and must not have its driver in the way.
func TestNestedJob(t *testing.T) {
	outer := ok("set SLUICE_SOCKET=/run/1/sock\nset OTHER=x\nprepend LD_LIBRARY_PATH=/usr/lib/sluice\nbind APPTAINER_BINDPATH=/run/1\nprepend ALONE=/a\n")
	start := func(answer string) spank.Process {
		p, _ := spank.Start(spank.Remote, job, 0, 0, "socket="+daemon(t, says(answer)))
		return p
	}
	p := start(outer)
	p.Setenv("LD_LIBRARY_PATH", "/opt/lib")
	p.UserInit()
	env := map[string]string{}
	for _, k := range []string{"SLUICE_SOCKET", "OTHER", "LD_LIBRARY_PATH", "APPTAINER_BINDPATH", "ALONE", "SLUICE_ENV"} {
		env[k] = p.Getenv(k)
	}
	if env["LD_LIBRARY_PATH"] != "/usr/lib/sluice:/opt/lib" || strings.Count(env["SLUICE_ENV"], "|") != 5 || strings.Contains(env["SLUICE_ENV"], "\n") {
		t.Fatalf("%v", env)
	}
	env["LD_LIBRARY_PATH"], env["OTHER"], env["APPTAINER_BINDPATH"] = "/more:/usr/lib/sluice:/opt/lib", "changed", "/run/1,/scratch"
	for answer, want := range map[string]map[string]string{
		"none\n": {"SLUICE_SOCKET": "", "OTHER": "changed", "LD_LIBRARY_PATH": "/more:/opt/lib", "APPTAINER_BINDPATH": "/scratch", "ALONE": "", "SLUICE_ENV": ""},
		ok("set SLUICE_SOCKET=/run/2/sock\nprepend LD_LIBRARY_PATH=/usr/lib/sluice\nbind APPTAINER_BINDPATH=/run/2\n"): {"SLUICE_SOCKET": "/run/2/sock", "OTHER": "changed",
			"LD_LIBRARY_PATH": "/usr/lib/sluice:/more:/opt/lib", "APPTAINER_BINDPATH": "/run/2,/scratch", "ALONE": "",
			"SLUICE_ENV": "set SLUICE_SOCKET=/run/2/sock|prepend LD_LIBRARY_PATH=/usr/lib/sluice|bind APPTAINER_BINDPATH=/run/2|"},
	} {
		p := start(answer)
		for k, v := range env {
			p.Setenv(k, v)
		}
		if rc := p.UserInit(); rc != 0 || p.Log() != "" {
			t.Errorf("%d, %s", rc, p.Log())
		}
		for k, v := range want {
			if have := p.Getenv(k); have != v {
				t.Errorf("%.10q: %s is %q, want %q", answer, k, have, v)
			}
		}
	}
	// The record is the user's to spoil.
	for _, r := range []string{"", "|", "||", "set", "set A|", "set A=|prepend", "nonsense A=b|", strings.Repeat("x", 200000)} {
		p := start("none\n")
		p.Setenv("SLUICE_ENV", r)
		p.Setenv("A", "x")
		if rc := p.UserInit() + p.TaskInit(); rc != 0 || p.Getenv("A") != "x" {
			t.Errorf("record %.20q: %d, A is %q", r, rc, p.Getenv("A"))
		}
	}
	// It is bounded, since each change of it costs a walk through the environment.
	for n, want := range map[int]string{63: "", 64: "x", 1000: "x", 15000: "x"} {
		p := start("none\n")
		p.Setenv("SLUICE_ENV", strings.Repeat("set B=|", n)+"set A=x|")
		p.Setenv("A", "x")
		if rc := p.UserInit() + p.TaskInit(); rc != 0 || p.Getenv("A") != want || p.Getenv("SLUICE_ENV") != "" {
			t.Errorf("a record of %d changes: %d, A is %q", n+1, rc, p.Getenv("A"))
		}
	}
}

// The step that only holds the job's place has no tasks, and no variables.
func TestExternStep(t *testing.T) {
	path := daemon(t, func(string, net.Conn) { t.Error("the extern step asks") })
	p, _ := spank.Start(spank.Remote, job, 0xfffffffc, 0, "socket="+path)
	if rc := p.UserInit(); rc != 0 {
		t.Errorf("user_init: %d", rc)
	}
}

// A job that asks for nothing is not disturbed, whatever the daemon is or does. For a step that may have a gres of its own the daemon has longer to
// answer: it asks slurmctld, and may have to wait for another step. That one's task runs beside, since it takes as long as a daemon that hangs.
func TestUndisturbed(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	late := daemon(t, func(_ string, c net.Conn) {
		time.Sleep(2050 * time.Millisecond)
		_, _ = io.WriteString(c, "error no room\n")
	})
	own := exec.Command(self, "-test.run=^TestTask$")
	own.Env = append(os.Environ(), "SPANK_TEST_TASK="+late+" gres")
	var said bytes.Buffer
	own.Stderr = &said
	if err := own.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := own.Wait(); err == nil || !strings.Contains(said.String(), "sluice: job 4711: no room\n") {
			t.Errorf("a step with a gres of its own: %v: %s", err, said.String())
		}
	}()
	for name, say := range map[string]func(string, net.Conn){
		"none": says("none\n"), "fault": says("fault the ledger is closed\n"), "nothing": says(""), "junk": says("\x00\x01\x02"),
		"half": says("ok 100\nset A=b\n"), "hangs": func(string, net.Conn) { time.Sleep(20 * time.Second) },
	} {
		p, _ := spank.Start(spank.Remote, job, 0, 0, "socket="+daemon(t, say))
		begin := time.Now()
		if rc := p.UserInit() + p.TaskInit(); rc != 0 || time.Since(begin) > 6*time.Second {
			t.Errorf("%s: %d after %v", name, rc, time.Since(begin))
		}
	}
	begin := time.Now()
	p, _ := spank.Start(spank.Remote, job, 0, 0, "socket=/nowhere/job.sock")
	if rc := p.UserInit() + p.TaskInit(); rc != 0 || time.Since(begin) > 4*time.Second { // the plug-in waits 5 s for one that the job needs
		t.Errorf("no daemon: %d after %v", rc, time.Since(begin))
	}
}

// TestTask is no test of its own but the task of TestRefused: task_init ends its process.
func TestTask(t *testing.T) {
	socket, how, _ := strings.Cut(os.Getenv("SPANK_TEST_TASK"), " ")
	how, licences, _ := strings.Cut(how, " ")
	if socket == "" {
		return
	}
	task := 0
	if how == "second" {
		task = 1
	}
	p, _ := spank.Start(spank.Remote, job, 0, task, "socket="+socket)
	switch how {
	case "option":
		p.Option("rgpu-mem", "20G", false, true) // of the job that submitted this one
	case "licence":
		p.Setenv("SLURM_JOB_LICENSES", licences)
	case "full":
		p.Full()
	case "gres":
		p.Setenv("SLURM_RGPU_STEP", "gres")
	}
	p.Loud()
	if rc := p.UserInit(); rc != 0 {
		t.Errorf("user_init: %d", rc)
	}
	p.TaskInit()
	fmt.Println("RAN")
}

func TestRefused(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	refusing := daemon(t, says("error 50% of a GPU asked,\x1b[2J 30% free\n"))
	silent := daemon(t, says(""))
	noted := daemon(t, says("fault the ledger is closed\n"))
	if err := os.MkdirAll(filepath.Join(filepath.Dir(noted), "jobs"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(noted), "jobs", "4711"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	type task struct {
		name, socket, how string
		ran               bool
		say               string
	}
	tasks := []task{
		{"error", refusing, "", false, "sluice: job 4711: 50% of a GPU asked,?[2J 30% free\n"},
		{"second task", refusing, "second", false, ""},
		{"bad change", daemon(t, says(ok("set A=b\nset 1A=c\n"))), "", false, "a bad change of the environment; plug-in and sluiced must be of the same release"},
		{"no room", daemon(t, says(ok("set A=b\n"))), "full", false, "A of the job's environment cannot be set"},
		{"silent, an option", silent, "option", true, ""},
		{"silent, by note", noted, "", false, "and the ledger is closed; the administrator"},
		{"absent, by licence", "/nowhere/job.sock", "licence rgpu:50", false, "/nowhere/job.sock: No such file or directory"},
	}
	formtest.Each(t, "licences.txt", func(licences, want string) {
		c := task{"silent, licences " + licences, silent, "licence " + licences, want != "yes", ""}
		if !c.ran {
			c.say = "job 4711 asks for a fraction of a GPU, and sluiced does not answer at " + silent
		}
		tasks = append(tasks, c)
	})
	for _, c := range tasks {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(self, "-test.run=^TestTask$")
			cmd.Env = append(os.Environ(), "SPANK_TEST_TASK="+c.socket+" "+c.how)
			var out, said bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &said
			err := cmd.Run()
			if ran := strings.Contains(out.String(), "RAN"); ran != c.ran || !ran && cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("%v: ran %v, want %v: %s%s", err, ran, c.ran, out.String(), said.String())
			}
			if !strings.Contains(said.String(), c.say) || c.say == "" && strings.Contains(said.String(), "50%") {
				t.Errorf("said %q, want %q", said.String(), c.say)
			}
		})
	}
}

// A daemon that is started anew meanwhile is waited for, if the job needs it.
func TestRestart(t *testing.T) {
	path := daemon(t, says("none\n"))
	late := filepath.Join(filepath.Dir(path), "late.sock")
	time.AfterFunc(300*time.Millisecond, func() { _ = os.Symlink(path, late) })
	if a := spank.Ask(late, job, 0, 5000, 7000); a.Kind != spank.None {
		t.Errorf("%+v", a)
	}
	if a := spank.Ask(late+"x", job, 0, 0, 7000); a.Kind != spank.Silent {
		t.Errorf("%+v", a)
	}
	// One that dies before it answers.
	var asked atomic.Int32
	dying := daemon(t, func(_ string, c net.Conn) {
		if asked.Add(1) > 1 {
			_, _ = io.WriteString(c, "none\n")
		}
	})
	if a := spank.Ask(dying, job, 0, 5000, 7000); a.Kind != spank.None {
		t.Errorf("%+v", a)
	}
}

// Bytes that trickle have the deadline too.
func TestTrickle(t *testing.T) {
	path := daemon(t, func(_ string, c net.Conn) {
		for {
			if _, err := io.WriteString(c, "x"); err != nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	})
	begin := time.Now()
	if a := spank.Ask(path, job, 0, 0, 300); a.Kind != spank.Silent || time.Since(begin) > 5*time.Second { // otherwise it lasts
		t.Errorf("%+v after %v", a, time.Since(begin))
	}
}

func TestEndless(t *testing.T) {
	path := daemon(t, func(_ string, c net.Conn) {
		b := bytes.Repeat([]byte("x"), 1<<16)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	if a := spank.Ask(path, job, 0, 0, 5000); a.Kind != spank.Silent || !strings.Contains(a.Text, "is malformed") {
		t.Errorf("%+v", a)
	}
}

func TestNothingIsLeftOpen(t *testing.T) {
	count := func() int {
		e, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(e)
	}
	dir := t.TempDir()
	_ = spank.Ask(dir+"/none", job, 0, 0, 100)
	before := count()
	for range 100 {
		_ = spank.Ask(dir+"/none", job, 0, 0, 100)
	}
	if after := count(); after > before+8 { // other tests' daemons come and go
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func FuzzAnswer(f *testing.F) {
	for _, s := range []string{"none\n", "error no\n", "fault no\n", "ok 0\n", ok("set A=b\nprepend B=c\nbind C=d\n"), "ok 5\nset A\n", "ok 999999\n", "ok\n", "\n", "error " + strings.Repeat("x", 2000) + "\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		checkAnswer(t, b)
		checkAnswer(t, []byte(ok(string(b)))) // a length that is right is not found by chance
		checkAnswer(t, append([]byte("error "), b...))
	})
}

func checkAnswer(t *testing.T, b []byte) {
	t.Helper()
	a := spank.Read(b)
	if a.Kind < spank.None || a.Kind > spank.Silent || len(a.Text) > 1024 {
		t.Fatalf("%q: %+v", b, a)
	}
	if strings.ContainsFunc(a.Text, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		t.Errorf("%q: text %q", b, a.Text)
	}
	if (a.Kind == spank.Error || a.Kind == spank.Silent) != (a.Text != "") && !bytes.HasPrefix(b, []byte("error \n")) && !bytes.HasPrefix(b, []byte("fault \n")) {
		t.Errorf("%q: %+v", b, a)
	}
	if a.Kind != spank.Env {
		return
	}
	// What was read and written again is what was there.
	var body strings.Builder
	for _, c := range a.Changes {
		verb := map[byte]string{0: "set", ':': "prepend", ',': "bind"}[c.Separator]
		fmt.Fprintf(&body, "%s %s=%s\n", verb, c.Name, c.Value)
	}
	if _, rest, _ := bytes.Cut(b, []byte("\n")); string(rest) != body.String() {
		t.Errorf("%q is read as %q", rest, body.String())
	}
}

// The plug-in and the daemon agree on every value.
func FuzzOption(f *testing.F) {
	for _, s := range []string{"20G", "2m", "1M", "16T", "17T", "999999999999999999T", "0000000000000000020G", "20", "", "G", "20GB", "-1G", "best-effort", "a.b", ".a", "ä"} {
		for i := range options.Table {
			f.Add(i, s)
		}
	}
	f.Fuzz(func(t *testing.T, i int, value string) {
		if i < 0 || i >= len(options.Table) || strings.Contains(value, "\x00") {
			return
		}
		o := &options.Table[i]
		if o.Kind == options.Flag {
			return // it has no value
		}
		p, _ := spank.Start(spank.Allocator, 0, 0, 0)
		rc := p.Option(o.Name, value, false, false)
		if err := options.Check(o.Name, value); (rc == 0) != (err == nil) {
			t.Errorf("--%s=%q: plug-in %d %s, daemon %v", o.Name, value, rc, p.Log(), err)
		}
		if rc != 0 {
			return
		}
		if p.InitPostOpt() != 0 || options.Check(o.Name, p.Control(o.Env)) != nil {
			t.Errorf("--%s=%q is passed on as %q", o.Name, value, p.Control(o.Env))
		}
		if n, ok := options.MiB(value); ok && o.Kind == options.Size {
			if m, _ := options.MiB(p.Control(o.Env)); m != n {
				t.Errorf("%q is %d MiB and passed on as %q", value, n, p.Control(o.Env))
			}
		}
	})
}
