package api

import (
	"fmt"
	"strings"
)

// cgoType is the fixed-width C type a parameter has in the call_ wrappers.
func cgoType(q Param) string {
	switch q.Mode {
	case Value:
		if q.Elem == "float" {
			return "float"
		}
		switch ScalarSize(q.Elem) {
		case 8:
			return "uint64_t"
		case 2:
			return "uint16_t"
		case 1:
			return "uint8_t"
		}
		return "uint32_t"
	case Handle:
		return "uint64_t"
	case New, OutHandle, OutHandles:
		return "uint64_t *"
	case InArray:
		if q.HKind != "" {
			return "uint64_t *"
		}
		return q.Elem + " *"
	case InOut:
		return "size_t *"
	case Str:
		return "const char *"
	case In8, Out8, Null:
		return "void *"
	}
	return q.Elem + " *"
}

func callable(r Row) bool { return r.Forwarded() && !r.Flat }

func workerCalls(rows []Row, numbers int) []byte {
	var p printer
	p.f("/* %s */\n#ifndef SLUICE_GEN_CALLS_H\n#define SLUICE_GEN_CALLS_H\n\n#include \"../api/cuprotos.h\"\n\n", Header)
	p.f("/* The driver's functions by operation number; NULL where the driver has none. */\n#define SL_FN_COUNT %d\nextern void *sl_fn[SL_FN_COUNT];\nextern const char *const sl_fn_names[SL_FN_COUNT];\n\n", numbers)
	p.f("enum {\n")
	for _, r := range rows {
		p.f("\tFN_%s = %d,\n", r.Symbol, r.Op)
	}
	p.f("};\n\n")
	for _, r := range rows {
		if !callable(r) {
			continue
		}
		var ps, as []string
		for _, q := range r.Wire {
			t := cgoType(q)
			if strings.HasSuffix(t, "*") {
				ps = append(ps, t+q.Name)
			} else {
				ps = append(ps, t+" "+q.Name)
			}
			switch {
			case q.Mode == Handle && q.HKind == "MEMHANDLE":
				as = append(as, q.Name)
			case q.Mode == Value:
				as = append(as, fmt.Sprintf("(%s)%s", q.CType, q.Name))
			default:
				as = append(as, fmt.Sprintf("(%s)%s", strings.TrimSuffix(q.CType, "[]"), q.Name))
			}
		}
		if len(ps) == 0 {
			ps = []string{"void"}
		}
		p.f("static inline CUresult call_%s(%s)\n{\n\tif (!sl_fn[%d])\n\t\treturn CUDA_ERROR_NOT_SUPPORTED;\n\treturn ((__typeof__(&%s))sl_fn[%d])(%s);\n}\n\n",
			r.Symbol, strings.Join(ps, ", "), r.Op, r.Symbol, r.Op, strings.Join(as, ", "))
	}
	p.f("#ifdef SL_FN_NAMES\nconst char *const sl_fn_names[SL_FN_COUNT] = {\n")
	for _, r := range rows {
		p.f("\t[%d] = \"%s\",\n", r.Op, r.Symbol)
	}
	p.f("};\n#endif\n\n#endif\n")
	return p.Bytes()
}

func goScalar(q Param) (read, typ string) {
	if q.Elem == "float" {
		return "F32", "float32"
	}
	switch ScalarSize(q.Elem) {
	case 8:
		return "U64", "uint64"
	case 2:
		return "U16", "uint16"
	case 1:
		return "U8", "uint8"
	}
	return "U32", "uint32"
}

