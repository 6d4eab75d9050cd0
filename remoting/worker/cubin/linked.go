package cubin

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// IsLinked reports whether an image is a linked set: what a separately compiled
// program has for a GPU that its linked image has no code for, which is that image
// and the objects' fat binaries, which the driver links. docs/protocol.md has the
// layout.
func IsLinked(image []byte) bool {
	return len(image) >= 16 && binary.LittleEndian.Uint32(image) == wire.LinkedMagic
}

// Linked splits a linked set into its containers: the linked image first, then
// the objects. Each begins on a multiple of 8 bytes and ends where its header says.
func Linked(image []byte) ([][]byte, error) {
	if !IsLinked(image) {
		return nil, fmt.Errorf("%w: not a linked set", ErrFormat)
	}
	var h wire.LinkedSet
	h.Decode(wire.NewDecoder(image))
	n := int(h.Count)
	table := image[wire.LinkedSetSize:]
	if n < 2 || n > wire.MaxLinked || len(table) < 8*n {
		return nil, fmt.Errorf("%w: linked set of %d containers in %d bytes", ErrFormat, n, len(image))
	}
	sizes, rest := table[:8*n], table[8*n:]
	set := make([][]byte, n)
	for i := range set {
		size := binary.LittleEndian.Uint64(sizes[8*i:])
		if size < 16 || size%8 != 0 || size > uint64(len(rest)) {
			return nil, fmt.Errorf("%w: container %d of a linked set has %d bytes of %d", ErrFormat, i, size, len(rest))
		}
		c := rest[:size:size]
		head := uint64(binary.LittleEndian.Uint16(c[6:]))
		if binary.LittleEndian.Uint32(c) != containerMagic || head < 16 || head > size || binary.LittleEndian.Uint64(c[8:]) != size-head {
			return nil, fmt.Errorf("%w: container %d of a linked set has a header that does not fit its %d bytes", ErrFormat, i, size)
		}
		set[i], rest = c, rest[size:]
	}
	if len(rest) != 0 {
		return nil, fmt.Errorf("%w: %d bytes behind a linked set", ErrFormat, len(rest))
	}
	return set, nil
}

// linkedParams finds a kernel in the linked image or in one of the objects.
func linkedParams(image []byte, kernel string, cc int) ([]Param, error) {
	set, err := Linked(image)
	if err != nil {
		return nil, err
	}
	first := error(ErrNotFound)
	for _, c := range set {
		ps, err := fatbin(c, kernel, cc)
		if err == nil {
			return ps, nil
		}
		if errors.Is(first, ErrNotFound) {
			first = err
		}
	}
	return nil, first
}

// linkedVariables gives the variables of the linked image, or where that has no
// code for the GPU, of all objects together.
func linkedVariables(image []byte, cc int) (uint64, error) {
	set, err := Linked(image)
	if err != nil {
		return 0, nil
	}
	n, err := Variables(set[0], cc)
	if n > 0 || err != nil {
		return n, err
	}
	for _, c := range set[1:] {
		m, err := Variables(c, cc)
		if err != nil {
			return 0, err
		}
		n += min(m, maxVariables)
	}
	return n, nil
}
