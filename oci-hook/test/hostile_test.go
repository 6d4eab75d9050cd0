package test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// hostile runs a container whose image the script has changed, and compares the host
// before and after. $1 is the image, $2 a directory of the host's with a file in it. Whether such a container
// starts is of no interest, as long as it starts with our library or not at all.
func hostile(t *testing.T, b *box, script string) string {
	t.Helper()
	host := b.dir + "/host"
	if err := os.MkdirAll(host+"/dir", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(host+"/file", []byte("the host's\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	sh(t, "set -e\n"+script, b.root, host, built.dir+"/theirs/libcuda.so.1")
	watched := []string{host, built.lib, "/etc/ld.so.conf.d", "/etc/ld.so.cache", "/usr/lib/sluice"}
	watched = slices.DeleteFunc(watched, func(p string) bool { _, err := os.Lstat(p); return err != nil })
	before := snapshot(t, watched...)
	start := time.Now()
	out, err := b.run()
	if d := time.Since(start); d > 20*time.Second {
		t.Errorf("it took %v", d)
	}
	same(t, before, snapshot(t, watched...))
	if err == nil && strings.Contains(out, "uid=") && !strings.Contains(out, served) {
		t.Errorf("started with another library: %s", out)
	}
	if _, err := os.Lstat("/owned"); err == nil {
		t.Error("/owned was made on the host")
	}
	return out
}

// T1 to T3, T5 and T10: links in every position that the hook touches, into the host, out of the root,
// into volumes, in circles and to nothing.
func TestLinks(t *testing.T) {
	targets := map[string]string{
		"absolute": "$2/dir", "file": "$2/file", "up": "../../../../../../../../../..$2/dir",
		"magic": "/proc/self/" + "root/$2/dir", "parent": "/proc/1/cwd", "nothing": "/nowhere/at/all", "circle": "self", "dev": "/dev/null",
	}
	places := []string{
		"usr/lib/sluice", "usr/lib", "etc/ld.so.conf.d", "etc/ld.so.conf.d/00-sluice.conf", "etc/ld.so.conf.d/.00-sluice.conf.new",
		"etc/ld.so.conf", "etc/ld.so.cache", "etc/ld.so.cache~", "var/cache", "var/cache/ldconfig", "usr/local/cuda-12/compat", "usr/local/cuda-12/compat/libcuda.so.1",
		"usr/local/lib/libnvidia-ml.so.1", "usr/local", "usr/bin", "usr/bin/nvidia-smi",
	}
	for _, place := range places {
		t.Run(strings.ReplaceAll(place, "/", "_"), func(t *testing.T) {
			t.Parallel()
			for kind, target := range targets {
				for _, r := range runtimes[:1+len(kind)%2] { // both runtimes with half of the targets: they call the same hook
					b := newBox(t, r)
					hostile(t, b, fmt.Sprintf(`mkdir -p "$1/$(dirname %[1]s)"
if [ -d "$1/%[1]s" ]; then mv "$1/%[1]s" "$1/aside"; fi
rm -rf "$1/%[1]s"; ln -s "%[2]s" "$1/%[1]s"`, place, target))
				}
			}
		})
	}
}

// A hard link in an image to a file of the host's, where the hook or ldconfig writes.
func TestHardLinks(t *testing.T) {
	for _, place := range []string{
		"etc/ld.so.cache", "etc/ld.so.cache~", "var/cache/ldconfig/aux-cache", "var/cache/ldconfig/aux-cache~",
		"etc/ld.so.conf.d/00-sluice.conf", "etc/ld.so.conf.d/.00-sluice.conf.new", "etc/ld.so.conf",
	} {
		t.Run(strings.ReplaceAll(place, "/", "_"), func(t *testing.T) {
			t.Parallel()
			out := hostile(t, newBox(t, "runc"), fmt.Sprintf(`mkdir -p "$1/$(dirname %[1]s)"; rm -f "$1/%[1]s"; ln "$2/file" "$1/%[1]s"`, place))
			if !strings.Contains(out, served) {
				t.Errorf("the program is not served: %s", out)
			}
		})
	}
}

// A link in an image to where the user's data will be: nothing is made there.
func TestVolume(t *testing.T) {
	for _, place := range []string{"usr/lib/sluice", "usr/lib", "etc/ld.so.conf.d", "etc", "var/cache"} {
		t.Run(strings.ReplaceAll(place, "/", "_"), func(t *testing.T) {
			each(t, func(t *testing.T, b *box) {
				for _, opt := range []string{"rprivate", "rshared"} {
					b.spec.Mounts = append(b.spec.Mounts, specs.Mount{Destination: "/volume", Type: "bind", Source: b.dir + "/host", Options: []string{"rbind", opt}})
				}
				hostile(t, b, fmt.Sprintf(`rm -rf "$1/aside"; if [ -d "$1/%[1]s" ]; then mv "$1/%[1]s" "$1/aside"; fi; mkdir -p "$1/volume"; ln -s /volume "$1/%[1]s"`, place))
			})
		})
	}
}

// A volume that is shared with the host holds a library that the program would prefer:
// nothing is mounted there, since the host would have it as well.
func TestSharedVolume(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		host := b.dir + "/host"
		sh(t, `mkdir -p "$1" && cp "$2" "$1/libcuda.so.1"`, host, built.dir+"/theirs/libcuda.so.1")
		sh(t, `mount --bind "$1" "$1" && mount --make-shared "$1"`, host)
		t.Cleanup(func() { _ = unix.Unmount(host, unix.MNT_DETACH) })
		b.spec.Process.Env = append(b.spec.Process.Env, "LD_LIBRARY_PATH=/volume")
		b.spec.Linux.RootfsPropagation = "shared"
		b.spec.Mounts = append(b.spec.Mounts, specs.Mount{Destination: "/volume", Type: "bind", Source: host, Options: []string{"rbind", "rshared"}})
		before := mounts(t)
		out, err := b.run()
		same(t, before, mounts(t))
		if err == nil && strings.Contains(out, "uid=") && !strings.Contains(out, served) {
			t.Errorf("started with another library: %s", out)
		}
	})
}

// T7: with the root's mounts shared, as for a volume with shared propagation, none of
// ours is left on the host.
func TestPropagation(t *testing.T) {
	for _, p := range []string{"shared", "rshared", "slave", "private"} {
		t.Run(p, func(t *testing.T) {
			each(t, func(t *testing.T, b *box) {
				sh(t, `mount --bind "$1" "$1" && mount --make-shared "$1"`, b.bundle)
				t.Cleanup(func() { _ = unix.Unmount(b.bundle, unix.MNT_DETACH) })
				b.spec.Linux.RootfsPropagation = p
				before := mounts(t)
				b.wants(b.must(), served)
				same(t, before, mounts(t))
			})
		})
	}
}

// T4, CVE-2025-23266: the image's LD_PRELOAD and the like do nothing in the hook, which
// has an environment of its own, and is static where a careless entry gives it none.
func TestPreload(t *testing.T) {
	owned := built.dir + "/owned"
	sh(t, `gcc -shared -fPIC -DOWNED="\"$2\"" -o "$1/poc.so" c/preload.c`, built.dir, owned)
	for name, env := range map[string][]string{"ours": {"SLUICE_HOOK=1"}, "empty": {}, "none": nil} {
		for _, wrapped := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s %v", name, wrapped), func(t *testing.T) {
				each(t, func(t *testing.T, b *box) {
					b.spec.Hooks.CreateContainer[0].Env = env
					b.wrapped = wrapped
					b.spec.Process.Env = append(b.spec.Process.Env, "LD_PRELOAD=/proc/self/cwd/poc.so", "LD_LIBRARY_PATH=/opt/x", "GODEBUG=inittrace=1,gctrace=1",
						"GOTRACEBACK=crash", "GOMAXPROCS=1000", "GLIBC_TUNABLES=glibc.malloc.check=3", "SLUICE_SOCKET=tcp:image:1")
					sh(t, `cp "$1/poc.so" "$2/poc.so"; mkdir "$2/opt/x" -p; cp "$3" "$2/opt/x/libcuda.so.1"`, built.dir, b.root, built.dir+"/theirs/libcuda.so.1")
					out, _ := b.run()
					if _, err := os.Lstat(owned); err == nil {
						t.Fatal("the image's library ran on the host")
					}
					// In the container itself the image may preload what it likes.
					b.wants(out, "cuda=/opt/x/libcuda.so.1")
				})
			})
		}
	}
}

