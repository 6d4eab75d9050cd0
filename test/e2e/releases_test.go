package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// otherShim links the shim anew as one of another release: with a list of forms that edit has changed.
func otherShim(t *testing.T, edit func(forms string) string) string {
	t.Helper()
	dir := t.TempDir()
	forms, err := os.ReadFile("../../remoting/client/gen_forms.c")
	if err != nil {
		t.Fatal(err)
	}
	changed := edit(string(forms))
	if changed == string(forms) {
		t.Fatal("nothing was changed")
	}
	fingerprint := "#include <stdint.h>\nextern const uint8_t sl_fingerprint[32];\nconst uint8_t sl_fingerprint[32] = { 1, 2, 3 };\n"
	for name, text := range map[string]string{"gen_forms.c": changed, "gen_fingerprint.c": fingerprint} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	objects, err := filepath.Glob(built("shim/o/*.o"))
	if err != nil || len(objects) == 0 {
		t.Fatalf("no objects of the shim: %v", err)
	}
	args := []string{
		"-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-z,nodelete", "-Wl,--version-script=" + built("shim/o/exports.map"),
		"-I../../remoting/client", "-I../../remoting/api", "-o", filepath.Join(dir, "libcuda.so.1"),
		filepath.Join(dir, "gen_forms.c"), filepath.Join(dir, "gen_fingerprint.c"),
	}
	for _, o := range objects {
		if b := filepath.Base(o); b != "gen_forms.o" && b != "gen_fingerprint.o" {
			args = append(args, o)
		}
	}
	if out, err := exec.Command("cc", append(args, "-pthread", "-ldl", "-lrt")...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

// with is a program with a shim of another release.
func with(t *testing.T, w *worker, shim, program string) *exec.Cmd {
	t.Helper()
	cmd := w.direct(context.Background(), program)
	cmd.Env = append(cmd.Env, "SLUICE_LOG=warn")
	for i, v := range cmd.Env {
		if strings.HasPrefix(v, "LD_LIBRARY_PATH=") {
			cmd.Env[i] = "LD_LIBRARY_PATH=" + shim
		}
	}
	return cmd
}

// TestReleases: a shim whose tables differ from the worker's works with it. What the worker does not know, or knows in another
// form, is refused by name at the call; a difference in what every session needs is told when it begins.
func TestReleases(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			w := startWorker(t, workerOptions{network: network, mem: "512M"})
			t.Run("other form and unknown", func(t *testing.T) {
				shim := otherShim(t, func(s string) string {
					// Another sum of one operation, another name and so another id of the next.
					s = regexp.MustCompile(`0x[0-9a-f]+, (\d+, "cuMemGetInfo_v2")`).ReplaceAllString(s, "0x00000001, $1")
					// As far as to keep the order of the ids.
					return regexp.MustCompile(`0x[0-9a-f]+, 0x[0-9a-f]+, \d+, "cuArrayCreate_v2"`).ReplaceAllStringFunc(s, func(f string) string {
						last := "0"
						if f[9] == '0' {
							last = "1"
						}
						return f[:9] + last + f[10:]
					})
				})
				a := startAgentAs(t, with(t, w, shim, built("test/agent")))
				a.must("mem %d", 4<<20)
				a.must("set 0 %d", 77)
				if x, _ := a.must("get 0"); x != 77 {
					t.Errorf("memory holds %d", x)
				}
				a.refused("an operation of another form", notSupported, "info")
				a.refused("an operation that the worker does not know", notSupported, "array 64 64")
				for _, name := range []string{"cuMemGetInfo_v2", "cuArrayCreate_v2"} {
					want := name + " with a worker of another release is not supported"
					waitFor(t, time.Second, "the log has "+want+": "+a.stderr.String(), func() bool { return strings.Contains(a.stderr.String(), want) })
				}
				a.must("pool %d", 1<<20)
			})
			t.Run("update of a graph", func(t *testing.T) { // a worker that lacks CUDA 11's makes it by the later one
				shim := otherShim(t, func(s string) string {
					return regexp.MustCompile(`0x[0-9a-f]+, (\d+, "cuGraphExecUpdate")`).ReplaceAllString(s, "0x00000001, $1")
				})
				ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
				defer cancel()
				r := finish(t, ctx, with(t, w, shim, program("graphhost")))
				if !strings.HasSuffix(r.stdout, "PASS\n") || strings.Contains(r.stderr, "another release is not supported") {
					t.Errorf("stdout: %s\nstderr: %s", r.stdout, r.stderr)
				}
			})
			t.Run("base", func(t *testing.T) {
				shim := otherShim(t, func(s string) string {
					return regexp.MustCompile(`0x[0-9a-f]+, (SL_NO_OP, "limit IMAGE")`).ReplaceAllString(s, "0x00000001, $1")
				})
				cmd := with(t, w, shim, built("test/agent"))
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				defer cancel()
				cmd.Stdin = strings.NewReader("")
				r := finish(t, ctx, cmd)
				if r.stdout != fmt.Sprintln(803) { // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
					t.Errorf("cuInit: %q", r.stdout)
				}
				if !strings.Contains(r.stderr, "another release, which differs in limit IMAGE") {
					t.Errorf("the log does not say in what the releases differ: %s", r.stderr)
				}
			})
		})
	}
}
