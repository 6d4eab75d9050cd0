package cubin

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// containerMagicBytes begins a container, as it stands in a file.
var containerMagicBytes = binary.LittleEndian.AppendUint32(nil, containerMagic)

// containerVersion follows the magic number.
const containerVersion = 1

// CheckInput judges an input of the linker: it may be an image, or an object or an archive that has fat binaries
// anywhere. The error is ErrFormat if headers of it lead beyond its end, and ErrTooLarge if an entry, or all of them, would
// unpack to more than is taken of an image. Everything else is the driver's to judge.
func CheckInput(input []byte) error {
	if err := Fits(input); err != nil {
		return err
	}
	var sum uint64
	for rest := input; ; {
		i := bytes.Index(rest, containerMagicBytes)
		if i < 0 || len(rest)-i < 16 {
			return nil
		}
		rest = rest[i:]
		if binary.LittleEndian.Uint16(rest[4:]) != containerVersion { // other bytes that look so
			rest = rest[len(containerMagicBytes):]
			continue
		}
		if err := containerFits(rest); err != nil {
			return err
		}
		es, err := entries(rest)
		if err != nil {
			return err
		}
		for i := range es {
			packed, err := es[i].packed()
			if errors.Is(err, ErrTooLarge) {
				return err
			}
			if packed {
				sum += min(es[i].plain, maxEntry+1)
			}
		}
		if sum > maxEntry {
			return fmt.Errorf("%w: the code of an input would have %d bytes, at most %d are taken", ErrTooLarge, sum, maxEntry)
		}
		head, size := binary.LittleEndian.Uint16(rest[6:]), binary.LittleEndian.Uint64(rest[8:])
		rest = rest[uint64(head)+size:]
	}
}
