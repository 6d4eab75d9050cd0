package host

// The health of all nodes that a daemon can be asked on: this one, and the owners of the pools. A node that lends no
// GPU listens on no port; Slurm has what it finds of itself, see sluice health --drain.
//
//	1  each owner -> its node's own findings; several owners at a time, with a deadline for each and one for all
//	2  a node's texts are cut to size and made printable when they arrive; a node that does not answer is a finding too
//	3  findings of several nodes that differ in numbers only become one; failures first, so that warnings take no room from them

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/pattern"
)

const (
	healthTime    = 8 * time.Second  // for one node
	healthAllTime = 24 * time.Second // for all of them; the command waits a little longer
	healthAtOnce  = 128
	// One node adds at most maxChecks findings to the answer, and at most maxWarnings of them are warnings. The answer has at
	// most maxFindings different findings.
	maxChecks   = 32
	maxWarnings = 16
	maxFindings = 2048
	maxFinding  = 512 // bytes of a text, and of a remedy
)

// NodeHealth is what this node has found about itself, without findings about owners on other nodes.
func (h *Host) NodeHealth(ctx context.Context) []rpc.Check {
	var checks []rpc.Check
	if h.cfg.Health != nil {
		checks = h.cfg.Health(ctx)
	}
	h.mu.Lock()
	undelivered, sockless, leases := len(h.ends), 0, 0
	var sockets []string
	for _, hd := range h.leases {
		switch hd.rec.Phase {
		case releasing:
			undelivered++
		case granted:
			if hd.rec.Lease.Host != h.cfg.Node {
				continue // not ours any more as soon as its node has it
			}
			leases++
			if hd.sock == nil {
				sockless++
			} else {
				sockets = append(sockets, h.socks.Path(hd.rec.Lease.ID))
			}
		}
	}
	h.mu.Unlock()
	for _, path := range sockets {
		if !exists(path) {
			sockless++ // somebody has removed it: who connected before goes on, and nobody else can
		}
	}
	if undelivered > 0 {
		checks = append(checks, rpc.Check{Name: "releases", Level: rpc.Warn, Text: plural(undelivered, "release") + " not delivered yet", Remedy: "they go out when their owners answer"})
	}
	if sockless > 0 {
		checks = append(checks, rpc.Check{Name: "sockets", Level: rpc.Fail, Node: true, Text: plural(sockless, "lease") + " without socket", Remedy: "they are made again within seconds if " + h.cfg.RunDir + " can be written; else see the log"})
	}
	return append(checks, rpc.Check{Name: "leases", Level: rpc.OK, Text: plural(leases, "lease") + " of this node's jobs"})
}

// answerOf is what one node says of itself, cut by believed, or why it does not answer.
type answerOf struct {
	node   string
	checks []rpc.Check
	err    error
}

// HealthAll implements rpc.LocalService. Owners let controllers ask, and nobody else.
func (h *Host) HealthAll(ctx context.Context, p rpc.Peer) (rpc.HealthAll, error) {
	if p.UID != 0 && p.UID != h.cfg.SlurmUser {
		return rpc.HealthAll{}, lease.Errorf(lease.Denied, "the health of all nodes is for root and SlurmUser; sluice health is for everybody")
	}
	if !h.healthAll.TryLock() {
		return rpc.HealthAll{}, lease.Errorf(lease.Down, "somebody else has all nodes asked at this moment; ask again in %v", healthAllTime)
	}
	defer h.healthAll.Unlock()
	return h.askHealth(ctx, h.inPools(), healthTime, healthAllTime), nil
}

