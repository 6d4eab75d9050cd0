package e2e

// Frames that have the form of the API table and of the wire table, made at random: every
// operation, with arguments that are plausible for the most part. TestGrammar sends them.

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// sent is a frame as the corpus keeps it: by its operation's name, since numbers change with the table.
type sent struct {
	name    string
	wait    bool
	ctx     uint32
	payload []byte
}

// field is a member of a structure of the driver's.
type field struct {
	ctype    string
	at, size int
}

// layouts has the structures that rows carry: their sizes, and their plain members.
type layouts struct {
	size   map[string]int
	fields map[string][]field
}

// readLayouts asks the C compiler.
func readLayouts(t *testing.T, rows []*api.Row) layouts {
	t.Helper()
	dir := filepath.Join("..", "..", "remoting", "api")
	header, err := os.ReadFile(filepath.Join(dir, "cuabi.h"))
	if err != nil {
		t.Fatal(err)
	}
	body := regexp.MustCompile(`(?s)typedef struct \w*\s*\{((?:\s*[\w ]+[ *]+\w+(?:\[\w+\])?;)+)\s*\} (\w+);`)
	member := regexp.MustCompile(`([\w ]+[ *]+)(\w+)(?:\[\w+\])?;`)
	members := make(map[string]string)
	for _, m := range body.FindAllStringSubmatch(string(header), -1) {
		if name := regexp.MustCompile(`_v\d$`).ReplaceAllString(m[2], ""); members[name] == "" { // the one that the table means comes first
			members[name] = m[1]
		}
	}
	var c strings.Builder
	c.WriteString("#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n#include \"cuabi.h\"\nint main(void) {\n")
	seen := make(map[string]bool)
	for _, r := range rows {
		for _, p := range r.Wire {
			if p.Elem == "void" || p.Elem == "" || seen[p.Elem] {
				continue
			}
			seen[p.Elem] = true
			fmt.Fprintf(&c, "printf(\"%s||0|%%zu\\n\", sizeof(%s));\n", p.Elem, p.Elem)
			for _, m := range member.FindAllStringSubmatch(members[p.Elem], -1) {
				fmt.Fprintf(&c, "printf(\"%s|%s|%%zu|%%zu\\n\", offsetof(%s, %s), sizeof(((%s *)0)->%s));\n", p.Elem, strings.TrimSpace(m[1]), p.Elem, m[2], p.Elem, m[2])
			}
		}
	}
	c.WriteString("}\n")
	exe := filepath.Join(t.TempDir(), "layouts")
	cc := exec.Command("cc", "-w", "-I", dir, "-x", "c", "-o", exe, "-")
	cc.Stdin = strings.NewReader(c.String())
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err := exec.Command(exe).Output()
	if err != nil {
		t.Fatal(err)
	}
	l := layouts{make(map[string]int), make(map[string][]field)}
	for line := range strings.Lines(string(out)) {
		f := strings.Split(strings.TrimSpace(line), "|")
		at, _ := strconv.Atoi(f[2])
		n, _ := strconv.Atoi(f[3])
		if f[1] == "" {
			l.size[f[0]] = n
		} else {
			l.fields[f[0]] = append(l.fields[f[0]], field{f[1], at, n})
		}
	}
	if len(l.fields["CUDA_MEMCPY3D"]) < 20 {
		t.Fatalf("CUDA_MEMCPY3D has the members %v", l.fields["CUDA_MEMCPY3D"])
	}
	return l
}

// grammar makes the frames of one session. It knows what the client would know: the ids that it chose, and what
// replies told it.
type grammar struct {
	r       *rand.Rand
	rows    []*api.Row
	byName  map[string]*api.Row
	layouts layouts
	next    uint32

	live  map[string][]uint32
	dead  map[string][]uint32
	addrs []uint64
	blobs map[string][][]byte // structures that the worker gave, by type
}