func workerDispatch(rows []Row) ([]byte, error) {
	var p printer
	p.f("// %s\n\npackage worker\n\n/*\n#include \"gen_calls.h\"\n#include <stdlib.h>\n*/\nimport \"C\"\n\nimport (\n\t\"unsafe\"\n\n\t\"github.com/sluice-hpc/sluice/remoting/wire\"\n)\n\n", Header)
	p.f("var apiFingerprint = [32]byte{")
	for i, b := range Fingerprint() {
		if i%8 == 0 {
			p.f("\n\t")
		}
		p.f("0x%02x, ", b)
	}
	p.f("\n}\n\n")
	p.f("// Operation numbers of the API table.\nconst (\n")
	for _, r := range rows {
		if r.Forwarded() {
			p.f("\top%s = %d\n", strings.ToUpper(r.Symbol[:1])+r.Symbol[1:], r.Op)
		}
	}
	p.f(")\n\n// lateNothings are the one-way operations whose refusal the program need not be told of.\nvar lateNothings = map[uint16]bool{\n")
	for _, r := range rows {
		if r.Kind == OneWay && r.Late == LateNothing {
			p.f("\top%s: true,\n", strings.ToUpper(r.Symbol[:1])+r.Symbol[1:])
		}
	}
	p.f("}\n\n// givenOps are the operations that say which stream they are given to.\nvar givenOps = map[uint16]bool{\n")
	for _, r := range rows {
		if r.Forwarded() && r.Late == LateStream && r.stream() != nil {
			p.f("\top%s: true,\n", strings.ToUpper(r.Symbol[:1])+r.Symbol[1:])
		}
	}
	p.f("}\n\nvar opNames = [...]string{\n")
	for _, r := range rows {
		p.f("\t%d: \"%s\",\n", r.Op, r.Symbol)
	}
	p.f("}\n\n")
	p.f(`// href is a handle parameter: its id on the wire and what the driver calls it.
type href struct {
	id   uint32
	real uint64
}

// memIn fills a value of C's memory from the request.
func memIn(d *wire.Decoder, p unsafe.Pointer, n uintptr) {
	if b := d.Bytes(int(n)); len(b) == int(n) {
		copy(unsafe.Slice((*byte)(p), n), b)
	}
}

// memOut appends a value of C's memory to the reply.
func memOut(e *wire.Encoder, p unsafe.Pointer, n uintptr) {
	e.Bytes(unsafe.Slice((*byte)(p), n))
}

// maxHandles bounds the arrays of handles that a reply carries.
const maxHandles = 1 << 20

func first[T any](s []T) *T {
	if len(s) == 0 {
		return nil
	}
	return &s[0]
}

// dispatch decodes one operation of the API table, runs it and encodes its
// reply. known is false for an operation that the table does not forward.
func (s *session) dispatch(op uint16, d *wire.Decoder, e *wire.Encoder) (result int32, known bool) {
	switch op {
`)
	for _, r := range rows {
		if r.Forwarded() {
			p.f("\tcase %d:\n\t\treturn s.do_%s(d, e), true\n", r.Op, r.Symbol)
		}
	}
	p.f("\t}\n\treturn int32(C.CUDA_ERROR_NOT_SUPPORTED), false\n}\n\n")
	for _, r := range rows {
		if r.Forwarded() {
			handler(&p, r)
		}
	}
	return gofmt(p.Bytes())
}

// handler writes the function that runs one operation.
func handler(p *printer, r Row) {
	p.f("func (s *session) do_%s(d *wire.Decoder, e *wire.Encoder) int32 {\n", r.Symbol)
	decodeParams(p, r)
	findHandles(p, r)
	guardParts(p, r)
	callDriver(p, r)
	bindNew(p, r)
	ownMoved(p, r)
	unbindFreed(p, r)
	encodeReply(p, r)
	p.f("\treturn int32(rc)\n}\n\n")
}

// decodeParams reads the request: a value p_, a handle h_, an array a_ or ids_, a place o_ for
// what the driver gives, with w_ for whether the client wants it.
func decodeParams(p *printer, r Row) {
	for _, q := range r.Wire {
		n := q.Name
		switch q.Mode {
		case Value:
			rd, _ := goScalar(q)
			p.f("\tp_%s := d.%s()\n", n, rd)
		case Handle:
			p.f("\th_%s := href{id: d.U32()}\n", n)
			if r.Late == LateStream && q.Elem == "CUstream" && r.stream().Name == n {
				p.f("\ts.give(h_%s.id)\n", n)
			}
		case In:
			p.f("\tvar v_%s C.%s\n\tvar p_%s *C.%s\n\tif d.U8() != 0 {\n\t\tmemIn(d, unsafe.Pointer(&v_%s), unsafe.Sizeof(v_%s))\n\t\tp_%s = &v_%s\n\t}\n", n, q.Elem, n, q.Elem, n, n, n, n)
		case InArray:
			// The counting parameter may stand after the array: remember where the array begins.
			if q.HKind != "" {
				p.f("\tvar ids_%s []uint32\n\tif d.U8() != 0 {\n\t\tn := uint64(d.U32())\n\t\tif n > uint64(d.Left())/4 {\n\t\t\td.Fail()\n\t\t\tn = 0\n\t\t}\n\t\tids_%s = make([]uint32, n)\n\t\tfor i := range ids_%s {\n\t\t\tids_%s[i] = d.U32()\n\t\t}\n\t}\n", n, n, n, n)
			} else {
				p.f("\tvar a_%s []C.%s\n\tif d.U8() != 0 {\n\t\tn := uint64(d.U32())\n\t\tif n > uint64(d.Left())/uint64(unsafe.Sizeof(*first(a_%s))) {\n\t\t\td.Fail()\n\t\t\tn = 0\n\t\t}\n\t\ta_%s = make([]C.%s, n)\n\t\tfor i := range a_%s {\n\t\t\tmemIn(d, unsafe.Pointer(&a_%s[i]), unsafe.Sizeof(a_%s[i]))\n\t\t}\n\t}\n", n, goCName(q.Elem), n, n, goCName(q.Elem), n, n, n)
			}
		case Out:
			p.f("\tw_%s := d.U8() != 0\n\tvar o_%s C.%s\n", n, n, goCName(q.Elem))
		case Out8:
			p.f("\tw_%s := d.U8() != 0\n\tvar o_%s uint64\n", n, n)
		case OutHandle:
			p.f("\tw_%s := d.U8() != 0\n\tvar o_%s C.uint64_t\n", n, n)
		case OutHandles, OutArray:
			p.f("\tw_%s := d.U8() != 0\n", n)
		case InOut:
			p.f("\to_%s := C.size_t(d.U64())\n", n)
		case New:
			p.f("\tid_%s := d.U32()\n\tvar o_%s C.uint64_t\n", n, n)
		case Str:
			p.f("\tp_%s := d.Str()\n", n)
		case In8:
			p.f("\tvar o_%s uint64\n\tmemIn(d, unsafe.Pointer(&o_%s), 8)\n", n, n)
		}
	}
	p.f("\tif d.Err() != nil {\n\t\treturn s.malformed()\n\t}\n")
	for _, q := range r.Wire {
		if q.Mode == InArray {
			a := "a_"
			if q.HKind != "" {
				a = "ids_"
			}
			p.f("\tif %s%s != nil && uint64(len(%s%s)) != uint64(p_%s) {\n\t\treturn s.malformed()\n\t}\n", a, q.Name, a, q.Name, q.Count)
		}
	}
}

