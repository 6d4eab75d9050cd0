package test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// site is a node as an admin leaves it: a daemon with a simulated GPU, a lease of root's
// and one of a user's, what containers get of the host, and a Debian 12 tree as an image.
type site struct {
	dir, conf, programs string
	user                int
	socket              map[int]string // of the lease, by user
	tar, tree           string         // the image, as an archive and unpacked
	bin                 string         // the wrappers of the clients
}

// memory is what a lease of these tests has, in bytes and as nvidia-smi says it.
const (
	memory    = 512 << 20
	memoryMiB = "512 MiB"
)

// compute is what a container runs: a program that links the CUDA runtime statically, one that loads the
// driver by name, and the site's nvidia-smi, which the image has not.
const compute = "nvidia-smi --query-gpu=memory.total --format=csv,noheader && /programs/vecadd && /programs/compute"

// check looks for what compute prints.
func check(t *testing.T, name, out string, uid int) {
	t.Helper()
	if !strings.Contains(out, memoryMiB+"\n") || !strings.Contains(out, computes(uid)) {
		t.Errorf("%s: no %s and %q in %s", name, memoryMiB, computes(uid), out)
	}
}

func newSite(t *testing.T) *site {
	t.Helper()
	daemonSocket, dir := daemon(t)
	s := &site{dir: dir, conf: dir + "/oci-hook.json", programs: dir + "/programs", user: 1000, socket: map[int]string{}, tree: dir + "/tree", bin: dir + "/bin"}
	for _, u := range []int{0, s.user} {
		s.socket[u] = dir + "/run/leases/" + grant(t, daemonSocket, dir, u) + "/sock"
	}
	if err := writeSettings(s.conf, map[string]any{"lib": dir + "/content", "leases": dir + "/run/leases"}); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("../../test/containers/image.sh").Output()
	if err != nil {
		t.Fatalf("image: %v", err)
	}
	s.tar = dir + "/image.tar" // which users can read
	sh(t, `cp "$1" "$2" && chmod 644 "$2"`, strings.TrimSpace(string(out)), s.tar)
	sh(t, `"$1" prepare --config "$2" --from "$3" --nvidia-smi "$4"`, built.hook, s.conf, filepath.Dir(program(t, "shim/libcuda.so.1")), nvidiaSmi(t))
	sh(t, `mkdir "$1" && cp "$2" "$3" "$1/" && chmod 755 "$1"`, s.programs, built.dir+"/compute", program(t, "test/cuda-11.8/vecadd"))
	sh(t, `mkdir "$1" && for c in docker podman ch-run; do ln -s "$2" "$1/$c"; done`, s.bin, built.hook)
	return s
}

// nvidiaSmi is one of those that the tests of NVML use.
func nvidiaSmi(t *testing.T) string {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		cache = "../../build/cache"
	}
	found, _ := filepath.Glob(cache + "/cuda-smi/bin/nvidia-smi-*")
	if len(found) == 0 {
		t.Fatalf("no nvidia-smi in %s; test/cuda-toolkit.sh smi fetches them", cache)
	}
	slices.Sort(found)
	return found[len(found)-1]
}

// command runs one as a user, in mounts of its own where script has been run first, in a
// job whose lease has that socket. Engines need a moment, and never minutes.
func (s *site) command(t *testing.T, user int, socket, script string, env []string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	become := ""
	if user != 0 {
		become = fmt.Sprintf("setpriv --reuid %d --regid %[1]d --clear-groups", user)
	}
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"-m", "--propagation", "private", "sh", "-c", script + "\nexec " + become + ` "$@"`, "sh"}, args...)...)
	cmd.Env = append([]string{"HOME=/", "USER=user", "PATH=" + s.bin + ":/usr/sbin:/usr/bin:/sbin:/bin"}, env...)
	if socket != "" {
		cmd.Env = append(cmd.Env, "SLUICE_SOCKET="+socket)
	}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// A container of each engine of Debian 12 computes on its job's fraction, without a flag of
