package api

import (
	"fmt"
	"regexp"
	"strings"
)

// ProtocolPage is the page whose tables come from the wire table, below the
// project's root.
const ProtocolPage = "docs/protocol.md"

// section is a part of the page: what stands between the two comments is
// written from the table. what is "session", "frame" or another kind of items,
// "message NAME", or "const PREFIX".
var section = regexp.MustCompile(`(?s)(<!-- wire\.tbl: ([a-z]+)(?: ([A-Z0-9_]+))? -->\n).*?(<!-- end -->)`)

// Protocol returns the page with its generated sections brought up to date.
func Protocol(page []byte) ([]byte, error) {
	t, err := Wire()
	if err != nil {
		return nil, err
	}
	written := map[string]bool{}
	out := section.ReplaceAllFunc(page, func(s []byte) []byte {
		m := section.FindSubmatch(s)
		body, e := t.section(string(m[2]), string(m[3]), written)
		if e != nil {
			err = e
		}
		return []byte(string(m[1]) + body + string(m[4]))
	})
	if err != nil {
		return nil, err
	}
	for _, m := range t.Messages {
		if len(m.Fields) > 0 && !written[m.Name] {
			return nil, fmt.Errorf("%w: %s says nothing of %s: give it a section", ErrTable, ProtocolPage, m.Name)
		}
	}
	for _, h := range wireHeads {
		if h.kind != "const" && h.kind != "feature" && !written[h.kind] {
			return nil, fmt.Errorf("%w: %s has no section for items of kind %s", ErrTable, ProtocolPage, h.kind)
		}
	}
	return out, nil
}

// section writes one part of the page and notes in written what it covers.
func (t *WireTable) section(what, name string, written map[string]bool) (string, error) {
	var p printer
	switch what {
	case "message":
		m := t.Message(name)
		if m == nil {
			return "", fmt.Errorf("%w: %s: there is no message %s", ErrTable, ProtocolPage, name)
		}
		written[name] = true
		p.f("%s, %s: %s.\n\n| offset | type | field | meaning |\n|---|---|---|---|\n", m.Name, m.size(), m.Doc)
		for _, f := range m.Fields {
			field := f.Name
			if f.Type == "magic" {
				field = "magic"
			}
			p.f("| %d | %s | %s | %s |\n", f.At, f.typeText(t), strings.ReplaceAll(field, "_", " "), f.Doc)
		}
		for _, f := range m.Rest {
			p.f("| | | %s | %s |\n", f.Name, f.Doc)
		}
	case "const":
		p.f("| constant | value | meaning |\n|---|---|---|\n")
		for _, i := range t.Items {
			if i.Kind == what && strings.HasPrefix(i.Name, name) {
				p.f("| %s | %s | %s |\n", i.Name, i.Value, i.Doc)
			}
		}
	case "op":
		p.f("| number | name | | request | reply | meaning |\n|---|---|---|---|---|---|\n")
		for _, i := range t.Items {
			if i.Kind == what {
				p.f("| `%s` | %s | %s | %s | %s | %s |\n", i.Value, i.Name, strings.Replace(i.Send, "oneway", "one-way", 1),
					t.form(i.Name, written), t.form(i.Name+"_REPLY", written), i.Doc)
			}
		}
	default:
		p.f("| value | name | meaning |\n|---|---|---|\n")
		for _, i := range t.Items {
			if i.Kind == what {
				p.f("| %s | %s | %s |\n", i.Value, i.Name, i.Doc)
			}
		}
	}
	written[what] = true
	return p.String(), nil
}

func (m *Message) size() string {
	if len(m.Rest) > 0 {
		return fmt.Sprintf("%d bytes and what follows them", m.Size)
	}
	return fmt.Sprintf("%d bytes", m.Size)
}

// form is a message in one line.
func (t *WireTable) form(name string, written map[string]bool) string {
	m := t.Message(name)
	if m == nil {
		return ""
	}
	written[name] = true
	var l []string
	for _, f := range m.Fields {
		s := f.typeText(t)
		if f.Name != "" && f.Type != strings.ToUpper(f.Name) {
			s += " " + strings.ReplaceAll(f.Name, "_", " ")
		}
		if f.Doc != "" {
			s += " (" + f.Doc + ")"
		}
		l = append(l, s)
	}
	for _, f := range m.Rest {
		s := f.Name
		if f.Doc != "" {
			s += " (" + f.Doc + ")"
		}
		l = append(l, s)
	}
	return strings.Join(l, ", ")
}

func (f *Field) typeText(t *WireTable) string {
	switch {
	case f.Type == "zero":
		return fmt.Sprintf("u8[%d] 0", f.N)
	case f.Type == "magic" && t.Item("const", f.Name).IsText():
		return fmt.Sprintf("u8[%d]", f.Size)
	case f.Type == "magic":
		return "u32"
	case f.List:
		return fmt.Sprintf("%s[%d]", f.Type, f.N)
	}
	return f.Type
}
