package host

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// A clock is blamed only where the owners agree.
func TestClocks(t *testing.T) {
	s := func(ahead ...time.Duration) (out []skew) {
		for i, d := range ahead {
			out = append(out, skew{string(rune('a' + i)), d})
		}
		return out
	}
	for _, c := range []struct {
		have  []skew
		level rpc.Level
		node  bool
		text  string
		many  int
	}{
		{nil, "", false, "", 0},
		{s(0, time.Second, -time.Second), rpc.OK, false, "3 owners", 1},
		{s(90 * time.Second), rpc.Fail, false, "1m30s behind that of a", 1},
		{s(-90*time.Second, -91*time.Second), rpc.Fail, false, "ahead of that of", 2},
		{s(-90*time.Second, -91*time.Second, 0), rpc.Fail, true, "this node's clock is 1m30s ahead of most of 3 owners'", 1},
		{s(0, 0, 0, 70*time.Second), rpc.Fail, false, "1m10s behind that of d", 1},
		{s(6*time.Second, 6*time.Second, 6*time.Second), rpc.Warn, false, "6s behind most", 1},
	} {
		got := clocks(c.have)
		if len(got) != c.many {
			t.Errorf("%v: %d findings, want %d: %v", c.have, len(got), c.many, got)
			continue
		}
		if c.many > 0 && (got[0].Level != c.level || got[0].Node != c.node || !strings.Contains(got[0].Text, c.text) || c.level != rpc.OK && got[0].Remedy == "") {
			t.Errorf("%v: %+v, want %s %v %q", c.have, got[0], c.level, c.node, c.text)
		}
	}
}

// An answer that was long on its way says little of the clock.
func TestClockOnItsWay(t *testing.T) {
	now := time.Now()
	for _, c := range []struct{ trip, ahead, want time.Duration }{
		{2 * time.Millisecond, time.Minute, time.Minute},
		{20 * time.Second, 9 * time.Second, 0},
		{20 * time.Second, -time.Minute, -time.Minute},
		{20 * time.Second, 11 * time.Second, 11 * time.Second},
	} {
		p := &peer{name: "a"}
		p.heardClock(now, now.Add(c.trip), now.Add(c.trip/2+c.ahead))
		if got, ok := p.clockOf(now.Add(c.trip)); !ok || got.ahead != c.want {
			t.Errorf("%v on its way, %v ahead: %v, %v", c.trip, c.ahead, got.ahead, ok)
		}
	}
	p := &peer{}
	p.heardClock(now, now, time.Time{}) // an older owner says nothing
	if _, ok := p.clockOf(now); ok {
		t.Error("a clock that was never told is known")
	}
}
