package api

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

func TestMalformedWireTablesAreRefused(t *testing.T) {
	for name, text := range map[string]string{
		"kind":         "constant | A | 1 | x",
		"columns":      "const | A | 1",
		"name":         "const | a | 1 | x",
		"number":       "const | A | one | x",
		"twice":        "const | A | 1 | x\nconst | A | 2 | x",
		"same number":  "frame | A | 1 | x\nframe | B | 1 | x",
		"same op":      "op | A | 0xF000 wait | x\nop | B | 0xF000 wait | x",
		"not sent":     "op | A | 0xF000 | x",
		"no message":   "const | A | 1 | x\n\tu32 | a |",
		"type":         "record | A | | x\n\tu31 | a |",
		"direction":    "op | A | 0xF000 wait | x\n\tu32 | a |",
		"no direction": "record | A | | x\n\t> u32 | a |",
		"order":        "op | A | 0xF000 wait | x\n\t< u32 | a |\n\t> u32 | b |",
		"behind rest":  "record | A | | x\n\trest | bytes |\n\tu32 | a |",
		"no record":    "record | A | | x\n\tB | b |",
		"packet out":   "packet | B | | x\n\tu32 | a |\nrecord | A | | x\n\tB | b |",
		"head inside":  "head | B | | x\n\tu32 | a |\nrecord | A | | x\n\tB | b |",
		"magic":        "head | A | | x\n\tmagic | A_MAGIC |",
		"field":        "record | A | | x\n\tu32 | Name |",
		"value":        "record | A | 7 | x",
		"twice record": "record | A | | x\nrecord | A | | x",
	} {
		if _, err := parseWire([]byte(text)); !errors.Is(err, ErrTable) {
			t.Errorf("%s: %q: error %v, want ErrTable", name, text, err)
		}
	}
}

func FuzzParseWire(f *testing.F) {
	f.Add(wireSource)
	f.Add([]byte("op | A | 0xF000 wait | x\n\t> u32[3] | a | b\n\t< A | c |\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := parseWire(b); err != nil && !errors.Is(err, ErrTable) {
			t.Fatalf("error %v does not wrap ErrTable", err)
		}
	})
}

// Numbers of operations, kinds and statuses that a release has had are for
// ever: programs of that release may still be running.
func TestNumbersStay(t *testing.T) {
	table := mustWire()
	for _, s := range strings.Fields(`
		op.CTX_ACTIVATE=0xF000 op.THREAD_STREAM=0xF001 op.IMAGE_CHUNK=0xF002 op.IMAGE_LOAD=0xF003 op.KERNEL_BIND=0xF004
		op.KERNEL_INFO=0xF005 op.LAUNCH=0xF006 op.COPY_IN=0xF007 op.COPY_OUT=0xF008 op.COPY_IN_3D=0xF009 op.COPY_OUT_3D=0xF00A
		op.EVENT_WATCH=0xF00B op.HOSTFN_DONE=0xF00C op.LAUNCH_HOST=0xF00D op.OBSERVE=0xF00E op.BEAT=0xF00F op.HOST_MAP=0xF010 op.HOST_UNMAP=0xF011
		op.HOST_WRITE=0xF012 op.HOST_MERGE=0xF013 op.HOST_READ=0xF014
		op.LINK_CREATE=0xF015 op.LINK_ADD=0xF016 op.LINK_COMPLETE=0xF017 op.LINK_READ=0xF018 op.HOST_WATCH=0xF019 op.OBSERVE_MORE=0xF01A op.OBSERVE_LINKS=0xF01E
		op.HOST_SHARE=0xF01B op.COPY_IN_SHARED=0xF01C op.COPY_OUT_SHARED=0xF01D op.ARRIVED=0xF01F op.OBSERVE_TEXT=0xF020 op.OBSERVE_FACTS=0xF021 op.TRACE=0xF023
		session.COMPUTE=1 session.OBSERVE=2 session.LEASE=3 session.TRACE=5
		status.OK=0 status.VERSION=1 status.FINGERPRINT=2 status.LEASE=3 status.NO_MEMORY=4 status.INTERNAL=5 status.BUSY=6
		frame.REPLY=1 frame.DATA=2 frame.EVENT=3 frame.ERROR=4 frame.PRINT=5 frame.HOSTFN=6 frame.BYE=7 frame.BEAT=8 frame.TURN=9 frame.HOST=11 frame.TRACE=12`) {
		name, number, _ := strings.Cut(s, "=")
		kind, name, _ := strings.Cut(name, ".")
		want, err := strconv.ParseUint(number, 0, 64)
		if i := table.Item(kind, name); err != nil || i == nil || i.Num != want {
			t.Errorf("%s: the table has %+v", s, i)
		}
	}
}

