package probe

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// What the figures mean. Nothing is said that does not follow from what was measured.

const (
	// imageNet is a batch of 32 images of ImageNet, 3 x 224 x 224 values of float32, in bytes.
	imageNet = 32 * 3 * 224 * 224 * 4
	// model is the example of what is loaded, in bytes.
	model = 16 << 30

	// lossWarn is the part of the segments that are sent again from which that is a warning, if it were lossLeast.
	lossWarn  = 0.001
	lossLeast = 3
	// judged is the shortest flow whose rate is compared with anything.
	judged = 100 * time.Millisecond
)

// Find returns the flow in one direction, over one connection or over the most; nil if there was none.
func Find(p *lease.Probe, up, several bool) *lease.ProbeFlow {
	var found *lease.ProbeFlow
	for i := range p.Flows {
		f := &p.Flows[i]
		if f.Up != up || !several && f.Connections != 1 {
			continue
		}
		if found == nil || f.Connections > found.Connections {
			found = f
		}
	}
	return found
}

// Rate is bytes a second as people write it: 117 MB/s, 11.2 GB/s.
func Rate(n uint64) string {
	v, unit := float64(n)/1e6, "MB/s"
	switch {
	case n == 0:
		return "-"
	case v < 1:
		v, unit = v*1e3, "kB/s"
	case v >= 999.5:
		v, unit = v/1e3, "GB/s"
	}
	return digits(v) + " " + unit
}

// Time is a duration as people write it: 0.023 ms, 1.40 ms, 165 ms, 2.35 s.
func Time(d time.Duration) string {
	ms := float64(d) / float64(time.Millisecond)
	switch {
	case math.Abs(ms) >= 999.5:
		return digits(ms/1e3) + " s"
	case math.Abs(ms) < 0.1:
		return fmt.Sprintf("%.3f ms", ms)
	}
	return digits(ms) + " ms"
}

