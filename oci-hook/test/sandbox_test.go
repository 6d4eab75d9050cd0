package test

import (
	"os/exec"
	"testing"
)

// T8, T9, T11: what runs among the image's files is static, has nothing of the host's at
// hand, and can do little.
func TestSandbox(t *testing.T) {
	spy := built.dir + "/spy"
	if out, err := exec.Command("gcc", "-static", "-O1", "-Wall", "-Werror", `-DHOST="`+built.conf+`"`, "-o", spy, "c/spy.c").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	each(t, func(t *testing.T, b *box) {
		if err := writeSettings(b.conf, map[string]any{"ldconfig": spy}); err != nil {
			t.Fatal(err)
		}
		sh(t, `mknod "$1/dev/image-zero" c 1 5`, b.root)
		b.spec.Process.Args = []string{"/bin/cat", "/etc/ld.so.cache"}
		b.wants(b.must(), "descriptors=0 environment=0 pid=1\n", "memory=268435456 cpu=4 files=64\n",
			"socket=ENOSYS\n", "mount=ENOSYS\n", "chroot=ENOSYS\n", "unshare=ENOSYS\n", "fork=ENOSYS\n", "ptrace=ENOSYS\n", "mknod=ENOSYS\n",
			"device=EACCES\n", "proc=ENOENT\n", "host=ENOENT\n", "up=ENOENT\n")
	})
}

// A tool that would load the image's libraries, or is a script, is not run.
func TestToolIsStatic(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		for tool, want := range map[string]string{"/bin/ls": "linked dynamically", "/usr/bin/ldd": "not a script"} {
			if err := writeSettings(b.conf, map[string]any{"ldconfig": tool}); err != nil {
				t.Fatal(err)
			}
			out, err := b.run()
			if err == nil {
				t.Errorf("%s was run: %s", tool, out)
			}
			b.wants(out, want)
		}
	})
}
