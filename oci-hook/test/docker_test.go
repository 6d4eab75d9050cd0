package test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Docker's own way: the wrapper is the default runtime, and a program asks by the
// environment that a job has anyway.
func TestDocker(t *testing.T) {
	b := newBox(t, "runc")
	e := startDocker(t, b.conf)
	docker := e.docker
	sh(t, `tar -C "$1" -cf "$2" .`, b.root, b.dir+"/image.tar")
	if out, err := docker("import", b.dir+"/image.tar", "image"); err != nil {
		t.Fatalf("import: %v: %s", err, out)
	}
	lease := "SLUICE_SOCKET=" + b.dir + "/leases/" + leaseID + "/sock"
	none := "SLUICE_SOCKET=" + b.dir + "/leases/" + strings.Repeat("cd", 16) + "/sock"
	for _, c := range []struct {
		name, want string
		args       []string
	}{
		{"not asked", "cuda=none", []string{"run", "--rm", "--network", "none", "image", "/bin/probe"}},
		{"asked", served, []string{"run", "--rm", "--network", "none", "--env", lease, "image", "/bin/probe"}},
		{"read-only", served, []string{"run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL", "--env", lease, "image", "/bin/probe"}},
		{"refused", "is not on this node, or it has ended", []string{"run", "--rm", "--network", "none", "--env", none, "image", "/bin/probe"}},
		{"start", "", []string{"run", "--detach", "--name", "box", "--network", "none", "--env", lease, "image", "/bin/sleep", "60"}},
		{"exec", served, []string{"exec", "box", "/bin/probe"}},
		{"exec without", served, []string{"exec", "box", "/bin/sh", "-c", "unset SLUICE_SOCKET; probe"}},
		{"restart", "box", []string{"restart", "--time", "0", "box"}},
		{"exec again", served, []string{"exec", "box", "/bin/probe"}},
		{"end", "box", []string{"rm", "--force", "box"}},
	} {
		if out, _ := docker(c.args...); !strings.Contains(out, c.want) {
			t.Errorf("%s: %s", c.name, out)
		}
	}
}

// docker is a dockerd with the wrapper as its default runtime, and its client.
type docker struct {
	path, socket string // of the programs, of the daemon
	env          []string
}

func (e *docker) docker(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(e.path, "usr/bin/docker"), append([]string{"--host", "unix://" + e.socket}, args...)...)
	cmd.Env = e.env
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// startDocker starts one that ends with the test; settings are the wrapper's.
func startDocker(t *testing.T, settings string) *docker {
	t.Helper()
	out, err := exec.Command("./docker.sh").Output()
	if err != nil {
		t.Fatalf("docker.sh: %v", err)
	}
	e := &docker{path: strings.TrimSpace(string(out))}
	e.env = []string{"HOME=/", "PATH=" + e.path + "/usr/bin:" + e.path + "/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}
	run, err := os.MkdirTemp("", "docker") // short: of a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(run) })
	conf, err := json.Marshal(map[string]any{
		"default-runtime": "sluice",
		"runtimes":        map[string]any{"sluice": map[string]any{"path": built.hook, "runtimeArgs": []string{"runtime", "--config", settings, "--"}}},
	})
	if err == nil {
		err = os.WriteFile(run+"/daemon.json", conf, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	e.socket = run + "/sock"
	// In places of its own: what it makes there does not become the machine's.
	sh(t, `mkdir "$1/run" "$1/opt"`, run)
	start(t, run+"/log", e.env, "unshare", "-m", "sh", "-c", `mount --bind "$0/run" /run && mount --bind "$0/opt" /opt && exec "$@"`, run, e.path+"/usr/sbin/dockerd", "--config-file", run+"/daemon.json", "--data-root", run+"/data", "--exec-root", run+"/exec",
		"--host", "unix://"+e.socket, "--cgroup-parent", "/"+group(), "--pidfile", run+"/pid", "--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false", "--ip-masq=false")
	answers(t, e.socket, run+"/log")
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) { // it listens before it is ready
		if out, err := e.docker("version"); err == nil {
			return e
		} else if time.Now().After(deadline) {
			t.Fatalf("dockerd: %v: %s", err, out)
		}
	}
}
