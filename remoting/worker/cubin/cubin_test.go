package cubin

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

var le = binary.LittleEndian

// elf builds a file with the sections given, as far as a cubin needs one.
func elf(sections map[string][]byte) []byte {
	names := []byte{0}
	type sec struct {
		name uint32
		data []byte
	}
	secs := []sec{{}}
	for n, d := range sections {
		secs = append(secs, sec{uint32(len(names)), d})
		names = append(append(names, n...), 0)
	}
	at := uint32(len(names))
	names = append(names, ".shstrtab\x00"...)
	secs = append(secs, sec{at, names})
	b := make([]byte, 64)
	copy(b, "\x7fELF\x02\x01\x01")
	var table []byte
	for _, s := range secs {
		h := make([]byte, 64)
		le.PutUint32(h, s.name)
		le.PutUint64(h[24:], uint64(len(b)))
		le.PutUint64(h[32:], uint64(len(s.data)))
		table = append(table, h...)
		b = append(b, s.data...)
	}
	le.PutUint64(b[40:], uint64(len(b)))
	le.PutUint16(b[58:], 64)
	le.PutUint16(b[60:], uint16(len(secs)))
	le.PutUint16(b[62:], uint16(len(secs)-1))
	return append(b, table...)
}

// info builds a .nv.info section that describes parameters, last first, as
// ptxas does, among other attributes.
func info(ps []Param) []byte {
	b := []byte{4, 0x37, 4, 0, 1, 2, 3, 4, 3, 0x1b, 0xff, 0}
	for i := len(ps) - 1; i >= 0; i-- {
		b = append(b, 4, attrParam, paramInfoSize, 0)
		b = le.AppendUint32(b, 0)
		b = le.AppendUint16(b, uint16(i))
		b = le.AppendUint16(b, uint16(ps[i].Offset))
		b = le.AppendUint32(b, ps[i].Size<<18|0x1f000)
	}
	return append(b, 2, 0x4a, 0, 0)
}

func container(entries ...[]byte) []byte {
	var all []byte
	for _, e := range entries {
		all = append(all, e...)
	}
	b := le.AppendUint32(nil, containerMagic)
	b = le.AppendUint16(b, 1)
	b = le.AppendUint16(b, 16)
	b = le.AppendUint64(b, uint64(len(all)))
	return append(b, all...)
}

func fatEntry(kind uint16, sm uint32, flags uint64, data []byte, plain int) []byte {
	padded := append(bytes.Clone(data), make([]byte, -len(data)&7)...)
	b := make([]byte, 64)
	le.PutUint16(b, kind)
	le.PutUint16(b[2:], 0x101)
	le.PutUint32(b[4:], 64)
	le.PutUint64(b[8:], uint64(len(padded)))
	le.PutUint32(b[16:], uint32(len(data)))
	le.PutUint32(b[28:], sm)
	le.PutUint64(b[40:], flags|0x11)
	le.PutUint64(b[56:], uint64(plain))
	return append(b, padded...)
}

var wantParams = []Param{{0, 8}, {8, 8}, {16, 4}, {24, 40}}

func testELF() []byte {
	return elf(map[string][]byte{".nv.info": {1, 2}, ".nv.info.kern": info(wantParams), ".nv.info.kernel2": info(nil), ".text.kern": make([]byte, 100)})
}

const testPTX = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kern2(\n\t.param .u32 a\n){ret;}\n" +
	".visible .entry kern(\n\t.param .u64 .ptr .align 16 kern_param_0,\n\t.param .u64 kern_param_1,\n\t.param .u32 kern_param_2,\n\t.param .align 8 .b8 kern_param_3[40]\n)\n.maxntid 128\n{\n\tret;\n}\n.entry none {ret;}\n\x00"

// lz4Literals is a block of nothing but literals.
func lz4Literals(b []byte) []byte {
	n := len(b)
	out := []byte{0xf0}
	for n -= 15; n >= 255; n -= 255 {
		out = append(out, 255)
	}
	return append(append(out, byte(n)), b...)
}