func newGrammar(seed uint64, rows []*api.Row, l layouts) *grammar {
	g := &grammar{r: rand.New(rand.NewPCG(seed, 14)), rows: rows, byName: make(map[string]*api.Row), layouts: l, next: 16,
		live: make(map[string][]uint32), dead: make(map[string][]uint32), blobs: make(map[string][][]byte)}
	for _, r := range rows {
		g.byName[r.Symbol] = r
	}
	return g
}

var (
	hostile = []uint64{0, 7, 0x7fffffff, 0x80000000, 0xffffffff, 1<<40 - 1, 1 << 40, 1 << 47, 1 << 62, 1<<63 - 1, 1 << 63, ^uint64(0)}
	lengths = []uint64{0, 1, 3, 4, 8, 16, 100, 256, 512, 4096, 65536, 1 << 20, 2 << 20, 4 << 20}
)

const hostMapAt = 0x6a0000000000

func pick[T any](r *rand.Rand, v []T) T { return v[r.IntN(len(v))] }

// handle is one of a kind: alive as a rule.
func (g *grammar) handle(kind string) uint32 {
	switch n := g.r.IntN(24); {
	case n == 0 || n < 12 && kind == "STREAM":
		return 0
	case n == 1:
		return g.r.Uint32()
	case n == 2:
		return wire.WorkerIndex + uint32(g.r.IntN(20))
	case n == 3:
		if ids := g.live[pick(g.r, []string{"CTX", "STREAM", "EVENT", "MODULE", "GRAPH", "NODE", "POOL", "ARRAY"})]; len(ids) > 0 {
			return pick(g.r, ids)
		}
	case n < 8 && len(g.dead[kind]) > 0:
		return pick(g.r, g.dead[kind])
	}
	if ids := g.live[kind]; len(ids) > 0 {
		return pick(g.r, ids)
	}
	return 0
}

// fresh is an id for a new handle, sometimes the next generation of one that was.
func (g *grammar) fresh(kind string) uint32 {
	if d := g.dead[kind]; len(d) > 0 && g.r.IntN(12) == 0 {
		i := g.r.IntN(len(d))
		if id := d[i]; id&wire.HandleIndex < wire.WorkerIndex {
			g.dead[kind] = slices.Delete(d, i, i+1)
			id += 1 << wire.HandleShift
			g.live[kind] = append(g.live[kind], id)
			return id
		}
	}
	g.next++
	g.live[kind] = append(g.live[kind], g.next)
	return g.next
}

func (g *grammar) ended(kind string, id uint32) {
	if i := slices.Index(g.live[kind], id); i >= 0 {
		g.live[kind] = slices.Delete(g.live[kind], i, i+1)
		g.dead[kind] = append(g.dead[kind], id)
	}
}

func (g *grammar) address() uint64 {
	switch n := g.r.IntN(20); {
	case n == 0:
		return pick(g.r, hostile)
	case n == 1:
		return hostMapAt + uint64(g.r.IntN(8))<<12
	case n == 2 && len(g.addrs) > 0:
		return pick(g.r, g.addrs) + pick(g.r, lengths)
	}
	if len(g.addrs) == 0 {
		return 0
	}
	return pick(g.r, g.addrs)
}

func (g *grammar) length() uint64 {
	if g.r.IntN(12) == 0 {
		return pick(g.r, hostile)
	}
	return pick(g.r, lengths)
}

// bounded is a length that breaks no limit of the protocol, as a rule: that would end the session.
func (g *grammar) bounded() uint64 {
	if g.r.IntN(100) == 0 {
		return g.length()
	}
	return pick(g.r, lengths[1:])
}

func (g *grammar) small() uint64 {
	switch n := g.r.IntN(20); {
	case n == 0:
		return pick(g.r, hostile)
	case n < 4:
		return pick(g.r, lengths)
	case n < 7:
		return uint64(g.r.IntN(64))
	}
	return uint64(g.r.IntN(4))
}

