package audittest

import (
	"errors"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// History sees each of the wrongs that it is for.
func TestHistory(t *testing.T) {
	on := func(event, id, key string, percent uint32) audit.Event {
		return audit.Event{Event: event, Lease: id, Key: key, GPUs: []lease.Grant{{GPU: "g", Percent: percent, Mem: uint64(percent)}}}
	}
	over := on(audit.Release, "a", "j", 50)
	over.Over = true
	open := audit.Event{Event: audit.SessionOpen, Lease: "a", Session: "s"}
	end := audit.Event{Event: audit.SessionEnd, Lease: "a", Session: "s"}
	r := Rules{Mem: map[string]uint64{"g": 90}, Final: true}
	for _, c := range []struct {
		name  string
		lines []audit.Event
		want  string // "" for a good history
	}{
		{"good", []audit.Event{on(audit.Reserve, "a", "j", 50), on(audit.Grant, "a", "j", 50), open, on(audit.Grant, "b", "k", 40), end, over, on(audit.Grant, "c", "l", 50), on(audit.Reclaim, "c", "l", 50), on(audit.Release, "b", "k", 40)}, ""},
		{"reserved and let go", []audit.Event{on(audit.Reserve, "a", "j", 50), on(audit.Reclaim, "a", "j", 50), on(audit.Grant, "b", "j", 50), on(audit.Release, "b", "j", 50)}, ""},
		{"reservation not seen", []audit.Event{on(audit.Reclaim, "a", "j", 50)}, ""},
		{"percent", []audit.Event{on(audit.Grant, "a", "j", 51), on(audit.Reserve, "b", "k", 50)}, "101%"},
		{"memory", []audit.Event{on(audit.Grant, "a", "j", 50), on(audit.Grant, "b", "k", 45)}, "95 of 90"},
		{"twice granted", []audit.Event{on(audit.Grant, "a", "j", 5), on(audit.Grant, "a", "j", 5)}, "granted twice"},
		{"twice ended", []audit.Event{on(audit.Grant, "a", "j", 5), on(audit.Release, "a", "j", 5), on(audit.Reclaim, "a", "j", 5)}, "ended twice"},
		{"never ended", []audit.Event{on(audit.Grant, "a", "j", 5)}, "no end"},
		{"after its end", []audit.Event{on(audit.Release, "a", "j", 5), on(audit.Grant, "a", "j", 5)}, "after its end"},
		{"over", []audit.Event{on(audit.Grant, "a", "j", 50), over, on(audit.Grant, "b", "j", 5)}, "key was over"},
		{"no lease", []audit.Event{open}, "outside"},
		{"reserved only", []audit.Event{on(audit.Reserve, "a", "j", 5), open}, "outside"},
		{"another owner's", []audit.Event{{Event: audit.Grant, Lease: "a", Owner: "x"}}, ""},
		{"outlived", []audit.Event{on(audit.Grant, "a", "j", 5), open, on(audit.Release, "a", "j", 5)}, "still live"},
	} {
		errs := History(c.lines, r)
		if c.want == "" && len(errs) > 0 || c.want != "" && (len(errs) == 0 || !strings.Contains(errors.Join(errs...).Error(), c.want)) {
			t.Errorf("%s: %v, want %q", c.name, errs, c.want)
		}
	}
}
