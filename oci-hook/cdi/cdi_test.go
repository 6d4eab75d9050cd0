package cdi

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const id = "00112233445566778899aabbccddeeff"

var place = Place{
	Lib: "/usr/lib/sluice/container", Leases: "/run/sluice/leases", Target: "/usr/lib/sluice", Socket: "/usr/lib/sluice/lease/sock",
	Hook: specs.Hook{Path: "/usr/bin/sluice-hook", Args: []string{"sluice-hook", "createContainer"}, Env: []string{"SLUICE_HOOK=1"}},
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	abandoned := filepath.Join(dir, ".sluice-job41.json.0123456789abcdef.new") // by a writer that was killed
	if err := os.WriteFile(abandoned, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(abandoned, time.Time{}, time.Now().Add(-24*time.Hour)); err != nil {
		t.Fatal(err)
	}
	var path string
	for range 2 {
		var err error
		if path, err = Write(dir, Device{"job42", id}, place); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var f file
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	d := f.Devices[0]
	if f.CDIVersion != "0.3.0" || f.Kind != "sluice.dev/gpu" || d.Name != "job42" || len(d.Edits.Mounts) != 2 ||
		d.Edits.Mounts[1].HostPath != "/run/sluice/leases/"+id || strings.Join(d.Edits.Hooks[0].Args, " ") != "sluice-hook createContainer --lease "+id || len(d.Edits.Hooks[0].Env) == 0 {
		t.Errorf("%s", b)
	}
	if e, err := os.ReadDir(dir); err != nil || len(e) != 1 {
		t.Errorf("%v, %v", e, err)
	}
	if len(place.Hook.Args) != 2 {
		t.Error("the hook given was changed")
	}
}

// A job's number as the name needs a newer version, or engines refuse the file.
func TestDigits(t *testing.T) {
	b, err := Spec(Device{"42", id}, place)
	if err != nil {
		t.Fatal(err)
	}
	var f file
	if err := json.Unmarshal(b, &f); err != nil || f.CDIVersion != "0.5.0" {
		t.Errorf("%v: %s", err, b)
	}
}

func TestNames(t *testing.T) {
	for _, d := range []Device{{"", id}, {"../x", id}, {"a b", id}, {"job", ""}, {"job", "../../etc"}, {".x", id}} {
		if _, err := Spec(d, place); !errors.Is(err, ErrName) {
			t.Errorf("%+v: %v", d, err)
		}
	}
}
