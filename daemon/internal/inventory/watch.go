package inventory

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Flow: Run keeps one child, sends it a number each period, and waits for its line
// until the deadline. A good sample is published through an atomic pointer; readers
// never wait. A child that is late is killed; the next one is started only when the
// kernel has let go of the former, because a process that hangs in the driver
// cannot be killed and a second one would hang beside it.

const (
	deadline   = 3 * time.Second
	firstWait  = 10 * time.Second // a driver without persistence mode wakes up slowly
	maxLine    = 4 << 20
	backoffMax = 30 * time.Second
)

// Config says what to watch.
type Config struct {
	Command []string      // starts the child
	Poll    time.Duration // between two samples
	GPUs    []string      // indices or UUIDs to lend, empty all
	KeepMem uint64        // bytes of each that are not lent
	// Overhead is what one session's context takes, in bytes, once it is known.
	Overhead func(uuid string) (uint64, error)
}

// Watch is the inventory of this machine.
type Watch struct {
	cfg    Config
	log    *slog.Logger
	last   atomic.Pointer[Sample]
	state  atomic.Pointer[string] // why there is no fresh sample, "" if there is
	misses atomic.Uint64
	starts atomic.Uint64
	now    chan struct{} // a quick look is wanted
	first  chan struct{} // closed with the first answer of any sort
	once   sync.Once

	mu    sync.Mutex
	known map[string]Device // every GPU ever seen, so that one that vanished is reported as such
	tell  func(*Sample)
}

// New makes a watch; Run starts it.
func New(cfg Config, log *slog.Logger) *Watch {
	w := &Watch{cfg: cfg, log: log, now: make(chan struct{}, 1), first: make(chan struct{}), known: map[string]Device{}}
	w.say("NVML has not answered yet")
	return w
}

func (w *Watch) say(why string) { w.state.Store(&why) }

// First waits for the first answer: whether this machine has GPUs at all.
func (w *Watch) First(ctx context.Context) (*Sample, error) {
	select {
	case <-w.first:
		return w.last.Load(), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("inventory: %s: %w", *w.state.Load(), ctx.Err())
	}
}

// Last is the newest sample, nil before the first.
func (w *Watch) Last() *Sample { return w.last.Load() }

// Age is the time since the newest sample, and why there is none newer ("" in
// normal operation). Without any sample known is false.
func (w *Watch) Age() (age time.Duration, known bool, why string) {
	why = *w.state.Load()
	if s := w.last.Load(); s != nil {
		return time.Since(s.At), true, why
	}
	return 0, false, why
}

// Look has a quick look taken soon, for whoever OnSample tells. It waits for nothing.
func (w *Watch) Look() {
	select {
	case w.now <- struct{}{}:
	default:
	}
}

// OnSample has f told of each good sample and each quick look, in their order; none is
// left out.
func (w *Watch) OnSample(f func(*Sample)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tell = f
}

// Misses counts samples that did not come, Starts the children.
func (w *Watch) Misses() uint64 { return w.misses.Load() }

// Starts counts the children started so far.
func (w *Watch) Starts() uint64 { return w.starts.Load() }

// Seen returns the GPUs to lend, as the newest sample has them, in their order. One that NVML does not list any more is as it
// was, but Lost and without readings. One that NVML cannot open has no UUID, unless a known one had its index.
func (w *Watch) Seen() []Device {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.last.Load()
	if s == nil {
		return nil
	}
	now, unnamed := map[string]bool{}, map[int]Device{}
	for _, d := range s.GPUs {
		if d.UUID == "" {
			unnamed[d.Index] = d
		} else {
			now[d.UUID] = true
		}
	}
	var out []Device
	for uuid, d := range w.known {
		if !w.wanted(d) {
			continue
		}
		if !now[uuid] {
			d = Device{Index: d.Index, UUID: uuid, Name: d.Name, PCI: d.PCI, Total: d.Total, Reserved: d.Reserved, Lost: true, Error: "NVML does not list it any more"}
			if u, ok := unnamed[d.Index]; ok {
				d.Lost, d.Unread, d.Error = u.Lost, u.Unread, u.Error
				delete(unnamed, d.Index)
			}
		}
		out = append(out, d)
	}
	for _, d := range unnamed {
		if w.wanted(d) {
			out = append(out, d)
		}
	}
	slices.SortFunc(out, func(a, b Device) int { return a.Index - b.Index })
	return out
}

// Devices are the GPUs to lend, without what is free of them.
func (w *Watch) Devices() []lease.GPU {
	var out []lease.GPU
	for _, d := range w.Seen() {
		if d.UUID == "" {
			continue
		}
		g := lease.GPU{UUID: d.UUID, Index: d.Index, Name: d.Name, PCI: d.PCI, Why: d.Error}
		if taken := d.Reserved + w.cfg.KeepMem; d.Total > taken {
			g.Mem = (d.Total - taken) / lease.Granule * lease.Granule
		}
		if g.Why == "" && g.Mem == 0 {
			g.Why = "it has no memory to lend; see owner.keep_mem"
		}
		if w.cfg.Overhead != nil {
			n, err := w.cfg.Overhead(d.UUID)
			if g.Overhead = n; err != nil && g.Why == "" {
				g.Why = err.Error()
			}
		}
		g.Healthy = g.Why == ""
		out = append(out, g)
	}
	return out
}

func (w *Watch) wanted(d Device) bool {
	return len(w.cfg.GPUs) == 0 || slices.Contains(w.cfg.GPUs, d.UUID) || slices.Contains(w.cfg.GPUs, strconv.Itoa(d.Index))
}

