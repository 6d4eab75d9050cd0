package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobreport"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// impatient is the configuration of a site whose connections are given up soon, with more.
func impatient(more map[string]string) site.Options {
	config := map[string]string{"session.keepalive": "1s", "session.grace": "60s", "lease.renew": "300ms", "lease.silence": "3s"}
	maps.Copy(config, more)
	return site.Options{Hosts: 1, Owners: 1, GPUs: 1, Config: config}
}

func pausing(t *testing.T, more map[string]string) *site.Site { return start(t, impatient(more)) }

// working returns an error unless the site has one lease with one session, which has launched a kernel.
func working(s *site.Site) error {
	ls, err := list(s.Owners[0])
	if err != nil || len(ls) != 1 || len(ls[0].Sessions) != 1 || ls[0].Sessions[0].Counts.Launches == 0 {
		return fmt.Errorf("%v, %w", ls, err)
	}
	return nil
}

// checksum is what the program paused prints of its memory, "" if it did not get that far.
func checksum(out string) string {
	_, sum, _ := strings.Cut(out, "checksum")
	return sum
}

// sessions counts those that the owner lists.
func sessions(s *site.Site) (int, error) {
	ls, err := list(s.Owners[0])
	n := 0
	for _, l := range ls {
		n += len(l.Sessions)
	}
	return n, err
}

// cutsCounted compares what the job's report says of lost connections with what the program was told. They cannot have lasted for longer than most.
func cutsCounted(t *testing.T, h *site.Daemon, job string, told int, most time.Duration) {
	t.Helper()
	c, err := h.Local()
	if err != nil {
		t.Fatal(err)
	}
	rs, err := c.Report(t.Context(), rpc.Peer{}, job)
	if err != nil {
		t.Fatal(err)
	}
	n := jobreport.Add(rs).Counts
	if n.Cuts != uint64(told) || n.CutTime <= 0 || n.CutTime > most {
		t.Errorf("the report has %d cuts of %v, want %d of at most %v", n.Cuts, n.CutTime, told, most)
	}
	if line, want := jobreport.Line(rs), fmt.Sprintf(" cuts %d cut-time %s", n.Cuts, jobreport.Duration(n.CutTime)); !strings.Contains(line, want) {
		t.Errorf("%q lacks %q", line, want)
	}
	page, err := h.Node.Run(t.Context(), node.Command{Argv: []string{"curl", "-sS", "--fail", fmt.Sprintf("http://127.0.0.1:%d/metrics", site.Metrics)}})
	if err != nil || !regexp.MustCompile(`(?m)^sluice_host_sessions_attached_total [1-9]`).MatchString(page) {
		t.Errorf("the host's metrics do not count a connection that was made again: %v", err)
	}
}

