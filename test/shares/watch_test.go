package shares

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
)

// A watch answers the simulated clock's question whether a session is at rest, and with it all that may give it work:
// the program whose session it is, sluice run, and the daemons. So it does not count how long a machine with other things to
// do lets them wait for a processor. The file is struct sim_watch of remoting/simgpu/state.h, for each slot.
type watch struct {
	file  []byte
	nodes []string // PID namespaces, the sessions' first
	stop  chan struct{}
	done  chan struct{}
	mu    sync.Mutex
	known map[int32]session
	users map[int][]int // processes of a user but sessions; of 0, the daemons and the kernel's that deliver packets
	seen  time.Time
}

const (
	watchSlots = 256
	watchSize  = 24
	// looks is how often, and lookEvery how far apart, nobody is to be seen running. A process may sleep for up to 10 ms
	// and yet have work: so long may Go leave a goroutine to a thread that is in a system call.
	looks     = 30
	lookEvery = time.Millisecond
	// freshly is how old what is known of processes may be.
	freshly = 20 * time.Millisecond
)

// session is the process of one, seen from here.
type session struct{ pid, uid int }

func newWatch(t *testing.T, path string, nodes ...*node.Node) *watch {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(watchSlots * watchSize); err != nil {
		t.Fatal(err)
	}
	w := &watch{stop: make(chan struct{}), done: make(chan struct{})}
	for _, n := range nodes {
		ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", n.PID))
		if err != nil {
			t.Fatal(err)
		}
		w.nodes = append(w.nodes, ns)
	}
	if w.file, err = unix.Mmap(int(f.Fd()), 0, watchSlots*watchSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		close(w.stop)
		<-w.done
		_ = unix.Munmap(w.file)
	})
	go w.run()
	return w
}

func (w *watch) word(slot, at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&w.file[slot*watchSize+at]))
}

func (w *watch) run() {
	defer close(w.done)
	var pending [watchSlots]look
	for {
		select {
		case <-w.stop:
			return
		case <-time.After(lookEvery):
		}
		for slot := range watchSlots {
			want, asleep := w.word(slot, 8), w.word(slot, 16)
			since := want.Load()
			if since == asleep.Load() {
				continue
			}
			p := &pending[slot]
			if p.since != since {
				*p = look{since: since}
			}
			if w.rests(p, (*atomic.Int32)(unsafe.Pointer(&w.file[slot*watchSize])).Load()) {
				asleep.Store(since)
			}
		}
	}
}

// look is what was seen of a session since a time.
type look struct {
	since uint64
	looks int
	slept map[int]uint64 // how often a thread of its had slept when it was first seen running
}

// rests looks once more at all that belongs to a session.
func (w *watch) rests(p *look, pid int32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, ok := w.known[pid]
	if !ok || time.Since(w.seen) > freshly {
		w.find()
		if s, ok = w.known[pid]; !ok {
			return true // it has ended
		}
	}
	runs := func(pid int) bool { return len(running(pid)) > 0 }
	if slices.ContainsFunc(w.users[s.uid], runs) || slices.ContainsFunc(w.users[0], runs) {
		*p = look{since: p.since}
		return false
	}
	p.looks++
	// A thread that polls runs now and then, and has found nothing to do.
	for _, task := range running(s.pid) {
		if first, ok := p.slept[task]; !ok {
			if p.slept == nil {
				p.slept = map[int]uint64{}
			}
			p.slept[task] = slept(s.pid, task)
			return false
		} else if slept(s.pid, task) < first+3 {
			return false
		}
	}
	return p.looks >= looks
}

// outer is the number by which this process knows a session's; 0: it is gone.
func (w *watch) outer(pid int32) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.find()
	return w.known[pid].pid
}

// find finds the processes of the nodes.
func (w *watch) find() {
	w.known, w.users, w.seen = map[int32]session{}, map[int][]int{}, time.Now()
	all, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		name, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil {
			continue
		}
		if bytes.HasPrefix(name, []byte("ksoftirqd/")) {
			w.users[0] = append(w.users[0], pid)
			continue
		}
		ns, err := os.Readlink(filepath.Join(dir, "ns/pid"))
		if err != nil || !slices.Contains(w.nodes, ns) {
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat(dir, &st) != nil {
			continue
		}
		uid := int(st.Uid)
		switch {
		case string(bytes.TrimSpace(name)) == "sluiced":
			w.users[0] = append(w.users[0], pid)
		case ns == w.nodes[0]:
			w.known[inner(dir)] = session{pid, uid}
		case uid != 0:
			w.users[uid] = append(w.users[uid], pid)
		}
	}
}

// inner is the number by which a process knows itself.
func inner(dir string) int32 { return int32(status(dir, "NSpid")) }

// slept is how often a thread has gone to sleep by itself.
func slept(pid, task int) uint64 {
	return status(fmt.Sprintf("/proc/%d/task/%d", pid, task), "voluntary_ctxt_switches")
}

// status gives the last number of a line of /proc/PID/status, 0 if there is none.
func status(dir, name string) uint64 {
	b, _ := os.ReadFile(filepath.Join(dir, "status"))
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name+":" {
			n, _ := strconv.ParseUint(f[len(f)-1], 10, 64)
			return n
		}
	}
	return 0
}

// running gives the threads of a process that can run.
func running(pid int) (all []int) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil
	}
	for _, t := range tasks {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/stat", pid, t.Name()))
		if err != nil {
			continue
		}
		if at := bytes.LastIndexByte(b, ')'); at >= 0 && at+2 < len(b) && (b[at+2] == 'R' || b[at+2] == 'D') {
			n, _ := strconv.Atoi(t.Name())
			all = append(all, n)
		}
	}
	return all
}
