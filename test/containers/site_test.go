// Package containers tests that a job's fraction is found in containers of today's engines: docker 28, podman 5,
// apptainer 1.4, charliecloud 0.45, Slurm's own --container, and the drop-ins for enroot. They run in a Debian root of
// their own (root.sh) on the node of a real Slurm cluster (package lab), as a site would install them, and the
// container's image (image.sh) knows nothing of GPUs.
//
// SLUICE_BUILD names make's build folder, SLUICE_CUDA the compiler whose program is run. It needs root.
package containers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

const (
	gpuMem = 8 << 30
	// Half of the GPU's memory, as the program in the container must see it.
	half = gpuMem / 2

	jobWait    = 6 * time.Minute
	dockerWait = 30 * time.Second
	runtimeDir = "/run/user/2001" // alice's
)

// What sources_test.go replaces: the root of the cluster's nodes, and what else its engines need.
var (
	rootScript = "./root.sh"
	adapt      = func(*lab.Options) {}
)

// cluster is that of all tests: one node with one GPU.
var cluster = sync.OnceValues(func() (*lab.Lab, error) {
	root, err := script(rootScript)
	if err != nil {
		return nil, err
	}
	repo, err := filepath.Abs("../..")
	if err != nil {
		return nil, err
	}
	build := os.Getenv("SLUICE_BUILD")
	if build == "" {
		build = filepath.Join(repo, "build")
	}
	etc := filepath.Join(repo, "etc/containers")
	oci, err := os.ReadFile(filepath.Join(repo, "etc/slurm/oci.conf"))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	o := lab.Options{
		Jobs: true, Root: root, Repository: repo, Build: build, Mem: "8G", Nodes: []lab.NodeSpec{{GPUs: 1}},
		Etc: map[string]string{"oci.conf": string(oci)},
		// What docs/containers.md says is to be installed.
		Install: map[string]string{
			"/usr/bin/sluice-hook": build + "/bin/sluice-hook", "/usr/bin/sluice-runtime": build + "/bin/sluice-hook",
			"/usr/lib/sluice/bin/docker": build + "/bin/sluice-hook", "/usr/lib/sluice/bin/ch-run": build + "/bin/sluice-hook",
			"/usr/share/containers/oci/hooks.d/sluice.json": etc + "/hooks.d/sluice.json",
			"/etc/docker/daemon.json":                       etc + "/docker-daemon.json",
			"/etc/enroot/hooks.d/50-sluice.sh":              etc + "/enroot/50-sluice.sh",
		},
	}
	adapt(&o)
	l, err := lab.Up(ctx, o)
	if err != nil {
		return nil, err
	}
	if err := prepare(ctx, l); err != nil {
		return nil, errors.Join(fmt.Errorf("%w\n%s", err, l.Logs(10)), down(l))
	}
	return l, nil
})

func TestMain(m *testing.M) {
	lab.Main()
	code := m.Run()
	if started {
		if l, err := cluster(); err == nil {
			if err := down(l); err != nil {
				fmt.Fprintln(os.Stderr, "containers:", err)
				code = 1
			}
		}
	}
	os.Exit(code)
}

var started bool

