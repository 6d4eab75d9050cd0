package test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// program is one that make has built.
func program(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("SLUICE_BUILD")
	if dir == "" {
		dir = "../../build"
	}
	path, err := filepath.Abs(filepath.Join(dir, name))
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("%v; make all cuda-programs builds it", err)
	}
	return path
}

// start starts a process that ends with the test.
func start(t *testing.T, log string, env []string, argv ...string) *exec.Cmd {
	t.Helper()
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Env = f, f, env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(unix.SIGTERM)
		late := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		late.Stop()
	})
	return cmd
}

// computes is what vecadd, which links the CUDA runtime statically, and compute, which opens
// libcuda.so.1 and NVML by name, print in a container with a lease of these tests.
func computes(uid int) string {
	return fmt.Sprintf("PASS\ncompute uid=%d memory=%d nvml=%[2]d\n", uid, memory)
}

// A container of a runtime's own computes on a fraction of the simulated GPU, through shim,
// daemon and worker, in an image that knows nothing of GPUs; and so does a program of exec: as root, as
// another user of root's runtime, and rootless.
func TestDaemon(t *testing.T) {
	socket, dir := daemon(t)
	lease := map[int]string{0: grant(t, socket, dir, 0), 1000: grant(t, socket, dir, 1000)}
	for name, c := range map[string]struct{ user, uid, owner int }{
		"root": {0, 0, 0}, "unprivileged": {0, 1000, 1000}, "rootless": {1000, 0, 1000},
	} {
		for _, r := range runtimes {
			t.Run(r+" "+name, func(t *testing.T) {
				b := newBox(t, r)
				content := b.dir + "/content"
				if err := writeSettings(b.conf, map[string]any{"lib": content, "leases": dir + "/run/leases"}); err != nil {
					t.Fatal(err)
				}
				sh(t, `"$1" prepare --config "$2" --from "$3"`, built.hook, b.conf, filepath.Dir(program(t, "shim/libcuda.so.1")))
				sh(t, `cp "$2" "$3" "$1/bin/"; ldd "$2" | sed -n 's/.* => \(\/[^ ]*\).*/\1/p' | while read l; do cp -L "$l" "$1/lib/x86_64-linux-gnu/"; done`,
					b.root, program(t, "test/cuda-11.8/vecadd"), program(t, "test/nvml"))
				b.spec.Annotations["dev.sluice.lease"] = lease[c.owner]
				b.spec.Process.User = specs.User{UID: uint32(c.uid), GID: uint32(c.uid)}
				if b.user = c.user; c.user != 0 {
					b.inNamespace(uint32(c.user), 1)
				}
				b.spec.Process.Args = []string{"/bin/sh", "-c", "vecadd && compute"}
				b.wants(b.must(), computes(c.uid))
				b.spec.Process.Args = []string{"/bin/sleep", "60"}
				b.detach = []string{"exec", "--user", fmt.Sprint(c.uid), "NAME", "/bin/sh", "-c", "'vecadd && compute'"}
				b.wants(b.must(), computes(c.uid))
				b.detach = nil
				// A library on a user's volume is covered; its settings cannot be put there, and are found all the same.
				sh(t, `mkdir "$1" && cp "$2" "$1/libcuda.so.1" && cp "$2" "$1/libnvidia-ml.so.1"`, b.dir+"/volume", built.dir+"/theirs/libcuda.so.1")
				b.spec.Mounts = append(b.spec.Mounts, specs.Mount{Destination: "/volume", Type: "bind", Source: b.dir + "/volume", Options: []string{"rbind", "rprivate"}})
				b.spec.Process.Env = append(b.spec.Process.Env, "LD_LIBRARY_PATH=/volume")
				b.spec.Process.Args = []string{"/bin/sh", "-c", "vecadd && compute"}
				b.wants(b.must(), computes(c.uid))
				// nvml compares figures that the session of a program before it would change as it ends.
				idle(t, socket, dir, lease[c.owner])
				b.spec.Process.Args = []string{"/bin/nvml"}
				b.wants(b.must(), "NVML and CUDA agree")
			})
		}
	}
}

