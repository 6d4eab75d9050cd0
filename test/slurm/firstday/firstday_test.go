package firstday

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestFaults breaks the site in one way after the other. Each is named with its remedy, nothing else is said, and what was
// good before is good afterwards.
func TestFaults(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var rows []row
	for _, set := range [][]fault{fileFaults(), certificateFaults(), startFaults(), slurmFaults(), healthFaults(), networkFaults()} {
		for _, f := range set {
			ok := t.Run(strings.ReplaceAll(f.wrong, " ", "_"), func(t *testing.T) {
				b := r.begin(t)
				if said := b.tell(f); said != "" {
					rows = append(rows, row{f.wrong, f.tells, said})
				}
			})
			if !ok && t.Failed() && r.ctx.Err() != nil {
				t.Fatal(r.ctx.Err())
			}
		}
	}
	if len(rows) < 40 {
		t.Errorf("%d faults are named, want at least 40", len(rows))
	}
	page(t, rows)
}

// tell breaks the site, and returns what the command says of that.
func (r *rig) tell(f fault) string {
	r.t.Helper()
	f.do(r)
	said, others := "", []string(nil)
	for end := time.Now().Add(3 * time.Second); ; time.Sleep(200 * time.Millisecond) { // a daemon that ends is not gone at once
		said, others = r.sorted(f, r.ask(f.tells))
		if said != "" && len(others) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, s := range others {
		r.t.Errorf("%s also says: %s", f.tells, s)
	}
	if said == "" {
		r.t.Errorf("%s does not say %q with %q", f.tells, f.says, f.cure)
	}
	return said
}

// sorted returns what is said of the fault, and what else is said to be wrong.
func (r *rig) sorted(f fault, found []finding) (said string, others []string) {
	for _, x := range found {
		s := r.plain(x.String())
		switch {
		case x.Level == "ok" || slices.Contains(usual, x.Name):
		case said == "" && strings.Contains(s, f.says) && strings.Contains(s, f.cure):
			said = s
		case f.also != "" && strings.Contains(s, f.also):
		default:
			others = append(others, s)
		}
	}
	return said, others
}

// TestGood: a site where nothing is wrong is told of nothing, by each command on each node.
func TestGood(t *testing.T) {
	t.Parallel()
	r := newRig(t).begin(t)
	for _, tells := range []string{check, health, slurmCheck} {
		for _, n := range []*lab.Node{r.Ctl, r.own, r.job} {
			r.at = n
			if _, others := r.sorted(fault{says: "nothing"}, r.ask(tells)); len(others) > 0 {
				t.Errorf("%s on %s: %s", tells, r.plain(n.Name), strings.Join(others, "\n"))
			}
		}
	}
}

// usual are findings of a good site of this test's: it has no slurmdbd.
var usual = []string{"accounting", "silence"}

type row struct{ wrong, tells, said string }

const (
	pagePath = "../../../docs/troubleshooting.md"
	begins   = "<!-- made by test/slurm/firstday -->\n"
	ends     = "<!-- end -->\n"
)

// page compares the table of docs/troubleshooting.md with what was said, or with SLUICE_WRITE_PAGES=1 writes it. What other
// releases of Slurm than that of Debian 12 say is looked at, and may differ.
func page(t *testing.T, rows []row) {
	t.Helper()
	var b strings.Builder
	b.WriteString("| wrong | told by | what it says |\n|---|---|---|\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s | `%s` | `%s` |\n", r.wrong, r.tells, strings.NewReplacer("`", "'", "|", "\\|", "\n", " ").Replace(r.said))
	}
	text, err := os.ReadFile(pagePath)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), begins)
	was, tail, end := strings.Cut(rest, ends)
	switch {
	case !ok || !end:
		t.Fatalf("%s has no block made by this test", pagePath)
	case was == b.String() || os.Getenv("SLUICE_SLURM_ROOT") != "":
	case os.Getenv("SLUICE_WRITE_PAGES") != "":
		if err := os.WriteFile(pagePath, []byte(head+begins+b.String()+ends+tail), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		for line := range strings.Lines(b.String()) {
			if !strings.Contains(was, line) {
				t.Errorf("%s lacks: %s", pagePath, line)
			}
		}
		t.Errorf("%s differs from what is said; SLUICE_WRITE_PAGES=1 go test ./test/slurm/firstday writes it", pagePath)
	}
}