// scalar is a value for a parameter or a member of a type.
func (g *grammar) scalar(ctype, name string) uint64 {
	switch kind := api.HandleKinds[ctype]; {
	case kind != "":
		return uint64(g.handle(kind))
	case ctype == "CUdeviceptr":
		return g.address()
	case ctype == "CUdevice" && g.r.IntN(20) > 0:
		return uint64(g.r.IntN(2))
	case ctype == "CUmemorytype" && g.r.IntN(20) > 0:
		return pick(g.r, []uint64{2, 2, 2, 3})
	case strings.Contains(strings.ToLower(name), "flags") && g.r.IntN(3) > 0:
		return 0
	case ctype == "size_t":
		return g.length()
	}
	return g.small()
}

func put(b []byte, n int, v uint64) []byte {
	w := binary.LittleEndian.AppendUint64(nil, v)
	return append(b, w[:min(n, 8)]...)
}

// structure is a value of a structure's type.
func (g *grammar) structure(elem string) []byte {
	n := g.layouts.size[elem]
	if n == 0 {
		n = 8
	}
	known := g.blobs[elem]
	b := make([]byte, n)
	switch k := g.r.IntN(10); {
	case k < 3 && len(known) > 0:
		copy(b, pick(g.r, known))
	case k < 9 && len(g.layouts.fields[elem]) > 0:
		for _, f := range g.layouts.fields[elem] {
			switch {
			case strings.HasSuffix(f.ctype, "*"):
			case f.size <= 8:
				copy(b[f.at:], put(nil, f.size, g.scalar(f.ctype, "")))
			default:
				for i := 0; i+4 <= f.size; i += 4 {
					binary.LittleEndian.PutUint32(b[f.at+i:], uint32(pick(g.r, []uint64{0, 0, 0, 1, 1, 2})))
				}
			}
		}
	default:
		for i := 0; i+4 <= n; i += 4 {
			if g.r.IntN(3) == 0 {
				binary.LittleEndian.PutUint32(b[i:], uint32(g.small()))
			}
			if i%8 == 0 && i+8 <= n && g.r.IntN(6) == 0 {
				binary.LittleEndian.PutUint64(b[i:], g.address())
			}
		}
	}
	if g.r.IntN(8) == 0 && n >= 4 {
		binary.LittleEndian.PutUint32(b[g.r.IntN(n-3):], uint32(pick(g.r, hostile)))
	}
	return b
}

// row is a frame of a row of the API table.
func (g *grammar) row(r *api.Row) []byte {
	var b []byte
	counts := make(map[string]uint64)
	for _, p := range r.Wire {
		if p.Mode == api.InArray {
			counts[p.Count] = pick(g.r, []uint64{0, 1, 1, 1, 2, 5})
		}
	}
	for _, p := range r.Wire {
		switch p.Mode {
		case api.Value:
			v := g.scalar(p.Elem, p.Name)
			if n, ok := counts[p.Name]; ok && g.r.IntN(4000) > 0 {
				v = n
			}
			b = put(b, api.ScalarSize(p.Elem), v)
		case api.Handle:
			b = put(b, 4, uint64(g.handle(p.HKind)))
		case api.New:
			b = put(b, 4, uint64(g.fresh(p.HKind)))
		case api.In:
			if g.r.IntN(12) == 0 {
				b = append(b, 0)
			} else {
				b = append(append(b, 1), g.structure(p.Elem)...)
			}
		case api.InArray:
			n := counts[p.Count]
			b = put(append(b, 1), 4, n)
			for range n {
				if p.HKind != "" {
					b = put(b, 4, uint64(g.handle(p.HKind)))
				} else {
					b = append(b, g.structure(p.Elem)...)
				}
			}
		case api.Out, api.Out8, api.OutHandle, api.OutHandles, api.OutArray:
			b = append(b, byte(min(1, g.r.IntN(16))))
		case api.InOut:
			b = put(b, 8, pick(g.r, []uint64{0, 1, 5, 100, 1 << 20, ^uint64(0)}))
		case api.Str:
			s := pick(g.r, []string{"total", "weight", "tex", "", "a\x00b", "%n%n%s", strings.Repeat("A", 5000)})
			b = append(put(b, 4, uint64(len(s))), s...)
		case api.In8:
			b = put(b, 8, g.small())
		}
	}
	return b
}