func TestForms(t *testing.T) {
	e := testELF()
	w, _ := zstd.NewWriter(nil)
	z := w.EncodeAll(e, nil)
	forms := map[string][]byte{
		"elf":            e,
		"ptx":            []byte(testPTX),
		"plain":          container(fatEntry(kindELF, 80, 0, e, 0)),
		"lz4":            container(fatEntry(kindELF, 80, flagLZ4, lz4Literals(e), len(e))),
		"zstd":           container(fatEntry(kindELF, 90, flagZstd, z, len(e))),
		"ptx only":       container(fatEntry(kindPTX, 80, 0, []byte(testPTX), 0)),
		"second entry":   container(fatEntry(kindELF, 70, 0, elf(map[string][]byte{".nv.info.x": nil}), 0), fatEntry(kindELF, 80, flagLZ4, lz4Literals(e), len(e))),
		"damaged beside": container(fatEntry(kindELF, 70, flagLZ4, []byte{0xff}, 900), fatEntry(kindELF, 80, 0, e, 0)),
	}
	for name, b := range forms {
		ps, err := Params(b, "kern", 90)
		if err != nil || !reflect.DeepEqual(ps, wantParams) {
			t.Errorf("%s: %v %v", name, ps, err)
		}
		if _, err := Params(b, "ker", 90); err == nil {
			t.Errorf("%s: a kernel that is not there was found", name)
		}
	}
	if ps, err := Params([]byte(testPTX), "none", 90); err != nil || len(ps) != 0 {
		t.Errorf("no parameters: %v %v", ps, err)
	}
	if _, err := Params([]byte("nothing"), "k", 90); !errors.Is(err, ErrFormat) {
		t.Error(err)
	}
}

func variablesOf(t *testing.T, b []byte, cc int) uint64 {
	t.Helper()
	n, err := Variables(b, cc)
	if err != nil {
		t.Error(err)
	}
	return n
}

func TestVariables(t *testing.T) {
	small := elf(map[string][]byte{".nv.global": make([]byte, 10), ".nv.constant3": make([]byte, 50)})
	large := elf(map[string][]byte{".nv.global": make([]byte, 100), ".nv.global.init": make([]byte, 1000)})
	b := container(fatEntry(kindELF, 80, 0, small, 0), fatEntry(kindELF, 86, flagLZ4, lz4Literals(large), len(large)), fatEntry(kindELF, 90, 0, small, 0))
	for cc, want := range map[int]uint64{80: 10, 86: 1100, 89: 1100, 90: 10, 70: 0, 100: 0} {
		if got := variablesOf(t, b, cc); got != want {
			t.Errorf("cc %d: %d, want %d", cc, got, want)
		}
	}
	if got := variablesOf(t, large, 75); got != 1100 {
		t.Errorf("elf: %d", got)
	}
}

