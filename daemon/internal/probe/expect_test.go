package probe

import (
	"context"
	"math"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// good is a link of 1 Gb/s as a probe finds it.
func good() lease.Probe {
	end := lease.ProbeEnd{Device: "eth0", DeviceSpeed: 1e9, DeviceMTU: 1500, PathMTU: 1500, Segment: 1448, SendBuffer: 4 << 20, ReceiveBuffer: 4 << 20}
	flow := func(up bool, n uint32) lease.ProbeFlow {
		return lease.ProbeFlow{Up: up, Connections: n, Rate: 117e6, Low: 116e6, High: 118e6, Bytes: 117e6, Time: time.Second, Segments: 81000}
	}
	return lease.Probe{Node: "node01", Owner: "gpu01", Exchanges: 500, RoundTrip: 200 * time.Microsecond, RoundTripMedian: 230 * time.Microsecond, RoundTrip99: time.Millisecond,
		Flows: []lease.ProbeFlow{flow(true, 1), flow(false, 1), flow(true, 4), flow(false, 4)}, From: end, To: end}
}

func TestExpect(t *testing.T) {
	p := good()
	want := []string{
		"A call that waits takes 0.23 ms more than natively.",
		"Copies of pageable memory that does not compress: 117 MB/s to the GPU, 117 MB/s from it.",
		"A program that copies 19.3 MB of it to the GPU each step needs at least 165 ms a step.",
		"A model of 16 GiB takes at least 147 s to load.",
	}
	if got := Expect(&p); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if f := Findings(&p); f != nil {
		t.Errorf("a good link: %+v", f)
	}
	p.Flows[2].Rate, p.Bounded = 400e6, true
	got := strings.Join(Expect(&p), "\n")
	for _, w := range []string{"4 connections had 400 MB/s together", "a user's probe"} {
		if !strings.Contains(got, w) {
			t.Errorf("%q lacks %q", got, w)
		}
	}
	p.Flows[0].Time = judged - 1
	if got := Expect(&p); !strings.Contains(got[len(got)-1], "take too short a time to judge a rate; a probe by root sends more") {
		t.Errorf("%q", got)
	}
	p.Flows = nil // over too soon to say
	if got := Expect(&p); len(got) != 2 {
		t.Errorf("%q", got)
	}
	p = lease.Probe{Node: "gpu01", Owner: "gpu01", Local: true}
	if got := Expect(&p); len(got) != 1 || !strings.Contains(got[0], "this node") || Findings(&p) != nil {
		t.Errorf("%q", got)
	}
}

// Each finding is found, alone, and docs/probe.md explains it.
func TestFindings(t *testing.T) {
	page, err := os.ReadFile("../../../docs/probe.md")
	if err != nil {
		t.Fatal(err)
	}
	explained := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^## ([a-z]+)$`).FindAllStringSubmatch(string(page), -1) {
		explained[m[1]] = true
	}
	found := map[string]bool{}
	for _, c := range []struct {
		change func(p *lease.Probe)
		name   string
		text   string
	}{
		{func(p *lease.Probe) { p.Flows[0].Resent = 400 }, "loss", "0.25 % of the segments to gpu01 were sent again, 400 of 162000"},
		{func(p *lease.Probe) { p.Flows[3].Resent = 400 }, "loss", "from gpu01"},
		{func(p *lease.Probe) { p.Flows[0].Resent = 100 }, "", ""},
		{func(p *lease.Probe) { // 20 ms and 10 Gb/s
			p.RoundTripMedian, p.From.DeviceSpeed, p.To.DeviceSpeed = 20*time.Millisecond, 10e9, 10e9
			p.Flows[0].Rate, p.Flows[0].Low, p.Flows[0].High, p.Flows[2].Rate = 190e6, 180e6, 200e6, 700e6
			p.Flows[3].Rate = 700e6
		}, "window", "buffers of 4096 KiB, a round trip of 20.0 ms allows one no more than about 210 MB/s"},
		{func(p *lease.Probe) { p.Flows[0].Rate, p.Flows[0].Low, p.Flows[0].High = 40e6, 39e6, 41e6 }, "rate", "one connection had 40.0 MB/s to gpu01, and 4 had 117 MB/s"},
		{func(p *lease.Probe) { p.From.DeviceSpeed, p.To.DeviceSpeed = 10e9, 25e9 }, "rate", "4 connections had 117 MB/s to gpu01, and the slower interface has 1.25 GB/s"},
		{func(p *lease.Probe) { p.From.DeviceSpeed = 0; p.To.DeviceSpeed = 25e9 }, "", ""},
		{func(p *lease.Probe) { p.Flows[1].Low = 40e6 }, "unsteady", "the rate from gpu01 changed between 40.0 MB/s and 118 MB/s"},
		{func(p *lease.Probe) { p.Flows[1].Low, p.Flows[1].Time = 1, 50*time.Millisecond }, "", ""},
		{func(p *lease.Probe) { p.To.DeviceMTU = 9000 }, "mtu", "packets of 1500 bytes (node01) and of 9000 bytes (gpu01)"},
		{func(p *lease.Probe) { p.To.DeviceMTU, p.From.DeviceMTU = 9000, 9000 }, "mtu", "send packets of 9000 bytes, and the way between them lets 1500 through"},
	} {
		p := good()
		c.change(&p)
		f := Findings(&p)
		if c.name == "" {
			if f != nil {
				t.Errorf("%+v", f)
			}
			continue
		}
		names := map[string]bool{}
		var text string
		for _, x := range f {
			names[x.Name], found[x.Name] = true, true
			text += x.Text + "\n"
			if x.Remedy == "" {
				t.Errorf("%s has no remedy", x.Name)
			}
		}
		if len(names) != 1 || !names[c.name] || !strings.Contains(text, c.text) {
			t.Errorf("%+v, want %s: %s", f, c.name, c.text)
		}
	}
	for name := range found {
		if !explained[name] {
			t.Errorf("docs/probe.md has no heading %q", name)
		}
	}
	for name := range explained {
		if !found[name] {
			t.Errorf("docs/probe.md explains %q, which is never found", name)
		}
	}
}

