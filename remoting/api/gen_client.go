package api

import (
	"fmt"
	"slices"
	"strings"
)

func clientStubs(rows []Row) ([]byte, error) {
	var p printer
	p.f("/* %s */\n#include <stdlib.h>\n#include <string.h>\n\n#include \"gen.h\"\n#include \"codec.h\"\n#include \"device.h\"\n#include \"entry.h\"\n#include \"event.h\"\n#include \"graphdeps.h\"\n#include \"handles.h\"\n#include \"operand.h\"\n#include \"place.h\"\n#include \"route.h\"\n#include \"send.h\"\n#include \"session.h\"\n#include \"stream.h\"\n#include \"wait.h\"\n\n", Header)
	for _, r := range rows {
		if !r.Forwarded() {
			continue
		}
		if r.Variant == "ptds" && !r.Client {
			return nil, fmt.Errorf("%w: %s: a ptds function needs flag c", ErrTable, r.Symbol)
		}
		forwarder(&p, r)
		if !r.Client {
			wrapper(&p, r)
		}
	}
	return p.Bytes(), nil
}

// addressed are the structures of generated one-way calls that hold addresses; operand.c has a function for each.
var addressed = map[string]bool{"CUDA_MEMSET_NODE_PARAMS": true, "CUstreamBatchMemOpParams": true}

// located are the structures that name a device; place.c has functions that put the worker's number there.
var located = map[string]bool{"CUmemLocation": true, "CUmemAccessDesc": true, "CUmemAllocationProp": true, "CUmemPoolProps": true}

func (r Row) locates() bool {
	return slices.ContainsFunc(r.Wire, func(q Param) bool { return located[q.Elem] })
}

// put emits the encoding of one request parameter.
func put(p *printer, r Row, q Param) {
	n := q.Name
	if q.Must {
		p.f("\tif (!%s) {\n\t\tsl_buf_free(&b);\n\t\treturn CUDA_ERROR_INVALID_VALUE;\n\t}\n", n)
	}
	switch q.Mode {
	case Value:
		switch ScalarSize(q.Elem) {
		case 8:
			if q.Elem == "CUdeviceptr" {
				p.f("\tsl_route_ptr(&b, %s);\n", n)
				if r.Kind == OneWay && r.Late != LateNothing && !r.Client {
					p.f("\tsl_operand_check(%s, \"%s\", &err);\n", n, r.Symbol)
				}
			}
			p.f("\tsl_put_u64(&b, (uint64_t)%s);\n", n)
		case 4:
			switch {
			case q.Elem == "CUdevice":
				p.f("\tsl_route_dev(&b, %s);\n", n)
				p.f("\tsl_put_u32(&b, (uint32_t)sl_dev_wire(%s));\n", n)
			case q.Elem == "float":
				p.f("\tsl_put_f32(&b, %s);\n", n)
			default:
				p.f("\tsl_put_u32(&b, (uint32_t)%s);\n", n)
			}
		case 2:
			p.f("\tsl_put_u16(&b, %s);\n", n)
		case 1:
			p.f("\tsl_put_u8(&b, %s);\n", n)
		}
	case Handle:
		p.f("\tsl_route(&b, SL_%s, (const void *)(uintptr_t)%s);\n", q.HKind, n)
		switch {
		case q.HKind == "STREAM":
			p.f("\tsl_put_u32(&b, sl_stream_id(%s, &err));\n", n)
		default:
			p.f("\tsl_put_u32(&b, sl_handle_id(SL_%s, (const void *)(uintptr_t)%s, &err));\n", q.HKind, n)
		}
	case In:
		if located[q.Elem] {
			p.f("\tsl_put_u8(&b, %s != NULL);\n\tif (%s)\n\t\tsl_put_%s(&b, %s, 1);\n", n, n, q.Elem, n)
			return
		}
		p.f("\tsl_put_u8(&b, %s != NULL);\n\tif (%s)\n\t\tsl_put_bytes(&b, %s, sizeof *%s);\n", n, n, n, n)
		if r.Kind == OneWay && addressed[q.Elem] && !r.Client {
			p.f("\tif (%s)\n\t\tsl_operand_check_%s(%s, \"%s\", &err);\n", n, q.Elem, n, r.Symbol)
		}
	case InArray:
		p.f("\tsl_put_u8(&b, %s != NULL);\n\tif (%s) {\n\t\tsl_put_u32(&b, (uint32_t)%s);\n", n, n, q.Count)
		if q.HKind != "" {
			p.f("\t\tfor (size_t i = 0; i < %s; i++) {\n\t\t\tsl_route(&b, SL_%s, %s[i]);\n", q.Count, q.HKind, n)
			p.f("\t\t\tsl_put_u32(&b, sl_handle_id(SL_%s, %s[i], &err));\n\t\t}\n\t}\n", q.HKind, n)
		} else if located[q.Elem] {
			p.f("\t\tsl_put_%s(&b, %s, %s);\n\t}\n", q.Elem, n, q.Count)
		} else {
			p.f("\t\tsl_put_bytes(&b, %s, %s * sizeof *%s);\n\t}\n", n, q.Count, n)
			if r.Kind == OneWay && addressed[q.Elem] && !r.Client {
				p.f("\tfor (size_t i = 0; %s && i < %s; i++)\n\t\tsl_operand_check_%s(&%s[i], \"%s\", &err);\n", n, q.Count, q.Elem, n, r.Symbol)
			}
		}
	case Out, Out8, OutHandle, OutHandles, OutArray:
		p.f("\tsl_put_u8(&b, %s != NULL);\n", n)
	case InOut:
		p.f("\tif (!%s) {\n\t\tsl_buf_free(&b);\n\t\treturn CUDA_ERROR_INVALID_VALUE;\n\t}\n\tsl_put_u64(&b, *%s);\n", n, n)
	case New:
		if r.locates() {
			p.f("\tsl_route_current(&b);\n") // the handle belongs to the current context's session
		}
		p.f("\tsl_put_u32(&b, %s);\n", n)
	case Str:
		p.f("\tsl_put_str(&b, %s);\n", n)
	case In8:
		p.f("\tif (!%s) {\n\t\tsl_buf_free(&b);\n\t\treturn CUDA_ERROR_INVALID_VALUE;\n\t}\n\tsl_put_bytes(&b, %s, 8);\n", n, n)
	case Null:
		p.f("\tif (%s) {\n\t\tsl_buf_free(&b);\n\t\treturn CUDA_ERROR_NOT_SUPPORTED;\n\t}\n", n)
	}
}

