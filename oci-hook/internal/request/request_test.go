package request

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/internal/form"
)

const (
	leases = "/run/sluice/leases"
	one    = "00112233445566778899aabbccddeeff"
	two    = "ffeeddccbbaa99887766554433221100"
)

func TestFind(t *testing.T) {
	for name, c := range map[string]struct {
		arg, note string
		env       []string
		want      string
		host, bad bool
	}{
		"nothing":             {},
		"annotation":          {note: one, want: one},
		"argument":            {arg: one, want: one},
		"environment":         {env: []string{"SLUICE_SOCKET=" + leases + "/" + one + "/sock"}, want: one, host: true},
		"all the same":        {arg: one, note: one, env: []string{"SLUICE_SOCKET=" + leases + "/" + one + "/sock"}, want: one, host: true},
		"last of environment": {env: []string{"SLUICE_SOCKET=" + leases + "/" + two + "/sock", "SLUICE_SOCKET=" + leases + "/" + one + "/sock"}, want: one, host: true},
		"socket of elsewhere": {env: []string{"SLUICE_SOCKET=/tmp/x"}},
		"socket in container": {env: []string{"SLUICE_SOCKET=/usr/lib/sluice/lease/sock"}, note: one, want: one},
		"two":                 {arg: one, note: two, bad: true},
		"two otherwise":       {note: one, env: []string{"SLUICE_SOCKET=" + leases + "/" + two + "/sock"}, bad: true},
		"empty":               {note: " ", bad: true},
		"upper case":          {note: strings.ToUpper(two), bad: true},
		"out":                 {env: []string{"SLUICE_SOCKET=" + leases + "/../../etc/sock"}, bad: true},
		"not the socket":      {env: []string{"SLUICE_SOCKET=" + leases + "/" + one}, bad: true},
	} {
		notes := map[string]string{}
		if c.note != "" {
			notes[Annotation] = c.note
		}
		r, err := Find(c.arg, notes, c.env, leases)
		if c.bad != errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if c.bad {
			continue
		}
		if (r == nil) != (c.want == "") || r != nil && (r.Lease != c.want || r.HostPath != c.host) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

func TestLibraryDirs(t *testing.T) {
	got := LibraryDirs([]string{"LD_LIBRARY_PATH=/a:rel::../../../b;/c/../d"}, "/srv")
	for _, want := range []string{"/a", "/srv/rel", "/b", "/d", "/usr/lib64"} {
		if !slices.Contains(got, want) {
			t.Errorf("no %s in %v", want, got)
		}
	}
	if n := len(LibraryDirs([]string{"LD_LIBRARY_PATH=" + strings.Repeat("/x/y:", 5) + strings.Repeat("a:", 1<<20)}, "/")); n > maxDirs {
		t.Errorf("%d directories", n)
	}
	var many strings.Builder
	for i := range 1000 {
		many.WriteString("/d" + strings.Repeat("x", i) + ":")
	}
	if n := len(LibraryDirs([]string{"LD_LIBRARY_PATH=" + many.String()}, "/")); n > maxDirs {
		t.Errorf("%d directories", n)
	}
}

// Whatever a specification says, what comes out has the form of a lease.
func FuzzFind(f *testing.F) {
	f.Add(one, "SLUICE_SOCKET="+leases+"/"+one+"/sock", "/")
	f.Add("", "SLUICE_SOCKET="+leases+"/../x/sock", "x")
	f.Fuzz(func(t *testing.T, note, env, cwd string) {
		r, err := Find("", map[string]string{Annotation: note}, []string{env}, leases)
		if err == nil && (r == nil || !form.LeaseID(r.Lease).Valid()) {
			t.Errorf("%+v", r)
		}
		for _, d := range LibraryDirs([]string{env}, cwd) {
			if !strings.HasPrefix(d, "/") || strings.Contains(d+"/", "/../") {
				t.Errorf("directory %q", d)
			}
		}
	})
}
