package host

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// What health says of the owners: why one does not answer and what to do about it, whose program is of another
// version, and how far the clocks are apart.

const (
	// clockWarn and clockFail are differences of clocks. A ticket for a session lives some seconds, and munge refuses what is older than minutes.
	clockWarn = 5 * time.Second
	clockFail = 60 * time.Second
	// clockOld is the age of an answer from which the clock is not judged any more.
	clockOld = time.Hour
	// lookupTime bounds a look for an owner's address.
	lookupTime = 2 * time.Second
)

// away returns the remedy for an owner that does not answer for the reason err.
func (p *peer) away(ctx context.Context, err error) string {
	name, port, _ := net.SplitHostPort(p.addr)
	said := strings.ToLower(err.Error())
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(said, w) })
	}
	switch {
	case has("auth must be the same", "see pools in sluice.yaml", "must agree", "run the same version"):
		return "" // the text has it
	case has("own credential: munge"):
		return "systemctl status munge on this node"
	case has("expired credential", "rewound credential"):
		return "set the clocks of this node and of " + p.name + " by NTP: chronyc tracking"
	case has("credential refused", "invalid credential"):
		return "the munge keys of this node and of " + p.name + " must be equal: compare sha256sum /etc/munge/munge.key, and restart munged where it differs; and their clocks at most 5 minutes apart: chronyc tracking"
	case has("no such host", "dial tcp: lookup "):
		return "correct the name in pools, /etc/hosts or DNS; or write it as " + p.name + "=ADDRESS:" + port
	}
	if ip := loopback(ctx, name); ip != "" && !p.local {
		return name + " is " + ip + " on this node, which is the node itself: correct /etc/hosts here, or write " + p.name + "=ADDRESS:" + port + " in pools"
	}
	switch {
	case has("connection refused"):
		return "nothing listens at " + p.addr + ": start sluiced on " + p.name + " (systemctl status sluiced), or correct the port in pools"
	case has("no answer within", "deadline", "timeout", "timed out", "no route", "unreachable"):
		return "see that " + p.name + " is up, and that no firewall drops packets to its ports " + port + " and that of listen.data"
	}
	return "see that sluiced runs on " + p.name + " and that its control port can be reached"
}

// loopback returns the address of this machine that name has, "" if it has another or none. Installers write
// such a line for the machine's own name, and images carry it to other machines.
func loopback(ctx context.Context, name string) string {
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	ips, err := net.DefaultResolver.LookupIP(ctx, "ip", name)
	if err != nil || net.ParseIP(name) != nil || name == "localhost" {
		return ""
	}
	for _, ip := range ips {
		if ip.IsLoopback() {
			return ip.String()
		}
	}
	return ""
}

// skew is what an owner's last answer said of its clock.
type skew struct {
	owner string
	ahead time.Duration // of this node's
}

// heardClock remembers the owner's clock. The answer was on its way for an unknown part of the time since asked,
// so a difference smaller than that is none.
func (p *peer) heardClock(asked, now, theirs time.Time) {
	if theirs.IsZero() {
		return
	}
	half := now.Sub(asked) / 2
	d := theirs.Sub(asked.Add(half))
	if d.Abs() <= half {
		d = 0
	}
	p.ahead, p.clockAt = d, now
}

// clockOf returns what is known of the owner's clock.
func (p *peer) clockOf(now time.Time) (skew, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return skew{p.name, p.ahead}, !p.clockAt.IsZero() && now.Sub(p.clockAt) < clockOld
}

// clocks says whose clock is wrong. If this node differs in the same way from most of at least three
// owners it is this node's; from one or two nobody can tell.
func clocks(all []skew) []rpc.Check {
	if len(all) == 0 {
		return nil
	}
	slices.SortFunc(all, func(a, b skew) int { return cmp.Or(cmp.Compare(a.ahead, b.ahead), strings.Compare(a.owner, b.owner)) })
	median := all[len(all)/2].ahead
	level := func(d time.Duration) rpc.Level {
		switch {
		case d.Abs() >= clockFail:
			return rpc.Fail
		case d.Abs() >= clockWarn:
			return rpc.Warn
		}
		return rpc.OK
	}
	const remedy = "set the clocks by NTP: chronyc tracking, timedatectl"
	if l := level(median); l != rpc.OK && len(all) >= 3 {
		return []rpc.Check{{Name: "clock", Level: l, Node: l == rpc.Fail, Remedy: remedy + " on this node",
			Text: fmt.Sprintf("this node's clock is %s most of %d owners'", behind(median), len(all))}}
	}
	var out []rpc.Check
	for _, c := range all {
		if l := level(c.ahead); l != rpc.OK {
			text := fmt.Sprintf("this node's clock is %s that of %s", behind(c.ahead), c.owner)
			out = append(out, rpc.Check{Name: "clock", Level: l, Text: text, Remedy: remedy + " on both"})
		}
	}
	if len(out) == 0 {
		out = append(out, rpc.Check{Name: "clock", Level: rpc.OK, Text: fmt.Sprintf("as those of %s", plural(len(all), "owner"))})
	}
	return out
}

// behind says where this node's clock is if the other's is ahead by d.
func behind(d time.Duration) string {
	word := "behind"
	if d < 0 {
		word = "ahead of"
	}
	return fmt.Sprintf("%v %s", d.Abs().Round(time.Second), word)
}

// ownerChecks are the findings about the owners.
func (h *Host) ownerChecks(ctx context.Context, peers []*peer) []rpc.Check {
	var out []rpc.Check
	var known []skew
	now := time.Now()
	large, answer := h.large(), 0
	for _, p := range peers {
		if large && p.down() == nil && (p.version() == "" || p.version() == h.cfg.Version) { // thousands of lines say nothing
			if p.version() != "" {
				answer++
			}
			if k, ok := p.clockOf(now); ok && !p.local {
				known = append(known, k)
			}
			continue
		}
		c := rpc.Check{Name: "owner " + p.name, Level: rpc.OK, Text: "answers"}
		if err := p.down(); err != nil {
			c.Level, c.Text, c.Remedy = rpc.Fail, err.Error(), p.away(ctx, err)
		} else if v := p.version(); v != "" && v != h.cfg.Version {
			c.Level, c.Remedy = rpc.Warn, "finish the upgrade: the same packages on all nodes; until then a function that one side does not know is refused"
			c.Text = fmt.Sprintf("runs sluice %s, and this node %s", v, h.cfg.Version)
		}
		out = append(out, c)
		if k, ok := p.clockOf(now); ok && !p.local {
			known = append(known, k)
		}
	}
	if large {
		text := fmt.Sprintf("%d of %d have answered; the others were not asked anything yet", answer, len(h.inPools()))
		out = append(out, rpc.Check{Name: "owners", Level: rpc.OK, Text: text})
	}
	return append(out, clocks(known)...)
}

// version is that of the owner's last answer.
func (p *peer) version() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.inv.Version
}
