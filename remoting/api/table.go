// Package api is the API table, one row per function that libcuda.so.1 exports,
// and the wire table, the numbers and messages of the wire, with the generator
// that writes the code of both sides from them.
package api

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:generate go run ./cmd/apigen -root ../..

//go:embed cuda.tbl
var source []byte

// ErrTable is wrapped by every error about a malformed row.
var ErrTable = errors.New("api table")

// Kind says where a function is answered.
type Kind string

// The kinds of a row; see cuda.tbl.
const (
	Local  Kind = "local"
	OneWay Kind = "oneway"
	Wait   Kind = "wait"
	Alias  Kind = "alias"
	Refuse Kind = "refuse"
	Absent Kind = "absent"
)

// Late says what the program sees when the worker refuses a one-way call.
type Late string

// The values of Late; see cuda.tbl.
const (
	LateStream  Late = "stream"
	LateAny     Late = "any"
	LateExec    Late = "exec"
	LateNothing Late = "nothing"
)

// Reason says why a function is refused.
type Reason string

// Reasons maps the reasons of refused rows to what docs/coverage.md says of them.
var Reasons = map[Reason]string{
	"graphics":   "It shares objects of OpenGL, EGL or VDPAU with the program, and the GPU is not in the program's machine.",
	"foreign":    "It imports objects of other drivers (Vulkan, Direct3D, NvSci), and those are in the program's machine.",
	"checkpoint": "It saves and restores the process that holds the context, and that is the worker, not the program.",
	"peer":       "It works on several GPUs at once in ways that Sluice does not carry; peer access and copies between GPUs of one owner work.",
	"machine":    "It makes a handle for other devices of the machine, and the GPU is not in the program's machine.",
	"narrow":     "It takes addresses of 32 bits, and memory lies above them.",
	"driver":     "The driver refuses it as well, on every machine that Sluice runs on.",
	"later":      "Sluice does not serve it yet.",
}

// Mode says what a parameter carries.
type Mode int

// The modes of a parameter; see cuda.tbl.
const (
	Value      Mode = iota // a scalar by value
	Handle                 // a handle by value
	In                     // pointer to one value, may be NULL
	InArray                // pointer to Count values
	Out                    // pointer to one value written by the driver
	InOut                  // pointer to a count, read and written
	New                    // pointer to a handle the client chose
	OutHandle              // pointer to a handle the worker chooses
	OutHandles             // array of handles the worker chooses
	OutArray               // array of values the worker gives
	Str                    // NUL-terminated string
	In8                    // eight bytes behind a void pointer
	Out8                   // eight bytes written behind a void pointer
	Null                   // must be NULL
	Opaque                 // not carried (local and refused rows)
)

// Param is one parameter of a function.
type Param struct {
	Name  string
	CType string // as declared, e.g. "const CUDA_MEMCPY3D *"
	Elem  string // the type without const and one pointer, e.g. "CUDA_MEMCPY3D"
	Mode  Mode
	Count string // name of the counting parameter of an array
	HKind string // handle kind, e.g. "stream"; empty if no handle
	Must  bool   // a pointer that the client refuses if it is NULL
}

// Row is one function.
type Row struct {
	Op      int    // operation number on the wire
	Symbol  string // exported symbol, e.g. cuMemAlloc_v2
	Name    string // name for cuGetProcAddress, e.g. cuMemAlloc
	Version int    // CUDA version that introduced this ABI, e.g. 3020
	Variant string // "", "ptds" or "ptsz"
	Kind    Kind
	Target  string // for Alias
	Late    Late   // for OneWay
	Reason  Reason // for Refuse
	Error   string // for Absent: the error without CUDA_ERROR_
	Client  bool   // flag c
	Worker  bool   // flag w
	Aside   bool   // flag aside
	Charge  bool   // flag charge
	Free    bool   // flag free
	GPU     bool   // flag gpu
	Params  []Param
	Wire    []Param // parameters on the wire
	Flat    bool    // Wire differs from Params
}

// Forwarded reports whether the row has an operation on the wire.
func (r *Row) Forwarded() bool { return r.Kind == OneWay || r.Kind == Wait }

