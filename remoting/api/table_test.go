package api

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"testing"
)

func rows(t *testing.T) []Row {
	t.Helper()
	rs, err := Rows()
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

func TestGeneratedFilesAreUpToDate(t *testing.T) {
	files, err := Generate()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join("..", "..", ProtocolPage))
	if err != nil {
		t.Fatal(err)
	}
	if files[ProtocolPage], err = Protocol(page); err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		have, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(have, want) {
			t.Errorf("%s is out of date: run go generate ./remoting/api", name)
		}
	}
}

func TestMalformedRowsAreRefused(t *testing.T) {
	for name, row := range map[string]string{
		"columns":    "cuInit | cuInit 2000 | - | local",
		"version":    "cuInit | cuInit x | - | local | - | void",
		"variant":    "cuInit | cuInit 2000 | pt | local | - | void",
		"kind":       "cuInit | cuInit 2000 | - | sometimes | - | void",
		"absent":     "cuInit | cuInit 2000 | - | absent=SUCCESS | - | void",
		"bare":       "cuInit | cuInit 2000 | - | refuse | - | void",
		"no reason":  "cuInit | cuInit 2000 | - | refuse=because | - | void",
		"flag":       "cuInit | cuInit 2000 | - | wait | z | void",
		"annotation": "cuFoo | cuFoo 2000 | - | wait | - | size_t *n=what",
		"unsized":    "cuFoo | cuFoo 2000 | - | wait | - | size_t *n",
		"new":        "cuFoo | cuFoo 2000 | - | wait | - | size_t *n=new",
		"wire":       "cuFoo | cuFoo 2000 | - | wait | c | void *p | int n",
		"alias":      "cuFoo | cuFoo 2000 | - | alias=cuBar | - | void",
		"twice":      "cuFoo | cuFoo 2000 | - | local | - | void\ncuFoo | cuFoo 2000 | - | local | - | void",
	} {
		if _, err := Parse([]byte(row)); !errors.Is(err, ErrTable) {
			t.Errorf("%s: %q: error %v, want ErrTable", name, row, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("cuInit | cuInit 2000 | - | local | - | unsigned int Flags\n"))
	f.Add([]byte("cuFoo | cuFoo 1 | ptsz | wait | c w | CUevent e, const int *a=in[n], size_t n | int n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		rs, err := Parse(b)
		if err != nil && !errors.Is(err, ErrTable) {
			t.Fatalf("error %v does not wrap ErrTable", err)
		}
		for i, r := range rs {
			if r.Op != i {
				t.Fatalf("row %d has operation %d", i, r.Op)
			}
		}
	})
}

// headers are the cuda.h files at hand: of the toolkits that the tests fetch,
// and of the machine.
func headers(t *testing.T) []string {
	t.Helper()
	var found []string
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		cache = "../../build/cache"
	}
	for _, p := range []string{
		cache + "/*/usr/include/cuda.h", cache + "/*/cu13/include/cuda.h",
		"/usr/include/cuda.h", "/usr/local/cuda*/include/cuda.h", os.Getenv("SLUICE_CUDA_H"),
	} {
		m, err := filepath.Glob(p)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, m...)
	}
	if len(found) == 0 {
		if os.Getenv("SLUICE_REQUIRE_CUDA_H") != "" {
			t.Fatal("no cuda.h found: run test/cuda-toolkit.sh or set SLUICE_CUDA_H")
		}
		t.Log("no cuda.h at hand, nothing compared; make test fetches one")
	}
	return found
}

var declared = regexp.MustCompile(`CUresult\s+(?:CUDAAPI\s+)?(cu[A-Z]\w*)\s*\(`)

