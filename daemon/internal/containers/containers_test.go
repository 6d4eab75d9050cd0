package containers

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// node makes the directories of one, with the hook installed and its content prepared.
func node(t *testing.T) (*Files, Config) {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-containers")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	c := Config{
		Leases: dir + "/run/leases", Staging: dir + "/run/leases.new", Lib: dir + "/lib",
		Hook: dir + "/sluice-hook", Content: dir + "/lib/container", CDI: dir + "/cdi",
	}
	for _, d := range []string{c.Leases, c.Staging, c.Content} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{c.Hook, c.Content + "/libcuda.so.1"} {
		if err := os.WriteFile(f, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return New(c), c
}

// granted makes a lease and its directory.
func granted(t *testing.T, c Config, job string) lease.Lease {
	t.Helper()
	l := lease.Lease{ID: form.NewLeaseID(), Request: lease.Request{Key: lease.Key{Cluster: "c", Job: job, Node: "n"}, UID: 1000}}
	if err := os.Mkdir(filepath.Join(c.Leases, l.ID), 0o711); err != nil {
		t.Fatal(err)
	}
	return l
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range all {
		out = append(out, e.Name())
	}
	return out
}

func TestWrite(t *testing.T) {
	f, c := node(t)
	l := granted(t, c, "42")
	dir := filepath.Join(c.Leases, l.ID)
	// What an older daemon let the user put there is replaced and not followed.
	victim := filepath.Join(filepath.Dir(c.Lib), "victim")
	if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, dir+"/containers.conf"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a daemon that is started again makes them again
		if err := f.Write(l); err != nil {
			t.Fatal(err)
		}
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "mine" {
		t.Errorf("%s, %v", b, err)
	}
	for _, path := range []string{dir + "/containers.conf", dir + "/apptainer.sh", c.CDI + "/sluice-" + l.ID + ".json"} {
		fi, err := os.Lstat(path)
		if err != nil || fi.Mode() != 0o644 {
			t.Errorf("%s: %v, %v", path, fi, err)
		}
	}
	if all := append(list(t, c.Staging), list(t, c.CDI)...); len(all) != 1 {
		t.Errorf("left: %v", all)
	}
	b, err := os.ReadFile(dir + "/containers.conf")
	if want := "[containers]\nannotations = [\"dev.sluice.lease=" + l.ID + "\"]\n"; err != nil || string(b) != want {
		t.Errorf("%s, %v", b, err)
	}
	var spec struct {
		CDIVersion, Kind string
		Devices          []struct {
			Name           string
			ContainerEdits struct {
				Mounts []struct{ HostPath, ContainerPath string }
				Hooks  []struct {
					Path string
					Env  []string
				}
			}
		}
	}
	b, err = os.ReadFile(c.CDI + "/sluice-" + l.ID + ".json")
	if err == nil {
		err = json.Unmarshal(b, &spec)
	}
	if err != nil || spec.Kind != "sluice.dev/gpu" || len(spec.Devices) != 1 || spec.Devices[0].Name != "42" {
		t.Fatalf("%v: %s", err, b)
	}
	e := spec.Devices[0].ContainerEdits
	if e.Mounts[0].HostPath != c.Content || e.Mounts[1].HostPath != dir || e.Hooks[0].Path != c.Hook || len(e.Hooks[0].Env) == 0 {
		t.Errorf("%+v", e)
	}
	f.Remove(l.ID)
	f.Remove(l.ID)
	f.Remove("../../etc/passwd")
	if all := list(t, c.CDI); len(all) != 0 {
		t.Errorf("left: %v", all)
	}
}

// The script keeps what an image says, whatever is in the paths.
func TestScript(t *testing.T) {
	f, c := node(t)
	f.cfg.Lib = c.Lib + "/it's $HOME"
	l := granted(t, c, "42")
	if err := f.Write(l); err != nil {
		t.Fatal(err)
	}
	for had, want := range map[string]string{"": f.cfg.Lib, "/image/lib": f.cfg.Lib + ":/image/lib"} {
		cmd := exec.Command("sh", "-euc", `. "$1"; echo "$LD_LIBRARY_PATH|$SLUICE_SOCKET|$SLUICE_LEASE_ID|$PATH"`, "sh", filepath.Join(c.Leases, l.ID, "apptainer.sh"))
		cmd.Env = []string{"PATH=/bin"}
		if had != "" {
			cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+had)
		}
		out, err := cmd.CombinedOutput()
		if want = strings.Join([]string{want, filepath.Join(c.Leases, l.ID, "sock"), l.ID, "/bin:" + f.cfg.Lib + "/container/bin"}, "|") + "\n"; err != nil || string(out) != want {
			t.Errorf("%v: %s, want %s", err, out, want)
		}
	}
}