// learn reads what a good reply to a row's frame tells; asked is that frame's payload.
func (g *grammar) learn(r *api.Row, asked, p []byte) {
	wants := g.wanted(r, asked)
	take := func(n int) []byte {
		if n > len(p) {
			p = nil
			return nil
		}
		b := p[:n]
		p = p[n:]
		return b
	}
	for _, q := range r.Wire {
		if q.Mode == api.InOut {
			take(8)
		}
	}
	for i, q := range r.Wire {
		if !wants[i] {
			continue
		}
		n := 1
		if q.Mode == api.OutHandles || q.Mode == api.OutArray {
			k := take(4)
			if k == nil {
				return
			}
			n = int(min(binary.LittleEndian.Uint32(k), 1000))
		}
		for range n {
			switch q.Mode {
			case api.OutHandle, api.OutHandles:
				if id := take(4); id != nil {
					if v := binary.LittleEndian.Uint32(id); v != 0 && !slices.Contains(g.live[q.HKind], v) && len(g.live[q.HKind]) < 200 {
						g.live[q.HKind] = append(g.live[q.HKind], v)
					}
				}
			case api.Out8:
				take(8)
			case api.Out, api.OutArray:
				b := take(g.layouts.size[q.Elem])
				switch {
				case b == nil:
				case q.Elem == "CUdeviceptr" && len(g.addrs) < 200:
					g.addrs = append(g.addrs, binary.LittleEndian.Uint64(b))
				case len(b) > 8 && len(g.blobs[q.Elem]) < 20:
					g.blobs[q.Elem] = append(g.blobs[q.Elem], slices.Clone(b))
				}
			}
		}
	}
}

// wanted says for each parameter whether the frame asked for its value.
func (g *grammar) wanted(r *api.Row, p []byte) []bool {
	wants := make([]bool, len(r.Wire))
	skip := func(n int) { p = p[min(n, len(p)):] }
	for i, q := range r.Wire {
		switch q.Mode {
		case api.Value:
			skip(api.ScalarSize(q.Elem))
		case api.Handle, api.New:
			skip(4)
		case api.In:
			if len(p) > 0 && p[0] != 0 {
				skip(g.layouts.size[q.Elem])
			}
			skip(1)
		case api.InArray:
			n := 0
			if len(p) >= 5 {
				n = int(binary.LittleEndian.Uint32(p[1:]))
			}
			size := g.layouts.size[q.Elem]
			if q.HKind != "" {
				size = 4
			}
			skip(5 + min(n, 1000)*size)
		case api.Out, api.Out8, api.OutHandle, api.OutHandles, api.OutArray:
			wants[i] = len(p) > 0 && p[0] != 0
			skip(1)
		case api.InOut, api.In8:
			skip(8)
		case api.Str:
			n := 0
			if len(p) >= 4 {
				n = int(binary.LittleEndian.Uint32(p))
			}
			skip(4 + n)
		}
	}
	return wants
}

// grammarImage has two kernels that the simulated GPU has twins of, and variables.
var grammarImage = []byte(`.version 8.0
.target sm_52
.address_size 64
.global .align 8 .b8 total[8];
.global .align 4 .b8 weight[4];
.global .texref tex;
.visible .entry _Z6vecaddPKfS0_Pfi(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n) { ret; }
.visible .entry _Z6reduceIiEvPKT_PS0_i(.param .u64 a, .param .u64 b, .param .u32 n) { ret; }
` + "\x00")

func imageSum() []byte {
	s := sha256.Sum256(grammarImage)
	return s[:]
}

func cat(parts ...[]byte) []byte { return slices.Concat(parts...) }