// askHealth asks this node and the owners.
func (h *Host) askHealth(ctx context.Context, owners []Peer, one, all time.Duration) rpc.HealthAll {
	ctx, cancel := context.WithTimeoutCause(ctx, all, fmt.Errorf("the %v for all nodes are over", all))
	defer cancel()
	answers := make([]answerOf, 1, len(owners)+1)
	answers[0] = answerOf{node: h.cfg.Node}
	var peers []*peer
	for _, o := range owners {
		if o.Name == h.cfg.Node {
			continue
		}
		p, err := h.peer(o.Name, o.Addr)
		if err != nil {
			answers = append(answers, answerOf{node: o.Name, err: lease.Errorf(lease.Down, "%v", err)})
			continue
		}
		peers = append(peers, p)
	}
	// Those that answered last time come first: silence takes long.
	slices.SortStableFunc(peers, func(a, b *peer) int {
		away := func(p *peer) int {
			if p.down() != nil {
				return 1
			}
			return 0
		}
		return cmp.Compare(away(a), away(b))
	})
	begin := len(answers)
	for _, p := range peers {
		answers = append(answers, answerOf{node: p.name, err: lease.Errorf(lease.Down, "not asked within %v", all)})
	}
	gate := make(chan struct{}, healthAtOnce)
	var wg sync.WaitGroup
	wg.Go(func() {
		answers[0].checks, answers[0].err = within(ctx, one, func(ctx context.Context) ([]rpc.Check, error) { return believed(h.NodeHealth(ctx)), nil })
	})
	for i, p := range peers {
		a := &answers[begin+i]
		select {
		case gate <- struct{}{}:
		case <-ctx.Done():
			continue
		}
		wg.Go(func() {
			defer func() { <-gate }()
			a.checks, a.err = h.healthOf(ctx, p, one)
		})
	}
	wg.Wait()
	return foldHealth(answers)
}

// healthOf asks one owner, not through call, which says why.
func (h *Host) healthOf(ctx context.Context, p *peer, limit time.Duration) ([]rpc.Check, error) {
	checks, err := within(ctx, limit, func(ctx context.Context) ([]rpc.Check, error) {
		n, ok := p.owner.(rpc.NodeHealth)
		if !ok {
			return nil, lease.Errorf(lease.WrongPeer, "owner %s does not tell its health", p.name)
		}
		return n.Health(ctx, h.cfg.Node)
	})
	if err != nil {
		return nil, err
	}
	if len(checks) == 0 {
		return nil, lease.Errorf(lease.Internal, "an answer without any finding")
	}
	if v := p.version(); v != "" && v != h.cfg.Version {
		checks = append(checks, rpc.Check{Name: "version", Level: rpc.Warn, Text: fmt.Sprintf("runs sluice %s, and %s runs %s", v, h.cfg.Node, h.cfg.Version),
			Remedy: "finish the upgrade: the same packages on all nodes"})
	}
	return believed(checks), nil
}

// believed shortens a node's text and makes it printable. Failures come before warnings, and fewer warnings are kept. An unknown level
// counts as a failure.
func believed(checks []rpc.Check) []rpc.Check {
	var worst [maxChecks]rpc.Check // what of them is kept, and failures stand before warnings
	fails, warns, left := 0, 0, false
	for _, level := range []rpc.Level{rpc.Fail, rpc.Warn} {
		for _, c := range checks {
			if c.Level.Rank() != level.Rank() {
				continue
			}
			if fails+warns == maxChecks || level == rpc.Warn && warns == maxWarnings {
				left = true
				break
			}
			worst[fails+warns] = rpc.Check{Name: form.Line(c.Name, 64), Level: level, Text: form.Line(c.Text, maxFinding), Remedy: form.Line(c.Remedy, maxFinding), Node: c.Node}
			if level == rpc.Fail {
				fails++
			} else {
				warns++
			}
		}
	}
	out := slices.Clone(worst[:fails+warns])
	rpc.SortChecks(out)
	if left {
		out = append(out, rpc.Check{Name: "health", Level: rpc.Warn, Text: "more findings than one node is let tell", Remedy: "sluice health on the node"})
	}
	return out
}

