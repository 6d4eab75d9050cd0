// Package node makes machines out of namespaces: each node has its own processes, mounts, network and
// host name, and all nodes of a network hang on one bridge. Nothing of it is left when the process that
// made it ends, in whatever way. It needs root.
//
// Package test/slurm/lab makes nodes of namespaces too, and cannot be replaced by this one, nor the other way round. Tests here cut, slow
// and flood the network of single nodes, so each node has its own. A cluster of the lab outlives the process that made it, so that
// people can try things in it, and its nodes share the machine's network, through which Slurm's daemons, its database and srun find
// each other by the addresses in slurm.conf. What both write, the configuration of sluiced, is in package site.
package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Network is a switch with nodes on it.
type Network struct {
	Exe string // this executable, where every user may run it; "" as it was started
	dir string
	hub *Node // holds the bridge
	mu  sync.Mutex
	all []*Node
}

// Node is a machine.
type Node struct {
	Name string
	Addr string // its address on the network
	Dir  string // what the node has for itself, seen from outside
	PID  int    // of its first process, seen from outside

	net     *Network
	cmd     *exec.Cmd
	control *os.File
	log     *bytes.Buffer
	gone    chan struct{}

	mu    sync.Mutex // guards what follows and writes to control
	next  int
	wait  map[int]asked
	procs map[int]*Process
}

// asked is an order that init has not answered yet, and the process it makes, if it makes one.
type asked struct {
	answer chan report
	makes  *Process
}

// Process is a program that runs in a node.
type Process struct {
	PID     int // in the node
	Node    *Node
	Started time.Time
	done    chan struct{}
	status  syscall.WaitStatus
}

// NewNetwork makes a switch; dir is where the nodes keep their files, short because of sockets' names.
func NewNetwork(dir string) (*Network, error) {
	n := &Network{dir: dir}
	hub, err := n.start("hub", nil)
	if err != nil {
		return nil, err
	}
	n.hub = hub
	if err := hub.ip("link", "add", "br0", "type", "bridge"); err != nil {
		n.Close()
		return nil, err
	}
	if err := hub.ip("link", "set", "br0", "up"); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// Add makes a node on the network. own are absolute paths that the node has for itself.
func (n *Network) Add(name string, own ...string) (*Node, error) {
	m, err := n.start(name, own)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	number := len(n.all)
	n.mu.Unlock()
	m.Addr = fmt.Sprintf("10.77.0.%d", number)
	port := "p" + strconv.Itoa(number)
	for _, args := range [][]string{
		{"link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", strconv.Itoa(m.PID)},
		{"link", "set", port, "master", "br0", "up"},
	} {
		// Numbers of processes are the test's here, so ip must run in its PID namespace.
		args = append([]string{"-t", strconv.Itoa(n.hub.PID), "-n", "ip"}, args...)
		if out, err := exec.Command("nsenter", args...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("node %s: nsenter %s: %w: %s", name, strings.Join(args, " "), err, out)
		}
	}
	for _, args := range [][]string{
		{"addr", "add", m.Addr + "/24", "dev", "eth0"},
		{"link", "set", "eth0", "up"},
	} {
		if err := m.ip(args...); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// Close ends every node with all that runs in it.
func (n *Network) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range n.all {
		_ = m.control.Close()
		_ = m.cmd.Process.Kill()
	}
	for _, m := range n.all {
		<-m.gone
	}
}

// Cut takes a node's cable out, or puts it back.
func (n *Network) Cut(m *Node, out bool) error {
	n.mu.Lock()
	number := 0
	for i, o := range n.all {
		if o == m {
			number = i + 1 // as Add counts them
		}
	}
	n.mu.Unlock()
	state := "up"
	if out {
		state = "down"
	}
	return n.hub.ip("link", "set", "p"+strconv.Itoa(number), state)
}

func (n *Network) start(name string, own []string) (*Node, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("nodes are made of namespaces, which needs root: run the tests as root")
	}
	m := &Node{net: n, Name: name, Dir: filepath.Join(n.dir, name), log: &bytes.Buffer{}, gone: make(chan struct{}), wait: make(map[int]asked), procs: make(map[int]*Process)}
	if err := os.MkdirAll(m.Dir, 0o755); err != nil {
		return nil, err
	}
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	theirs := os.NewFile(uintptr(pair[1]), "control")
	if err := syscall.SetNonblock(pair[0], true); err != nil {
		return nil, err
	}
	m.control = os.NewFile(uintptr(pair[0]), "control")
	set, err := json.Marshal(setup{Name: name, Dir: m.Dir, Own: own})
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	m.cmd = exec.Command(self)
	m.cmd.Env = append(os.Environ(), initEnv+"="+string(set))
	m.cmd.ExtraFiles = []*os.File{theirs}
	m.cmd.Stdout, m.cmd.Stderr = m.log, m.log
	m.cmd.WaitDelay = time.Second // what lives on in the node may hold the pipe
	m.cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Setpgid:    true,
	}
	if err := m.cmd.Start(); err != nil {
		return nil, fmt.Errorf("node %s: %w", name, err)
	}
	_ = theirs.Close()
	m.PID = m.cmd.Process.Pid
	ready := make(chan struct{})
	go m.listen(ready)
	select {
	case <-ready:
	case <-m.gone:
		return nil, fmt.Errorf("node %s: its first process ended: %s", name, m.log)
	}
	n.mu.Lock()
	n.all = append(n.all, m)
	n.mu.Unlock()
	return m, nil
}

