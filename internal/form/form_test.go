package form

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestLeaseID(t *testing.T) {
	for range 100 {
		if id := NewLeaseID(); !IsLeaseID(id) {
			t.Fatalf("%q is not taken", id)
		}
	}
	good := strings.Repeat("0a", 16)
	for _, bad := range []string{"", good[1:], good + "0", good[1:] + "g", good[1:] + "A", good[1:] + "\n", good + "\n", "../" + good[3:], " " + good[1:]} {
		if IsLeaseID(bad) {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestJobID(t *testing.T) {
	for _, good := range []string{"1", "42", "67108863", "4294967293"} {
		if !IsJobID(good) || IsRunJob(good) {
			t.Errorf("%q is not taken", good)
		}
	}
	for _, bad := range []string{"", "0", "01", "+1", "-1", " 1", "1 ", "1_2", "1\n", "0x1", "4294967294", "4294967295", "9999999999", "run-1", "١"} {
		if IsJobID(bad) {
			t.Errorf("%q is taken", bad)
		}
	}
	if job := NewRunJob(); !IsRunJob(job) || IsJobID(job) || job == NewRunJob() {
		t.Errorf("%q", job)
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
