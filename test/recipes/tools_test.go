//go:build recipes

package recipes

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// tree is where tools.sh has unpacked the programs.
func tree(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("SLUICE_RECIPES")
	if dir == "" {
		t.Fatal("SLUICE_RECIPES is not set: make test-recipes")
	}
	return dir
}

// librariesOf are the directories of the tree's libraries.
func librariesOf(dir string) string {
	return dir + "/usr/lib/x86_64-linux-gnu:" + dir + "/lib/x86_64-linux-gnu"
}

// libraries is the environment in which a program of the tree finds its libraries.
func libraries(dir string) []string {
	return []string{"LD_LIBRARY_PATH=" + librariesOf(dir), "TCL_LIBRARY=" + dir + "/usr/share/tcltk/tcl8.6", "PATH=" + dir + "/usr/bin:/usr/bin:/bin", "LANG=C.UTF-8"}
}

// ruby runs a program in Ruby with a value as JSON on its standard input, and reads the JSON that it prints.
func ruby(t *testing.T, program string, in, out any, args ...string) {
	t.Helper()
	dir := tree(t)
	text, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	lib := dir + "/usr/lib/ruby/3.1.0"
	cmd := exec.Command(dir+"/usr/bin/ruby3.1", append([]string{"--disable-gems", "-I", lib, "-I", dir + "/usr/lib/x86_64-linux-gnu/ruby/3.1.0", "-rjson", "-rerb", "-ryaml", "-rostruct", "-e", program}, args...)...)
	cmd.Env, cmd.Stdin, cmd.Stderr = libraries(dir), strings.NewReader(string(text)), os.Stderr
	b, err := cmd.Output()
	if err != nil {
		t.Fatalf("ruby: %v", err)
	}
	if err := json.Unmarshal(b, out); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
}

// TestOnDemandSubmit: submit.yml.erb, rendered as Open OnDemand does it: in the binding of an object that has the form's values, then
// as YAML without classes.
func TestOnDemandSubmit(t *testing.T) {
	const program = `
file = ARGV[0]
out = JSON.parse($stdin.read).map do |values|
  erb = ERB.new(File.read(file), trim_mode: "-")
  erb.filename = file
  begin
    { submit: YAML.safe_load(erb.result(OpenStruct.new(values).instance_eval { binding })) }
  rescue ArgumentError => e
    { error: e.message }
  end
end
puts JSON.generate(out)
`
	all := requests(t)
	var in []map[string]string
	for _, r := range all {
		in = append(in, map[string]string{"rgpu_percent": r.percent, "rgpu_mem": r.mem, "cores": r.cores, "bc_num_hours": r.hours, "bc_account": r.account, "bc_queue": r.partition})
	}
	var out []struct {
		Submit struct {
			BatchConnect struct{ Template string } `json:"batch_connect"`
			Script       struct{ Native []string }
		}
		Error string
	}
	ruby(t, program, in, &out, ondemand+"/submit.yml.erb")
	if len(out) != len(all) {
		t.Fatalf("%d answers to %d requests", len(out), len(all))
	}
	refused := 0
	for i, r := range all {
		switch o := out[i]; {
		case r.refused != "":
			refused++
			if !strings.Contains(o.Error, r.refused) {
				t.Errorf("%+v: %+v", r, o)
			}
		case o.Error != "" || o.Submit.BatchConnect.Template != "basic":
			t.Errorf("%+v: %+v", r, o)
		default:
			checkArguments(t, r, o.Submit.Script.Native)
			for _, a := range o.Submit.Script.Native {
				if !strings.HasPrefix(a, "--") || strings.ContainsAny(a, " \n") {
					t.Errorf("%+v: %q", r, a)
				}
			}
		}
	}
	t.Logf("%d requests, of which %d were refused", len(all), refused)
}

// TestOnDemandView: the page that leads to Jupyter.
func TestOnDemandView(t *testing.T) {
	var got struct{ Page string }
	ruby(t, `puts JSON.generate({ page: ERB.new(File.read(ARGV[0]), trim_mode: "-").result(OpenStruct.new(JSON.parse($stdin.read)).instance_eval { binding }) })`,
		map[string]any{"host": "node01", "port": 4711, "password": "secret"}, &got, ondemand+"/view.html.erb")
	if !strings.Contains(got.Page, `action="/node/node01/4711/login?next=%2Fnode%2Fnode01%2F4711%2Flab" method="post"`) || !strings.Contains(got.Page, `name="password" value="secret"`) {
		t.Errorf("the page is\n%s", got.Page)
	}
}

