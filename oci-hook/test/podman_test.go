package test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// podman is an engine with a storage of its own, and a hooks directory with our file in it.
type podman struct {
	*box
	home string
	args []string
}

func newPodman(t *testing.T, runtime string, user int) *podman {
	t.Helper()
	p := &podman{box: newBox(t, runtime)}
	dir := p.dir
	hooks := dir + "/hooks.d"
	if err := os.MkdirAll(hooks, 0o755); err != nil {
		t.Fatal(err)
	}
	hooksDir(t, hooks, p.conf)
	p.user = user
	p.home = podmanHome(t, user)
	p.args = podmanArgs(p.home, runtime, hooks)
	t.Cleanup(func() { _, _ = p.podman("rm", "--all", "--force", "--time", "0") })
	sh(t, `tar -C "$1" -cf "$2" .`, p.root, dir+"/image.tar")
	if out, err := p.podman("import", "-q", dir+"/image.tar", "image"); err != nil {
		t.Fatalf("import: %v: %s", err, out)
	}
	return p
}

// podmanHome is a directory for all that a user's podman keeps; podman wants a short path.
func podmanHome(t *testing.T, user int) string {
	t.Helper()
	home, err := os.MkdirTemp("", "podman")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		endPause(t, home+"/tmp")
		_ = os.RemoveAll(home)
	})
	sh(t, `chmod 700 "$1" && mkdir "$1/run" "$1/shm" "$1/lib" && chown -R "$2:$2" "$1"`, home, fmt.Sprint(user))
	return home
}

func podmanArgs(home, runtime, hooks string) []string {
	return []string{"podman", "--root", home + "/storage", "--runroot", home + "/runroot", "--tmpdir", home + "/tmp", "--storage-driver", "overlay",
		"--cgroup-manager", "cgroupfs", "--events-backend", "file", "--network-config-dir", home + "/net.d", "--runtime", runtime, "--hooks-dir", hooks}
}

// podmanMounts is a script for mounts of their own, in which podman leaves nothing outside of its home, and crun sees
// one kind of control groups.
func podmanMounts(home string) string {
	return "umount /sys/fs/cgroup/unified 2>/dev/null; mount --bind " + home + "/run /run; mount --bind " + home + "/shm /dev/shm; mount --bind " + home + "/lib /var/lib"
}

// podman runs it.
func (p *podman) podman(args ...string) (string, error) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	script := podmanMounts(p.home) + `; exec "$@"`
	if p.user != 0 {
		script = podmanMounts(p.home) + fmt.Sprintf(`; export HOME=%s XDG_RUNTIME_DIR=%[1]s; cd /; exec setpriv --reuid %d --regid %[2]d --clear-groups "$@"`, p.home, p.user)
	}
	cmd := exec.CommandContext(ctx, "unshare", slices.Concat([]string{"-m", "sh", "-c", script, "sh"}, p.args, args)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// endPause ends the process by which a user's podman keeps its user namespace.
func endPause(t *testing.T, dir string) {
	b, err := os.ReadFile(dir + "/pause.pid")
	if err != nil {
		return // root's has none
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Error(err)
		return
	}
	if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err == nil && strings.HasPrefix(string(comm), "podman") {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

func (p *podman) start(more ...string) (string, error) {
	if p.user == 0 {
		more = append([]string{"--cgroup-parent", "/" + group()}, more...)
	}
	return p.podman(append(append([]string{"run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"}, more...), "image", "/bin/probe")...)
}

// A user's own podman, with the user's lease. There are no subordinate users here: the
// container has its one.
func TestPodmanRootless(t *testing.T) {
	for _, r := range runtimes {
		t.Run(r, func(t *testing.T) {
			p := newPodman(t, r, 1000)
			mine := strings.Repeat("ab", 16)
			p.lease(mine, 1000)
			args := map[string][]string{"crun": {"--cgroups", "disabled"}}[r] // there are none for users here; runc knows by itself
			out, err := p.start(append(args, "--annotation", "dev.sluice.lease="+mine)...)
			if err != nil || !strings.Contains(out, "uid=0 "+served) {
				t.Errorf("%v: %s", err, out)
			}
			if out, err := p.start(append(args, "--annotation", "dev.sluice.lease="+leaseID)...); err == nil || strings.Contains(out, served) {
				t.Errorf("root's lease: %v: %s", err, out)
			}
		})
	}
}

// podman's own way with an image, a hooks directory and an annotation.
func TestPodman(t *testing.T) {
	for _, r := range runtimes {
		t.Run(r, func(t *testing.T) {
			p := newPodman(t, r, 0)
			note := "dev.sluice.lease=" + leaseID
			for name, args := range map[string][]string{
				"annotation":  {"--annotation", note},
				"read-only":   {"--annotation", note, "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"},
				"environment": {"--env", "SLUICE_SOCKET=" + p.dir + "/leases/" + leaseID + "/sock"},
				"volume":      {"--annotation", note, "--volume", p.dir + "/hooks.d:/data:rshared"},
			} {
				out, err := p.start(args...)
				if err != nil || !strings.Contains(out, served) {
					t.Errorf("%s: %v: %s", name, err, out)
				}
			}
			if out, err := p.start(); err == nil || !strings.Contains(out, "cuda=none") {
				t.Errorf("not asked: %v: %s", err, out)
			}
			// podman hands on what runc says of a hook; of crun's hooks it hears the status alone.
			out, err := p.start("--annotation", "dev.sluice.lease="+strings.Repeat("cd", 16))
			if err == nil || !strings.Contains(out, map[string]string{"runc": "not on this node", "crun": "error executing hook"}[r]) {
				t.Errorf("refused: %v: %s", err, out)
			}
			// The zero-flag way: a containers.conf of the job. Newer podmans read it beside the
			// site's, by the name CONTAINERS_CONF_OVERRIDE; this one instead of it.
			conf := fmt.Sprintf("[containers]\nannotations = [%q]\nenv = [\"SLUICE_SOCKET=/usr/lib/sluice/lease/sock\"]\n", note)
			if err := os.WriteFile(p.dir+"/job.conf", []byte(conf), 0o644); err != nil {
				t.Fatal(err)
			}
			t.Setenv("CONTAINERS_CONF", p.dir+"/job.conf")
			t.Setenv("CONTAINERS_CONF_OVERRIDE", p.dir+"/job.conf")
			if out, err := p.start(); err != nil || !strings.Contains(out, served) {
				t.Errorf("containers.conf of the job: %v: %s", err, out)
			}
		})
	}
}
