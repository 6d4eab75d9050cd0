package worker

// Boxes of two and three dimensions, and how a copy of one is cut into slots.

/*
#include "driver.h"
*/
import "C"

import "github.com/sluice-hpc/sluice/remoting/wire"

// desc3D is one box of device memory or of an array; the host side is packed.
type desc3D struct{ wire.Box }

// maxSide bounds each length of a box, so that products cannot overflow
// unnoticed.
const maxSide = 1 << 40

// valid checks that the box's bytes can be counted.
func (b *desc3D) valid() bool {
	if b.Memtype != C.CU_MEMORYTYPE_DEVICE && b.Memtype != C.CU_MEMORYTYPE_ARRAY {
		return false
	}
	for _, v := range [...]uint64{b.W, b.H, b.D, b.X, b.Y, b.Z, b.Pitch, b.Height} {
		if v > maxSide {
			return false
		}
	}
	_, ok := b.size()
	return ok && b.W > 0 && b.H > 0 && b.D > 0
}

// size is the number of bytes in the box; false beyond any device's memory.
func (b *desc3D) size() (uint64, bool) {
	n := b.W
	for _, v := range [...]uint64{b.H, b.D} {
		if v > 0 && n > (1<<50)/v {
			return 0, false
		}
		n *= v
	}
	return n, true
}

// part cuts the box: whole slices, or rows of one slice, or bytes of one row,
// at most limit bytes and beginning at packed offset off.
func (b *desc3D) part(off, limit uint64) (c desc3D, n uint64) {
	c = *b
	row := off / b.W
	z, y, x := row/b.H, row%b.H, off%b.W
	c.X, c.Y, c.Z = b.X+x, b.Y+y, b.Z+z
	switch slice := b.W * b.H; {
	case x == 0 && y == 0 && slice <= limit:
		c.D = min(limit/slice, b.D-z)
	case x == 0 && b.W <= limit:
		c.H, c.D = min(limit/b.W, b.H-y), 1
	default:
		c.W, c.H, c.D = min(limit, b.W-x), 1, 1
	}
	return c, c.W * c.H * c.D
}

// span is the number of bytes from the box's address to its end in linear memory; false
// beyond any memory.
func (b *desc3D) span() (uint64, bool) {
	end := b.X + b.W
	for _, f := range [...][3]uint64{{b.Z + b.D - 1, b.Height, b.Pitch}, {b.Y + b.H - 1, b.Pitch, 1}} {
		n := uint64(1)
		for _, v := range f {
			if v > 0 && n > (1<<50)/v {
				return 0, false
			}
			n *= v
		}
		end += n
	}
	return end, true
}

// realBox returns the box for the driver, with the real handle of its array.
func (s *session) realBox(b *desc3D) (C.struct_sl_box, int32) {
	v := C.struct_sl_box{
		memtype: C.uint32_t(b.Memtype), lod: C.uint32_t(b.LOD), ptr: C.uint64_t(b.Where),
		pitch: C.uint64_t(b.Pitch), height: C.uint64_t(b.Height),
		x: C.uint64_t(b.X), y: C.uint64_t(b.Y), z: C.uint64_t(b.Z),
		w: C.uint64_t(b.W), h: C.uint64_t(b.H), d: C.uint64_t(b.D),
	}
	if b.Memtype == C.CU_MEMORYTYPE_DEVICE && s.host.has(b.Where) {
		n, ok := b.span()
		if !ok || !s.host.at(b.Where, n, func([]byte) {}) {
			return v, C.CUDA_ERROR_INVALID_VALUE
		}
		v.memtype = C.CU_MEMORYTYPE_UNIFIED
	}
	if b.Memtype == C.CU_MEMORYTYPE_ARRAY {
		real, ok := s.handle(wire.KindArray, uint32(b.Where))
		if !ok {
			return v, s.badHandle(wire.KindArray, uint32(b.Where))
		}
		v.ptr = C.uint64_t(real)
	}
	return v, 0
}

func boxPart(v C.struct_sl_box, c *desc3D) C.struct_sl_box {
	v.x, v.y, v.z = C.uint64_t(c.X), C.uint64_t(c.Y), C.uint64_t(c.Z)
	v.w, v.h, v.d = C.uint64_t(c.W), C.uint64_t(c.H), C.uint64_t(c.D)
	return v
}