// findHandles finds what the driver calls the handles, and makes the arrays and texts for it.
func findHandles(p *printer, r Row) {
	for _, q := range r.Wire {
		n := q.Name
		switch {
		case q.Mode == Handle && q.Elem == "CUfunction":
			p.f("\t{\n\t\treal, ok := s.function(h_%s.id)\n\t\tif !ok {\n\t\t\treturn s.badHandle(%s, h_%s.id)\n\t\t}\n\t\th_%s.real = real\n\t}\n", n, kindName(q.HKind), n, n)
		case q.Mode == Handle:
			p.f("\t{\n\t\treal, ok := s.handle(%s, h_%s.id)\n\t\tif !ok {\n\t\t\treturn s.badHandle(%s, h_%s.id)\n\t\t}\n\t\th_%s.real = real\n\t}\n", kindName(q.HKind), n, kindName(q.HKind), n, n)
			if q.HKind == "EXEC" && r.Late == LateExec {
				p.f("\ts.edited = h_%s.real\n", n)
			}
			if q.HKind == "EXEC" && r.GPU {
				p.f("\tif rc := s.failures.edit(h_%s.real); rc != 0 {\n\t\treturn rc\n\t}\n", n)
			}
		case q.Mode == InArray && q.HKind != "":
			p.f("\ta_%s := make([]C.uint64_t, len(ids_%s))\n\tfor i, id := range ids_%s {\n\t\treal, ok := s.handle(%s, id)\n\t\tif !ok {\n\t\t\treturn s.badHandle(%s, id)\n\t\t}\n\t\ta_%s[i] = C.uint64_t(real)\n\t}\n", n, n, n, kindName(q.HKind), kindName(q.HKind), n)
		case q.Mode == OutHandles:
			p.f("\tvar a_%s []C.uint64_t\n\tif w_%s {\n\t\to_%s = min(o_%s, maxHandles)\n\t\ta_%s = make([]C.uint64_t, o_%s)\n\t}\n", n, n, q.Count, q.Count, n, q.Count)
		case q.Mode == OutArray:
			p.f("\tvar a_%s []C.%s\n\tif w_%s {\n\t\to_%s = min(o_%s, maxHandles)\n\t\ta_%s = make([]C.%s, o_%s)\n\t}\n", n, goCName(q.Elem), n, q.Count, q.Count, n, goCName(q.Elem), q.Count)
		case q.Mode == Str && !r.Worker:
			p.f("\tc_%s := C.CString(p_%s)\n\tdefer C.free(unsafe.Pointer(c_%s))\n", n, n, n)
		}
	}
}

