package lab

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/internal/process"
)

// Node is one of the cluster's machines.
type Node struct {
	Name string
	Dir  string // what survives a boot: etc, lib, log, spool; and run, which is emptied by one

	lab  *Lab
	spec NodeSpec
	port int // its first of four: slurmd, control, data, metrics
	init initProcess
}

// Boot starts the node's first process; its daemons are started by StartDaemons and the like.
func (n *Node) Boot(ctx context.Context) error {
	if n.Up() {
		return nil
	}
	im, err := n.image()
	if err != nil {
		return err
	}
	b, err := json.Marshal(im)
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	log, err := os.OpenFile(filepath.Join(n.Dir, "log", "init.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		_ = w.Close()
		return err
	}
	defer log.Close()
	// Not bound to ctx: it outlives this process.
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"slurmlab: " + n.Name}
	cmd.Env = []string{nodeEnv + "=" + string(b)}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{w}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWPID}
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		return fmt.Errorf("lab: node %s: %w", n.Name, err)
	}
	go func() { _ = cmd.Wait() }()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(20 * time.Second)
	}
	_ = r.SetReadDeadline(deadline)
	line := make([]byte, 16)
	if k, err := r.Read(line); err != nil || string(line[:k]) != "ready\n" {
		_ = cmd.Process.Kill()
		return fmt.Errorf("lab: node %s does not boot: %v: %s", n.Name, err, Tail(filepath.Join(n.Dir, "log", "init.log"), 5))
	}
	n.init = initProcess{cmd.Process.Pid, startTime(cmd.Process.Pid)}
	return n.lab.save()
}

// built is make's build folder on the nodes: where it lies outside may be below a folder that
// only root can pass.
const built = "/opt/built"

// Built is a file of make's build folder, by its path on every node.
func (l *Lab) Built(name string) string { return filepath.Join(built, name) }

// image is what the node sees, beside what all share.
func (n *Node) image() (image, error) {
	l := n.lab
	o := &l.Options
	im := image{Name: n.Name, Dir: n.Dir, Lower: "/", Boot: uuid(), Files: map[string]string{}, Bind: map[string]string{}}
	if o.Root != "" && n != l.base {
		im.Lower = o.Root
	}
	if err := os.RemoveAll(filepath.Join(n.Dir, "run")); err != nil {
		return im, err
	}
	for _, d := range []string{"etc", "lib", "log", "spool", "run/slurm", "run/sluice", "run/munge", "run/lock"} {
		if err := os.MkdirAll(filepath.Join(n.Dir, d), 0o755); err != nil {
			return im, err
		}
	}
	for to, from := range map[string]string{
		"/run": filepath.Join(n.Dir, "run"), "/run/munge": l.Path("munge"), "/etc/slurm": l.Path("etc"),
		"/etc/sluice": filepath.Join(n.Dir, "etc"), "/var/lib/sluice": filepath.Join(n.Dir, "lib"),
		"/var/log/sluice": filepath.Join(n.Dir, "log"), "/var/log/slurm": filepath.Join(n.Dir, "log"),
		"/var/spool/slurmd": filepath.Join(n.Dir, "spool"), "/var/spool/slurmctld": l.Path("state"),
		o.Dir: o.Dir, built: o.Build,
	} {
		im.Bind[to] = from
	}
	for to, from := range l.installed() {
		if _, err := os.Stat(from); err != nil {
			return im, fmt.Errorf("lab: %w; run make, which builds what a cluster needs", err)
		}
		im.Bind[to] = from
	}
	var hosts strings.Builder
	hosts.WriteString("127.0.0.1 localhost")
	for _, x := range l.all() {
		hosts.WriteString(" " + x.Name)
	}
	hosts.WriteString("\n")
	im.Files["/etc/hosts"] = hosts.String()
	var passwd, group, shadow strings.Builder
	for _, u := range []User{Slurm, Alice, Bob} {
		home := l.Path("home", u.Name)
		shell := "/bin/bash"
		if u == Slurm {
			home, shell = "/nonexistent", "/usr/sbin/nologin"
		}
		fmt.Fprintf(&passwd, "%s:x:%d:%d::%s:%s\n", u.Name, u.UID, u.UID, home, shell)
		fmt.Fprintf(&group, "%s:x:%d:\n", u.Name, u.UID)
		// Without a line there su, by which --export=NONE gets the user's environment, refuses them.
		fmt.Fprintf(&shadow, "%s:*:19000:0:99999:7:::\n", u.Name)
	}
	im.Files["/etc/passwd"], im.Files["/etc/group"] = passwd.String(), group.String()
	im.Files["/etc/shadow"] = shadow.String()
	return im, nil
}

func uuid() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// Up says whether the node runs.
func (n *Node) Up() bool { return n.init.PID != 0 && startTime(n.init.PID) == n.init.Start }

