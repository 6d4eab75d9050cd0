// Package cubin finds the parameter layout of kernels in module images, for
// drivers that do not tell it (before CUDA 12.4). It reads what compilers
// write and what anybody may forge: every offset is checked, every size
// bounded.
package cubin

// An image is a fat binary (a container of entries, each a cubin or PTX text,
// perhaps compressed), a set of them to be linked, a bare cubin (an ELF file), or bare PTX. All entries of
// a fat binary come from one source, so a kernel's layout is the same in each,
// and the first entry that has the kernel will do.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"
)

// Param is one kernel parameter's place in the parameter buffer, in bytes.
type Param struct{ Offset, Size uint32 }

// Errors.
var (
	// ErrFormat says that an image is none of the forms known, or damaged.
	ErrFormat = errors.New("cubin: image not understood")
	// ErrTooLarge says that a compressed entry would be too large.
	ErrTooLarge = errors.New("cubin: compressed image too large")
	// ErrNotFound says that no entry of an image has the kernel.
	ErrNotFound = errors.New("cubin: kernel not found")
)

const (
	containerMagic = 0xBA55ED50
	maxParams      = 4096
	maxName        = 64 << 10 // bytes of a section's name
	maxList        = 1 << 20  // bytes of a parameter list
)

// Bounds of an entry that is compressed, in bytes of what comes out. Compilers' output shrinks to
// a tenth; one that would grow more than 64 times is somebody's attempt at the worker's memory.
const (
	maxEntry   = 1 << 30
	plainEntry = 64 << 20 // any entry may have as much
	maxGrowth  = 64
)

// Flags of a container's entry.
const (
	flagOldCompression = 0x1000
	flagLZ4            = 0x2000
	flagZstd           = 0x8000
)

// Params gives a kernel's parameters in order. cc, as 90 for 9.0, is the GPU's;
// entries for it are looked at first.
func Params(image []byte, kernel string, cc int) ([]Param, error) {
	switch {
	case IsLinked(image):
		return linkedParams(image, kernel, cc)
	case len(image) >= 16 && binary.LittleEndian.Uint32(image) == containerMagic:
		return fatbin(image, kernel, cc)
	case bytes.HasPrefix(image, []byte("\x7fELF")):
		return elfParams(image, kernel)
	case bytes.Contains(image[:min(len(image), 1<<20)], []byte(".version")):
		return ptxParams(image, kernel)
	}
	return nil, ErrFormat
}

// VariablesVersion changes whenever Variables gives another answer for an image than before: answers are kept.
const VariablesVersion = 1

// Variables gives the device memory that an image's variables take on a GPU, in
// bytes: of a cubin exactly, of PTX as it is written, which the driver may
// still do without in part. Of an image that it does not understand it gives 0. The error is ErrTooLarge, or ErrFormat
// if the cubin for that GPU was compressed and its headers lead beyond its end, which Fits has not seen.
func Variables(image []byte, cc int) (uint64, error) {
	switch {
	case IsLinked(image):
		return linkedVariables(image, cc)
	case len(image) >= 16 && binary.LittleEndian.Uint32(image) == containerMagic:
		es, err := entries(image)
		if err != nil {
			return 0, nil
		}
		// The driver takes the newest cubin of the GPU's major version, and
		// without one the newest PTX.
		var best *entry
		for i := range es {
			e := &es[i]
			fits := e.kind == kindELF && e.sm/10 == cc/10 || e.kind == kindPTX
			if fits && e.sm <= cc && (best == nil || e.kind > best.kind || e.kind == best.kind && e.sm > best.sm) {
				best = e
			}
		}
		if best == nil {
			return 0, nil
		}
		b, err := best.bytes()
		if errors.Is(err, ErrTooLarge) {
			return 0, err
		}
		if err != nil {
			return 0, nil
		}
		if best.kind == kindPTX {
			return ptxVariables(b), nil
		}
		if packed, _ := best.packed(); packed && bytes.HasPrefix(b, []byte("\x7fELF")) {
			if err := elfFits(b); err != nil {
				return 0, err
			}
		}
		return variables(b), nil
	case bytes.HasPrefix(image, []byte("\x7fELF")):
		return variables(image), nil
	}
	return ptxVariables(image), nil
}

// variables sums the sections of __device__ variables.
func variables(b []byte) uint64 {
	var n uint64
	_ = sections(b, func(name, _ []byte, size uint64) bool {
		if bytes.HasPrefix(name, []byte(".nv.global")) {
			n += min(size, 1<<50)
		}
		return n < 1<<50
	})
	return n
}

