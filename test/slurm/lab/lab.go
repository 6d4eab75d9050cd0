// Package lab is a real Slurm cluster with Sluice on it, in a folder: munge, slurmctld, as many slurmd and
// sluiced as wanted, and slurmdbd with its database, on one machine whose own services are not touched.
//
// Each node has mount, UTS and PID namespaces of its own: its own host name, /etc, /run, /var, its programs at
// their usual places, its own end. All share the machine's network and talk over 127.0.0.1. It needs root.
//
// Package daemon/test/cluster/node says why it makes nodes in another way.
package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Options of a cluster. The zero value of each is a default that works.
type Options struct {
	// Dir is the cluster's folder, short (socket paths have 107 bytes); "" makes one below /tmp.
	Dir string
	// Name is Slurm's ClusterName and the beginning of every node's name. Clusters that run at once on one
	// machine must differ in it, since control groups are keyed by node names. "" is made up.
	Name string
	// Nodes of the cluster; nil is three, the first with two GPUs.
	Nodes []NodeSpec
	// Mem is the memory of each simulated GPU; "" is 8G.
	Mem string
	// Root is a folder with another system (of debootstrap) whose Slurm is used; "" is the machine's.
	Root string
	// Build is make's build folder, CUDA the compiler whose programs are used.
	Build, CUDA string
	// Daemon is another sluiced than the build folder's, as one with fault points.
	Daemon string
	// Jobs installs what jobs with fractions need: hooks, SPANK plug-in, job_submit.lua.
	Jobs bool
	// Repository is where its sources are; "" is at or above the present folder.
	Repository string
	// NoSluice leaves sluiced away.
	NoSluice bool
	// Accounting starts slurmdbd and its database, with account research for alice and bob.
	Accounting bool
	// Hooks are the bodies of Prolog, Epilog, PrologSlurmctld and EpilogSlurmctld by these names. nil
	// writes a line for each to hooks.log, or with Jobs is SluiceHooks.
	Hooks map[string]string
	// PrologFlags is slurm.conf's; "" is Contain, "none" leaves it away.
	PrologFlags string
	// Slurm are keys of slurm.conf that replace or join the lab's; an empty value takes one away.
	Slurm map[string]string
	// SlurmLines are added to slurm.conf as they are (partitions, node sets).
	SlurmLines []string
	// Etc are more files of /etc/slurm by name, as job_submit.lua, gres.conf or plugstack.conf.
	Etc map[string]string
	// Gres of every compute node; "" is rgpu:no_consume:1600. Licences; "" is rgpu:100 for each GPU.
	Gres, Licences string
	// Sluice are keys of every sluice.yaml, dotted, that replace or join the lab's.
	Sluice map[string]string
	// Install are more files and folders: path on every node to what is bound there.
	Install map[string]string
	// Env is added to the environment of every sluiced.
	Env []string
}

// NodeSpec is a compute node.
type NodeSpec struct {
	Name string // "" is the cluster's name, n and the number
	GPUs int    // simulated; none and the node owns nothing
	CPUs int    // 0 is 2
	Mem  string // of each GPU; "" is Options.Mem
	// Sluice are keys of this node's sluice.yaml.
	Sluice map[string]string
}

// User is who runs something. They exist on every node.
type User struct {
	Name string
	UID  int
}

// The users of every cluster.
var (
	Root  = User{"root", 0}
	Slurm = User{"slurm", 64030}
	Alice = User{"alice", 2001}
	Bob   = User{"bob", 2002}
)

// Lab is a cluster.
type Lab struct {
	Options Options
	Ctl     *Node   // slurmctld, slurmdbd, and sluiced of the controller
	Nodes   []*Node // slurmd and sluiced
	base    *Node   // munged and the database, always of the machine's own system
	Port    int     // the first of portCount that are the cluster's

	claim net.Listener // on the cluster's portClaim, while the process is there that has made it
	mu    sync.Mutex   // of the file lab.json
}

