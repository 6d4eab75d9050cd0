//go:build cri

package containers

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// Engines that are asked by the CRI, as Kubernetes asks them, and containerd's own clients: `make test-cri`, in the root of cri.sh.
// They run as root and outside of jobs, so each container says by an annotation or a CDI device which job's fraction it is to have.

func init() { rootScript = "./cri.sh" }

// held has a job of alice's hold half of the GPU until the test ends, and returns its lease and its number.
func (s *site) held() (lease, job string) {
	s.t.Helper()
	name := s.Path("work", "lease")
	if err := os.Remove(name); err != nil && !os.IsNotExist(err) {
		s.t.Fatal(err)
	}
	job, err := s.Sbatch(s.ctx, lab.Alice, "#!/bin/bash\necho $SLUICE_LEASE_ID >lease.new && mv lease.new lease\nexec sleep 900\n",
		"--output=/dev/null", "--chdir", s.Path("work"), "--gres=rgpu:50")
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if out, err := s.Ctl.Run(s.ctx, lab.Root, "scancel", job); err != nil {
			s.t.Errorf("%v: %s", err, out)
		}
	})
	if err := lab.Until(s.ctx, time.Minute, "the job has a lease", func() error {
		b, err := os.ReadFile(name)
		lease = strings.TrimSpace(string(b))
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	return lease, job
}

// daemon starts an engine's as root, with its settings, and ends it with the test.
func (s *site) daemon(name, settings, command, answers string) {
	s.t.Helper()
	file := s.Path(name + ".toml")
	if err := os.WriteFile(file, []byte(settings), 0o644); err != nil {
		s.t.Fatal(err)
	}
	log := s.Path("log", name+".log")
	n := s.Nodes[0]
	if _, err := n.RunIn(s.ctx, lab.Root, fmt.Sprintf("setsid %s </dev/null >%s 2>&1 & echo $! >/run/%s.pid", fmt.Sprintf(command, file), log, name), "sh"); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		if s.t.Failed() {
			s.t.Logf("%s", lab.Tail(log, 20))
		}
		if out, err := n.RunIn(s.ctx, lab.Root, fmt.Sprintf("p=$(cat /run/%s.pid); kill $p; while kill -0 $p 2>/dev/null; do sleep 0.1; done", name), "sh"); err != nil {
			s.t.Errorf("%v: %s", err, out)
		}
	})
	if err := lab.Until(s.ctx, dockerWait, name+" answers", func() error {
		out, err := n.Run(s.ctx, lab.Root, "sh", "-c", answers)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}); err != nil {
		s.t.Fatal(err)
	}
}

// pod writes the pod and the container of a request to an engine, in the pod's folder NAME: what Kubernetes sends. Each argument but
// the last is a field and its value in JSON; those of the pod begin with "pod.", those of the container's security context with "user.".
func (s *site) pod(name, image, command string, fields ...string) {
	s.t.Helper()
	var pod, container, user string
	for _, f := range fields {
		key, value, _ := strings.Cut(f, "=")
		kind, key, _ := strings.Cut(key, ".")
		add := fmt.Sprintf(", %q: %s", key, value)
		switch kind {
		case "pod":
			pod += add
		case "user":
			user += add
		default:
			container += add
		}
	}
	dir := s.Path("pods", name)
	for path, text := range map[string]string{
		"pod.json": fmt.Sprintf(`{"metadata": {"name": %q, "namespace": "default", "uid": %[1]q}, "log_directory": %[2]q%[3]s,
 "linux": {"cgroup_parent": %[4]q, "security_context": {"namespace_options": {"network": 2, "pid": 2}}}}`, name, dir, pod, groups(s.Lab)),
		"container.json": fmt.Sprintf(`{"metadata": {"name": "program"}, "image": {"image": %q}, "command": ["sh", "-c", %q], "log_path": "out"%s,
 "linux": {"security_context": {"namespace_options": {"network": 2, "pid": 1}%s}}}`, image, command, container, user),
	} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			s.t.Fatal(err)
		}
		if err := os.WriteFile(dir+"/"+path, []byte(text+"\n"), 0o644); err != nil {
			s.t.Fatal(err)
		}
	}
	fmt.Fprintf(s.log, "%s/container.json%s: %s; pod:%s\n", name, container+user, command, pod)
}

