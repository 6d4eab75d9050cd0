package api

import (
	"fmt"
	"slices"
	"strings"
)

// CoveredVersion is the version of cuda.h that docs/coverage.md counts by.
const CoveredVersion = 13000

// otherHeaders maps how names begin to the header that declares them instead of cuda.h.
var otherHeaders = []struct{ prefix, header string }{
	{"cuGL", "cudaGL.h"}, {"cuGraphicsGL", "cudaGL.h"},
	{"cuEGL", "cudaEGL.h"}, {"cuGraphicsEGL", "cudaEGL.h"}, {"cuGraphicsResourceGetMappedEgl", "cudaEGL.h"},
	{"cuVDPAU", "cudaVDPAU.h"}, {"cuGraphicsVDPAU", "cudaVDPAU.h"},
	{"cuProfiler", "cudaProfiler.h"},
}

// besides maps symbols to whether cuda.h 13.0 declares them, where it breaks its own rule: of the symbols
// of a name it declares the newest alone.
var besides = map[string]bool{
	"cuCtxGetDevice": true, "cuCtxSynchronize": true, "cuStreamGetCtx": true,
	"cuGraphInstantiate_v2": false,
}

// declaredBy gives the header of CUDA 13.0 that declares each symbol to a program. Symbols that older
// headers declared, and no header does now, are missing.
func declaredBy(rows []Row) map[string]string {
	newest := map[string]int{}
	for _, r := range rows {
		if r.Version <= CoveredVersion {
			newest[r.Name] = max(newest[r.Name], r.Version)
		}
	}
	headers := map[string]string{}
	for _, r := range rows {
		declared, known := besides[r.Symbol]
		if !known {
			declared = r.Version == newest[r.Name]
		}
		if declared {
			headers[r.Symbol] = headerOf(r.Symbol)
		}
	}
	return headers
}

func headerOf(symbol string) string {
	for _, o := range otherHeaders {
		if strings.HasPrefix(symbol, o.prefix) {
			return o.header
		}
	}
	return "cuda.h"
}

// count says how many functions are answered in which way.
type count struct {
	all  int
	kind map[Kind]int
}

func (c *count) add(r Row) {
	if c.kind == nil {
		c.kind = map[Kind]int{}
	}
	c.all++
	c.kind[r.Kind]++
}

// coverage makes docs/coverage.md.
func coverage(rows []Row) []byte {
	var p printer
	headers := declaredBy(rows)
	var base, older, others, all count
	for _, r := range rows {
		all.add(r)
		switch headers[r.Symbol] {
		case "cuda.h":
			base.add(r)
		case "":
			older.add(r)
		default:
			others.add(r)
		}
	}
	p.f("<!-- %s -->\n# Coverage of the CUDA driver API\n\n", Header)
	p.f("`cuda.h` of CUDA 13.0 declares %d functions to a program that is built with it. Sluice serves %d of them and refuses %d (%s). The other %d (%s) work on objects that only a refused function could make, such as memory imported from Vulkan: no program has one to pass, and whatever it passes instead gets the error for an object that does not exist.\n\n",
		base.all, base.all-base.kind[Refuse]-base.kind[Absent], base.kind[Refuse], percent(base.kind[Refuse], base.all),
		base.kind[Absent], percent(base.kind[Absent], base.all))
	p.f("| functions | exported | answered in the client | sent without an answer | one round trip | another name of one of these | no such object | refused |\n|---|---|---|---|---|---|---|---|\n")
	for _, l := range []struct {
		what string
		c    count
	}{
		{"`cuda.h` 13.0", base}, {"older forms", older}, {"graphics and profiler headers", others}, {"all", all},
	} {
		k := l.c.kind
		p.f("| %s | %d | %d | %d | %d | %d | %d | %d |\n", l.what, l.c.all, k[Local], k[OneWay], k[Wait], k[Alias], k[Absent], k[Refuse])
	}
	p.f(`
How this counts: a function is a symbol that the preprocessor leaves declared when a program includes
` + "`cuda.h`" + ` of CUDA 13.0 without options. A test compares the list with that header. "Older forms" are symbols that only
programs built with an earlier header call, such as ` + "`cuMemAlloc`" + ` with addresses of 32 bits; the header maps their names to
newer symbols. "Graphics and profiler headers" are cudaGL.h, cudaEGL.h, cudaVDPAU.h and cudaProfiler.h. Variants for the
per-thread default stream are not counted again. A function counts as served when it does its work; it may still
refuse single flags or kinds of memory by name, and [limits.md](limits.md) says which.

A refused function returns CUDA_ERROR_NOT_SUPPORTED and is logged once by its name. Those that take addresses of 32 bits
return CUDA_ERROR_INVALID_CONTEXT, as the driver's do in every context that was not created by an old form, too. The reasons are:

| reason | why | functions | of these in ` + "`cuda.h`" + ` 13.0 |
|---|---|---|---|
`)
	for _, reason := range reasons(rows) {
		n, here := 0, 0
		for _, r := range rows {
			if r.Kind == Refuse && r.Reason == reason {
				n++
				if headers[r.Symbol] == "cuda.h" {
					here++
				}
			}
		}
		p.f("| %s | %s | %d | %d |\n", reason, Reasons[reason], n, here)
	}
	p.f("\n| function | since | declared by | per-thread variant | answered | charged to the lease |\n|---|---|---|---|---|---|\n")
	word := map[Kind]string{Local: "locally", OneWay: "one-way", Wait: "one round trip"}
	for _, r := range rows {
		w := word[r.Kind]
		switch r.Kind {
		case Alias:
			w = "as " + r.Target
		case Refuse:
			w = "refused: " + string(r.Reason)
		case Absent:
			w = "no such object"
		}
		charge := ""
		if r.Charge {
			charge = "yes"
		}
		header := headers[r.Symbol]
		if header == "" {
			header = "an older header"
		}
		p.f("| %s | %d.%d | %s | %s | %s | %s |\n", r.Symbol, r.Version/1000, r.Version%1000/10, header, r.Variant, w, charge)
	}
	return p.Bytes()
}

// reasons lists the reasons that the rows give, sorted.
func reasons(rows []Row) []Reason {
	var l []Reason
	for _, r := range rows {
		if r.Kind == Refuse && !slices.Contains(l, r.Reason) {
			l = append(l, r.Reason)
		}
	}
	slices.Sort(l)
	return l
}

func percent(n, of int) string { return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(of)) }
