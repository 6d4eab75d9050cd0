package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// seedImages are images of the compiler's, and one of PTX.
func seedImages(t *testing.T) [][]byte {
	t.Helper()
	all := [][]byte{grammarImage}
	for _, name := range []string{"vecadd"} {
		path := filepath.Join(t.TempDir(), name)
		if out, err := exec.Command("objcopy", "-O", "binary", "--only-section=.nv_fatbin", program(name), path).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		b, err := os.ReadFile(path)
		if err != nil || len(b) < 100 {
			t.Fatalf("no fat binary in %s: %d bytes, %v", name, len(b), err)
		}
		all = append(all, b)
		if i := bytes.Index(b, []byte("\x7fELF")); i > 0 {
			all = append(all, b[i:])
		}
	}
	if len(all) < 3 {
		t.Fatalf("%d images to begin with", len(all))
	}
	return all
}

// mutated is an image with a few bytes changed: near its beginning as a rule, where headers are.
func mutated(r *rand.Rand, from []byte) []byte {
	b := bytes.Clone(from)
	for range 1 + r.IntN(12) {
		at := r.IntN(min(len(b), 1<<(4+r.IntN(14))))
		switch r.IntN(4) {
		case 0:
			b[at] ^= 1 << r.IntN(8)
		case 1:
			b[at] = pick(r, []byte{0, 1, 0x7f, 0x80, 0xff})
		case 2:
			if at += -at % 4; at+4 <= len(b) {
				binary.LittleEndian.PutUint32(b[at:], uint32(pick(r, hostile)))
			}
		default:
			if at += -at % 8; at+8 <= len(b) {
				binary.LittleEndian.PutUint64(b[at:], pick(r, append(lengths, hostile...)))
			}
		}
	}
	if r.IntN(8) == 0 {
		b = b[:1+r.IntN(len(b))]
	}
	return b
}

// TestMutatedImages: whatever has become of an image, no session process dies of it. Each is loaded as a module or a
// library, and its kernel looked for. SLUICE_GRAMMAR and SLUICE_GRAMMAR_SEED are as for TestGrammar.
func TestMutatedImages(t *testing.T) {
	w := startWorker(t, workerOptions{gpuMem: "2G", mem: "1G", env: []string{"SLUICE_SIM_STRICT=1", "SLUICE_SIM_CTX_MEM=4M"}})
	seeds := seedImages(t)
	most := grammarSize(t, 4000) / 10
	seed := grammarSeed()
	r := rand.New(rand.NewPCG(seed, 9))
	results := make(map[int32]int)
	const bind = "_Z6vecaddPKfS0_Pfi"
	var s *grammarSession
	for n := range most {
		if s == nil || n%200 == 0 {
			if s != nil {
				s.c.Close()
			}
			var err error
			if s, err = dialGrammar(w, 1, [16]byte{}); err != nil {
				t.Fatalf("image %d of seed %d: no session: %v", n, seed, err)
			}
			if _, _, err := s.sync(s.put(nil, map[string]uint16{"CTX_ACTIVATE": wire.OpCtxActivate}, sent{"CTX_ACTIVATE", true, 0, u32s(0)})); err != nil {
				t.Fatal(err)
			}
		}
		img := mutated(r, pick(r, seeds))
		sum := sha256.Sum256(img)
		id, kind := uint32(1+n%200), byte(r.IntN(2))
		length := uint16(len(bind))
		if kind == 0 {
			length |= wire.BindModule
		}
		ops := map[string]uint16{"IMAGE_CHUNK": wire.OpImageChunk, "IMAGE_LOAD": wire.OpImageLoad, "KERNEL_BIND": wire.OpKernelBind, "KERNEL_INFO": wire.OpKernelInfo}
		s.sent, s.status = nil, make(map[int32]int)
		out := s.put(nil, ops, sent{"IMAGE_CHUNK", false, 1, cat(sum[:], u64s(0, uint64(len(img))), img)})
		out = s.put(out, ops, sent{"IMAGE_LOAD", true, 1, cat(sum[:], u64s(uint64(len(img))), u32s(id), []byte{kind, 0, 0, 0}, u32s(0))})
		out = s.put(out, ops, sent{"KERNEL_BIND", false, 1, cat(u32s(id, id), []byte{byte(length), byte(length >> 8)}, []byte(bind))})
		out = s.put(out, ops, sent{"KERNEL_INFO", true, 1, u32s(id, 0)})
		_, _, err := s.sync(out)
		for rc, k := range s.status {
			results[rc] += k
		}
		if err != nil {
			if strings.HasPrefix(err.Error(), "bye:") || errors.Is(err, errStalled) {
				t.Errorf("image %d of seed %d: %v", n, seed, err)
			} else {
				path := built(filepath.Join("grammar", fmt.Sprintf("image-%d-%d", seed, n)))
				_ = os.MkdirAll(filepath.Dir(path), 0o755)
				_ = os.WriteFile(path, img, 0o644)
				t.Errorf("image %d of seed %d: the session is gone: %v; the image is in %s", n, seed, err, path)
			}
			s = nil
		}
	}
	if s != nil {
		s.c.Close()
	}
	waitFor(t, 20*time.Second, "the sessions have ended", func() bool { return len(w.sessions()) == 0 })
	w.healthy()
	t.Logf("seed %d: %d images, results %v", seed, most, results)
	if results[0] < most/10 || len(results) < 3 {
		t.Errorf("the images are all alike to the worker: %v", results)
	}
}