// listen takes what init reports until the node ends.
func (m *Node) listen(ready chan struct{}) {
	dec := json.NewDecoder(m.control)
	for {
		var r report
		if dec.Decode(&r) != nil {
			break
		}
		m.mu.Lock()
		switch {
		case r.Ended:
			if p := m.procs[r.PID]; p != nil {
				delete(m.procs, r.PID)
				p.status = syscall.WaitStatus(r.Status)
				close(p.done)
			}
		case r.ID == 0:
			close(ready)
		default:
			// The process is known before its end can be read.
			if w, ok := m.wait[r.ID]; ok {
				delete(m.wait, r.ID)
				if w.makes != nil && r.PID != 0 {
					w.makes.PID = r.PID
					m.procs[r.PID] = w.makes
				}
				w.answer <- r
			}
		}
		m.mu.Unlock()
	}
	_ = m.cmd.Wait()
	m.mu.Lock()
	for id, w := range m.wait {
		delete(m.wait, id)
		w.answer <- report{Err: "the node has ended"}
	}
	for _, p := range m.procs {
		p.status = syscall.WaitStatus(syscall.SIGKILL)
		close(p.done)
	}
	m.procs = nil
	m.mu.Unlock()
	close(m.gone)
}

// Command is a program to be run in a node.
type Command struct {
	Argv   []string
	Env    []string // all of it; nil: the test's own
	UID    int
	GID    int
	Dir    string
	Stdin  string // files' names; "" is /dev/null
	Stdout string
	Stderr string
	Cgroup string // directory of the cgroup (v2) that it runs in; "" the test's own
}

// Start starts a program.
func (m *Node) Start(c Command) (*Process, error) {
	env := c.Env
	if env == nil {
		env = os.Environ()
	}
	p := &Process{Node: m, Started: time.Now(), done: make(chan struct{})}
	err := m.ask(order{Op: "run", Argv: c.Argv, Env: env, Dir: c.Dir, UID: c.UID, GID: c.GID, Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, Cgroup: c.Cgroup}, p)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (m *Node) ask(o order, makes *Process) error {
	answer := make(chan report, 1)
	m.mu.Lock()
	if m.procs == nil {
		m.mu.Unlock()
		return fmt.Errorf("node %s has ended: %s", m.Name, m.log)
	}
	m.next++
	o.ID = m.next
	m.wait[o.ID] = asked{answer, makes}
	b, err := json.Marshal(o)
	if err == nil {
		_, err = m.control.Write(append(b, '\n'))
	}
	m.mu.Unlock()
	if err != nil {
		return fmt.Errorf("node %s: %w", m.Name, err)
	}
	if r := <-answer; r.Err != "" {
		return fmt.Errorf("node %s: %s %s: %s", m.Name, o.Op, strings.Join(o.Argv, " "), r.Err)
	}
	return nil
}

// Run runs a program to its end and returns what it wrote to both outputs. A status other than 0 is an error.
func (m *Node) Run(ctx context.Context, c Command) (string, error) {
	f, err := os.CreateTemp(m.Dir, "out")
	if err != nil {
		return "", err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	c.Stdout, c.Stderr = f.Name(), f.Name()
	p, err := m.Start(c)
	if err != nil {
		return "", err
	}
	err = p.Wait(ctx)
	out, rerr := os.ReadFile(f.Name())
	if err == nil {
		err = rerr
	}
	if err != nil {
		err = fmt.Errorf("node %s: %s: %w: %s", m.Name, strings.Join(c.Argv, " "), err, bytes.TrimSpace(out))
	}
	return string(out), err
}

// Role is a command that runs one of this executable's roles.
func (m *Node) Role(name string, args ...string) Command {
	exe := m.net.Exe
	if exe == "" {
		exe = "/proc/self/exe"
	}
	return Command{Argv: append([]string{exe}, args...), Env: append(os.Environ(), roleEnv+"="+name)}
}

// Path is the name by which a path inside the node can be reached from outside.
func (m *Node) Path(p string) string { return fmt.Sprintf("/proc/%d/root%s", m.PID, p) }

func (m *Node) ip(args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	_, err := m.Run(ctx, Command{Argv: append([]string{"ip"}, args...)})
	return err
}

// Signal sends a signal; a process that has ended is no error.
func (p *Process) Signal(s syscall.Signal) error {
	if p.Ended() {
		return nil
	}
	err := p.Node.ask(order{Op: "kill", PID: p.PID, Signal: int(s)}, nil)
	if err != nil && p.Ended() {
		return nil
	}
	return err
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Ended says whether it has.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Wait waits for the end. When ctx ends first the process is killed.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
	case <-ctx.Done():
		_ = p.Signal(syscall.SIGKILL)
		<-p.done
		return fmt.Errorf("killed: %w", ctx.Err())
	}
	return p.Err()
}

// Err is nil for a process that ended with status 0.
func (p *Process) Err() error {
	switch {
	case !p.Ended():
		return errors.New("still running")
	case p.status.Signaled():
		return fmt.Errorf("ended by signal %d (%s)", p.status.Signal(), p.status.Signal())
	case p.status.ExitStatus() != 0:
		return fmt.Errorf("exit status %d", p.status.ExitStatus())
	}
	return nil
}

// Status is the exit status, or 128 and the signal's number.
func (p *Process) Status() int {
	if p.status.Signaled() {
		return 128 + int(p.status.Signal())
	}
	return p.status.ExitStatus()
}
