package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func block(size uint32, codec, words uint16, parts ...[]byte) []byte {
	var e Encoder
	(&Block{Size: size, Codec: codec, Words: words}).Encode(&e)
	return slices.Concat(append([][]byte{e.Buf()}, parts...)...)
}

func words(v ...uint32) (b []byte) {
	for _, w := range v {
		b = binary.LittleEndian.AppendUint32(b, w)
	}
	return b
}

// counted is n words 0, 3, 6, ...
func counted(n int) (b []byte) {
	for i := range n {
		b = binary.LittleEndian.AppendUint32(b, uint32(3*i))
	}
	return b
}

func TestDecompress(t *testing.T) {
	each := make([]byte, 256)
	for i := range each {
		each[i] = byte(i)
	}
	for name, c := range map[string]struct {
		src  []byte
		want []byte
	}{
		"nothing":      {nil, nil},
		"plain":        {block(5, BlockPlain, 0, []byte("hello")), []byte("hello")},
		"one word":     {block(12, BlockPalette, 1, words(7)), words(7, 7, 7)},
		"two words":    {block(12, BlockPalette, 2, words(7, 9), []byte{0x10, 0x01}), words(7, 9, 9)},
		"16 words":     {block(16, BlockPalette, 16, counted(16), []byte{0x0f, 0x3e}), words(45, 0, 42, 9)},
		"17 words":     {block(8, BlockPalette, 17, counted(17), []byte{16, 0}), words(48, 0)},
		"256 words":    {block(1024, BlockPalette, 256, counted(256), each), counted(256)},
		"several":      {slices.Concat(block(4, BlockPalette, 1, words(1)), block(1, BlockPlain, 0, []byte{2}), block(8, BlockPalette, 1, words(3))), slices.Concat(words(1), []byte{2}, words(3, 3))},
		"after plain":  {slices.Concat(block(3, BlockPlain, 0, []byte("abc")), block(4, BlockPalette, 1, words(1))), slices.Concat([]byte("abc"), words(1))},
		"unused words": {block(4, BlockPalette, 20, counted(20), []byte{0}), words(0)},
	} {
		dst := bytes.Repeat([]byte{0xee}, len(c.want)+16)
		if err := Decompress(dst[:len(c.want):len(c.want)], c.src); err != nil || !bytes.Equal(dst[:len(c.want)], c.want) {
			t.Errorf("%s: %v, %v; want %v", name, dst[:len(c.want)], err, c.want)
		}
		if !bytes.Equal(dst[len(c.want):], bytes.Repeat([]byte{0xee}, 16)) {
			t.Errorf("%s: bytes behind the end were written", name)
		}
	}
}

func TestDecompressRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		src  []byte
		size int
		why  string
	}{
		"short header":          {make([]byte, 7), 8, "block 1: 7 bytes of a header"},
		"no bytes":              {block(0, BlockPlain, 0), 8, "stands for 0 bytes"},
		"too many":              {block(9, BlockPlain, 0, make([]byte, 9)), 8, "stands for 9 bytes where 8 are left"},
		"far too many":          {block(1<<32-1, BlockPalette, 1, words(1)), 8, "4294967295 bytes where 8 are left"},
		"too many in the end":   {slices.Concat(block(4, BlockPalette, 1, words(1)), block(8, BlockPalette, 1, words(1))), 8, "block 2: it stands for 8 bytes where 4 are left"},
		"too few":               {block(4, BlockPalette, 1, words(1)), 8, "4 bytes too few"},
		"nothing for something": {nil, 1, "1 bytes too few"},
		"codec":                 {block(8, 2, 0, make([]byte, 8)), 8, "unknown codec 2"},
		"plain with words":      {block(8, BlockPlain, 1, make([]byte, 12)), 8, "1 words in a block without a table"},
		"plain cut":             {block(8, BlockPlain, 0, make([]byte, 7)), 8, "7 of 8 bytes"},
		"empty table":           {block(8, BlockPalette, 0, make([]byte, 8)), 8, "a table of 0 words"},
		"large table":           {block(8, BlockPalette, 257, make([]byte, 2000)), 8, "a table of 257 words"},
		"odd size":              {block(7, BlockPalette, 1, words(1)), 8, "for 7 bytes"},
		"table cut":             {block(8, BlockPalette, 1, make([]byte, 3)), 8, "3 of 4 bytes"},
		"indices cut":           {block(8, BlockPalette, 20, counted(20), []byte{1}), 8, "81 of 82 bytes"},
		"half bytes cut":        {block(12, BlockPalette, 2, words(1, 2), []byte{1}), 12, "9 of 10 bytes"},
		"index":                 {block(8, BlockPalette, 20, counted(20), []byte{1, 20}), 8, "index 20 in a table of 20"},
		"half byte":             {block(8, BlockPalette, 3, counted(3), []byte{0x30}), 8, "index 3 in a table of 3"},
		"what pads":             {block(4, BlockPalette, 3, counted(3), []byte{0xf0}), 4, "index 15 in a table of 3"},
	} {
		dst := bytes.Repeat([]byte{0xee}, c.size+16)
		err := Decompress(dst[:c.size:c.size], c.src)
		if !errors.Is(err, ErrCompressed) || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v; want %q", name, err, c.why)
		}
		if !bytes.Equal(dst[c.size:], bytes.Repeat([]byte{0xee}, 16)) {
			t.Errorf("%s: bytes behind the end were written", name)
		}
	}
}

