package recipes

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// hubDriver is the hub in a few lines: it loads the configuration, takes requests by the form or, as POST /hub/api/users/NAME/server
// does, by JSON that nobody has looked at, and starts the server. The spawner makes its script as batchspawner 1.3.0 does: of the
// attributes req_*, over which it lays user_options.
const hubDriver = `
import asyncio, json, sys, types

class Any:
    def __getattr__(self, name):
        self.__dict__[name] = Any()
        return self.__dict__[name]

class HTTPError(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status

class SlurmSpawner:
    req_partition = req_runtime = req_gres = req_nprocs = req_options = req_prologue = ""
    script = None
    async def submit_batch_script(self):
        v = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("req_")}
        v.update(self.user_options)
        lines = ["#!/bin/bash"]
        for option, name in (("partition", "partition"), ("time", "runtime"), ("gres", "gres"), ("cpus-per-task", "nprocs")):
            if v[name]:
                lines.append(f"#SBATCH --{option}={v[name]}")
        if v["options"]:
            lines.append(f"#SBATCH {v['options']}")
        self.script = "\n".join(lines + [v["prologue"], "srun batchspawner-singleuser"])
        return "4711"

batchspawner, tornado = types.ModuleType("batchspawner"), types.ModuleType("tornado")
batchspawner.SlurmSpawner = SlurmSpawner
tornado.web = types.SimpleNamespace(HTTPError=HTTPError)
sys.modules.update(batchspawner=batchspawner, tornado=tornado)
config = Any()
space = {"get_config": lambda: config}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), space)

out = []
for request in json.load(sys.stdin):
    spawner = config.JupyterHub.spawner_class()
    try:
        if "form" in request:
            # What the form has made is kept in the hub's database as JSON, and given out again at the next start.
            spawner.user_options = json.loads(json.dumps(config.Spawner.options_from_form(request["form"])))
        else:
            spawner.user_options = request["json"]
        asyncio.run(spawner.submit_batch_script())
        out.append({"script": spawner.script})
    except ValueError as e:
        assert "form" in request and spawner.script is None
        out.append({"error": str(e)})
    except HTTPError as e:
        assert e.status == 400 and spawner.script is None
        out.append({"error": str(e)})
json.dump({"page": config.Spawner.options_form(None), "out": out}, sys.stdout)
`

// hub starts a server for each request, and returns the form's page and for each request the script or why there is none.
func hub(t *testing.T, requests []map[string]any) (page string, out []struct{ Script, Error string }) {
	t.Helper()
	text, err := json.Marshal(requests)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("python3", "-c", hubDriver, etc+"/jupyter/jupyterhub_config.py")
	cmd.Stdin, cmd.Stderr = strings.NewReader(string(text)), os.Stderr
	b, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Page string
		Out  []struct{ Script, Error string }
	}
	if err := json.Unmarshal(b, &got); err != nil || len(got.Out) != len(requests) {
		t.Fatalf("%v: %s", err, b)
	}
	return got.Page, got.Out
}

// checkScript holds the batch script that a request has made against the request.
func checkScript(t *testing.T, r request, script string) {
	t.Helper()
	var args []string
	lines := strings.Split(script, "\n")
	for _, l := range lines {
		if options, ok := strings.CutPrefix(l, "#SBATCH "); ok {
			args = append(args, strings.Fields(options)...)
		}
	}
	checkArguments(t, r, args)
	want := []string{"--time=" + r.hours + ":00:00", "--gres=rgpu:" + r.percent, "--cpus-per-task=" + r.cores}
	for name, value := range map[string]string{"--rgpu-mem=": r.mem, "--account=": r.account, "--partition=": r.partition} {
		if value != "" {
			want = append(want, name+value)
		}
	}
	slices.Sort(args)
	slices.Sort(want)
	if !slices.Equal(args, want) || !strings.HasSuffix(script, "\n\nsrun batchspawner-singleuser") {
		t.Errorf("%+v: the script is\n%s\nwant the options %q", r, script, want)
	}
}

