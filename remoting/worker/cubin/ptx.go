package cubin

import (
	"bytes"
	"strconv"
)

// maxVariables is what a sum of variables stops at, in bytes.
const maxVariables = 1 << 50

// ptxText gives PTX byte by byte, with a space for each comment.
type ptxText struct {
	b []byte
	i int
}

func (t *ptxText) next() (c byte, ok bool) {
	if t.i >= len(t.b) {
		return 0, false
	}
	if c = t.b[t.i]; c != '/' || t.i+1 == len(t.b) {
		t.i++
		return c, true
	}
	end := -1
	switch rest := t.b[t.i:]; rest[1] {
	case '/':
		end = bytes.IndexByte(rest, '\n')
	case '*':
		if end = bytes.Index(rest[2:], []byte("*/")); end >= 0 {
			end += 4
		}
	default:
		t.i++
		return c, true
	}
	if end < 0 {
		end = len(t.b) - t.i
	}
	t.i += end
	return ' ', true
}

// The last 7 bytes of a text, as ptxVariables remembers them.
const (
	dotGlobal = '.'<<48 | 'g'<<40 | 'l'<<32 | 'o'<<24 | 'b'<<16 | 'a'<<8 | 'l'
	dotExtern = '.'<<48 | 'e'<<40 | 'x'<<32 | 't'<<24 | 'e'<<16 | 'r'<<8 | 'n'
)

// ptxVariables sums the variables that PTX declares in global memory:
//
//	.visible .global .align 8 .b8 table[4][1024];
//	.global .f32 a = 1.0, b;
//
// The text is a stranger's and may be large: it is read once, and nothing of it is copied.
func ptxVariables(b []byte) uint64 {
	var n, last uint64 // last 8 bytes
	extern, global := false, false
	t := ptxText{b: b}
	for c, ok := t.next(); ok && n < maxVariables; c, ok = t.next() {
		if global && (isSpace(c) || c == '.') {
			n += t.declared(c)
			extern, global, last = false, false, ';'
			continue
		}
		global = false
		last = last<<8 | uint64(c)
		switch before := byte(last >> 56); {
		case c == ';' || c == '{' || c == '}':
			extern = false
		case last<<8>>8 == dotExtern:
			extern = true
		case last<<8>>8 == dotGlobal: // in ld.global and its like it is part of a word
			global = !extern && (before == 0 || isSpace(before) || before == ';' || before == '}')
		}
	}
	return min(n, maxVariables)
}

func isSpace(c byte) bool {
	return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v'
}

// ptxDecl is what has been read of a declaration behind ".global".
type ptxDecl struct {
	size, vector uint64 // of an element
	word         ptxWord
	depth        int    // of braces and parentheses
	total        uint64 // elements of the declarators before this one

	// This declarator.
	elements uint64
	unknown  int // dimensions that its initialiser gives
	length   uint64
	assigned bool
	inside   bool    // a dimension's brackets
	dim      ptxWord // of which this is the text
}

// ptxWord is a word as far as it may mean something.
type ptxWord struct {
	b [24]byte
	n int
}

func (w *ptxWord) add(c byte) {
	if w.n < len(w.b) {
		w.b[w.n] = c
	}
	w.n++
}

// text gives the word, "" for one that is too long.
func (w *ptxWord) text() []byte {
	if w.n > len(w.b) {
		return nil
	}
	return w.b[:w.n]
}

// declared reads a declaration to its end and gives the size of its variables, in bytes. c is its first byte.
func (t *ptxText) declared(c byte) uint64 {
	d := ptxDecl{vector: 1, elements: 1}
	for ok := true; ok && c != ';'; c, ok = t.next() {
		d.add(c)
	}
	d.endWord()
	d.endDeclarator()
	if d.size == 0 { // opaque types, and what later versions bring
		d.size = 16
	}
	return times(d.total, d.size*d.vector)
}

func (d *ptxDecl) add(c byte) {
	d.length++
	switch {
	case isSpace(c) || c == '[':
		d.endWord()
	case c == '.':
		d.endWord()
		d.word.add(c)
	default:
		d.word.add(c)
	}
	switch {
	case c == '{' || c == '(':
		d.depth++
	case c == '}' || c == ')':
		d.depth--
	case c == ',' && d.depth == 0:
		d.endDeclarator()
	case d.assigned:
	case c == '=':
		d.assigned = true
	case c == '[' && !d.inside:
		d.inside, d.dim.n = true, 0
	case c == ']' && d.inside:
		d.inside = false
		n, err := strconv.ParseUint(string(d.dim.text()), 0, 64)
		if err != nil {
			d.unknown++
		} else {
			d.elements = times(d.elements, n)
		}
	case d.inside && !isSpace(c):
		d.dim.add(c)
	}
}

func (d *ptxDecl) endWord() {
	w := d.word.text()
	d.word.n = 0 // w stays
	switch {
	case len(w) < 3 || w[0] != '.':
	case ptxTypes[string(w)] != 0 && d.size == 0:
		d.size = uint64(ptxTypes[string(w)])
	case string(w) == ".v2":
		d.vector = 2
	case string(w) == ".v4":
		d.vector = 4
	}
}

func (d *ptxDecl) endDeclarator() {
	for ; d.unknown > 0; d.unknown-- { // an initialiser has no more elements than bytes
		d.elements = times(d.elements, d.length)
	}
	d.total = min(d.total+d.elements, maxVariables)
	d.elements, d.length, d.assigned, d.inside = 1, 0, false, false
}

// times multiplies, up to maxVariables.
func times(a, b uint64) uint64 {
	if a > maxVariables/max(b, 1) {
		return maxVariables
	}
	return a * b
}
