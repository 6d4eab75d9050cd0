package cubin

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// containerMagicBytes begins a container, as it stands in a file.
var containerMagicBytes = binary.LittleEndian.AppendUint32(nil, containerMagic)

// maxDamaged bounds the damaged fat binaries of an input, because each is searched for its end.
const maxDamaged = 64

// CheckPacked looks for fat binaries anywhere in an input of the linker: it may be one, or an object or an
// archive that has some. The error is ErrTooLarge if one of their entries, or all of them, would unpack to more than
// is taken of an image, and ErrFormat if too many of them are damaged. What is no fat binary is the driver's to judge.
func CheckPacked(input []byte) error {
	var sum uint64
	damaged := 0
	for rest := input; ; {
		i := bytes.Index(rest, containerMagicBytes)
		if i < 0 || len(rest)-i < 16 {
			return nil
		}
		rest = rest[i:]
		es, err := entries(rest)
		if err != nil {
			if damaged++; damaged > maxDamaged {
				return fmt.Errorf("%w: more than %d damaged fat binaries in an input", ErrFormat, maxDamaged)
			}
			rest = rest[len(containerMagicBytes):]
			continue
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