// TestJupyterHub: the job that a user's choices make, and what is refused, by the form and by the hub's REST interface.
func TestJupyterHub(t *testing.T) {
	all := requests(t)
	var in []map[string]any
	for _, r := range all {
		given := map[string]string{"percent": r.percent, "mem": r.mem, "cores": r.cores, "hours": r.hours, "account": r.account, "partition": r.partition}
		form := map[string][]string{"_xsrf": {"token"}}
		for name, value := range given {
			form[name] = []string{value}
		}
		in = append(in, map[string]any{"form": form}, map[string]any{"json": given})
	}
	page, out := hub(t, in)
	for i, r := range all {
		for _, o := range out[2*i : 2*i+2] {
			switch {
			case r.refused != "" && !strings.Contains(o.Error, r.refused):
				t.Errorf("%+v: %+v", r, o)
			case r.refused == "" && o.Error != "":
				t.Errorf("%+v: refused: %s", r, o.Error)
			case r.refused == "":
				checkScript(t, r, o.Script)
			}
		}
	}
	_, fields := form(t)
	for _, w := range []string{`name="percent" type="number" min="1" max="100"`, `name="hours" type="number" min="1" max="24"`, `pattern="` + fields["rgpu_mem"].Pattern + `"`} {
		if !strings.Contains(page, w) {
			t.Errorf("the page lacks %s:\n%s", w, page)
		}
	}
}

// TestJupyterHubREST: what only JSON can say. The names of batchspawner's own template are no choices.
func TestJupyterHubREST(t *testing.T) {
	usual := request{percent: "25", cores: "2", hours: "2"}
	cases := []struct {
		json    string
		want    request
		refused string
	}{
		{`{}`, usual, ""},
		{`{"percent": 50, "hours": 24, "mem": "8G"}`, request{percent: "50", cores: "2", hours: "24", mem: "8G"}, ""},
		{`{"hours": 25}`, usual, "Hours: '25': want a whole number from 1 to 24"},
		{`{"percent": 101}`, usual, "from 1 to 100"},
		{`{"percent": -1}`, usual, "from 1 to 100"},
		{`{"percent": true}`, usual, "want a number or a text"},
		{`{"percent": 50.5}`, usual, "want a number or a text"},
		{`{"percent": null}`, usual, "want a number or a text"},
		{`{"percent": ["50"]}`, usual, "want a number or a text"},
		{`{"partition": true}`, usual, "want a number or a text"},
		{`{"account": {"a": "b"}}`, usual, "want a number or a text"},
		{`{"partition": "gpu\n#SBATCH --nodelist=node01"}`, usual, "want a name"},
		{`{"mem": "8G --gres=gpu:8"}`, usual, "from 2M to 16T"},
	}
	for _, name := range []string{"gres", "nprocs", "runtime", "options", "memory", "reservation", "prologue", "epilogue", "srun", "cmd", "homedir", "keepvars", "Percent", ""} {
		text, err := json.Marshal(map[string]string{name: "x\n#SBATCH --time=99-0\nid"})
		if err != nil {
			t.Fatal(err)
		}
		cases = append(cases, struct {
			json    string
			want    request
			refused string
		}{string(text), usual, strconv.Quote(name)})
	}
	var in []map[string]any
	for _, c := range cases {
		in = append(in, map[string]any{"json": json.RawMessage(c.json)})
	}
	_, out := hub(t, in)
	for i, c := range cases {
		switch o := out[i]; {
		case c.refused == "" && o.Error == "":
			checkScript(t, c.want, o.Script)
		case c.refused == "" || o.Script != "" || !strings.Contains(strings.ReplaceAll(o.Error, "'", `"`), strings.ReplaceAll(c.refused, "'", `"`)):
			t.Errorf("%s: %+v, want %q", c.json, o, c.refused)
		}
	}
}