// script runs one that prints a path.
func script(name string) (string, error) {
	cmd := exec.Command(name)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// prepare does what a site's installation does beside files, and makes up for what the lab's node lacks.
func prepare(ctx context.Context, l *lab.Lab) error {
	for _, d := range []string{"out", "work"} {
		if err := os.Mkdir(l.Path(d), 0o777); err != nil {
			return err
		}
		if err := os.Chmod(l.Path(d), 0o777); err != nil {
			return err
		}
	}
	if err := archive(l); err != nil {
		return err
	}
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		cache = filepath.Join(l.Options.Repository, "build/cache")
	}
	smi, _ := filepath.Glob(filepath.Join(cache, "cuda-smi/bin/nvidia-smi-*"))
	if len(smi) == 0 {
		return fmt.Errorf("no nvidia-smi in %s/cuda-smi; test/cuda-toolkit.sh smi fetches some", cache)
	}
	n := l.Nodes[0]
	if _, err := n.RunIn(ctx, lab.Root, fmt.Sprintf(`set -eu
sluice-hook prepare --from /usr/lib/sluice --nvidia-smi %[2]s
mkdir -p /etc/containers
cat >/etc/containers/containers.conf <<-CONF
	[containers]
	cgroups = "disabled"
	default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
	[engine]
	cgroup_manager = "cgroupfs"
	events_logger = "file"
CONF
for f in subuid subgid; do
	printf 'alice:100000:65536\ncontainers:200000:1000000\n' >/etc/$f
done
mkdir -m 700 -p %[1]s
chown 2001:2001 %[1]s
# crun refuses a machine with both kinds of control groups.
umount /sys/fs/cgroup/unified 2>/dev/null || true
# The lab's /proc has another boot_id over its own, and who is not root may mount a /proc only where a whole one is in sight.
mkdir /run/proc
mount -t proc proc /run/proc
# udev gives it this mode.
mknod -m 666 /run/fuse c 10 229
mount --bind /run/fuse /dev/fuse
`, runtimeDir, smi[0]), "sh"); err != nil {
		return err
	}
	return docker(ctx, l)
}

// groups is the control group of containers whose engines make some: what is left of it goes with the cluster.
func groups(l *lab.Lab) string { return "/" + l.Options.Name + "-containers" }

// down ends the cluster and removes the engines' control groups.
func down(l *lab.Lab) error {
	err := l.Down()
	dirs, _ := filepath.Glob("/sys/fs/cgroup/*" + groups(l))
	for _, d := range dirs {
		if out, rerr := exec.Command("find", d, "-depth", "-type", "d", "-exec", "rmdir", "{}", ";").CombinedOutput(); rerr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w: %s", d, rerr, out))
		}
	}
	return err
}

// docker starts dockerd, which alice may use, and has it import the image.
func docker(ctx context.Context, l *lab.Lab) error {
	n := l.Nodes[0]
	start := fmt.Sprintf(`setsid dockerd --data-root %s/docker --cgroup-parent %s --group 2001 --iptables=false --ip6tables=false --bridge=none --ip-forward=false --ip-masq=false </dev/null >%[1]s/log/dockerd.log 2>&1 &`, l.Path(), groups(l))
	if _, err := n.Run(ctx, lab.Root, "sh", "-c", start); err != nil {
		return err
	}
	if err := lab.Until(ctx, dockerWait, "dockerd answers", func() error {
		_, err := n.Run(ctx, lab.Root, "docker", "version")
		return err
	}); err != nil {
		return err
	}
	_, err := n.Run(ctx, lab.Root, "sh", "-c", fmt.Sprintf("docker import %[1]s/image.tar image && docker save -o %[1]s/docker.tar image && chmod 644 %[1]s/docker.tar", l.Path()))
	return err
}

// archive makes the image: a tree of Debian with two programs in it.
func archive(l *lab.Lab) error {
	tree, err := script("./image.sh")
	if err != nil {
		return err
	}
	if err := copyFile(tree, l.Path("image.tar")); err != nil {
		return err
	}
	bin := l.Path("add", "usr/local/bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	o := &l.Options
	for _, argv := range [][]string{
		{"gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O2", "-o", bin + "/compute", "c/compute.c", "-ldl"},
		{"cp", filepath.Join(o.Build, "test/cuda-"+o.CUDA, "vecadd"), bin},
		{"tar", "--owner=0", "--group=0", "-C", l.Path("add"), "-rf", l.Path("image.tar"), "./usr/local/bin/compute", "./usr/local/bin/vecadd"},
	} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", argv[0], err, out)
		}
	}
	return nil
}

func copyFile(from, to string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}

// site is a test's view of the cluster.
type site struct {
	*lab.Lab
	t   *testing.T
	ctx context.Context
	log io.Writer // of commands and what they print
}

