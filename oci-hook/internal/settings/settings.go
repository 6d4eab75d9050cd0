// Package settings reads the hook's own settings, and judges whether a path of the
// host is one that only root can have written.
package settings

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Path is where the settings are, unless an argument in a file of the host's says otherwise.
const Path = "/etc/sluice/oci-hook.json"

// maxSize bounds the settings' file, in bytes.
const maxSize = 64 << 10

// ErrUnsafe is wrapped by every refusal of a path for its owner or mode.
var ErrUnsafe = errors.New("unsafe owner or mode")

// Settings are the hook's. No path of them comes from a container, its image or its
// environment.
type Settings struct {
	// Lib is the host's directory that a container gets: the shim, NVML, sluice.conf.
	// sluice-hook prepare makes it.
	Lib string `json:"lib"`
	// Leases is the daemon's directory of lease sockets, one directory for each lease.
	Leases string `json:"leases"`
	// Target is where Lib appears in the container.
	Target string `json:"target"`
	// Ldconfig is the host's, which has to be linked statically.
	Ldconfig string `json:"ldconfig"`
	// Runtimes are what the wrapper runs: the first that is there.
	Runtimes []string `json:"runtimes"`
}

// Default is what holds where there is no file.
func Default() Settings {
	return Settings{
		Lib:      "/usr/lib/sluice/container",
		Leases:   "/run/sluice/leases",
		Target:   "/usr/lib/sluice",
		Ldconfig: "/sbin/ldconfig",
		Runtimes: []string{"/usr/bin/runc", "/usr/sbin/runc", "/usr/bin/crun"},
	}
}

// Socket is the lease socket's path in a container: sluice.conf in Lib names it.
func (s Settings) Socket() string { return s.Target + "/lease/sock" }

// Load reads the settings at path. A file that is not there leaves the defaults;
// one that others than root can write is refused.
func Load(path string) (Settings, error) {
	s := Default()
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	f, err := OpenTrusted(path, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return s, err
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil {
		return s, err
	} else if !fi.Mode().IsRegular() {
		return s, fmt.Errorf("settings %s: not a file", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return s, err
	}
	if len(b) > maxSize {
		return s, fmt.Errorf("settings %s: larger than %d bytes", path, maxSize)
	}
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, fmt.Errorf("settings %s: %w", path, err)
	}
	for name, p := range map[string]string{"lib": s.Lib, "leases": s.Leases, "target": s.Target, "ldconfig": s.Ldconfig} {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p || p == "/" || strings.ContainsAny(p, " \t\n:") {
			return s, fmt.Errorf("settings %s: %s has to be a clean absolute path, not %q", path, name, p)
		}
	}
	for _, p := range s.Runtimes {
		if !filepath.IsAbs(p) {
			return s, fmt.Errorf("settings %s: runtimes have to be absolute paths, not %q", path, p)
		}
	}
	return s, nil
}

// OpenTrusted opens a path of the host's after links have been followed once. As root
// of the machine, it refuses what others than root could have written or replaced, as
// safe as the directories above. In a user namespace the caller has no right that its
// user lacks, and there is nobody to protect.
func OpenTrusted(path string, flags int) (*os.File, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, err
	}
	judge := MachineRoot()
	fd, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/: %w", err)
	}
	parts := strings.Split(strings.TrimPrefix(real, "/"), "/")
	at := ""
	for i, part := range parts {
		last := i == len(parts)-1
		mode := unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC
		if last {
			mode = flags | unix.O_NOFOLLOW | unix.O_CLOEXEC
		}
		next, err := unix.Openat(fd, part, mode, 0)
		unix.Close(fd)
		at += "/" + part
		if err != nil {
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		fd = next
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("%s: %w", at, err)
		}
		sticky := st.Mode&unix.S_ISVTX != 0 && !last
		if judge && (st.Uid != 0 || st.Mode&0o022 != 0 && !sticky) {
			unix.Close(fd)
			return nil, fmt.Errorf("%s: %w: %s belongs to uid %d and has mode %04o; remedy: chown root %s, chmod go-w %s",
				path, ErrUnsafe, at, st.Uid, st.Mode&0o7777, at, at)
		}
	}
	return os.NewFile(uintptr(fd), real), nil
}

// MachineRoot says whether this process is root in the first user namespace.
func MachineRoot() bool {
	return os.Geteuid() == 0 && FirstNamespace()
}

// FirstNamespace says whether users are what they are on the host: the map is the whole one.
func FirstNamespace() bool {
	b, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return true // then with more care, not with less
	}
	f := strings.Fields(string(b))
	return len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295"
}