// Missing lists the GPUs of the configuration that this machine does not have.
func (w *Watch) Missing() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, want := range w.cfg.GPUs {
		found := false
		for _, d := range w.known {
			found = found || d.UUID == want || strconv.Itoa(d.Index) == want
		}
		if !found {
			out = append(out, want)
		}
	}
	return out
}

// Run watches until ctx ends.
func (w *Watch) Run(ctx context.Context) {
	wait := time.Second
	for ctx.Err() == nil {
		good, err := w.child(ctx)
		if ctx.Err() != nil {
			return
		}
		if good {
			wait = time.Second
		}
		w.log.Warn("nvml process ended; leases go on with what was last known", "error", err, "next_in", wait)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, backoffMax)
	}
}

// child runs one child as long as it answers. good says that it did at least once.
func (w *Watch) child(ctx context.Context) (good bool, err error) {
	c, err := w.start()
	if err != nil {
		return false, err
	}
	defer func() {
		c.in.Close()
		c.out.Close()
		if ctx.Err() == nil || good { // give it the chance to see the end of its input
			_ = c.cmd.Process.Kill()
		}
		select {
		case <-c.gone:
		case <-ctx.Done():
		}
	}()

	answers := make(chan Sample)
	failed := make(chan error, 1)
	stop := make(chan struct{})
	defer close(stop)
	go read(c.out, answers, failed, stop)

	limit := firstWait
	tick := time.NewTicker(w.cfg.Poll)
	defer tick.Stop()
	quick := false
	for seq := uint64(1); ; seq++ {
		asked, line := time.Now(), strconv.FormatUint(seq, 10)
		if quick {
			line += " " + quickly
		}
		if _, err := fmt.Fprintln(c.in, line); err != nil {
			return good, fmt.Errorf("its input: %w", err)
		}
		select {
		case s := <-answers:
			if s.Seq != seq {
				return good, fmt.Errorf("it answered request %d, %d was asked", s.Seq, seq)
			}
			s.Asked, s.At = asked, time.Now()
			w.publish(s)
			good, limit = true, deadline
		case err := <-failed:
			w.misses.Add(1)
			w.say("the NVML process ended: " + err.Error())
			return good, err
		case <-time.After(limit):
			w.misses.Add(1)
			w.say(fmt.Sprintf("NVML does not answer (%v); is the driver hanging? see dmesg", limit))
			w.log.Error("NVML does not answer; leases and metrics go on without it", "deadline", limit)
			return good, errors.New("no answer in time")
		case <-ctx.Done():
			return good, ctx.Err()
		}
		quick = false
		select {
		case <-tick.C:
		case <-w.now:
			quick = true
		case <-ctx.Done():
			return good, ctx.Err()
		}
	}
}

// process is a child and the ends of its pipes.
type process struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *os.File
	gone chan error // receives its end
}

// start starts a child.
func (w *Watch) start() (*process, error) {
	c := &process{cmd: exec.Command(w.cfg.Command[0], w.cfg.Command[1:]...), gone: make(chan error, 1)}
	c.cmd.Stderr = os.Stderr
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	// This is not StdoutPipe, which exec's Wait would close under the reader.
	out, child, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	c.out, c.cmd.Stdout = out, child
	err = c.cmd.Start()
	child.Close()
	if err != nil {
		out.Close()
		w.say("the NVML process cannot be started: " + err.Error())
		return nil, err
	}
	w.starts.Add(1)
	go func() { c.gone <- c.cmd.Wait() }()
	return c, nil
}

// read turns the child's lines into samples.
func read(out *os.File, answers chan<- Sample, failed chan<- error, stop <-chan struct{}) {
	sc := bufio.NewScanner(out)
	sc.Buffer(make([]byte, 0, 16<<10), maxLine)
	for sc.Scan() {
		var s Sample
		if err := json.Unmarshal(sc.Bytes(), &s); err != nil {
			failed <- fmt.Errorf("its answer: %w", err)
			return
		}
		select {
		case answers <- s:
		case <-stop:
			return
		}
	}
	if err := sc.Err(); err != nil {
		failed <- err
		return
	}
	failed <- errors.New("it closed its output")
}

func (w *Watch) publish(s Sample) {
	if s.Quick {
		w.mu.Lock()
		tell := w.tell
		w.mu.Unlock()
		if tell != nil && s.Error == "" {
			tell(&s)
		}
		return
	}
	why := s.Error
	if last := w.last.Load(); s.Error != "" && last != nil && last.Error == "" {
		// Keep what was known; the reason says that it is old.
		w.say(why)
		w.misses.Add(1)
		w.log.Error("NVML fails; leases go on with what was last known", "error", why)
		return
	}
	w.mu.Lock()
	for _, d := range s.GPUs {
		old, seen := w.known[d.UUID]
		switch {
		case d.UUID == "":
			w.log.Error("a GPU cannot be asked", "index", d.Index, "error", d.Error)
			continue
		case seen && d.Error != "" && old.Error == "":
			w.log.Error("a GPU failed", "gpu", d.UUID, "error", d.Error)
		case !seen:
			w.log.Info("found a GPU", "gpu", d.UUID, "index", d.Index, "name", d.Name, "memory", d.Total, "error", d.Error)
		}
		if d.Total == 0 { // its sizes were known before it failed
			d.Total, d.Reserved = old.Total, old.Reserved
		}
		w.known[d.UUID] = d
	}
	tell := w.tell
	w.last.Store(&s)
	w.mu.Unlock()
	w.say(why)
	w.once.Do(func() { close(w.first) })
	if tell != nil {
		tell(&s)
	}
}