// addsNode gives the parameters of a call that adds a node to a graph: the node, its graph, and what it depends on; nil for others.
func (r Row) addsNode() (node, graph, deps *Param) {
	for i := range r.Wire {
		switch q := &r.Wire[i]; {
		case q.Mode == New && q.HKind == "NODE":
			node = q
		case q.Mode == Handle && q.HKind == "GRAPH" && graph == nil:
			graph = q
		case q.Mode == InArray && q.HKind == "NODE":
			deps = q
		}
	}
	if node == nil {
		return nil, nil, nil
	}
	return node, graph, deps
}

// listed emits what notes the graph of a node in a list from the worker; graph.c needs it. Single nodes in replies may be
// those of a child graph.
func listed(r Row, node string) string {
	for _, q := range r.Wire {
		switch {
		case q.Mode == Handle && q.HKind == "GRAPH":
			return fmt.Sprintf("sl_graph_has(%s, %s);", q.Name, node)
		case q.Mode == OutHandle && q.HKind == "GRAPH":
			return fmt.Sprintf("if (%s)\n\t\t\t\t\t\tsl_graph_has(*%s, %s);", q.Name, q.Name, node)
		case q.Mode == Handle && q.HKind == "NODE":
			return fmt.Sprintf("sl_graph_beside(%s, %s);", q.Name, node)
		}
	}
	return ""
}

// get emits the decoding of one reply parameter.
func get(p *printer, r Row, q Param) {
	n := q.Name
	switch q.Mode {
	case Out:
		if located[q.Elem] {
			p.f("\t\tif (%s)\n\t\t\tsl_get_%s(&r, %s);\n", n, q.Elem, n)
			return
		}
		p.f("\t\tif (%s)\n\t\t\tsl_get_bytes(&r, %s, sizeof *%s);\n", n, n, n)
	case Out8:
		p.f("\t\tif (%s)\n\t\t\tsl_get_bytes(&r, %s, 8);\n", n, n)
	case OutHandle:
		p.f("\t\tif (%s)\n\t\t\t*%s = sl_handle_from_id(SL_%s, sl_get_u32(&r), r.session);\n", n, n, q.HKind)
	case InOut:
		p.f("\t\tconst size_t room_%s = *%s;\n\n\t\t*%s = sl_get_u64(&r);\n", n, n, n)
	case OutHandles:
		p.f("\t\tif (%s) {\n\t\t\tuint32_t n = sl_get_u32(&r);\n\n\t\t\tfor (uint32_t i = 0; i < n && !r.bad; i++) {\n\t\t\t\tuint32_t id = sl_get_u32(&r);\n\n", n)
		take := fmt.Sprintf("\t\t\t\t\t%s[i] = sl_handle_from_id(SL_%s, id, r.session);\n", n, q.HKind)
		if note := listed(r, n+"[i]"); q.HKind == "NODE" && note != "" {
			p.f("\t\t\t\tif (i < room_%s) {\n%s\t\t\t\t\t%s\n\t\t\t\t}\n", q.Count, take, note)
		} else {
			p.f("\t\t\t\tif (i < room_%s)\n%s", q.Count, take)
		}
		p.f("\t\t\t}\n\t\t\tfor (size_t i = n; i < room_%s; i++)\n\t\t\t\t%s[i] = NULL;\n\t\t\tif (*%s > room_%s)\n\t\t\t\t*%s = room_%s;\n\t\t}\n", q.Count, n, q.Count, q.Count, q.Count, q.Count)
	case OutArray:
		p.f("\t\tif (%s) {\n\t\t\tuint32_t n = sl_get_u32(&r);\n\t\t\tsize_t fit = n < room_%s ? n : room_%s;\n\n\t\t\tsl_get_bytes(&r, %s, fit * sizeof *%s);\n\t\t\tsl_get_ref(&r, (n - fit) * sizeof *%s);\n\t\t\tmemset(%s + fit, 0, (room_%s - fit) * sizeof *%s);\n\t\t\tif (*%s > room_%s)\n\t\t\t\t*%s = room_%s;\n\t\t}\n", n, q.Count, q.Count, n, n, n, n, q.Count, n, q.Count, q.Count, q.Count, q.Count)
	}
}