// Without the hook nothing names it, and without content nothing mounts it.
func TestNotInstalled(t *testing.T) {
	f, c := node(t)
	if err := os.Remove(c.Content + "/libcuda.so.1"); err != nil {
		t.Fatal(err)
	}
	l := granted(t, c, "1")
	if err := f.Write(l); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(c.CDI); !os.IsNotExist(err) {
		t.Error("a CDI file without content", err)
	}
	if err := os.Chmod(c.Hook, 0o644); err != nil {
		t.Fatal(err)
	}
	l = granted(t, c, "2")
	if err := f.Write(l); err != nil {
		t.Fatal(err)
	}
	if all := list(t, filepath.Join(c.Leases, l.ID)); !slices.Equal(all, []string{"apptainer.sh", "cdi"}) {
		t.Error(all)
	}
	for _, o := range f.Env(l) {
		if o.Name == "CONTAINERS_CONF_OVERRIDE" {
			t.Error(o)
		}
	}
}

func TestEnv(t *testing.T) {
	f, c := node(t)
	l := granted(t, c, "42")
	if err := f.Write(l); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(c.Leases, l.ID)
	ops := f.Env(l)
	for _, want := range []rpc.EnvOp{
		{Name: "CONTAINERS_CONF_OVERRIDE", Value: dir + "/containers.conf"},
		{Prepend: true, Name: "APPTAINER_BINDPATH", Value: dir + "/apptainer.sh:/.singularity.d/env/95-sluice.sh:ro"},
		{Prepend: true, Name: "SINGULARITY_BINDPATH", Value: c.Lib + ":" + c.Lib + ":ro"},
		{Name: "APPTAINERENV_SLUICE_SOCKET", Value: dir + "/sock"},
	} {
		if !slices.Contains(ops, want) {
			t.Errorf("no %+v in %+v", want, ops)
		}
	}
	// slurmstepd undoes them for a job within the job by a record of at most 8 KiB.
	if text, err := rpc.EnvText(ops); err != nil || len(text) > 4096 {
		t.Errorf("%d bytes, %v", len(text), err)
	}
	// Where the script could not be written, the binds stand without it.
	if err := os.Remove(dir + "/apptainer.sh"); err != nil {
		t.Fatal(err)
	}
	for _, o := range f.Env(l) {
		if strings.Contains(o.Value, ".singularity.d") {
			t.Error(o)
		}
	}
}

// Keep ends what a crash has left, and nothing that is not this daemon's.
func TestKeep(t *testing.T) {
	f, c := node(t)
	live, dead := granted(t, c, "1"), granted(t, c, "2")
	for _, l := range []lease.Lease{live, dead} {
		if err := f.Write(l); err != nil {
			t.Fatal(err)
		}
	}
	other := form.NewLeaseID()
	keep := []string{
		"sluice-" + live.ID + ".json", "nvidia.json", "sluice-notes.json",
		"sluice-" + other + ".json", // another daemon's
	}
	half := func(id string) string { return ".sluice-" + id + ".json.0123456789abcdef.new" }
	gone := []string{half(dead.ID), half(live.ID)}
	for name, text := range map[string]string{
		keep[1]: "{}", keep[2]: "{}", keep[3]: fmt.Sprintf(`{"hostPath": "/run/other/leases/%s"}`, other),
		gone[0]: "", gone[1]: fmt.Sprintf(`{"hostPath": "%s/%s"`, c.Leases, live.ID),
	} {
		if err := os.WriteFile(filepath.Join(c.CDI, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f.Keep(func(id string) bool { return id == live.ID })
	slices.Sort(keep)
	if all := list(t, c.CDI); !slices.Equal(all, keep) {
		t.Errorf("%v, want %v", all, keep)
	}
}

func TestChecks(t *testing.T) {
	f, c := node(t)
	says := func(level rpc.Level, part string) {
		t.Helper()
		if all := f.Checks(); len(all) != 1 || all[0].Level != level || !strings.Contains(all[0].Text, part) || (level == rpc.OK) != (all[0].Remedy == "") {
			t.Errorf("%+v, want %v %s", all, level, part)
		}
	}
	says(rpc.OK, "told of leases")
	if err := os.Mkdir(c.CDI, 0o755); err != nil {
		t.Fatal(err)
	}
	says(rpc.OK, "")
	if err := os.Chmod(c.CDI, 0o777); err != nil {
		t.Fatal(err)
	}
	says(rpc.Warn, "containers.cdi_dir")
	if err := os.WriteFile(c.Lib+"/libcuda.so.1", []byte("newer"), 0o644); err != nil {
		t.Fatal(err)
	}
	says(rpc.Warn, "another release's")
	if err := os.Remove(c.Content + "/libcuda.so.1"); err != nil {
		t.Fatal(err)
	}
	says(rpc.Warn, "get no fraction")
	if err := os.Remove(c.Hook); err != nil {
		t.Fatal(err)
	}
	if all := f.Checks(); len(all) != 0 {
		t.Error(all)
	}
}

// A directory that others can write says nothing to engines of root's.
func TestUnsafe(t *testing.T) {
	f, c := node(t)
	if err := os.Mkdir(c.CDI, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(c.CDI, 0o777); err != nil {
		t.Fatal(err)
	}
	l := granted(t, c, "1")
	if err := f.Write(l); err == nil || !strings.Contains(err.Error(), "containers.cdi_dir") {
		t.Error(err)
	}
	if all := list(t, filepath.Join(c.Leases, l.ID)); len(all) != 3 {
		t.Error("the other files", all)
	}
	if all := list(t, c.CDI); len(all) != 0 {
		t.Error(all)
	}
}
