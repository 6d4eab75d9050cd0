package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrNoLandlock says that the kernel cannot confine files.
var ErrNoLandlock = errors.New("the kernel has no Landlock (Linux 5.13; it must be in the kernel's list of security modules, lsm=)")

// Rights on files (landlock(7)).
const (
	readFile = unix.LANDLOCK_ACCESS_FS_READ_FILE
	readTree = readFile | unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_EXECUTE
	useFile  = readFile | unix.LANDLOCK_ACCESS_FS_WRITE_FILE
	device   = useFile | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	fillTree = useFile | unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG | unix.LANDLOCK_ACCESS_FS_MAKE_DIR |
		unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_REFER | unix.LANDLOCK_ACCESS_FS_TRUNCATE
	// onFiles are those that a rule about anything but a directory may have.
	onFiles = useFile | unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// Files are what a session process may open. Names that do not exist are left out.
type Files struct {
	Read    []string // files, and directories with all that is in them
	Fill    []string // directories in which it may make, write and remove files
	Use     []string // files, and those below directories, that it may read and write
	Devices []string // device files
}

// system is what the C library, the Go runtime and the driver read of any machine. Nothing of it can be
// written, by its mode or by the absence of a right, and all of it is readable for every user.
var system = []string{
	"/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/nvidia", "/proc", "/sys",
}

// SessionFiles are the files of a session with these driver libraries. Without names of device files, it may
// use those of all GPUs.
func SessionFiles(libs, devices []string) (*Files, error) {
	f := &Files{Read: append([]string(nil), system...), Devices: []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}}
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("sandbox: own program: %w", err)
	}
	f.Read = append(f.Read, exe)
	for _, lib := range libs {
		f.Read = append(f.Read, libraryDirs(lib)...)
	}
	for dir := range strings.SplitSeq(os.Getenv("LD_LIBRARY_PATH"), ":") {
		if dir != "" {
			f.Read = append(f.Read, dir)
		}
	}
	if len(devices) == 0 {
		for _, pattern := range []string{"/dev/nvidia*", "/dev/nvidia-caps/*"} {
			more, err := filepath.Glob(pattern)
			if err != nil {
				return nil, fmt.Errorf("sandbox: %w", err)
			}
			devices = append(devices, more...)
		}
	}
	f.Devices = append(f.Devices, devices...)
	f.simulated()
	return f, nil
}

// simulated adds the files that the variables of a simulated GPU name. Its state lies in a directory that all of its
// processes fill.
func (f *Files) simulated() {
	const prefix, state = "SLUICE_SIM_", "SLUICE_SIM_STATE"
	found := false
	for _, v := range os.Environ() {
		name, value, _ := strings.Cut(v, "=")
		if !strings.HasPrefix(name, prefix) {
			continue
		}
		found = true
		for path := range strings.SplitSeq(value, ":") {
			if filepath.IsAbs(path) {
				f.Fill = append(f.Fill, filepath.Dir(path))
			}
		}
	}
	if found && os.Getenv(state) == "" {
		f.Fill = append(f.Fill, os.Getenv("XDG_RUNTIME_DIR"), os.TempDir())
	}
}

// libraryDirs are the directories of a library: those of its path, or, for a name without one, those in which the
// dynamic linker's cache has it. Links are followed.
func libraryDirs(lib string) (dirs []string) {
	paths := []string{lib}
	if !strings.Contains(lib, "/") {
		cache, err := os.ReadFile("/etc/ld.so.cache")
		if err != nil {
			return nil // the linker then looks in the system's directories
		}
		paths = cached(cache, lib)
	}
	for _, p := range paths {
		dirs = append(dirs, filepath.Dir(p))
		if to, err := filepath.EvalSymlinks(p); err == nil {
			dirs = append(dirs, filepath.Dir(to))
		}
	}
	return dirs
}

// cached lists the paths of a library in the dynamic linker's cache, whose texts end with a NUL byte.
func cached(cache []byte, lib string) (paths []string) {
	for text := range bytes.SplitSeq(cache, []byte{0}) {
		if p := string(text); strings.HasPrefix(p, "/") && filepath.Base(p) == lib {
			paths = append(paths, p)
		}
	}
	return paths
}

// Landlock is the version of the kernel's Landlock, 0 for none.
func Landlock() int {
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0
	}
	return int(v)
}

// attr gives the rights that a version of Landlock can take away, and the size of the structure that it knows, in bytes.
func attr(version int) (a unix.LandlockRulesetAttr, size uintptr) {
	a.Handled_access_fs = unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1 // of version 1
	size = unsafe.Offsetof(a.Handled_access_net)
	if version >= 2 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_REFER
	}
	if version >= 3 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if version >= 4 {
		a.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
		size = unsafe.Offsetof(a.Scoped)
	}
	if version >= 5 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if version >= 6 {
		a.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
		size = unsafe.Offsetof(a.Quiet_access_fs)
	}
	return a, size
}

// Enforce confines this thread, and what it becomes by exec, to the files. The process must have no_new_privs. It opens no TCP
// port and no connection either, and signals no process outside, where the kernel's Landlock can see to that.
func (f *Files) Enforce() error {
	version := Landlock()
	if version == 0 {
		return ErrNoLandlock
	}
	a, size := attr(version)
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&a)), size, 0)
	if errno != 0 {
		return fmt.Errorf("sandbox: landlock ruleset: %w", errno)
	}
	defer unix.Close(int(fd))
	for _, r := range []struct {
		paths  []string
		rights uint64
	}{{f.Read, readTree}, {f.Fill, fillTree}, {f.Use, useFile}, {f.Devices, device}} {
		for _, p := range r.paths {
			if err := allow(int(fd), p, r.rights&a.Handled_access_fs); err != nil {
				return err
			}
		}
	}
	if err := allowSelf(int(fd), (readTree|useFile|unix.LANDLOCK_ACCESS_FS_TRUNCATE)&a.Handled_access_fs); err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return fmt.Errorf("sandbox: landlock: %w", errno)
	}
	return nil
}

// allowSelf adds a rule for what /proc has of this process: the driver writes the names of its threads there. The rule belongs to the
// directory as it is in the kernel's memory, so it is kept there by a descriptor, which the session inherits.
func allowSelf(ruleset int, rights uint64) error {
	fd, err := unix.Open("/proc/self", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("sandbox: /proc/self: %w", err)
	}
	return addRule(ruleset, "/proc/self", fd, rights)
}

// allow adds a rule for a file or for all that is below a directory.
func allow(ruleset int, path string, rights uint64) error {
	if path == "" {
		return nil
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	} else if err != nil {
		return fmt.Errorf("sandbox: %s: %w", path, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("sandbox: %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= onFiles
	}
	return addRule(ruleset, path, fd, rights)
}

func addRule(ruleset int, path string, fd int, rights uint64) error {
	r := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&r)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("sandbox: landlock rule for %s: %w", path, errno)
	}
	return nil
}