// the user's: docker, podman as root and as a user, charliecloud. The image knows nothing
// of GPUs; programs of exec have the fraction as well.
func TestEngines(t *testing.T) {
	s := newSite(t)
	t.Run("docker", func(t *testing.T) { t.Parallel(); s.docker(t) })
	for _, user := range []int{0, s.user} {
		t.Run(fmt.Sprintf("podman uid %d", user), func(t *testing.T) { t.Parallel(); s.podman(t, user) })
	}
	t.Run("charliecloud", func(t *testing.T) { t.Parallel(); s.charliecloud(t) })
}

func (s *site) docker(t *testing.T) {
	e := startDocker(t, s.conf)
	docker := func(socket string, args ...string) (string, error) {
		return s.command(t, 0, socket, "", []string{"DOCKER_HOST=unix://" + e.socket, "PATH=" + s.bin + ":" + e.path + "/usr/bin:/usr/bin:/bin"}, append([]string{"docker"}, args...)...)
	}
	if out, err := docker("", "import", s.tar, "image"); err != nil {
		t.Fatalf("import: %v: %s", err, out)
	}
	run := []string{"run", "--rm", "--network", "none", "--volume", s.programs + ":/programs:ro"}
	for name, c := range map[string]struct {
		user, uid int
		flags     []string
	}{
		"root":      {0, 0, nil},
		"read-only": {0, 0, []string{"--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"}},
		"user":      {s.user, s.user, []string{"--user", "1000:1000"}},
	} {
		out, _ := docker(s.socket[c.user], slices.Concat(run, c.flags, []string{"image", "sh", "-c", compute})...)
		check(t, "docker "+name, out, c.uid)
	}
	if out, err := docker("", slices.Concat(run, []string{"image", "sh", "-c", "ls /usr/lib/sluice /usr/bin/nvidia-smi || /programs/compute"})...); err == nil || strings.Contains(out, "memory=") {
		t.Errorf("a container outside of a job: %v: %s", err, out)
	}
	for _, uid := range []int{0, s.user} {
		if out, err := docker(s.socket[uid], "run", "--detach", "--name", "box", "--user", fmt.Sprint(uid), "--network", "none", "--volume", s.programs+":/programs:ro", "image", "sleep", "300"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		out, _ := docker(s.socket[uid], "exec", "box", "sh", "-c", compute)
		check(t, "docker exec", out, uid)
		out, _ = docker("", "exec", "box", "sh", "-c", "unset SLUICE_SOCKET; "+compute) // another shell of the user's
		check(t, "docker exec from elsewhere", out, uid)
		if out, err := docker("", "rm", "--force", "box"); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
}

// A user of podman's without root has subordinate users, as adduser gives them.
func (s *site) podman(t *testing.T, user int) {
	home := podmanHome(t, user)
	sh(t, `mkdir "$1/hooks.d" "$1/etc"`, home)
	hooksDir(t, home+"/hooks.d", s.conf)
	script := podmanMounts(home) + `
printf 'root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n' >` + home + `/etc/passwd
printf 'root:x:0:\nuser:x:1000:\n' >` + home + `/etc/group
echo user:100000:65536 >` + home + `/etc/subid
mount --bind ` + home + `/etc/passwd /etc/passwd; mount --bind ` + home + `/etc/group /etc/group
mount --bind ` + home + `/etc/subid /etc/subuid; mount --bind ` + home + `/etc/subid /etc/subgid`
	for _, runtime := range runtimes {
		podman := func(socket string, args ...string) (string, error) {
			return s.command(t, user, socket, script, []string{"HOME=" + home, "XDG_RUNTIME_DIR=" + home}, slices.Concat(podmanArgs(home, runtime, home+"/hooks.d"), args)...)
		}
		if runtime == runtimes[0] {
			if out, err := podman("", "import", "-q", s.tar, "image"); err != nil {
				t.Fatalf("import: %v: %s", err, out)
			}
		}
		flags := []string{"--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--volume", s.programs + ":/programs:ro"}
		if user == 0 {
			flags = append(flags, "--cgroup-parent", "/"+group())
		} else if runtime == "crun" {
			flags = append(flags, "--cgroups", "disabled") // there are none for users here; runc knows by itself
		}
		for name, c := range map[string]struct {
			owner, uid int
			flags      []string
		}{
			"root":      {user, 0, nil},
			"read-only": {user, 0, []string{"--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"}},
			"user":      {s.user, 1000, []string{"--user", "1000"}},
			"keep-id":   {user, user, []string{"--userns", "keep-id"}},
		} {
			if user == 0 && name == "keep-id" {
				continue // there is no other user to keep
			}
			out, _ := podman(s.socket[c.owner], slices.Concat([]string{"run", "--rm"}, flags, c.flags, []string{"image", "sh", "-c", compute})...)
			check(t, runtime+" "+name, out, c.uid)
		}
		if out, err := podman("", slices.Concat([]string{"run", "--rm"}, flags, []string{"image", "/programs/compute"})...); err == nil {
			t.Errorf("%s, a container outside of a job: %s", runtime, out)
		}
		out, err := podman(s.socket[user], slices.Concat([]string{"run", "--detach", "--name", runtime}, flags, []string{"image", "sleep", "300"})...)
		if err != nil {
			t.Errorf("%v: %s", err, out)
		}
		out, _ = podman("", "exec", runtime, "sh", "-c", compute)
		check(t, runtime+" exec", out, 0)
		if user != 0 {
			out, _ = podman("", "exec", "--user", "1000", runtime, "sh", "-c", compute)
			check(t, runtime+" exec of a subordinate user", out, 1000)
		}
		if out, err := podman("", "rm", "--force", "--time", "0", runtime); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	}
}

// ch-run has no hooks and no daemon: our directories and three variables are given to it.
func (s *site) charliecloud(t *testing.T) {
	sh(t, `mkdir "$1" && tar -C "$1" -xf "$2" && mkdir "$1/programs" && chown -R 1000:1000 "$1"`, s.tree, s.tar)
	sh(t, `mkdir -p "$1/sluice" && cp "$2" "$1/sluice/"`, s.dir+"/etc", s.conf)
	// A client has no argument of its own for the settings: here they are where they are on a node.
	script := "mount -t overlay -o lowerdir=" + s.dir + "/etc:/etc overlay /etc"
	run := "ch-run --bind " + s.programs + ":/programs " + s.tree + " -- "
	for _, uid := range []int{0, 1000} {
		out, _ := s.command(t, s.user, s.socket[s.user], script, nil, "ch-run", "-u", fmt.Sprint(uid), "-b", s.programs+":/programs", s.tree, "--", "sh", "-c", compute)
		check(t, fmt.Sprintf("ch-run -u %d", uid), out, uid)
	}
	out, _ := s.command(t, s.user, s.socket[s.user], script, nil, "sh", "-c", run+`sleep 300 & until [ "$(cat /proc/$!/comm)" = sleep ]; do sleep 0.05; done
ch-run --join-pid=$! `+s.tree+" -- sh -c '"+compute+"'; kill $!")
	check(t, "ch-run --join-pid", out, s.user)
	if out, err := s.command(t, s.user, "", script, nil, "sh", "-c", run+"/programs/compute"); err == nil {
		t.Errorf("a container outside of a job: %s", out)
	}
}

// hooksDir writes the file that a site copies, with a test's paths in it.
func hooksDir(t *testing.T, dir, conf string) {
	t.Helper()
	b, err := os.ReadFile("../../etc/containers/hooks.d/sluice.json")
	if err != nil {
		t.Fatal(err)
	}
	var f map[string]any
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	h := f["hook"].(map[string]any)
	h["path"], h["args"] = built.hook, append(h["args"].([]any), "--config", conf)
	if b, err = json.Marshal(f); err == nil {
		err = os.WriteFile(dir+"/sluice.json", b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}
