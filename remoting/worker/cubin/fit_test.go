package cubin

import (
	"bytes"
	"errors"
	"math/rand"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// A compressed cubin is looked at once it is unpacked, if it is the one that the driver takes.
func TestFitsUnpacked(t *testing.T) {
	file := elf(map[string][]byte{".text.k": make([]byte, 100), ".nv.info.k": info([]Param{{0, 8}})})
	table := int(le.Uint64(file[40:]))
	for at := table; at < len(file); at += 64 {
		le.PutUint32(file[at+4:], 1) // PROGBITS, which elf leaves out
	}
	beyond := bytes.Clone(file)
	le.PutUint64(beyond[table+64+32:], 1<<30)
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	packed := func(b []byte) []byte { return fatEntry(kindELF, 90, flagZstd, w.EncodeAll(b, nil), len(b)) }
	for _, c := range []struct {
		name  string
		image []byte
		want  error
	}{
		{"a file", container(packed(file)), nil},
		{"a section beyond it", container(packed(beyond)), ErrFormat},
		{"a file cut short", container(packed(file[:len(file)-1])), ErrFormat},
		{"one for another GPU", container(fatEntry(kindELF, 80, flagZstd, w.EncodeAll(beyond, nil), len(beyond)), packed(file)), nil},
	} {
		if err := Fits(c.image); err != nil {
			t.Errorf("%s: %v before it is unpacked", c.name, err)
		}
		if _, err := Variables(c.image, 90); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// An image that tells of more than it has does not fit; everything else is the driver's to judge.
func TestFits(t *testing.T) {
	file := elf(map[string][]byte{".text.k": make([]byte, 100), ".nv.info.k": info([]Param{{0, 8}})})
	for at := int(le.Uint64(file[40:])); at < len(file); at += 64 {
		le.PutUint32(file[at+4:], 1) // PROGBITS, which elf leaves out
	}
	whole := container(fatEntry(kindELF, 90, 0, file, 0))
	change := func(b []byte, f func(b []byte)) []byte {
		b = bytes.Clone(b)
		f(b)
		return b
	}
	table := int(le.Uint64(file[40:]))
	for _, c := range []struct {
		name  string
		image []byte
		fits  bool
	}{
		{"a file", file, true},
		{"a container", whole, true},
		{"text", []byte(".version 7.0\n"), true},
		{"a container and more behind it", append(bytes.Clone(whole), make([]byte, 100)...), true},
		{"a container cut short", whole[:len(whole)-1], false},
		{"only a magic number", whole[:4], false},
		{"a larger container", change(whole, func(b []byte) { le.PutUint64(b[8:], 1<<40) }), false},
		{"a larger entry", change(whole, func(b []byte) { le.PutUint64(b[16+8:], uint64(len(file)+8)) }), false},
		{"an entry's header beyond it", change(whole, func(b []byte) { le.PutUint32(b[16+4:], 1<<31) }), false},
		{"compressed bytes beyond their entry", change(whole, func(b []byte) { le.PutUint64(b[16+40:], flagZstd); le.PutUint32(b[16+16:], uint32(len(file)+8)) }), false},
		{"a file cut short", file[:len(file)-1], false},
		{"a header cut short", file[:50], false},
		{"another class of file", change(file, func(b []byte) { b[4] = 1 }), false},
		{"a section beyond the file", change(file, func(b []byte) { le.PutUint64(b[table+64+32:], 1<<30) }), false},
		{"a section that wraps", change(file, func(b []byte) { le.PutUint64(b[table+64+24:], ^uint64(0)-8) }), false},
		{"a section without bytes", change(file, func(b []byte) { le.PutUint32(b[table+64+4:], noBits); le.PutUint64(b[table+64+32:], 1<<30) }), true},
		{"an inactive section beyond the file", change(file, func(b []byte) { le.PutUint32(b[table+4:], 0); le.PutUint64(b[table+32:], 1<<30) }), false},
		{"an inactive section", change(file, func(b []byte) { clear(b[table : table+64]) }), true},
		{"more sections", change(file, func(b []byte) { le.PutUint16(b[60:], 1000) }), false},
		{"very many sections", change(file, func(b []byte) { le.PutUint16(b[60:], 0); le.PutUint64(b[table+32:], 1<<60) }), false},
		{"segments beyond the file", change(file, func(b []byte) {
			le.PutUint64(b[32:], uint64(len(b)))
			le.PutUint16(b[54:], 56)
			le.PutUint16(b[56:], 1)
		}), false},
		{"a segment beyond the file", change(file, func(b []byte) {
			le.PutUint64(b[32:], uint64(table+64)) // a section's header serves as one
			le.PutUint64(b[table+64+8:], 1<<40)
			le.PutUint64(b[table+64+32:], 1)
			le.PutUint16(b[54:], 56)
			le.PutUint16(b[56:], 1)
		}), false},
		{"a section of an entry beyond it", change(whole, func(b []byte) { le.PutUint64(b[80+table+64+32:], 1<<30) }), false},
	} {
		if err := Fits(c.image); (err == nil) != c.fits || err != nil && !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// Fits reads no byte beyond an image, whatever is in it.
func TestFitsMutated(t *testing.T) {
	r := rand.New(rand.NewSource(1))
	whole := container(fatEntry(kindELF, 90, 0, elf(map[string][]byte{".text.k": make([]byte, 100)}), 0))
	for range 100000 {
		b := bytes.Clone(whole)
		for range 1 + r.Intn(4) {
			at := r.Intn(len(b))
			b[at] = byte(r.Intn(256))
		}
		_ = Fits(b[:r.Intn(len(b)+1):len(b)])
		if len(b) > 80 {
			_ = Fits(b[80:])
		}
	}
}
