package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// patient is an owner that tells its health.
type patient struct {
	lease.Owner
	tell func(ctx context.Context, host string) ([]rpc.Check, error)
}

func (p patient) Health(ctx context.Context, host string) ([]rpc.Check, error) {
	return p.tell(ctx, host)
}

func told(cs ...rpc.Check) func(context.Context, string) ([]rpc.Check, error) {
	return func(_ context.Context, host string) ([]rpc.Check, error) {
		if host != "node1" {
			return nil, lease.Errorf(lease.Denied, "not for %s", host)
		}
		return append([]rpc.Check{{Name: "audit", Level: rpc.OK, Text: "7 lines written"}}, cs...), nil
	}
}

func fails(code lease.Code, text string) func(context.Context, string) ([]rpc.Check, error) {
	return func(context.Context, string) ([]rpc.Check, error) { return nil, lease.Errorf(code, "%s", text) }
}

func mute(context.Context, string) ([]rpc.Check, error) { select {} }

// ward is a site whose owners are patients.
func ward(t *testing.T, all map[string]func(context.Context, string) ([]rpc.Check, error)) *site {
	t.Helper()
	var owners []*fakeOwner
	for name := range all {
		owners = append(owners, newFake(name, 1))
	}
	s := newSite(t, owners...)
	s.end()
	s.cfg.DialOwner = func(name, _ string) (lease.Owner, error) {
		if strings.HasPrefix(name, "gone") {
			return nil, errors.New("its name has no address")
		}
		if all[name] == nil {
			return s.owners[name], nil // of a release without the question
		}
		return patient{s.owners[name], all[name]}, nil
	}
	s.cfg.SlurmUser = 64030
	s.start()
	return s
}

// word is a different text for each i, without a number in it.
func word(i int) string {
	return strings.Map(func(r rune) rune { return r - '0' + 'a' }, fmt.Sprint(i))
}

func TestHealthAll(t *testing.T) {
	disk := rpc.Check{Name: "disk", Level: rpc.Warn, Text: "is full", Remedy: "make room"}
	var many []rpc.Check
	for i := range 3 * maxChecks {
		many = append(many, rpc.Check{Name: "x", Level: rpc.Warn, Text: word(i)})
	}
	many = append(many, rpc.Check{Name: strings.Repeat("n", 1<<10), Level: "\x1b[31mon fire", Text: "a\nb\x1b[2J" + strings.Repeat("t", 1<<16), Remedy: strings.Repeat("r", 1<<16)})
	s := ward(t, map[string]func(context.Context, string) ([]rpc.Check, error){
		"gpu01": told(), "gpu02": told(disk), "gpu03": told(disk, disk), "gpu04": told(rpc.Check{Name: "gpu", Level: rpc.Fail, Text: "lost"}),
		"gpu05": mute, "gpu06": fails(lease.Down, "owner gpu06 cannot be asked: dial tcp 10.77.0.6:7071: refused"), "gpu07": fails(lease.Down, "owner gpu07 cannot be asked: dial tcp 10.77.0.17:7071: refused"), "gpu08": fails(lease.Denied, "no \x1b[2J\xff"),
		"gpu09": nil, "gpu10": func(context.Context, string) ([]rpc.Check, error) { return nil, nil }, "gpu11": told(many...),
		"gone12": told(),
	})
	all := s.askHealth(t.Context(), s.Host.inPools(), 2*time.Second, 10*time.Second) // the silent one never answers
	if !slices.ContainsFunc(all.Findings, func(f rpc.NodesCheck) bool {
		return f.Name == "silent" && strings.Contains(f.Text, "(gpu06: owner gpu06 cannot be asked: dial tcp 10.77.0.6:7071: refused)")
	}) {
		t.Errorf("no reason of a silent node in %+v", all.Findings)
	}
	if all.Asked != 13 || all.Well != 2 || all.Warned != 2 || all.Failed != 2 || all.Unheard != 7 || all.LeftOut != 0 {
		t.Errorf("%+v", all)
	}
	of := map[string]string{}
	for i, f := range all.Findings {
		if len(f.Name) > 64 || len(f.Text) > 2*maxFinding || len(f.Remedy) > maxFinding || f.Level != rpc.Fail && f.Level != rpc.Warn {
			t.Errorf("%.200q: %d, %d, %d bytes", f.Level, len(f.Name), len(f.Text), len(f.Remedy))
		}
		if strings.ContainsFunc(f.Name+f.Text+f.Remedy, unicode.IsControl) {
			t.Errorf("%q %q %q", f.Name, f.Text, f.Remedy)
		}
		if i > 0 && f.Level.Rank() < all.Findings[i-1].Level.Rank() {
			t.Errorf("%s comes after %s", f.Level, all.Findings[i-1].Level)
		}
		of[string(f.Level)+" "+f.Name+" "+strings.Join(f.Nodes, ",")] = f.Text
	}
	for _, want := range []string{
		"warn disk gpu02,gpu03", "fail gpu gpu04", "fail silent gpu05", "fail silent gpu06,gpu07", "warn refused gpu08", "warn version gpu09", "fail unheard gpu10", "warn health gpu11", "fail silent gone12",
	} {
		if of[want] == "" {
			t.Errorf("no %q in %q", want, of)
		}
	}
	if n := len(all.Findings); n != 8+1+maxWarnings+1 {
		t.Errorf("%d findings", n)
	}
	// A health check that hangs does not keep leases from the owner, nor does one that fails.
	for _, name := range []string{"gpu05", "gpu06"} {
		if p := s.known(name); p == nil || p.down() != nil {
			t.Errorf("%s is left out of placement", name)
		}
	}
}

