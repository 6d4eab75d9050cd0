package test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const served = "cuda=/usr/lib/sluice/libcuda.so.1 nvml=/usr/lib/sluice/libnvidia-ml.so.1 socket=served"

func TestHook(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.wants(b.must(), "uid=0 "+served)
	})
}

// Asked by the environment alone, the lease is at the host's path too.
func TestEnvironment(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.unask()
		b.spec.Process.Env = append(b.spec.Process.Env, "SLUICE_SOCKET="+b.dir+"/leases/"+leaseID+"/sock")
		b.wants(b.must(), served)
	})
}

func TestWrapper(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.wrapped = true
		b.unask()
		b.spec.Process.Env = append(b.spec.Process.Env, "SLUICE_SOCKET="+b.dir+"/leases/"+leaseID+"/sock")
		b.wants(b.must(), served)
		// Where the host's path leads elsewhere the first program has the lease all the same.
		b.spec.Mounts = append(b.spec.Mounts, specs.Mount{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs"})
		b.wants(b.must(), served)
	})
}

func TestReadOnlyNoCapabilitiesOtherUser(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.lease(strings.Repeat("ab", 16), 1000)
		b.spec.Annotations["dev.sluice.lease"] = strings.Repeat("ab", 16)
		b.spec.Root.Readonly = true
		b.spec.Process.User = specs.User{UID: 1000, GID: 1000}
		b.wants(b.must(), "uid=1000 "+served)
	})
}

// What the image has of the same names, and prefers, is covered.
func TestCover(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.spec.Process.Env = append(b.spec.Process.Env, "LD_LIBRARY_PATH=/usr/local/cuda-12.4/compat:/opt/x")
		script := `set -e
mkdir -p "$1/usr/local/cuda-12.4/compat" "$1/opt/x"
cp "$2" "$1/usr/local/cuda-12.4/compat/libcuda.so.550"
ln -s libcuda.so.550 "$1/usr/local/cuda-12.4/compat/libcuda.so.1"
cp "$2" "$1/opt/x/libcuda.so.1"
cp "$2" "$1/usr/lib/x86_64-linux-gnu/libcuda.so.1"`
		sh(t, script, b.root, built.dir+"/theirs/libcuda.so.1")
		b.spec.Process.Args = []string{"/bin/sh", "-c", `for f in /usr/local/cuda-12.4/compat/libcuda.so.1 /opt/x/libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1 /usr/lib/sluice/libcuda.so; do cat $f; done`}
		out := b.must()
		if strings.Contains(out, "theirs\x00") || strings.Count(out, "ours\x00") != 4 {
			t.Errorf("%d of ours, %d of theirs", strings.Count(out, "ours\x00"), strings.Count(out, "theirs\x00"))
		}
	})
}

// A covered library finds its settings too: exec has no environment of ours.
func TestCoveredFindsItsSettings(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.spec.Process.Env = append(b.spec.Process.Env, "LD_LIBRARY_PATH=/opt/x")
		sh(t, `mkdir -p "$1/opt/x" && cp "$2" "$1/opt/x/libcuda.so.1"`, b.root, built.dir+"/theirs/libcuda.so.1")
		b.wants(b.must(), "cuda=/opt/x/libcuda.so.1", "socket=served")
	})
}

// An image without an nvidia-smi has the site's, at each start; one with its own keeps it.
func TestNvidiaSmi(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.spec.Process.Args = []string{"/bin/sh", "-c", "/usr/bin/nvidia-smi && /usr/lib/sluice/bin/nvidia-smi"}
		for range 2 {
			if out := b.must(); strings.Count(out, "of the site") != 2 {
				t.Errorf("%s", out)
			}
		}
		sh(t, `printf '#!/bin/sh\necho of the image\n' >"$1/usr/bin/nvidia-smi"; chmod 755 "$1/usr/bin/nvidia-smi"`, b.root)
		b.wants(b.must(), "of the image\n", "of the site\n")
		sh(t, `rm -r "$1/usr/bin"`, b.root) // nowhere to put it: the rest is served
		b.spec.Process.Args = []string{"/bin/probe"}
		b.wants(b.must(), served)
	})
}

