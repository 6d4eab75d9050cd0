package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// others are the ones who must not be affected: a job that computes all the time, and short ones that begin
// and end on another host.
type others struct {
	t      *testing.T
	s      *site.Site
	steady *job
	stop   chan struct{}
	done   chan struct{}
	turns  int
	worst  time.Duration
}

func watchOthers(t *testing.T, s *site.Site) *others {
	o := &others{t: t, s: s, steady: steady(t, s, s.Hosts[0], "victim", 30), stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(o.done)
		for {
			select {
			case <-o.stop:
				return
			case <-time.After(300 * time.Millisecond):
			}
			began := time.Now()
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			l, socket, err := acquire(ctx, s.Hosts[0], fmt.Sprint("turn", o.turns), user, 20)
			if err == nil {
				var out string
				out, err = s.Hosts[0].Node.Run(ctx, onLease(s, s.Hosts[0], socket, user, s.Program("vecadd")))
				if err == nil && !strings.Contains(out, "PASS") {
					err = fmt.Errorf("no PASS: %s", out)
				}
				if rerr := release(ctx, s.Hosts[0], l); err == nil {
					err = rerr
				}
			}
			cancel()
			if err != nil {
				t.Errorf("a job of somebody else, turn %d: %v", o.turns, err)
				return
			}
			o.turns++
			o.worst = max(o.worst, time.Since(began))
		}
	}()
	return o
}

func (o *others) end() {
	close(o.stop)
	<-o.done
	o.t.Logf("meanwhile %d jobs of others ran, each within %v", o.turns, o.worst.Round(time.Millisecond))
	if o.worst > 10*time.Second {
		o.t.Errorf("a job of somebody else took %v", o.worst)
	}
	o.steady.stop(o.t)
}

// audited counts events of a kind in a daemon's audit log.
func audited(t *testing.T, d *site.Daemon, event string) int {
	t.Helper()
	n := 0
	for _, e := range events(t, d) {
		if e.Event == event {
			n++
		}
	}
	return n
}