// digits are three that count.
func digits(v float64) string {
	switch a := math.Abs(v); {
	case a >= 99.95:
		return fmt.Sprintf("%.0f", v)
	case a >= 9.995:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func takes(bytes float64, rate uint64) string {
	return Time(time.Duration(min(bytes/float64(rate)*float64(time.Second), math.MaxInt64/2)))
}

// Expect says what a program may expect of the link, a sentence each.
func Expect(p *lease.Probe) []string {
	if p.Local {
		return []string{fmt.Sprintf("%s is this node: programs here reach it by a Unix socket and shared memory, and there is no link to measure.", p.Owner)}
	}
	said := []string{fmt.Sprintf("A call that waits takes %s more than natively.", Time(p.RoundTripMedian))}
	up, down := Find(p, true, false), Find(p, false, false)
	if up != nil && up.Rate > 0 && down != nil && down.Rate > 0 {
		said = append(said,
			fmt.Sprintf("Copies of pageable memory that does not compress: %s to the GPU, %s from it.", Rate(up.Rate), Rate(down.Rate)),
			fmt.Sprintf("A program that copies %.1f MB of it to the GPU each step needs at least %s a step.", imageNet/1e6, takes(imageNet, up.Rate)),
			fmt.Sprintf("A model of 16 GiB takes at least %s to load.", takes(model, up.Rate)))
	}
	most := Find(p, true, true)
	if up != nil && most != nil && up.Time >= judged && most.Time >= judged && most.Connections > 1 && most.Rate > up.Rate+up.Rate/4 {
		said = append(said, fmt.Sprintf("All that is over one connection. %d connections had %s together: several programs have that, and large copies of a program that uses bulk connections.", most.Connections, Rate(most.Rate)))
	}
	switch {
	case p.Bounded && slices.ContainsFunc(p.Flows, func(f lease.ProbeFlow) bool { return f.Time < judged }):
		said = append(said, "This was a user's probe. On a link as fast as this its few bytes take too short a time to judge a rate; a probe by root sends more.")
	case p.Bounded:
		said = append(said, "This was a user's probe, which is short; a probe by root measures longer.")
	}
	return said
}

// Findings are what is wrong with the link, the worst first. docs/probe.md has a heading for the name of each.
func Findings(p *lease.Probe) []rpc.Check {
	if p.Local {
		return nil
	}
	var out []rpc.Check
	for _, up := range []bool{true, false} {
		out = append(out, loss(p, up)...)
	}
	for _, up := range []bool{true, false} {
		out = append(out, slow(p, up)...)
	}
	return append(out, packets(p)...)
}

// way says in which direction, between which interfaces.
func way(p *lease.Probe, up bool) string {
	if up {
		return "to " + p.Owner
	}
	return "from " + p.Owner
}

// devices names the interfaces for a remedy.
func devices(p *lease.Probe) string {
	name := func(e lease.ProbeEnd, node string) string {
		if e.Device == "" {
			return "the interface of " + node
		}
		return e.Device + " of " + node
	}
	return name(p.From, p.Node) + " and " + name(p.To, p.Owner)
}

func loss(p *lease.Probe, up bool) []rpc.Check {
	var segments, resent uint64
	for _, f := range p.Flows {
		if f.Up == up {
			segments, resent = segments+f.Segments, resent+f.Resent
		}
	}
	if resent < lossLeast || float64(resent) < lossWarn*float64(segments) {
		return nil
	}
	return []rpc.Check{{Name: "loss", Level: rpc.Warn,
		Text:   fmt.Sprintf("%.2g %% of the segments %s were sent again, %d of %d", 100*float64(resent)/float64(max(segments, 1)), way(p, up), resent, segments),
		Remedy: "ethtool -S for errors and drops of " + devices(p) + ", and the counters of the switches between; a slower link on the way drops what its queue cannot hold"}}
}

// slow compares the rate of one connection with what its buffers, the interfaces and several connections would have.
func slow(p *lease.Probe, up bool) []rpc.Check {
	one, most := Find(p, up, false), Find(p, up, true)
	if one == nil || one.Rate == 0 || one.Time < judged {
		return nil
	}
	send, receive := p.From.SendBuffer, p.To.ReceiveBuffer
	if !up {
		send, receive = p.To.SendBuffer, p.From.ReceiveBuffer
	}
	window, windows := min(send, receive), uint64(math.MaxUint64) // what one connection can have at most
	if window > 0 && p.RoundTripMedian > 0 {
		windows = uint64(min(float64(window)/p.RoundTripMedian.Seconds(), mostRate))
	}
	several := most != nil && most.Connections > 1 && most.Time >= judged
	var out []rpc.Check
	switch {
	case several && one.Rate > windows/2 && most.Rate > one.Rate+one.Rate/4:
		out = append(out, rpc.Check{Name: "window", Level: rpc.Warn,
			Text: fmt.Sprintf("one connection had %s %s and %d had %s: with buffers of %d KiB, a round trip of %s allows one no more than about %s", Rate(one.Rate), way(p, up), most.Connections, Rate(most.Rate),
				window>>10, Time(p.RoundTripMedian), Rate(windows)),
			Remedy: "run a program's work in several processes, which have a connection each; sluiced needs CAP_NET_ADMIN on both nodes to set buffers of 4096 KiB"})
	case several && one.Rate < most.Rate/2:
		out = append(out, rpc.Check{Name: "rate", Level: rpc.Warn,
			Text:   fmt.Sprintf("one connection had %s %s, and %d had %s", Rate(one.Rate), way(p, up), most.Connections, Rate(most.Rate)),
			Remedy: "look for what slows a single connection: loss, a busy processor on either node (top), a bond or a switch that spreads connections"})
	}
	if device := deviceRate(p); device > 0 && several && most.Rate < min(device, windows)/2 {
		out = append(out, rpc.Check{Name: "rate", Level: rpc.Warn,
			Text:   fmt.Sprintf("%d connections had %s %s, and the slower interface has %s", most.Connections, Rate(most.Rate), way(p, up), Rate(device)),
			Remedy: "see what else uses the link (sluice top, sar -n DEV 1), and whether a slower link, a shaper or a busy processor is on the way from " + devices(p)})
	}
	if one.Low > 0 && one.Low < one.High/2 {
		out = append(out, rpc.Check{Name: "unsteady", Level: rpc.Warn,
			Text:   fmt.Sprintf("the rate %s changed between %s and %s while it was measured", way(p, up), Rate(one.Low), Rate(one.High)),
			Remedy: "probe again; others use the link, a node has no processor to spare, or segments are lost"})
	}
	return out
}

// deviceRate is that of the slower interface in bytes a second, 0 if it is not known.
func deviceRate(p *lease.Probe) uint64 {
	if p.From.DeviceSpeed == 0 || p.To.DeviceSpeed == 0 {
		return 0
	}
	return min(p.From.DeviceSpeed, p.To.DeviceSpeed) / 8
}

// packets compares what the interfaces and the path let through.
func packets(p *lease.Probe) []rpc.Check {
	from, to := p.From.DeviceMTU, p.To.DeviceMTU
	least := min(from, to)
	path := least
	for _, n := range []uint32{p.From.PathMTU, p.To.PathMTU} {
		if n > 0 {
			path = min(path, n)
		}
	}
	switch {
	case least == 0:
		return nil
	case from != to:
		return []rpc.Check{{Name: "mtu", Level: rpc.Warn,
			Text:   fmt.Sprintf("the interfaces send packets of %d bytes (%s) and of %d bytes (%s)", from, p.Node, to, p.Owner),
			Remedy: "ip link set DEV mtu to the same on " + devices(p) + ", which every switch between has to let through"}}
	case path < least:
		return []rpc.Check{{Name: "mtu", Level: rpc.Warn,
			Text:   fmt.Sprintf("the interfaces send packets of %d bytes, and the way between them lets %d through", least, path),
			Remedy: "let the switches and routers between " + devices(p) + " pass packets of that size, or lower it on both: ip link set DEV mtu"}}
	}
	return nil
}
