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
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const vecadd = "_Z6vecaddPKfS0_Pfi"

// seedImages are images of the compiler's as programs have them: fat binaries, whose PTX is compressed, the cubins and the PTX
// in them, objects that are to be linked, and PTX as a text. good is a fat binary with the kernel vecadd.
func seedImages(t *testing.T) (all [][]byte, good []byte) {
	t.Helper()
	all = [][]byte{grammarImage}
	for _, name := range []string{"vecadd", "reduce", "separate", "managedvar"} {
		path := filepath.Join(t.TempDir(), name)
		if out, err := exec.Command("objcopy", "-O", "binary", "--only-section=.nv_fatbin", program(name), path).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		b, err := os.ReadFile(path)
		if err != nil || len(b) < 100 {
			t.Fatalf("no fat binary in %s: %d bytes, %v", name, len(b), err)
		}
		// A program has several, one after another, from its own files and from those of the runtime's that it is linked with.
		for at := b; len(at) >= 16 && binary.LittleEndian.Uint32(at) == 0xba55ed50; {
			n := int(binary.LittleEndian.Uint16(at[6:])) + int(binary.LittleEndian.Uint64(at[8:]))
			all, at = append(all, at[:n:n]), at[n:]
			if bytes.Contains(all[len(all)-1], []byte(vecadd)) && good == nil {
				good = all[len(all)-1]
			}
		}
		for at := b; len(all) < 40; {
			i := bytes.Index(at, []byte("\x7fELF"))
			if i < 0 {
				break
			}
			all, at = append(all, at[i:]), at[i+4:]
		}
	}
	if len(all) < 12 || good == nil {
		t.Fatalf("%d images to begin with", len(all))
	}
	return all, good
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

// imageNumber is how many images are tried: SLUICE_IMAGES, or a tenth of the frames of SLUICE_GRAMMAR.
func imageNumber(t *testing.T) int {
	v := os.Getenv("SLUICE_IMAGES")
	if v == "" {
		return grammarSize(t, 4000) / 10
	}
	n, err := strconv.Atoi(v)
	if err != nil || n <= 0 {
		t.Fatalf("SLUICE_IMAGES=%s: give a number of images", v)
	}
	return n
}

// imageGrowth is what a session's process may need beyond that of a session that has one image. Of its images one process
// keeps two hundred.
const imageGrowth = 768 << 20

// peakMemory is the most that a process ever had resident, in bytes; 0 if it has gone.
func peakMemory(pid int) uint64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, after, _ := strings.Cut(string(b), "VmHWM:")
	kib, _, _ := strings.Cut(strings.TrimSpace(after), " ")
	n, _ := strconv.ParseUint(kib, 10, 64)
	return n << 10
}

var imageOps = map[string]uint16{
	"CTX_ACTIVATE": wire.OpCtxActivate, "IMAGE_CHUNK": wire.OpImageChunk, "IMAGE_LOAD": wire.OpImageLoad, "KERNEL_BIND": wire.OpKernelBind,
	"KERNEL_INFO": wire.OpKernelInfo, "LINK_CREATE": wire.OpLinkCreate, "LINK_ADD": wire.OpLinkAdd, "LINK_COMPLETE": wire.OpLinkComplete,
}

// putImage loads an image as a module or a library and looks for a kernel in it, and, for some numbers, links it.
func (s *grammarSession) putImage(id uint32, img []byte, kind byte) []byte {
	sum := sha256.Sum256(img)
	length := uint16(len(vecadd))
	if kind == 0 {
		length |= wire.BindModule
	}
	out := s.put(nil, imageOps, sent{"IMAGE_CHUNK", false, 1, cat(sum[:], u64s(0, uint64(len(img))), img)})
	out = s.put(out, imageOps, sent{"IMAGE_LOAD", true, 1, cat(sum[:], u64s(uint64(len(img))), u32s(id), []byte{kind, 0, 0, 0}, u32s(0))})
	out = s.put(out, imageOps, sent{"KERNEL_BIND", false, 1, cat(u32s(id, id), []byte{byte(length), byte(length >> 8)}, []byte(vecadd))})
	out = s.put(out, imageOps, sent{"KERNEL_INFO", true, 1, u32s(id, 0)})
	if id%8 == 0 {
		// CUjitInputType: 0 is a cubin, 1 PTX, 2 a fat binary, 3 an object, 4 a library of objects.
		out = s.put(out, imageOps, sent{"LINK_CREATE", true, 1, u32s(id, 0)})
		out = s.put(out, imageOps, sent{"LINK_ADD", true, 1, cat(sum[:], u64s(uint64(len(img))), u32s(id, id/8%5, 0, 1), []byte("k"))})
		out = s.put(out, imageOps, sent{"LINK_COMPLETE", true, 1, u32s(id)})
	}
	return out
}