// A change to either table changes the fingerprint, a change of words does not.
func TestFingerprintCoversTheWire(t *testing.T) {
	was := string(mustWire().canonical())
	for _, c := range []struct {
		from, to string
		same     bool
	}{
		{"limit | IMAGE | 2 GiB", "limit | IMAGE | 1 GiB", false},
		{"	> u32 | delivery |", "	> u64 | delivery |", false},
		{"frame | HOST | 11", "frame | HOST | 13", false},
		{"0xF00D oneway", "0xF00D wait", false},
		{"copies to a box", "copies to a corner", true},
		{"choice | BULK_ASK_LEAST | 8 MiB", "choice | BULK_ASK_LEAST | 9 MiB", true},
		{"	u32 | slot | number of the exporter", "	u64 | slot | number of the exporter", true},
	} {
		text := strings.Replace(string(wireSource), c.from, c.to, 1)
		if text == string(wireSource) {
			t.Fatalf("%q is not in the table", c.from)
		}
		w, err := parseWire([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if same := string(w.canonical()) == was; same != c.same {
			t.Errorf("%q for %q: same fingerprint: %v, want %v", c.to, c.from, same, c.same)
		}
	}
}

// typedWire finds constants of the wire that a source file types itself.
type typedWire struct {
	magic *regexp.Regexp // numbers and texts that nothing else has
	names *regexp.Regexp // definitions of a number under the table's name
	known map[string]string
}

func newTypedWire(table *WireTable) *typedWire {
	w := &typedWire{known: map[string]string{}}
	magic := []string{`0[xX][fF]0[0-9a-fA-F]{2}\b`}
	for _, i := range table.Items {
		switch {
		case i.IsText():
			magic = append(magic, regexp.QuoteMeta(i.Value))
		case strings.HasSuffix(i.Name, "_MAGIC"):
			magic = append(magic, "(?i:"+regexp.QuoteMeta(i.Value)+")")
		}
		w.known[plain(cPrefix[i.Kind]+i.Name)] = i.Name
		w.known[plain(goPrefix[i.Kind]+i.Name)] = i.Name
		if i.Kind == "limit" {
			w.known[plain(i.Name+"_MAX")] = i.Name
		}
	}
	delete(w.known, "version") // every format has one
	w.magic = regexp.MustCompile(strings.Join(magic, "|"))
	w.names = regexp.MustCompile(`(?m)^\s*(?:#define\s+(\w+)\s+|(?:const\s+)?(\w+)\s*(?:=|\buint32\s*=)\s*)\(?-?(?:\([a-z0-9_]+\)\s*)?[0-9]`)
	return w
}

// offsetTyped finds a field of a message that is read or written at an offset that a source file types itself.
var offsetTyped = regexp.MustCompile(`\b(?:(?:Little|Big|Native)Endian|le|be)\.(?:Put)?Uint(?:16|32|64)\([^()]*\[[0-9]+:`)

// otherFormats are below remoting/worker and remoting/wire, and know layouts that are not the wire's.
var otherFormats = map[string]string{
	"remoting/worker/cubin":     "fat binaries and ELF files, as NVIDIA's compiler writes them",
	"remoting/worker/linked.go": "what CUDA's runtime wraps a linked fat binary in, in memory",
}

func plain(name string) string { return strings.ToLower(strings.ReplaceAll(name, "_", "")) }

// in lists what a source types.
func (w *typedWire) in(src string) []string {
	src = comments.ReplaceAllString(src, "")
	found := w.magic.FindAllString(src, -1)
	for _, m := range w.names.FindAllStringSubmatch(src, -1) {
		name := plain(m[1] + m[2])
		for _, prefix := range []string{"", "sl", "nv", "slmax", "frame", "op", "ctl", "kind", "session", "status"} {
			short, ok := strings.CutPrefix(name, prefix)
			if !ok {
				continue
			}
			if item := w.known[short]; item != "" && len(short) > 3 {
				found = append(found, fmt.Sprintf("%s, which is %s", m[1]+m[2], item))
				break
			}
		}
	}
	return found
}

var comments = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)

// The wire's numbers stand in the table and in what is generated from it, and
// nowhere else. Tests may type them: they are the other opinion.
func TestWireIsTypedOnce(t *testing.T) {
	w := newTypedWire(mustWire())
	n := 0
	for _, dir := range []string{"remoting/client", "remoting/worker", "remoting/wire", "daemon/internal", "daemon/cmd", "bench"} {
		err := filepath.WalkDir(filepath.Join("..", "..", dir), func(path string, d os.DirEntry, err error) error {
			name := filepath.Base(path)
			switch ext := filepath.Ext(name); {
			case err != nil:
				return err
			case d.IsDir() || ext != ".go" && ext != ".c" && ext != ".h":
				return nil
			case strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "test") || strings.HasPrefix(name, "gen"):
				return nil
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			n++
			found := w.in(string(b))
			if rel := strings.TrimPrefix(path, "../../"); strings.HasPrefix(rel, "remoting/w") && otherFormats[rel] == "" && otherFormats[filepath.Dir(rel)] == "" {
				found = append(found, offsetTyped.FindAllString(comments.ReplaceAllString(string(b), ""), -1)...)
			}
			for _, what := range found {
				t.Errorf("%s types %s: take it from what remoting/api/wire.tbl generates", path, what)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if n < 100 {
		t.Errorf("only %d files were looked at", n)
	}
}

// What the rule finds, and what it leaves alone.
func TestTypedWireIsFound(t *testing.T) {
	w := newTypedWire(mustWire())
	for _, src := range []string{
		"#define OP_OBSERVE 0xf00e", "if (magic != 0x4c43574cu)", "	if m != 0x4C43574C {", `memcpy(h, "SLUICE-L", 8);`, `copy(b, "SLUICE\r\n")`,
		"#define MAX_WELCOME (1u << 20)", "#define WELCOME_MAX (1u << 20)", "	MaxPayload = 16 << 20", "const MaxImage = 2 << 30",
		"	KindStream = 2", "#define NV_MAX_DEVICES 64", "#define SL_MAX_DEVICES 16", "#define MAX_IMAGE ((uint64_t)8 << 30)",
		"#define FRAME_REPLY 1", "	SL_FEATURE_SHM = 1,", "#define SL_SHM_RING (4u << 20)", "#define SL_BULK_ASK_LEAST (8u << 20)", "	bulkDownLeast = 4 << 20", "	StatusBusy = 6",
	} {
		if len(w.in(src)) == 0 {
			t.Errorf("not found: %s", src)
		}
	}
	for _, src := range []string{
		"	if zero := binary.LittleEndian.Uint32(p[20:]); zero != 0 {", "	binary.LittleEndian.PutUint64(s.hdr[8:], n)", "	le.PutUint16(b[4:6], n)",
		"n := binary.BigEndian.Uint64(m.head[0:])",
	} {
		if !offsetTyped.MatchString(src) {
			t.Errorf("not found: %s", src)
		}
	}
	for _, src := range []string{
		"#define EXCHANGE_MS 5000", "	slotSize = 1 << 20", "// 0xF00E is OBSERVE", "/* SLUICE-L */", "x = 0xf0000000", "#define RING (1u << 20)", "	version = 1",
	} {
		if found := w.in(src); len(found) != 0 {
			t.Errorf("%s: found %v", src, found)
		}
	}
}