// callDriver calls the driver, or the worker's own function, inside the gate if the call works
// on the GPU.
func callDriver(p *printer, r Row) {
	if r.GPU {
		what, size, stream := gated(r)
		p.f("\tg, grc := s.gateOf(%s)\n\tif grc != 0 {\n\t\treturn grc\n\t}\n", stream)
		p.f("\tif g != nil && !g.Enter(%s, %s, %s.real) {\n\t\treturn s.noTurn()\n\t}\n", what, size, stream)
		p.f("\tw := s.workBegins(%d, %s, %s)\n", r.Op, stream, size)
	}
	if r.Worker {
		p.f("\trc := s.%s(%s)\n", r.Symbol, strings.Join(workerArgs(r), ", "))
	} else {
		p.f("\trc := C.call_%s(%s)\n", r.Symbol, strings.Join(driverArgs(r), ", "))
	}
	if r.GPU {
		p.f("\tw.ends(int32(rc))\n")
		p.f("\tif g != nil {\n\t\ts.passed(g)\n\t}\n")
	}
}

// workerArgs are the arguments of the worker's own function.
func workerArgs(r Row) (args []string) {
	for _, q := range r.Wire {
		n := q.Name
		switch q.Mode {
		case Value, In:
			args = append(args, "p_"+n)
		case Str:
			args = append(args, "p_"+n)
		case Handle:
			args = append(args, "h_"+n)
		case InArray:
			args = append(args, "a_"+n)
		case New:
			args = append(args, "id_"+n, "&o_"+n)
		case Out, Out8, OutHandle, InOut, In8:
			args = append(args, "&o_"+n)
		case OutHandles, OutArray:
			args = append(args, "a_"+n)
		}
	}
	return args
}

// driverArgs are the arguments of a function of the driver.
func driverArgs(r Row) (args []string) {
	for _, q := range r.Wire {
		n := q.Name
		switch q.Mode {
		case Value:
			args = append(args, fmt.Sprintf("C.%s(p_%s)", cgoType(q), n))
		case In:
			args = append(args, "p_"+n)
		case Str:
			args = append(args, "c_"+n)
		case Handle:
			args = append(args, fmt.Sprintf("C.uint64_t(h_%s.real)", n))
		case InArray, OutHandles, OutArray:
			args = append(args, fmt.Sprintf("first(a_%s)", n))
		case New, OutHandle, InOut:
			args = append(args, "&o_"+n)
		case Out:
			args = append(args, "&o_"+n)
		case Out8, In8:
			args = append(args, fmt.Sprintf("unsafe.Pointer(&o_%s)", n))
		case Null:
			args = append(args, "nil")
		}
	}
	return args
}

// unbindFreed forgets the id of a handle that the call has freed.
func unbindFreed(p *printer, r Row) {
	if r.Free && !r.Worker {
		for _, q := range r.Wire {
			if q.Mode == Handle {
				p.f("\ts.unbind(%s, h_%s.id)\n", kindName(q.HKind), q.Name)
				break
			}
		}
	}
}

// encodeReply writes what the client wants: counts first, as it reads them.
func encodeReply(p *printer, r Row) {
	var body printer
	for _, q := range r.Wire {
		if q.Mode == InOut {
			body.f("\t\te.U64(uint64(o_%s))\n", q.Name)
		}
	}
	for _, q := range r.Wire {
		n := q.Name
		switch q.Mode {
		case Out, Out8:
			body.f("\t\tif w_%s {\n\t\t\tmemOut(e, unsafe.Pointer(&o_%s), unsafe.Sizeof(o_%s))\n\t\t}\n", n, n, n)
		case OutHandle:
			body.f("\t\tif w_%s {\n\t\t\te.U32(%s)\n\t\t}\n", n, outID(r, q, "o_"+n))
		case OutArray:
			body.f("\t\tif w_%s {\n\t\t\tk := min(len(a_%s), int(o_%s))\n\t\t\te.U32(uint32(k))\n\t\t\tfor i := range a_%s[:k] {\n\t\t\t\tmemOut(e, unsafe.Pointer(&a_%s[i]), unsafe.Sizeof(a_%s[i]))\n\t\t\t}\n\t\t}\n", n, n, q.Count, n, n, n)
		case OutHandles:
			body.f("\t\tif w_%s {\n\t\t\tk := min(len(a_%s), int(o_%s))\n\t\t\te.U32(uint32(k))\n\t\t\tfor _, real := range a_%s[:k] {\n\t\t\t\te.U32(%s)\n\t\t\t}\n\t\t}\n", n, n, q.Count, n, outID(r, q, "real"))
		}
	}
	if body.Len() > 0 {
		p.f("\tif rc == C.CUDA_SUCCESS {\n%s\t}\n", body.String())
	}
}

