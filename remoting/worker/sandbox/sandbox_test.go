package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "files" {
		confined(os.Args[2])
		return
	}
	os.Exit(m.Run())
}

// A process can open the files of its sandbox, in the ways that it may, and no others.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"read", "fill", "use", "other"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, d, "f"), []byte("x"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.CommandContext(t.Context(), "/proc/self/exe", "files", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := []string{
		"read read", "list read", "denied write read", "denied make read", "denied remove read",
		"read fill", "list fill", "write fill", "make fill", "remove fill",
		"read use", "denied list use", "write use", "denied make use", "denied remove use",
		"denied read other", "denied list other", "denied write other", "denied make other", "denied remove other",
		"device", "another file of /dev denied", "name a thread", "denied write of another process",
	}
	if got := strings.Split(strings.TrimSpace(string(out)), "\n"); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// confined is the process of TestFiles.
func confined(dir string) {
	runtime.LockOSThread()
	in := func(name string) []string { return []string{filepath.Join(dir, name)} }
	f := Files{Read: in("read"), Fill: append(in("fill"), filepath.Join(dir, "missing"), ""), Use: in("use"), Devices: []string{"/dev/zero"}}
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if err == nil {
		err = f.Enforce()
	}
	if err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
	say := func(what string, err error) {
		switch {
		case err == nil:
			os.Stdout.WriteString(what + "\n")
		case errors.Is(err, unix.EACCES):
			os.Stdout.WriteString("denied " + what + "\n")
		default:
			os.Stdout.WriteString(what + ": " + err.Error() + "\n")
		}
	}
	for _, d := range []string{"read", "fill", "use", "other"} {
		at := filepath.Join(dir, d)
		_, err := os.ReadFile(at + "/f")
		say("read "+d, err)
		_, err = os.ReadDir(at)
		say("list "+d, err)
		w, err := os.OpenFile(at+"/f", os.O_WRONLY, 0)
		w.Close()
		say("write "+d, err)
		w, err = os.OpenFile(at+"/g", os.O_CREATE|os.O_RDWR, 0o600)
		w.Close()
		say("make "+d, err)
		say("remove "+d, os.Remove(at+"/f"))
	}
	fd, err := os.OpenFile("/dev/zero", os.O_RDWR, 0)
	say("device", err)
	fd.Close()
	if _, err = os.Open("/dev/full"); errors.Is(err, unix.EACCES) {
		os.Stdout.WriteString("another file of /dev denied\n")
	}
	say("name a thread", os.WriteFile(fmt.Sprintf("/proc/self/task/%d/comm", unix.Gettid()), []byte("driver"), 0o644))
	_, err = os.OpenFile(fmt.Sprintf("/proc/%d/comm", os.Getppid()), os.O_WRONLY, 0)
	say("write of another process", err)
}

func TestCached(t *testing.T) {
	cache := []byte("head\x00libcuda.so.1\x00/usr/local/nvidia/lib64/libcuda.so.1\x00/opt/x/libcuda.so.1\x00/opt/x/libcuda.so.10\x00/opt/libcuda.so.1/y\x00")
	want := []string{"/usr/local/nvidia/lib64/libcuda.so.1", "/opt/x/libcuda.so.1"}
	if got := cached(cache, "libcuda.so.1"); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

// Each version of Landlock is asked for rights that it knows.
func TestVersions(t *testing.T) {
	var last unix.LandlockRulesetAttr
	sizes := map[int]uintptr{1: 8, 2: 8, 3: 8, 4: 16, 5: 16, 6: 24, 7: 24}
	for v := 1; v <= 7; v++ {
		a, size := attr(v)
		if size != sizes[v] {
			t.Errorf("version %d: structure of %d bytes, want %d", v, size, sizes[v])
		}
		if a.Handled_access_fs&last.Handled_access_fs != last.Handled_access_fs {
			t.Errorf("version %d takes away less than the one before", v)
		}
		last = a
	}
	if last.Handled_access_fs != 1<<16-1 || last.Handled_access_net != 3 || last.Scoped != 3 {
		t.Errorf("%+v", last)
	}
}

func TestParseMode(t *testing.T) {
	for text, want := range map[string]Mode{"": Off, "off": Off, "auto": Auto, "on": On, "log": Log} {
		if m, err := ParseMode(text); err != nil || m != want {
			t.Errorf("%q: %q, %v", text, m, err)
		}
	}
	if _, err := ParseMode("yes"); err == nil {
		t.Error("yes is a mode")
	}
}

// Every call of the lists has a number, and none is in both.
func TestFilters(t *testing.T) {
	for _, m := range []Mode{Off, On, Log} {
		if _, err := assemble(m); err != nil {
			t.Errorf("%s: %v", m, err)
		}
	}
	for _, name := range Confined {
		if slices.Contains(Refused, name) {
			t.Errorf("%s is refused to all sessions already", name)
		}
	}
}
