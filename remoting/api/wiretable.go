package api

import (
	"bytes"
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed wire.tbl
var wireSource []byte

// WireTable is the wire table: the numbers and messages of the wire in the
// order of their rows.
type WireTable struct {
	Items    []Item
	Messages []Message
}

// Item is a named number or text; see wire.tbl for its kinds.
type Item struct {
	Kind  string // const, choice, limit, session, feature, status, frame, handle or op
	Name  string
	Value string // as the table has it: a number or a quoted string
	Num   uint64 // of a number; of -2 its two's complement
	Send  string // of an op: wait, oneway or either
	Doc   string
}

// IsText reports whether the item is a string and not a number.
func (i *Item) IsText() bool { return strings.HasPrefix(i.Value, `"`) }

// Message is a run of fields: of an op's request or reply, or a head or record.
type Message struct {
	Name   string
	Head   bool // begins a connection or a frame
	Packet bool // between processes of one machine, see wire.tbl
	Doc    string
	Fields []Field
	Rest   []Field // what follows the fixed size, for documentation alone
	Size   int     // bytes of Fields
}

// Field is one field of a message.
type Field struct {
	Type string // u8, u16, u32, u64, i32, text, zero, magic, rest, or a record's name
	N    int    // how many; bytes of text and zero
	List bool   // [n] was given
	Name string
	Doc  string
	At   int // offset in bytes
	Size int
}

var (
	itemKinds = []string{"const", "choice", "limit", "session", "feature", "status", "frame", "handle", "op"}
	scalar    = map[string]int{"u8": 1, "u16": 2, "u32": 4, "i32": 4, "u64": 8}

	upperName = regexp.MustCompile(`^[A-Z][A-Z0-9]*(_[A-Z0-9]+)*$`)
	lowerName = regexp.MustCompile(`^[a-z][a-z0-9]*(_[a-z0-9]+)*$`)
	fieldType = regexp.MustCompile(`^([A-Za-z0-9_]+)(?:\[(\d+)\])?$`)
)

// Wire returns the wire table.
func Wire() (*WireTable, error) { return parseWire(wireSource) }

// parseWire reads a wire table.
func parseWire(src []byte) (*WireTable, error) {
	t := &WireTable{}
	open := -1 // the op, head or record that fields belong to, as an index of Messages
	var reply bool
	for i, line := range bytes.Split(src, []byte("\n")) {
		s := string(line)
		if strings.TrimSpace(s) == "" || s[0] == '#' {
			continue
		}
		var err error
		if s[0] == '\t' || s[0] == ' ' {
			err = t.field(strings.TrimSpace(s), open, &reply)
		} else {
			reply = false
			open, err = t.row(s)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: wire.tbl: line %d: %w", ErrTable, i+1, err)
		}
	}
	return t, t.layout()
}

// row adds an item or begins a message. open is the message that the following
// fields belong to, or -1.
func (t *WireTable) row(s string) (open int, err error) {
	f := columns(s)
	if len(f) != 4 {
		return -1, fmt.Errorf("%d columns, want 4", len(f))
	}
	kind, name, value, doc := f[0], f[1], f[2], f[3]
	if !upperName.MatchString(name) {
		return -1, fmt.Errorf("name %q: want capitals, digits and underscores", name)
	}
	if kind == "head" || kind == "record" || kind == "packet" {
		if value != "" {
			return -1, fmt.Errorf("%s: a %s has no value", name, kind)
		}
		open, err := t.message(name, doc)
		if err == nil {
			t.Messages[open].Head, t.Messages[open].Packet = kind == "head", kind == "packet"
		}
		return open, err
	}
	if !slices.Contains(itemKinds, kind) {
		return -1, fmt.Errorf("kind %q", kind)
	}
	it := Item{Kind: kind, Name: name, Value: value, Doc: doc}
	if kind == "op" {
		it.Value, it.Send, _ = strings.Cut(value, " ")
		if it.Send != "wait" && it.Send != "oneway" && it.Send != "either" {
			return -1, fmt.Errorf("%s: sent %q: want wait, oneway or either", name, it.Send)
		}
	}
	if err := it.parse(); err != nil {
		return -1, err
	}
	for _, o := range t.Items {
		if o.Kind == kind && (o.Name == name || kind != "const" && kind != "choice" && kind != "limit" && o.Num == it.Num) {
			return -1, fmt.Errorf("%s %s: its name or number is that of %s", kind, name, o.Name)
		}
	}
	t.Items = append(t.Items, it)
	if kind == "op" {
		return t.message(name, doc)
	}
	return -1, nil
}

func (t *WireTable) message(name, doc string) (int, error) {
	if t.Message(name) != nil {
		return -1, fmt.Errorf("message %s stands twice", name)
	}
	t.Messages = append(t.Messages, Message{Name: name, Doc: doc})
	return len(t.Messages) - 1, nil
}

func (i *Item) parse() (err error) {
	v := i.Value
	if i.IsText() {
		if i.Value, err = strconv.Unquote(v); err != nil || i.Kind != "const" {
			return fmt.Errorf("%s: value %s", i.Name, v)
		}
		i.Value = v
		return nil
	}
	shift := 0
	for unit, n := range map[string]int{" KiB": 10, " MiB": 20, " GiB": 30} {
		if u, ok := strings.CutSuffix(v, unit); ok {
			v, shift = u, n
		}
	}
	if n, err := strconv.ParseInt(v, 0, 64); err == nil && n < 0 {
		i.Num = uint64(n)
		return nil
	}
	n, err := strconv.ParseUint(v, 0, 64)
	if err != nil {
		return fmt.Errorf("%s: value %q: %w", i.Name, i.Value, err)
	}
	i.Num = n << shift
	return nil
}

// field adds a field to the open message. The first field of a reply opens the
// message of that op's reply.
func (t *WireTable) field(s string, open int, reply *bool) error {
	if open < 0 {
		return fmt.Errorf("field %q belongs to no message", s)
	}
	m := &t.Messages[open]
	isOp := t.Item("op", m.Name) != nil
	dir := s[0]
	if (dir == '>' || dir == '<') != isOp {
		return fmt.Errorf("%s: > and < are for the fields of operations, and only for them", m.Name)
	}
	if isOp {
		s = s[1:]
	}
	if dir == '<' && !*reply {
		if _, err := t.message(m.Name+"_REPLY", "the reply to "+m.Name); err != nil {
			return err
		}
		*reply = true
	} else if dir == '>' && *reply {
		return fmt.Errorf("%s: a request's field behind a reply's", m.Name)
	}
	m = &t.Messages[open]
	if *reply {
		m = &t.Messages[len(t.Messages)-1]
	}
	f, err := t.parseField(s)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", m.Name, err)
	case f.Type == "rest":
		m.Rest = append(m.Rest, f)
	case len(m.Rest) > 0:
		return fmt.Errorf("%s: %s stands behind what has no fixed size", m.Name, f.Name)
	default:
		m.Fields = append(m.Fields, f)
	}
	return nil
}

