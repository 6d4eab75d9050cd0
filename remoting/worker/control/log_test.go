package control

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// What a session process logs has its mark, is one line each, and has bounds.
func TestCopyLog(t *testing.T) {
	for _, c := range []struct{ in, out string }{
		{"level=WARN msg=\"image sent again\" lease=ab\n", "level=WARN msg=\"image sent again\" lease=ab session_process=7\n"},
		{"{\"level\":\"WARN\",\"msg\":\"x\"}\n", "{\"level\":\"WARN\",\"msg\":\"x\",\"session_process\":7}\n"},
		{"{}\n", "{\"session_process\":7}\n"},
		{"no end", "no end session_process=7\n"},
		{"{\"msg\":\"not whole\"\n", "{\"msg\":\"not whole\" session_process=7\n"},
		{"a\x1b[2Jb\rc\x00d\xffe\n", "a?[2Jb?c?d?e session_process=7\n"},
		{"\n \n", ""},
		// It cannot say that it is another.
		{"x session_process=1\n", "x session_process=1 session_process=7\n"},
	} {
		var out bytes.Buffer
		copyLog(&out, strings.NewReader(c.in), 7)
		if out.String() != c.out {
			t.Errorf("%q: %q, want %q", c.in, out.String(), c.out)
		}
	}
	var out bytes.Buffer
	copyLog(&out, strings.NewReader(strings.Repeat("x", 3*logLine)), 7)
	for line := range strings.Lines(out.String()) {
		if len(line) > logLine+64 || !strings.HasSuffix(line, "x session_process=7\n") {
			t.Errorf("line of %d bytes: %q", len(line), line[len(line)-30:])
		}
	}
	out.Reset()
	copyLog(&out, strings.NewReader(strings.Repeat("line\n", 100000)), 7)
	if n := strings.Count(out.String(), "\n"); n < logBurst || n > logBurst+60 {
		t.Errorf("%d lines of 100000 were written", n)
	}
}

func TestMarkSkipped(t *testing.T) {
	if got := string(mark([]byte("m\n"), 7, 3)); got != "m session_process=7 skipped_lines=3\n" {
		t.Errorf("%q", got)
	}
	var v map[string]any
	if got := mark([]byte(`{"msg":"m"}`), 7, 3); json.Unmarshal(got, &v) != nil || fmt.Sprint(v) != "map[msg:m session_process:7 skipped_lines:3]" {
		t.Errorf("%s", got)
	}
}