// imageSession begins a session that loads images.
func imageSession(t *testing.T, w *worker) *grammarSession {
	t.Helper()
	s, err := dialGrammar(w, 1, [16]byte{})
	if err != nil {
		t.Fatal(err)
	}
	s.patience = 20 * time.Second
	if _, _, err := s.sync(s.put(nil, imageOps, sent{"CTX_ACTIVATE", true, 0, u32s(0)})); err != nil {
		t.Fatal(err)
	}
	return s
}

// undisturbed has a session load and find a good image, under an odd number that is new.
func (s *grammarSession) undisturbed(t *testing.T, id uint32, img []byte) {
	t.Helper()
	s.sent, s.status = nil, make(map[int32]int)
	if _, _, err := s.sync(s.putImage(id, img, 0)); err != nil || s.status[0] < 2 || len(s.status) != 1 {
		t.Fatalf("the session beside: %v, results %v", err, s.status)
	}
}

// TestMutatedImages: whatever has become of an image, no session process dies of it, none takes much memory for it, and a session beside
// is not disturbed. SLUICE_IMAGES is their number; SLUICE_GRAMMAR_SEED is as for TestGrammar.
func TestMutatedImages(t *testing.T) {
	w := startWorker(t, workerOptions{
		keepalive: time.Minute, // the session beside says nothing for two hundred images, which take long on a busy machine
		gpuMem:    "2G", mem: "1G", env: []string{"SLUICE_SIM_STRICT=1", "SLUICE_SIM_CTX_MEM=4M"}, args: []string{"--store-limit", "256M", "--store-keep-free", "0"},
	})
	seeds, good := seedImages(t)
	most := imageNumber(t)
	seed := grammarSeed()
	r := rand.New(rand.NewPCG(seed, 9))
	results := make(map[int32]int)
	beside := imageSession(t, w)
	defer beside.c.Close()
	beside.undisturbed(t, 1, good)
	first := w.sessions()
	if len(first) != 1 {
		t.Fatalf("sessions %v", first)
	}
	began, peak := peakMemory(first[0]), uint64(0)
	look := func() {
		for _, pid := range append(w.sessions(), w.cmd.Process.Pid) {
			peak = max(peak, peakMemory(pid))
		}
		if peak > began+imageGrowth {
			t.Fatalf("a process has had %d MiB; a session with a good image has %d", peak>>20, began>>20)
		}
	}
	var s *grammarSession
	for n := range most {
		if s == nil || n%200 == 0 {
			if s != nil {
				look()
				s.c.Close()
				beside.undisturbed(t, uint32(1+n/200*2), good)
			}
			s = imageSession(t, w)
		}
		img := mutated(r, pick(r, seeds))
		s.sent, s.status = nil, make(map[int32]int)
		_, _, err := s.sync(s.putImage(uint32(1+n%200), img, byte(r.IntN(2))))
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
	look()
	if s != nil {
		s.c.Close()
	}
	beside.undisturbed(t, uint32(3+most/200*2), good)
	if now := w.sessions(); !slices.Contains(now, first[0]) {
		t.Errorf("the session beside was process %d, now there are %v", first[0], now)
	}
	beside.c.Close()
	waitFor(t, 20*time.Second, "the sessions have ended", func() bool { return len(w.sessions()) == 0 })
	w.healthy()
	t.Logf("seed %d: %d images of %d kinds, results %v; at most %d MiB in a process, %d with a good image", seed, most, len(seeds), results, peak>>20, began>>20)
	if results[0] < most/10 || len(results) < 3 {
		t.Errorf("the images are all alike to the worker: %v", results)
	}
}
