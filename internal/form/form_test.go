package form

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sluice-hpc/sluice/internal/form/formtest"
)

func TestLeaseID(t *testing.T) {
	for range 100 {
		id := NewLeaseID()
		if got, err := ParseLeaseID(id); err != nil || string(got) != id || !got.Valid() {
			t.Fatalf("%q is not taken: %v", id, err)
		}
	}
	good := strings.Repeat("0a", 16)
	for _, bad := range []string{"", good[1:], good + "0", good[1:] + "g", good[1:] + "A", good[1:] + "\n", good + "\n", "../" + good[3:], " " + good[1:]} {
		if _, err := ParseLeaseID(bad); LeaseID(bad).Valid() || err == nil || !strings.Contains(err.Error(), "32 hexadecimal digits") {
			t.Errorf("%q is taken, or refused without saying what is wanted: %v", bad, err)
		}
	}
}

func TestJobID(t *testing.T) {
	for _, good := range []string{"1", "42", "67108863", "4294967293"} {
		if id, err := ParseJobID(good); err != nil || !id.Valid() || IsRunJob(good) {
			t.Errorf("%q is not taken: %v", good, err)
		}
	}
	for _, bad := range []string{"", "0", "01", "+1", "-1", " 1", "1 ", "1_2", "1\n", "0x1", "4294967294", "4294967295", "9999999999", "run-1", "١"} {
		if _, err := ParseJobID(bad); JobID(bad).Valid() || err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if job := NewRunJob(); !IsRunJob(job) || JobID(job).Valid() || job == NewRunJob() {
		t.Errorf("%q", job)
	}
}

func TestPlainName(t *testing.T) {
	for name, want := range map[string]bool{
		"a": true, "A-1_b.c": true, "7": true, strings.Repeat("x", MaxPlainName): true,
		"": false, ".a": false, "-a": false, "_a": false, "a b": false, "a/b": false, "ä": false, "a\n": false, strings.Repeat("x", MaxPlainName+1): false,
	} {
		if IsPlainName(name) != want {
			t.Errorf("%q: %v, want %v", name, !want, want)
		}
	}
}

func TestLine(t *testing.T) {
	for _, c := range []struct {
		s    string
		n    int
		want string
	}{
		{"", 10, ""},
		{"plain text", 10, "plain text"},
		{"plain text ", 10, "plain t..."},
		{"a\nb\tc\x1b[31m\x00\x7f", 100, "a b c?[31m??"},
		{"\u202etxt.exe\u200b\u0085", 100, "?txt.exe??"},
		{"caf\xe9 \xff", 100, "caf? ?"},
		{"größe", 10, "größe"},
		{"größe und", 8, "grö..."},
		{"öööö", 6, "ö..."},
		{"abcdef", 3, "..."},
		{"abcdef", 2, ".."},
		{"abcdef", 0, ""},
		{strings.Repeat("\xff", 1000), 5, "??..."},
	} {
		if got := Line(c.s, c.n); got != c.want {
			t.Errorf("%q in %d bytes: %q, want %q", c.s, c.n, got, c.want)
		}
		if IsLine(c.s, c.n) != (c.s == c.want) {
			t.Errorf("%q is a line of %d bytes: %v", c.s, c.n, c.s != c.want)
		}
	}
}

func FuzzLine(f *testing.F) {
	f.Add("größe\x1b\u202e", 7)
	f.Fuzz(func(t *testing.T, s string, n int) {
		n = max(0, n%4096)
		got := Line(s, n)
		if len(got) > n || !utf8.ValidString(got) || strings.ContainsAny(got, "\n\r\x00\x1b\u202e") || Line(got, n) != got {
			t.Errorf("Line(%q, %d) = %q", s, n, got)
		}
	})
}

func TestBytes(t *testing.T) {
	for s, want := range map[string]Bytes{
		"0": 0, "1": 1, "21474836480": 20 << 30, "20G": 20 << 30, "20g": 20 << 30, "20GB": 20 << 30, "20GiB": 20 << 30, "20gib": 20 << 30,
		"512M": 512 << 20, "64K": 64 << 10, "100B": 100, "007": 7, "2T": 2 << 40, "8388607T": 8388607 << 40, "9223372036854775807": 1<<63 - 1,
	} {
		if got, err := ParseBytes(s); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "G", "B", "-1", "-1G", "1.5G", "20 G", " 20G", "20G\n", "20X", "20P", "20IB", "20BB", "1e9", "0x10", "+1", "1_000", "8388608T", "9223372036854775808", "99999999999999999999999"} {
		if got, err := ParseBytes(s); err == nil {
			t.Errorf("%q was taken as %d", s, got)
		}
	}
	for n, want := range map[Bytes]string{0: "0", 20 << 30: "20G", 1536 << 20: "1536M", 1000: "1000", 3 << 40: "3T"} {
		if got := n.String(); got != want {
			t.Errorf("%d is written %q, want %q", uint64(n), got, want)
		}
		if back, err := ParseBytes(want); err != nil || back != n {
			t.Errorf("%q is read as %d, %v", want, uint64(back), err)
		}
	}
}

func TestPercents(t *testing.T) {
	for p, want := range map[Percent]bool{0: false, 1: true, 100: true, 101: false} {
		if p.Valid() != want {
			t.Errorf("%d: %v, want %v", p, !want, want)
		}
	}
	for s, want := range map[string]string{
		"50": "50", "50%": "50", "1,100": "1,100", "250": "100,100,50", "150,20%": "100,50,20", "1600": strings.Repeat("100,", 15) + "100",
	} {
		if got, err := ParsePercents(s); err != nil || FormatPercents(got) != want {
			t.Errorf("%q: %v, %v; want %s", s, got, err, want)
		}
	}
	for s, say := range map[string]string{
		"": "percent of a GPU as 50", "0": "at most 1600", "1601": "at most 1600", "50,": "a list for several", "-1": "50", "5.5": "50", "50%%": "50", "99999999999": "at most 1600",
		"1600,1": "17 fractions: a lease has 1 to 16", strings.Repeat("1,", 16) + "1": "17 fractions",
	} {
		if got, err := ParsePercents(s); err == nil || !strings.Contains(err.Error(), say) {
			t.Errorf("%q: %v, %v; want %q", s, got, err, say)
		}
	}
}

func TestUnits(t *testing.T) {
	formtest.Each(t, "charges.txt", func(value, want string) {
		var percent, mem, gpu, units uint64
		if _, err := fmt.Sscan(value+" "+want, &percent, &mem, &gpu, &units); err != nil {
			t.Fatal(err)
		}
		if got := Units(Fractions(percent), mem<<20, gpu<<20); got != units {
			t.Errorf("%s: %d units, want %d", value, got, units)
		}
	})
	if got := Units([]uint32{1}, 1<<50, 1<<50); got != 100 {
		t.Errorf("the whole of the largest memory costs %d", got)
	}
}

func TestHasLicence(t *testing.T) {
	formtest.Each(t, "licences.txt", func(value, want string) {
		if got := HasLicence(value); got != (want == "yes") {
			t.Errorf("%q: %v, want %s", value, got, want)
		}
	})
	if HasLicence("") {
		t.Error("no licences at all have one of ours")
	}
}

func TestShort(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0", 1023: "1023", 1024: "1K", 1536: "1.5K", 99<<20 + 900<<10: "99.9M", 99<<20 + 1000<<10: "100M", 999 << 20: "999M", 1000 << 20: "1000M",
		1023 << 20: "1023M", 1024<<20 - 1: "1G", 20 << 30: "20G", 141<<30 + 1<<29: "142G", 1<<40 - 1: "1T", 1000 << 50: "1000P", 1<<64 - 1: "16E",
	} {
		if got := ShortBytes(n); got != want {
			t.Errorf("%d bytes are %q, want %q", n, got, want)
		}
	}
	for n, want := range map[uint64]string{0: "0", 999: "999", 1000: "1k", 1234: "1.2k", 999_499: "999k", 999_999: "1M", 123_456_789: "123M", 1<<64 - 1: "18.4E"} {
		if got := ShortCount(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

func TestMiB(t *testing.T) {
	for n, want := range map[uint64]uint64{0: 0, 1: 1, 1 << 20: 1, 1<<20 + 1: 2, 20 << 30: 20480, 1<<64 - 1: 1 << 44} {
		if got := MiB(n); got != want {
			t.Errorf("%d bytes are %d MiB, want %d", n, got, want)
		}
	}
}

// A job is named once, whoever has named it before.
func TestOfJob(t *testing.T) {
	inner := errors.New("no such job")
	for in, want := range map[string]string{
		"it has ended":                  "job 7: it has ended",
		"job 7: it has ended":           "job 7: it has ended",
		"job 7: job 7: it has ended":    "job 7: it has ended",
		"refused: job 7: it has ended":  "job 7: refused: it has ended",
		"job c/7@n1: it has ended":      "job 7: it has ended",
		"x; job 7: and: job c/7@: y":    "job 7: x; and: y",
		"job 17: it has ended":          "job 7: job 17: it has ended",
		"job c/17@n1: x":                "job 7: job c/17@n1: x",
		"note of job 7: no room":        "job 7: note of job 7: no room",
		"what job 7 asks for":           "job 7: what job 7 asks for",
		"job 7_1: its step: job 7.1: x": "job 7: job 7_1: its step: job 7.1: x",
	} {
		if got := OfJob("7", errors.New(in)).Error(); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	if err := OfJob("61+1", fmt.Errorf("job 61+1: %w", inner)); !errors.Is(err, inner) || err.Error() != "job 61+1: no such job" {
		t.Error(err)
	}
	if got := WithoutJob("7", "job 7: it has ended; see sluice explain 7"); got != "it has ended; see sluice explain 7" {
		t.Error(got)
	}
}
