// Package containers tests containers inside of Slurm jobs that ask for fractions: Debian 12's podman without root,
// docker and charliecloud, started by a batch script, on the machine's own Slurm. test/containers has newer engines
// and Slurm. It needs root, see package lab.
package containers

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// gpuMiB is the memory of the one GPU, which the first of two nodes owns.
const gpuMiB = 8192

// site is the cluster of all tests here, with an image for each engine.
type site struct {
	*lab.Lab
	bare string // the image as a folder
}

var shared = sync.OnceValues(setUp)

var used bool

func TestMain(m *testing.M) {
	lab.Main()
	code := m.Run()
	if used {
		s, err := shared()
		if err == nil {
			err = s.tearDown()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "containers:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// run is a test's view of the site.
type run struct {
	*site
	t   *testing.T
	ctx context.Context
}

// cluster is the shared site, which must be clean when the test has ended.
func cluster(t *testing.T) *run {
	t.Helper()
	if os.Getenv("SLUICE_SLURM_ROOT") != "" {
		t.Fatal("SLUICE_SLURM_ROOT is set: the machine's engines are tested with the machine's Slurm, newer ones by make test-containers")
	}
	used = true
	s, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(func() {
		defer cancel()
		if t.Failed() {
			t.Logf("%s", s.Logs(12))
			_, _ = s.Ctl.Run(ctx, lab.Root, "scancel", "--user=alice,bob")
		}
		if err := lab.Until(ctx, 60*time.Second, "the cluster is clean", func() error { return s.Clean(ctx) }); err != nil {
			t.Error(err)
		}
	})
	return &run{s, t, ctx}
}

// job runs a script as alice on the node of that number and answers what it printed. It must end well.
func (r *run) job(node int, script string, args ...string) string {
	r.t.Helper()
	job := r.submit(node, script, args...)
	j, err := r.WaitJob(r.ctx, job, 90*time.Second, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
	out := r.Output(lab.Alice, job)
	if err != nil || j["JobState"] != "COMPLETED" {
		r.t.Fatalf("job %s: %v: %s, exit code %s, %s\n%s", job, err, j["JobState"], j["ExitCode"], j["AdminComment"], out)
	}
	return out
}

func (r *run) submit(node int, script string, args ...string) string {
	r.t.Helper()
	job, err := r.Sbatch(r.ctx, lab.Alice, "#!/bin/bash\n"+r.profile()+script+"\n", append([]string{"-w", r.Nodes[node].Name}, args...)...)
	if err != nil {
		r.t.Fatal(err)
	}
	return job
}

// profile is what the site's login scripts do: our links to the engines' clients stand first in the path.
func (s *site) profile() string {
	return "set -u\nexport XDG_RUNTIME_DIR=/run/user/$(id -u) STORAGE_DRIVER=overlay PATH=/usr/lib/sluice/bin:" + dockerDir + "/usr/bin:$PATH\n"
}

// want fails the test unless the parts are in the text, each as a whole line.
func want(t *testing.T, text string, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if !strings.Contains("\n"+text, "\n"+l+"\n") {
			t.Errorf("no line %q in:\n%s", l, text)
		}
	}
}

// computed is the line of compute.c for a user of the container and a percentage of the GPU.
func computed(uid, percent int) string {
	mem := gpuMiB * percent / 100 << 20
	return fmt.Sprintf("compute uid=%d memory=%d nvml=%d", uid, mem, mem)
}

// dockerDir is the folder of Debian's docker on the nodes; it is not installed on the machine.
const dockerDir = "/opt/docker"

func setUp() (*site, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	o := lab.Options{Jobs: true, Mem: fmt.Sprintf("%dM", gpuMiB), Nodes: []lab.NodeSpec{{GPUs: 1}, {}}, Install: map[string]string{}}
	repo, err := filepath.Abs("../../..")
	if err != nil {
		return nil, err
	}
	if o.Build = os.Getenv("SLUICE_BUILD"); o.Build == "" {
		o.Build = filepath.Join(repo, "build")
	}
	hook := filepath.Join(o.Build, "bin/sluice-hook")
	for _, name := range []string{"/usr/bin/sluice-hook", "/usr/bin/sluice-runtime", "/usr/lib/sluice/bin/podman", "/usr/lib/sluice/bin/docker", "/usr/lib/sluice/bin/ch-run"} {
		o.Install[name] = hook
	}
	o.Install["/usr/share/containers/oci/hooks.d/sluice.json"] = filepath.Join(repo, "etc/containers/hooks.d/sluice.json")
	o.Install["/etc/docker/daemon.json"] = filepath.Join(repo, "etc/containers/docker-daemon.json")
	out, err := exec.CommandContext(ctx, filepath.Join(repo, "oci-hook/test/docker.sh")).Output()
	if err != nil {
		return nil, fmt.Errorf("docker.sh: %w", err)
	}
	o.Install[dockerDir] = strings.TrimSpace(string(out))
	l, err := lab.Up(ctx, o)
	if err != nil {
		return nil, err
	}
	s := &site{Lab: l, bare: l.Path("image")}
	if err := s.prepare(ctx, repo); err != nil {
		_ = s.tearDown()
		return nil, err
	}
	return s, nil
}

// prepare makes the image, and of every node one of which users may start containers.
func (s *site) prepare(ctx context.Context, repo string) error {
	archive := s.Path("image.tar")
	script := `set -e
mkdir "$1"
tar -xpf "$("$2/test/containers/image.sh")" -C "$1"
gcc -O1 -Wall -Werror -o "$1/usr/local/bin/compute" "$2/test/containers/c/compute.c" -ldl
cp "$3/vecadd" "$3/memcheck" "$1/usr/local/bin/"
tar --numeric-owner -cf "$4" -C "$1" .`
	programs := filepath.Join(s.Options.Build, "test", "cuda-"+s.Options.CUDA)
	if out, err := exec.CommandContext(ctx, "bash", "-c", script, "bash", s.bare, repo, programs, archive).CombinedOutput(); err != nil {
		return fmt.Errorf("image: %w: %s", err, out)
	}
	for _, n := range s.Nodes {
		// A /proc without the laboratory's boot_id in it: the kernel lets no user mount one where there is
		// none. And crun 1.8 wants one kind of control groups in sight.
		script := `set -e
sluice-hook prepare --from /usr/lib/sluice
for u in 2001 2002; do install -d -m 700 -o $u -g $u /run/user/$u; done
mkdir -p /run/proc
mount -t proc proc /run/proc
umount /sys/fs/cgroup/unified || true
for f in /etc/subuid /etc/subgid; do echo alice:200000:65536 >>$f; echo bob:300000:65536 >>$f; done
printf '[containers]\ncgroups = "disabled"\n[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n' >/etc/containers/containers.conf`
		if _, err := n.Run(ctx, lab.Root, "sh", "-c", script); err != nil {
			return err
		}
	}
	for _, u := range []lab.User{lab.Alice, lab.Bob} {
		script := s.profile() + "/usr/bin/podman import -q " + archive + " box\n" + leave
		if _, err := s.Nodes[1].Run(ctx, u, "bash", "-c", script); err != nil {
			return err
		}
	}
	return s.startDocker(ctx, archive)
}

// leave ends the process that podman leaves behind where there is no job that does it: it holds the user's namespace.
const leave = "kill $(cat $XDG_RUNTIME_DIR/libpod/tmp/pause.pid)"

// startDocker starts dockerd on the second node, inside of it: outside, it would not see the node's leases.
func (s *site) startDocker(ctx context.Context, archive string) error {
	script := `PATH=$1/usr/bin:$1/usr/sbin:$PATH
setsid dockerd --data-root "$2" --group alice --cgroup-parent "/$3" --iptables=false --ip6tables=false --bridge=none \
	--ip-forward=false --ip-masq=false </dev/null >"$4" 2>&1 &`
	log := s.Path("log", "dockerd.log")
	if _, err := s.Nodes[1].Run(ctx, lab.Root, "sh", "-c", script, "sh", dockerDir, s.Path("docker"), s.group(), log); err != nil {
		return err
	}
	client := dockerDir + "/usr/bin/docker"
	err := lab.Until(ctx, 30*time.Second, "dockerd answers", func() error {
		_, err := s.Nodes[1].Run(ctx, lab.Root, client, "version")
		return err
	})
	if err != nil {
		return fmt.Errorf("%w\n%s", err, lab.Tail(log, 10))
	}
	_, err = s.Nodes[1].Run(ctx, lab.Root, client, "import", archive, "box")
	return err
}

// group is the control group of docker's containers, which the machine's own docker knows nothing of.
func (s *site) group() string { return "slurmlab_docker_" + s.Options.Name }

func (s *site) tearDown() error {
	var left error
	if s.Nodes[1].Up() {
		if len(s.Nodes[1].PIDs("dockerd")) > 0 {
			left = s.Nodes[1].Stop("dockerd")
		}
	}
	if err := s.Down(); err != nil {
		return err
	}
	_ = exec.Command("find", "/sys/fs/cgroup", "-depth", "-type", "d", "-path", "*/"+s.group()+"*", "-exec", "rmdir", "{}", ";").Run()
	return left
}
