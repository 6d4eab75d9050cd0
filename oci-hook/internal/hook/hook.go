// Package hook is the createContainer hook: it puts a job's GPU fraction into a
// container that asked for it, and leaves every other container alone.
//
// The order of the flow: the state on standard input, then config.json, say whether the
// container asks (package request); if not, that is all. If it does, the lease's
// directory and ours on the host are opened and judged, the container's root is opened,
// our directory is mounted in it with the lease inside, other libraries of the same
// names are covered, and the loader's cache is made anew. From the request on every
// failure stops the container's start, with its reason on standard error.
package hook

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/oci-hook/internal/content"
	"github.com/sluice-hpc/sluice/oci-hook/internal/ldcache"
	"github.com/sluice-hpc/sluice/oci-hook/internal/request"
	"github.com/sluice-hpc/sluice/oci-hook/internal/rootfs"
	"github.com/sluice-hpc/sluice/oci-hook/internal/settings"
)

// ErrNotServed is wrapped by every failure of a container that asked.
var ErrNotServed = errors.New("the GPU fraction cannot be brought into this container")

// libraries are the names under which a program asks for a GPU, and our file for each.
var libraries = map[string]string{
	"libcuda.so.1": "libcuda.so.1", "libcuda.so": "libcuda.so.1",
	"libnvidia-ml.so.1": "libnvidia-ml.so.1", "libnvidia-ml.so": "libnvidia-ml.so.1",
}

// loaders are the dynamic loaders of the GNU C library, musl the path of musl's.
var (
	loaders = []string{"/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"}
	musl    = []string{"/lib/ld-musl-x86_64.so.1", "/lib/ld-musl-aarch64.so.1"}
)

// Entry is what the hook's entry in a specification says, which is the host's.
type Entry struct {
	Settings string // path
	Lease    string // where a CDI specification names it
	// HostPath is the runtime wrapper's: the container was asked for by the socket's path on
	// the host. It has changed that in the environment of the first program, but an engine
	// gives the old one to the programs of exec.
	HostPath bool
}

// Run does the work for the container whose state is on stdin. What is not fatal is said to log.
func Run(ctx context.Context, stdin io.Reader, e Entry, log io.Writer) error {
	s, err := readState(stdin)
	if err != nil {
		if e.Lease == "" {
			fmt.Fprintln(log, "sluice-hook: container left as it is:", err)
			return nil
		}
		return fmt.Errorf("%w: %w", ErrNotServed, err)
	}
	c, confErr := readConfig(s.Bundle)
	set, setErr := settings.Load(e.Settings)
	for k, v := range s.Annotations {
		if c.Annotations == nil {
			c.Annotations = map[string]string{}
		}
		c.Annotations[k] = v
	}
	r, err := request.Find(e.Lease, c.Annotations, c.Process.Env, set.Leases)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrNotServed, err)
	case r == nil:
		if confErr != nil && !errors.Is(confErr, unix.EACCES) {
			fmt.Fprintln(log, "sluice-hook: container left as it is:", confErr)
		}
		return nil
	case setErr != nil:
		return fmt.Errorf("%w: %w", ErrNotServed, setErr)
	case confErr != nil && (s.Root == "" || !errors.Is(confErr, unix.EACCES)):
		// In a user namespace that maps no user it cannot be read; crun's state has what is needed then.
		return fmt.Errorf("%w: %w", ErrNotServed, confErr)
	}
	if err := bring(ctx, set, s, c, r, e.HostPath, log); err != nil {
		return fmt.Errorf("%w (asked by %s): %w", ErrNotServed, r.From, err)
	}
	return nil
}