func fatbin(b []byte, kernel string, cc int) ([]Param, error) {
	es, err := entries(b)
	if err != nil {
		return nil, err
	}
	var best, other []entry
	for _, e := range es {
		if e.kind == kindELF && e.sm == cc {
			best = append(best, e)
		} else {
			other = append(other, e)
		}
	}
	var first error
	for _, e := range append(best, other...) {
		ps, err := e.params(kernel)
		if err == nil {
			return ps, nil
		}
		if first == nil || errors.Is(first, ErrNotFound) {
			first = err
		}
	}
	if first == nil {
		first = ErrNotFound
	}
	return nil, first
}

// entries lists a container's entries.
func entries(b []byte) ([]entry, error) {
	head := int(binary.LittleEndian.Uint16(b[6:]))
	size := binary.LittleEndian.Uint64(b[8:])
	if head < 16 || head > len(b) || size > uint64(len(b)-head) {
		return nil, fmt.Errorf("%w: container of %d bytes in %d", ErrFormat, size, len(b))
	}
	b = b[head : head+int(size)]
	var es []entry
	for len(b) >= 64 {
		e := entry{
			kind:  binary.LittleEndian.Uint16(b),
			used:  uint64(binary.LittleEndian.Uint32(b[16:])),
			sm:    int(binary.LittleEndian.Uint32(b[28:])),
			flags: binary.LittleEndian.Uint64(b[40:]),
			plain: binary.LittleEndian.Uint64(b[56:]),
		}
		ehead := uint64(binary.LittleEndian.Uint32(b[4:]))
		payload := binary.LittleEndian.Uint64(b[8:])
		if ehead < 64 || ehead > uint64(len(b)) || payload > uint64(len(b))-ehead {
			return nil, fmt.Errorf("%w: entry of %d bytes in %d", ErrFormat, payload, len(b))
		}
		e.data = b[ehead : ehead+payload]
		es = append(es, e)
		b = b[ehead+payload:]
	}
	return es, nil
}

// Kinds of entries.
const (
	kindPTX = 1
	kindELF = 2
)

type entry struct {
	kind  uint16
	sm    int
	used  uint64 // compressed bytes
	plain uint64 // bytes once uncompressed
	flags uint64
	data  []byte
}

func (e *entry) params(kernel string) ([]Param, error) {
	b, err := e.bytes()
	if err != nil {
		return nil, err
	}
	switch e.kind {
	case kindELF:
		return elfParams(b, kernel)
	case kindPTX:
		return ptxParams(b, kernel)
	}
	return nil, ErrNotFound
}

// packed says whether an entry is compressed, and an error if it may not be unpacked.
func (e *entry) packed() (bool, error) {
	if e.flags&(flagOldCompression|flagLZ4|flagZstd) == 0 {
		return false, nil
	}
	if e.used > uint64(len(e.data)) {
		return true, fmt.Errorf("%w: compressed entry of %d bytes in %d, %d plain", ErrFormat, e.used, len(e.data), e.plain)
	}
	if most := min(maxEntry, max(plainEntry, maxGrowth*e.used)); e.plain > most {
		return true, fmt.Errorf("%w: an entry of %d bytes would have %d, at most %d are taken", ErrTooLarge, e.used, e.plain, most)
	}
	return true, nil
}

func (e *entry) bytes() ([]byte, error) {
	packed, err := e.packed()
	if err != nil {
		return nil, err
	}
	if !packed {
		return e.data, nil
	}
	in := e.data[:e.used]
	switch {
	case e.flags&flagLZ4 != 0:
		return lz4(in, int(e.plain))
	case e.flags&flagZstd != 0:
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxEntry), zstd.WithDecodeAllCapLimit(true))
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrFormat, err)
		}
		defer d.Close()
		out, err := d.DecodeAll(in, make([]byte, 0, e.plain))
		if err != nil || uint64(len(out)) != e.plain {
			return nil, fmt.Errorf("%w: zstd entry gives %d bytes of %d", ErrFormat, len(out), e.plain)
		}
		return out, nil
	}
	return nil, fmt.Errorf("%w: compression of flags %#x", ErrFormat, e.flags)
}