// checkLate sees that a one-way row says what becomes of a late refusal, and that it can.
func (r *Row) checkLate() error {
	switch {
	case r.Kind != OneWay:
		return nil
	case r.Late == LateStream:
		if r.stream() == nil {
			return errors.New("oneway=stream, but no stream is given")
		}
	case r.Late == LateExec:
		if !slices.ContainsFunc(r.Params, func(q Param) bool { return q.Elem == "CUgraphExec" }) {
			return errors.New("oneway=exec, but no executable graph is given")
		}
	case r.Late != LateAny && r.Late != LateNothing:
		return fmt.Errorf("oneway=%q: say stream, any, exec or nothing", r.Late)
	}
	return nil
}

// stream is the parameter that says to which stream the call is given, or nil.
func (r *Row) stream() *Param {
	for i := range r.Params {
		if r.Params[i].Elem == "CUstream" && r.Params[i].Mode == Handle {
			return &r.Params[i]
		}
	}
	return nil
}

// VariantSymbol is the exported name of the per-thread variant, or "".
func (r *Row) VariantSymbol() string {
	if r.Variant == "" {
		return ""
	}
	return r.Symbol + "_" + r.Variant
}

// HandleKinds maps CUDA's handle types to the kinds of wire.tbl.
var HandleKinds = map[string]string{
	"CUcontext": "CTX", "CUstream": "STREAM", "CUevent": "EVENT", "CUmodule": "MODULE",
	"CUlibrary": "LIBRARY", "CUkernel": "KERNEL", "CUfunction": "KERNEL", "CUgraph": "GRAPH",
	"CUgraphNode": "NODE", "CUgraphExec": "EXEC", "CUmemoryPool": "POOL", "CUarray": "ARRAY",
	"CUmipmappedArray": "MIPMAP", "CUmemGenericAllocationHandle": "MEMHANDLE", "CUtexref": "TEXREF", "CUsurfref": "SURFREF", "CUlinkState": "LINK", "CUuserObject": "USEROBJ",
	"CUgreenCtx": "GREEN", "CUdevResourceDesc": "RESDESC",
}

// ScalarSize is the size in bytes of a type passed by value; types that are
// neither here nor handles are enumerations of four bytes.
func ScalarSize(t string) int {
	switch t {
	case "size_t", "CUdeviceptr", "unsigned long long", "cuuint64_t", "CUtexObject", "CUsurfObject", "CUgraphConditionalHandle":
		return 8
	case "unsigned short":
		return 2
	case "unsigned char":
		return 1
	default:
		return 4
	}
}

// Fingerprint identifies both tables: client and worker must agree on them. Of
// the wire table it covers everything but comments and meanings.
func Fingerprint() [32]byte {
	return sha256.Sum256(slices.Concat(source, numbersSource, mustWire().canonical()))
}

// Rows returns the table, with the numbers of numbers.tbl.
func Rows() ([]Row, error) {
	rows, err := Parse(source)
	if err == nil {
		_, err = number(rows, numbersSource)
	}
	return rows, err
}

// Parse reads a table; its operations are numbered as their rows stand.
func Parse(src []byte) ([]Row, error) {
	var rows []Row
	seen := map[string]bool{}
	for i, line := range bytes.Split(src, []byte("\n")) {
		s := strings.TrimSpace(string(line))
		if s == "" || strings.HasPrefix(s, "#") {
			continue
		}
		r, err := parseRow(s)
		if err != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrTable, i+1, err)
		}
		if seen[r.Symbol] {
			return nil, fmt.Errorf("%w: line %d: %s stands twice", ErrTable, i+1, r.Symbol)
		}
		seen[r.Symbol] = true
		r.Op = len(rows)
		rows = append(rows, r)
	}
	for _, r := range rows {
		if r.Kind == Alias && !seen[r.Target] {
			return nil, fmt.Errorf("%w: %s is an alias of %s, which is not in the table", ErrTable, r.Symbol, r.Target)
		}
	}
	return rows, nil
}

// setFlags sets what the column of flags says.
func (r *Row) setFlags(flags string) error {
	for _, fl := range strings.Fields(flags) {
		switch fl {
		case "-":
		case "c":
			r.Client = true
		case "w":
			r.Worker = true
		case "aside":
			r.Aside = true
		case "charge":
			r.Charge = true
		case "free":
			r.Free = true
		case "gpu":
			r.GPU = true
		default:
			return fmt.Errorf("flag %q", fl)
		}
	}
	return nil
}