// runs is a function of the shell that does what kubelet does with a pod of pod(), and prints what its container has said: runs HANDLER POD.
const runs = `
export CRI_CONFIG_FILE=/run/crictl.yaml
echo 'runtime-endpoint: "unix://%[1]s"' >/run/crictl.yaml
begins() {
	cd %[2]s/$2 && rm -f out && pod=$(crictl runp --runtime $1 pod.json) || return
	container=$(crictl create $pod container.json pod.json) && crictl start $container >/dev/null
}
ends() {
	local rc=$?
	crictl rmp -f $pod >/dev/null || return
	return $rc
}
runs() {
	begins "$@" && {
		until crictl inspect $container | grep -q CONTAINER_EXITED; do sleep 0.1; done
		crictl logs $container
		crictl inspect $container | grep -q '"exitCode": 0,'
	}
	ends
}
`

// asked are the requests that every engine gets which is asked by the CRI, each with its handler.
func (s *site) asked(endpoint, image, handler string) []step {
	lease, job := s.held()
	annotation := fmt.Sprintf(`annotations={"dev.sluice.lease": %q}`, lease)
	device := `container.CDI_devices=[{"name": "sluice.dev/gpu=` + job + `"}]`
	const programs = "vecadd && compute"
	s.pod("pod", image, programs, "pod."+annotation)
	s.pod("container", image, programs, "container."+annotation)
	s.pod("user", image, programs, "pod."+annotation, `user.run_as_user={"value": 2001}`, `user.run_as_group={"value": 2001}`)
	s.pod("smi", image, smi, "pod."+annotation)
	s.pod("exec", image, "sleep 300", "pod."+annotation)
	s.pod("device", image, programs, device)
	s.pod("none", image, "compute")
	s.pod("stranger", image, programs, "pod."+annotation, `user.run_as_user={"value": 2002}`)
	s.pod("unknown", image, programs, `pod.annotations={"dev.sluice.lease": "0123456789abcdef0123456789abcdef"}`)
	fmt.Fprintln(s.log, "runs HANDLER POD: crictl runp, create, start, logs and rmp with the files above; begins and ends are its parts")
	return []step{
		{"annotation of the pod", "runs " + handler + " pod", computes(0)},
		{"annotation of the container", "runs " + handler + " container", computes(0)},
		{"as the lease's user", "runs " + handler + " user", computes(2001)},
		{"nvidia-smi", "runs " + handler + " smi", smiSays},
		{"exec", "begins " + handler + " exec && crictl exec $container " + both + "; ends", computes(0)},
		{"CDI device", "runs " + handler + " device", computes(0)},
		{"not asked", "runs " + handler + " none", none},
		{"another user", "runs " + handler + " stranger", "!is of uid 2001"},
		{"unknown lease", "runs " + handler + " unknown", "!0123456789abcdef0123456789abcdef"},
	}
}

// TestCRIO: pods of CRI-O's with hooks.d/sluice.json, on both runtimes.
func TestCRIO(t *testing.T) {
	s := newSite(t)
	s.record("crio.log", "crio --version | sed -n 's/^Version: */CRI-O /p'; conmon --version | head -n 1; runc --version | head -n 1; crun --version | head -n 1; cat /usr/share/containers/oci/hooks.d/sluice.json")
	storage := "--root " + s.Path("crio/root") + " --runroot " + s.Path("crio/run") + " --storage-driver overlay "
	if _, err := s.Nodes[0].Run(s.ctx, lab.Root, "sh", "-c", "podman "+storage+"import "+s.Path("image.tar")+" image"); err != nil {
		t.Fatal(err)
	}
	settings := fmt.Sprintf(`[crio]
root = "%[1]s/crio/root"
runroot = "%[1]s/crio/run"
storage_driver = "overlay"
log_dir = "%[1]s/crio/log"
version_file = "/run/crio/version"
clean_shutdown_file = ""
[crio.api]
listen = "/run/crio/crio.sock"
stream_address = "127.0.0.1"
stream_port = "0"
[crio.runtime]
default_runtime = "runc"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
pinns_path = "/usr/local/bin/pinns"
namespaces_dir = "/run/crio/ns"
container_exits_dir = "/run/crio/exits"
container_attach_socket_dir = "/run/crio"
apparmor_profile = "unconfined"
hooks_dir = ["/usr/share/containers/oci/hooks.d"]
cdi_spec_dirs = ["/run/cdi"]
[crio.runtime.runtimes.runc]
runtime_path = "/usr/sbin/runc"
monitor_path = "/usr/bin/conmon"
[crio.runtime.runtimes.crun]
runtime_path = "/usr/bin/crun"
monitor_path = "/usr/bin/conmon"
[crio.image]
pause_image = "localhost/image:latest"
pause_command = "/bin/sleep 900"
[crio.network]
network_dir = "/run/crio/net.d"
plugin_dirs = ["/run/crio/plugins"]
[crio.nri]
enable_nri = false
`, s.Path(""))
	const socket = "/run/crio/crio.sock"
	s.daemon("crio", settings, "crio --config %s --config-dir ''", "crictl -r unix://"+socket+" version")
	begin := fmt.Sprintf(runs, socket, s.Path("pods"))
	steps := s.asked(socket, "localhost/image:latest", "runc")
	steps = append(steps, step{"crun", "runs crun pod", computes(0)})
	s.typed(s.Nodes[0], lab.Root, begin, steps)
}

