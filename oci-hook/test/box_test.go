// Package test runs the hook with real runtimes, on honest and on hostile images.
package test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// built is what all tests share: the hook, an image and libraries.
var built struct{ dir, hook, image, lib, conf string }

const leaseID = "00112233445566778899aabbccddeeff"

// runtimes are those at hand; runc and crun are both in the list of what tests need.
var runtimes = []string{"runc", "crun"}

// runtimePath is where one of them is: the machine's, or in a directory with others.
func runtimePath(name string) string {
	if dir := os.Getenv("SLUICE_OCI_RUNTIMES"); dir != "" {
		return filepath.Join(dir, name)
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return name
	}
	return path
}

func build(dir string) error {
	built.dir, built.hook, built.image, built.lib = dir, dir+"/sluice-hook", dir+"/image", dir+"/content"
	run := func(name string, args ...string) error {
		cmd := exec.Command(name, args...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
		}
		return nil
	}
	so := func(out, soname, who string) []string {
		return []string{"-shared", "-fPIC", "-DWHO=\"" + who + "\"", "-Wl,-soname," + soname, "-o", out, "c/standin.c"}
	}
	steps := [][]string{
		{"go", "build", "-ldflags", "-s -w", "-o", built.hook, "../cmd/sluice-hook"},
		{"mkdir", "-p", dir + "/shim", dir + "/theirs"},
		append([]string{"gcc"}, so(dir+"/shim/libcuda.so.1", "libcuda.so.1", "ours")...),
		append([]string{"gcc"}, so(dir+"/shim/libnvidia-ml.so.1", "libnvidia-ml.so.1", "ours")...),
		append([]string{"gcc"}, so(dir+"/theirs/libcuda.so.1", "libcuda.so.1", "theirs")...),
		{"gcc", "-O1", "-Wall", "-Werror", "-Wno-stringop-truncation", "-o", dir + "/probe", "c/probe.c", "-ldl"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", dir + "/compute", "../../test/containers/c/compute.c", "-ldl"},
	}
	for _, s := range steps {
		if err := run(s[0], s[1:]...); err != nil {
			return err
		}
	}
	built.conf = dir + "/oci-hook.json"
	if err := writeSettings(built.conf, nil); err != nil {
		return err
	}
	if err := os.WriteFile(dir+"/nvidia-smi", []byte("#!/bin/sh\necho the nvidia-smi of the site\n"), 0o755); err != nil {
		return err
	}
	// By an admin whose files are his own: containers of users read these.
	if err := run("sh", "-c", `umask 077; exec "$@"`, "sh", built.hook, "prepare", "--config", built.conf, "--from", dir+"/shim", "--nvidia-smi", dir+"/nvidia-smi"); err != nil {
		return err
	}
	return buildImage(run)
}

func writeSettings(path string, more map[string]any) error {
	set := map[string]any{"lib": built.lib, "leases": filepath.Dir(path) + "/leases"}
	maps.Copy(set, more)
	b, err := json.Marshal(set)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}

// buildImage makes a small image of this machine's own shell and C library.
func buildImage(run func(string, ...string) error) error {
	img := built.image
	for _, d := range []string{"bin", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "usr/local/lib", "lib64", "etc/ld.so.conf.d", "proc", "dev", "sys", "tmp", "run", "sbin", "var/cache", "usr/bin"} {
		if err := os.MkdirAll(filepath.Join(img, d), 0o755); err != nil {
			return err
		}
	}
	files := map[string]string{built.dir + "/probe": "/bin/probe", built.dir + "/compute": "/bin/compute", "/sbin/ldconfig": "/sbin/ldconfig"}
	for _, b := range []string{"/bin/sh", "/bin/ls", "/bin/cat", "/bin/sleep"} {
		files[b] = b
	}
	for _, lib := range []string{"libpthread.so.0", "libdl.so.2", "librt.so.1"} { // empty since glibc 2.34, and in every image
		files["/lib/x86_64-linux-gnu/"+lib] = "/lib/x86_64-linux-gnu/" + lib
	}
	var deps bytes.Buffer
	for src := range files {
		if out, err := exec.Command("ldd", src).Output(); err == nil {
			deps.Write(out)
		}
	}
	for _, lib := range regexp.MustCompile(`/lib\S*/\S+\.so\S*`).FindAllString(deps.String(), -1) {
		files[lib] = lib
	}
	for src, dst := range files {
		if err := run("cp", "-L", src, img+dst); err != nil {
			return err
		}
	}
	if err := os.WriteFile(img+"/etc/ld.so.conf", []byte("include /etc/ld.so.conf.d/*.conf\n"), 0o644); err != nil {
		return err
	}
	return os.WriteFile(img+"/etc/ld.so.conf.d/x86_64-linux-gnu.conf", []byte("/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n"), 0o644)
}

// box is one container of a test, with leases and settings of its own.
type box struct {
	t                       *testing.T
	dir, bundle, root, conf string
	runtime                 string
	spec                    specs.Spec
	user                    int      // of the host, who starts it; 0: root
	detach                  []string // a command of the runtime's for the running container, whose program is sleep
	wrapped                 bool     // by the runtime wrapper instead of a hook in the specification
}

// newBox makes a container that asks for a lease of root's, by the annotation, with
// the hook in its specification.
func newBox(t *testing.T, runtime string) *box {
	t.Helper()
	dir := t.TempDir()
	for d := dir; strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	b := &box{t: t, dir: dir, bundle: dir + "/bundle", root: dir + "/bundle/rootfs", conf: dir + "/oci-hook.json", runtime: runtime}
	if err := os.Mkdir(b.bundle, 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", "--reflink=auto", built.image, b.root).CombinedOutput(); err != nil {
		t.Fatalf("image: %v: %s", err, out)
	}
	if err := writeSettings(b.conf, nil); err != nil {
		t.Fatal(err)
	}
	b.lease(leaseID, 0)
	timeout := 15
	b.spec = specs.Spec{
		Version: "1.0.2", Hostname: "box", Annotations: map[string]string{"dev.sluice.lease": leaseID, "run.oci.hooks.stderr": "/dev/stderr"},
		Root: &specs.Root{Path: "rootfs"},
		Process: &specs.Process{
			Args: []string{"/bin/probe"}, Cwd: "/", Env: []string{"PATH=/bin:/sbin"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=65536k"}},
		},
		Hooks: &specs.Hooks{CreateContainer: []specs.Hook{{
			Path: built.hook, Args: []string{"sluice-hook", "createContainer", "--config", b.conf}, Env: []string{"SLUICE_HOOK=1"}, Timeout: &timeout,
		}}},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.UTSNamespace}, {Type: specs.IPCNamespace}}},
	}
	return b
}