func forwarder(p *printer, r Row) {
	p.f("CUresult fw_%s(%s)\n{\n\tCUresult err = CUDA_SUCCESS;\n", r.Symbol, fwParams(r))
	reply := false
	for _, q := range r.Wire {
		switch q.Mode {
		case Out, Out8, OutHandle, OutHandles, OutArray, InOut:
			reply = true
		}
	}
	p.f("\tsl_buf b;\n")
	if reply {
		p.f("\tsl_reply r;\n")
	}
	p.f("\n")
	node, graph, deps := r.addsNode()
	if node != nil {
		p.f("\terr = sl_graph_dependencies(%s, %s, %s);\n\tif (err)\n\t\treturn err;\n", graph.Name, deps.Name, deps.Count)
	}
	p.f("\tsl_buf_init(&b);\n")
	for _, q := range r.Wire {
		put(p, r, q)
	}
	switch {
	case r.Kind == OneWay:
		p.f("\tif (!err)\n\t\terr = sl_oneway(SL_OP_%s, &b);\n", r.Symbol)
	case !reply:
		p.f("\tif (!err)\n\t\terr = sl_wait(SL_OP_%s, &b, NULL);\n", r.Symbol)
	default:
		p.f("\tif (!err) {\n\t\terr = sl_wait(SL_OP_%s, &b, &r);\n\t\tif (!err) {\n", r.Symbol)
		var q printer
		for _, w := range r.Wire {
			if w.Mode == InOut {
				get(&q, r, w)
			}
		}
		for _, w := range r.Wire {
			if w.Mode != InOut {
				get(&q, r, w)
			}
		}
		p.f("%s", strings.ReplaceAll("\n"+strings.TrimSuffix(q.String(), "\n"), "\n\t\t", "\n\t\t\t")[1:])
		p.f("\n\t\t\tif (r.bad)\n\t\t\t\terr = CUDA_ERROR_UNKNOWN;\n\t\t}\n\t\tsl_reply_free(&r);\n\t}\n")
	}
	if r.Free {
		for _, q := range r.Wire {
			if q.Mode == Handle {
				p.f("\tif (!err)\n\t\tsl_handle_free(SL_%s, sl_handle_bare((const void *)(uintptr_t)%s));\n", q.HKind, q.Name)
				break
			}
		}
	}
	if node != nil {
		p.f("\tif (!err)\n\t\tsl_graph_has(%s, sl_handle_value(SL_NODE, %s));\n", graph.Name, node.Name)
	}
	p.f("\tsl_buf_free(&b);\n\treturn err;\n}\n\n")
}

// across names the functions that route.c can carry out in steps when what they
// name belongs to several owners.
var across = map[string]bool{"cuStreamWaitEvent": true}

// wrapper emits sl_<symbol> for a row that needs no hand-written client part.
func wrapper(p *printer, r Row) {
	p.f("CUresult sl_%s(%s)\n{\n", r.Symbol, slParams(r))
	var made *Param
	args := cArgs(r.Params)
	for i := range r.Params {
		if r.Params[i].Mode == New {
			made = &r.Params[i]
			args[i] = "id"
		}
	}
	if across[r.Symbol] {
		p.f("\tif (__builtin_expect(sl_sessions > 1, 0)) {\n\t\tbool done;\n")
		p.f("\t\tCUresult err = sl_across_%s(%s, &done);\n\n\t\tif (done || err)\n\t\t\treturn err;\n\t}\n", r.Symbol, strings.Join(args, ", "))
	}
	if made == nil {
		p.f("\treturn fw_%s(%s);\n}\n\n", r.Symbol, strings.Join(args, ", "))
		return
	}
	p.f("\tvoid *h;\n\tuint32_t id;\n\tCUresult err;\n\n\tif (!%s)\n\t\treturn CUDA_ERROR_INVALID_VALUE;\n", made.Name)
	p.f("\tid = sl_handle_new(SL_%s, NULL, &h);\n\tif (!id)\n\t\treturn CUDA_ERROR_OUT_OF_MEMORY;\n", made.HKind)
	p.f("\terr = fw_%s(%s);\n", r.Symbol, strings.Join(args, ", "))
	if made.Elem == "CUmemGenericAllocationHandle" {
		p.f("\tif (!err)\n\t\t*%s = (CUmemGenericAllocationHandle)(uintptr_t)h;\n", made.Name)
	} else {
		p.f("\tif (!err)\n\t\t*%s = h;\n", made.Name)
	}
	p.f("\telse\n\t\tsl_handle_free(SL_%s, id);\n\treturn err;\n}\n\n", made.HKind)
}