func u64s(v ...uint64) (b []byte) {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

// controls make the payloads of the control operations. BEAT and OBSERVE are the test's own.
var controls = map[string]func(g *grammar) []byte{
	"CTX_ACTIVATE":  func(g *grammar) []byte { return u32s(uint32(g.r.IntN(3))) },
	"THREAD_STREAM": func(g *grammar) []byte { return u32s(g.fresh("STREAM")) },
	"IMAGE_CHUNK": func(g *grammar) []byte {
		return cat(imageSum(), u64s(0, uint64(len(grammarImage))), grammarImage)
	},
	"IMAGE_LOAD": func(g *grammar) []byte {
		kind, lib := "MODULE", byte(0)
		if g.r.IntN(2) == 0 {
			kind, lib = "LIBRARY", 1
		}
		return cat(imageSum(), u64s(uint64(len(grammarImage))), u32s(g.fresh(kind)), []byte{lib, 0, 0, 0}, u32s(0))
	},
	"KERNEL_BIND": func(g *grammar) []byte {
		name := pick(g.r, []string{"_Z6vecaddPKfS0_Pfi", "_Z6vecaddPKfS0_Pfi", "_Z6reduceIiEvPKT_PS0_i", "none"})
		n, from := uint16(len(name)), g.handle("LIBRARY")
		if g.r.IntN(2) == 0 {
			n, from = n|wire.BindModule, g.handle("MODULE")
		}
		return cat(u32s(g.fresh("KERNEL"), from), []byte{byte(n), byte(n >> 8)}, []byte(name))
	},
	"KERNEL_INFO": func(g *grammar) []byte { return u32s(g.handle("KERNEL"), uint32(g.r.IntN(2))) },
	"LAUNCH":      (*grammar).launch,
	"COPY_IN": func(g *grammar) []byte {
		return cat(u64s(g.address()), u32s(g.handle("STREAM"), uint32(g.r.IntN(2))), make([]byte, 1+g.r.IntN(70000)))
	},
	"COPY_IN_COMPRESSED": (*grammar).compressed,
	"ARRIVED":            func(g *grammar) []byte { return u32s(g.handle("STREAM"), uint32(g.r.IntN(2))) },
	"COPY_OUT": func(g *grammar) []byte {
		return cat(u64s(g.address(), g.bounded()), u32s(g.handle("STREAM"), g.r.Uint32N(100)))
	},
	"COPY_IN_3D": func(g *grammar) []byte {
		box, n := g.box()
		return cat(box, make([]byte, n))
	},
	"COPY_OUT_3D": func(g *grammar) []byte {
		box, _ := g.box()
		return cat(box, u32s(g.r.Uint32N(100)))
	},
	"EVENT_WATCH": func(g *grammar) []byte {
		return u32s(g.handle("EVENT"), g.r.Uint32N(50), g.handle("STREAM"))
	},
	"LAUNCH_HOST": func(g *grammar) []byte { return u32s(g.handle("STREAM"), g.fresh("HOSTFN")) },
	"HOST_MAP": func(g *grammar) []byte {
		return cat(u64s(hostMapAt+uint64(g.r.IntN(8))<<12, uint64(1+g.r.IntN(4))<<12), u32s(uint32(g.r.IntN(8)/7), 0))
	},
	"COPY_IN_SHARED": func(g *grammar) []byte {
		return cat(u64s(g.address(), hostMapAt+uint64(g.r.IntN(20))<<9, g.bounded()), u32s(g.handle("STREAM"), 0))
	},
	"COPY_OUT_SHARED": func(g *grammar) []byte {
		return cat(u64s(g.address(), hostMapAt+uint64(g.r.IntN(20))<<9, g.bounded()), u32s(g.handle("STREAM"), 0))
	},
	"HOST_UNMAP": func(g *grammar) []byte { return u64s(hostMapAt + uint64(g.r.IntN(8))<<12) },
	"HOST_READ":  func(g *grammar) []byte { return u64s(hostMapAt+uint64(g.r.IntN(20))<<9, g.bounded()) },
	"HOST_WRITE": func(g *grammar) []byte {
		to := hostMapAt + uint64(g.r.IntN(20))<<9
		if g.r.IntN(2) == 0 {
			to = g.address()
		}
		return cat(u64s(to), u32s(g.handle("STREAM"), 0), make([]byte, 1+g.r.IntN(3000)))
	},
	"HOST_MERGE": func(g *grammar) []byte {
		n := 8 * (1 + g.r.IntN(100))
		mask := make([]byte, n/8)
		for i := range mask {
			mask[i] = byte(g.r.Uint32())
		}
		checked := g.r.IntN(2)
		return cat(u64s(hostMapAt+uint64(g.r.IntN(20))<<9), u32s(uint32(n), uint32(checked)), mask, make([]byte, n*(1+checked)))
	},
	"TRACE": func(g *grammar) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(g.r.IntN(3))) },
	"HOST_WATCH": func(g *grammar) []byte {
		return u64s(hostMapAt+uint64(g.r.IntN(20))<<9, uint64(g.r.IntN(20))<<8)
	},
	"LINK_CREATE": func(g *grammar) []byte { return u32s(g.fresh("LINK"), 0) },
	"LINK_ADD": func(g *grammar) []byte {
		return cat(imageSum(), u64s(uint64(len(grammarImage))), u32s(g.handle("LINK"), uint32(g.r.IntN(6)), 0, 1), []byte("k"))
	},
	"LINK_COMPLETE": func(g *grammar) []byte { return u32s(g.handle("LINK")) },
	"LINK_READ": func(g *grammar) []byte {
		return cat(u32s(g.handle("LINK"), 0), u64s(uint64(g.r.IntN(100)), g.bounded()))
	},
	"OBSERVE_MORE":  func(g *grammar) []byte { return u32s(uint32(g.r.IntN(3)), uint32(g.r.IntN(20)/19)) },
	"OBSERVE_LINKS": func(g *grammar) []byte { return u32s(uint32(g.r.IntN(3))) },
	"OBSERVE_TEXT":  func(g *grammar) []byte { return u32s(uint32(g.r.IntN(3)), uint32(g.r.IntN(20))) },
	"OBSERVE_FACTS": func(g *grammar) []byte { return u32s(uint32(g.r.IntN(3))) },
	"HOST_SHARE":    nil, // it needs a descriptor
	"BULK_OPEN":     func(*grammar) []byte { return nil },
	"BULK_DROP":     func(g *grammar) []byte { return u64s(uint64(g.r.IntN(20))) },
	"COPY_IN_BULK":  nil, // it needs a part that has come
	"CONTENT_FIND": func(g *grammar) []byte {
		n := 1 + g.r.IntN(4)
		return cat(u32s(uint32(n), uint32(g.r.IntN(2))), bytes.Repeat(cat(imageSum(), u32s(uint32(1+g.r.IntN(wire.MaxContent)), 0)), n))
	},
	"COPY_IN_STORED": nil, // it needs a piece that was found
	"CONTENT_KEEP":   func(g *grammar) []byte { return cat(u64s(g.address()), u32s(uint32(1+g.r.IntN(wire.MaxContent)), 0)) },
	"HOSTFN_DONE":    nil, "BEAT": nil, "OBSERVE": nil,
}