// Crash is the node's power cut: everything on it ends at once. Boot brings it back, without daemons.
func (n *Node) Crash() error {
	if !n.Up() {
		n.init = initProcess{}
		return nil
	}
	ns, err := os.Readlink("/proc/" + strconv.Itoa(n.init.PID) + "/ns/pid")
	if err == nil {
		err = syscall.Kill(n.init.PID, syscall.SIGKILL)
	}
	if err != nil {
		return fmt.Errorf("lab: node %s: %w", n.Name, err)
	}
	// The first process may be a zombie while others of the node still are about to die, some of them after what they were having
	// the disk write: a database's journal takes its time on a machine that does much else.
	for deadline := time.Now().Add(crashTime); n.Up() || len(pidsIn(ns, "")) > 0; time.Sleep(20 * time.Millisecond) {
		n.thaw()
		if time.Now().After(deadline) {
			return fmt.Errorf("lab: node %s: process %d does not end; of it are left:\n%s", n.Name, n.init.PID, left(ns))
		}
	}
	n.init = initProcess{}
	return n.lab.save()
}

// crashTime is how long the processes of a node may take to end by signal 9.
const crashTime = 2 * time.Minute

// left tells what is there of a PID namespace. Of a process that has ended but that nobody has waited for, the namespace is not
// known.
func left(ns string) string {
	var b strings.Builder
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, d := range dirs {
		at, err := os.Readlink(d + "/ns/pid")
		if at == ns || err != nil && inner(d) {
			b.WriteString(processTold(d))
		}
	}
	return b.String()
}

// inner says whether a process is in a PID namespace below this one.
func inner(dir string) bool { return len(strings.Fields(statusOf(dir, "NSpid"))) > 1 }

// statusOf is a line of a process's status, without its name.
func statusOf(dir, key string) string {
	text, _ := os.ReadFile(dir + "/status")
	for line := range strings.Lines(string(text)) {
		if k, value, _ := strings.Cut(strings.TrimSpace(line), ":"); k == key {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// processTold is a line about a process: its state, its parent and where it is in the kernel.
func processTold(dir string) string {
	stack, _ := os.ReadFile(dir + "/stack")
	return fmt.Sprintf("%s: %s, %s, child of %s: %s\n", filepath.Base(dir), statusOf(dir, "Name"), statusOf(dir, "State"), statusOf(dir, "PPid"),
		strings.Join(strings.Fields(string(stack)), " "))
}

// thaw has what a suspended job, or slurmstepd in the midst of a signal, has frozen die with the node.
func (n *Node) thaw() {
	root := "/sys/fs/cgroup/freezer/slurm_" + n.Name
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && path != root {
			_ = os.WriteFile(filepath.Join(path, "freezer.state"), []byte("THAWED"), 0)
		}
		return nil
	})
}

// startTime is the start time of a process, 0 for one that is gone or a zombie.
func startTime(pid int) uint64 {
	s, err := process.Read(pid)
	if err != nil || s.Ended() {
		return 0
	}
	return s.Start
}

// Command is a program on the node, in the user's home folder (root's and slurm's: /). Its standard streams are the caller's
// affair. The process that Start gives is nsenter's; see Signal for the program's own.
func (n *Node) Command(ctx context.Context, u User, argv ...string) *exec.Cmd {
	dir, id := "/", strconv.Itoa(u.UID)
	if u != Root && u != Slurm {
		dir = n.lab.Path("home", u.Name)
	}
	args := []string{"--target", strconv.Itoa(n.init.PID), "--mount", "--uts", "--pid", "--root", "--setuid", id, "--setgid", id, "--", "env", "-C", dir}
	cmd := exec.CommandContext(ctx, "nsenter", append(args, argv...)...)
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME=" + dir, "USER=" + u.Name, "LOGNAME=" + u.Name, "LANG=C.UTF-8", "SHELL=/bin/bash"}
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// Run runs a program on the node and answers what it printed. The error has what it said on standard error.
func (n *Node) Run(ctx context.Context, u User, argv ...string) (string, error) {
	return n.RunIn(ctx, u, "", argv...)
}

// RunIn is Run with a standard input.
func (n *Node) RunIn(ctx context.Context, u User, stdin string, argv ...string) (string, error) {
	cmd := n.Command(ctx, u, argv...)
	var out, said bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &said
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %s: %w: %s", n.Name, strings.Join(argv, " "), err, strings.TrimSpace(said.String()))
	}
	return out.String(), nil
}

// detach starts a daemon that does not go into the background by itself, with its output in a log.
func (n *Node) detach(ctx context.Context, log string, env []string, argv ...string) error {
	cmd := n.Command(ctx, Root, append([]string{"sh", "-c", `log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 &`, "sh", log}, argv...)...)
	cmd.Env = append(cmd.Env, env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %s: %w: %s", n.Name, argv[0], err, out)
	}
	return nil
}

// PIDs are the node's processes of that name (the kernel's: 15 letters), by the numbers that the machine
// knows them by. "" is every one but the first.
func (n *Node) PIDs(name string) []int {
	ns, err := os.Readlink("/proc/" + strconv.Itoa(n.init.PID) + "/ns/pid")
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(pidsIn(ns, name), func(pid int) bool { return pid == n.init.PID })
}

// pidsIn are the processes of a PID namespace, of that name if it is not "".
func pidsIn(ns, name string) []int {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	var out []int
	for _, d := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(d))
		if at, err := os.Readlink(d + "/ns/pid"); err != nil || at != ns {
			continue
		}
		comm, err := os.ReadFile(d + "/comm")
		// From Slurm 23.11 on scontrol reconfigure has slurmctld execute itself again. Its name is then that of the file behind Debian's link.
		is := strings.TrimSuffix(strings.TrimSpace(string(comm)), "-wlm")
		if err == nil && (name == "" || is == name) && startTime(pid) != 0 {
			out = append(out, pid)
		}
	}
	return out
}