// T9: ldconfig, which is all that runs among the image's files, has no descriptor of the
// host's and no environment; and it stops no longer than it may (T12).
func TestFIFOs(t *testing.T) {
	for name, c := range map[string]string{
		"configuration":   `mkfifo "$1/etc/ld.so.conf.d/00-sluice.conf"`,
		"aside":           `mkfifo "$1/etc/ld.so.conf.d/.00-sluice.conf.new"`,
		"included":        `mkfifo "$1/etc/ld.so.conf.d/zz.conf"`,
		"ld.so.conf":      `rm "$1/etc/ld.so.conf"; mkfifo "$1/etc/ld.so.conf"`,
		"cache":           `mkfifo "$1/etc/ld.so.cache" "$1/etc/ld.so.cache~"`,
		"library":         `mkfifo "$1/usr/local/lib/libcuda.so.1" "$1/usr/lib/x86_64-linux-gnu/libfifo.so.1"`,
		"device":          `echo "include /dev/zero" >"$1/etc/ld.so.conf"`,
		"device in image": `mknod "$1/etc/ld.so.conf.d/zero.conf" c 1 5`,
		"recursion":       `echo "include /etc/ld.so.conf" >>"$1/etc/ld.so.conf"`,
		"large":           `truncate -s 8G "$1/etc/ld.so.conf.d/large.conf"`,
		"long":            `head -c 50000000 /dev/zero | tr '\0' 'x' >"$1/etc/ld.so.conf.d/long.conf"`,
		"many":            `for i in $(seq 2000); do echo "/lib/../lib/./$i"; done >"$1/etc/ld.so.conf.d/many.conf"`,
		"library of none": `head -c 100000 /dev/urandom >"$1/usr/lib/x86_64-linux-gnu/librandom.so.1"; truncate -s 4G "$1/usr/lib/x86_64-linux-gnu/liblarge.so.1"`,
	} {
		for _, r := range runtimes {
			t.Run(name+" "+r, func(t *testing.T) {
				t.Parallel()
				t.Logf("%.300s", hostile(t, newBox(t, r), c))
			})
		}
	}
}

