package containers

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// One file in a directory of the job's, made anew by each daemon, and variables that lead to it.
func TestCharliecloud(t *testing.T) {
	f, c := node(t)
	l := granted(t, c, "42")
	dir := filepath.Join(c.Leases, l.ID)
	// What an older daemon let the user put there goes, and is not followed.
	victim := filepath.Join(filepath.Dir(c.Lib), "victim")
	if err := os.Mkdir(victim, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, dir+"/cdi"); err != nil {
		t.Fatal(err)
	}
	if ops := f.charlieEnv(l); ops != nil {
		t.Errorf("without a file: %v", ops)
	}
	for range 2 {
		if err := f.Write(l); err != nil {
			t.Fatal(err)
		}
	}
	if left := list(t, victim); len(left) > 0 {
		t.Errorf("written: %v", left)
	}
	if fi, err := os.Lstat(dir + "/cdi"); err != nil || fi.Mode() != os.ModeDir|0o755 {
		t.Errorf("%v, %v", fi, err)
	}
	b, err := os.ReadFile(dir + "/cdi/sluice.json")
	var spec charlieSpec
	if err == nil {
		err = json.Unmarshal(b, &spec)
	}
	if err != nil || spec.Kind != "sluice.dev/gpu" || len(spec.Edits.Mounts) != 3 || spec.Edits.Mounts[2].Host != dir || !slices.Contains(spec.Edits.Env, "SLUICE_SOCKET="+dir+"/sock") {
		t.Errorf("%v: %s", err, b)
	}
	smi := c.Content + "/bin/nvidia-smi"
	if err := os.Mkdir(filepath.Dir(smi), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(smi, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := f.Write(l); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(dir + "/cdi/sluice.json"); err != nil || !strings.Contains(string(b), `"`+smi+`"`) {
		t.Errorf("nvidia-smi: %v: %s", err, b)
	}
	var dirs []string
	for _, o := range f.Env(l) {
		if o.Name == "CH_RUN_CDI_DIRS" {
			dirs = append([]string{o.Value}, dirs...)
		}
	}
	if got := strings.Join(dirs, ":"); got != dir+"/cdi:/etc/cdi" {
		t.Errorf("CH_RUN_CDI_DIRS=%s", got)
	}
}