// daemon starts munged and sluiced with a simulated GPU, for one node.
func daemon(t *testing.T) (socket, dir string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "d") // short: of a socket's path
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// What users run themselves: the build folder may be below a folder of root's alone.
	sh(t, `mkdir "$1" && cp "$2" "$3"/lib*.so* "$1/" && chmod -R a+rX "$1"`, dir+"/users", program(t, "bin/sluice"), filepath.Dir(program(t, "shim/libcuda.so.1")))
	if err := os.WriteFile(dir+"/key", bytes.Repeat([]byte("the key of this site "), 16), 0o600); err != nil {
		t.Fatal(err)
	}
	log := dir + "/log"
	start(t, log, nil, "/usr/sbin/munged", "--foreground", "--force", "--num-threads=1", "--socket="+dir+"/munge", "--key-file="+dir+"/key",
		"--pid-file="+dir+"/pid", "--log-file="+dir+"/munged.log", "--seed-file="+dir+"/seed")
	answers(t, dir+"/munge", log)
	var ports []any
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
		l.Close()
	}
	conf := fmt.Sprintf(`node: boxes
cluster: boxes
advertise: 127.0.0.1
state_dir: %[1]s/state
run_dir: %[1]s/run
listen: {control: "127.0.0.1:%[2]d", data: "127.0.0.1:%[3]d", metrics: "off"}
munge: {socket: %[1]s/munge}
audit: {file: %[1]s/audit}
owner: {enabled: "yes", keep_mem: 0, libcuda: %[4]s, libnvml: %[5]s}
pools: {default: {owners: ["boxes=127.0.0.1:%[2]d"]}}
worker: {exe: %[6]s, cgroup: "off"}
`, dir, ports[0], ports[1], program(t, "simgpu/libcuda.so.1"), program(t, "simgpu/libnvidia-ml.so.1"), program(t, "bin/sluice-worker"))
	if err := os.WriteFile(dir+"/sluice.yaml", []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	env := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "SLUICE_SIM_STATE=" + dir + "/sim", "SLUICE_SIM_MEM=1G", "SLUICE_SIM_DEVICES=1",
		"SLUICE_SIM_KERNELS=" + program(t, "test/twins.so"), "SLUICE_SIM_CTX_MEM=16M"}
	n, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: dir + "/notify"})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	start(t, log, append(env, "NOTIFY_SOCKET="+dir+"/notify"), program(t, "bin/sluiced"), "--config", dir+"/sluice.yaml")
	_ = n.SetReadDeadline(time.Now().Add(30 * time.Second))
	for said := ""; !strings.Contains(said, "READY=1"); {
		b := make([]byte, 4096)
		k, err := n.Read(b)
		if err != nil {
			out, _ := os.ReadFile(log)
			t.Fatalf("sluiced is not ready: %v\n%s", err, out)
		}
		said = string(b[:k])
	}
	return dir + "/run/sluiced.sock", dir
}

// idle waits until a lease has no sessions.
func idle(t *testing.T, socket, dir, lease string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		out, err := exec.Command(dir+"/users/sluice", "list", "--socket", socket, "--json").Output()
		if err != nil {
			t.Fatal(err)
		}
		var leases []struct {
			ID       string            `json:"id"`
			Sessions []json.RawMessage `json:"sessions"`
		}
		if err := json.Unmarshal(out, &leases); err != nil {
			t.Fatal(err)
		}
		sessions := -1
		for _, l := range leases {
			if l.ID == lease {
				sessions = len(l.Sessions)
			}
		}
		if sessions == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("lease %s has %d sessions (-1: is not listed)\n%s", lease, sessions, out)
		}
	}
}

// answers waits until somebody listens on a socket: a program says nothing of it.
func answers(t *testing.T, socket, log string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.Dial("unix", socket)
		if err == nil {
			c.Close()
			return
		}
		if time.Now().After(deadline) {
			said, _ := os.ReadFile(log)
			t.Fatalf("%s: %v\n%s", socket, err, said)
		}
	}
}

// grant has a user hold half of the GPU until the test ends, and gives the lease's id.
func grant(t *testing.T, socket, dir string, user int) string {
	t.Helper()
	cmd := exec.Command(dir+"/users/sluice", "run", "--socket", socket, "--lib", dir+"/users",
		"--fraction", "50", "--mem", "512M", "--", "sh", "-c", `echo "$SLUICE_SOCKET"; exec cat`)
	cmd.Env = []string{"PATH=/usr/bin:/bin", "HOME=/"}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(user), Gid: uint32(user)}}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b, _ := os.ReadFile(dir + "/log")
		t.Fatalf("no lease: %v: %s\n%s", err, said.String(), b)
	}
	return filepath.Base(filepath.Dir(strings.TrimSpace(line)))
}
