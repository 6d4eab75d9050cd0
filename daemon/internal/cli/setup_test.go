package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// system is a directory with the commands of a machine, which note how they were called.
func system(t *testing.T) (dir string, called func() string) {
	t.Helper()
	dir = t.TempDir()
	log := filepath.Join(dir, "called")
	for name, body := range map[string]string{"sluiced": "", "systemctl": "[ $2 != is-active ] || exec test -e " + dir + "/active\n"} {
		text := "#!/bin/sh\necho \"${0##*/} $*\" >>" + log + "\n" + body
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir, func() string {
		b, _ := os.ReadFile(log)
		_ = os.Remove(log)
		return string(b)
	}
}

func TestSetup(t *testing.T) {
	d := startDaemon(t)
	d.mu.Lock()
	d.checks = []rpc.Check{{Name: "owner gpu01", Level: rpc.OK, Text: "answers"}}
	d.mu.Unlock()
	bin, called := system(t)
	shipped, err := os.ReadFile("../../../etc/sluice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(bin, "sluice.yaml")
	if err := os.WriteFile(file, shipped, 0o644); err != nil {
		t.Fatal(err)
	}
	setup := func(owners string) (string, int) {
		cmd := sluice("setup", "-c", file, "--socket", d.socket, "--cluster", "prod", "--controllers", "head1,head2", "--owners", owners)
		cmd.Env = append(cmd.Env, "PATH="+bin+":/usr/bin:/bin")
		out, err := cmd.CombinedOutput()
		return string(out), exitStatus(t, err)
	}

	out, status := setup("gpu01,gpu02")
	if status != 0 || !strings.Contains(out, "owner gpu01") {
		t.Fatalf("%d: %s", status, out)
	}
	text, err := os.ReadFile(file)
	if want := string(shipped) + "\n# By sluice setup:\ncluster: prod\nslurm: {controllers: [head1, head2]}\npools: {default: {owners: [gpu01, gpu02]}}\n"; err != nil || string(text) != want {
		t.Errorf("%v: %s", err, text)
	}
	if got, want := called(), "sluiced --check --config "+file+"\nsystemctl -q is-active sluiced\nsystemctl enable --now sluiced\n"; got != want {
		t.Errorf("called %s", got)
	}

	if out, status := setup("gpu01,gpu02"); status != 0 || !strings.Contains(out, "already") {
		t.Errorf("a second time: %d: %s", status, out)
	}
	called()
	if out, status := setup("gpu03"); status != 1 || !strings.Contains(out, "other settings already") || called() != "" {
		t.Errorf("other owners: %d: %s", status, out)
	}

	// A daemon that ran with the file as it was shipped reads the new one.
	if err := os.WriteFile(filepath.Join(bin, "active"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, shipped, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, status := setup("gpu01"); status != 0 || !strings.HasSuffix(called(), "systemctl restart sluiced\n") {
		t.Errorf("a daemon that runs: %d: %s", status, out)
	}
}

func TestSetupRefused(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--cluster", "prod", "--owners", "gpu01"}, "give --cluster"},
		{[]string{"--cluster", "prod", "--controllers", "head", "--owners", "gpu01", "-c", "/nowhere/sluice.yaml"}, "install the package sluice-node"},
		{[]string{"--cluster", "a b: c", "--controllers", "head", "--owners", "gpu01", "-c", "/etc/hostname"}, "sluice.yaml"},
	} {
		out, err := sluice(append([]string{"setup"}, c.args...)...).CombinedOutput()
		if status := exitStatus(t, err); status != 1 || !strings.Contains(string(out), c.want) {
			t.Errorf("%q: %d: %s", c.args, status, out)
		}
	}
}

func TestSlurmSetup(t *testing.T) {
	d := startDaemon(t)
	d.mu.Lock()
	d.pools = []rpc.Pool{{Name: "default", Owners: []rpc.PoolOwner{{Name: "gpu01", Inventory: lease.Inventory{Owner: "gpu01",
		GPUs: []lease.GPU{{UUID: "GPU-1", Name: "NVIDIA H200", Mem: 140 << 30, Healthy: true}}}}}}}
	d.mu.Unlock()
	dir := t.TempDir()
	conf, link, file := filepath.Join(dir, "slurm.conf"), filepath.Join(dir, "link"), filepath.Join(dir, "sluice.yaml")
	was := "ClusterName=prod\nNodeName=node[01,03] CPUs=4\nNodeName=node02 CPUs=4\n"
	yaml := "node: node01\ncluster: prod\nslurm: {controllers: [head], conf: " + link + "}\npools: {default: {owners: [gpu01]}}\n"
	if err := os.WriteFile(conf, []byte(was), 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(yaml), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(conf, link); err != nil {
		t.Fatal(err)
	}
	setup := func(args ...string) (string, int) {
		out, err := sluice(append([]string{"slurm", "setup", "-c", file, "--socket", d.socket}, args...)...).CombinedOutput()
		return string(out), exitStatus(t, err)
	}
	read := func() string {
		text, err := os.ReadFile(conf)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}

	if out, status := setup("--dry-run"); status != 0 || read() != was || !strings.Contains(out, "+ Licenses=rgpu:100\n") || !strings.HasSuffix(out, "nothing was changed\n") {
		t.Errorf("--dry-run: %d: %s", status, out)
	}
	out, status := setup("--nodes", "node[01,03]")
	if status != 0 || !strings.Contains(read(), "\nNodeName=node[01,03] CPUs=4 Gres=rgpu:no_consume:1600\nNodeName=node02 CPUs=4\n") {
		t.Errorf("%d: %s\n%s", status, out, read())
	}
	if fi, err := os.Stat(conf); err != nil || fi.Mode().Perm() != 0o640 {
		t.Errorf("mode: %v %v", fi, err)
	}
	if fi, err := os.Lstat(link); err != nil || fi.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link: %v %v", fi, err)
	}
	if out, status := setup("--nodes", "node[01,03]"); status != 0 || out != "nothing is to be changed\n" {
		t.Errorf("a second time: %d: %s", status, out)
	}
	d.kill()
	if out, status := setup("--remove"); status != 0 || read() != was {
		t.Errorf("--remove: %d: %s\n%s", status, out, read())
	}
}
