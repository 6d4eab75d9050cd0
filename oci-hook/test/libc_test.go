package test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Images of other ages: from glibc 2.31, the oldest that Debian still has, to the newest, and
// musl. The shim answers in each, found by the loader's cache or where musl looks; the host's
// ldconfig may be as old or as new as the image's.
func TestLibcs(t *testing.T) {
	socket, dir := daemon(t)
	lease := grant(t, socket, dir, 0)
	oldest := built.dir + "/oldest"
	sh(t, `set -e
source=$PWD/$2; cd "$1" && mkdir oldest && cd oldest
printf 'void dlopen(void) {}\nvoid dlsym(void) {}\n' >dl.c
printf 'GLIBC_2.2.5 { global: dlopen; dlsym; };\n' >dl.map
gcc -shared -nostdlib -fPIC -Wl,-soname,libdl.so.2 -Wl,--version-script=dl.map -o libdl.so.2 dl.c
for l in glibc:/lib64/ld-linux-x86-64.so.2 musl:/lib/ld-musl-x86_64.so.1; do
	gcc -O1 -Wall -Werror -fno-stack-protector -nostdlib -fno-pie -no-pie -o "${l%%:*}" "$source" "$PWD/libdl.so.2" -Wl,--dynamic-linker="${l#*:}"
done`, built.dir, "c/oldest.c")
	run := func(t *testing.T, runtime, root, file, ldconfig string) string {
		t.Helper()
		b := newBox(t, runtime)
		set := map[string]any{"lib": dir + "/content", "leases": dir + "/run/leases"}
		if ldconfig != "" {
			set["ldconfig"] = ldconfig
		}
		if err := writeSettings(b.conf, set); err != nil {
			t.Fatal(err)
		}
		sh(t, `"$1" prepare --config "$2" --from "$3"`, built.hook, b.conf, filepath.Dir(program(t, "shim/libcuda.so.1")))
		sh(t, `rm -r "$1" && cp -a "$2" "$1" && cp "$3" "$1/program"`, b.root, root, file)
		b.spec.Annotations["dev.sluice.lease"] = lease
		b.spec.Process.Args = []string{"/program"}
		return b.must()
	}
	want := fmt.Sprintf("memory %d\n", memory)
	for _, suite := range []string{"bullseye", "bookworm", "trixie", "sid"} {
		t.Run(suite, func(t *testing.T) {
			out, err := exec.Command("./libc.sh", suite).Output()
			if err != nil {
				t.Fatalf("libc.sh: %v", err)
			}
			root := strings.TrimSpace(string(out))
			for _, r := range runtimes {
				if out := run(t, r, root, oldest+"/glibc", ""); !strings.Contains(out, want) {
					t.Errorf("%s: %s", r, out)
				}
			}
			if out := run(t, "runc", root, oldest+"/glibc", root+"/sbin/ldconfig"); !strings.Contains(out, want) {
				t.Errorf("with its own ldconfig as the host's: %s", out)
			}
			if suite == "bullseye" {
				return // the compiler of this machine makes nothing for it
			}
			if out := run(t, "runc", root, program(t, "test/cuda-11.8/vecadd"), ""); !strings.Contains(out, "PASS") {
				t.Errorf("static cudart: %s", out)
			}
		})
	}
	t.Run("musl", func(t *testing.T) {
		root := t.TempDir() + "/tree"
		sh(t, `mkdir -p "$1/lib" "$1/usr/lib" "$1/dev" "$1/proc" && cp -L /lib/ld-musl-x86_64.so.1 "$1/lib/"`, root)
		for _, r := range runtimes {
			if out := run(t, r, root, oldest+"/musl", ""); !strings.Contains(out, want) {
				t.Errorf("%s: %s", r, out)
			}
		}
	})
}