// TestHostile attacks through every door, one attack after the other, while others work.
func TestHostile(t *testing.T) {
	s := start(t, site.Options{Hosts: 2, Owners: 1, GPUs: 4, Config: map[string]string{"session.ticket": "3s", "log.level": "info"}})
	h, evil, o := s.Hosts[0], s.Hosts[1], s.Owners[0]
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	w := watchOthers(t, s)
	run := func(d *site.Daemon, uid int, cgroup, role string, args ...string) (string, error) {
		c := d.Node.Role(role, args...)
		c.UID, c.GID, c.Cgroup, c.Dir = uid, uid, cgroup, "/"
		return d.Node.Run(ctx, c)
	}

	t.Run("another user", func(t *testing.T) {
		_, socket, err := acquire(ctx, h, "victim", user, 30)
		if err != nil {
			t.Fatal(err)
		}
		l, err := json.Marshal(w.steady.lease)
		if err != nil {
			t.Fatal(err)
		}
		out, err := run(h, other, "", "stranger", string(l), socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Log(out)
		for _, want := range []string{"list: 0 leases", "only root may ask for others", fmt.Sprintf("is of uid %d, and uid %d asks", user, other)} {
			if !strings.Contains(out, want) {
				t.Errorf("not in it: %s", want)
			}
		}
		for _, not := range []string{"release by id: <nil>", "release by key: <nil>", strconv.Quote(w.steady.lease.ID), "for its user: uid " + strconv.Itoa(user)} {
			if strings.Contains(out, not) {
				t.Errorf("in it: %s", not)
			}
		}
	})

	t.Run("another job", func(t *testing.T) {
		l, socket, err := acquire(ctx, h, "4711", user, 10)
		if err != nil {
			t.Fatal(err)
		}
		defer release(ctx, h, l)
		in := func(job string) string {
			top := "/sys/fs/cgroup/unified"
			if _, err := os.Stat(top); err != nil {
				top = "/sys/fs/cgroup"
			}
			dir := filepath.Join(top, fmt.Sprintf("slurm-test-%d", os.Getpid()), "job_"+job, "step_0")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				for at, n := dir, 0; n < 3; n++ {
					_ = os.Remove(at)
					at = filepath.Dir(at)
				}
			})
			return dir
		}
		before := audited(t, h, audit.SessionRefuse)
		out, err := run(h, user, in("4712"), "knock", socket)
		if err != nil || !strings.HasPrefix(out, "refused: ") {
			t.Errorf("job 4712 on the lease of 4711: %q, %v", out, err)
		}
		t.Log(out)
		if audited(t, h, audit.SessionRefuse) <= before {
			t.Error("the refusal is not in the audit log")
		}
		if out, err := run(h, user, in("4711"), "knock", socket); err != nil || out != "session\n" {
			t.Errorf("job 4711 on its own lease: %q, %v", out, err)
		}
	})

	t.Run("tickets", func(t *testing.T) {
		l, _, err := acquire(ctx, evil, "evil", user, 10)
		if err != nil {
			t.Fatal(err)
		}
		defer release(ctx, evil, l)
		before := audited(t, o, audit.TicketRefuse)
		addr := fmt.Sprintf("%s:%d", o.Node.Addr, site.Control)
		out, err := run(evil, 0, "", "tickets", evil.Node.Name, o.Node.Name, addr, l.ID, w.steady.lease.ID)
		if err != nil {
			t.Fatal(err)
		}
		t.Log(out)
		if !strings.Contains(out, "right: <nil>") {
			t.Error("the right ticket was refused")
		}
		for _, name := range []string{"wrong secret", "replayed", "unknown", "late", "foreign offer"} {
			if strings.Contains(out, name+": <nil>") || !strings.Contains(out, name+": ") {
				t.Errorf("%s: not refused", name)
			}
		}
		if !strings.Contains(out, "foreign renew: 0") || strings.Contains(out, "listed") {
			t.Error("a host sees another's lease")
		}
		if n := audited(t, o, audit.TicketRefuse) - before; n < 3 {
			t.Errorf("%d refusals of tickets are in the audit log", n)
		}
		if err := w.steady.lost(); err != nil {
			t.Error(err)
		}
	})

	t.Run("no daemon", func(t *testing.T) {
		before := audited(t, o, audit.PeerRefuse)
		addr := fmt.Sprintf("%s:%d", o.Node.Addr, site.Control)
		out, err := run(evil, other, "", "tickets", evil.Node.Name, o.Node.Name, addr, w.steady.lease.ID, w.steady.lease.ID)
		if err == nil {
			t.Errorf("a user's munge credential was taken for a daemon's: %s", out)
		}
		t.Log(err)
		eventually(t, 5*time.Second, "the refusal is in the audit log", func() error {
			if audited(t, o, audit.PeerRefuse) <= before {
				return fmt.Errorf("%d events", before)
			}
			return nil
		})
	})

	_, evilSocket, err := acquire(ctx, evil, "noise", other, 5)
	if err != nil {
		t.Fatal(err)
	}
	// The attacker's own lease socket, on the victim's node too.
	_, besideSocket, err := acquire(ctx, h, "beside", other, 5)
	if err != nil {
		t.Fatal(err)
	}
	doors := []struct {
		name          string
		from          *site.Daemon
		uid           int
		network, addr string
		half          string
		tls           string
	}{
		{"control", evil, other, "tcp", fmt.Sprintf("%s:%d", o.Node.Addr, site.Control), "\x16\x03\x01", "tls"},
		{"data", evil, other, "tcp", fmt.Sprintf("%s:%d", o.Node.Addr, site.Data), "SLUICE-D", ""},
		{"metrics", o, other, "tcp", fmt.Sprintf("127.0.0.1:%d", site.Metrics), "GET /metr", ""},
		{"lease", h, other, "unix", besideSocket, "SLUICE-L", ""},
		{"lease elsewhere", evil, other, "unix", evilSocket, "", ""},
		{"local", h, other, "unix", site.Socket, "PRI * HTTP", ""},
	}
	for _, d := range doors {
		for i, half := range []string{"", d.half} {
			if i > 0 && half == "" {
				continue
			}
			name := "flood of " + d.name
			if half != "" {
				name += ", half open"
			}
			t.Run(name, func(t *testing.T) {
				turns := w.turns
				c := d.from.Node.Role("flood", d.network, d.addr, "10000", "3", half)
				c.UID, c.GID, c.Dir = d.uid, d.uid, "/"
				out, err := d.from.Node.Run(ctx, c)
				if err != nil {
					t.Error(err)
				}
				t.Logf("%s; %d jobs of others meanwhile", strings.TrimSpace(out), w.turns-turns)
				if err := w.steady.lost(); err != nil {
					t.Fatal(err)
				}
			})
		}
	}

	t.Run("noise", func(t *testing.T) {
		seconds := 60
		if testing.Short() {
			seconds = 5
		}
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		var wg sync.WaitGroup
		for i, d := range doors {
			wg.Go(func() {
				out, err := run(d.from, d.uid, "", "noise", d.network, d.addr, strconv.Itoa(seconds), strconv.FormatUint(seed+uint64(i), 10), d.tls)
				if err != nil {
					t.Errorf("%s: %v", d.name, err)
				}
				t.Logf("%s: %s", d.name, strings.TrimSpace(out))
			})
		}
		wg.Wait()
	})

	w.end()
	for _, d := range s.Daemons() {
		if p := d.Process(); p.Ended() {
			t.Errorf("%s: sluiced has ended: %v", d.Node.Name, p.Err())
			continue
		}
		pid := d.Node.Path(fmt.Sprintf("/proc/%d", d.Process().PID))
		eventually(t, 15*time.Second, "descriptors are closed", func() error {
			fds, err := os.ReadDir(filepath.Join(pid, "fd"))
			if err == nil && len(fds) > 200 {
				err = fmt.Errorf("%s has %d descriptors", d.Node.Name, len(fds))
			}
			return err
		})
		b, err := os.ReadFile(filepath.Join(pid, "status"))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if strings.HasPrefix(line, "VmHWM") || strings.HasPrefix(line, "VmRSS") {
				t.Logf("%s: %s", d.Node.Name, strings.Join(strings.Fields(line), " "))
			}
		}
		if log, err := os.ReadFile(d.Log); err == nil && (strings.Contains(string(log), "panic") || strings.Contains(string(log), "fatal error")) {
			t.Errorf("%s's log speaks of a panic", d.Node.Name)
		}
	}
	for _, d := range s.Hosts {
		ls, err := list(d)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range ls {
			if err := release(ctx, d, l.Lease); err != nil {
				t.Error(err)
			}
		}
	}
	allFree(t, s, nil)
}