// FuzzDecompress: whatever comes, nothing is written behind the end, and what is accepted is what an
// implementation without any haste makes of it.
func FuzzDecompress(f *testing.F) {
	f.Add(block(5, BlockPlain, 0, []byte("hello")), uint16(5))
	f.Add(block(12, BlockPalette, 2, words(7, 9), []byte{0x10, 0x01}), uint16(12))
	f.Add(block(8, BlockPalette, 17, counted(17), []byte{16, 0}), uint16(8))
	f.Add(slices.Concat(block(4, BlockPalette, 1, words(1)), block(1, BlockPlain, 0, []byte{2})), uint16(5))
	f.Fuzz(func(t *testing.T, src []byte, size uint16) {
		before := slices.Clone(src)
		dst := bytes.Repeat([]byte{0xee}, int(size)+64)
		err := Decompress(dst[:size:size], src)
		if !bytes.Equal(dst[size:], bytes.Repeat([]byte{0xee}, 64)) {
			t.Fatal("bytes behind the end were written")
		}
		if !bytes.Equal(src, before) {
			t.Fatal("the source was written")
		}
		want, ok := decompressSlowly(src, int(size))
		if ok != (err == nil) || ok && !bytes.Equal(dst[:size], want) {
			t.Fatalf("%v, %x; want %v, %x", err, dst[:size], ok, want)
		}
	})
}

// decompressSlowly reads the specification once more.
func decompressSlowly(src []byte, size int) (out []byte, ok bool) {
	for len(src) > 0 {
		if len(src) < 8 {
			return nil, false
		}
		n, codec, k := int(binary.LittleEndian.Uint32(src)), binary.LittleEndian.Uint16(src[4:]), int(binary.LittleEndian.Uint16(src[6:]))
		src = src[8:]
		if n == 0 || n > size-len(out) {
			return nil, false
		}
		switch {
		case codec == 0 && k == 0 && len(src) >= n:
			out, src = append(out, src[:n]...), src[n:]
		case codec == 1 && k >= 1 && k <= 256 && n%4 == 0 && len(src) >= 4*k:
			table := src[:4*k]
			src = src[4*k:]
			var index []int
			switch w := n / 4; {
			case k == 1:
				index = make([]int, w)
			case k <= 16:
				if len(src) < (w+1)/2 {
					return nil, false
				}
				for _, b := range src[:(w+1)/2] {
					index = append(index, int(b&15), int(b>>4))
				}
				src = src[(w+1)/2:]
			default:
				if len(src) < w {
					return nil, false
				}
				for _, b := range src[:w] {
					index = append(index, int(b))
				}
				src = src[w:]
			}
			for i, x := range index {
				if x >= k {
					return nil, false
				}
				if i < n/4 {
					out = append(out, table[4*x:4*x+4]...)
				}
			}
		default:
			return nil, false
		}
	}
	return out, len(out) == size
}

func BenchmarkDecompress(b *testing.B) {
	index := make([]byte, 256<<10)
	for i := range index {
		index[i] = byte(rand.Uint32())
	}
	src, dst := block(1<<20, BlockPalette, 256, counted(256), index), make([]byte, 1<<20)
	b.SetBytes(1 << 20)
	for b.Loop() {
		if err := Decompress(dst, src); err != nil {
			b.Fatal(err)
		}
	}
}
