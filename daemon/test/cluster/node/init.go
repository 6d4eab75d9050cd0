package node

// The first process of a node: it has number 1 in a PID namespace of its own, so that the node's end
// is its end, whatever the node's daemons left behind. It is this same executable, started again by
// Start, and does what the test asks over a socket pair, one JSON object a line:
//
//	test -> init   run a program, signal a process
//	init -> test   its number or an error; later, that it ended
//
// One lock is held from fork to the answer, so that no end can be told before its beginning.

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	initEnv = "SLUICE_TEST_NODE"
	roleEnv = "SLUICE_TEST_ROLE"
	// controlFD is the socket pair to the test.
	controlFD = 3
)

// setup is what init must know of its node.
type setup struct {
	Name string   `json:"name"`
	Dir  string   `json:"dir"`
	Own  []string `json:"own"` // paths that the node has for itself: bound to Dir/PATH
}

type order struct {
	ID     int      `json:"id"`
	Op     string   `json:"op"` // "run" or "kill"
	Argv   []string `json:"argv,omitempty"`
	Env    []string `json:"env,omitempty"`
	Dir    string   `json:"dir,omitempty"`
	UID    int      `json:"uid,omitempty"`
	GID    int      `json:"gid,omitempty"`
	Stdin  string   `json:"stdin,omitempty"`
	Stdout string   `json:"stdout,omitempty"`
	Stderr string   `json:"stderr,omitempty"`
	Cgroup string   `json:"cgroup,omitempty"`
	PID    int      `json:"pid,omitempty"`
	Signal int      `json:"signal,omitempty"`
}

type report struct {
	ID     int    `json:"id,omitempty"`
	PID    int    `json:"pid,omitempty"`
	Err    string `json:"err,omitempty"`
	Ended  bool   `json:"ended,omitempty"`
	Status int    `json:"status,omitempty"` // a wait status
}

// roles are functions that a test runs inside a node, in a process of their own.
var roles = map[string]func(args []string) error{}

// Role names a function that Node.Role can run inside a node. To be called from init functions.
func Role(name string, f func(args []string) error) { roles[name] = f }

// Main must be called first thing by the executables that start nodes: in the processes that they
// start inside a node it does that process's work and does not return.
func Main() {
	if s := os.Getenv(initEnv); s != "" {
		if err := runInit(s); err != nil {
			fmt.Fprintln(os.Stderr, "node:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if r := os.Getenv(roleEnv); r != "" {
		f := roles[r]
		if f == nil {
			fmt.Fprintf(os.Stderr, "node: no role named %q\n", r)
			os.Exit(1)
		}
		if err := f(os.Args[1:]); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", r, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func runInit(s string) error {
	var set setup
	if err := json.Unmarshal([]byte(s), &set); err != nil {
		return err
	}
	if err := os.Unsetenv(initEnv); err != nil {
		return err
	}
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	control := os.NewFile(controlFD, "control")
	unix.CloseOnExec(controlFD)
	if err := settle(set); err != nil {
		return err
	}
	i := &initProcess{out: json.NewEncoder(control), here: make(map[int]bool)}
	i.send(report{})
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	go func() {
		for range children {
			i.reap()
		}
	}()
	in := bufio.NewReader(control)
	dec := json.NewDecoder(in)
	for {
		var o order
		if err := dec.Decode(&o); err != nil {
			return nil // the test has gone, or is done with us: all of the node dies with this process
		}
		i.do(o)
	}
}

// settle makes the node what it says it is: a name, mounts of its own, a loopback.
func settle(set setup) error {
	// Enough descriptors for a test that floods a daemon.
	limit := &unix.Rlimit{Cur: 20000, Max: 20000}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, limit); err != nil {
		return fmt.Errorf("limit of descriptors: %w", err)
	}
	if err := unix.Sethostname([]byte(set.Name)); err != nil {
		return fmt.Errorf("host name: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("private mounts: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("/proc: %w", err)
	}
	for _, p := range set.Own {
		from := filepath.Join(set.Dir, p)
		if err := os.MkdirAll(from, 0o755); err != nil {
			return err
		}
		if err := os.MkdirAll(p, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(from, p, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
		return fmt.Errorf("ip link set lo up: %w: %s", err, out)
	}
	return nil
}

type initProcess struct {
	mu   sync.Mutex
	out  *json.Encoder
	here map[int]bool // started at the test's request
}

func (i *initProcess) send(r report) {
	_ = i.out.Encode(r) // without a test there is nobody to tell
}

func (i *initProcess) do(o order) {
	i.mu.Lock()
	defer i.mu.Unlock()
	r := report{ID: o.ID}
	var err error
	switch o.Op {
	case "run":
		r.PID, err = i.run(o)
	case "kill":
		if !i.here[o.PID] && o.PID > 0 {
			err = syscall.ESRCH
			break
		}
		err = syscall.Kill(o.PID, syscall.Signal(o.Signal))
	default:
		err = fmt.Errorf("no such order: %q", o.Op)
	}
	if err != nil {
		r.Err = err.Error()
	}
	i.send(r)
}

func (i *initProcess) run(o order) (int, error) {
	files, err := standard(o)
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if err != nil {
		return 0, err
	}
	if len(o.Argv) == 0 {
		return 0, errors.New("no program given")
	}
	exe, err := exec.LookPath(o.Argv[0])
	if err != nil {
		return 0, err
	}
	attr := &syscall.ProcAttr{Dir: o.Dir, Env: o.Env, Sys: &syscall.SysProcAttr{Setpgid: true}}
	for _, f := range files {
		attr.Files = append(attr.Files, f.Fd())
	}
	if o.UID != 0 {
		attr.Sys.Credential = &syscall.Credential{Uid: uint32(o.UID), Gid: uint32(o.GID)}
	}
	if o.Cgroup != "" {
		dir, err := os.Open(o.Cgroup)
		if err != nil {
			return 0, err
		}
		defer dir.Close()
		attr.Sys.UseCgroupFD, attr.Sys.CgroupFD = true, int(dir.Fd())
	}
	pid, err := syscall.ForkExec(exe, o.Argv, attr)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", exe, err)
	}
	i.here[pid] = true
	return pid, nil
}

// standard opens the three standard files.
func standard(o order) ([]*os.File, error) {
	var files []*os.File
	for n, name := range []string{o.Stdin, o.Stdout, o.Stderr} {
		flags := os.O_RDONLY
		if n > 0 {
			flags = os.O_WRONLY | os.O_CREATE | os.O_APPEND
		}
		if name == "" {
			name, flags = os.DevNull, os.O_RDWR
		}
		f, err := os.OpenFile(name, flags, 0o644)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

// reap collects every child that has ended, the orphans of the node among them.
func (i *initProcess) reap() {
	i.mu.Lock()
	defer i.mu.Unlock()
	for {
		var st syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &st, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if i.here[pid] {
			delete(i.here, pid)
			i.send(report{PID: pid, Ended: true, Status: int(st)})
		}
	}
}