// cdi edits the specification as an engine does for a CDI device: the file is the program's.
func (b *box) cdi() {
	b.t.Helper()
	out, err := exec.Command(built.hook, "cdi", "--config", b.conf, "--lease", leaseID, "--name", "job42").Output()
	if err != nil {
		b.t.Fatal(err)
	}
	var f struct {
		Devices []struct {
			ContainerEdits struct {
				Env    []string
				Mounts []struct {
					HostPath, ContainerPath string
					Options                 []string
				}
				Hooks []struct {
					HookName, Path string
					Args, Env      []string
					Timeout        *int
				}
			}
		}
	}
	if err := json.Unmarshal(out, &f); err != nil || len(f.Devices) != 1 {
		b.t.Fatalf("%v: %s", err, out)
	}
	e := f.Devices[0].ContainerEdits
	b.spec.Process.Env = append(b.spec.Process.Env, e.Env...)
	for _, m := range e.Mounts {
		b.spec.Mounts = append(b.spec.Mounts, specs.Mount{Type: "bind", Source: m.HostPath, Destination: m.ContainerPath, Options: m.Options})
	}
	h := e.Hooks[0]
	b.spec.Hooks = &specs.Hooks{CreateContainer: []specs.Hook{{Path: h.Path, Args: h.Args, Env: h.Env, Timeout: h.Timeout}}}
}

// unask takes the annotation away.
func (b *box) unask() { delete(b.spec.Annotations, "dev.sluice.lease") }

// lease makes a lease's directory, which is root's, and in it the user's socket, which answers as its daemon would.
func (b *box) lease(id string, uid int) {
	b.t.Helper()
	dir := b.dir + "/leases/" + id
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		b.t.Fatal(err)
	}
	d, err := os.Open(dir) // sun_path is short, a test's directory is not
	if err != nil {
		b.t.Fatal(err)
	}
	defer d.Close()
	l, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/sock", d.Fd()))
	if err != nil {
		b.t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(dir+"/sock", 0o666), os.Chown(dir+"/sock", uid, uid)); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("served"))
			c.Close()
		}
	}()
}