// T12: a specification of any size, a state of none. The hook's memory and time are bounded.
func TestHugeSpecification(t *testing.T) {
	b := newBox(t, "runc")
	dir := t.TempDir()
	conf := []byte(`{"process":{"env":["A=` + strings.Repeat("x", 32<<20) + `"]}}`)
	if err := os.WriteFile(dir+"/config.json", conf, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir+"/fifo", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(dir+"/fifo/config.json", 0o644); err != nil {
		t.Fatal(err)
	}
	asks := fmt.Sprintf(`"annotations":{"dev.sluice.lease":%q}`, leaseID)
	for name, c := range map[string]struct{ state, refusal string }{
		"not asked":   {fmt.Sprintf(`{"bundle":%q}`, dir), ""},
		"asked":       {fmt.Sprintf(`{"bundle":%q,%s}`, dir, asks), "more than 16777216 bytes"},
		"crun's":      {fmt.Sprintf(`{"bundle":%q,"root":%q,%s}`, dir, b.root, asks), "more than 16777216 bytes"},
		"no state":    {"", ""},
		"huge state":  {`{"bundle":"` + strings.Repeat("y", 4<<20) + `"}`, ""},
		"no bundle":   {`{"bundle":"/nowhere"}`, ""},
		"fifo bundle": {fmt.Sprintf(`{"bundle":%q}`, dir+"/fifo"), ""},
		"terminal":    {fmt.Sprintf(`{"bundle":"/no\u001b[31mwhere",%s}`, asks), "/no?[31mwhere"},
	} {
		// 128 MiB of memory of its own are enough for it.
		cmd := exec.Command("sh", "-c", `ulimit -d 131072 && exec "$0" "$@"`, built.hook, "createContainer", "--config", b.conf)
		cmd.Stdin = strings.NewReader(c.state)
		cmd.Env = []string{"SLUICE_HOOK=1"}
		var said bytes.Buffer
		cmd.Stderr = &said
		start := time.Now()
		err := cmd.Run()
		took := time.Since(start)
		if (err != nil) != (c.refusal != "") || !strings.Contains(said.String(), c.refusal) {
			t.Errorf("%s: %v: %s", name, err, said.String())
		}
		if took > 2*time.Second {
			t.Errorf("%s: %v", name, took)
		}
	}
}

// Rule 10: neither set-user-id nor by way of a directory that others can write.
func TestSetUserID(t *testing.T) {
	dir := t.TempDir()
	for d := dir; strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	sh(t, `cp "$1" "$2/hook" && chown 1000 "$2/hook" && chmod 4755 "$2/hook"`, built.hook, dir)
	out, err := exec.Command(dir+"/hook", "createContainer").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "set-user-id") {
		t.Errorf("%v: %s", err, out)
	}
}
