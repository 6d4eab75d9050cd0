package api

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/binary"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

//go:embed cuabi.h
var abiSource string

// A Form is the form on the wire of one thing that both tables name, as two releases compare it: what has the same ID on
// both sides and another Sum differs between them.
type Form struct {
	Name string // as the tables have it, with its kind
	ID   uint32 // of the name
	Sum  uint32 // of the form
	Op   int    // the operation's number, or -1 for what every session needs
}

func sum32(s string) uint32 {
	h := sha256.Sum256([]byte(s))
	return binary.LittleEndian.Uint32(h[:])
}

// Forms are the forms of all operations, and of all numbers and messages that a session needs whatever it does, which choices and packets are not. A message that
// only operations have is part of their forms, and so are the constants that number the values of one of their fields, which the
// field names as "by PREFIX".
func Forms(rows []Row, t *WireTable) ([]Form, error) {
	var out []Form
	add := func(name, form string, op int) {
		out = append(out, Form{Name: name, ID: sum32(name), Sum: sum32(form), Op: op})
	}
	for _, r := range rows {
		if r.Forwarded() {
			add(r.Symbol, r.form(), r.Op)
		}
	}
	used := map[string]bool{}
	for _, i := range t.Items {
		if i.Kind == "op" {
			form := t.messageForm(i.Name, used) + t.messageForm(i.Name+"_REPLY", used) + t.numbering(i.Name, used)
			add(strings.ToLower(i.Name), fmt.Sprintf("%d %s\n%s", i.Num, i.Send, form), int(i.Num))
		}
	}
	for _, i := range t.Items {
		if i.Kind != "op" && i.Kind != "choice" && !used[i.Kind+" "+i.Name] {
			add(i.Kind+" "+i.Name, i.Value, -1)
		}
	}
	for _, m := range t.Messages {
		if !used[m.Name] && !m.Packet {
			add("message "+m.Name, t.messageForm(m.Name, used), -1)
		}
	}
	seen := map[uint32]string{}
	for _, f := range out {
		if other, ok := seen[f.ID]; ok {
			return nil, fmt.Errorf("%w: %s and %s have the same id of their forms: rename one", ErrTable, f.Name, other)
		}
		seen[f.ID] = f.Name
	}
	slices.SortFunc(out, func(a, b Form) int {
		return bytes.Compare(binary.BigEndian.AppendUint32(nil, a.ID), binary.BigEndian.AppendUint32(nil, b.ID))
	})
	return out, nil
}

// form is what the other side must know of a function to understand its frame.
func (r *Row) form() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %d %s\n", r.Symbol, r.Op, r.Kind)
	for _, p := range r.Wire {
		fmt.Fprintf(&b, " %s %d %s %s\n%s", p.Elem, p.Mode, p.HKind, p.Count, typeForm(p.Elem, map[string]bool{}))
	}
	return b.String()
}

var (
	word     = regexp.MustCompile(`\w+`)
	space    = regexp.MustCompile(`\s+`)
	comment  = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	compound = regexp.MustCompile(`(?sm)^typedef (?:struct|union)[^{;]*\{.*?^\} (\w+);`)
	synonym  = regexp.MustCompile(`(?m)^typedef ([^{;]*\W)(\w+)(\[\d+\])?;`)
)

// types are the declarations of CUDA's types by name. They are read when somebody first asks: the worker's tests start
// hundreds of processes that have this package and never ask.
var types = sync.OnceValue(func() map[string]string {
	abi := comment.ReplaceAllString(abiSource, "")
	m := map[string]string{}
	for _, d := range synonym.FindAllStringSubmatch(abi, -1) {
		m[d[2]] = space.ReplaceAllString(d[0], " ")
	}
	for _, d := range compound.FindAllStringSubmatch(abi, -1) {
		m[d[1]] = space.ReplaceAllString(d[0], " ")
	}
	return m
})

// typeForm is the declaration of a type of CUDA's, with those of the types in it.
func typeForm(name string, seen map[string]bool) string {
	d, ok := types()[name]
	if !ok || seen[name] {
		return ""
	}
	seen[name] = true
	form := "  " + d + "\n"
	for _, w := range word.FindAllString(d, -1) {
		form += typeForm(w, seen)
	}
	return form
}

// messageForm is the layout of a message and of the records that it names, which are noted as used.
func (t *WireTable) messageForm(name string, used map[string]bool) string {
	return t.layoutForm(name, used, map[string]bool{})
}

func (t *WireTable) layoutForm(name string, used, seen map[string]bool) string {
	m := t.Message(name)
	if m == nil || seen[name] {
		return ""
	}
	used[name], seen[name] = true, true
	var b strings.Builder
	fmt.Fprintf(&b, "%s %d\n", m.Name, m.Size)
	var also []string
	for _, f := range append(slices.Clone(m.Fields), m.Rest...) {
		fmt.Fprintf(&b, " %s %d %s %d\n", f.Type, f.N, f.Name, f.At)
		names := f.Type
		if f.Type == "rest" {
			names = f.Name + " " + f.Doc
		}
		for _, w := range word.FindAllString(names, -1) {
			if r := t.Message(w); r != nil && !r.Head && t.Item("op", w) == nil {
				also = append(also, w)
			}
		}
	}
	for _, w := range also {
		b.WriteString(t.layoutForm(w, used, seen))
	}
	return b.String()
}

var numbered = regexp.MustCompile(`\bby ([A-Z]+)\b`)

// numbering is the constants by which an operation's fields are numbered, which are noted as used.
func (t *WireTable) numbering(op string, used map[string]bool) string {
	var b strings.Builder
	for _, name := range []string{op, op + "_REPLY"} {
		m := t.Message(name)
		if m == nil {
			continue
		}
		for _, f := range append(slices.Clone(m.Fields), m.Rest...) {
			for _, by := range numbered.FindAllStringSubmatch(f.Doc, -1) {
				for _, i := range t.Items {
					if i.Kind == "const" && strings.HasPrefix(i.Name, by[1]+"_") {
						used["const "+i.Name] = true
						fmt.Fprintf(&b, "%s %s\n", i.Name, i.Value)
					}
				}
			}
		}
	}
	return b.String()
}

// clientForms writes the shim's list.
func clientForms(forms []Form, numbers int) []byte {
	var p printer
	p.f("/* %s */\n#include \"forms.h\"\n#include \"wire.h\"\n\nconst unsigned sl_nops = %d;\n\n", Header, numbers)
	p.f("const struct sl_form sl_forms[] = {\n")
	for _, f := range forms {
		op := "SL_NO_OP"
		if f.Op >= 0 {
			op = fmt.Sprint(f.Op)
		}
		p.f("\t{ 0x%08x, 0x%08x, %s, \"%s\" },\n", f.ID, f.Sum, op, f.Name)
	}
	p.f("};\nconst unsigned sl_nforms = sizeof sl_forms / sizeof sl_forms[0];\n")
	return p.Bytes()
}

// workerForms writes the worker's list.
func workerForms(forms []Form) []byte {
	var p printer
	p.f("// %s\n\npackage worker\n\nimport \"github.com/sluice-hpc/sluice/remoting/wire\"\n\n", Header)
	p.f("// apiForms are the forms on the wire of all that this worker knows, in the order of their ids.\nvar apiForms = [...]wire.Form{\n")
	for _, f := range forms {
		p.f("\t{ID: 0x%08x, Sum: 0x%08x}, // %s\n", f.ID, f.Sum, f.Name)
	}
	p.f("}\n")
	return p.Bytes()
}
