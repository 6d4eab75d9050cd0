package e2e

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// TestKillAnywhere kills, 1,000 times, the program, its session's process, sluice run or the worker
// at a random moment of its life. The other side must end within a second, and nothing may be left:
// no memory of the simulated GPU, no process, no socket, no shared memory.
func TestKillAnywhere(t *testing.T) {
	const kills, lanes = 1000, 4
	before := sharedMemory(t)
	var (
		mu    sync.Mutex
		worst = map[string]time.Duration{}
		count = map[string]int{}
		work  int
	)
	t.Run("lanes", func(t *testing.T) {
		for lane := range lanes {
			t.Run(fmt.Sprint(lane), func(t *testing.T) {
				t.Parallel()
				l := &killLane{t: t, network: []string{"tcp", "unix"}[lane%2], rand: rand.New(rand.NewPCG(uint64(lane), 42))}
				defer l.stop()
				for i := 0; i < kills/lanes && !t.Failed(); i++ {
					victim, took, working := l.kill()
					mu.Lock()
					if working {
						work++
					}
					count[victim]++
					worst[victim] = max(worst[victim], took)
					mu.Unlock()
				}
			})
		}
	})
	for v, n := range count {
		t.Logf("%4d kills of %-7s the other side ended after at most %s", n, v+":", worst[v].Round(time.Millisecond))
	}
	t.Logf("%d of %d were at work by then, the rest was starting", work, kills)
	if work < kills/10 || work > kills*99/100 {
		t.Errorf("%d of %d were at work when somebody was killed: the moments are not spread over a life", work, kills)
	}
	for name := range sharedMemory(t) {
		if !before[name] {
			t.Errorf("shared memory is left: %s", name)
		}
	}
}

// killLane has a worker of its own, so that whatever lives under it belongs to the lane's program.
type killLane struct {
	t       *testing.T
	network string
	rand    *rand.Rand
	w       *worker
	last    time.Time // of the last kill
}

func (l *killLane) stop() {
	if l.w != nil {
		l.w.stop()
	}
}

// waitedFor is how long the threads of processes have waited for a processor, added up.
func waitedFor(pids ...int) (sum time.Duration) {
	for _, pid := range pids {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, th := range threads {
			var ran, waited int64
			b, _ := os.ReadFile(th)
			_, _ = fmt.Sscan(string(b), &ran, &waited)
			sum += time.Duration(waited)
		}
	}
	return sum
}

// outcome is the end of a process, and when it was.
type outcome struct {
	at     time.Time
	status int
}

// killRest kills further sessions until the program has ended, and returns when the last one was killed. The one that was killed first may have been
// that of the program before, which was killed before its session had begun: the worker still hands its connection to a process.
func (l *killLane) killRest(first int, killed time.Time, ended chan outcome) time.Time {
	for until := killed.Add(5 * time.Second); time.Now().Before(until); {
		select {
		case o := <-ended:
			ended <- o
			return killed
		case <-time.After(time.Millisecond):
		}
		for _, pid := range l.w.sessions() {
			if pid != first && syscall.Kill(pid, syscall.SIGKILL) == nil {
				first, killed = pid, time.Now()
			}
		}
	}
	return killed
}