func newSite(t *testing.T) *site {
	t.Helper()
	started = true
	l, err := cluster()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), jobWait+time.Minute)
	s := &site{l, t, ctx, io.Discard}
	before := s.mounts()
	t.Cleanup(func() {
		defer cancel()
		if t.Failed() {
			t.Logf("%s", l.Logs(3))
			_, _ = l.Ctl.Run(ctx, lab.Root, "scancel", "--user=alice,root")
		}
		// Nothing of any job is left: no lease, no CDI file, no mount.
		if err := lab.Until(ctx, time.Minute, "the node is clean", func() error {
			for _, m := range s.mounts() {
				if !slices.Contains(before, m) && strings.Contains(m, "sluice") {
					return fmt.Errorf("mounted now: %s", m)
				}
			}
			return l.Clean(ctx)
		}); err != nil {
			t.Error(err)
		}
	})
	return s
}

// mounts are the node's.
func (s *site) mounts() []string {
	s.t.Helper()
	out, err := s.Nodes[0].Run(s.ctx, lab.Root, "cat", "/proc/self/mounts")
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.Split(out, "\n")
}

// step is one command of a job's script.
type step struct {
	name, command string
	want          string // in what it prints; begins with "!" where the command has to fail
}

// computes is what both programs print in a container that runs as this user there.
func computes(uid int) string {
	return fmt.Sprintf("PASS\ncompute uid=%d memory=%d nvml=%[2]d\n", uid, half)
}

// both are the static CUDA runtime's program and the one that loads the driver by name.
const both = "sh -c 'vecadd && compute'"

// smi is the site's nvidia-smi, which images need not have, and what it says.
const smi = "nvidia-smi --query-gpu=memory.total --format=csv,noheader"

const smiSays = "4096 MiB"

// none is what a container without a fraction says.
const none = "!libcuda.so.1: cannot open shared object file"

// job runs the steps in one batch job of the user's, for half of the GPU if asked.
func (s *site) job(u lab.User, ask bool, begin string, steps []step, args ...string) {
	s.t.Helper()
	const mark = "=== step "
	var b strings.Builder
	fmt.Fprintf(&b, "#!/bin/bash\nexport XDG_RUNTIME_DIR=/run/user/%d PODMAN_IGNORE_CGROUPSV1_WARNING=1\n%s\n", u.UID, begin)
	for i, x := range steps {
		fmt.Fprintf(&b, "echo; echo '%s%d'\n( %s\n) 2>&1\nrc=$?; echo; echo \"status $rc\"\n", mark, i, x.command)
	}
	args = append([]string{"--output", s.Path("out", "%j"), "--chdir", s.Path("work")}, args...)
	if ask {
		args = append(args, "--gres=rgpu:50")
	}
	job, err := s.Sbatch(s.ctx, u, b.String(), args...)
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := s.WaitJob(s.ctx, job, jobWait, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"); err != nil {
		s.t.Fatal(err)
	}
	text, err := os.ReadFile(s.Path("out", job))
	if err != nil {
		s.t.Fatal(err)
	}
	parts := strings.Split(string(text), mark)
	if len(parts) != len(steps)+1 {
		s.t.Fatalf("%d of %d steps were run:\n%s", len(parts)-1, len(steps), text)
	}
	if said := strings.TrimSpace(parts[0]); said != "" {
		s.t.Logf("before the first step: %s", said)
	}
	for i, x := range steps {
		out, status, _ := strings.Cut(parts[i+1], "\nstatus ")
		_, out, _ = strings.Cut(out, "\n")
		s.check(x, out, strings.HasPrefix(status, "0\n"))
	}
}

// check compares what a step has printed with what it had to.
func (s *site) check(x step, out string, good bool) {
	s.t.Helper()
	text := fmt.Sprintf("$ %s\n%s\n", x.command, strings.TrimRight(out, "\n"))
	lab := strings.TrimSuffix(s.Path(""), "/") // another one in each run
	fmt.Fprint(s.log, strings.NewReplacer(lab+"/work", "$WORK", lab, "$LAB").Replace(text))
	s.t.Run(x.name, func(t *testing.T) {
		want, fails := strings.CutPrefix(x.want, "!")
		if !strings.Contains(out, want) || fails == good {
			t.Errorf("%s\nwant %q, well=%t, in\n%s", x.command, x.want, good, out)
		}
	})
}
