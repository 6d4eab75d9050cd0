package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrShort says that a message ended before its fields did.
var ErrShort = errors.New("wire: message too short")

// ErrRange says that a count or length in a message is beyond its limit.
var ErrRange = errors.New("wire: count or length beyond its limit")

// Decoder reads packed fields from a byte slice. It never reads outside the
// slice and never panics; the first error sticks and later reads give zero.
type Decoder struct {
	b   []byte
	off int
	err error
}

// NewDecoder returns a decoder of b. It keeps b; Bytes and Rest alias it.
func NewDecoder(b []byte) *Decoder { return &Decoder{b: b} }

// Reset makes d read b from its start.
func (d *Decoder) Reset(b []byte) { d.b, d.off, d.err = b, 0, nil }

// Err is the first error met, or nil.
func (d *Decoder) Err() error { return d.err }

// Fail makes ErrRange the decoder's error unless it has one already: for
// callers that check a count themselves.
func (d *Decoder) Fail() {
	if d.err == nil {
		d.err = ErrRange
	}
}

// Left is the number of bytes not read yet.
func (d *Decoder) Left() int { return len(d.b) - d.off }

// Rest returns the bytes not read yet and consumes them.
func (d *Decoder) Rest() []byte {
	if d.err != nil {
		return nil
	}
	r := d.b[d.off:]
	d.off = len(d.b)
	return r
}

// Done reports nil when everything was read without error, and an error when
// bytes are left over.
func (d *Decoder) Done() error {
	if d.err != nil {
		return d.err
	}
	if n := d.Left(); n != 0 {
		return fmt.Errorf("wire: %d bytes left over", n)
	}
	return nil
}

// Bytes returns the next n bytes, aliasing the input, or nil on error.
func (d *Decoder) Bytes(n int) []byte {
	if d.err != nil {
		return nil
	}
	if n < 0 || n > len(d.b)-d.off {
		d.err = ErrShort
		return nil
	}
	r := d.b[d.off : d.off+n : d.off+n]
	d.off += n
	return r
}

// U8 reads one byte.
func (d *Decoder) U8() uint8 {
	if b := d.Bytes(1); b != nil {
		return b[0]
	}
	return 0
}

// U16 reads 2 bytes.
func (d *Decoder) U16() uint16 {
	if b := d.Bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

// U32 reads 4 bytes.
func (d *Decoder) U32() uint32 {
	if b := d.Bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// U64 reads 8 bytes.
func (d *Decoder) U64() uint64 {
	if b := d.Bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// I8 reads one byte as a signed number.
func (d *Decoder) I8() int8 { return int8(d.U8()) }

// I16 reads 2 bytes as a signed number.
func (d *Decoder) I16() int16 { return int16(d.U16()) }

// I32 reads 4 bytes as a signed number.
func (d *Decoder) I32() int32 { return int32(d.U32()) }

// I64 reads 8 bytes as a signed number.
func (d *Decoder) I64() int64 { return int64(d.U64()) }

// F32 reads an IEEE 754 single.
func (d *Decoder) F32() float32 { return math.Float32frombits(d.U32()) }

// F64 reads an IEEE 754 double.
func (d *Decoder) F64() float64 { return math.Float64frombits(d.U64()) }

// Count reads a u32 count of elements of size bytes each and checks it as
// Elements does.
func (d *Decoder) Count(size, limit int) int { return d.Elements(d.U32(), size, limit) }

// Elements checks a count n that was read: that so many elements of size bytes
// each can still follow and that they are at most limit. With an error it is 0.
func (d *Decoder) Elements(n uint32, size, limit int) int {
	if d.err != nil {
		return 0
	}
	if size < 1 {
		size = 1
	}
	if uint64(n) > uint64(limit) {
		d.err = ErrRange
		return 0
	}
	if uint64(n)*uint64(size) > uint64(d.Left()) {
		d.err = ErrShort
		return 0
	}
	return int(n)
}

// Str reads a u32 length and so many bytes; NULL reads as "".
func (d *Decoder) Str() string {
	n := d.U32()
	if d.err != nil || n == NullString {
		return ""
	}
	if uint64(n) > uint64(d.Left()) {
		d.err = ErrShort
		return ""
	}
	return string(d.Bytes(int(n)))
}

// Encoder appends packed fields to a buffer that it owns and reuses. The zero value is ready
// to use.
type Encoder struct {
	b []byte
}

// Reset empties the encoder, keeping its memory.
func (e *Encoder) Reset() { e.b = e.b[:0] }

// Buf is what was encoded; valid until the next Reset or append.
func (e *Encoder) Buf() []byte { return e.b }

// Len is the number of bytes encoded.
func (e *Encoder) Len() int { return len(e.b) }

// U8 appends one byte.
func (e *Encoder) U8(v uint8) { e.b = append(e.b, v) }

// U16 appends 2 bytes.
func (e *Encoder) U16(v uint16) { e.b = binary.LittleEndian.AppendUint16(e.b, v) }

// U32 appends 4 bytes.
func (e *Encoder) U32(v uint32) { e.b = binary.LittleEndian.AppendUint32(e.b, v) }

// U64 appends 8 bytes.
func (e *Encoder) U64(v uint64) { e.b = binary.LittleEndian.AppendUint64(e.b, v) }

// I8 appends a signed byte.
func (e *Encoder) I8(v int8) { e.U8(uint8(v)) }

// I16 appends a signed number of 2 bytes.
func (e *Encoder) I16(v int16) { e.U16(uint16(v)) }

// I32 appends a signed number of 4 bytes.
func (e *Encoder) I32(v int32) { e.U32(uint32(v)) }

// I64 appends a signed number of 8 bytes.
func (e *Encoder) I64(v int64) { e.U64(uint64(v)) }

// F32 appends an IEEE 754 single.
func (e *Encoder) F32(v float32) { e.U32(math.Float32bits(v)) }

// F64 appends an IEEE 754 double.
func (e *Encoder) F64(v float64) { e.U64(math.Float64bits(v)) }

// Bytes appends b as it is.
func (e *Encoder) Bytes(b []byte) { e.b = append(e.b, b...) }

// Str appends a u32 length and the bytes of s.
func (e *Encoder) Str(s string) {
	e.U32(uint32(len(s)))
	e.b = append(e.b, s...)
}

// Fixed appends s cut or NUL-padded to n bytes; the last byte is always NUL.
func (e *Encoder) Fixed(s string, n int) { putText(e.room(n), s) }

// room appends n bytes, which the caller writes.
func (e *Encoder) room(n int) []byte {
	e.b = slices.Grow(e.b, n)
	e.b = e.b[:len(e.b)+n]
	return e.b[len(e.b)-n:]
}

// Align pads with zero bytes to a multiple of n.
func (e *Encoder) Align(n int) {
	for len(e.b)%n != 0 {
		e.b = append(e.b, 0)
	}
}

// Plain reports whether b is what m encodes to: whether nothing stands where a message that was read has its zeroes.
func Plain(m interface{ Encode(*Encoder) }, b []byte) bool {
	var e Encoder
	m.Encode(&e)
	return bytes.Equal(e.b, b)
}

// putText writes s cut or NUL-padded to b; the last byte is always NUL.
func putText(b []byte, s string) {
	n := copy(b[:len(b)-1], s)
	clear(b[n:])
}

func fixedString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// Truncate drops everything behind the first n bytes.
func (e *Encoder) Truncate(n int) { e.b = e.b[:n] }
