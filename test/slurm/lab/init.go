package lab

// The first process of a node has number 1 in a PID namespace of its own, so that killing it is the node's
// power cut: nothing of the node survives, whatever its daemons and jobs had left behind. It is this same
// executable, started again. It makes the node's view of the file system, says that it is ready, and then
// only buries orphans; what runs on the node is brought in by nsenter.
//
// The file system is an overlay over the machine's own (or another release's, see Options.Root), with the
// changes in memory: gone at the next boot. The node's persistent folders, and what all nodes share (/tmp,
// /home and the like), are bound over it. So Slurm and Sluice stand at their usual paths on every node,
// and nothing on the machine itself is touched.

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	nodeEnv = "SLURMLAB_NODE"
	readyFD = 3
)

// image is what the first process must know to make the node's view.
type image struct {
	Name  string            `json:"name"`
	Dir   string            `json:"dir"`   // the node's folder
	Lower string            `json:"lower"` // the root below
	Bind  map[string]string `json:"bind"`  // path on the node: what is bound there
	Files map[string]string `json:"files"` // path on the node: text that is added to the file there
	Boot  string            `json:"boot"`  // what the kernel's boot_id shows
}

// system are the folders at the root that a node sees through its overlay. All others are shared.
var system = []string{"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "lost+found", "media", "mnt", "opt", "proc", "run", "sbin", "srv", "sys", "usr", "var"}

// Main must be called first thing by every executable that boots nodes: in a node's first process it does
// that process's work and does not return.
func Main() {
	s := os.Getenv(nodeEnv)
	if s == "" {
		return
	}
	if err := runInit(s); err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		os.Exit(1)
	}
}

func runInit(s string) error {
	var im image
	if err := json.Unmarshal([]byte(s), &im); err != nil {
		return err
	}
	unix.CloseOnExec(readyFD)
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	if err := im.mount(); err != nil {
		return err
	}
	ready := os.NewFile(readyFD, "ready")
	if _, err := ready.WriteString("ready\n"); err != nil {
		return err
	}
	if err := ready.Close(); err != nil {
		return err
	}
	for range children {
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 && !errors.Is(err, syscall.EINTR) {
				break
			}
		}
	}
	return nil
}

func (im *image) mount() error {
	if err := unix.Sethostname([]byte(im.Name)); err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	// The overlay's upper layer must not lie below its lower one, so it gets a file system of its own.
	mem := filepath.Join(im.Dir, "mem")
	if err := os.MkdirAll(mem, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("slurmlab", mem, "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("tmpfs: %w", err)
	}
	root := filepath.Join(mem, "root")
	for _, d := range []string{"root", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(mem, d), 0o755); err != nil {
			return err
		}
	}
	opts := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", im.Lower, mem, mem)
	if err := unix.Mount("slurmlab", root, "overlay", 0, opts); err != nil {
		return fmt.Errorf("overlay over %s: %w", im.Lower, err)
	}
	if err := im.fill(root); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Join(root, ".before"), 0o700); err != nil {
		return err
	}
	if err := unix.PivotRoot(root, filepath.Join(root, ".before")); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/.before", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("umount the root before: %w", err)
	}
	return os.Remove("/.before")
}

// fill puts everything under the node's new root.
func (im *image) fill(root string) error {
	top, err := os.ReadDir("/")
	if err != nil {
		return err
	}
	for _, e := range top {
		if !e.IsDir() || slices.Contains(system, e.Name()) || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		if err := bind("/"+e.Name(), filepath.Join(root, e.Name()), 0); err != nil {
			return err
		}
	}
	for _, d := range []string{"/dev", "/sys"} {
		if err := bind(d, root+d, unix.MS_REC); err != nil {
			return err
		}
	}
	for _, m := range []struct{ at, kind, opts string }{
		{"/proc", "proc", ""}, {"/dev/shm", "tmpfs", "mode=1777"},
	} {
		if err := os.MkdirAll(root+m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, root+m.at, m.kind, unix.MS_NOSUID|unix.MS_NODEV, m.opts); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	boot := filepath.Join(im.Dir, "boot_id")
	if err := os.WriteFile(boot, []byte(im.Boot+"\n"), 0o444); err != nil {
		return err
	}
	if err := bind(boot, root+"/proc/sys/kernel/random/boot_id", 0); err != nil {
		return err
	}
	// Parents before what lies in them.
	at := make([]string, 0, len(im.Bind))
	for p := range im.Bind {
		at = append(at, p)
	}
	slices.Sort(at)
	for _, p := range at {
		if err := bind(im.Bind[p], root+p, 0); err != nil {
			return err
		}
	}
	for p, text := range im.Files {
		if err := extend(root+p, text); err != nil {
			return err
		}
	}
	return nil
}

// bind binds from to a path that is made if it is not there.
func bind(from, to string, flags uintptr) error {
	fi, err := os.Stat(from)
	if err != nil {
		return err
	}
	if _, err := os.Stat(to); errors.Is(err, os.ErrNotExist) {
		if fi.IsDir() {
			err = os.MkdirAll(to, 0o755)
		} else if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
			err = os.WriteFile(to, nil, 0o644)
		}
		if err != nil {
			return err
		}
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND|flags, ""); err != nil {
		return fmt.Errorf("bind %s to %s: %w", from, to, err)
	}
	return nil
}

// extend adds the lines of text whose first field before a colon the file has not yet.
func extend(path, text string) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	have := map[string]bool{}
	for l := range strings.Lines(string(old)) {
		if name, _, ok := strings.Cut(l, ":"); ok {
			have[name] = true
		}
	}
	out := string(old)
	if out != "" && !strings.HasSuffix(out, "\n") {
		out += "\n"
	}
	for l := range strings.Lines(text) {
		if name, _, ok := strings.Cut(l, ":"); !ok || !have[name] {
			out += l
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(out), 0o644)
}
