package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

func TestUnsafeDirectories(t *testing.T) {
	for _, bad := range []string{"", "state", "run", "log"} {
		dir := t.TempDir()
		c := config.Default()
		c.Node = "n"
		c.StateDir, c.RunDir, c.Audit.File = filepath.Join(dir, "state"), filepath.Join(dir, "run"), filepath.Join(dir, "log", "audit.log")
		if bad != "" {
			if err := os.Mkdir(filepath.Join(dir, bad), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(filepath.Join(dir, bad), 0o777); err != nil {
				t.Fatal(err)
			}
		}
		want := bad != ""
		if err := Check(&c); errors.Is(err, safefile.ErrUnsafe) != want || err != nil && !want {
			t.Errorf("%q: check: %v", bad, err)
		}
		if _, err := os.Stat(c.StateDir); err == nil && bad != "state" {
			t.Errorf("%q: --check has made a directory", bad)
		}
		if err := Prepare(&c); errors.Is(err, safefile.ErrUnsafe) != want {
			t.Errorf("%q: prepare: %v", bad, err)
		}
	}
}

// A start removes what a killed daemon left unfinished in run_dir.
func TestPrepareSweeps(t *testing.T) {
	c := testConfig(t.TempDir())
	must(t, Prepare(c))
	left := filepath.Join(c.RunDir, ".owner.db.id.0123456789abcdef.new")
	must(t, os.WriteFile(left, nil, 0o600))
	must(t, os.Chtimes(left, time.Time{}, time.Now().Add(-24*time.Hour)))
	must(t, Prepare(c))
	if _, err := os.Lstat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s stays: %v", left, err)
	}
}

func TestCheckReadsFiles(t *testing.T) {
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca")
	if err := identity.InitCA(ca, "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	cert, key, err := identity.Issue(ca, "n", ca, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	c.Node, c.Auth = "n", "tls"
	c.StateDir, c.RunDir, c.Audit.File = dir, filepath.Join(dir, "run"), filepath.Join(dir, "log", "audit.log")
	c.TLS.CA, c.TLS.Cert, c.TLS.Key = filepath.Join(ca, "ca.pem"), cert, key
	// What a daemon leaves that is killed while it makes its ledger.
	if err := os.WriteFile(filepath.Join(dir, "owner.db"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Check(&c); err != nil {
		t.Fatal(err)
	}
	other := c
	other.Node = "m"
	if err := Check(&other); err == nil {
		t.Error("another node's certificate is good")
	}
	if err := os.WriteFile(cert, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Check(&c); err == nil {
		t.Error("a broken certificate is good")
	}
}

func TestRootUser(t *testing.T) {
	c := config.Default()
	for name, want := range map[string]bool{"nobody": true, "65534": true, "": true, "root": false, "0": false, "no-such-user": false} {
		c.Worker.RootUser = name
		uid, gid, err := rootUser(&c)
		if (err == nil) != want || want && (uid == 0) != (name == "") || want && (gid == 0) != (name == "") {
			t.Errorf("%q: %d, %d, %v", name, uid, gid, err)
		}
		// Without such a user their leases are refused.
		if least := limits(&c).MinUID; (least == 1000) != (name == "") {
			t.Errorf("%q: uids from %d on", name, least)
		}
	}
}

// A library that an owner's configuration names and that is not there is told by --check, with its key; other nodes share the file and need none.
func TestCheckLibraries(t *testing.T) {
	dir := t.TempDir()
	c := config.Default()
	c.Node, c.StateDir, c.RunDir, c.Audit.File = "n1", dir, filepath.Join(dir, "run"), filepath.Join(dir, "log", "audit.log")
	c.Pools = map[string]config.Pool{"b": {Owners: []config.Peer{{Name: "n1"}}}, "a": {Owners: []config.Peer{{Name: "n1"}}}, "c": {Owners: []config.Peer{{Name: "n2"}}}}
	if err := Check(&c); err != nil {
		t.Fatal(err)
	}
	c.Owner.LibNVML, c.Owner.LibCUDA = "/nope/libnvml.so", "/nope/libcuda.so"
	err := Check(&c)
	for _, want := range []string{"owner.libnvml: stat /nope/libnvml.so: no such file", "owner.libcuda: stat /nope/libcuda.so: no such file"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if s := Summary(&c); s != "lends its GPUs to pool a, b" {
		t.Error(s)
	}
	c.Node = "n3"
	if err := Check(&c); err != nil {
		t.Errorf("on a node that lends nothing: %v", err)
	}
	if s := Summary(&c); s != "no pool names it as owner: it lends no GPU" {
		t.Error(s)
	}
}