// kill starts a program, kills somebody, and returns whom, how long the other side lived on, and
// whether the program had got as far as computing.
func (l *killLane) kill() (victim string, took time.Duration, working bool) {
	t := l.t
	if l.w == nil {
		l.w = newWorker(t, workerOptions{network: l.network})
	}
	w := l.w
	var out, stderr lockedBuffer
	var cmd *exec.Cmd
	switch n := l.rand.IntN(100); {
	case n < 40:
		victim = "program"
	case n < 80:
		victim = "session"
	case n < 90:
		victim = "run"
	default:
		victim = "worker"
	}
	if victim == "run" {
		cmd = w.command(context.Background(), runOptions{mem: "256M"}, program("churn"))
	} else {
		cmd = w.direct(context.Background(), program("churn"))
	}
	cmd.Stdout, cmd.Stderr = &out, &stderr
	// sluice run's program keeps the pipe open when sluice is killed: wait for the process alone.
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		t.Error(err)
		return victim, 0, false
	}
	ended := make(chan outcome, 1)
	go func() {
		_ = cmd.Wait()
		ended <- outcome{time.Now(), cmd.ProcessState.ExitCode()}
	}()
	// From before the first byte to the midst of the work.
	time.Sleep(time.Duration(l.rand.Int64N(int64(150 * time.Millisecond))))

	pid := cmd.Process.Pid
	switch victim {
	case "session":
		deadline := time.Now().Add(5 * time.Second)
		for pid = 0; pid == 0; {
			if s := w.sessions(); len(s) > 0 {
				pid = s[0]
			} else if time.Now().After(deadline) {
				t.Errorf("no session after 5 s: %s%s\n%s", out.String(), stderr.String(), tail(w.log.String(), 20))
				_ = cmd.Process.Kill()
				<-ended
				return victim, 0, false
			}
		}
	case "worker":
		pid = w.cmd.Process.Pid
	}
	killed, before := time.Now(), waitedFor(os.Getpid(), w.cmd.Process.Pid)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		o := <-ended
		// What the last one held is free within a second; this one may have asked sooner.
		if victim == "run" && o.status == 125 && strings.Contains(stderr.String(), "left to grant") && killed.Sub(l.last) < time.Second {
			return l.kill()
		}
		t.Errorf("kill %s: %v; the program ended with status %d: %s%s", victim, err, o.status, out.String(), stderr.String())
		return victim, 0, false
	}

	l.last = killed
	// The program must end, by an error that it saw or by its own death.
	if victim == "session" {
		killed = l.killRest(pid, killed, ended)
	}
	select {
	case o := <-ended:
		if victim == "session" || victim == "worker" {
			took = o.at.Sub(killed)
			if o.status != 3 && o.status != 1 {
				t.Errorf("%s killed: the program ended with status %d: %s%s", victim, o.status, out.String(), stderr.String())
			}
		}
	case <-time.After(10 * time.Second):
		var left []string
		for _, p := range marked(w.mark) {
			s, _ := readStat(p.pid)
			left = append(left, fmt.Sprintf("%s, child of %d, state %c, %d sockets", p, p.ppid, s.state, sockets(p.pid)))
		}
		t.Errorf("%s killed, process %d: the program lives on\n%s%s\n%s", victim, pid, out.String(), stderr.String(), strings.Join(left, "\n"))
		_ = cmd.Process.Kill()
		<-ended
	}
	// So must everything that belonged to it.
	live := func() []string {
		var left []string
		for _, p := range marked(w.mark) {
			if p.pid == w.cmd.Process.Pid || victim != "worker" && p.ppid == w.cmd.Process.Pid && sockets(p.pid) < 2 {
				continue // the worker itself, and the process that it starts ahead
			}
			left = append(left, p.String())
		}
		return left
	}
	deadline := killed.Add(5 * time.Second)
	left := live()
	for len(left) > 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
		left = live()
	}
	if victim == "program" || victim == "run" {
		took = time.Since(killed)
	}
	// Others use the processors as well: what was waited for one is not what it takes.
	waits := max(waitedFor(os.Getpid(), w.cmd.Process.Pid)-before, 0)
	switch {
	case len(left) > 0:
		t.Errorf("%s killed: processes are left: %s", victim, strings.Join(left, ", "))
	case took-waits > time.Second:
		t.Errorf("%s killed: the other side lived on for %s, with %s of waits for a processor", victim, took, waits)
	}
	if used := w.settled(killed.Add(time.Second + waits)); used != 0 {
		t.Errorf("%s killed: %d bytes of the simulated GPU are in use", victim, used)
	}
	if victim == "worker" {
		left := w.sockets()
		for len(left) > 0 && time.Since(killed) < time.Second+waits {
			time.Sleep(time.Millisecond)
			left = w.sockets()
		}
		if len(left) > 0 {
			t.Errorf("worker killed: sockets are left: %s", strings.Join(left, ", "))
		}
		<-w.ended
		_ = os.RemoveAll(w.dir)
		l.w = nil
	}
	return victim, took, strings.Contains(out.String(), "running")
}

// sockets are the listening and connected sockets of the worker's address.
func (w *worker) sockets() []string {
	network, address, _ := strings.Cut(w.addr, ":")
	if network == "unix" {
		b, _ := os.ReadFile("/proc/net/unix")
		var out []string
		for line := range bytes.Lines(b) {
			if bytes.Contains(line, []byte(address)) {
				out = append(out, string(bytes.TrimSpace(line)))
			}
		}
		return out
	}
	_, port, _ := net.SplitHostPort(address)
	var n int
	_, _ = fmt.Sscan(port, &n)
	b, _ := os.ReadFile("/proc/net/tcp")
	var out []string
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		// state 01 is established, 0A listening; what lingers in the kernel alone is no socket
		if len(f) > 3 && (f[3] == "01" || f[3] == "0A") && (strings.HasSuffix(f[1], fmt.Sprintf(":%04X", n)) || strings.HasSuffix(f[2], fmt.Sprintf(":%04X", n))) {
			out = append(out, strings.Join(f[1:4], " "))
		}
	}
	return out
}

// sharedMemory is what lies in /dev/shm.
func sharedMemory(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	entries, err := os.ReadDir("/dev/shm")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out[e.Name()] = true
	}
	return out
}
