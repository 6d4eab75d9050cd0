package worker

import (
	"slices"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// fatBinary is a container of PTX, of nothing if there is no text.
func fatBinary(ptx string) []byte {
	var entry []byte
	if ptx != "" {
		text := append([]byte(ptx), make([]byte, 8-len(ptx)%8)...)
		entry = make([]byte, 64)
		copy(entry, cat([]byte{1, 0, 1, 1}, u32(64), u64(uint64(len(text)))))
		copy(entry[28:], u32(80))
		entry = append(entry, text...)
	}
	return cat(u32(0xba55ed50), []byte{1, 0, 16, 0}, u64(uint64(len(entry))), entry)
}

func linkedImage(containers ...[]byte) []byte {
	b := cat(u32(wire.LinkedMagic), u32(uint32(len(containers))))
	for _, c := range containers {
		b = append(b, u64(uint64(len(c)))...)
	}
	return append(b, cat(containers...)...)
}

// TestLinkedImage: the driver gets the linked image and the objects of a linked set; one that lies
// about its lengths never reaches it.
func TestLinkedImage(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	set := linkedImage(fatBinary(""), fatBinary(".entry vecadd("), fatBinary(".entry hello("))
	for id, library := range map[uint32]bool{1: true, 2: false} {
		if !library {
			if r := k.wait(wire.OpCtxActivate, 0, u32(0)); r.result != 0 {
				t.Fatalf("context: %d", r.result)
			}
		}
		names, rc := k.loadAs(set, id, library)
		if rc != 0 || !slices.Contains(names, "vecadd") || !slices.Contains(names, "hello") || slices.Contains(names, "crash") {
			t.Errorf("library %v: result %d, kernels %q", library, rc, names)
		}
	}
	for name, bad := range map[string][]byte{
		"size of a container": cat(set[:8], u64(8), set[16:]),
		"cut":                 set[:len(set)-8],
		"no containers":       linkedImage(),
	} {
		if _, rc := k.load(bad, 3); rc != 200 {
			t.Errorf("%s: result %d, want CUDA_ERROR_INVALID_IMAGE", name, rc)
		}
	}
	if _, rc := k.load(set, 4); rc != 0 {
		t.Errorf("after them: %d", rc)
	}
}
