package rpc

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// The generated code is that of sluice.proto: every message, field, number and
// call. Needs no protoc.
func TestGenerated(t *testing.T) {
	src, err := os.ReadFile("sluice.proto")
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	in := ""
	open := regexp.MustCompile(`^(message|service) (\w+) \{`)
	field := regexp.MustCompile(`(?:^|\{)\s*(repeated )?([\w.]+) (\w+) = (\d+);`)
	call := regexp.MustCompile(`rpc (\w+)\((\w+)\) returns \((\w+)\);`)
	for line := range strings.Lines(string(src)) {
		line, _, _ = strings.Cut(line, "//")
		if m := open.FindStringSubmatch(line); m != nil {
			in = m[2]
			want = append(want, m[1]+" "+in)
		}
		if m := field.FindStringSubmatch(line); m != nil && in != "" {
			kind := m[2][strings.LastIndex(m[2], ".")+1:]
			want = append(want, fmt.Sprintf("%s.%s %s%s %s", in, m[3], m[1], kind, m[4]))
		}
		if m := call.FindStringSubmatch(line); m != nil {
			want = append(want, fmt.Sprintf("%s.%s %s %s", in, m[1], m[2], m[3]))
		}
	}
	file := pb.File_daemon_internal_rpc_sluice_proto
	for i := range file.Messages().Len() {
		m := file.Messages().Get(i)
		got = append(got, "message "+string(m.Name()))
		for j := range m.Fields().Len() {
			f := m.Fields().Get(j)
			kind, many := f.Kind().String(), ""
			if f.Message() != nil {
				kind = string(f.Message().Name())
			}
			if f.IsList() {
				many = "repeated "
			}
			got = append(got, fmt.Sprintf("%s.%s %s%s %d", m.Name(), f.Name(), many, kind, f.Number()))
		}
	}
	for i := range file.Services().Len() {
		s := file.Services().Get(i)
		got = append(got, "service "+string(s.Name()))
		for j := range s.Methods().Len() {
			m := s.Methods().Get(j)
			got = append(got, fmt.Sprintf("%s.%s %s %s", s.Name(), m.Name(), m.Input().Name(), m.Output().Name()))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		for _, w := range want {
			if !slices.Contains(got, w) {
				t.Errorf("only in sluice.proto: %s", w)
			}
		}
		for _, g := range got {
			if !slices.Contains(want, g) {
				t.Errorf("only in the generated code: %s", g)
			}
		}
		t.Error("run go generate ./daemon/internal/rpc")
	}
	if len(want) < 100 {
		t.Errorf("%d lines of sluice.proto understood", len(want))
	}
}