func (t *WireTable) parseField(s string) (f Field, err error) {
	c := columns(s)
	if len(c) == 2 {
		c = append(c, "")
	}
	if len(c) != 3 {
		return f, fmt.Errorf("%d columns in field %q, want type, name and meaning", len(c), s)
	}
	m := fieldType.FindStringSubmatch(c[0])
	if m == nil {
		return f, fmt.Errorf("type %q", c[0])
	}
	f = Field{Type: m[1], N: 1, List: m[2] != "", Name: c[1], Doc: c[2]}
	if f.List {
		f.N, _ = strconv.Atoi(m[2])
	}
	switch {
	case f.Type == "rest":
		return f, nil
	case f.Type == "magic":
		if t.Item("const", f.Name) == nil {
			return f, fmt.Errorf("there is no constant %s", f.Name)
		}
		return f, nil
	case f.Type == "zero":
		if f.Name != "" || !f.List {
			return f, fmt.Errorf("zero[n] has a size and no name")
		}
	case !lowerName.MatchString(f.Name):
		return f, fmt.Errorf("field name %q: want lower case, digits and underscores", f.Name)
	case scalar[f.Type] == 0 && (f.Type != "text" || !f.List) && !upperName.MatchString(f.Type):
		return f, fmt.Errorf("type %q", c[0])
	}
	return f, nil
}

// layout computes offsets and sizes; records may stand behind what uses them.
func (t *WireTable) layout() error {
	done := map[string]bool{}
	var size func(m *Message) error
	size = func(m *Message) error {
		if done[m.Name] {
			return nil
		}
		done[m.Name] = true
		for i := range m.Fields {
			f := &m.Fields[i]
			f.At, f.Size = m.Size, f.N*scalar[f.Type]
			switch f.Type {
			case "text", "zero":
				f.Size = f.N
			case "magic":
				it := t.Item("const", f.Name)
				f.Size = 4
				if it.IsText() {
					v, _ := strconv.Unquote(it.Value)
					f.Size = len(v)
				}
			}
			if upperName.MatchString(f.Type) {
				r := t.Message(f.Type)
				if r == nil || r.Head || r.Packet && !m.Packet || len(r.Rest) > 0 || f.List {
					return fmt.Errorf("%w: %s: %s is no record of fixed size", ErrTable, m.Name, f.Type)
				}
				if err := size(r); err != nil {
					return err
				}
				f.Size = r.Size
			}
			m.Size += f.Size
		}
		return nil
	}
	for i := range t.Messages {
		if err := size(&t.Messages[i]); err != nil {
			return err
		}
	}
	return nil
}

// Item finds an item, or nil.
func (t *WireTable) Item(kind, name string) *Item {
	for i := range t.Items {
		if t.Items[i].Kind == kind && t.Items[i].Name == name {
			return &t.Items[i]
		}
	}
	return nil
}

// Message finds a message, or nil.
func (t *WireTable) Message(name string) *Message {
	for i := range t.Messages {
		if t.Messages[i].Name == name {
			return &t.Messages[i]
		}
	}
	return nil
}

// canonical is what the fingerprint covers: everything but meanings, comments, choices and packets.
func (t *WireTable) canonical() []byte {
	var p printer
	for _, i := range t.Items {
		if i.Kind == "choice" {
			continue
		}
		p.f("%s %s %s %s\n", i.Kind, i.Name, i.Value, i.Send)
	}
	for _, m := range t.Messages {
		if m.Packet {
			continue
		}
		p.f("%s %d\n", m.Name, m.Size)
		for _, f := range append(slices.Clone(m.Fields), m.Rest...) {
			p.f(" %s %d %s %d\n", f.Type, f.N, f.Name, f.At)
		}
	}
	return p.Bytes()
}

func columns(s string) []string {
	f := strings.Split(s, "|")
	for i := range f {
		f[i] = strings.TrimSpace(f[i])
	}
	return f
}

// mustWire is the embedded table, which the tests of this package parse.
func mustWire() *WireTable {
	t, err := Wire()
	if err != nil {
		panic(err)
	}
	return t
}
