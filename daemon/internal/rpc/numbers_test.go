package rpc

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// TestNumbers: daemons of other releases know the numbers and types that fields have in testdata/numbers.txt, and the methods. What
// is new goes to the end of that file. Nothing in it changes or goes: a field that is not used any more stays, or is reserved
// in the .proto file and marked with "- " there.
func TestNumbers(t *testing.T) {
	var now []string
	var messages func(protoreflect.MessageDescriptors)
	messages = func(all protoreflect.MessageDescriptors) {
		for i := range all.Len() {
			m := all.Get(i)
			for j := range m.Fields().Len() {
				f := m.Fields().Get(j)
				kind := f.Kind().String()
				switch {
				case f.Message() != nil:
					kind = string(f.Message().FullName())
				case f.Enum() != nil:
					kind = string(f.Enum().FullName())
				}
				now = append(now, fmt.Sprintf("%s.%s = %d %s %s", m.FullName(), f.Name(), f.Number(), f.Cardinality(), kind))
			}
			messages(m.Messages())
		}
	}
	file := pb.File_daemon_internal_rpc_sluice_proto
	messages(file.Messages())
	for i := range file.Enums().Len() {
		e := file.Enums().Get(i)
		for j := range e.Values().Len() {
			v := e.Values().Get(j)
			now = append(now, fmt.Sprintf("%s.%s = %d", e.FullName(), v.Name(), v.Number()))
		}
	}
	for i := range file.Services().Len() {
		s := file.Services().Get(i)
		for j := range s.Methods().Len() {
			m := s.Methods().Get(j)
			now = append(now, fmt.Sprintf("%s(%s) %s", m.FullName(), m.Input().FullName(), m.Output().FullName()))
		}
	}
	b, err := os.ReadFile("testdata/numbers.txt")
	if err != nil {
		t.Fatal(err)
	}
	was := strings.Split(strings.TrimSpace(string(b)), "\n")
	for _, w := range was {
		if !slices.Contains(now, w) && !strings.HasPrefix(w, "- ") {
			t.Errorf("%s: gone or changed; a daemon of the last release means that by it", w)
		}
	}
	var fresh []string
	for _, n := range now {
		if slices.Contains(was, "- "+n) {
			t.Errorf("%s: had another life before", n)
		}
		if !slices.Contains(was, n) {
			fresh = append(fresh, n)
		}
	}
	if len(fresh) > 0 {
		t.Errorf("add to testdata/numbers.txt:\n%s", strings.Join(fresh, "\n"))
	}
}
