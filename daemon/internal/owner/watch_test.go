package owner

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// refs are a watch's leases: job, and - for one that is over.
func refs(c lease.Changes) string {
	var all []string
	for _, r := range c.Leases {
		s := r.Key.Job
		if r.Over {
			s = "-" + s
		}
		all = append(all, s)
	}
	if c.Whole {
		slices.Sort(all)
		all = append([]string{"all:"}, all...)
	}
	return strings.Join(all, " ")
}

func TestWatch(t *testing.T) {
	n := control(newNode(t, "gpu01", 2))
	for _, from := range []string{"h1", "", "ctl2"} {
		_, err := n.Watch(ctx, from, lease.Mark{}, 0)
		code(t, err, lease.Denied)
	}
	watch := func(since lease.Mark, want string) lease.Changes {
		t.Helper()
		c, err := n.Watch(ctx, "ctl", since, time.Minute)
		must(t, err)
		if got := refs(c); got != want {
			t.Errorf("after %v: %q, want %q", since, got, want)
		}
		return c
	}
	first, err := n.Reserve(ctx, "ctl", n.sponsored("h1", "7", 100, 0, 50), 0)
	must(t, err)
	all := watch(lease.Mark{}, "all: 7")
	if g := all.Inventory.GPUs; len(g) != 2 || g[0].FreePercent+g[1].FreePercent != 150 {
		t.Errorf("%+v", g)
	}
	_, err = n.Reserve(ctx, "h1", n.want("h1", "8", 25), 0)
	must(t, err)
	more := watch(all.At, "8")
	must(t, n.Release(ctx, "ctl", first.ID, lease.Key{}, "over"))
	watch(more.At, "-7")
	watch(all.At, "8 -7")
	last := watch(lease.Mark{Epoch: all.At.Epoch + 1, Seq: all.At.Seq}, "all: 8") // of another life of the daemon
	watch(lease.Mark{Epoch: all.At.Epoch, Seq: last.At.Seq + 1}, "all: 8")        // which it never gave

	// What the controller has got itself is told with the next news, or at the end of the wait.
	_, err = n.Reserve(ctx, "ctl", n.sponsored("h2", "10", 102, 0, 5), 0)
	must(t, err)
	begun := time.Now()
	c, err := n.Watch(ctx, "ctl", last.At, 50*time.Millisecond)
	must(t, err)
	if took := time.Since(begun); took < 50*time.Millisecond || refs(c) != "10" {
		t.Errorf("after %v: %q", took, refs(c))
	}
	n.SetControllers([]string{"ctl", "ctl2"})
	if c, err = n.Watch(ctx, "ctl2", last.At, time.Minute); refs(c) != "10" || err != nil {
		t.Errorf("another controller: %q, %v", refs(c), err)
	}
	n.SetControllers(n.control)
	last = c
	// Without a change the answer is put off.
	begun = time.Now()
	c, err = n.Watch(ctx, "ctl", last.At, 50*time.Millisecond)
	must(t, err)
	if took := time.Since(begun); took < 50*time.Millisecond || refs(c) != "" || c.At != last.At {
		t.Errorf("after %v: %q at %v", took, refs(c), c.At)
	}
	// A change ends the wait, and so does the caller's end.
	for what, change := range map[string]func(){
		"a drain": func() {
			_, err := n.Drain(ctx, n.cfg.Name, lease.DrainOrder{Owner: "gpu01", Reason: "broken fan"})
			must(t, err)
		},
		"the limits": func() { n.SetLimits(Limits{MaxPerGPU: 1}) },
	} {
		go func() { time.Sleep(20 * time.Millisecond); change() }()
		c, err := n.Watch(ctx, "ctl", last.At, time.Minute)
		must(t, err)
		if c.At == last.At {
			t.Errorf("%s is no change", what)
		}
		last = c
	}
	if !strings.Contains(last.Inventory.GPUs[0].Drain.Reason+last.Inventory.GPUs[1].Drain.Reason, "broken fan") {
		t.Errorf("%+v", last.Inventory.GPUs)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	_, err = n.Watch(gone, "ctl", last.At, time.Minute)
	code(t, err, lease.Down)

	// A watcher that has missed more changes than the journal holds gets the whole state.
	for range journalSize + 1 {
		n.SetLimits(Limits{})
	}
	watch(last.At, "all: 10 8")
}

func TestWhere(t *testing.T) {
	n := control(newNode(t, "gpu01", 1))
	at := []lease.Whereabouts{{Node: "h1", Owners: []string{"gpu02", "gpu03"}}, {Node: "h2", Owners: []string{"gpu04"}}}
	code(t, n.Register(ctx, "h1", "c", "7", at), lease.Denied)
	must(t, n.Register(ctx, "ctl", "c", "7", at))
	where := func(host, job, want string) {
		t.Helper()
		owners, err := n.Where(ctx, host, "c", job)
		must(t, err)
		if got := strings.Join(owners, " "); got != want {
			t.Errorf("job %s on %s: %q, want %q", job, host, got, want)
		}
	}
	where("h1", "7", "gpu02 gpu03")
	where("h2", "7", "gpu04")
	where("h3", "7", "")
	where("h1", "8", "")
	must(t, n.Register(ctx, "ctl", "c", "7", at[1:]))
	where("h1", "7", "gpu02 gpu03")
	must(t, n.Register(ctx, "ctl", "c", "7", []lease.Whereabouts{{Node: "h1", Owners: []string{"gpu05"}}}))
	where("h1", "7", "gpu05")
	// Its own leases need no telling.
	w := n.want("h1", "9", 10)
	_, err := n.Reserve(ctx, "h1", w, 0)
	must(t, err)
	owners, err := n.Where(ctx, "h1", w.Request.Key.Cluster, "9")
	must(t, err)
	if !slices.Equal(owners, []string{"gpu01"}) {
		t.Errorf("%q", owners)
	}
	long := strings.Repeat("x", form.MaxName+1)
	many := make([]string, form.MaxDevices+1)
	for i := range many {
		many[i] = fmt.Sprint("o", i)
	}
	for _, bad := range []lease.Whereabouts{{}, {Node: long}, {Node: "h1", Owners: []string{""}}, {Node: "h1", Owners: []string{long}}, {Node: "h1", Owners: many}} {
		code(t, n.Register(ctx, "ctl", "c", "7", []lease.Whereabouts{bad}), lease.Invalid)
	}
	code(t, n.Register(ctx, "ctl", "c", long, at), lease.Invalid)
	code(t, n.Register(ctx, "ctl", "", "7", at), lease.Invalid)
	where("h1", "7", "gpu05")
}

// What is kept is bounded, and what is old goes.
func TestWhereForgets(t *testing.T) {
	n := control(newNode(t, "gpu01", 1))
	put := func(job string) {
		must(t, n.Register(ctx, "ctl", "c", job, []lease.Whereabouts{{Node: "h1", Owners: []string{"gpu02"}}}))
	}
	knows := func(job string) bool {
		owners, err := n.Where(ctx, "h1", "c", job)
		must(t, err)
		return len(owners) > 0
	}
	put("first")
	n.clock.pass(whereTime + time.Second)
	put("second")
	if !knows("first") || !knows("second") {
		t.Error("it was kept for a moment only")
	}
	n.clock.pass(whereTime + time.Second)
	put("third")
	if knows("first") || !knows("second") {
		t.Error("the first one is kept for ever, or the second is gone")
	}
	for i := range 3 * maxWhere {
		put(fmt.Sprint(i))
	}
	if all := len(n.where.young) + len(n.where.old); all > 2*maxWhere || knows("third") {
		t.Errorf("%d are kept", all)
	}
	if !knows(fmt.Sprint(3*maxWhere - 1)) {
		t.Error("the last one is not kept")
	}
}