// lz4 decodes one LZ4 block into n bytes
// (https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md).
func lz4(in []byte, n int) ([]byte, error) {
	bad := func(why string) ([]byte, error) { return nil, fmt.Errorf("%w: lz4: %s", ErrFormat, why) }
	// A byte of input makes at most 255 of output.
	if n > 255*len(in)+64 {
		return bad("size is impossible")
	}
	out := make([]byte, 0, n)
	long := func(v int) (int, bool) {
		if v != 15 {
			return v, true
		}
		for {
			if len(in) == 0 {
				return 0, false
			}
			c := in[0]
			in = in[1:]
			if v += int(c); v > n+64 {
				return 0, false
			}
			if c != 255 {
				return v, true
			}
		}
	}
	for len(in) > 0 {
		token := in[0]
		in = in[1:]
		lit, ok := long(int(token >> 4))
		if !ok || lit > len(in) || lit > n-len(out) {
			return bad("literals overrun")
		}
		out = append(out, in[:lit]...)
		in = in[lit:]
		if len(in) == 0 {
			break
		}
		if len(in) < 2 {
			return bad("no offset")
		}
		off := int(in[0]) | int(in[1])<<8
		in = in[2:]
		m, ok := long(int(token & 15))
		m += 4
		if !ok || off == 0 || off > len(out) || m > n-len(out) {
			return bad("match overruns")
		}
		for range m { // a match may overlap itself
			out = append(out, out[len(out)-off])
		}
	}
	if len(out) != n {
		return bad("short")
	}
	return out, nil
}

// EIATTR_KPARAM_INFO and its successor for larger parameters, in the records of
// a .nv.info.KERNEL section. A record is a format byte, an attribute byte and
// 2 bytes of value, or for format 4 of length before the value.
const (
	formatSized   = 4
	attrParam     = 0x17
	attrParamV2   = 0x45
	paramInfoSize = 12
)

func elfParams(b []byte, kernel string) ([]Param, error) {
	info, err := section(b, ".nv.info."+kernel)
	if err != nil {
		return nil, err
	}
	var ps []Param
	seen := map[uint16]bool{}
	for len(info) >= 4 {
		n := 0
		if info[0] == formatSized {
			n = int(binary.LittleEndian.Uint16(info[2:]))
		}
		attr, v := info[1], info[4:]
		if n > len(v) {
			return nil, fmt.Errorf("%w: attribute %#x of %s overruns", ErrFormat, attr, kernel)
		}
		v, info = v[:n], v[n:]
		switch attr {
		case attrParamV2:
			return nil, fmt.Errorf("%w: %s describes its parameters in a form newer than this driver", ErrFormat, kernel)
		case attrParam:
			if n < paramInfoSize {
				return nil, fmt.Errorf("%w: parameter of %s in %d bytes", ErrFormat, kernel, n)
			}
			ordinal := binary.LittleEndian.Uint16(v[4:])
			if ordinal >= maxParams || seen[ordinal] {
				return nil, fmt.Errorf("%w: parameter %d of %s", ErrFormat, ordinal, kernel)
			}
			seen[ordinal] = true
			for len(ps) <= int(ordinal) {
				ps = append(ps, Param{})
			}
			ps[ordinal] = Param{
				Offset: uint32(binary.LittleEndian.Uint16(v[6:])),
				Size:   binary.LittleEndian.Uint32(v[8:]) >> 18,
			}
		}
	}
	if len(seen) != len(ps) {
		return nil, fmt.Errorf("%w: %d of %d parameters of %s", ErrFormat, len(seen), len(ps), kernel)
	}
	return ps, nil
}

// section finds an ELF file's section by name.
func section(b []byte, name string) ([]byte, error) {
	var found []byte
	ok := false
	err := sections(b, func(n, data []byte, _ uint64) bool {
		if string(n) == name {
			found, ok = data, true
		}
		return !ok
	})
	if err == nil && !ok {
		err = ErrNotFound
	}
	return found, err
}

// noBits is the type of a section that takes memory and no bytes of the file.
const noBits = 8