// TestMetrics looks at /metrics of an owner with a lease in use, while nothing may be a sentinel.
func TestMetrics(t *testing.T) {
	t.Parallel()
	s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 2, Config: map[string]string{"listen.metrics": `"0.0.0.0:7073"`, "listen.page": `"127.0.0.1:7074"`}})
	j := steady(t, s, s.Hosts[0], "steady", 30)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	out, err := s.Hosts[0].Node.Run(ctx, node.Command{Argv: []string{"curl", "-sS", "--fail", fmt.Sprintf("http://%s:%d/metrics", s.Owners[0].Node.Addr, site.Metrics)}})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{j.lease.ID, "sluice_"} {
		if !strings.Contains(out, want) {
			t.Errorf("%s is not in the metrics", want)
		}
	}
	for line := range strings.Lines(out) {
		for _, not := range []string{" 1.8446744", " 4.294967295e+09", " NaN", " -1\n"} {
			if strings.HasPrefix(line, "sluice_") && strings.Contains(line, not) {
				t.Errorf("a sentinel: %s", line)
			}
		}
	}
	// The page is this machine's own, under its own name.
	for _, c := range []struct {
		d    *site.Daemon
		args []string
		want string
	}{
		{s.Owners[0], []string{"--fail", "http://127.0.0.1:7074/"}, `<a href="/job/test/steady">`},
		{s.Owners[0], []string{"--fail", "http://127.0.0.1:7074/job/test/steady"}, j.lease.ID},
		{s.Hosts[0], []string{"--fail", "http://127.0.0.1:7074/job/test/steady"}, j.lease.ID},
		{s.Owners[0], []string{"-H", "Host: evil.example", "http://127.0.0.1:7074/"}, "by the name of its own machine"},
	} {
		out, err := c.d.Node.Run(ctx, node.Command{Argv: append([]string{"curl", "-sS"}, c.args...)})
		if err != nil || !strings.Contains(out, c.want) {
			t.Errorf("page %v of %s: %v, no %q in\n%s", c.args, c.d.Node.Name, err, c.want, out)
		}
	}
	if out, err := s.Hosts[0].Node.Run(ctx, node.Command{Argv: []string{"curl", "-sS", fmt.Sprintf("http://%s:7074/", s.Owners[0].Node.Addr)}}); err == nil {
		t.Errorf("the page is served to other machines: %s", out)
	}
	j.stop(t)
	allFree(t, s, nil)
}