func bring(ctx context.Context, set settings.Settings, s state, c config, r *request.Request, hostPath bool, log io.Writer) error {
	lease, err := openLease(set, r.Lease, c)
	if err != nil {
		return err
	}
	defer lease.Close()
	lib, err := settings.OpenTrusted(set.Lib, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("our libraries: %w; remedy: sluice-hook prepare", err)
	}
	defer lib.Close()

	path, err := rootPath(s, c)
	if err != nil {
		return err
	}
	root, err := rootfs.Open(path)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := root.Private(); err != nil {
		return err
	}
	// A CDI specification mounts them too, for engines that run no hooks.
	if !root.Shows(set.Target, lib) || !root.Shows(set.Target+"/lease", lease) {
		if err := mountLib(root, set.Target, lib, lease); err != nil {
			return err
		}
	}
	if there := filepath.Join(set.Leases, r.Lease); (r.HostPath || hostPath) && !root.Shows(there, lease) {
		switch err := mountDir(root, there, lease); {
		case err != nil && r.HostPath:
			return fmt.Errorf("%w; ask by the annotation %s=%s instead", err, request.Annotation, r.Lease)
		case err != nil:
			fmt.Fprintf(log, "sluice-hook: programs started by exec have to unset %s: %v\n", request.Variable, err)
		}
	}
	if err := cover(root, lib, c); err != nil {
		return err
	}
	if err := findable(ctx, root, set, lib, log); err != nil {
		return err
	}
	if has(root, loaders) {
		if err := smi(root, lib); err != nil {
			fmt.Fprintln(log, "sluice-hook: no nvidia-smi:", err) // programs compute without it
		}
	}
	return nil
}

// openLease opens the directory of a lease's socket, which is the daemon's work, and
// makes sure that the container's user is the one whom the daemon will serve there.
func openLease(set settings.Settings, id string, c config) (*os.File, error) {
	leases, err := settings.OpenTrusted(set.Leases, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return nil, fmt.Errorf("directory of leases: %w; is sluiced running on this node?", err)
	}
	defer leases.Close()
	fd, err := unix.Openat(int(leases.Fd()), id, unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("lease %s is not on this node, or it has ended", id)
	} else if err != nil {
		return nil, fmt.Errorf("lease %s: %w", id, err)
	}
	dir := os.NewFile(uintptr(fd), filepath.Join(set.Leases, id))
	// The directory is root's, the socket in it the user's, and nobody else can have put it there.
	var st unix.Stat_t
	if err := unix.Fstatat(fd, "sock", &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		dir.Close()
		return nil, fmt.Errorf("socket of lease %s: %w; it has ended, or sluiced is about to make it", id, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		dir.Close()
		return nil, fmt.Errorf("lease %s: %s/sock is not a socket", id, dir.Name())
	}
	if err := mayUse(id, st.Uid, c); err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}

// mayUse compares a lease's user with the container's, both as this namespace sees them.
// In a user namespace the kernel has the last word: there other users than its own are nobody.
func mayUse(id string, owner uint32, c config) error {
	user := c.Process.User.UID
	if settings.FirstNamespace() {
		if user != 0 && user != owner {
			return fmt.Errorf("lease %s is of uid %d, the container's program runs as uid %d; remedy: run it as %d", id, owner, user, owner)
		}
		return nil
	}
	if owner == overflow() {
		return fmt.Errorf("lease %s belongs to a user who is not in this container's user namespace; only the lease's own user can bring it into one", id)
	}
	return nil
}

// overflow is the user as whom the kernel shows those that a namespace does not know.
func overflow() uint32 {
	b, err := os.ReadFile("/proc/sys/kernel/overflowuid")
	var n uint32
	if err != nil {
		return 65534
	}
	if _, err := fmt.Sscan(string(b), &n); err != nil {
		return 65534
	}
	return n
}

// mountLib mounts our directory, and the lease's in it: there, nothing is the image's.
func mountLib(root *rootfs.Root, target string, lib, lease *os.File) error {
	at, err := root.Dir(target)
	if err != nil {
		return err
	}
	defer at.Close()
	t, err := rootfs.Clone(lib, true)
	if err != nil {
		return err
	}
	defer t.Close()
	l, err := rootfs.Clone(lease, true)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := t.Attach(at); err != nil {
		return err
	}
	fd, err := unix.Openat(int(t.File().Fd()), "lease", unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s/lease: %w; remedy: sluice-hook prepare", lib.Name(), err)
	}
	in := os.NewFile(uintptr(fd), target+"/lease")
	defer in.Close()
	return l.Attach(in)
}

func mountDir(root *rootfs.Root, path string, dir *os.File) error {
	at, err := root.Dir(path)
	if err != nil {
		return err
	}
	defer at.Close()
	t, err := rootfs.Clone(dir, true)
	if err != nil {
		return err
	}
	defer t.Close()
	return t.Attach(at)
}

// cover hides libraries of the same names where the image's programs would find them first.
func cover(root *rootfs.Root, lib *os.File, c config) error {
	dirs := request.LibraryDirs(c.Process.Env, c.Process.Cwd)
	for _, name := range root.Names("/usr/local", 256) {
		if strings.HasPrefix(name, "cuda") {
			dirs = append(dirs, "/usr/local/"+name+"/compat", "/usr/local/"+name+"/lib64")
		}
	}
	files := map[string]*os.File{}
	for name, ours := range libraries {
		f, err := libFile(lib, ours)
		if err != nil {
			return err
		}
		defer f.Close()
		files[name] = f
	}
	for _, dir := range dirs {
		d, err := root.Find(dir)
		if err != nil {
			continue // most of them are not there
		}
		d.Close()
		covered := false
		for name := range libraries {
			done, err := root.Cover(dir+"/"+name, files[name])
			if err != nil {
				return err
			}
			covered = covered || done
		}
		if covered {
			// The library looks for its settings beside itself, under the name it was found by, and then where
			// we have put them all: on a volume of the user's nothing is made.
			if err := mountFile(root, dir+"/sluice.conf", lib, "sluice.conf"); err != nil && !errors.Is(err, rootfs.ErrOutside) {
				return err
			}
		}
	}
	return nil
}

// libFile opens a file of our directory.
func libFile(lib *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(lib.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s/%s: %w; remedy: sluice-hook prepare", lib.Name(), name, err)
	}
	return os.NewFile(uintptr(fd), lib.Name()+"/"+name), nil
}

// findable makes dlopen find our libraries, in the way of the image's C library.
func findable(ctx context.Context, root *rootfs.Root, set settings.Settings, lib *os.File, log io.Writer) error {
	switch {
	case has(root, loaders):
		// The file makes the next ldconfig, after an installation in the container, find us too.
		if root.Has("/etc/ld.so.conf.d") {
			if err := root.Write("/etc/ld.so.conf.d", "00-sluice.conf", set.Target+"\n"); err != nil {
				return err
			}
		}
		if !root.Has("/etc") {
			if d, err := root.Dir("/etc"); err != nil {
				return err
			} else {
				d.Close()
			}
		}
		return ldcache.Update(ctx, root, lib, set.Target, set.Ldconfig)
	case has(root, musl):
		for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1", "sluice.conf"} {
			if err := mountFile(root, "/usr/lib/"+name, lib, name); err != nil {
				return err
			}
		}
	default:
		fmt.Fprintf(log, "sluice-hook: the image has no dynamic loader of %s; %s is there, and nothing looks for it\n", runtime.GOARCH, set.Target)
	}
	return nil
}

