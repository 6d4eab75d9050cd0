package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func TestExplainAmongOthers(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	id := func(n int) string { return fmt.Sprintf("%032x", n) }
	write := func(e audit.Event) {
		t.Helper()
		if err := s.log.Write(e); err != nil {
			t.Fatal(err)
		}
	}
	const job = "run-<&>" // which JSON escapes
	for n := range 300 {
		name, uid := fmt.Sprint(n), uint32(1000+n%3)
		if n == 100 || n == 200 {
			name, uid = job, 1000+uint32(n/200) // two users have chosen the same name
		}
		key := lease.Key{Cluster: "c", Job: name, Node: "node1"}.String()
		write(audit.Event{Event: audit.Grant, Lease: id(n), Key: key, UID: audit.UID(uid)})
		write(audit.Event{Event: audit.SessionOpen, Lease: id(n), UID: audit.UID(uid), Session: fmt.Sprint(n)})
		write(audit.Event{Event: audit.SessionRefuse, Lease: id(n), UID: audit.UID(uid), Reason: "of " + job})
		write(audit.Event{Event: audit.Release, Lease: id(n), Key: key, UID: audit.UID(uid)})
	}
	for uid, want := range map[uint32]int{0: 8, 1000: 4, 1001: 4, 1002: 0} {
		events, err := s.Explain(t.Context(), rpc.Peer{UID: uid}, job)
		if err != nil || len(events) != want {
			t.Errorf("uid %d: %d lines of %d: %v", uid, len(events), want, err)
		}
		for i, e := range events {
			if order := []string{audit.Grant, audit.SessionOpen, audit.SessionRefuse, audit.Release}; e.Event != order[i%4] {
				t.Errorf("uid %d: line %d is %+v", uid, i, e)
			}
		}
	}
}