// Signal sends a signal to all of the node's processes of that name, and answers how many there were.
func (n *Node) Signal(name string, sig syscall.Signal) int {
	pids := n.PIDs(name)
	for _, p := range pids {
		_ = syscall.Kill(p, sig)
	}
	return len(pids)
}

// Kill kills all processes of that name by signal 9 and waits until they are gone.
func (n *Node) Kill(name string) error { return n.end(name, syscall.SIGKILL) }

// Stop ends all processes of that name by SIGTERM and waits until they are gone.
func (n *Node) Stop(name string) error { return n.end(name, syscall.SIGTERM) }

// again is when a process that does not end gets another signal.
const again = 5 * time.Second

func (n *Node) end(name string, sig syscall.Signal) error {
	told := map[int]time.Time{}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		// Again at each look: between fork and exec a child goes by its parent's name. A slurmctld that executes itself again (scontrol
		// reconfigure) has a child that takes its place, and either may lose a signal that comes at that moment.
		pids := n.PIDs(name)
		for _, p := range pids {
			if sig == syscall.SIGKILL || time.Since(told[p]) > again {
				_ = syscall.Kill(p, sig)
				told[p] = time.Now()
			}
		}
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("lab: node %s: %d processes %s do not end", n.Name, len(pids), name)
		}
	}
}

// StartDaemons starts slurmd and sluiced, those that do not run.
func (n *Node) StartDaemons(ctx context.Context) error {
	return errors.Join(n.StartSluiced(ctx), n.StartSlurmd(ctx))
}

// StartSlurmd starts slurmd, which is in the background when this is done.
func (n *Node) StartSlurmd(ctx context.Context) error {
	if len(n.PIDs("slurmd")) > 0 {
		return nil
	}
	_, err := n.Run(ctx, Root, "slurmd", "-N", n.Name)
	return err
}

// StartSluiced starts sluiced and waits until its socket answers. env is added to its environment.
func (n *Node) StartSluiced(ctx context.Context, env ...string) error {
	if n.lab.Options.NoSluice || len(n.PIDs("sluiced")) > 0 {
		return nil
	}
	sock := filepath.Join(n.Dir, "run/sluice/sluiced.sock")
	_ = os.Remove(sock)
	env = append(n.daemonEnv(), env...)
	if err := n.detach(ctx, "/var/log/sluice/sluiced.log", env, "/usr/sbin/sluiced", "--config", "/etc/sluice/sluice.yaml"); err != nil {
		return err
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.Dial("unix", sock)
		if err == nil {
			return c.Close()
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return fmt.Errorf("lab: node %s: sluiced does not answer: %w: %s", n.Name, err, Tail(filepath.Join(n.Dir, "log/sluiced.log"), 8))
		}
	}
}

// daemonEnv is the environment of sluiced: GPUs are the simulated machine's.
func (n *Node) daemonEnv() []string {
	mem := n.spec.Mem
	if mem == "" {
		mem = n.lab.Options.Mem
	}
	return append([]string{
		"SLUICE_SIM_STATE=" + filepath.Join(n.Dir, "run/sim"), "SLUICE_SIM_MEM=" + mem, "SLUICE_SIM_DEVICES=" + strconv.Itoa(n.spec.GPUs),
		"SLUICE_SIM_KERNELS=" + n.lab.Built("test/twins.so"), "SLUICE_SIM_CTX_MEM=16M", "SLUICE_SIM_MACHINE=" + strconv.Itoa(n.port-n.lab.Port), "GOTRACEBACK=all",
	}, n.lab.Options.Env...)
}
