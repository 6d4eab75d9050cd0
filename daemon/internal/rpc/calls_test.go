package rpc

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// source is what this package does with messages by hand, as its text says it.
type source struct {
	returns map[string]map[string]bool // messages by the name of a function or a call that returns one
	set     map[string]bool            // "Message.Field" of each literal
	read    map[string]bool            // "Message.Field" of each getter in a function that has such a message
}

// message is the M of pb.M and *pb.M, "" of another type.
func message(e ast.Expr) string {
	if p, ok := e.(*ast.StarExpr); ok {
		e = p.X
	}
	if s, ok := e.(*ast.SelectorExpr); ok {
		if x, ok := s.X.(*ast.Ident); ok && x.Name == "pb" {
			return s.Sel.Name
		}
	}
	return ""
}

func (s *source) returned(name, m string) {
	if s.returns[name] == nil {
		s.returns[name] = map[string]bool{}
	}
	s.returns[name][m] = true
}

// function looks at a function. It has the messages that its text names and those that it gets from what it calls.
func (s *source) function(f *ast.FuncDecl) {
	has, gets := map[string]bool{}, map[string]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			if m := message(n); m != "" {
				has[m] = true
			}
			for m := range s.returns[n.Sel.Name] {
				has[m] = true
			}
			if field, ok := strings.CutPrefix(n.Sel.Name, "Get"); ok {
				gets[field] = true
			}
		case *ast.Ident:
			for m := range s.returns[n.Name] {
				has[m] = true
			}
		case *ast.CompositeLit:
			m := message(n.Type)
			for _, e := range n.Elts {
				if kv, ok := e.(*ast.KeyValueExpr); ok && m != "" {
					s.set[m+"."+kv.Key.(*ast.Ident).Name] = true
				}
			}
		}
		return true
	})
	for m := range has {
		for field := range gets {
			s.read[m+"."+field] = true
		}
	}
}

func readSource(t *testing.T) *source {
	t.Helper()
	s := &source{map[string]map[string]bool{}, map[string]bool{}, map[string]bool{}}
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	services := pb.File_daemon_internal_rpc_sluice_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			m := services.Get(i).Methods().Get(j)
			s.returned(string(m.Name()), string(m.Output().Name()))
		}
	}
	var all []*ast.FuncDecl
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			all = append(all, f)
			if f.Type.Results == nil || f.Recv != nil {
				continue
			}
			for _, r := range f.Type.Results.List {
				if m := message(r.Type); m != "" {
					s.returned(f.Name.Name, m)
				}
			}
		}
	}
	for _, f := range all {
		s.function(f)
	}
	return s
}

// goName is a field's name in Go.
func goName(f protoreflect.FieldDescriptor) string {
	var b strings.Builder
	for part := range strings.SplitSeq(string(f.Name()), "_") {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}

// TestCalls: a message that no conversion of TestConvert is of is made and read by its call. Each of its fields is set at one end and
// read at the other.
func TestCalls(t *testing.T) {
	s, converted := readSource(t), convertAll(t)
	messages, looked := pb.File_daemon_internal_rpc_sluice_proto.Messages(), 0
	for i := range messages.Len() {
		m := messages.Get(i)
		if converted[m.FullName()] {
			continue
		}
		for j := range m.Fields().Len() {
			looked++
			name := string(m.Name()) + "." + goName(m.Fields().Get(j))
			if !s.set[name] {
				t.Errorf("%s: no message is made with it", name)
			}
			if !s.read[name] {
				t.Errorf("%s: nobody reads it", name)
			}
		}
	}
	if looked < 20 || len(converted) < 30 {
		t.Errorf("%d fields of calls, %d messages that are converted: this test has lost sight of them", looked, len(converted))
	}
}
