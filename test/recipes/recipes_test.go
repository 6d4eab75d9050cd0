package recipes

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-hpc/sluice/internal/form/formtest"
	"github.com/sluice-hpc/sluice/spank/options"
)

const (
	etc      = "../../etc"
	ondemand = etc + "/ondemand/sluice_jupyter"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// run is what a program says, and whether it succeeded.
func run(t *testing.T, env []string, name string, args ...string) (string, bool) {
	t.Helper()
	cmd := exec.Command(name, args...)
	if env != nil {
		cmd.Env = env
	}
	out, err := cmd.CombinedOutput()
	if _, failed := err.(*exec.ExitError); err != nil && !failed {
		t.Fatalf("%s: %v", name, err)
	}
	return string(out), err == nil
}

// request is what a user may ask for by a form.
type request struct {
	percent, mem, cores, hours, account, partition string
	refused                                        string // words of the refusal, "" for none
}

// requests are the cases that both forms, Open OnDemand's and JupyterHub's, are held to.
func requests(t *testing.T) []request {
	usual := request{percent: "25", mem: "8G", cores: "2", hours: "2"}
	with := func(change func(*request), refused string) request {
		r := usual
		change(&r)
		r.refused = refused
		return r
	}
	all := []request{usual}
	for value, refused := range map[string]string{
		"1": "", "100": "", "0": "from 1 to 100", "101": "from 1 to 100", "-1": "from 1 to 100", "50%": "from 1 to 100", "half": "from 1 to 100",
		"": "from 1 to 100", "2.5": "from 1 to 100", "1e1": "from 1 to 100", "٣": "from 1 to 100", "5\n#SBATCH --wrap=id": "from 1 to 100", "5,gpu:1": "from 1 to 100",
	} {
		all = append(all, with(func(r *request) { r.percent = value }, refused))
	}
	for value, refused := range map[string]string{"0": "from 1 to 24", "25": "from 1 to 24", "24": "", "": "from 1 to 24"} {
		all = append(all, with(func(r *request) { r.hours = value }, refused))
	}
	for value, refused := range map[string]string{"0": "from 1 to 64", "65": "from 1 to 64", "64": ""} {
		all = append(all, with(func(r *request) { r.cores = value }, refused))
	}
	for value, refused := range map[string]string{"": "", "gpu": "", "a,b": "", "a b": "want a name", "-x": "want a name", "x\ny": "want a name", "x'": "want a name"} {
		all = append(all, with(func(r *request) { r.partition = value }, refused), with(func(r *request) { r.account = value }, refused))
	}
	all = append(all, with(func(r *request) { r.mem = "" }, ""), with(func(r *request) { r.mem = "lots" }, "from 2M to 16T"))
	// The table that the plug-in's own readers are held to. The forms trim their texts, sbatch does not.
	formtest.Each(t, "sizes.txt", func(value, want string) {
		refused := "from 2M to 16T"
		if want != "-" || value == "" {
			refused = ""
		}
		all = append(all, with(func(r *request) { r.mem = value }, refused))
	})
	return all
}

// checkArguments holds what a form hands to sbatch against the plug-in's options.
func checkArguments(t *testing.T, r request, args []string) {
	t.Helper()
	want := []string{"--gres=rgpu:" + r.percent}
	if r.mem != "" {
		want = append(want, "--rgpu-mem="+r.mem)
	}
	for _, w := range want {
		if !slices.Contains(args, w) {
			t.Errorf("%+v: %q lacks %s", r, args, w)
		}
	}
	for _, a := range args {
		name, value, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if strings.HasPrefix(name, "rgpu") {
			if err := options.Check(name, value); err != nil {
				t.Errorf("%+v: the plug-in refuses %s: %v", r, a, err)
			}
		}
	}
}

// field is an attribute of Open OnDemand's form.
type field struct {
	Widget, Pattern string
	Min, Max, Step  int
	Required        bool
	Value           any
}

func form(t *testing.T) (names []string, fields map[string]field) {
	t.Helper()
	var f struct {
		Cluster    string
		Form       []string
		Attributes map[string]field
	}
	if err := yaml.Unmarshal([]byte(read(t, ondemand+"/form.yml")), &f); err != nil {
		t.Fatal(err)
	}
	if f.Cluster == "" {
		t.Error("form.yml names no cluster")
	}
	return f.Form, f.Attributes
}

// TestOnDemandForm: a browser refuses what sbatch would, and submit.yml.erb has the limits of the form. What it makes of requests is
// tested with Ruby, by TestOnDemandSubmit.
func TestOnDemandForm(t *testing.T) {
	names, fields := form(t)
	if got, want := slices.Sorted(maps.Keys(fields)), slices.Sorted(slices.Values(names)); !slices.Equal(got, want) {
		t.Errorf("the form has %v, and attributes are %v", want, got)
	}
	submit := read(t, ondemand+"/submit.yml.erb")
	for name, limits := range map[string][2]int{"rgpu_percent": {1, 100}, "cores": {1, 64}, "bc_num_hours": {1, 24}} {
		if f := fields[name]; f.Min != limits[0] || f.Max != limits[1] || f.Step != 1 {
			t.Errorf("%s is %d to %d in steps of %d, want %v in steps of 1", name, f.Min, f.Max, f.Step, limits)
		}
		if check := fmt.Sprintf("%s, %d..%d)", name, limits[0], limits[1]); !strings.Contains(submit, check) {
			t.Errorf("submit.yml.erb does not check %q", check)
		}
	}
	for name := range fields {
		if !strings.Contains(submit, name) {
			t.Errorf("submit.yml.erb does not look at %s", name)
		}
	}
	// A browser matches the whole value, and an empty one always.
	pattern := regexp.MustCompile("^(?:" + fields["rgpu_mem"].Pattern + ")$")
	formtest.Each(t, "sizes.txt", func(value, want string) {
		_, inRange := options.MiB(value)
		if pattern.MatchString(value) != (want != "-") && (inRange || !regexp.MustCompile(`(?i)^[0-9]+[MGT](i?B)?$`).MatchString(value)) {
			t.Errorf("the form's pattern matches %q: %v, want %s", value, pattern.MatchString(value), want)
		}
	})
	if pattern.MatchString("lots") {
		t.Error("the form takes the memory \"lots\"")
	}
	for _, a := range regexp.MustCompile(`- "--([a-z-]+)=`).FindAllStringSubmatch(submit, -1) {
		known := slices.ContainsFunc(options.Table, func(o options.Option) bool { return o.Name == a[1] })
		if !known && !slices.Contains([]string{"nodes", "ntasks", "cpus-per-task", "gres"}, a[1]) {
			t.Errorf("submit.yml.erb gives sbatch --%s, which neither the plug-in nor this test knows", a[1])
		}
	}
	var manifest map[string]string
	if err := yaml.Unmarshal([]byte(read(t, ondemand+"/manifest.yml")), &manifest); err != nil || manifest["role"] != "batch_connect" {
		t.Errorf("manifest.yml: %v, %v", manifest, err)
	}
}

// TestOnDemandScripts: the job's scripts, in a job's place: a password of 32 characters is Jupyter's token, and in no argument. Until
// the site has said which pages may connect, there is no Jupyter.
func TestOnDemandScripts(t *testing.T) {
	dir := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	put("jupyter", "#!/bin/bash\necho \"jupyter $* in $PWD, token $JUPYTER_TOKEN, fraction $SLUICE_SOCKET\"\ncat \"$SLUICE_JUPYTER_CONFIG\"\n")
	put("sluice", "#!/bin/bash\n[ \"$1\" = env ] && echo export SLUICE_SOCKET=/run/lease/sock\n")
	text := map[string]string{}
	for _, name := range []string{"before.sh", "script.sh"} {
		text[name] = read(t, ondemand+"/template/"+name+".erb")
		if strings.Contains(text[name], "<%") {
			t.Errorf("%s has Ruby in it, which this test does not run", name)
		}
		put(name, text[name])
	}
	before := strings.Split(text["before.sh"], "\norigin=\"\"\n")
	if len(before) != 2 {
		t.Fatal("before.sh does not leave its origin to the site")
	}
	setOrigin := func(origin string) { put("before.sh", before[0]+"\norigin=\""+origin+"\"\n"+before[1]) }
	env := []string{"HOME=" + dir, "PATH=" + dir + ":/usr/bin:/bin"}
	job := `cd ` + dir + `; find_port() { echo 4711; }; create_passwd() { printf "%$1s" | tr " " s; }; host=node01; . ./before.sh; env -u BASH_ENV PATH="$PATH" bash ./script.sh`
	for _, origin := range []string{"", "*", "ondemand.example.org", "https://ondemand.example.org/", "https://OnDemand.example.org", "https://a.org https://b.org"} {
		setOrigin(origin)
		out, ok := run(t, env, "bash", "-euc", job)
		if ok || !strings.Contains(out, "origin in its template/before.sh.erb is '"+origin+"', want the address of Open OnDemand") || strings.Contains(out, "jupyter lab") {
			t.Errorf("with the origin %q: %v\n%s", origin, ok, out)
		}
		if _, err := os.Stat(filepath.Join(dir, "jupyter_config.py")); err == nil {
			t.Errorf("with the origin %q there is a configuration", origin)
		}
	}
	setOrigin("https://ondemand.example.org:8443")
	out, ok := run(t, env, "bash", "-euc", job)
	want := []string{`c.ServerApp.allow_origin = "https://ondemand.example.org:8443"`, "jupyter lab --config=" + dir + "/jupyter_config.py in " + dir + ", token " + strings.Repeat("s", 32) + ", fraction /run/lease/sock",
		"c.ServerApp.port = 4711", `c.ServerApp.base_url = "/node/node01/4711/"`}
	for _, w := range want {
		if !ok || !strings.Contains(out, w) {
			t.Errorf("%v, without %q:\n%s", ok, w, out)
		}
	}
	if strings.Contains(strings.Join(strings.Split(out, "\n")[1:], "\n"), strings.Repeat("s", 32)) {
		t.Errorf("the token is in Jupyter's configuration:\n%s", out)
	}
	if err := os.Remove(filepath.Join(dir, "jupyter")); err != nil {
		t.Fatal(err)
	}
	if out, ok := run(t, env, "bash", "-euc", job); ok || !strings.Contains(out, "there is no jupyter") {
		t.Errorf("without jupyter: %v, %s", ok, out)
	}
	if i, err := os.Stat(ondemand + "/template/script.sh.erb"); err != nil || i.Mode()&0o111 == 0 {
		t.Errorf("Open OnDemand cannot execute script.sh: %v, %v", i, err)
	}
}

// TestKernel: the kernel's command is one that `sluice run` has.
func TestKernel(t *testing.T) {
	var kernel struct {
		Argv          []string
		DisplayName   string `json:"display_name"`
		InterruptMode string `json:"interrupt_mode"`
	}
	if err := json.Unmarshal([]byte(read(t, etc+"/jupyter/kernels/sluice/kernel.json")), &kernel); err != nil {
		t.Fatal(err)
	}
	if kernel.DisplayName == "" || kernel.InterruptMode != "message" || !slices.Contains(kernel.Argv, "{connection_file}") || !slices.Equal(kernel.Argv[:2], []string{"sluice", "run"}) {
		t.Errorf("%+v", kernel)
	}
	flags := read(t, "../../docs/user.md")
	for _, a := range kernel.Argv[2:slices.Index(kernel.Argv, "--")] {
		if strings.HasPrefix(a, "--") && !strings.Contains(flags, "| `"+a+" ") {
			t.Errorf("docs/user.md has no option %s of sluice run", a)
		}
	}
}

// TestModuleFile: the module file is one for Modules, and changes no LD_LIBRARY_PATH. TestModules loads it.
func TestModuleFile(t *testing.T) {
	text := read(t, etc+"/modulefiles/sluice/system")
	if !strings.HasPrefix(text, "#%Module") {
		t.Error("it does not begin with #%Module")
	}
	if regexp.MustCompile(`(?m)^\s*(prepend-path|append-path|setenv)\s+LD_LIBRARY_PATH`).MatchString(text) {
		t.Error("it changes LD_LIBRARY_PATH: an unload in a job would take the job's GPU away")
	}
}

// TestClient: client.sh puts the package's files into a prefix.
func TestClient(t *testing.T) {
	build, prefix := t.TempDir(), filepath.Join(t.TempDir(), "new", "prefix")
	for name, text := range map[string]string{
		"bin/sluice":             "#!/bin/bash\ncase $1 in man) mkdir -p \"$2\"; echo .TH >\"$2/sluice.1\" ;; completion) echo \"$2\" ;; esac\n",
		"shim/libcuda.so.1":      "cuda",
		"shim/libnvidia-ml.so.1": "nvml",
	} {
		path := filepath.Join(build, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if out, ok := run(t, append(os.Environ(), "BUILD="+build), etc+"/packages/client.sh", prefix); !ok {
		t.Fatal(out)
	}
	want := map[string]os.FileMode{"share/man/man1/sluice.1.gz": 0o644, "share/doc/sluice-client/copyright": 0o644}
	var list struct {
		Contents []struct {
			Src, Dst, Type, Packager string
			FileInfo                 struct{ Mode os.FileMode } `yaml:"file_info"`
		}
	}
	text := strings.ReplaceAll(read(t, etc+"/packages/client.yaml"), "@STAGE@", "STAGE")
	if err := yaml.Unmarshal([]byte(strings.ReplaceAll(text, "@LIBC@", "")), &list); err != nil {
		t.Fatal(err)
	}
	for _, c := range list.Contents {
		dst := strings.TrimPrefix(c.Dst, "/usr/")
		switch {
		case c.Packager == "rpm":
		case c.Type == "":
			want[dst] = c.FileInfo.Mode
		case c.Type == "tree" && !strings.HasPrefix(c.Src, "STAGE"):
			files, err := fs.Glob(os.DirFS(filepath.Join("../..", c.Src)), "*")
			if err != nil || len(files) == 0 {
				t.Fatalf("%s has no files (%v)", c.Src, err)
			}
			for _, name := range files {
				want[dst+name] = 0o644
			}
		}
		if !strings.HasPrefix(c.Src, "STAGE") && c.Src != "" {
			if _, err := os.Stat(filepath.Join("../..", c.Src)); err != nil {
				t.Error(err)
			}
		}
	}
	got := map[string]os.FileMode{}
	err := filepath.WalkDir(prefix, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		i, err := d.Info()
		if err == nil {
			got[strings.TrimPrefix(path, prefix+"/")] = i.Mode()
		}
		return err
	})
	if err != nil || !maps.Equal(got, want) {
		t.Errorf("%v: installed are\n%v, want\n%v", err, got, want)
	}
	// What a site copies is in the package.
	for _, dir := range []string{"modulefiles", "ondemand", "jupyter", "eessi"} {
		err := filepath.WalkDir(filepath.Join(etc, dir), func(path string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() && !strings.Contains(text, "src: etc/"+strings.TrimPrefix(path, etc+"/")+",") {
				t.Errorf("client.yaml lacks %s", path)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// TestMakefile: what is missing is told before anything is built, and a failed download ends test-recipes before its tests.
func TestMakefile(t *testing.T) {
	dir := t.TempDir()
	calls := dir + "/calls"
	if err := os.WriteFile(dir+"/go", []byte("#!/bin/bash\necho \"go $1\" >>"+calls+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains([]string{"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PREFIX", "SOURCES", "GOFLAGS"}, name)
	})
	for target, missing := range map[string]string{"install-client": "say PREFIX=DIR", "gpu-compat": "say SOURCES=DIR"} {
		out, ok := run(t, env, "make", "-n", "-C", "../..", "--no-print-directory", target)
		if ok || !strings.Contains(out, missing) || strings.Contains(out, "go build") || strings.Contains(out, "gcc") {
			t.Errorf("make %s: %v\n%s", target, ok, out)
		}
	}
	if out, ok := run(t, env, "make", "-n", "-C", "../..", "install-client", "PREFIX="+dir); !ok || !strings.Contains(out, "go build") || !strings.Contains(out, "client.sh \""+dir+"\"") {
		t.Errorf("make install-client PREFIX=%s: %v\n%s", dir, ok, out)
	}
	out, ok := run(t, env, "make", "-C", "../..", "test-recipes", "GO="+dir+"/go", "SLUICE_CACHE=/dev/null/cache")
	if ok || !strings.Contains(out, "/dev/null") || strings.Contains(read(t, calls), "go test") {
		t.Errorf("make test-recipes without its programs: %v\n%s\n%s", ok, out, read(t, calls))
	}
}

// TestBuildRecipes: Spack's and EasyBuild's recipes are Python, and call targets that the Makefile has.
func TestBuildRecipes(t *testing.T) {
	const driver = `
import sys, types
calls = []
class Package: pass
def directive(name):
    return lambda *a, **k: calls.append((name, a, k))
spack = types.ModuleType("spack.package")
for name in ("version", "depends_on", "license", "requires", "maintainers", "variant"):
    setattr(spack, name, directive(name))
spack.run_after = lambda phase: lambda f: f
spack.Executable = lambda path: lambda *a: print("runs", path, *a)
makefile = types.ModuleType("spack_repo.builtin.build_systems.makefile")
makefile.MakefilePackage = Package
for name in ("spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["spack.package"], sys.modules["spack_repo.builtin.build_systems.makefile"] = spack, makefile
space = {}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), space)
class Prefix(str):
    bin = types.SimpleNamespace(sluice="/p/bin/sluice")
p = space["Sluice"]()
p.prefix = Prefix("/p")
print("spack", p.build_targets, p.install_targets, sorted({name for name, _, _ in calls}))
p.check_install()

eb = {"SYSTEM": {"name": "system", "version": "system"}}
exec(compile(open(sys.argv[2]).read(), sys.argv[2], "exec"), eb)
for key in ("easyblock", "name", "version", "homepage", "description", "toolchain", "sources", "moduleclass"):
    assert eb[key], key
assert sys.argv[2].endswith("/%s-%s.eb" % (eb["name"], eb["version"]))
print("easybuild", eb["buildopts"], eb["install_cmd"], eb["installopts"], eb["sanity_check_paths"]["files"])
`
	out, ok := run(t, nil, "python3", "-c", driver, etc+"/spack/spack_repo/sluice/packages/sluice/package.py", etc+"/easybuild/Sluice-0.1.0.eb")
	want := []string{"spack ['client'] ['PREFIX=/p', 'install-client'] ['depends_on', 'license', 'requires', 'version']", "runs /p/bin/sluice version",
		"easybuild client make install-client PREFIX=%(installdir)s ['bin/sluice', 'lib/sluice/libcuda.so.1', 'lib/sluice/libnvidia-ml.so.1']"}
	if !ok || strings.TrimSpace(out) != strings.Join(want, "\n") {
		t.Errorf("%v:\n%s\nwant\n%s", ok, out, strings.Join(want, "\n"))
	}
	// Spack 1.0 takes a repository whose namespace is its folder's name, below spack_repo.
	var repo struct {
		Repo struct{ Namespace, API string }
	}
	if err := yaml.Unmarshal([]byte(read(t, etc+"/spack/spack_repo/sluice/repo.yaml")), &repo); err != nil || repo.Repo.Namespace != "sluice" || repo.Repo.API != "v2.0" {
		t.Errorf("Spack's repo.yaml: %+v, %v", repo, err)
	}
	makefile := read(t, "../../Makefile")
	for _, target := range []string{"client:", "install-client:"} {
		if !strings.Contains(makefile, "\n"+target) {
			t.Errorf("the Makefile has no %s", target)
		}
	}
	version := regexp.MustCompile(`(?m)^go ([0-9.]+)$`).FindStringSubmatch(read(t, "../../go.mod"))
	if eb := read(t, etc+"/easybuild/Sluice-0.1.0.eb"); len(version) == 0 || !strings.Contains(eb, "('Go', '"+version[1]+"')") {
		t.Errorf("EasyBuild's recipe wants another Go than go.mod, %v", version)
	}
}
