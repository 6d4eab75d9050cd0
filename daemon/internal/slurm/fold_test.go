package slurm

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"
)

func TestFoldHosts(t *testing.T) {
	for _, c := range []struct {
		in   []string
		want string
	}{
		{nil, ""},
		{[]string{"gpu01"}, "gpu01"},
		{[]string{"gpu03", "gpu01", "gpu02", "gpu02"}, "gpu[01-03]"},
		{[]string{"n8", "n9", "n10", "n12"}, "n[8-10,12]"},
		{[]string{"n08", "n09", "n10", "n12", "n100"}, "n100,n[08-10,12]"},
		{[]string{"login", "ctl", "n1"}, "ctl,login,n1"},
		{[]string{"r1n2", "r1n1", "r2n1"}, "r1n[1-2],r2n1"},
		{[]string{"n0", "n1", "n00", "n01"}, "n[0-1],n[00-01]"},
		{[]string{"a.b1.example", "a.b2.example"}, "a.b1.example,a.b2.example"},
		{[]string{"x12345678901234567890", "x12345678901234567891"}, "x12345678901[234567890-234567891]"},
	} {
		got := FoldHosts(c.in)
		back, err := ParseHosts(got)
		slices.Sort(back)
		if want := slices.Compact(slices.Sorted(slices.Values(c.in))); got != c.want || err != nil || !slices.Equal(back, want) {
			t.Errorf("%q: %s, want %s; read back %q, %v", c.in, got, c.want, back, err)
		}
	}
}

// What is folded is read back as it was.
func TestFoldHostsBack(t *testing.T) {
	for seed := range 2000 {
		r := rand.New(rand.NewSource(int64(seed)))
		var in []string
		for range 1 + r.Intn(20) {
			in = append(in, fmt.Sprintf("%s%0*d", []string{"n", "gpu", "r1n", "r01-"}[r.Intn(4)], r.Intn(4), r.Intn(120)))
		}
		text := FoldHosts(in)
		back, err := ParseHosts(text)
		slices.Sort(back)
		if want := slices.Compact(slices.Sorted(slices.Values(in))); err != nil || !slices.Equal(back, want) {
			t.Fatalf("%q: %s is %q, %v", want, text, back, err)
		}
	}
}

func TestDrainsWith(t *testing.T) {
	c, _ := commands(t, map[string]string{"scontrol": `cat <<'END'
NodeName=n1 Arch=x86_64 State=IDLE+DRAIN ThreadsPerCore=1 Reason=sluice: munge: gone [root@2026-11-23T06:00:00]
NodeName=n2 Arch=x86_64 State=IDLE ThreadsPerCore=1 Reason=sluice: was [root@2026-11-23T06:00:00]
NodeName=n3 Arch=x86_64 State=MIXED+DRAIN ThreadsPerCore=1 Reason=a fan [root@2026-11-23T06:00:00]
NodeName=n4 Arch=x86_64
no line of a node
END`})
	got, err := c.DrainsWith(t.Context(), "sluice: ")
	if err != nil || len(got) != 1 || got["n1"] != "sluice: munge: gone" {
		t.Errorf("%q, %v", got, err)
	}
}