// foldHealth sums up what nodes said. Of the findings that have no room it counts the different ones.
func foldHealth(answers []answerOf) rpc.HealthAll {
	all := rpc.HealthAll{Asked: len(answers)}
	at := map[rpc.Check]int{}
	out := map[rpc.Check]bool{} // left out
	differ := map[int]bool{}    // findings whose text is not the same on all nodes
	add := func(key, c rpc.Check, node string) {
		i, ok := at[key]
		switch {
		case !ok && len(all.Findings) == maxFindings:
			out[key] = true
			return
		case !ok:
			i = len(all.Findings)
			at[key] = i
			all.Findings = append(all.Findings, rpc.NodesCheck{Check: c})
		case all.Findings[i].Text != c.Text || all.Findings[i].Remedy != c.Remedy:
			differ[i] = true
		}
		if n := all.Findings[i].Nodes; len(n) == 0 || n[len(n)-1] != node { // a node may say it twice
			all.Findings[i].Nodes = append(n, node)
		}
	}
	for _, level := range []rpc.Level{rpc.Fail, rpc.Warn} {
		for _, a := range answers {
			if a.err != nil {
				if key, c := unheard(a.node, a.err); c.Level == level {
					add(key, c, a.node)
				}
				continue
			}
			for _, c := range a.checks {
				if c.Level == level {
					add(masked(c, a.node), c, a.node)
				}
			}
		}
	}
	for i := range differ {
		// The reason of a silent node has its name already.
		if f := &all.Findings[i]; !strings.Contains(f.Text, "("+f.Nodes[0]+": ") {
			f.Text += fmt.Sprintf(" (of %s; numbers differ)", f.Nodes[0])
		}
	}
	all.LeftOut = len(out)
	for _, a := range answers {
		switch {
		case a.err != nil:
			all.Unheard++
		case len(a.checks) == 0:
			all.Well++
		case a.checks[0].Level == rpc.Warn:
			all.Warned++
		default:
			all.Failed++
		}
	}
	slices.SortStableFunc(all.Findings, func(a, b rpc.NodesCheck) int {
		return cmp.Or(cmp.Compare(a.Level.Rank(), b.Level.Rank()), cmp.Compare(len(b.Nodes), len(a.Nodes)), strings.Compare(a.Name, b.Name))
	})
	return all
}

// number is what differs in the texts of several nodes besides their names: addresses, UUIDs, places on the bus, and
// numbers.
var number = pattern.New(`\d+\.\d+\.\d+\.\d+|\[[0-9a-f:.]+(%\w+)?\]|(GPU-|MIG-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|([0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9]|\d+`)

// mask is what texts of several nodes have in common.
func mask(text, node string) string {
	return number().ReplaceAllString(strings.ReplaceAll(text, node, "NODE"), "N")
}

// masked is what a finding has in common with those of other nodes.
func masked(c rpc.Check, node string) rpc.Check {
	c.Text, c.Remedy = mask(c.Text, node), mask(c.Remedy, node)
	return c
}

// unheard is the finding of a node that told nothing, and what it has in common with those of others: the text has
// the first one's own reason, with its name and address in it.
func unheard(node string, err error) (key, c rpc.Check) {
	why := form.Line(err.Error(), maxFinding)
	switch lease.CodeOf(err) {
	case lease.Down:
		c = rpc.Check{Name: "silent", Level: rpc.Fail, Text: "no answer", Remedy: "see that the node is up and that sluiced runs there; sluice health names the cause for each owner"}
	case lease.WrongPeer:
		c = rpc.Check{Name: "version", Level: rpc.Warn, Text: "does not know the question", Remedy: "install the same release of sluiced there"}
	case lease.Denied:
		c = rpc.Check{Name: "refused", Level: rpc.Warn, Text: "refuses to tell", Remedy: "ask on a controller's node: slurm.controllers in sluice.yaml of those nodes names it"}
	default:
		c = rpc.Check{Name: "unheard", Level: rpc.Fail, Text: "no usable answer", Remedy: "see the log of sluiced there"}
	}
	key = c
	key.Text += mask(why, node)
	c.Text += fmt.Sprintf(" (%s: %s)", node, why)
	return key, c
}