// poolWait is how long owners may take to answer.
const poolWait = 60 * time.Second

const (
	portCount = 96
	// Ports by their distance from the first.
	portCtld, portDBD, portSQL, portClaim, portNode = 0, 1, 2, 3, 4
)

// New makes the folder and the configuration of a cluster. Boot starts it.
func New(o Options) (*Lab, error) {
	if os.Getuid() != 0 {
		return nil, errors.New("lab: nodes are made of namespaces, which needs root")
	}
	if err := o.defaults(); err != nil {
		return nil, err
	}
	l := &Lab{Options: o}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, err
	}
	if old, err := os.ReadDir(o.Dir); err != nil || len(old) > 0 {
		return nil, fmt.Errorf("lab: %s is not empty; slurmlab down %s ends a cluster there", o.Dir, o.Dir)
	}
	if err := os.Chmod(o.Dir, 0o755); err != nil {
		return nil, err
	}
	var err error
	if l.Port, l.claim, err = freePorts(); err != nil {
		return nil, err
	}
	l.Ctl = l.add(NodeSpec{Name: o.Name + "ctl"}, portNode)
	l.base = l.add(NodeSpec{Name: o.Name + "base"}, portNode)
	for i, n := range o.Nodes {
		l.Nodes = append(l.Nodes, l.add(n, portNode+4*(i+1)))
	}
	if err := l.save(); err != nil {
		return nil, err
	}
	if err := l.configure(); err != nil {
		_ = l.claim.Close()
		_ = os.RemoveAll(o.Dir)
		return nil, err
	}
	return l, nil
}

func (o *Options) defaults() error {
	if o.Name == "" {
		o.Name = "l" + strconv.FormatUint(uint64(rand.Uint32()), 36)
	}
	if o.Dir == "" {
		d, err := os.MkdirTemp("/tmp", o.Name)
		if err != nil {
			return err
		}
		o.Dir = d
	}
	var err error
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return err
	}
	if len(o.Dir) > 60 {
		return fmt.Errorf("lab: %s is too long for paths of sockets below it", o.Dir)
	}
	if o.Repository == "" {
		o.Repository = Repository()
	}
	if o.Build == "" {
		if o.Build = os.Getenv("SLUICE_BUILD"); o.Build == "" {
			o.Build = filepath.Join(o.Repository, "build")
		}
	}
	if o.Build, err = filepath.Abs(o.Build); err != nil {
		return err
	}
	if o.CUDA == "" {
		if o.CUDA = os.Getenv("SLUICE_CUDA"); o.CUDA == "" {
			o.CUDA = "11.8"
		}
	}
	if o.Root == "" {
		o.Root = os.Getenv("SLUICE_SLURM_ROOT")
	}
	if o.Root != "" {
		if o.Root, err = filepath.Abs(o.Root); err != nil {
			return err
		}
	}
	if o.Mem == "" {
		o.Mem = "8G"
	}
	if o.Nodes == nil {
		o.Nodes = []NodeSpec{{GPUs: 2}, {}, {}}
	}
	if 4*(len(o.Nodes)+2) > portCount {
		return fmt.Errorf("lab: %d nodes are more than the ports suffice for", len(o.Nodes))
	}
	gpus := 0
	for i := range o.Nodes {
		n := &o.Nodes[i]
		if n.Name == "" {
			n.Name = o.Name + "n" + strconv.Itoa(i+1)
		}
		if n.CPUs == 0 {
			n.CPUs = 2
		}
		gpus += n.GPUs
	}
	if o.Gres == "" {
		o.Gres = "rgpu:no_consume:1600"
	}
	if o.Licences == "" {
		o.Licences = "rgpu:" + strconv.Itoa(100*gpus)
	}
	if o.PrologFlags == "" {
		o.PrologFlags = "Contain"
	}
	if o.Jobs {
		return o.jobs()
	}
	return nil
}

