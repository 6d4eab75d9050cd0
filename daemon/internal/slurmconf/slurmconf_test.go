package slurmconf

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

const siteYAML = `
node: ctl
cluster: lab
pools:
  default: {owners: [gpu01, gpu02], types: {h200: rgpu_h200, a100: rgpu_a100}}
  big.iron: {owners: [gpu03], licence: rgpu_big}
partitions:
  main: {pool: default, mem: 20G}
  iron: {pool: big.iron, policy: fixed}
slurm: {controllers: [ctl]}
lease: {silence: 60s}
`

func gpus(name string, mem uint64, n int) []lease.GPU {
	out := make([]lease.GPU, n)
	for i := range out {
		out[i] = lease.GPU{UUID: "GPU-x", Name: name, Mem: mem, Healthy: true}
	}
	return out
}

func owner(name string, g ...[]lease.GPU) rpc.PoolOwner {
	o := rpc.PoolOwner{Name: name, Inventory: lease.Inventory{Owner: name}}
	for _, l := range g {
		o.Inventory.GPUs = append(o.Inventory.GPUs, l...)
	}
	return o
}

func pools() []rpc.Pool {
	return []rpc.Pool{
		{Name: "default", Owners: []rpc.PoolOwner{owner("gpu01", gpus("NVIDIA H200", 140<<30+1, 4)), owner("gpu02", gpus("NVIDIA A100-SXM4-80GB", 79<<30, 2), gpus("Tesla V100", 31<<30, 1))}},
		{Name: "big.iron", Owners: []rpc.PoolOwner{owner("gpu03", gpus("NVIDIA H200", 140<<30, 8))}},
	}
}