// launch is of a kernel with good parameters as a rule.
func (g *grammar) launch() []byte {
	dim := func() uint32 {
		if g.r.IntN(40) == 0 {
			return uint32(pick(g.r, hostile))
		}
		return uint32(1 + g.r.IntN(3))
	}
	params := cat(u64s(g.address(), g.address(), g.address()), u32s(uint32(g.r.IntN(30))))
	if g.r.IntN(20) == 0 {
		params = params[:g.r.IntN(len(params))]
	}
	nattr := g.r.IntN(20) / 18
	b := cat(u32s(g.handle("KERNEL"), g.handle("STREAM"), dim(), dim(), dim(), dim(), dim(), dim(), uint32(g.r.IntN(40)/38)<<10),
		[]byte{byte(nattr), 0, byte(g.r.IntN(20) / 17), 0}, u32s(uint32(len(params))), params)
	for range nattr {
		value := make([]byte, 64)
		copy(value, g.structure("CUlaunchAttribute"))
		b = cat(b, u32s(uint32(g.r.IntN(20)), 0), value)
	}
	return b
}

// box is one side of a 3-D copy, with its size in bytes.
func (g *grammar) box() ([]byte, int) {
	kind, where := uint32(2), g.address()
	if g.r.IntN(2) == 0 {
		kind, where = 3, uint64(g.handle("ARRAY"))
	}
	w, h, d := uint64(1+g.r.IntN(64)), uint64(1+g.r.IntN(8)), uint64(1+g.r.IntN(3))
	b := cat(u32s(kind, g.handle("STREAM")), u64s(where, w+uint64(g.r.IntN(64)), h, uint64(g.r.IntN(4)), uint64(g.r.IntN(2)), uint64(g.r.IntN(2))), u32s(uint32(g.r.IntN(10)/9), 0), u64s(w, h, d))
	if g.r.IntN(10) == 0 {
		binary.LittleEndian.PutUint64(b[8*g.r.IntN(len(b)/8):], pick(g.r, hostile))
	}
	return b, int(w * h * d)
}

