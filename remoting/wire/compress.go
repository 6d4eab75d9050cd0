package wire

// What a COPY_IN_COMPRESSED carries, docs/protocol.md, "Copies". The shim compresses (remoting/client/compress.c),
// the worker decompresses.

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrCompressed says that compressed bytes are not what docs/protocol.md describes.
var ErrCompressed = errors.New("wire: malformed compressed bytes")

// Decompress writes what the blocks of src stand for to dst, which must be exactly so many bytes. It writes
// nowhere else, whatever src holds, and allocates nothing.
func Decompress(dst, src []byte) error {
	for n := 1; len(src) > 0; n++ {
		if len(src) < BlockSize {
			return fmt.Errorf("%w: block %d: %d bytes of a header", ErrCompressed, n, len(src))
		}
		var b Block
		b.get(src)
		src = src[BlockSize:]
		if b.Size == 0 || uint64(b.Size) > uint64(len(dst)) {
			return fmt.Errorf("%w: block %d: it stands for %d bytes where %d are left", ErrCompressed, n, b.Size, len(dst))
		}
		used, err := b.decompress(dst[:b.Size], src)
		if err != nil {
			return fmt.Errorf("%w: block %d: %w", ErrCompressed, n, err)
		}
		dst, src = dst[b.Size:], src[used:]
	}
	if len(dst) > 0 {
		return fmt.Errorf("%w: %d bytes too few", ErrCompressed, len(dst))
	}
	return nil
}

// decompress writes one block to all of dst and says how many bytes of src it takes.
func (b *Block) decompress(dst, src []byte) (int, error) {
	switch b.Codec {
	case BlockPlain:
		if b.Words != 0 {
			return 0, fmt.Errorf("%d words in a block without a table", b.Words)
		}
		if len(src) < len(dst) {
			return 0, fmt.Errorf("%d of %d bytes", len(src), len(dst))
		}
		return copy(dst, src), nil
	case BlockPalette:
		return b.palette(dst, src)
	}
	return 0, fmt.Errorf("unknown codec %d", b.Codec)
}

func (b *Block) palette(dst, src []byte) (int, error) {
	n := int(b.Words)
	if n == 0 || n > PaletteWords || len(dst)%4 != 0 {
		return 0, fmt.Errorf("a table of %d words for %d bytes", n, len(dst))
	}
	words := len(dst) / 4
	indices := words
	switch {
	case n == 1:
		indices = 0
	case n <= PaletteNibbles:
		indices = (words + 1) / 2
	}
	if len(src) < 4*n+indices {
		return 0, fmt.Errorf("%d of %d bytes", len(src), 4*n+indices)
	}
	// Room for every index that a byte can have: those beyond the table are found afterwards.
	var table [PaletteWords]uint32
	for i := range n {
		table[i] = binary.LittleEndian.Uint32(src[4*i:])
	}
	index := src[4*n : 4*n+indices]
	var most byte
	switch {
	case n == 1:
		for ; len(dst) >= 4; dst = dst[4:] {
			binary.LittleEndian.PutUint32(dst, table[0])
		}
	case n <= PaletteNibbles:
		most = nibbles(dst, index, &table)
	default:
		for _, k := range index {
			binary.LittleEndian.PutUint32(dst, table[k])
			dst = dst[4:]
			most = max(most, k)
		}
	}
	if int(most) >= n {
		return 0, fmt.Errorf("index %d in a table of %d words", most, n)
	}
	return 4*n + indices, nil
}

// nibbles writes the words that half bytes name, and gives the greatest of these. What pads an odd one out counts as well.
func nibbles(dst, index []byte, table *[PaletteWords]uint32) (most byte) {
	for _, k := range index {
		low, high := k&15, k>>4
		binary.LittleEndian.PutUint32(dst, table[low])
		most = max(most, low, high)
		if dst = dst[4:]; len(dst) > 0 {
			binary.LittleEndian.PutUint32(dst, table[high])
			dst = dst[4:]
		}
	}
	return most
}
