package worker

import (
	"testing"
)

// Elements that no array has are refused as CUDA does, by every call that makes one; they
// reach neither the driver nor the account's arithmetic.
func TestArrayChannels(t *testing.T) {
	const invalidValue, nv12 = 1, 0xb0
	s, acct := activeSession(t)
	before := acct.Info(0).Used
	id := uint32(0)
	for _, format := range []uint32{1, 2, 3, 8, 9, 10, 16, 32, nv12, 0, ^uint32(0)} {
		for _, channels := range []uint32{0, 1, 2, 3, 4, 5, 8, 1 << 31, ^uint32(0)} {
			plain := format > 0 && format <= 32
			bad := channels == 0 || channels > 4 || channels == 3 && plain
			for name, make := range map[string]func() int32{
				"cuArrayCreate": func() int32 {
					_, rc := s.call(opCuArrayCreate_v2, arrayPayload(id, format, channels))
					return rc
				},
				"cuArray3DCreate": func() int32 {
					_, rc := s.call(opCuArray3DCreate_v2, array3DPayload(id, format, channels))
					return rc
				},
				"cuMipmappedArrayCreate": func() int32 {
					_, rc := s.call(opCuMipmappedArrayCreate, array3DPayload(id, format, channels), u32(2))
					return rc
				},
			} {
				id++
				if rc := make(); bad != (rc == invalidValue) {
					t.Errorf("%s, format %d, %d channels: %d", name, format, channels, rc)
				}
				if s.ended != "" {
					t.Fatal(s.ended)
				}
			}
			if used := acct.Info(0).Used; bad && used != before {
				t.Errorf("format %d, %d channels: %d bytes charged", format, channels, used-before)
			}
			before = acct.Info(0).Used
		}
	}
}