// The time for all nodes is bounded, however many are silent.
func TestHealthAllTime(t *testing.T) {
	all := map[string]func(context.Context, string) ([]rpc.Check, error){}
	for i := range 3 * healthAtOnce {
		all[fmt.Sprintf("n%d", i)] = mute
	}
	s := ward(t, all)
	got := s.askHealth(t.Context(), s.Host.inPools(), 2*time.Second, 3*time.Second)
	silent := 0
	for _, f := range got.Findings { // no answer in its own time, none in that of all, not asked any more
		silent += len(f.Nodes)
	}
	if got.Asked != len(all)+1 || got.Unheard != len(all) || len(got.Findings) > 3 || silent != len(all) {
		t.Errorf("%d asked, %d unheard, %d of them in %d findings", got.Asked, got.Unheard, silent, len(got.Findings))
	}
}

// Only root and SlurmUser ask all nodes, one at a time.
func TestHealthAllPrivacy(t *testing.T) {
	s := ward(t, map[string]func(context.Context, string) ([]rpc.Check, error){"gpu01": told()})
	for uid, want := range map[uint32]lease.Code{0: "", 64030: "", 1000: lease.Denied, 65534: lease.Denied} {
		all, err := s.HealthAll(t.Context(), rpc.Peer{UID: uid})
		if got := lease.CodeOf(err); err != nil && got != want || err == nil && want != "" || want != "" && all.Asked > 0 {
			t.Errorf("uid %d: %v, want %q", uid, err, want)
		}
	}
	s.healthAll.Lock()
	defer s.healthAll.Unlock()
	if _, err := s.HealthAll(t.Context(), rpc.Peer{}); lease.CodeOf(err) != lease.Down || !strings.Contains(err.Error(), "ask again") {
		t.Error(err)
	}
}

// Nodes that say ever new things do not fill the memory.
func TestFoldHealthBounded(t *testing.T) {
	var answers []answerOf
	for i := range 2 * maxFindings {
		answers = append(answers, answerOf{node: fmt.Sprint("n", i), checks: []rpc.Check{{Name: "x", Level: rpc.Fail, Text: word(i)}}})
	}
	all := foldHealth(answers)
	if len(all.Findings) != maxFindings || all.LeftOut != maxFindings || all.Failed != 2*maxFindings {
		t.Errorf("%d findings, %d left out, %d failed", len(all.Findings), all.LeftOut, all.Failed)
	}
}

