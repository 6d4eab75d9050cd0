package ldcache

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// defaults are directories in which some distribution's own ldconfig would look without
// being told, and the host's might not.
var defaults = []string{
	"/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
	"/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib", "/usr/lib",
}

// Child enters the container's root and becomes ldconfig. It returns only if it fails.
func Child(target string) error {
	// Capabilities, the filter and the program itself are this thread's.
	runtime.LockOSThread()
	if err := enter(); err != nil {
		return fmt.Errorf("enter the container's root: %w", err)
	}
	if err := attach(target); err != nil {
		return fmt.Errorf("%s in the container: %w", target, err)
	}
	// -X: no links are made in the image's directories. Ours comes first, and is in the
	// cache even of an image whose ld.so.conf includes nothing.
	args := []string{"ldconfig", "-X", target}
	for _, d := range defaults {
		var st unix.Stat_t
		if unix.Stat(d, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			args = append(args, d)
		}
	}
	if err := unlinkTemporaries(); err != nil {
		return err
	}
	if err := giveUp(); err != nil {
		return err
	}
	return execFD(fdTool, args)
}

// enter makes the copy of the container's root this process's root, and lets go of the host's.
func enter() error {
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("propagation: %w", err)
	}
	if err := unix.MoveMount(fdRoot, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if err := unix.Fchdir(fdRoot); err != nil {
		return err
	}
	switch err := unix.PivotRoot(".", "."); {
	case err == nil:
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("let go of the host's root: %w", err)
		}
	case errors.Is(err, unix.EINVAL):
		// The host's root is the kernel's first one, which cannot be pivoted. What can
		// leave a chroot is given up before anything of the image is read.
		if err := unix.Chroot("."); err != nil {
			return fmt.Errorf("chroot: %w", err)
		}
	default:
		return fmt.Errorf("pivot: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	return unix.Close(fdRoot)
}

// attach puts our directory where the container will have it. It was made just before.
func attach(target string) error {
	at, err := unix.Openat2(unix.AT_FDCWD, target, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return err
	}
	if err := unix.MoveMount(fdLib, "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return err
	}
	unix.Close(at)
	return unix.Close(fdLib)
}

// temporaries are the files that ldconfig writes and then renames. It opens one that is
// there already and cuts it to nothing.
var temporaries = []string{"/etc/ld.so.cache~", "/var/cache/ldconfig/aux-cache~"}

// unlinkTemporaries removes them: an image's may be a hard link to a file of the host's,
// which ldconfig would overwrite whoever owns it.
func unlinkTemporaries() error {
	for _, name := range temporaries {
		switch err := unix.Unlink(name); err {
		case nil, unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.EROFS: // ldconfig cannot write there either
		default:
			var st unix.Stat_t
			if unix.Lstat(name, &st) == nil && st.Nlink > 1 {
				return fmt.Errorf("%s is a link to another file, and cannot be removed: %w", name, err)
			}
		}
	}
	return nil
}

// giveUp leaves what writing a cache needs: to write files of root's, whoever owns them.
func giveUp() error {
	unix.Umask(0o022)
	for resource, limit := range map[int]uint64{
		unix.RLIMIT_CPU: 4, unix.RLIMIT_FSIZE: 8 << 20, unix.RLIMIT_NOFILE: 64, unix.RLIMIT_CORE: 0, unix.RLIMIT_MEMLOCK: 0,
	} {
		if err := syscall.Setrlimit(resource, &syscall.Rlimit{Cur: limit, Max: limit}); err != nil {
			return fmt.Errorf("limit %d: %w", resource, err)
		}
	}
	// The supplementary groups are the caller's; in some user namespaces they cannot be dropped.
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); e != 0 && e != unix.EPERM {
		return fmt.Errorf("groups: %w", e)
	}
	for c := uintptr(0); c <= 63; c++ {
		if c == unix.CAP_DAC_OVERRIDE {
			continue // as root's program it would get back what is left in the bounding set
		}
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0); errors.Is(err, unix.EINVAL) {
			break // the kernel's last
		} else if err != nil {
			return fmt.Errorf("bounding set: %w", err)
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("ambient capabilities: %w", err)
	}
	keep := [2]unix.CapUserData{{Effective: 1 << unix.CAP_DAC_OVERRIDE, Permitted: 1 << unix.CAP_DAC_OVERRIDE}}
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &keep[0]); err != nil {
		return fmt.Errorf("capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	return filter()
}

// execFD runs the program in the descriptor, with no environment. What ldconfig may take
// of memory is limited at the last moment, since Go has far more than that reserved.
func execFD(fd int, args []string) error {
	argv, err := syscall.SlicePtrFromStrings(args)
	if err != nil {
		return err
	}
	var empty byte
	envv := []*byte{nil}
	unix.CloseOnExec(fd)
	limit := unix.Rlimit{Cur: 256 << 20, Max: 256 << 20}
	if _, _, e := unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_AS, uintptr(unsafe.Pointer(&limit)), 0, 0, 0); e != 0 {
		return fmt.Errorf("limit of memory: %w", e)
	}
	_, _, e := unix.RawSyscall6(unix.SYS_EXECVEAT, uintptr(fd), uintptr(unsafe.Pointer(&empty)),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&envv[0])), unix.AT_EMPTY_PATH, 0)
	return fmt.Errorf("run ldconfig: %w", e)
}