// Repository is the folder with go.mod at or above the present one.
func Repository() string {
	d, err := os.Getwd()
	if err != nil {
		return "."
	}
	for at := d; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.mod")); err == nil {
			return at
		}
		if at == "/" {
			return d
		}
	}
}

// freePorts are ports that nobody listens on, by the first, and a listener that keeps others from taking the same while
// the cluster's own daemons are not there yet.
func freePorts() (int, net.Listener, error) {
	listen := func(port int) (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port)) }
	for range 100 {
		first := 10000 + portCount*rand.IntN((32000-10000)/portCount)
		claim, err := listen(first + portClaim)
		if err != nil {
			continue
		}
		ok := true
		for p := first; ok && p < first+portCount; p++ {
			if p == first+portClaim {
				continue
			}
			s, err := listen(p)
			if ok = err == nil; ok {
				_ = s.Close()
			}
		}
		if ok {
			return first, claim, nil
		}
		_ = claim.Close()
	}
	return 0, nil, errors.New("lab: no row of free ports")
}

func (l *Lab) add(s NodeSpec, port int) *Node {
	return &Node{Name: s.Name, Dir: filepath.Join(l.Options.Dir, "n", s.Name), lab: l, spec: s, port: l.Port + port}
}

// all are the nodes in the order in which they are booted.
func (l *Lab) all() []*Node { return append([]*Node{l.base, l.Ctl}, l.Nodes...) }