// sections calls f for each section of an ELF file, with its name, its bytes
// and its size in memory, until f returns false (System V ABI, chapter 4).
func sections(b []byte, f func(name, data []byte, size uint64) bool) error {
	bad := func(why string) error { return fmt.Errorf("%w: elf: %s", ErrFormat, why) }
	if len(b) < 64 || b[4] != 2 || b[5] != 1 {
		return bad("not a 64-bit little-endian file")
	}
	le := binary.LittleEndian
	off, size := le.Uint64(b[40:]), uint64(le.Uint16(b[58:]))
	n, names := uint64(le.Uint16(b[60:])), uint64(le.Uint16(b[62:]))
	if size < 64 || off > uint64(len(b)) {
		return bad("section table is outside")
	}
	table := b[off:]
	if n == 0 || names == 0xffff { // many sections: the counts are in the first
		if len(table) < 64 {
			return bad("section table is outside")
		}
		if n == 0 {
			n = le.Uint64(table[32:])
		}
		if names == 0xffff {
			names = uint64(le.Uint32(table[40:]))
		}
	}
	if n > uint64(len(table))/size || names >= n {
		return bad("section table is outside")
	}
	data := func(i uint64) ([]byte, uint64) {
		h := table[i*size:]
		at, n := le.Uint64(h[24:]), le.Uint64(h[32:])
		if le.Uint32(h[4:]) == noBits || at > uint64(len(b)) || n > uint64(len(b))-at {
			return nil, n
		}
		return b[at : at+n], n
	}
	strs, _ := data(names)
	for i := range n {
		at := uint64(le.Uint32(table[i*size:]))
		if at >= uint64(len(strs)) {
			continue
		}
		// All may have the same name, as long as the table.
		name := strs[at:min(uint64(len(strs)), at+maxName)]
		end := bytes.IndexByte(name, 0)
		if end < 0 {
			continue
		}
		d, m := data(i)
		if !f(name[:end], d, m) {
			return nil
		}
	}
	return nil
}

// ptxParams reads a kernel's parameters from PTX text (PTX ISA, "Kernel
// Function Parameters").
func ptxParams(b []byte, kernel string) ([]Param, error) {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	for text := b; ; {
		i := bytes.Index(text, []byte(".entry"))
		if i < 0 {
			return nil, ErrNotFound
		}
		text = text[i+len(".entry"):]
		rest := bytes.TrimLeft(text, " \t\r\n")
		tail, ok := bytes.CutPrefix(rest, []byte(kernel))
		if !ok {
			continue
		}
		tail = bytes.TrimLeft(tail, " \t\r\n")
		if len(tail) == 0 || tail[0] == '{' || tail[0] == '.' {
			return nil, nil // no parameter list
		}
		if tail[0] != '(' {
			continue // a longer name
		}
		end := bytes.IndexByte(tail[:min(len(tail), maxList)], ')')
		if end < 0 {
			return nil, fmt.Errorf("%w: ptx: parameters of %s do not end", ErrFormat, kernel)
		}
		return ptxList(string(tail[1:end]), kernel)
	}
}

var ptxTypes = map[string]uint32{
	".b8": 1, ".u8": 1, ".s8": 1, ".b16": 2, ".u16": 2, ".s16": 2, ".f16": 2, ".b32": 4, ".u32": 4, ".s32": 4, ".f32": 4,
	".b64": 8, ".u64": 8, ".s64": 8, ".f64": 8, ".b128": 16, ".texref": 8, ".samplerref": 8, ".surfref": 8,
}

func ptxList(list, kernel string) ([]Param, error) {
	var ps []Param
	at := uint64(0)
	if strings.TrimSpace(list) == "" {
		return nil, nil
	}
	for _, decl := range strings.Split(list, ",") {
		var size, align, count uint64 = 0, 0, 1
		words := strings.Fields(decl)
		for i := 0; i < len(words); i++ {
			w := words[i]
			switch {
			case w == ".align" && i+1 < len(words):
				n, err := strconv.ParseUint(words[i+1], 10, 16)
				if err != nil {
					return nil, fmt.Errorf("%w: ptx: %q in %s", ErrFormat, decl, kernel)
				}
				if size == 0 { // behind the type it is the pointee's
					align = n
				}
				i++
			case ptxTypes[w] != 0:
				size = uint64(ptxTypes[w])
			}
		}
		if i := strings.IndexByte(decl, '['); i >= 0 {
			j := strings.IndexByte(decl[i:], ']')
			if j < 0 {
				return nil, fmt.Errorf("%w: ptx: %q in %s", ErrFormat, decl, kernel)
			}
			n, err := strconv.ParseUint(strings.TrimSpace(decl[i+1:i+j]), 10, 32)
			if err != nil {
				return nil, fmt.Errorf("%w: ptx: %q in %s", ErrFormat, decl, kernel)
			}
			count = n
		}
		align = max(align, size)
		size *= count
		if size == 0 || size > 1<<20 || align > 1<<16 || align&(align-1) != 0 || len(ps) == maxParams {
			return nil, fmt.Errorf("%w: ptx: %q in %s", ErrFormat, decl, kernel)
		}
		at = (at + align - 1) &^ (align - 1)
		ps = append(ps, Param{Offset: uint32(at), Size: uint32(size)})
		at += size
	}
	return ps, nil
}