// TestModules loads and unloads the module file with Environment Modules and with Lmod.
func TestModules(t *testing.T) {
	dir := tree(t)
	tools := map[string][]string{
		"Modules": {dir + "/usr/bin/tclsh8.6", dir + "/usr/lib/modulecmd.tcl"},
		"Lmod":    {dir + "/usr/bin/lua5.3", dir + "/usr/share/lmod/lmod/libexec/lmod"},
	}
	for name, tool := range tools {
		t.Run(name, func(t *testing.T) {
			prefix := t.TempDir()
			put := func(path, text string) {
				t.Helper()
				if err := os.MkdirAll(filepath.Dir(prefix+path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(prefix+path, []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			module := read(t, etc+"/modulefiles/sluice/system")
			put("/share/modulefiles/sluice/system", module)
			// As a shell does it: what the tool prints is evaluated. The job's own path must be the same at the end.
			const shell = `
module() { out=$(LD_LIBRARY_PATH=$LIBS $TOOL bash "$@") || return; eval "$out"; }
state() { echo "$1: PATH=$PATH MANPATH=${MANPATH-unset} LD_LIBRARY_PATH=$LD_LIBRARY_PATH LOADED=${LOADEDMODULES-}"; }
export LD_LIBRARY_PATH=/usr/lib/sluice:/opt/lib LMOD_CMD=lmod
module load sluice; state loaded
module unload sluice; state unloaded
module help sluice 2>&1; module whatis sluice 2>&1
`
			env := append(libraries(dir), "HOME="+prefix, "MODULEPATH="+prefix+"/share/modulefiles", "TOOL="+strings.Join(tool, " "), "LIBS="+librariesOf(dir))
			path := dir + "/usr/bin:/usr/bin:/bin"
			line := func(out, state string) string {
				for l := range strings.Lines(out) {
					if strings.HasPrefix(l, state+": ") {
						return strings.TrimSpace(l)
					}
				}
				return ""
			}
			check := func(what, got, path, manpath string, loaded bool) {
				t.Helper()
				if !strings.Contains(got, "PATH="+path+" ") || !strings.Contains(got, " MANPATH="+manpath) || !strings.Contains(got, "LD_LIBRARY_PATH=/usr/lib/sluice:/opt/lib ") ||
					strings.HasSuffix(got, "LOADED=sluice/system") != loaded {
					t.Errorf("%s: %s\nwant PATH=%s MANPATH=%s loaded %v", what, got, path, manpath, loaded)
				}
			}

			out, _ := run(t, env, "bash", "-c", shell)
			if got := line(out, "loaded"); !strings.Contains(out, "sluice: "+prefix+"/bin/sluice is not there") || strings.Contains(got, prefix+"/bin") {
				t.Errorf("without a program: %s", out)
			}

			put("/bin/sluice", "#!/bin/sh\n")
			out, _ = run(t, env, "bash", "-c", shell)
			check("loaded", line(out, "loaded"), prefix+"/bin:"+path, prefix+"/share/man:", true)
			check("unloaded", line(out, "unloaded"), path, "", false)
			for _, w := range []string{"sluice run --fraction 50", `eval "$(sluice env)"`, "fractions of remote GPUs"} {
				if !strings.Contains(out, w) {
					t.Errorf("help and whatis lack %q:\n%s", w, out)
				}
			}

			put("/lib/sluice/bin/podman", "#!/bin/sh\n")
			out, _ = run(t, env, "bash", "-c", shell)
			check("with sluice-hook", line(out, "loaded"), prefix+"/lib/sluice/bin:"+prefix+"/bin:"+path, prefix+"/share/man:", true)
			check("with sluice-hook, unloaded", line(out, "unloaded"), path, "", false)

			// A package, below /usr. /usr itself is not to be written here: the file is told another name for it.
			put("/share/modulefiles/sluice/system", strings.ReplaceAll(module, `"/usr"`, `"`+prefix+`"`))
			out, _ = run(t, env, "bash", "-c", shell)
			check("a package", line(out, "loaded"), prefix+"/lib/sluice/bin:"+path, "unset", true)
			check("a package, unloaded", line(out, "unloaded"), path, "unset", false)
		})
	}
}
