package test

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// measure is the name under which this test's program is started as a hook.
const measure = "measure"

// measured runs the hook for a runtime, as a process of this test's: it is what a hook costs in memory,
// its ldconfig included.
func measured(file string, args []string) int {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stderr, cmd.Env = os.Stdin, os.Stderr, os.Environ()
	err := cmd.Run()
	var u unix.Rusage
	if rerr := unix.Getrusage(unix.RUSAGE_CHILDREN, &u); rerr == nil {
		_ = os.WriteFile(file, fmt.Appendln(nil, u.Maxrss), 0o644)
	}
	if err != nil {
		return 1
	}
	return 0
}

// memoryOf gives what measured has written, in KiB.
func memoryOf(t *testing.T, file string) (kib int) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err == nil {
		_, err = fmt.Sscan(string(b), &kib)
	}
	if err != nil {
		t.Fatal(err)
	}
	return kib
}

// The most that a container waits for the hook, as medians.
const (
	unaskedCost = 5 * time.Millisecond
	askedCost   = 50 * time.Millisecond
)

// What the hook costs: of a container that did not ask, and of one that did. On a busy machine further rounds follow a
// round that is too slow; each is judged by its own medians.
func TestCost(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/config.json", []byte(`{"process":{"env":["PATH=/bin"]},"root":{"path":"rootfs"}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	b := newBox(t, "runc")
	hooks := b.spec.Hooks
	b.spec.Process.Args = []string{"/bin/ls", "/bin/ls"}
	var unasked, more time.Duration
	for range 10 {
		var bare, plain, added []time.Duration
		for range 40 {
			cmd := exec.Command(built.hook, "createContainer")
			cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"ociVersion":"1.0.2","id":"x","status":"creating","bundle":%q}`, dir))
			start := time.Now()
			if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
				t.Fatalf("%v: %s", err, out)
			}
			bare = append(bare, time.Since(start))
		}
		for range 10 {
			b.spec.Hooks = nil
			start := time.Now()
			b.must()
			without := time.Since(start)
			b.spec.Hooks, start = hooks, time.Now()
			b.must()
			plain, added = append(plain, without), append(added, time.Since(start)-without)
		}
		unasked, more = median(bare), median(added)
		t.Logf("not asked: median %v, worst %v; a container by runc: median %v without the hook; with a lease %v more, %v to %v",
			unasked, slices.Max(bare), median(plain), more, slices.Min(added), slices.Max(added))
		if unasked < unaskedCost && more < askedCost {
			break
		}
	}
	if unasked >= unaskedCost {
		t.Errorf("a container that did not ask waits %v", unasked)
	}
	if more >= askedCost {
		t.Errorf("a container that asked waits %v more", more)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b.spec.Hooks = hooks
	h := &hooks.CreateContainer[0]
	file := b.dir + "/memory"
	h.Path, h.Args = self, append([]string{measure, file, h.Path}, h.Args[1:]...)
	b.must()
	kib := memoryOf(t, file)
	t.Logf("memory of the hook with a lease: %.1f MiB", float64(kib)/1024)
	if kib > 64<<10 {
		t.Errorf("the hook took %d KiB", kib)
	}
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2].Round(10 * time.Microsecond)
}

// The comparison of the host before and after has teeth: a hook that joins strings to
// paths fails it.
func TestNaiveHookIsSeen(t *testing.T) {
	b := newBox(t, "runc")
	host := b.dir + "/host"
	sh(t, `mkdir "$2" && rm -r "$1/etc/ld.so.conf.d" && ln -s "$2" "$1/etc/ld.so.conf.d"`, b.root, host)
	sh(t, `printf '#!/bin/sh\necho /usr/lib/sluice >"%s/etc/ld.so.conf.d/00-sluice.conf"\n' "$1" >"$2" && chmod 755 "$2"`, b.root, b.dir+"/naive")
	b.spec.Hooks.CreateContainer[0].Path = b.dir + "/naive"
	b.spec.Process.Args = []string{"/bin/ls"}
	before := snapshot(t, host)
	b.must()
	if slices.Equal(before, snapshot(t, host)) {
		t.Error("a file was made on the host, and it was not seen")
	}
}
