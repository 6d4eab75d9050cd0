package cubin

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// Fits says whether an image ends where its headers say. The driver is given an address and no size, so it
// would read beyond an image whose headers tell of more. What is compressed is looked at as far as it is not
// unpacked. Text needs no more than the NUL byte behind it, and what is neither is text to the driver.
func Fits(image []byte) error {
	switch {
	case IsLinked(image):
		set, err := Linked(image)
		if err != nil {
			return err
		}
		for _, c := range set {
			if err := containerFits(c); err != nil {
				return err
			}
		}
		return nil
	case len(image) >= 4 && binary.LittleEndian.Uint32(image) == containerMagic:
		return containerFits(image)
	case bytes.HasPrefix(image, []byte("\x7fELF")):
		return elfFits(image)
	}
	return nil
}

func containerFits(b []byte) error {
	if len(b) < 16 {
		return fmt.Errorf("%w: container of %d bytes", ErrFormat, len(b))
	}
	es, err := entries(b)
	if err != nil {
		return err
	}
	for i := range es {
		e := &es[i]
		// One that would be too large is for Variables to refuse: the driver may not want it.
		packed, err := e.packed()
		if err != nil && !errors.Is(err, ErrTooLarge) {
			return err
		}
		if !packed && e.kind == kindELF {
			if err := elfFits(e.data); err != nil {
				return err
			}
		}
	}
	return nil
}

// elfFits says whether an ELF file's tables, sections and segments are within the file (System V ABI, chapters 4 and 5).
func elfFits(b []byte) error {
	bad := func(what string, at, n uint64) error {
		return fmt.Errorf("%w: elf: %s of %d bytes at %d in a file of %d", ErrFormat, what, n, at, len(b))
	}
	if len(b) < 64 {
		return bad("header", 0, 64)
	}
	if b[4] != 2 || b[5] != 1 {
		return fmt.Errorf("%w: elf: not a 64-bit little-endian file", ErrFormat)
	}
	within := func(at, n uint64) bool { return at <= uint64(len(b)) && n <= uint64(len(b))-at }
	le := binary.LittleEndian
	at, size, n := le.Uint64(b[40:]), uint64(le.Uint16(b[58:])), uint64(le.Uint16(b[60:]))
	if at != 0 && n == 0 { // many sections: their number is in the first
		if size < 64 || !within(at, size) {
			return bad("section table", at, size)
		}
		if n = le.Uint64(b[at+32:]); n > uint64(len(b)) {
			return bad("section table", at, n)
		}
	}
	if n > 0 && (size < 64 || !within(at, n*size)) {
		return bad("section table", at, n*size)
	}
	for i := range n {
		h := b[at+i*size:]
		if kind := le.Uint32(h[4:]); kind == noBits {
			continue
		}
		// An inactive section has no bytes, but a reader that wants to know where the file ends may not look at its kind.
		if from, long := le.Uint64(h[24:]), le.Uint64(h[32:]); !within(from, long) {
			return bad("section", from, long)
		}
	}
	at, size, n = le.Uint64(b[32:]), uint64(le.Uint16(b[54:])), uint64(le.Uint16(b[56:]))
	if n > 0 && (size < 56 || !within(at, n*size)) {
		return bad("segment table", at, n*size)
	}
	for i := range n {
		h := b[at+i*size:]
		if from, long := le.Uint64(h[8:]), le.Uint64(h[32:]); long > 0 && !within(from, long) {
			return bad("segment", from, long)
		}
	}
	return nil
}