// TestPause takes out the owner's cable while a program computes, for longer than the keep-alive time and lease.silence, then again while
// both daemons are killed and started anew. The program goes on each time, and computes what it computes without.
func TestPause(t *testing.T) {
	for _, encrypt := range []string{"false", "true"} {
		t.Run("encrypt="+encrypt, func(t *testing.T) {
			s := pausing(t, map[string]string{"encrypt": encrypt})
			h, o := s.Hosts[0], s.Owners[0]
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
			defer cancel()
			stderr := filepath.Join(h.Node.Dir, "paused.err")
			if err := errors.Join(os.WriteFile(stderr, nil, 0o600), os.Chown(stderr, user, user)); err != nil {
				t.Fatal(err)
			}
			run := func() (string, error) {
				return h.Node.Run(ctx, h.Run(user, "--fraction", "50", "--", "sh", "-c", `"$0" 5 2000 2>"$1"`, s.Program("paused"), stderr))
			}
			type outcome struct {
				out string
				err error
			}
			done := make(chan outcome, 1)
			go func() {
				out, err := run()
				done <- outcome{out, err}
			}()
			busy := func() {
				eventually(t, 20*time.Second, "the program has a session", func() error {
					if n, err := sessions(s); err != nil || n != 1 {
						return fmt.Errorf("%d sessions, %w", n, err)
					}
					return nil
				})
				time.Sleep(300 * time.Millisecond)
			}
			busy()
			begun, job := time.Now(), ""
			eventually(t, 5*time.Second, "the owner knows the link", func() error {
				ls, err := list(o)
				if err != nil || len(ls) != 1 || len(ls[0].Sessions) != 1 {
					return fmt.Errorf("%v, %w", ls, err)
				}
				job = ls[0].Request.Key.Job
				// The daemons relay what is encrypted: the session's own connection is a Unix socket then.
				if d := ls[0].Sessions[0].Link.RoundTrip; d < 0 || d > time.Second || (d > 0) != (encrypt == "false") {
					return fmt.Errorf("a round trip of %v", d)
				}
				return nil
			})
			said := func() string {
				b, _ := os.ReadFile(stderr)
				return string(b)
			}
			for i, kill := range []bool{false, true} {
				if err := s.Net.Cut(o.Node, true); err != nil {
					t.Fatal(err)
				}
				time.Sleep(2 * time.Second)
				if kill {
					for _, d := range s.Daemons() {
						if err := d.Kill(); err != nil {
							t.Error(err)
						}
					}
					if err := s.Up(ctx); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(2 * time.Second)
				if n, err := sessions(s); err != nil || n != 1 {
					t.Errorf("%d sessions during the cut, %v", n, err)
				}
				if err := s.Net.Cut(o.Node, false); err != nil {
					t.Fatal(err)
				}
				waited := func() (sum time.Duration) { // for a processor, which other tests use too
					for _, d := range s.Daemons() {
						sum += d.Waited()
					}
					return sum
				}
				healed, before := time.Now(), waited()
				eventually(t, 20*time.Second, "the program goes on", func() error {
					if n := strings.Count(said(), " is back after "); n != i+1 {
						return fmt.Errorf("back %d times: %s", n, said())
					}
					return nil
				})
				took := time.Since(healed)
				t.Logf("back %v after the cable, with %v of waits for a processor", took.Round(time.Millisecond), (waited() - before).Round(time.Millisecond))
				if took-(waited()-before) > time.Second {
					t.Error("that is more than a second")
				}
			}
			r := <-done
			if r.err != nil || !strings.Contains(r.out, "PASS") {
				t.Fatalf("%v: %s\n%s", r.err, r.out, said())
			}
			cutsCounted(t, h, job, strings.Count(said(), " is back after "), time.Since(begun))
			want, err := run()
			if err != nil || checksum(want) != checksum(r.out) {
				t.Errorf("cut: %s\nuncut: %v: %s", r.out, err, want)
			}
			allFree(t, s, nil)
		})
	}
}

// TestGraceOfLease: of two programs that are cut off, that whose lease waits for a second has lost its session before the cut is over, and the
// other, for which the owner's site speaks, goes on afterwards.
func TestGraceOfLease(t *testing.T) {
	t.Parallel()
	s := pausing(t, nil)
	h, o := s.Hosts[0], s.Owners[0]
	short, err := h.Node.Start(h.Run(user, "--fraction", "20", "--grace", "1s", "--", s.Program("steady"), "50"))
	if err != nil {
		t.Fatal(err)
	}
	long, err := h.Node.Start(h.Run(user, "--fraction", "20", "--", s.Program("steady"), "50"))
	if err != nil {
		t.Fatal(err)
	}
	wait := func(what string, want int) {
		t.Helper()
		eventually(t, 30*time.Second, what, func() error {
			if n, err := sessions(s); err != nil || n != want {
				return fmt.Errorf("%d sessions, %w", n, err)
			}
			return nil
		})
	}
	wait("two sessions", 2)
	if err := s.Net.Cut(o.Node, true); err != nil {
		t.Fatal(err)
	}
	wait("one of them has ended", 1)
	if err := s.Net.Cut(o.Node, false); err != nil {
		t.Fatal(err)
	}
	select {
	case <-short.Done():
	case <-time.After(30 * time.Second):
		t.Error("the program whose session has ended does not")
	}
	ls, err := list(o)
	if err != nil {
		t.Fatal(err)
	}
	live := 0
	for _, l := range ls {
		if live += len(l.Sessions); len(l.Sessions) > 0 && l.Request.Grace != 0 {
			t.Errorf("a session of the lease with grace %v lives", l.Request.Grace)
		}
	}
	if live != 1 {
		t.Errorf("%d sessions after the cut", live)
	}
	select {
	case <-long.Done():
		t.Error("the program whose lease waits has ended")
	default:
	}
	if err := long.Signal(15); err != nil {
		t.Error(err)
	}
	<-long.Done()
	allFree(t, s, nil)
}

// TestCutIsNotIdle: the connection of a lease is cut for longer than lease.idle.after. The lease is there afterwards, its program ends well, and the
// lease ends once it idles for so long.
func TestCutIsNotIdle(t *testing.T) {
	t.Parallel()
	const after = 10 * time.Second
	s := pausing(t, map[string]string{"lease.idle.after": after.String(), "lease.idle.action": "end", "lease.silence": "60s"})
	h, o := s.Hosts[0], s.Owners[0]
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	type outcome struct {
		out string
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		out, err := h.Node.Run(ctx, h.Run(user, "--fraction", "50", "--", "sh", "-c",
			`"$0" 5 2000; date +"ended %s"; while [ -e ${SLUICE_SOCKET%/*} ]; do sleep 0.1; done; sleep 2`, s.Program("paused")))
		done <- outcome{out, err}
	}()
	eventually(t, 20*time.Second, "the program works", func() error { return working(s) })
	if err := s.Net.Cut(o.Node, true); err != nil {
		t.Fatal(err)
	}
	time.Sleep(after + 6*time.Second) // and an owner's look, which is every 5 s
	ls, err := list(o)
	if err != nil || len(ls) != 1 || len(ls[0].Sessions) != 1 || ls[0].Idle >= after {
		t.Errorf("during the cut: %v, %v", ls, err)
	}
	if err := s.Net.Cut(o.Node, false); err != nil {
		t.Fatal(err)
	}
	r := <-done
	ended := regexp.MustCompile(`(?m)^ended (\d+)$`).FindStringSubmatch(r.out)
	if r.err != nil || ended == nil || !strings.Contains(r.out, "PASS") {
		t.Fatalf("%v: %s", r.err, r.out)
	}
	at, err := strconv.ParseInt(ended[1], 10, 64)
	if idled := time.Since(time.Unix(at, 0)); err != nil || idled < after || idled > after+30*time.Second {
		t.Errorf("the lease was idle for %v before it ended, %v", idled, err)
	}
	allFree(t, s, nil)
}

// TestDeathIsNotSilence: a client that is killed frees its GPU within a second, although one that is cut off has a minute; also after its
// node's daemon was started anew, and when it was killed during a cut.
func TestDeathIsNotSilence(t *testing.T) {
	s := pausing(t, nil)
	h, o := s.Hosts[0], s.Owners[0]
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for _, how := range []string{"", "restart", "cut"} {
		p, err := h.Node.Start(h.Run(user, "--fraction", "50", "--", "sh", "-c", `"$0" >/dev/null 2>&1 & sleep 3; kill -9 $!; exec sleep 60`, s.Program("churn")))
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, 10*time.Second, "a session", func() error {
			if n, err := sessions(s); err != nil || n != 1 {
				return fmt.Errorf("%d sessions, %w", n, err)
			}
			return nil
		})
		killed := time.Now().Add(3 * time.Second) // at the latest: sluice run may have waited for its lease
		switch how {
		case "restart":
			if err := h.Kill(); err != nil {
				t.Fatal(err)
			}
			if _, err := h.Up(ctx); err != nil {
				t.Fatal(err)
			}
		case "cut":
			time.Sleep(500 * time.Millisecond)
			if err := s.Net.Cut(o.Node, true); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Until(killed.Add(time.Second)))
			if n, err := sessions(s); err != nil || n != 1 {
				t.Errorf("%d sessions during a cut, %v", n, err)
			}
			if err := s.Net.Cut(o.Node, false); err != nil {
				t.Fatal(err)
			}
		}
		var live time.Time
		eventually(t, 20*time.Second, "the session has ended", func() error {
			n, err := sessions(s)
			if err == nil && n == 0 {
				return nil
			}
			live = time.Now()
			return fmt.Errorf("%d sessions, %w", n, err)
		})
		if late := live.Sub(killed); how != "cut" && late > 1500*time.Millisecond {
			t.Errorf("%q: the session lived on for %v", how, late)
		}
		if ls, err := list(o); err != nil || len(ls) != 1 {
			t.Errorf("%q: %d leases, %v", how, len(ls), err)
		}
		if err := p.Signal(15); err != nil {
			t.Error(err)
		}
		<-p.Done()
		allFree(t, s, nil)
	}
}