// The loader's cache lists the library, and still does after the image's own ldconfig.
func TestLdconfigInside(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.spec.Process.Args = []string{"/bin/sh", "-c", "ldconfig -p; echo second; ldconfig && ldconfig -p"}
		first, second, _ := strings.Cut(b.must(), "second\n")
		b.wants(first, "/usr/lib/sluice/libcuda.so.1", "libc.so.6")
		b.wants(second, "/usr/lib/sluice/libcuda.so.1", "libc.so.6")
	})
}

// Nobody asked: the image stays as it is, whatever the settings are worth.
func TestNoRequest(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.unask()
		b.spec.Process.Args = []string{"/bin/ls", "/usr/lib"}
		for _, conf := range []string{"", "not JSON"} {
			if conf != "" {
				if err := os.WriteFile(b.conf, []byte(conf), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			if out := b.must(); strings.Contains(out, "sluice") {
				t.Errorf("left behind: %s", out)
			}
		}
		if _, err := os.Stat(b.root + "/etc/ld.so.cache"); err == nil {
			t.Error("the loader's cache was written")
		}
	})
}

// A container whose request cannot be served does not start, and its output says why.
func TestRefused(t *testing.T) {
	other := strings.Repeat("cd", 16)
	for name, c := range map[string]struct {
		do   func(b *box)
		want string
	}{
		"no such lease": {func(b *box) { b.spec.Annotations["dev.sluice.lease"] = other }, "not on this node"},
		"not a lease":   {func(b *box) { b.spec.Annotations["dev.sluice.lease"] = "../../etc" }, "32 hexadecimal digits"},
		"two leases":    {func(b *box) { b.spec.Process.Env = []string{"SLUICE_SOCKET=" + b.dir + "/leases/" + other + "/sock"} }, "one container has one lease"},
		"other user": {func(b *box) {
			b.lease(other, 1001)
			b.spec.Annotations["dev.sluice.lease"] = other
			b.spec.Process.User.UID = 1000
		}, "run it as 1001"},
		"open directory": {func(b *box) { _ = os.Chmod(b.dir+"/leases", 0o777) }, "unsafe owner or mode"},
		"settings open":  {func(b *box) { _ = os.Chmod(b.conf, 0o666) }, "unsafe owner or mode"},
		"volume in the way": {func(b *box) {
			b.spec.Mounts = append(b.spec.Mounts, specs.Mount{Destination: "/usr/lib/sluice", Type: "bind", Source: b.dir + "/leases", Options: []string{"rbind", "rprivate"}})
		}, "not on the container's own root"},
		"link as a lease": {func(b *box) {
			_ = os.Symlink("/root", b.dir+"/leases/"+other)
			b.spec.Annotations["dev.sluice.lease"] = other
		}, "lease " + other},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, b *box) {
				c.do(b)
				out, err := b.run()
				if err == nil || strings.Contains(out, "uid=") {
					t.Fatalf("the container started: %s", out)
				}
				b.wants(out, "cannot be brought into this container", c.want)
			})
		})
	}
}

// Before a client of an engine, or a runtime, stands nothing that could keep it from its work: neither broken settings
// out of a job, nor a copy of our program where a link should be.
func TestClient(t *testing.T) {
	dir := t.TempDir()
	sh(t, `cd "$1" && mkdir one two real none etc etc/sluice && cp "$2" one/docker && cp "$2" two/docker && echo 'not JSON' >etc/sluice/oci-hook.json
printf '#!/bin/sh\necho "the real one $*"\n' >real/docker && chmod 755 real/docker`, dir, built.hook)
	script := `mount -t overlay -o lowerdir="$0/etc:/etc" overlay /etc && PATH=$0/one:$0/two:$0/$1 && exec /usr/bin/timeout 20 docker run image`
	for real, want := range map[string]string{"real": "the real one run image\n", "none": "no docker in PATH but sluice-hook under its name"} {
		out, _ := exec.Command("unshare", "-m", "/bin/sh", "-c", script, dir, real).CombinedOutput()
		if !strings.Contains(string(out), want) {
			t.Errorf("%s: %s", real, out)
		}
	}
	if out, err := exec.Command(built.hook, "runtime", "--config", dir+"/etc/sluice/oci-hook.json", "--", "--version").CombinedOutput(); err != nil || !strings.Contains(string(out), "runc version") {
		t.Errorf("the runtime's wrapper: %v: %s", err, out)
	}
}

func sh(t *testing.T, script string, args ...string) {
	t.Helper()
	if out, err := exec.Command("sh", append([]string{"-c", script, "sh"}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}