// A failure of the last node is told, however many warnings those before it have.
func TestFoldHealthFailuresFirst(t *testing.T) {
	var answers []answerOf
	for i := range 2 * maxFindings {
		c := rpc.Check{Name: "x", Level: rpc.Warn, Text: word(i)}
		answers = append(answers, answerOf{node: "left", checks: []rpc.Check{c}}, answerOf{node: "right", checks: []rpc.Check{c}})
	}
	answers = append(answers, answerOf{node: "last", checks: []rpc.Check{{Name: "gpu", Level: rpc.Fail, Text: "lost"}}}, answerOf{node: "dead", err: lease.Errorf(lease.Down, "dead")})
	all := foldHealth(answers)
	if len(all.Findings) != maxFindings || all.Findings[0].Name != "gpu" || all.Findings[1].Name != "silent" || all.Findings[2].Level != rpc.Warn {
		t.Errorf("%d findings, %+v", len(all.Findings), all.Findings[:3])
	}
	if all.LeftOut != maxFindings+2 || all.Warned != 4*maxFindings || all.Failed != 1 || all.Unheard != 1 {
		t.Errorf("%d different ones left out, %d warned, %d failed, %d unheard", all.LeftOut, all.Warned, all.Failed, all.Unheard)
	}
}

// What differs in numbers, UUIDs and the nodes' own names is one finding, with the first one's text; other words are another.
func TestFoldHealthNumbers(t *testing.T) {
	of := func(node, text, remedy string) answerOf {
		return answerOf{node: node, checks: believed([]rpc.Check{{Name: "x", Level: rpc.Warn, Text: text, Remedy: remedy}})}
	}
	for _, c := range []struct {
		answers []answerOf
		want    string
	}{
		{[]answerOf{of("n1", "/var has 200 MiB free", "make room"), of("n2", "/var has 13 MiB free", "make room")}, "/var has 200 MiB free (of n1; numbers differ)"},
		{[]answerOf{of("n1", "/var has 200 MiB free", "make room"), of("n2", "/var has 200 MiB free", "make room")}, "/var has 200 MiB free"},
		{[]answerOf{of("anna", "GPU-0a1b2c3d-0000-1111-2222-abcdefabcdef (0): hot", "sluice resume anna:0"), of("berta", "GPU-ffffffff-0000-1111-2222-abcdefabcdea (3): hot", "sluice resume berta:3")},
			"GPU-0a1b2c3d-0000-1111-2222-abcdefabcdef (0): hot (of anna; numbers differ)"},
		{[]answerOf{of("n1", "bus 00000000:3B:00.0", ""), of("n2", "bus 00000000:AF:00.0", "")}, "bus 00000000:3B:00.0 (of n1; numbers differ)"},
		{[]answerOf{of("n1", "/var has 200 MiB free", ""), of("n2", "/tmp has 200 MiB free", "")}, ""},
		{[]answerOf{of("n1", "/var has 200 MiB free", ""), of("n2", "/var has 200 MiB free", "make room")}, ""},
	} {
		all := foldHealth(c.answers)
		if c.want == "" && len(all.Findings) == 2 {
			continue
		}
		if len(all.Findings) != 1 || all.Findings[0].Text != c.want || len(all.Findings[0].Nodes) != 2 {
			t.Errorf("%+v, want %q", all.Findings, c.want)
		}
	}
}

// Of what a node says only so much is kept, and its failures are among it.
func TestBelievedBounded(t *testing.T) {
	many := make([]rpc.Check, 1<<16)
	for i := range many {
		many[i].Level = rpc.Warn
	}
	many[len(many)-1] = rpc.Check{Name: "gpu", Level: rpc.Fail, Text: "lost"}
	if got := believed(many); len(got) != 1+maxWarnings+1 || cap(got) > 2*maxChecks || got[0].Name != "gpu" || got[len(got)-1].Name != "health" {
		t.Errorf("%d kept: %+v", len(got), got)
	}
	for i := range many {
		many[i].Level = rpc.Fail
	}
	if got := believed(many); len(got) != maxChecks+1 {
		t.Errorf("%d kept", len(got))
	}
	if got := believed(many[:maxChecks]); len(got) != maxChecks {
		t.Errorf("%d kept", len(got))
	}
}

// A health check of this node that hangs is a finding too, and the next question is answered.
func TestHealthAllHangs(t *testing.T) {
	s := ward(t, map[string]func(context.Context, string) ([]rpc.Check, error){"gpu01": told()})
	s.end()
	s.cfg.Health = func(context.Context) []rpc.Check { select {} }
	s.start()
	for range 2 {
		all := s.askHealth(t.Context(), s.Host.inPools(), 2*time.Second, 10*time.Second)
		if all.Asked != 2 || all.Well != 1 || all.Unheard != 1 || len(all.Findings) != 1 || all.Findings[0].Nodes[0] != "node1" {
			t.Errorf("%+v", all)
		}
	}
}