// smiTarget is where an image without an nvidia-smi gets the site's.
const smiTarget = "/usr/bin/nvidia-smi"

// smi mounts the site's nvidia-smi, if there is one. An empty file is what an earlier mount left in an image.
func smi(root *rootfs.Root, lib *os.File) error {
	src, err := libFile(lib, content.Smi)
	if errors.Is(err, unix.ENOENT) {
		return nil
	} else if err != nil {
		return err
	}
	defer src.Close()
	if h, err := root.Find(smiTarget); err == nil {
		var st unix.Stat_t
		err = unix.Fstat(int(h.Fd()), &st)
		h.Close()
		if err != nil || st.Size > 0 {
			return err
		}
	}
	return mountFile(root, smiTarget, lib, content.Smi)
}

func has(root *rootfs.Root, paths []string) bool {
	for _, p := range paths {
		if root.Has(p) {
			return true
		}
	}
	return false
}

func mountFile(root *rootfs.Root, path string, lib *os.File, name string) error {
	src, err := libFile(lib, name)
	if err != nil {
		return err
	}
	defer src.Close()
	done, err := root.Cover(path, src)
	if done || err != nil {
		return err
	}
	at, err := root.File(path)
	if err != nil {
		return err
	}
	defer at.Close()
	t, err := rootfs.Clone(src, true)
	if err != nil {
		return err
	}
	defer t.Close()
	return t.Attach(at)
}
