package cli

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
)

// table writes rows under a head of columns.
func table(w io.Writer, head string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	write := func(cells []string) {
		for i, c := range cells {
			if i > 0 {
				_, _ = io.WriteString(tw, "\t")
			}
			_, _ = io.WriteString(tw, plain(c))
		}
		_, _ = io.WriteString(tw, "\n")
	}
	write(strings.Fields(head))
	for _, r := range rows {
		write(r)
	}
	return tw.Flush() // returns every earlier error too
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// plain returns a text that fits one cell of a table: names come from users' programs and from
// other machines.
func plain(s string) string { return cmp.Or(form.Printable(s), "-") }

// short returns the part of a lease's id that is enough to recognize it.
func short(id string) string { return id[:min(len(id), 12)] }

// since is the time since t, as d-hh:mm:ss; "-" for a time that is not set.
func since(now, t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return elapsed(now.Sub(t))
}

func elapsed(d time.Duration) string {
	s := max(int64(d/time.Second), 0)
	text := fmt.Sprintf("%d:%02d:%02d", s%86400/3600, s%3600/60, s%60)
	if days := s / 86400; days > 0 {
		text = fmt.Sprintf("%d-%02d:%02d:%02d", days, s%86400/3600, s%3600/60, s%60)
	}
	return text
}

// fractionText is a grant's share as a user asks for it: 50%:20G.
func fractionText(g lease.Grant) string {
	return fmt.Sprintf("%d%%:%s", g.Percent, form.ShortBytes(g.Mem))
}

func join[T any](in []T, text func(T) string) string {
	s := make([]string, len(in))
	for i, v := range in {
		s[i] = text(v)
	}
	return strings.Join(s, ",")
}

// total is the memory in use of a lease, all its grants together.
func total(use []lease.Use) (used, peak uint64) {
	for _, u := range use {
		used += u.Used
		peak += u.Peak
	}
	return used, peak
}
