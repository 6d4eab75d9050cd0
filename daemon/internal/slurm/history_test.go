package slurm

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Jobs that ended within the time are told, whatever stands between their lines.
func TestPast(t *testing.T) {
	now := time.Now().Unix()
	line := func(id, name, state string, end int64, comment string) string {
		return fmt.Sprintf("%s|%s|alice|phys|%s|%d|%d|600|%s\n", id, name, state, end-600, end, comment)
	}
	text := line("7", "7", "COMPLETED", now-100, "sluice: asked 50%") +
		line("9", "8_3", "CANCELLED by 1000", now-50, "see ticket | 7; sluice: asked 5%") +
		"a comment's second line\n" +
		line("10", "10", "COMPLETED", now-9000, "sluice: too old") +
		line("11", "11", "COMPLETED", now+5, "sluice: too late") +
		"12|12|alice|phys|RUNNING|1|Unknown|7|\n" +
		"13|13|alice|phys|COMPLETED|1|then|7|\n" +
		"14|14|alice|phys|COMPLETED|1|2|-7|\n" +
		"; rm -rf|14|alice|phys|COMPLETED|1|2|7|\n" +
		strings.Repeat("x", maxRecord+1) + "\n" +
		line("15", "15+1", "FAILED", now-10, "JS1:abc") +
		"16|16|alice|phys|COMPL" // cut short
	c, asked := commands(t, map[string]string{"sacct": `test "$SLURM_TIME_FORMAT" = %s || exit 9` + "\ncat <<'END'\n" + text + "\nEND\nprintf cut"})
	var got []string
	uid := uint32(1000)
	damaged, err := c.Past(t.Context(), PastQuery{UID: &uid, Account: "phys", Since: time.Unix(now-1000, 0), Until: time.Unix(now, 0)}, func(p Past) {
		got = append(got, fmt.Sprint(p.ID, " ", p.Name, " ", p.User, " ", p.State, " ", p.Elapsed, " ", p.Comment))
	})
	want := []string{"7 7 alice COMPLETED 10m0s sluice: asked 50%", "9 8_3 alice CANCELLED 10m0s sluice: asked 5%", "15 15+1 alice FAILED 10m0s "}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v: %q, want %q", err, got, want)
	}
	if damaged != 7 {
		t.Errorf("%d damaged, want 7", damaged)
	}
	if a := asked(); !strings.Contains(a, "[--uid=1000] [--accounts=phys]") || !strings.Contains(a, "[--starttime=now-100") || strings.Contains(a, "allusers") {
		t.Error(a)
	}
	if _, err := c.Past(t.Context(), PastQuery{Since: time.Unix(now-1000, 0), Until: time.Now()}, func(Past) {}); err != nil || !strings.Contains(asked(), "[--allusers]") {
		t.Error(err)
	}
	c, _ = commands(t, map[string]string{"sacct": `echo "Slurm accounting storage is disabled" >&2; exit 1`})
	if _, err := c.Past(t.Context(), PastQuery{}, func(Past) {}); err == nil || !strings.Contains(err.Error(), "storage is disabled") {
		t.Error(err)
	}
}

// A command that says a line piece by piece is understood, and one without an end fills no memory.
func TestLineWriter(t *testing.T) {
	var got []string
	w := lineWriter{each: func(s string) { got = append(got, s) }}
	for _, p := range []string{"a", "b\nc\n\n", "", "d", "\n", "e"} {
		if n, err := w.Write([]byte(p)); n != len(p) || err != nil {
			t.Error(n, err)
		}
	}
	for range 100 {
		_, _ = w.Write(make([]byte, maxRecord/10))
	}
	if cap(w.part) > 4*maxRecord {
		t.Errorf("%d bytes kept", cap(w.part))
	}
	w.end()
	if !slices.Equal(got, []string{"ab", "c", "d"}) || w.lost != 1 {
		t.Errorf("%q, %d lost", got, w.lost)
	}
}

func TestRights(t *testing.T) {
	c, asked := commands(t, map[string]string{"sacctmgr": `case "$*" in *name=op*) echo 'Operator|';; *name=root*) echo 'Administrator|';; *name=pi*) echo 'None|phys,chem';; *name=alice*) echo 'None|';; esac`})
	for user, want := range map[string]string{"op": "{true []}", "root": "{true []}", "pi": "{false [phys chem]}", "alice": "{false []}", "nobody": "{false []}"} {
		if r, err := c.RightsOf(t.Context(), user); err != nil || fmt.Sprint(r) != want {
			t.Errorf("%s: %v, %v", user, r, err)
		}
	}
	asked()
	for _, bad := range []string{"", "a,op", "a b", "x=y"} {
		if _, err := c.RightsOf(t.Context(), bad); err == nil || asked() != "" {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
