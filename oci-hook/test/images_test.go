package test

import (
	"strings"
	"testing"
	"time"
)

// show puts a static program into the image, and has the container run it.
func (b *box) show(paths ...string) string {
	b.t.Helper()
	sh(b.t, `gcc -static -O1 -Wall -Werror -o "$1/bin/show" c/show.c`, b.root)
	b.spec.Process.Args = append([]string{"/bin/show"}, paths...)
	return b.must()
}

// An image of musl finds the libraries where musl looks, with their settings beside them.
// The loader here is a name only: the program that looks is static.
func TestMusl(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		sh(t, `rm -r "$1/lib64" && touch "$1/lib/ld-musl-x86_64.so.1"`, b.root)
		out := b.show("/usr/lib/libcuda.so.1", "/usr/lib/libnvidia-ml.so.1", "/usr/lib/sluice.conf", "/etc/ld.so.cache")
		b.wants(out, "/usr/lib/libcuda.so.1: \x7fELF", "/usr/lib/libnvidia-ml.so.1: \x7fELF", "SLUICE_SOCKET=/usr/lib/sluice/lease/sock", "/etc/ld.so.cache: none")
	})
}

// An image without a loader starts, and has what there is.
func TestStatic(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		sh(t, `rm -r "$1/lib64" "$1/etc" "$1/usr" "$1/lib"`, b.root)
		out := b.show("/usr/lib/sluice/sluice.conf", "/etc/ld.so.cache")
		b.wants(out, "SLUICE_SOCKET=/usr/lib/sluice/lease/sock", "/etc/ld.so.cache: none")
	})
}

// An image with a loader, and nothing of ld.so.conf.
func TestNoConfiguration(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		sh(t, `rm -r "$1/etc"`, b.root)
		b.wants(b.must(), served)
	})
}

// A second start of the same container, as docker restart does.
func TestRestart(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		for range 2 {
			b.wants(b.must(), served)
		}
	})
}

// exec has none of the environment that a hook or a specification could give.
func TestExec(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.spec.Process.Args = []string{"/bin/sleep", "60"}
		b.spec.Process.Env = append(b.spec.Process.Env, "LD_LIBRARY_PATH=/opt/x")
		b.detach = []string{"exec", "--env", "LD_LIBRARY_PATH=/opt/x", "NAME", "/bin/probe"}
		sh(t, `mkdir -p "$1/opt/x" && cp "$2" "$1/opt/x/libcuda.so.1"`, b.root, built.dir+"/theirs/libcuda.so.1")
		start := time.Now()
		b.wants(b.must(), "cuda=/opt/x/libcuda.so.1 nvml=/usr/lib/sluice/libnvidia-ml.so.1 socket=served")
		if time.Since(start) > 50*time.Second {
			t.Error("the container was not ended")
		}
	})
}

// docker gives the programs of exec the environment that its user gave the container.
func TestExecHostPath(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.wrapped = true
		b.unask()
		socket := "SLUICE_SOCKET=" + b.dir + "/leases/" + leaseID + "/sock"
		b.spec.Process.Args = []string{"/bin/sleep", "60"}
		b.spec.Process.Env = append(b.spec.Process.Env, socket)
		b.detach = []string{"exec", "--env", socket, "NAME", "/bin/probe"}
		b.wants(b.must(), served)
	})
}

// What a CDI specification mounts is not mounted again; the lease is the argument's.
func TestCDI(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.unask()
		b.cdi()
		out := b.must()
		b.wants(out, served)
		if n := strings.Count(out, "uid="); n != 1 {
			t.Errorf("%d lines", n)
		}
	})
}