// Node is the node of that name; nil if there is none.
func (l *Lab) Node(name string) *Node {
	for _, n := range l.all() {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// Path is a file below the cluster's folder.
func (l *Lab) Path(elem ...string) string {
	return filepath.Join(append([]string{l.Options.Dir}, elem...)...)
}

// Boot starts everything and waits until every node is idle and every owner is seen.
func (l *Lab) Boot(ctx context.Context) error {
	for _, n := range l.all() {
		if err := n.Boot(ctx); err != nil {
			return err
		}
	}
	if err := l.startBase(ctx); err != nil {
		return err
	}
	if err := l.StartController(ctx); err != nil {
		return err
	}
	var wg sync.WaitGroup
	errs := make([]error, len(l.Nodes))
	for i, n := range l.Nodes {
		wg.Go(func() { errs[i] = n.StartDaemons(ctx) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := l.Ready(ctx); err != nil {
		return err
	}
	return l.WritePools(ctx)
}

// Up makes a cluster and boots it; what does not come up is taken down again.
func Up(ctx context.Context, o Options) (*Lab, error) {
	l, err := New(o)
	if err != nil {
		return nil, err
	}
	if err := l.Boot(ctx); err != nil {
		err = fmt.Errorf("%w\n%s", err, l.Logs(15))
		return nil, errors.Join(err, l.Down())
	}
	return l, nil
}

// saved is lab.json, by which another process finds the cluster.
type saved struct {
	Options Options                `json:"options"`
	Port    int                    `json:"port"`
	Nodes   map[string]initProcess `json:"nodes"`
}

// initProcess names a node's first process, of whose number there may be a later one.
type initProcess struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // see process.Stat
}

func (l *Lab) save() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := saved{Options: l.Options, Port: l.Port, Nodes: map[string]initProcess{}}
	for _, n := range l.all() {
		if n != nil && n.init.PID != 0 {
			s.Nodes[n.Name] = n.init
		}
	}
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return safefile.Write(l.Path("lab.json"), b, safefile.How{Mode: 0o644, Volatile: true})
}

// Open finds a cluster that another process has started.
func Open(dir string) (*Lab, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(filepath.Join(dir, "lab.json"))
	if err != nil {
		return nil, fmt.Errorf("lab: no cluster in %s: %w", dir, err)
	}
	var s saved
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("lab: %s/lab.json: %w", dir, err)
	}
	l := &Lab{Options: s.Options, Port: s.Port}
	l.Ctl = l.add(NodeSpec{Name: s.Options.Name + "ctl"}, portNode)
	l.base = l.add(NodeSpec{Name: s.Options.Name + "base"}, portNode)
	for i, n := range s.Options.Nodes {
		l.Nodes = append(l.Nodes, l.add(n, portNode+4*(i+1)))
	}
	for _, n := range l.all() {
		n.init = s.Nodes[n.Name]
	}
	return l, nil
}

// Down ends everything and removes every trace.
func (l *Lab) Down() error {
	var errs []error
	all := l.all()
	for i := len(all) - 1; i >= 0; i-- {
		errs = append(errs, all[i].Crash())
	}
	for _, n := range all {
		errs = append(errs, removeCgroups(n.Name))
	}
	errs = append(errs, os.RemoveAll(l.Options.Dir))
	if l.claim != nil { // not of a cluster that another process has made
		_ = l.claim.Close()
	}
	return errors.Join(errs...)
}

// removeCgroups removes what slurmd and slurmstepd made for a node in every hierarchy. A group is busy until the last process in it
// has ended wholly, with the files and mounts that it was the last to hold: on a machine that does much else, seconds after the
// process has left its namespaces, by which Crash knows it.
func removeCgroups(node string) error {
	var errs []error
	deadline := time.Now().Add(crashTime)
	for _, pattern := range []string{"/sys/fs/cgroup/slurm_" + node, "/sys/fs/cgroup/*/slurm_" + node, "/sys/fs/cgroup/system.slice/" + node + "_slurmstepd.scope", "/sys/fs/cgroup/*/system.slice/" + node + "_slurmstepd.scope"} {
		dirs, _ := filepath.Glob(pattern)
		for _, d := range dirs {
			for {
				// Deepest first.
				out, err := exec.Command("find", d, "-depth", "-type", "d", "-exec", "rmdir", "{}", "+").CombinedOutput()
				if err == nil {
					break
				}
				if time.Now().After(deadline) {
					errs = append(errs, fmt.Errorf("rmdir %s: %w: %s; in it are:\n%s", d, err, strings.TrimSpace(string(out)), members(d)))
					break
				}
				time.Sleep(20 * time.Millisecond)
			}
		}
	}
	return errors.Join(errs...)
}

// members tells of the processes in a control group and below it.
func members(dir string) string {
	var b strings.Builder
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil
		}
		pids, _ := os.ReadFile(path)
		for _, pid := range strings.Fields(string(pids)) {
			b.WriteString(processTold("/proc/" + pid))
		}
		return nil
	})
	return b.String()
}

// trouble are lines of logs that tell of something that went wrong.
var trouble = regexp.MustCompile(`level=(WARN|ERROR)|error:|fatal:|panic:|drain|[Uu]nderflow|Terminate signal`)

// Logs are of each log the last lines that tell of trouble, and its very last ones. An audit log has no such lines.
func (l *Lab) Logs(lines int) string {
	const last, width = 3, 300
	var b strings.Builder
	files, _ := filepath.Glob(l.Path("n", "*", "log", "*"))
	for _, more := range []string{l.Path("log", "*"), l.Path("state", "*.log")} {
		m, _ := filepath.Glob(more)
		files = append(files, m...)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil || len(text) == 0 || strings.HasPrefix(filepath.Base(f), "audit.log") {
			continue
		}
		all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
		end := max(0, len(all)-last)
		told := slices.DeleteFunc(slices.Clone(all[:end]), func(s string) bool { return !trouble.MatchString(s) })
		rel, _ := filepath.Rel(l.Options.Dir, f)
		fmt.Fprintf(&b, "==> %s\n", rel)
		for _, line := range append(told[max(0, len(told)-lines):], all[end:]...) {
			b.WriteString(line[:min(len(line), width)] + "\n")
		}
	}
	return b.String()
}

// Tail is the last lines of a file.
func Tail(path string, lines int) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
