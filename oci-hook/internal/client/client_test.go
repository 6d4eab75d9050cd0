package client

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	lease  = "00112233445566778899aabbccddeeff"
	socket = "/run/sluice/leases/" + lease + "/sock"
)

func TestEdit(t *testing.T) {
	note := "--annotation dev.sluice.lease=" + lease
	env := "--env SLUICE_SOCKET=" + socket
	for _, c := range []struct{ name, args, want string }{
		{"docker", "run -it image sh", "run " + env + " -it image sh"},
		{"docker", "-H tcp://x --tls container create image", "-H tcp://x --tls container create " + env + " image"},
		{"docker", "--host=run run image", "--host=run run " + env + " image"},
		{"docker", "--context run ps", ""},
		{"docker", "exec box run", ""},
		{"docker", "volume create x", ""},
		{"docker", "container container run", ""},
		{"docker", "-- run", ""},
		{"docker", "", ""},
		{"podman", "run image", "run " + note + " image"},
		{"podman", "--root /x --runtime crun --remote=false run image", "--root /x --runtime crun --remote=false run " + note + " image"},
		{"podman", "container run image run", "container run " + note + " image run"},
		{"podman", "pod create", ""},
		{"podman", "--root", ""},
		{"ch-run", "image -- run", "--bind=/lib/of/ours:/media --bind=/run/sluice/leases/" + lease + ":/media/lease --set-env=SLUICE_SOCKET=/media/lease/sock " +
			"--set-env=LD_LIBRARY_PATH=/media --set-env=PATH=/media/bin image -- run"},
		{"ch-run", "", ""},
	} {
		want := c.want
		if want == "" {
			want = c.args
		}
		if got := edit(c.name, strings.Fields(c.args), nil, filepath.Dir(socket), "/lib/of/ours"); !slices.Equal(got, strings.Fields(want)) {
			t.Errorf("%s %s: %v", c.name, c.args, got)
		}
	}
	if dir := leaseDir([]string{"SLUICE_SOCKET=" + socket}); dir != filepath.Dir(socket) {
		t.Errorf("%s: %q", socket, dir)
	}
	for _, s := range []string{"", "sock", "/sock", lease + "/sock", "/run/sluice/leases/x/sock", "/run/sluice/leases/" + lease + "/other", "tcp:host:1"} {
		if dir := leaseDir([]string{"SLUICE_SOCKET=" + s}); dir != "" {
			t.Errorf("socket %q: %q", s, dir)
		}
	}
}

func TestEngine(t *testing.T) {
	for name, want := range map[string]string{"docker": "docker", "/usr/lib/sluice/bin/podman": "podman", "/usr/bin/sluice-docker": "docker", "/usr/lib/sluice/bin/ch-run": "ch-run", "sluice-hook": "", "sluice-runtime": "", "runc": ""} {
		if got, ok := Engine(name); ok != (want != "") || ok && got != want {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func TestFind(t *testing.T) {
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"ours", "plain", "real", "folder/docker"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(self, dir+"/ours/docker"); err != nil {
		t.Fatal(err)
	}
	for path, mode := range map[string]os.FileMode{"plain/docker": 0o644, "real/docker": 0o755} {
		if err := os.WriteFile(filepath.Join(dir, path), nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir + "/real")
	first := "PATH=" + strings.Join([]string{".", "", dir + "/nowhere", dir + "/ours", dir + "/folder"}, ":")
	if got, err := find("docker", []string{first + ":" + dir + "/real"}); err != nil || got != dir+"/real/docker" {
		t.Errorf("%s, %v", got, err)
	}
	if got, err := find("docker", []string{first}); !errors.Is(err, ErrNoClient) {
		t.Errorf("%s, %v", got, err)
	}
}