func parseRow(s string) (Row, error) {
	f := strings.Split(s, "|")
	for i := range f {
		f[i] = strings.TrimSpace(f[i])
	}
	if len(f) != 6 && len(f) != 7 {
		return Row{}, fmt.Errorf("%d columns, want 6 or 7", len(f))
	}
	r := Row{Symbol: f[0]}
	name, ver, _ := strings.Cut(f[1], " ")
	v, err := strconv.Atoi(ver)
	if err != nil {
		return r, fmt.Errorf("%s: version %q: %w", r.Symbol, ver, err)
	}
	r.Name, r.Version = name, v
	switch f[2] {
	case "-":
	case "ptds", "ptsz":
		r.Variant = f[2]
	default:
		return r, fmt.Errorf("%s: variant %q", r.Symbol, f[2])
	}
	kind, target, _ := strings.Cut(f[3], "=")
	r.Kind, r.Target = Kind(kind), target
	switch r.Kind {
	case Local, OneWay, Wait, Alias, Refuse, Absent:
	default:
		return r, fmt.Errorf("%s: kind %q", r.Symbol, kind)
	}
	switch r.Kind {
	case OneWay:
		r.Late, r.Target = Late(target), ""
	case Refuse:
		r.Reason, r.Target = Reason(target), ""
		if Reasons[r.Reason] == "" {
			return r, fmt.Errorf("%s: refuse=%q: give one of the reasons of table.go", r.Symbol, target)
		}
	case Absent:
		if r.Error, r.Target = target, ""; !strings.HasPrefix(target, "INVALID_") {
			return r, fmt.Errorf("%s: absent=%q: give the error for an object that does not exist", r.Symbol, target)
		}
	}
	if err := r.setFlags(f[4]); err != nil {
		return r, fmt.Errorf("%s: %w", r.Symbol, err)
	}
	if r.Kind == Local {
		r.Client = true
	}
	if r.Params, err = parseParams(f[5], r.Forwarded() && len(f) == 6); err != nil {
		return r, fmt.Errorf("%s: %w", r.Symbol, err)
	}
	if err := r.checkLate(); err != nil {
		return r, fmt.Errorf("%s: %w", r.Symbol, err)
	}
	r.Wire = r.Params
	if len(f) == 7 {
		r.Flat = true
		if r.Wire, err = parseParams(f[6], true); err != nil {
			return r, fmt.Errorf("%s: wire: %w", r.Symbol, err)
		}
		if !r.Client || !r.Worker {
			return r, fmt.Errorf("%s: wire parameters need flags c and w", r.Symbol)
		}
	}
	return r, nil
}

var annotated = regexp.MustCompile(`^(.*?)(\w+)(\[\])?(?:=([a-z0-9]+)(?:\[(\*?\w+)\])?(!)?)?$`)

func parseParams(s string, carried bool) ([]Param, error) {
	if s == "void" {
		return nil, nil
	}
	var ps []Param
	for _, d := range strings.Split(s, ",") {
		d = strings.TrimSpace(d)
		m := annotated.FindStringSubmatch(d)
		if m == nil {
			return nil, fmt.Errorf("parameter %q", d)
		}
		p := Param{Name: m[2], CType: strings.TrimSpace(m[1]) + m[3], Count: strings.TrimPrefix(m[5], "*"), Mode: Opaque}
		p.Elem = strings.TrimSpace(strings.TrimSuffix(strings.TrimPrefix(p.CType, "const "), "*"))
		if carried {
			p.HKind = HandleKinds[p.Elem]
			var err error
			if p.Mode, err = mode(p, m[4], m[5]); err != nil {
				return nil, err
			}
			p.Must = m[6] != ""
		}
		ps = append(ps, p)
	}
	return ps, nil
}

func mode(p Param, ann, count string) (Mode, error) {
	pointer := strings.HasSuffix(p.CType, "*")
	switch {
	case ann == "" && !pointer && p.HKind != "":
		return Handle, nil
	case ann == "" && !pointer:
		return Value, nil
	case ann == "in" && count != "":
		return InArray, nil
	case ann == "in":
		return In, nil
	case ann == "out" && count == "":
		return Out, nil
	case ann == "out" && p.HKind == "":
		return OutArray, nil
	case ann == "inout":
		return InOut, nil
	case ann == "new" && p.HKind != "":
		return New, nil
	case ann == "outh" && count != "" && p.HKind != "":
		return OutHandles, nil
	case ann == "outh" && p.HKind != "":
		return OutHandle, nil
	case ann == "str":
		return Str, nil
	case ann == "in8":
		return In8, nil
	case ann == "out8":
		return Out8, nil
	case ann == "null":
		return Null, nil
	}
	return Opaque, fmt.Errorf("parameter %s: annotation %q does not fit %s", p.Name, ann, p.CType)
}