func TestUnits(t *testing.T) {
	for n, want := range map[uint64]string{0: "-", 999: "1.00 kB/s", 12.5e6: "12.5 MB/s", 117e6: "117 MB/s", 999.6e6: "1.00 GB/s", 11.25e9: "11.2 GB/s", math.MaxUint64: "18446744074 GB/s"} {
		if got := Rate(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{0: "0.000 ms", 23 * time.Microsecond: "0.023 ms", 230 * time.Microsecond: "0.23 ms", 1400 * time.Microsecond: "1.40 ms", 165 * time.Millisecond: "165 ms", 2350 * time.Millisecond: "2.35 s"} {
		if got := Time(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

// steady is a flow of n samples, each d later with b bytes more.
func steady(n int, from, d time.Duration, b uint64) []sample {
	var out []sample
	for i := range n {
		out = append(out, sample{int64(from) + int64(i)*int64(d), uint64(i) * b})
	}
	return out
}

func TestRates(t *testing.T) {
	const ms = time.Millisecond
	slowStart := steady(101, 0, 10*ms, 1e6)
	for i := range 20 {
		slowStart[i].bytes = uint64(i) * 1e5
	}
	for i := 20; i < len(slowStart); i++ {
		slowStart[i].bytes = 2e6 + uint64(i-20)*1e6
	}
	slower := steady(101, 0, 10*ms, 1e6)
	for i := 51; i < len(slower); i++ {
		slower[i].bytes = slower[50].bytes + uint64(i-50)*2e5
	}
	for what, c := range map[string]struct {
		all       [][]sample
		rate      uint64
		low, high uint64
		time      time.Duration
	}{
		"steady":       {[][]sample{steady(101, 0, 10*ms, 1e6)}, 1e8, 1e8, 1e8, time.Second},
		"slow start":   {[][]sample{slowStart}, 1e8, 1e8, 1e8, time.Second},
		"two":          {[][]sample{steady(101, 0, 10*ms, 1e6), steady(101, 5*ms, 10*ms, 2e6)}, 3e8, 3e8, 3e8, 995 * ms},
		"one is short": {[][]sample{steady(101, 0, 10*ms, 1e6), steady(51, 0, 10*ms, 1e6)}, 2e8, 2e8, 2e8, 500 * ms},
		"it changes":   {[][]sample{slower}, 46666666, 2e7, 1e8, time.Second},
		"too short":    {[][]sample{steady(2, 0, ms, 1e6)}, 0, 0, 0, ms},
		"short":        {[][]sample{steady(3, 0, 10*ms, 1e6)}, 1e8, 0, 0, 20 * ms},
		"apart":        {[][]sample{steady(11, 0, 10*ms, 1e6), steady(11, time.Second, 10*ms, 1e6)}, 0, 0, 0, 0},
		"one sample":   {[][]sample{{{1, 1}}}, 0, 0, 0, 0},
		"none":         {[][]sample{nil, steady(11, 0, 10*ms, 1e6)}, 0, 0, 0, 0},
		"no flow":      {nil, 0, 0, 0, 0},
		"absurd":       {[][]sample{{{0, 0}, {1 << 62, 1 << 62}}, {{0, 0}, {1 << 62, 1 << 62}}}, 2e9, 2e9, 2e9, 1 << 62},
	} {
		var f lease.ProbeFlow
		rates(&f, c.all)
		near := func(a, b uint64) bool { return math.Abs(float64(a)-float64(b)) <= float64(b)/50 }
		if !near(f.Rate, c.rate) || f.Rate > c.rate || !near(f.Low, c.low) || !near(f.High, c.high) || f.Time != c.time {
			t.Errorf("%s: %+v, want %+v", what, f, c)
		}
	}
}

// However long a flow lasts, few samples are kept, the first and the last among them.
func TestSampler(t *testing.T) {
	s := sampler{every: int64(sampleTime)}
	const n = 100_000
	for i := range n {
		if at := int64(i) * int64(time.Millisecond); s.due(at) {
			s.add(at, uint64(i), false)
		}
	}
	s.add(n*int64(time.Millisecond), n, true)
	s.add(5, 7, true) // a clock that goes backwards
	if len(s.list) > maxSamples || s.list[0] != (sample{}) || s.list[len(s.list)-1] != (sample{n * int64(time.Millisecond), n}) {
		t.Errorf("%d samples from %+v to %+v", len(s.list), s.list[0], s.list[len(s.list)-1])
	}
	if _, err := decodeSamples(encodeSamples(s.list)); err != nil {
		t.Error(err)
	}
}

func TestState(t *testing.T) {
	s := state{lease.ProbeEnd{Device: "enp1s0f0np0abcd", DeviceSpeed: 1, DeviceMTU: 2, PathMTU: 3, Segment: 4, SendBuffer: 5, ReceiveBuffer: 6}, 7, 8}
	b := s.encode()
	if got := decodeState(b); len(b) != stateSize || got != s {
		t.Errorf("%d bytes: %+v", len(b), got)
	}
	copy(b[stateSize-nameSize:], "\x1b[2J\xff\n")
	if got := decodeState(b); strings.ContainsAny(got.end.Device, "\x1b\n") || !utf8.ValidString(got.end.Device) {
		t.Errorf("%q", got.end.Device)
	}
	if got := decodeState(b[1:]); got != (state{}) {
		t.Errorf("%+v", got)
	}
}

func TestSpeed(t *testing.T) {
	sys := t.TempDir()
	for device, text := range map[string]string{"eth0": "10000\n", "veth0": "-1\n", "odd": "fast\n", "large": "99999999999\n"} {
		if err := os.MkdirAll(sys+"/"+device, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(sys+"/"+device+"/speed", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for device, want := range map[string]uint64{"eth0": 10e9, "veth0": 0, "odd": 0, "large": 0, "gone": 0, "": 0} {
		if got := speed(sys, device); got != want {
			t.Errorf("%s: %d, want %d", device, got, want)
		}
	}
}

func TestGate(t *testing.T) {
	var g Gate
	enter := func(who string, uid uint32) func(Rests) {
		t.Helper()
		leave, busy := g.Enter(who, uid, time.Minute)
		if busy != nil {
			t.Fatalf("%s: %+v", who, busy)
		}
		return leave
	}
	leave := enter("a", 1000)
	if _, busy := g.Enter("b", 0, time.Minute); busy == nil || busy.Who != "a" || busy.Wait > time.Minute {
		t.Errorf("%+v", busy)
	}
	g.Await(t.Context(), "b", 0, time.Hour) // nobody knows when a leaves: no reason to wait
	leave(Rests{Users: time.Hour})
	if _, busy := g.Enter("b", 1000, time.Minute); busy == nil || busy.Who != "" || busy.Wait > time.Hour || busy.Wait < 59*time.Minute {
		t.Errorf("%+v", busy)
	}
	g.Await(t.Context(), "b", 1000, time.Minute) // longer than the patience
	next := enter("b", 0)
	leave(Rests{}) // again: it is b's now
	if _, busy := g.Enter("c", 0, time.Minute); busy == nil || busy.Who != "b" {
		t.Errorf("%+v", busy)
	}
	// One that leaves at once is waited for, and a short pause after it too.
	ending := make(chan struct{})
	g.leaves(ending)
	g.Await(t.Context(), "c", 0, time.Hour)
	over := make(chan struct{}, 2)
	wait := func(who string) {
		g.Await(t.Context(), who, 0, time.Hour)
		over <- struct{}{}
	}
	go wait("b")
	close(ending)
	go wait("c")
	next(Rests{All: time.Millisecond, Users: time.Hour})
	<-over
	<-over
	enter("c", 0)(Rests{All: time.Hour})
	if _, busy := g.Enter("d", 0, time.Minute); busy == nil || busy.Who != "" || busy.Wait < 59*time.Minute {
		t.Errorf("%+v", busy)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	g.Await(ctx, "d", 0, 2*time.Hour)
}

// A probe's pause is as long as what it did needs: none where no connection came, and a user's in proportion to how long it moved bytes.
func TestRests(t *testing.T) {
	ago := func(d time.Duration, moved int64, user bool) *Slot {
		s := &Slot{epoch: time.Now().Add(-d), took: moved >= 0, user: user}
		s.moved.Store(max(moved, 0))
		return s
	}
	for _, c := range []struct {
		s     *Slot
		all   time.Duration
		least time.Duration
	}{
		{ago(time.Minute, -1, true), 0, 0},
		{ago(time.Minute, 0, true), rest, 0},
		{ago(time.Second, int64(time.Second), true), rest, leastRest},
		{ago(13*time.Second, int64(time.Second), true), rest, 108 * time.Second},
		{ago(13*time.Second, int64(time.Second), false), rest, leastRest},
	} {
		if r := c.s.rests(); r.All != c.all || r.Users < c.least || r.Users > c.least+10*time.Minute {
			t.Errorf("%+v, want %v and %v", r, c.all, c.least)
		}
	}
}

// What a receiver notes after all has come says nothing of when it came.
func TestSettled(t *testing.T) {
	for _, c := range []struct{ list, want []sample }{
		{nil, nil},
		{[]sample{{1, 5}}, []sample{{1, 5}}},
		{[]sample{{1, 5}, {2, 5}}, []sample{{1, 5}, {2, 5}}},
		{[]sample{{1, 0}, {2, 5}, {90, 9}, {99, 9}}, []sample{{1, 0}, {2, 5}}},
		{[]sample{{1, 0}, {90, 9}, {99, 9}}, []sample{{1, 0}, {90, 9}}},
	} {
		if got := settled(c.list); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v", c.list, got)
		}
	}
}
