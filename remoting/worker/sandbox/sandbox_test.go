package sandbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
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

// Every call of the lists has a number, and none is both allowed and refused.
func TestFilters(t *testing.T) {
	for _, m := range []Mode{Off, On, Log} {
		if _, err := assemble(m); err != nil {
			t.Errorf("%s: %v", m, err)
		}
	}
	seen := map[string]bool{}
	for _, name := range Allowed {
		if seen[name] || slices.Contains(Refused, name) {
			t.Errorf("%s is allowed twice, or is refused to all sessions", name)
		}
		seen[name] = true
	}
	for _, j := range byArgument(On, 1) {
		if j.arg.pointer && (j.not || j.arg.mask != 0) {
			t.Errorf("%s: a pointer is compared as a number", j.name)
		}
		if seen[j.name] || slices.Contains(Refused, j.name) {
			t.Errorf("%s depends on an argument and is in a list", j.name)
		}
	}
}

// The filter's answers, by number and arguments.
func TestConfine(t *testing.T) {
	const allow, eperm, enosys, notify = unix.SECCOMP_RET_ALLOW, unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM), unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS), unix.SECCOMP_RET_USER_NOTIF
	pid := uint64(os.Getpid())
	const high = 1 << 32
	for _, c := range []struct {
		what    string
		nr      uint32
		args    []uint64
		on, log uint32
	}{
		{"futex", unix.SYS_FUTEX, nil, allow, allow},
		{"the last that is allowed", unix.SYS_GETRANDOM, nil, allow, allow},
		{"socket", unix.SYS_SOCKET, nil, eperm, notify},
		{"connect", unix.SYS_CONNECT, nil, eperm, notify},
		{"mount", unix.SYS_MOUNT, nil, eperm, eperm},
		{"one that this kernel has not", last + 1, nil, enosys, enosys},
		{"x32", 0x40000000 | unix.SYS_READ, nil, enosys, enosys},
		{"clone3", unix.SYS_CLONE3, nil, enosys, enosys},
		{"a thread", unix.SYS_CLONE, []uint64{unix.CLONE_THREAD | unix.CLONE_VM}, allow, allow},
		{"a process", unix.SYS_CLONE, []uint64{unix.CLONE_VM}, eperm, eperm},
		{"a process, with a bit that the kernel ignores", unix.SYS_CLONE, []uint64{unix.CLONE_THREAD << 32}, eperm, eperm},
		{"a number of the driver's", unix.SYS_IOCTL, []uint64{3, 0xc020462a}, allow, allow},
		{"the same, sign-extended", unix.SYS_IOCTL, []uint64{3, 0xffffffffc020462a}, allow, allow},
		{"a number of UVM's", unix.SYS_IOCTL, []uint64{3, 75}, allow, allow},
		{"UVM's first", unix.SYS_IOCTL, []uint64{3, uvmInitialize}, allow, allow},
		{"a terminal's size", unix.SYS_IOCTL, []uint64{1, unix.TIOCGWINSZ}, allow, allow},
		{"input for a terminal", unix.SYS_IOCTL, []uint64{1, unix.TIOCSTI}, eperm, notify},
		{"the owner of a file's signals", unix.SYS_IOCTL, []uint64{1, 0x8901}, eperm, notify},
		{"an answer to the log", unix.SYS_IOCTL, []uint64{1, 0xc0182101}, eperm, allow},
		{"a lock", unix.SYS_FCNTL, []uint64{3, unix.F_OFD_SETLKW}, allow, allow},
		{"a file's signals to others", unix.SYS_FCNTL, []uint64{3, unix.F_SETOWN}, eperm, notify},
		{"the same, with bits that the kernel ignores", unix.SYS_FCNTL, []uint64{3, unix.F_SETOWN | high}, eperm, notify},
		{"a name", unix.SYS_PRCTL, []uint64{unix.PR_SET_NAME}, allow, allow},
		{"to be traced", unix.SYS_PRCTL, []uint64{unix.PR_SET_DUMPABLE, 1}, eperm, notify},
		{"a signal to itself", unix.SYS_KILL, []uint64{pid, 9}, allow, allow},
		{"a signal to another", unix.SYS_KILL, []uint64{pid + 1, 9}, eperm, notify},
		{"a question", unix.SYS_KILL, []uint64{pid + 1, 0}, allow, allow},
		{"a signal to all", unix.SYS_KILL, []uint64{1<<64 - 1, 9}, eperm, notify},
		{"a signal to an own thread", unix.SYS_TGKILL, []uint64{pid, 7, 9}, allow, allow},
		{"a signal to another's thread", unix.SYS_TGKILL, []uint64{1, 1, 9}, eperm, notify},
		{"another's limits", unix.SYS_PRLIMIT64, []uint64{1}, eperm, notify},
		{"the own limits", unix.SYS_PRLIMIT64, []uint64{0}, allow, allow},
		{"times of an open file", unix.SYS_UTIMENSAT, []uint64{3, 0}, allow, allow},
		{"times of a name", unix.SYS_UTIMENSAT, []uint64{3, 0x7fff12345678}, eperm, notify},
		{"times of a name whose address has no lower bits", unix.SYS_UTIMENSAT, []uint64{3, high}, eperm, notify},
	} {
		for mode, want := range map[Mode]uint32{On: c.on, Auto: c.on, Log: c.log} {
			if got := answer(t, mode, c.nr, c.args); got != want {
				t.Errorf("%s: %s: %#x, want %#x", mode, c.what, got, want)
			}
		}
	}
}

// answer is what a mode's filter returns.
func answer(t *testing.T, mode Mode, nr uint32, args []uint64) uint32 {
	t.Helper()
	prog, err := assemble(mode)
	if err != nil {
		t.Fatal(err)
	}
	vm, err := bpf.NewVM(prog)
	if err != nil {
		t.Fatal(err)
	}
	// seccomp_data; the virtual machine reads words as a network has them.
	data := binary.BigEndian.AppendUint32(nil, nr)
	data = binary.BigEndian.AppendUint32(data, uint32(arch.X86_64.ID))
	data = append(data, make([]byte, 8)...)
	for i := range 6 {
		var v uint64
		if i < len(args) {
			v = args[i]
		}
		data = binary.BigEndian.AppendUint32(data, uint32(v))
		data = binary.BigEndian.AppendUint32(data, uint32(v>>32))
	}
	n, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(n)
}
