package wrapper

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/sluice-hpc/sluice/oci-hook/internal/settings"
)

const id = "00112233445566778899aabbccddeeff"

func TestParse(t *testing.T) {
	for line, want := range map[string]call{
		"create --bundle /b name": {"create", "/b", ""},
		"--root /r --log /l/log.json --log-format json create --bundle /b --pid-file /p/pid name": {"create", "/b", "/l/log.json"},
		"--root=/r --systemd-cgroup --log=/x create -b /b name":                                   {"create", "/b", "/x"},
		"--debug run --bundle=/b n": {"run", "/b", ""},
		"run n":                     {"run", "", ""},
		"--root /r state n":         {"state", "", ""},
		"--cgroup-manager cgroupfs --root create create --console-socket /c n": {"create", "", ""},
		"":       {},
		"--root": {},
	} {
		if got := parse(strings.Fields(line)); got != want {
			t.Errorf("%s: %+v, want %+v", line, got, want)
		}
	}
}

var ours = specs.Hook{Path: "/usr/bin/sluice-hook", Args: []string{"sluice-hook", "createContainer"}, Env: []string{"SLUICE_HOOK=1"}}

// What is not known is kept, to the last digit.
func TestEdit(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "config.json")
	in := `{"ociVersion":"9.9","future":{"n":12345678901234567890},"process":{"env":["A=1","SLUICE_SOCKET=/run/sluice/leases/` + id + `/sock"],"new":1.0},` +
		`"hooks":{"prestart":[{"path":"/x"}],"createContainer":[{"path":"/y","odd":true}]},"linux":{"seccomp":null}}`
	if err := os.WriteFile(path, []byte(in), 0o640); err != nil {
		t.Fatal(err)
	}
	for range 2 { // a second wrapper changes nothing
		if err := Edit(dir, settings.Default(), nil, ours); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var s struct {
			Annotations map[string]string
			Hooks       struct{ CreateContainer []specs.Hook }
			Process     struct{ Env []string }
		}
		if err := json.Unmarshal(b, &s); err != nil {
			t.Fatal(err)
		}
		if s.Annotations["dev.sluice.lease"] != id || s.Process.Env[1] != "SLUICE_SOCKET=/usr/lib/sluice/lease/sock" ||
			len(s.Hooks.CreateContainer) != 2 || s.Hooks.CreateContainer[1].Path != ours.Path || len(s.Hooks.CreateContainer[1].Env) == 0 {
			t.Errorf("%s", b)
		}
		for _, keep := range []string{`"n":12345678901234567890`, `"new":1.0`, `"odd":true`, `"prestart":[{"path":"/x"}]`, `"seccomp":null`} {
			if !strings.Contains(string(b), keep) {
				t.Errorf("%s was lost: %s", keep, b)
			}
		}
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o640 {
			t.Errorf("mode %v, %v", fi.Mode(), err)
		}
	}
}

// Nobody asks: not a byte changes, whatever the file is.
func TestUnasked(t *testing.T) {
	for _, in := range []string{`{}`, `{"annotations":{"a":"b"},"process":{"env":["SLUICE_SOCKET=/elsewhere"]}}`, `not JSON`, `[]`, ``} {
		dir := t.TempDir()
		path := filepath.Join(dir, "config.json")
		if err := os.WriteFile(path, []byte(in), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Edit(dir, settings.Default(), nil, ours); err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if b, _ := os.ReadFile(path); string(b) != in {
			t.Errorf("%s became %s", in, b)
		}
	}
	if err := Edit("/nowhere", settings.Default(), nil, ours); err != nil {
		t.Error(err) // the runtime says it better
	}
}

// Settings that cannot be read are of concern to who asks alone.
func TestBroken(t *testing.T) {
	for in, want := range map[string]error{`{}`: nil, `{"annotations":{"dev.sluice.lease":"` + id + `"}}`: settings.ErrUnsafe} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(in), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Edit(dir, settings.Default(), settings.ErrUnsafe, ours); !errors.Is(err, want) {
			t.Errorf("%s: %v", in, err)
		}
		if b, _ := os.ReadFile(filepath.Join(dir, "config.json")); string(b) != in {
			t.Errorf("%s became %s", in, b)
		}
	}
}

// A link in the place of config.json is neither read nor replaced.
func TestLink(t *testing.T) {
	dir := t.TempDir()
	in := `{"annotations":{"dev.sluice.lease":"` + id + `"}}`
	if err := os.WriteFile(filepath.Join(dir, "other"), []byte(in), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("other", filepath.Join(dir, "config.json")); err != nil {
		t.Fatal(err)
	}
	if err := Edit(dir, settings.Default(), nil, ours); err != nil {
		t.Error(err)
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "other")); string(b) != in {
		t.Errorf("became %s", b)
	}
}

// The reason is where engines look for it.
func TestTell(t *testing.T) {
	log := filepath.Join(t.TempDir(), "log.json")
	tell(log, ErrSpec)
	var line struct{ Level, Msg string }
	b, err := os.ReadFile(log)
	if err == nil {
		err = json.Unmarshal(b, &line)
	}
	if err != nil || line.Level != "error" || line.Msg != ErrSpec.Error() {
		t.Errorf("%v: %s", err, b)
	}
}