// TestContainerd: containerd's own ctr, nerdctl, and pods by the CRI, with sluice-runtime or a CDI device: containerd has no hooks.
func TestContainerd(t *testing.T) {
	s := newSite(t)
	s.record("containerd.log", "containerd --version; nerdctl --version; runc --version | head -n 1")
	const socket = "/run/containerd-own/containerd.sock"
	runtime, err := os.ReadFile("../../etc/containers/containerd.toml")
	if err != nil {
		t.Fatal(err)
	}
	settings := fmt.Sprintf(`version = 3
root = "%[1]s/containerd"
state = "/run/containerd-own/state"
[grpc]
address = "%[2]s"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "docker.io/library/pause:latest"
[plugins."io.containerd.nri.v1.nri"]
disable = true
`, s.Path(""), socket) + strings.Replace(string(runtime), "cdi_spec_dirs", "restrict_oom_score_adj = true # the tests' root may not lower it\ncdi_spec_dirs", 1)
	s.daemon("containerd", settings, "containerd --config %s", "ctr -a "+socket+" version")
	// A pod of containerd's needs an image that waits.
	if out, err := s.Nodes[0].RunIn(s.ctx, lab.Root, fmt.Sprintf(`set -e
docker import --change 'ENTRYPOINT ["/bin/sleep", "900"]' %[1]s/image.tar pause
docker save -o %[1]s/both.tar image pause
for n in default k8s.io; do ctr -a %[2]s -n $n images import %[1]s/both.tar; done`, s.Path(""), socket), "sh"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	lease, job := s.held()
	annotation, device := "--annotation dev.sluice.lease="+lease+" ", "--device sluice.dev/gpu="+job+" "
	const image = "docker.io/library/image:latest "
	ctr := "ctr run --rm --net-host --cgroup " + groups(s.Lab) + "/ctr "
	nerdctl := "nerdctl run --rm --net host --pull never --security-opt apparmor=unconfined --cgroup-parent " + groups(s.Lab) + " "
	const wrapped = "--runtime /usr/bin/sluice-runtime "
	begin := "export CONTAINERD_ADDRESS=" + socket + "\nnerdctl() { command nerdctl --cgroup-manager cgroupfs --data-root " + s.Path("nerdctl") + " \"$@\"; }\n"
	s.typed(s.Nodes[0], lab.Root, begin, []step{
		{"ctr", ctr + "--runc-binary /usr/bin/sluice-runtime " + annotation + image + "c1 " + both, computes(0)},
		{"ctr as the lease's user", ctr + "--runc-binary /usr/bin/sluice-runtime --user 2001:2001 " + annotation + image + "c1 " + both, computes(2001)},
		{"ctr by CDI", ctr + device + image + "c1 " + both, computes(0)},
		{"ctr, not asked", ctr + "--runc-binary /usr/bin/sluice-runtime " + image + "c1 compute", none},
		{"nerdctl", nerdctl + wrapped + annotation + image + both, computes(0)},
		{"nerdctl as the lease's user", nerdctl + wrapped + "--user 2001:2001 " + annotation + image + both, computes(2001)},
		{"nerdctl by the environment", "SLUICE_SOCKET=/run/sluice/leases/" + lease + "/sock " + nerdctl + wrapped + "-e SLUICE_SOCKET " + image + both, computes(0)},
		{"nerdctl exec", strings.Replace(nerdctl, "--rm", "-d --name e1", 1) + wrapped + annotation + image + "sleep 300 >/dev/null && nerdctl exec e1 " + both + "; rc=$?; nerdctl rm -f e1 >/dev/null; exit $rc", computes(0)},
		{"nerdctl by CDI", nerdctl + device + image + both, computes(0)},
		{"nerdctl, not asked", nerdctl + wrapped + image + "compute", none},
	})
	fmt.Fprintf(s.log, "\nBy the CRI:\n")
	s.typed(s.Nodes[0], lab.Root, fmt.Sprintf(runs, socket, s.Path("pods")), s.asked(socket, strings.TrimSpace(image), "sluice"))
}