// run starts the container and gives what it and the runtime said.
func (b *box) run() (string, error) {
	b.t.Helper()
	args := []string{runtimePath(b.runtime)}
	if b.wrapped {
		b.spec.Hooks = nil
		if err := writeSettings(b.conf, map[string]any{"runtimes": []string{"/nowhere/runc", runtimePath(b.runtime)}}); err != nil {
			b.t.Fatal(err)
		}
		args = []string{built.hook, "runtime", "--config", b.conf, "--"}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	name := fmt.Sprintf("%s-%d", group(), time.Now().UnixNano())
	args = append(args, "--root", b.dir+"/state")
	if b.detach == nil {
		args = append(args, "run", "--bundle", b.bundle, name)
	} else {
		command := strings.ReplaceAll(strings.Join(b.detach, " "), "NAME", name)
		// crun comes back before the container's program runs, and there is nothing to enter yet.
		args = []string{"sh", "-c", fmt.Sprintf(`runtime() { %s "$@"; }
runtime run --detach --bundle %s %s </dev/null >/dev/null 2>&1 || exit
pid=$(runtime state %[3]s | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p')
until [ "$(cat /proc/$pid/comm)" = sleep ]; do sleep 0.02; done
runtime %[4]s; rc=$?
runtime delete --force %[3]s
exit $rc`, strings.Join(args, " "), b.bundle, name, command)}
	}
	// crun refuses a machine with both kinds of cgroups; what it need not see is out of sight here.
	script := `umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"`
	if b.user != 0 {
		b.spec.Annotations["run.oci.hooks.stderr"] = b.bundle + "/stderr"
		if err := os.MkdirAll(b.dir+"/state", 0o700); err != nil {
			b.t.Fatal(err)
		}
		sh(b.t, `chown -hR "$1:$1" "$2" "$3"`, fmt.Sprint(b.user), b.bundle, b.dir+"/state")
		script = fmt.Sprintf(`umount /sys/fs/cgroup/unified 2>/dev/null; export XDG_RUNTIME_DIR=%s/state; exec setpriv --reuid %d --regid %[2]d --clear-groups "$@"`, b.dir, b.user)
	}
	j, err := json.Marshal(b.spec)
	if err == nil {
		err = os.WriteFile(b.bundle+"/config.json", j, 0o644)
	}
	if err != nil {
		b.t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, "unshare", append([]string{"-m", "sh", "-c", script, "sh"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	said, _ := os.ReadFile(b.bundle + "/stderr")
	return string(out) + string(said), err
}

// must runs the container, which has to succeed.
func (b *box) must() string {
	b.t.Helper()
	out, err := b.run()
	if err != nil {
		b.t.Fatalf("%s: %v\n%s", b.runtime, err, out)
	}
	return out
}

// wants checks the probe's one line.
func (b *box) wants(out string, parts ...string) {
	b.t.Helper()
	for _, p := range parts {
		if !strings.Contains(out, p) {
			b.t.Errorf("%s: no %q in %q", b.runtime, p, out)
		}
	}
}

// each runs a test with each runtime.
func each(t *testing.T, f func(t *testing.T, b *box)) {
	t.Helper()
	for _, r := range runtimes {
		t.Run(r, func(t *testing.T) { f(t, newBox(t, r)) })
	}
}

// snapshot is all that is below the directories, with times and sizes, and the mounts of this namespace.
func snapshot(t *testing.T, dirs ...string) []string {
	t.Helper()
	var out []string
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			fi, err := d.Info()
			if err != nil {
				return err
			}
			st := fi.Sys().(*syscall.Stat_t)
			out = append(out, fmt.Sprintf("%s %v %d %d %d:%d %v", path, fi.Mode(), fi.Size(), st.Ino, st.Uid, st.Gid, fi.ModTime().UnixNano()))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return append(out, mounts(t)...)
}

// mounts are those of this namespace.
func mounts(t *testing.T) []string {
	t.Helper()
	m, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(m), "\n")
	slices.Sort(lines)
	return lines
}

func same(t *testing.T, before, after []string) {
	t.Helper()
	for _, l := range after {
		if !slices.Contains(before, l) {
			t.Errorf("host changed: now %s", l)
		}
	}
	for _, l := range before {
		if !slices.Contains(after, l) {
			t.Errorf("host changed: was %s", l)
		}
	}
}