// Any user may have the audit log read, but not so often that the node does nothing else.
func TestExplainIsBounded(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	explain := func(ctx context.Context, uid uint32) error {
		_, err := s.Explain(ctx, rpc.Peer{UID: uid}, "7")
		return err
	}
	busy := func(what string, err error) {
		t.Helper()
		if lease.CodeOf(err) != lease.Down || err == nil || !strings.Contains(err.Error(), "ask again") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.explains.enter(1000); err != nil { // one is being answered
		t.Fatal(err)
	}
	busy("the same user's second", explain(t.Context(), 1000))
	if err := explain(t.Context(), 1001); err != nil {
		t.Error("another user's:", err)
	}
	if err := s.explains.enter(1001); err != nil {
		t.Fatal(err)
	}
	busy("a third", explain(t.Context(), 1002))
	busy("root's", explain(t.Context(), 0))
	s.explains.leave(1000)
	s.explains.leave(1001)
	for range 300 {
		if err := s.log.Write(audit.Event{Event: audit.Refuse, Key: "c/7@node1", UID: audit.UID(5)}); err != nil {
			t.Fatal(err)
		}
	}
	late, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	var e *lease.Error
	if err := explain(late, 1000); !errors.As(err, &e) || e.Code != lease.Down || !strings.Contains(e.Reason, "could not be read within") {
		t.Errorf("out of time: %v", err)
	}
}

// A node adds what the owners know of a job to its own log: the node of the grant shows the end too, and the job's node the grant. An
// event that both have is shown once.
func TestExplainWithOwners(t *testing.T) {
	a, b := newFake("a", 1), newFake("b", 1)
	s := newSite(t, a, b)
	key := lease.Key{Cluster: "c", Job: "7", Node: "node2"}
	at := time.Now().Add(-time.Minute).UTC().Truncate(time.Second)
	report := func(owner, id string, ended bool) lease.Report {
		r := lease.Report{Lease: id, Key: key, Owner: owner, UID: 1000, Made: at, Sessions: 2, GPUTime: 3 * time.Second,
			Grants: []lease.Grant{{Owner: owner, GPU: owner + "-0", Percent: 50, Mem: 4 << 30}}, Use: []lease.Use{{Peak: 1 << 30}}}
		if ended {
			r.Ended, r.Reason = at.Add(10*time.Second), "the job has ended"
		}
		return r
	}
	mine, other := fmt.Sprintf("%032x", 1), fmt.Sprintf("%032x", 2)
	a.told = []lease.Report{report("a", mine, true)}
	b.told = []lease.Report{report("b", other, false)}
	for _, e := range []audit.Event{
		{Event: audit.Refuse, Key: key.String(), UID: audit.UID(1000), Reason: "no room", Times: 21, Time: at.Add(-time.Second)},
		{Event: audit.Grant, Lease: mine, Key: key.String(), UID: audit.UID(1000), GPUs: a.told[0].Grants, Time: at},
	} {
		if err := s.log.Write(e); err != nil {
			t.Fatal(err)
		}
	}
	tell := func(uid uint32) (lines []string) {
		t.Helper()
		events, err := s.Explain(t.Context(), rpc.Peer{UID: uid}, "7")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			line := fmt.Sprintf("%s %.32s", e.Event, e.Lease)
			for _, g := range e.Grants {
				line += fmt.Sprintf(" %s:%d%%:%dG", g.Owner, g.Percent, g.Mem>>30)
			}
			if e.Times > 1 {
				line += fmt.Sprint(" times ", e.Times)
			}
			lines = append(lines, line+" "+e.Reason)
		}
		return lines
	}
	want := []string{
		"refuse  times 21 no room",
		"grant " + mine + " a:50%:4G ",
		"grant " + other + " b:50%:4G ",
		"release " + mine + " the job has ended",
		"used " + mine + " at most 1024 MiB of 4096 MiB, 3s of GPU time, 2 sessions, 0 calls",
		"used " + other + " at most 1024 MiB of 4096 MiB, 3s of GPU time, 2 sessions, 0 calls",
	}
	if got := tell(1000); !slices.Equal(got, want) {
		t.Errorf("told:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if got := tell(1001); len(got) != 0 {
		t.Errorf("another user is told %q", got)
	}
	b.mu.Lock()
	b.down = true
	b.mu.Unlock()
	if got := tell(0); len(got) != 5 || !strings.Contains(got[4], "b is down") {
		t.Errorf("with a silent owner: %q", got)
	}
}

func TestUsed(t *testing.T) {
	for _, c := range []struct {
		in   lease.Report
		want string
	}{
		{lease.Report{Owner: "a"}, "nothing so far: no program of the job has used the GPU yet"},
		{lease.Report{Owner: "a", Ended: time.Unix(1, 0)}, "nothing: no program of the job used the GPU"},
		{lease.Report{Owner: "a", Lost: true}, "not known: counts were lost with the reboot of a"},
		{lease.Report{Owner: "a", Sessions: 1, GPUTime: time.Second, Counts: lease.Counts{Calls: 9}}, "at most 0 MiB of 0 MiB, 1s of GPU time, 1 sessions, 9 calls"},
		{lease.Report{Owner: "a", Sessions: 4, Failed: 2, Failure: "p (process 7): why"}, "at most 0 MiB of 0 MiB, 0s of GPU time, 4 sessions, 0 calls; 2 of the sessions failed, the last one of p (process 7): why"},
		{lease.Report{Owner: "a", Sessions: 1, Lost: true}, "counts were lost with the reboot of a; since then at most 0 MiB of 0 MiB, 0s of GPU time, 1 sessions, 0 calls"},
	} {
		if got := used(&c.in); got != c.want {
			t.Errorf("%+v: %q, want %q", c.in, got, c.want)
		}
	}
}

// A caller that retries by itself writes one line, when it gives up.
func TestRefusedOnce(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	ctx := audit.Later(t.Context())
	r := ask("7", 100, 100)
	var last error
	for range 5 {
		if _, _, last = s.Acquire(ctx, root, r); last == nil {
			t.Fatal("granted")
		}
	}
	s.Refused(r.Key, 1000, last, 5)
	events, err := s.Explain(t.Context(), root, "7")
	if err != nil || len(events) != 1 || events[0].Times != 5 || events[0].Reason != last.Error() {
		t.Errorf("%v, %+v", err, events)
	}
}