func load(t *testing.T, text string) *config.Config {
	t.Helper()
	cfg, err := config.Parse("sluice.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func table(t *testing.T) (*config.Config, Table) {
	t.Helper()
	cfg := load(t, siteYAML)
	tab, err := New(cfg, pools())
	if err != nil {
		t.Fatal(err)
	}
	return cfg, tab
}

func TestConf(t *testing.T) {
	cfg, tab := table(t)
	text := string(tab.Conf(cfg))
	for _, want := range []string{
		"\nGresTypes=rgpu\n",
		"Gres=rgpu:a100:no_consume:1600,rgpu:h200:no_consume:1600\n",
		"\nLicenses=rgpu:700,rgpu_a100:200,rgpu_big:800,rgpu_h200:400\n",
		"\nAccountingStorageTRES=license/rgpu,license/rgpu_a100,license/rgpu_big,license/rgpu_h200\n",
		"\nPrologSlurmctld=/usr/lib/sluice/slurm/prolog-ctld.sh\n",
		"\n#SlurmdTimeout=120\n",
	} {
		if !strings.Contains("\n"+text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for line := range strings.Lines(text) {
		if len(line) > 300 {
			t.Errorf("slurm.conf: a line of %d bytes", len(line))
		}
	}

	remote := load(t, strings.Replace(siteYAML, "licence: rgpu_big", `licence: "rgpu_big@pool"`, 1))
	tab, err := New(remote, pools())
	if err != nil {
		t.Fatal(err)
	}
	text = string(tab.Conf(remote))
	if strings.Contains(text, "Licenses=rgpu:700,rgpu_a100:200,rgpu_big") || !strings.Contains(text, "name=rgpu_big server=pool count=800") {
		t.Errorf("remote licence:\n%s", text)
	}

	plain := load(t, "pools: {default: {owners: [gpu03]}}")
	if tab, err = New(plain, []rpc.Pool{{Name: "default", Owners: pools()[1].Owners}}); err != nil {
		t.Fatal(err)
	}
	if got := tab.NodeGres(); got != "rgpu:no_consume:1600" {
		t.Errorf("gres without types: %s", got)
	}
}

// A table is made of what is known for sure, or not at all.
func TestNewRefuses(t *testing.T) {
	cfg := load(t, siteYAML)
	for want, spoil := range map[string]func([]rpc.Pool){
		"gpu02 of pool default does not answer (gone)": func(p []rpc.Pool) { p[0].Owners[1] = rpc.PoolOwner{Name: "gpu02", Error: "gone"} },
		"memory is not known yet (no nvml)":            func(p []rpc.Pool) { g := p[1].Owners[0].Inventory.GPUs; g[0].Mem, g[0].Why = 0, "no nvml" },
		"no GPU of type a100":                          func(p []rpc.Pool) { p[0].Owners = p[0].Owners[:1] },
		"pool big.iron has no GPU":                     func(p []rpc.Pool) { p[1].Owners[0].Inventory.GPUs = nil },
		"sluiced does not know it":                     func(p []rpc.Pool) { p[1].Name = "other" },
	} {
		p := pools()
		spoil(p)
		if _, err := New(cfg, p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
}

// The table is read by the script that it is made for, and charges as the daemon does.
func TestLua(t *testing.T) {
	_, tab := table(t)
	const module = "../../../prolog/sluice.lua"
	if _, err := os.ReadFile(module); err != nil { // so that go test knows what it depends on
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := filepath.Join(dir, TableName)
	if err := os.WriteFile(file, tab.Lua(), 0o600); err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(dir, "t.lua")
	text := `slurm = { SUCCESS = 0, ERROR = -1, log_user = function(...) print(string.format(...)) end, log_info = function() end, log_error = print }
local m = dofile(arg[1])
m.table(arg[2])
local function job(gres, partition, ...)
  local j = { tres_per_node = gres, partition = partition, spank_job_env = {}, spank_job_env_size = select("#", ...) }
  for i = 1, j.spank_job_env_size do j.spank_job_env[i - 1] = select(i, ...) end
  m.apply(j, {}, 1)
  print(gres, j.licenses)
end
job("gres:rgpu:50", "other")
job("gres/rgpu:h200:400", "other")
job("gres:rgpu:50", "main")
job("gres:rgpu:50", "iron", "RGPU_MEM=140G")
job("gres:rgpu:801", "iron")
`
	if err := os.WriteFile(script, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, lua := range []string{"lua5.1", "lua5.3"} {
		out, err := exec.Command(lua, script, module, file).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s(it is in Debian's package of that name)", lua, err, out)
		}
		want := `gres:rgpu:50	rgpu:50
gres/rgpu:h200:400	rgpu:400,rgpu_h200:400
sluice: 20480 MiB of a GPU's 31744 cost 65 units for each node, not 50
gres:rgpu:50	rgpu:65
sluice: 143360 MiB of a GPU's 143360 cost 100 units for each node, not 50
gres:rgpu:50	rgpu_big:100
sluice: --gres=rgpu:801: give 1 to 800 percent of a GPU, as --gres=rgpu:50
gres:rgpu:801	nil
`
		if string(out) != want {
			t.Errorf("%s:\n%swant\n%s", lua, out, want)
		}
	}
}

// The table has the least fraction that fits on any GPU of a pool, unless one of them has not been measured.
func TestLuaLeast(t *testing.T) {
	cfg := load(t, siteYAML)
	p := pools()
	for i := range p {
		for _, o := range p[i].Owners {
			for j := range o.Inventory.GPUs {
				o.Inventory.GPUs[j].Overhead = uint64(500+100*j) << 20
			}
		}
	}
	tab, err := New(cfg, p)
	if err != nil {
		t.Fatal(err)
	}
	if text := string(tab.Lua()); !strings.Contains(text, "least = 502, least_percent = ") {
		t.Errorf("%s", text)
	}
	for i := range p {
		p[i].Owners[0].Inventory.GPUs[0].Overhead = 0
	}
	if tab, err = New(cfg, p); err != nil {
		t.Fatal(err)
	}
	for name, pool := range tab.Pools {
		if pool.Least != 0 || pool.LeastPercent != 0 {
			t.Errorf("pool %s: %+v, and one GPU is not measured", name, pool.Amount)
		}
	}
}

type fakeSlurm struct {
	conf     map[string]string
	licences map[string]slurm.Licence
	nodes    map[string]string
	err      error
}

func (f *fakeSlurm) Config(context.Context) (map[string]string, error) { return f.conf, f.err }
func (f *fakeSlurm) Licences(context.Context) (map[string]slurm.Licence, error) {
	return f.licences, f.err
}
func (f *fakeSlurm) Partitions(context.Context) ([]string, error) {
	return []string{"main", "iron"}, f.err
}
func (f *fakeSlurm) NodeGres(context.Context) (map[string]string, error) { return f.nodes, f.err }

// good is a site where nothing is wrong; its files are those of the project.
func good(t *testing.T, tab Table) *fakeSlurm {
	t.Helper()
	dir := t.TempDir()
	put := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		return p
	}
	from := func(name string) string {
		text, err := os.ReadFile(filepath.Join("../../../prolog", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	pools := put("pools.lua", string(tab.Lua()))
	put("job_submit.lua", "local s = dofile('"+put("sluice.lua", "")+"')\ns.table(\""+pools+"\")\ns.apply(a, b, c)\ns.modify(a, b, c, d)\n")
	put("plugstack.conf", "# x\ninclude plugstack.conf.d/*.conf\n")
	put("plugstack.conf.d/a.conf", "optional other.so\n")
	put("plugstack.conf.d/sluice.conf", "optional spank_sluice.so socket=/run/sluice/job.sock\n")
	universal, _ := plugins(t)
	put("spank_sluice.so", universal)
	f := &fakeSlurm{
		conf: map[string]string{"SLURM_CONF": filepath.Join(dir, "slurm.conf"), "ClusterName": "lab", "SlurmctldHost[0]": "ctl.example.org(10.0.0.1)", "GresTypes": "gpu,rgpu", "JobSubmitPlugins": "lua",
			"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageTRES": "cpu,license/rgpu,license/rgpu_a100,license/rgpu_big,license/rgpu_h200",
			"PrologFlags": "Alloc,Contain", "SlurmdTimeout": "300 sec", "PrologEpilogTimeout": "65534", "PlugStackConfig": filepath.Join(dir, "plugstack.conf"), "PluginDir": dir},
		licences: map[string]slurm.Licence{"rgpu": {Total: 700}, "rgpu_h200": {Total: 400}, "rgpu_a100": {Total: 200}, "rgpu_big": {Total: 800}, "matlab": {Total: 3}},
		nodes:    map[string]string{"n1": "gpu:h100:4(S:0-1),rgpu:h200:6400,rgpu:a100:6400", "n2": "rgpu:a100:no_consume:6400,rgpu:h200:no_consume:6400"},
	}
	for _, h := range hooks {
		f.conf[h.key] = put(h.file+".sh", from(h.file+".sh"))
	}
	return f
}

// plugins are a plug-in that finds out Slurm's release when it is loaded, and one for 24.11.
var plugins = func() func(t *testing.T) (universal, release string) {
	var a, b string
	return func(t *testing.T) (string, string) {
		t.Helper()
		if a == "" {
			build := func(text string) string {
				out := filepath.Join(t.TempDir(), "x.so")
				cmd := exec.Command("cc", "-shared", "-fPIC", "-o", out, "-x", "c", "-")
				cmd.Stdin = strings.NewReader(text)
				if said, err := cmd.CombinedOutput(); err != nil {
					t.Fatalf("cc: %v: %s", err, said)
				}
				so, err := os.ReadFile(out)
				if err != nil {
					t.Fatal(err)
				}
				return string(so)
			}
			a, b = build("unsigned int plugin_version;"), build("const unsigned int plugin_version = 0x180b05;")
		}
		return a, b
	}
}()

// short is this machine's name.
func short() string {
	name, _ := os.Hostname()
	return host(name)
}

func levels(checks []rpc.Check, name string) (rpc.Level, string) {
	level, text := rpc.Level(""), ""
	for _, c := range checks {
		if c.Name == name && (level == "" || c.Level != rpc.OK) {
			level, text = c.Level, c.Text+" | "+c.Remedy
		}
	}
	return level, text
}

func TestCheck(t *testing.T) {
	cfg, tab := table(t)
	cfg.Users.Run = true
	if level, text := levels(Check(context.Background(), cfg, &tab, nil, good(t, tab)), "users.run"); level != rpc.Warn || !strings.Contains(text, "outside of jobs") {
		t.Errorf("users.run: %s: %s", level, text)
	}
	cfg.Users.Run = false
	for _, c := range Check(context.Background(), cfg, &tab, nil, good(t, tab)) {
		if c.Level != rpc.OK {
			t.Errorf("a good site: %+v", c)
		}
	}
	dir := func(f *fakeSlurm) string { return filepath.Dir(f.conf["SLURM_CONF"]) }
	write := func(f *fakeSlurm, name, text string) {
		if err := os.WriteFile(filepath.Join(dir(f), name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name  string
		level rpc.Level
		want  string
		spoil func(*fakeSlurm)
	}{
		{"slurmctld", rpc.Fail, "no answer", func(f *fakeSlurm) { f.err = errors.New("no answer") }},
		{"cluster", rpc.Fail, "cluster: prod", func(f *fakeSlurm) { f.conf["ClusterName"] = "prod" }},
		{"controllers", rpc.Warn, "backup runs slurmctld", func(f *fakeSlurm) { f.conf["SlurmctldHost[1]"] = "backup" }},
		{"gres", rpc.Fail, "GresTypes=rgpu", func(f *fakeSlurm) { f.conf["GresTypes"] = "gpu" }},
		{"gres", rpc.Fail, "no node has rgpu", func(f *fakeSlurm) { f.nodes = map[string]string{"n1": "", "n2": "gpu:4"} }},
		{"gres", rpc.Fail, "n1: no rgpu as the pools", func(f *fakeSlurm) { f.nodes["n1"] = "rgpu:6400" }},
		{"gres", rpc.Fail, "n2: no rgpu as the pools", func(f *fakeSlurm) { f.nodes["n2"] = "rgpu:a100:6400" }},
		{"gres", rpc.OK, "1 of 2 nodes; not n2", func(f *fakeSlurm) { f.nodes["n2"] = "" }},
		{"licences", rpc.Fail, "rgpu_big is missing", func(f *fakeSlurm) { delete(f.licences, "rgpu_big") }},
		{"licences", rpc.Fail, "no room", func(f *fakeSlurm) { f.licences["rgpu"] = slurm.Licence{Total: 800} }},
		{"licences", rpc.Warn, "never used", func(f *fakeSlurm) { f.licences["rgpu"] = slurm.Licence{Total: 600} }},
		{"accounting", rpc.Warn, "slurmdbd", func(f *fakeSlurm) { f.conf["AccountingStorageType"] = "accounting_storage/none" }},
		{"accounting", rpc.Warn, "license/rgpu_big", func(f *fakeSlurm) {
			f.conf["AccountingStorageTRES"] = "license/rgpu,license/rgpu_h200,license/rgpu_a100"
		}},
		{"job_submit", rpc.Fail, "no job is charged", func(f *fakeSlurm) { f.conf["JobSubmitPlugins"] = "" }},
		{"job_submit", rpc.Fail, "does not call", func(f *fakeSlurm) { write(f, "job_submit.lua", "return 0") }},
		{"job_submit", rpc.Fail, "does not call", func(f *fakeSlurm) {
			write(f, "job_submit.lua", "dofile('"+filepath.Join(dir(f), "sluice.lua")+"').apply(j)")
		}},
		{"job_submit", rpc.Fail, "no such file", func(f *fakeSlurm) { _ = os.Remove(filepath.Join(dir(f), "pools.lua")) }},
		{"job_submit", rpc.Fail, "not that of the pools", func(f *fakeSlurm) { write(f, "pools.lua", "return {}") }},
		{"Prolog", rpc.Fail, "is not set", func(f *fakeSlurm) { f.conf["Prolog"] = "" }},
		{"Prolog", rpc.Fail, "does not run sluice prolog", func(f *fakeSlurm) { f.conf["Prolog"] = f.conf["PrologSlurmctld"] }},
		{"Prolog", rpc.OK, "prolog.sh", func(f *fakeSlurm) {
			f.conf["Prolog"] = "/bin/true,*"
			f.conf["Prolog[0]"] = filepath.Join(dir(f), "prolog.s?")
			f.conf["Prolog"] = ""
		}},
		{"Epilog", rpc.OK, "site.sh", func(f *fakeSlurm) {
			write(f, "site.sh", "#!/bin/sh\n# sluice epilog\n/usr/lib/sluice/slurm/epilog.sh\n")
			f.conf["Epilog"] = filepath.Join(dir(f), "site.sh")
		}},
		{"Epilog", rpc.Fail, "does not run", func(f *fakeSlurm) {
			write(f, "site.sh", "#!/bin/sh\n# sluice epilog\n/usr/lib/sluice/slurm/epilog-ctld.sh; sluice epilog-ctld\n")
			f.conf["Epilog"] = filepath.Join(dir(f), "site.sh")
		}},
		{"Epilog", rpc.Warn, "cannot be read here", func(f *fakeSlurm) { f.conf["Epilog"] = "/nowhere/epilog" }},
		{"PrologSlurmctld", rpc.Warn, "is not set", func(f *fakeSlurm) { f.conf["PrologSlurmctld"] = "" }},
		{"EpilogSlurmctld", rpc.Fail, "is not set", func(f *fakeSlurm) { f.conf["EpilogSlurmctld"] = "" }},
		{"PrologFlags", rpc.Warn, "Contain", func(f *fakeSlurm) { f.conf["PrologFlags"] = "Alloc" }},
		{"SlurmdTimeout", rpc.Fail, "below 1m0s", func(f *fakeSlurm) { f.conf["SlurmdTimeout"] = "60 sec" }},
		{"PrologEpilogTimeout", rpc.Fail, "is 6 s", func(f *fakeSlurm) { f.conf["PrologEpilogTimeout"] = "6" }},
		{"plug-in", rpc.Fail, "does not name", func(f *fakeSlurm) { write(f, "plugstack.conf.d/sluice.conf", "# optional spank_sluice.so\n") }},
		{"plug-in", rpc.Fail, "no such file", func(f *fakeSlurm) { f.conf["PluginDir"] = "/nowhere" }},
		{"plug-in", rpc.Warn, "write optional", func(f *fakeSlurm) { write(f, "plugstack.conf.d/sluice.conf", "required spank_sluice.so\n") }},
		{"plug-in", rpc.Fail, "does not name", func(f *fakeSlurm) { write(f, "plugstack.conf", "include plugstack.conf\n") }},
		{"plug-in", rpc.Fail, "is for Slurm 24.11 and this is 22.05", func(f *fakeSlurm) {
			_, release := plugins(t)
			write(f, "spank_sluice.so", release)
			f.conf["SLURM_VERSION"] = "22.05.8"
		}},
		{"plug-in", rpc.OK, "spank_sluice.so", func(f *fakeSlurm) {
			_, release := plugins(t)
			write(f, "spank_sluice.so", release)
			f.conf["SLURM_VERSION"] = "24.11.5"
		}},
		{"plug-in", rpc.Fail, "again", func(f *fakeSlurm) { write(f, "spank_sluice.so", "\x7fELF") }},
		{"partitions", rpc.OK, "2", func(*fakeSlurm) {}},
		{"node", rpc.Fail, "set node: " + short(), func(f *fakeSlurm) { f.nodes[short()] = f.nodes["n1"] }},
		{"shim", rpc.Fail, "find no GPU", func(f *fakeSlurm) { f.nodes["ctl"] = f.nodes["n1"] }},
		{"slurm.user", rpc.Fail, "slurm: {user: daemons}", func(f *fakeSlurm) { f.conf["SlurmUser"] = "daemons(4711)" }},
		{"job_submit", rpc.Fail, "will not start again", func(f *fakeSlurm) { _ = os.Remove(filepath.Join(dir(f), "sluice.lua")) }},
		{"Prolog", rpc.Fail, "chmod 0755", func(f *fakeSlurm) { _ = os.Chmod(f.conf["Prolog"], 0o644) }},
	} {
		f := good(t, tab)
		c.spoil(f)
		level, text := levels(Check(context.Background(), cfg, &tab, nil, f), c.name)
		if level != c.level || !strings.Contains(text, c.want) {
			t.Errorf("%s: %s %q, want %s with %q", c.name, level, text, c.level, c.want)
		}
	}
	found := Check(context.Background(), cfg, nil, errors.New("owner gpu01 is away"), good(t, tab))
	if level, text := levels(found, "pools"); level != rpc.Fail || !strings.Contains(text, "gpu01") {
		t.Errorf("pools: %s %s", level, text)
	}
	if level, _ := levels(found, "gres"); level != rpc.OK {
		t.Errorf("gres without the pools: %s", level)
	}
}

// Slurm's commands fail without munge, and what they say names slurmctld. So munge is tried, too.
func TestMungeIsNamed(t *testing.T) {
	cfg := load(t, siteYAML)
	tab, err := New(cfg, pools())
	if err != nil {
		t.Fatal(err)
	}
	f := good(t, tab)
	f.err = errors.New("scontrol: slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)")
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	for _, c := range []struct {
		munge, want string // what its program does, and what the finding says; "" none
	}{
		{"", ""},
		{"exit 0", ""},
		{`echo "munge: Error: Failed to access \"/run/munge/munge.socket.2\": No such file or directory" >&2; exit 6`, "munge.socket.2"},
	} {
		if c.munge != "" {
			for _, name := range []string{"munge", "unmunge"} {
				if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+c.munge+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
			}
		}
		found := Check(t.Context(), cfg, &tab, nil, f)
		level, text := levels(found, "munge")
		if named := level == rpc.Fail && strings.Contains(text, c.want) && strings.Contains(text, "systemctl restart munge"); named != (c.want != "") {
			t.Errorf("munge %q: %s %q", c.munge, level, text)
		}
		if level, text := levels(found, "slurmctld"); level != rpc.Fail || strings.Contains(text, "munge, above, may be why") != (c.want != "") {
			t.Errorf("munge %q: slurmctld: %s %q", c.munge, level, text)
		}
	}
}