func TestVariablesOfPTX(t *testing.T) {
	for text, want := range map[string]uint64{
		"":                                  0,
		".global .b8 a[100];":               100,
		".visible .global .align 8 .f64 a;": 8,
		"\t.weak\t.global .align 4 .b8 big[4][1024];\n.global .u32 x;": 4100,
		".global .f32 a = 1.0, b, c[3];":                               20,
		".global .s32 t[] = {1, 2, 3, 4};":                             96, // no more than the text is long
		".global .v4 .f32 v[2];":                                       32,
		".extern .global .b8 elsewhere[1000];":                         0,
		"// .global .b8 a[1000];\n/* .global .b8 b[1000]; */":          0,
		".global/**/.b8 a[7];":                                         7,
		".global .b8 /* ; */ a[9];":                                    9,
		".entry k() { ld.global.u32 %r1, [a+100]; } .global .b8 z[5];": 5,
		".global .b8 a[0x10];":                                         16,
		".global .b8 a[1152921504606846976];":                          maxVariables,
		".global .texref t;":                                           8,
		".global .b8 a[5":                                              1,
		".global":                                                      0,
	} {
		got := variablesOf(t, []byte(text), 90)
		if got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}

func TestLZ4(t *testing.T) {
	// "abcabcabcabc..." by an overlapping match, then the last literals.
	in := []byte{0x3f, 'a', 'b', 'c', 3, 0, 10, 0x50, 'v', 'w', 'x', 'y', 'z'}
	want := strings.Repeat("abc", 40)[:3+15+10+4] + "vwxyz"
	got, err := lz4(in, len(want))
	if err != nil || string(got) != want {
		t.Fatalf("%q %v", got, err)
	}
	for n := range in {
		if _, err := lz4(in[:n], len(want)); err == nil {
			t.Errorf("cut at %d accepted", n)
		}
	}
	for _, n := range []int{0, len(want) - 1, len(want) + 1, 1 << 30} {
		if _, err := lz4(in, n); err == nil {
			t.Errorf("size %d accepted", n)
		}
	}
}

// What a real compiler writes, where one is at hand.
func TestRealCompiler(t *testing.T) {
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		cache = filepath.Join(root, "build", "cache")
	}
	found, _ := filepath.Glob(filepath.Join(cache, "cuda-*", "bin", "nvcc"))
	if len(found) == 0 {
		t.Fatalf("no CUDA compiler in %s; run test/cuda-toolkit.sh, as make test does", cache)
	}
	src := filepath.Join(t.TempDir(), "k.cu")
	code := "struct S { double a; char b[32]; };\nextern \"C\" __global__ void kern(float *x, const float *y, int n, S s) { x[n] = y[n] + s.b[n]; }\n" +
		"extern \"C\" __global__ void none() {}\n__device__ char table[5000000];\n"
	if err := os.WriteFile(src, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, nvcc := range found {
		for _, args := range [][]string{{"-cubin", "-arch=sm_80"}, {"-ptx", "-arch=compute_80"}, {"-fatbin", "-gencode", "arch=compute_80,code=[sm_80,compute_80]", "-Xfatbin=--compress-all"}} {
			out := filepath.Join(t.TempDir(), "k.out")
			if msg, err := exec.Command(nvcc, append(args, "-o", out, src)...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v: %s", nvcc, err, msg)
			}
			b, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			ps, err := Params(b, "kern", 80)
			if err != nil || !reflect.DeepEqual(ps, wantParams) {
				t.Errorf("%s %v: %v %v", nvcc, args, ps, err)
			}
			if err := Fits(b); err != nil {
				t.Errorf("%s %v: %v", nvcc, args, err)
			}
			if n := variablesOf(t, b, 80); n < 5000000 || n > 5001000 {
				t.Errorf("%s %v: variables of %d bytes", nvcc, args, n)
			}
			if ps, err := Params(b, "none", 80); err != nil || len(ps) != 0 {
				t.Errorf("%s %v: no parameters: %v %v", nvcc, args, ps, err)
			}
		}
	}
}

func FuzzCubin(f *testing.F) {
	f.Add(testELF(), "kern")
	f.Add([]byte(testPTX), "kern")
	f.Add([]byte(testPTX), "")
	f.Fuzz(func(t *testing.T, b []byte, kernel string) {
		for _, g := range []func([]byte, string) ([]Param, error){elfParams, ptxParams} {
			if ps, err := g(b, kernel); err == nil && len(ps) > maxParams {
				t.Fatal("too many parameters")
			}
		}
	})
}

func FuzzFatbin(f *testing.F) {
	e := testELF()
	w, _ := zstd.NewWriter(nil)
	f.Add(container(fatEntry(kindELF, 80, 0, e, 0)))
	f.Add(container(fatEntry(kindELF, 80, flagLZ4, lz4Literals(e), len(e)), fatEntry(kindPTX, 80, 0, []byte(testPTX), 0)))
	f.Add(container(fatEntry(kindELF, 90, flagZstd, w.EncodeAll(e, nil), len(e))))
	big := make([]byte, 4096)
	rand.New(rand.NewSource(1)).Read(big)
	f.Add(container(fatEntry(kindELF, 90, flagLZ4, big, 1<<20)))
	f.Add(linkedSet(container(), container(fatEntry(kindELF, 80, 0, e, 0))))
	f.Fuzz(func(t *testing.T, b []byte) {
		if ps, err := Params(b, "kern", 90); err == nil && len(ps) > maxParams {
			t.Fatal("too many parameters")
		}
		_, _ = Variables(b, 90)
	})
}