// rare are operations that leave little to work on, or that may hold a stream for ever.
var rare = regexp.MustCompile(`CtxDestroy|PrimaryCtx|CtxReset|StreamWaitValue|BatchMemOp|CtxSynchronize|GreenCtxDestroy`)

// frame makes the next frame.
func (g *grammar) frame() sent {
	f := sent{wait: true}
	ctxs := g.live["CTX"]
	switch n := g.r.IntN(60); {
	case n == 0:
	case n == 1 && len(g.dead["CTX"]) > 0:
		f.ctx = pick(g.r, g.dead["CTX"])
	case len(ctxs) > 0:
		f.ctx = pick(g.r, ctxs)
	}
	if g.r.IntN(4) == 0 {
		names := make([]string, 0, len(controls))
		for name, make := range controls {
			if make != nil {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		f.name = pick(g.r, append(names, "LAUNCH", "LAUNCH", "LAUNCH"))
		f.payload = controls[f.name](g)
		switch f.name {
		case "COPY_OUT", "COPY_OUT_3D", "EVENT_WATCH":
			f.wait = g.r.IntN(2) == 0
		case "THREAD_STREAM", "KERNEL_BIND", "LAUNCH", "COPY_IN", "COPY_IN_COMPRESSED", "COPY_IN_3D", "ARRIVED", "LAUNCH_HOST", "HOST_WRITE", "HOST_MERGE", "HOST_UNMAP", "HOST_WATCH", "IMAGE_CHUNK", "TRACE", "BULK_DROP", "CONTENT_KEEP":
			f.wait = false
		}
	} else {
		r := pick(g.r, g.rows)
		for rare.MatchString(r.Symbol) && g.r.IntN(25) > 0 {
			r = pick(g.r, g.rows)
		}
		f.name, f.wait, f.payload = r.Symbol, r.Kind == api.Wait, g.row(r)
		if r.Free {
			at := 0
			for _, p := range r.Wire {
				if p.Mode == api.Handle && at+4 <= len(f.payload) {
					g.ended(p.HKind, binary.LittleEndian.Uint32(f.payload[at:]))
					break
				}
				at += api.ScalarSize(p.Elem)
			}
		}
	}
	if g.r.IntN(4000) == 0 && len(f.payload) > 0 {
		f.payload = f.payload[:g.r.IntN(len(f.payload))]
	}
	return f
}

// begin makes what most operations need: contexts, memory, streams, events, graphs, kernels.
func (g *grammar) begin() []sent {
	all := []sent{{"CTX_ACTIVATE", true, 0, u32s(1)}, {"CTX_ACTIVATE", true, 0, u32s(0)}}
	for _, id := range []uint32{1, 2} {
		if !slices.Contains(g.live["CTX"], id) {
			g.live["CTX"] = append(g.live["CTX"], id)
		}
	}
	add := func(name string, payload []byte) {
		wait := name == "IMAGE_LOAD" || g.byName[name] != nil && g.byName[name].Kind == api.Wait
		all = append(all, sent{name, wait, 1, payload})
	}
	for _, n := range []uint64{256, 65536, 1 << 20} {
		add("cuMemAlloc_v2", cat([]byte{1}, u64s(n)))
	}
	add("IMAGE_CHUNK", controls["IMAGE_CHUNK"](g))
	mod, lib := g.fresh("MODULE"), g.fresh("LIBRARY")
	for i, id := range []uint32{mod, lib} {
		add("IMAGE_LOAD", cat(imageSum(), u64s(uint64(len(grammarImage))), u32s(id), []byte{byte(i), 0, 0, 0}, u32s(0)))
	}
	const vecadd = "_Z6vecaddPKfS0_Pfi"
	add("KERNEL_BIND", cat(u32s(g.fresh("KERNEL"), mod), []byte{byte(len(vecadd)), wire.BindModule >> 8}, []byte(vecadd)))
	add("KERNEL_BIND", cat(u32s(g.fresh("KERNEL"), lib), []byte{byte(len(vecadd)), 0}, []byte(vecadd)))
	for range 2 {
		add("cuStreamCreate", u32s(g.fresh("STREAM"), 1))
		add("cuEventCreate", u32s(g.fresh("EVENT"), 0))
		graph := g.fresh("GRAPH")
		add("cuGraphCreate", u32s(graph, 0))
		add("cuGraphAddEmptyNode", cat(u32s(g.fresh("NODE"), graph), []byte{0}, u64s(0)))
		add("cuGraphInstantiateWithFlags", cat(u32s(g.fresh("EXEC"), graph), u64s(0)))
		add("cuArrayCreate_v2", cat(u32s(g.fresh("ARRAY")), []byte{1}, u64s(64, 16), u32s(32, 1)))
		add("cuMipmappedArrayCreate", cat(u32s(g.fresh("MIPMAP")), []byte{1}, u64s(64, 64, 0), u32s(32, 1, 0, 0), u32s(3)))
	}
	return all
}

// compressed is a compressed copy, whose blocks are in form as a rule: one that is not ends the session.
func (g *grammar) compressed() []byte {
	var blocks []byte
	size := uint32(0)
	for range 1 + g.r.IntN(4) {
		n := uint32(1 + g.r.IntN(3000))
		words := g.r.IntN(wire.PaletteWords + 1)
		if words == 0 {
			blocks = append(append(blocks, u32s(n, wire.BlockPlain)...), make([]byte, n)...)
			size += n
			continue
		}
		indices := int(n)
		switch {
		case words == 1:
			indices = 0
		case words <= wire.PaletteNibbles:
			indices = int(n+1) / 2
		}
		blocks = append(append(blocks, u32s(4*n, wire.BlockPalette|uint32(words)<<16)...), make([]byte, 4*words)...)
		for range indices {
			k := byte(g.r.IntN(words))
			if words <= wire.PaletteNibbles {
				k = 0
			}
			blocks = append(blocks, k)
		}
		size += 4 * n
	}
	switch g.r.IntN(400) {
	case 0:
		size = g.r.Uint32()
	case 1:
		blocks = blocks[:g.r.IntN(len(blocks))]
	case 2:
		blocks[g.r.IntN(len(blocks))] = byte(g.r.IntN(256))
	}
	return cat(u64s(g.address()), u32s(g.handle("STREAM"), uint32(g.r.IntN(2)), size, 0), blocks)
}
