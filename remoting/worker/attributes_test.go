package worker

import (
	"slices"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Only flags and attributes that are known reach the driver.
func TestFlagsAndAttributes(t *testing.T) {
	const success, invalidValue, notSupported = 0, 1, 801
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	// cuCtxCreate: every bit.
	for bit := range uint32(32) {
		want := int32(invalidValue)
		switch bit {
		case 0, 1, 2, 3, 4, 7: // scheduling, mapped memory, local memory, synchronous copies
			want = success
		case 5, 6: // core dumps
			want = notSupported
		}
		if r := k.wait(opCuCtxCreate_v2, 0, u32(100+bit), u32(1<<bit), u32(0)); r.result != want {
			t.Errorf("cuCtxCreate, flags %#x: %d, want %d", 1<<bit, r.result, want)
		}
	}
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatal(rc)
	}
	k.bind(1, 1, "hello")
	k.streamCreate(1)
	plain := []uint32{0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 14, 16}
	for _, id := range []uint32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 40, 63, 64, 65, 1 << 31, ^uint32(0)} {
		// LAUNCH; the event of 7 and 12 is none of the client's.
		value := cat(u64(9999), make([]byte, 56))
		if id != 7 && id != 12 {
			clear(value)
		}
		launched := k.wait(wire.OpLaunch, 1, u32(1), u32(0), u32(1), u32(1), u32(1), u32(1), u32(1), u32(1), u32(0), []byte{1, 0, 0, 0}, u32(4), u32(17), u32(id), u32(0), value).result
		switch {
		case id == 7 || id == 12:
			if launched != invalidHandle {
				t.Errorf("launch with attribute %d and an event that is none: %d", id, launched)
			}
		case slices.Contains(plain, id):
			if launched == notSupported {
				t.Errorf("launch with attribute %d: %d", id, launched)
			}
		case launched != notSupported:
			t.Errorf("launch with attribute %d: %d", id, launched)
		}
		// A stream's.
		known := slices.Contains([]uint32{1, 3, 8, 9, 10}, id)
		set := k.wait(opCuStreamSetAttribute, 1, u32(1), u32(id), []byte{1}, make([]byte, 64)).result
		get := k.wait(opCuStreamGetAttribute, 1, u32(1), u32(id), []byte{1}).result
		if known == (set == notSupported) || known == (get == notSupported) {
			t.Errorf("attribute %d of a stream: set %d, get %d", id, set, get)
		}
		// And a launch that is only asked about.
		config := cat([]byte{1}, make([]byte, 56), []byte{1}, u32(1), u32(id), u32(0), make([]byte, 64), u32(1))
		asked := k.wait(opCuOccupancyMaxActiveClusters, 1, []byte{1}, u32(1), config).result
		if good := id == 7 || id == 12 || slices.Contains(plain, id); good == (asked == notSupported) {
			t.Errorf("clusters of a launch with attribute %d: %d", id, asked)
		}
	}
	if r := k.wait(opCuStreamSetAttribute, 1, u32(1), u32(1), []byte{0}); r.result != invalidValue {
		t.Errorf("attribute without a value: %d", r.result)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.bye != "" {
		t.Errorf("bye: %s", k.bye)
	}
}
