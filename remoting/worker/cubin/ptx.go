package cubin

import (
	"bytes"
	"strconv"
	"strings"
)

// maxVariables is what a sum of variables stops at, in bytes.
const maxVariables = 1 << 50

// ptxVariables sums the variables that PTX declares in global memory:
//
//	.visible .global .align 8 .b8 table[4][1024];
//	.global .f32 a = 1.0, b;
func ptxVariables(b []byte) uint64 {
	var n uint64
	for text := ptxCode(b); n < maxVariables; {
		i := bytes.Index(text, []byte(".global"))
		if i < 0 {
			break
		}
		// In ld.global and its like it is part of a word.
		whole := (i == 0 || isSpace(text[i-1]) || text[i-1] == ';' || text[i-1] == '}') &&
			i+7 < len(text) && (isSpace(text[i+7]) || text[i+7] == '.')
		line := text[:i]
		if j := bytes.LastIndexAny(line, ";{}"); j >= 0 {
			line = line[j+1:]
		}
		text = text[i+7:]
		if !whole || bytes.Contains(line, []byte(".extern")) {
			continue
		}
		end := bytes.IndexByte(text, ';')
		if end < 0 {
			end = len(text)
		}
		n += ptxDeclared(string(text[:end]))
		text = text[end:]
	}
	return min(n, maxVariables)
}

func isSpace(c byte) bool {
	return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v'
}

// ptxCode is PTX without its comments.
func ptxCode(b []byte) []byte {
	if !bytes.Contains(b, []byte("/*")) && !bytes.Contains(b, []byte("//")) {
		return b
	}
	out := make([]byte, 0, len(b))
	for len(b) > 0 {
		i := bytes.IndexByte(b, '/')
		if i < 0 || i+1 == len(b) {
			break
		}
		out = append(out, b[:i]...)
		end := -1
		switch b[i+1] {
		case '/':
			end = bytes.IndexByte(b[i:], '\n')
		case '*':
			if end = bytes.Index(b[i+2:], []byte("*/")); end >= 0 {
				end += 4
			}
		default:
			out = append(out, '/')
			b = b[i+1:]
			continue
		}
		out = append(out, ' ')
		if end < 0 {
			return out
		}
		b = b[i+end:]
	}
	return append(out, b...)
}

// ptxDeclared is the size of the variables in what follows ".global", in bytes.
func ptxDeclared(decl string) uint64 {
	size, vector := uint64(0), uint64(1)
	for _, w := range strings.Fields(strings.ReplaceAll(decl, ".", " .")) {
		w, _, _ = strings.Cut(w, "[")
		switch {
		case ptxTypes[w] != 0 && size == 0:
			size = uint64(ptxTypes[w])
		case w == ".v2":
			vector = 2
		case w == ".v4":
			vector = 4
		}
	}
	if size == 0 { // opaque types, and what later versions bring
		size = 16
	}
	size *= vector
	total := uint64(0)
	depth := 0
	start := 0
	one := func(v string) {
		v, _, _ = strings.Cut(v, "=")
		n := size
		for {
			i := strings.IndexByte(v, '[')
			j := strings.IndexByte(v, ']')
			if i < 0 || j < i {
				break
			}
			// An empty one is as long as its initialiser, which is no longer
			// than the text.
			d, err := strconv.ParseUint(strings.TrimSpace(v[i+1:j]), 0, 64)
			if err != nil {
				d = uint64(len(decl))
			}
			if d > maxVariables/max(n, 1) {
				n = maxVariables
				break
			}
			n *= d
			v = v[j+1:]
		}
		total = min(total+n, maxVariables)
	}
	for i := range len(decl) {
		switch decl[i] {
		case '{', '(':
			depth++
		case '}', ')':
			depth--
		case ',':
			if depth == 0 {
				one(decl[start:i])
				start = i + 1
			}
		}
	}
	one(decl[start:])
	return total
}