func TestTableHasEveryDeclaredFunction(t *testing.T) {
	have := map[string]bool{}
	for _, r := range rows(t) {
		have[r.Symbol] = true
		if v := r.VariantSymbol(); v != "" {
			have[v] = true
		}
	}
	for _, h := range headers(t) {
		out, err := exec.Command("gcc", "-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", "-I", filepath.Dir(h), h).Output()
		if err != nil {
			t.Fatalf("%s: %v", h, err)
		}
		n := 0
		for _, m := range declared.FindAllSubmatch(out, -1) {
			n++
			if name := string(m[1]); !have[name] {
				t.Errorf("%s declares %s, which cuda.tbl lacks: add a row", h, name)
			}
		}
		t.Logf("%s: %d declarations, all in the table", h, n)
		if n < 400 {
			t.Errorf("%s: only %d declarations found; did the header's style change?", h, n)
		}
	}
}

var structName = regexp.MustCompile(`(?m)^\} (CU\w+);`)

// grown lists structures that later versions of CUDA made longer.
var grown = map[string]bool{"CUDA_CHILD_GRAPH_NODE_PARAMS": true, "CUdevSmResource": true}

// TestLayouts compares the size of every structure that cuabi.h and a cuda.h
// at hand both have.
func TestLayouts(t *testing.T) {
	src, err := os.ReadFile("cuabi.h")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range structName.FindAllSubmatch(src, -1) {
		names = append(names, string(m[1]))
	}
	if len(names) < 60 {
		t.Fatalf("only %d structures found in cuabi.h", len(names))
	}
	ours := sizes(t, "cuabi.h", ".", names)
	for _, h := range headers(t) {
		text, err := os.ReadFile(h)
		if err != nil {
			t.Fatal(err)
		}
		var both []string
		for _, n := range names {
			if regexp.MustCompile(`\b` + n + `;`).Match(text) {
				both = append(both, n)
			}
		}
		theirs := sizes(t, "cuda.h", filepath.Dir(h), both)
		var bad []string
		for n, s := range theirs {
			if ours[n] != s && !grown[n] {
				bad = append(bad, fmt.Sprintf("%s is %s bytes in cuabi.h and %s in %s", n, ours[n], s, h))
			}
		}
		sort.Strings(bad)
		for _, b := range bad {
			t.Error(b)
		}
		t.Logf("%s: %d structures compared", h, len(both))
	}
}

func sizes(t *testing.T, header, dir string, names []string) map[string]string {
	t.Helper()
	var src strings.Builder
	fmt.Fprintf(&src, "#define __CUDA_API_VERSION_INTERNAL\n#include <stdio.h>\n#include \"%s\"\nint main(void) {\n", header)
	for _, n := range names {
		fmt.Fprintf(&src, "printf(\"%s %%zu\\n\", sizeof(%s));\n", n, n)
	}
	src.WriteString("return 0; }\n")
	tmp := t.TempDir()
	c := filepath.Join(tmp, "sizes.c")
	if err := os.WriteFile(c, []byte(src.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(tmp, "sizes")
	if out, err := exec.Command("gcc", "-w", "-I", dir, c, "-o", bin).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", header, err, out)
	}
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]string{}
	for _, l := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		n, s, _ := strings.Cut(l, " ")
		m[n] = s
	}
	return m
}

// Whatever starts work on a device must pass the worker's gate, or a tenant could work
// beside its turns. Launches do so by an operation of their own.
func TestWhatStartsWorkPassesTheGate(t *testing.T) {
	starts := regexp.MustCompile(`^cu(Launch|GraphLaunch|Memcpy|Memset|MemPrefetch|MemDiscard)`)
	n := 0
	for _, r := range rows(t) {
		work := r.Forwarded() && starts.MatchString(r.Symbol)
		if work != r.GPU {
			t.Errorf("%s: flag gpu is %v, want %v", r.Symbol, r.GPU, work)
		}
		if !r.GPU {
			continue
		}
		n++
		if _, _, stream := gated(r); stream == "" {
			t.Errorf("%s: flag gpu, and no stream", r.Symbol)
		}
	}
	if n == 0 {
		t.Error("no row has flag gpu")
	}
}