// guardParts refuses to destroy a part by itself.
func guardParts(p *printer, r Row) {
	if r.Free && !r.Worker {
		for _, q := range r.Wire {
			if q.Mode == Handle && q.HKind == "GRAPH" {
				p.f("\tif s.partOf(refOf(%s, h_%s.id), %s) {\n\t\treturn C.CUDA_ERROR_INVALID_VALUE // it ends with its node\n\t}\n", kindName(q.HKind), q.Name, kindName("NODE"))
			}
		}
	}
}

// ownMoved makes a graph that was moved into a node a part of it.
func ownMoved(p *printer, r Row) {
	if r.Symbol == "cuGraphAddChildGraphNode" {
		p.f("\tif rc == 0 && p_ownership == C.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE {\n\t\ts.own(refOf(%s, id_phGraphNode), %s, h_childGraph.id)\n\t}\n", kindName("NODE"), kindName("GRAPH"))
	}
}

// bindNew gives the ids that the client chose their handles, and parts their whole.
func bindNew(p *printer, r Row) {
	for _, q := range r.Wire {
		if q.Mode == New {
			p.f("\ts.bind(%s, id_%s, uint64(o_%s), rc)\n", kindName(q.HKind), q.Name, q.Name)
			if of := whole(r, q); of != "" {
				p.f("\tif rc == C.CUDA_SUCCESS {\n\t\ts.own(%s, %s, id_%s)\n\t}\n", of, kindName(q.HKind), q.Name)
			}
		}
	}
}

// parts says what a handle of a kind can be part of, the first that a row has counting. A
// part of the row's handle itself has of; else the row's handle is part of the same whole.
var parts = map[string][]struct {
	of   string
	same bool
}{
	"NODE":    {{of: "GRAPH"}, {of: "NODE", same: true}},
	"GRAPH":   {{of: "NODE"}},
	"ARRAY":   {{of: "ARRAY"}, {of: "MIPMAP"}},
	"MODULE":  {{of: "LIBRARY"}},
	"STREAM":  {{of: "GREEN"}},
	"TEXREF":  {{of: "MODULE"}},
	"SURFREF": {{of: "MODULE"}},
}

// whole gives the ref of what the handle that q gives is part of, in the worker's words, or
// "": it stands for itself.
func whole(r Row, q Param) string {
	for _, w := range parts[q.HKind] {
		for _, h := range r.Wire {
			made := h.Mode == New && q.Mode == OutHandles
			if h.Mode != Handle && !made || h.HKind != w.of {
				continue
			}
			id := "h_" + h.Name + ".id"
			if made {
				id = "id_" + h.Name
			}
			ref := fmt.Sprintf("refOf(%s, %s)", kindName(h.HKind), id)
			if w.same {
				return "s.owner(" + ref + ")"
			}
			return ref
		}
	}
	return ""
}

// outID gives the id of a handle from the driver.
func outID(r Row, q Param, real string) string {
	if of := whole(r, q); of != "" {
		return fmt.Sprintf("s.outPart(%s, %s, uint64(%s))", of, kindName(q.HKind), real)
	}
	return fmt.Sprintf("s.outHandle(%s, uint64(%s))", kindName(q.HKind), real)
}

// gated gives what tells a call's work from other work (the graph, or the operation and
// how much of it) and its stream.
func gated(r Row) (what, size, stream string) {
	what, size = fmt.Sprint(r.Op), "1"
	for _, q := range r.Wire {
		switch {
		case q.Elem == "CUgraphExec":
			what = "h_" + q.Name + ".real"
		case q.Elem == "CUstream":
			stream = "h_" + q.Name
		case q.Mode == Value && (q.Name == "ByteCount" || q.Name == "N" || q.Name == "Width" || q.Name == "Height"):
			size += "*p_" + q.Name
		case q.Mode == In && q.Elem == "CUDA_MEMCPY2D":
			size = fmt.Sprintf("uint64(v_%s.WidthInBytes*v_%s.Height)", q.Name, q.Name)
		case q.Mode == In:
			size = fmt.Sprintf("uint64(v_%s.WidthInBytes*v_%s.Height*v_%s.Depth)", q.Name, q.Name, q.Name)
		}
	}
	return what, strings.TrimPrefix(size, "1*"), stream
}

// kindName is the Go constant of a handle kind.
func kindName(kind string) string { return "wire.Kind" + goName(kind) }

// goCName is how cgo spells a C type.
func goCName(t string) string {
	switch t {
	case "unsigned int", "unsigned":
		return "uint"
	case "unsigned long long":
		return "ulonglong"
	case "unsigned short":
		return "ushort"
	case "unsigned char":
		return "uchar"
	}
	return t
}
