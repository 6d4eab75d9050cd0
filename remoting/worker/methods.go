package worker

// The rest of the calls whose worker part is written by hand: those whose
// structures carry handles, and those that change what the worker must know.

/*
#include "driver.h"
*/
import "C"

import (
	"encoding/binary"
	"fmt"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Contexts.

func (s *session) cuCtxCreate_v2(id uint32, o *C.uint64_t, flags, dev uint32) C.CUresult {
	if int(id&indexMask) <= len(s.snap.Devices) {
		s.violation(fmt.Sprintf("context id %#x belongs to a device", id))
		return C.CUDA_ERROR_INVALID_CONTEXT
	}
	d := int(dev)
	if d < 0 || d >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	if rc := s.flagsOK(flags); rc != 0 {
		return C.CUresult(rc)
	}
	c, rc := s.newContext(d, &flags)
	s.forgetCtx()
	if rc != 0 {
		return C.CUresult(rc)
	}
	*o = C.uint64_t(c.real)
	s.mem.measureSoon()
	return 0
}

// leaveContext gets everything of a context out of the worker's hands before
// the driver destroys it.
func (s *session) leaveContext(id uint32, c *cudaContext) {
	if s.setCtx(id) == 0 {
		s.in.close(s)
		C.sl_ctx_sync()
		s.settle()
		s.in.leave(s, c.real)
		s.endGreens(id)
	}
	s.bulk.leave(c.real)
	s.waiters.leave(c.real)
	s.followed.forget(func(r *record) bool { return r.place.ctx == c.real })
	s.arrived.leave(s, c.real)
	s.events.drop(c.real)
	s.tracing.leave(c.real)
	s.gates.Forget(c.real)
	s.failures.forget(c.real, func(event uint32) bool {
		p := s.tables[wire.KindEvent].live(event)
		return p == nil || p.ctx == id
	})
	for kind := range s.tables {
		switch kind {
		case wire.KindCtx, wire.KindLibrary, wire.KindMemHandle, wire.KindPool, wire.KindGraph, wire.KindNode, wire.KindHostFn, wire.KindResdesc:
			continue // these outlive contexts
		}
		t := &s.tables[kind]
		t.each(func(hid uint32, p *slot) {
			if k, ok := p.obj.(*kernel); ok && k.img.library && k.fnCtx == id {
				k.fnCtx = noCtx // wherever its library was loaded: the next context has the same id
			}
			if p.ctx != id {
				return
			}
			if kind == wire.KindStream {
				s.dropCapture(p.real)
			}
			if img, ok := p.obj.(*image); ok {
				img.dead = true
				if img.linked != 0 {
					img.unload() // a library outlives its module's context
				}
				s.dropImage(img)
			}
			if l, ok := p.obj.(*link); ok {
				C.call_cuLinkDestroy(C.uint64_t(p.real))
				s.freeLink(l)
			}
			if k, ok := p.obj.(*kernel); ok && k.img.library {
				return
			}
			s.unbind(kind, hid)
		})
	}
	delete(s.ctxs, c.real)
	s.tracing.devices.Delete(c.real)
	s.forgetCtx()
}

func (s *session) cuCtxDestroy_v2(h href) C.CUresult {
	c := s.ctxs[h.real]
	if c == nil || !c.created {
		return C.CUDA_ERROR_INVALID_CONTEXT
	}
	s.leaveContext(h.id, c)
	rc := C.sl_ctx_destroy(C.uint64_t(h.real))
	s.unbind(wire.KindCtx, h.id)
	if rc == 0 {
		s.mem.dropContext(h.id, c.dev)
	}
	s.forgetCtx()
	return rc
}

// primaryEnd destroys a device's primary context; the worker is the only one
// to retain it.
func (s *session) primaryEnd(dev int) C.CUresult {
	id := uint32(1 + dev)
	p := s.tables[wire.KindCtx].live(id)
	if p == nil {
		return 0
	}
	c := s.ctxs[p.real]
	if c == nil || c.created {
		return C.CUDA_ERROR_INVALID_CONTEXT
	}
	s.leaveContext(id, c)
	rc := C.sl_ctx_release(C.int(dev))
	s.unbind(wire.KindCtx, id)
	if rc == 0 {
		s.mem.dropContext(id, dev)
	}
	s.forgetCtx()
	return rc
}

func (s *session) cuDevicePrimaryCtxRelease_v2(dev uint32) C.CUresult {
	if int(dev) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	return s.primaryEnd(int(dev))
}

func (s *session) cuDevicePrimaryCtxReset_v2(dev uint32) C.CUresult {
	if int(dev) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	return s.primaryEnd(int(dev))
}

// Functions and kernels. A kernel that came from a module has no CUkernel.

func (s *session) cuFuncSetAttribute(h href, attr, value uint32) C.CUresult {
	rc := C.call_cuFuncSetAttribute(C.uint64_t(h.real), C.uint32_t(attr), C.uint32_t(value))
	return rc
}

func (s *session) cuFuncSetCacheConfig(h href, config uint32) C.CUresult {
	return C.call_cuFuncSetCacheConfig(C.uint64_t(h.real), C.uint32_t(config))
}

func (s *session) cuFuncSetSharedMemConfig(h href, config uint32) C.CUresult {
	return C.call_cuFuncSetSharedMemConfig(C.uint64_t(h.real), C.uint32_t(config))
}

func (s *session) fromModule(h href) bool {
	p := s.tables[wire.KindKernel].live(h.id)
	if p == nil {
		return false
	}
	k, _ := p.obj.(*kernel)
	return k != nil && !k.img.library
}

func (s *session) cuKernelSetAttribute(attr, value uint32, h href, dev uint32) C.CUresult {
	if s.fromModule(h) {
		return s.cuFuncSetAttribute(h, attr, value)
	}
	return C.call_cuKernelSetAttribute(C.uint32_t(attr), C.uint32_t(value), C.uint64_t(h.real), C.uint32_t(dev))
}

func (s *session) cuKernelSetCacheConfig(h href, config, dev uint32) C.CUresult {
	if s.fromModule(h) {
		return s.cuFuncSetCacheConfig(h, config)
	}
	return C.call_cuKernelSetCacheConfig(C.uint64_t(h.real), C.uint32_t(config), C.uint32_t(dev))
}

// cuOccupancyMaxPotentialBlockSizeWithFlags without a callback: the client
// answers those with one itself.
func (s *session) cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block *C.int, h href, smem uint64, limit, flags uint32) C.CUresult {
	return C.sl_potential_block(grid, block, C.uint64_t(h.real), C.uint64_t(smem), C.int(int32(limit)), C.uint32_t(flags))
}

func (s *session) cuOccupancyMaxActiveClusters(n *C.int, h href, cfg *C.CUlaunchConfig, attrs []C.CUlaunchAttribute, _ uint32) C.CUresult {
	return s.clusters(n, h, cfg, attrs, 0)
}

func (s *session) cuOccupancyMaxPotentialClusterSize(n *C.int, h href, cfg *C.CUlaunchConfig, attrs []C.CUlaunchAttribute, _ uint32) C.CUresult {
	return s.clusters(n, h, cfg, attrs, 1)
}

func (s *session) clusters(n *C.int, h href, cfg *C.CUlaunchConfig, attrs []C.CUlaunchAttribute, potential C.int) C.CUresult {
	if cfg == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if rc := s.configAttrs(attrs); rc != 0 {
		return C.CUresult(rc)
	}
	c := *cfg
	c.attrs = nil
	c.hStream = nil
	return C.sl_max_clusters(n, C.uint64_t(h.real), &c, first(attrs), C.uint32_t(len(attrs)), potential)
}

// Streams and events. An event inherits what failed before it in its stream, and a stream what an event
// that it waits for has inherited; see failures.go.

func (s *session) cuEventRecord(ev, st href) C.CUresult {
	s.unfollow(ev.id)
	rc := C.call_cuEventRecord(C.uint64_t(ev.real), C.uint64_t(st.real))
	s.recorded(ev.id, st.id, int32(rc))
	return rc
}

func (s *session) cuEventRecordWithFlags(ev, st href, flags uint32) C.CUresult {
	s.unfollow(ev.id)
	rc := C.call_cuEventRecordWithFlags(C.uint64_t(ev.real), C.uint64_t(st.real), C.uint32_t(flags))
	s.recorded(ev.id, st.id, int32(rc))
	return rc
}

// cuCtxRecordEvent records behind all streams of the context.
func (s *session) cuCtxRecordEvent(ctx, ev href) C.CUresult {
	s.unfollow(ev.id)
	rc := C.call_cuCtxRecordEvent(C.uint64_t(ctx.real), C.uint64_t(ev.real))
	return s.recordedBehindAll(rc, ctx.real, ev.id)
}

// recordedBehindAll notes what an event that was recorded behind all streams of a context inherits.
func (s *session) recordedBehindAll(rc C.CUresult, ctx uint64, event uint32) C.CUresult {
	failed := int32(rc)
	if rc == 0 && !s.failures.none() {
		failed = s.failures.inContext(ctx)
	}
	s.failures.record(event, failed)
	return rc
}

func (s *session) cuStreamWaitEvent(st, ev href, flags uint32) C.CUresult {
	rc := C.call_cuStreamWaitEvent(C.uint64_t(st.real), C.uint64_t(ev.real), C.uint32_t(flags))
	if rc == 0 {
		s.awaited(ev.id, st.id)
	}
	return rc
}

// cuCtxWaitEvent makes all streams of the context wait. The legacy stream stands for the streams ordered with it.
func (s *session) cuCtxWaitEvent(ctx, ev href) C.CUresult {
	rc := C.call_cuCtxWaitEvent(C.uint64_t(ctx.real), C.uint64_t(ev.real))
	return s.awaitedByAll(rc, ctx.real, ev.id)
}

// awaitedByAll makes all streams of a context that wait for an event inherit the event's error.
func (s *session) awaitedByAll(rc C.CUresult, ctx uint64, event uint32) C.CUresult {
	if failed := s.failures.event(event); rc == 0 && failed != 0 {
		s.tables[wire.KindStream].each(func(id uint32, p *slot) {
			if at, blocking := s.placeOf(id); at.ctx == ctx {
				s.failures.add(failure{place: at, blocking: blocking, result: failed})
			}
		})
		s.failures.add(failure{place: place{ctx: ctx, stream: legacyStream}, blocking: true, result: failed})
	}
	return rc
}

func (s *session) cuEventElapsedTime_v2(ms *C.float, begin, end href) C.CUresult {
	for _, id := range []uint32{begin.id, end.id} {
		if rc := s.failures.event(id); rc != 0 {
			return C.CUresult(rc)
		}
	}
	return C.call_cuEventElapsedTime_v2(ms, C.uint64_t(begin.real), C.uint64_t(end.real))
}

// cuStreamCreate and cuStreamCreateWithPriority are in memory_limits.go.

// Graphs and capture.

func (s *session) cuStreamBeginCapture_v2(h href, mode uint32) C.CUresult {
	// The event that frees this slot must not be captured.
	s.in.close(s)
	s.gates.Flush()
	rc := C.call_cuStreamBeginCapture_v2(C.uint64_t(h.real), C.uint32_t(mode))
	if rc == 0 {
		s.captures[h.real] = capture{graph: captured(h.real)}
	}
	return rc
}

func (s *session) cuStreamBeginCaptureToGraph(h, g href, deps []C.uint64_t, data []C.CUgraphEdgeData, n uint64, mode uint32) C.CUresult {
	s.in.close(s)
	s.gates.Flush()
	rc := C.call_cuStreamBeginCaptureToGraph(C.uint64_t(h.real), C.uint64_t(g.real), first(deps), first(data), C.uint64_t(n), C.uint32_t(mode))
	if rc == 0 {
		s.captures[h.real] = capture{own: true}
	}
	return rc
}

func (s *session) cuStreamEndCapture(h href, o *C.uint64_t) C.CUresult {
	rc := C.call_cuStreamEndCapture(C.uint64_t(h.real), o)
	failed := s.tellStream(h.id)
	if rc != 0 || *o == 0 || failed != 0 {
		own := s.captures[h.real].own
		s.dropCapture(h.real)
		if rc == 0 && failed != 0 { // the graph lacks what failed
			if !own {
				C.call_cuGraphDestroy(*o)
			}
			*o, rc = 0, C.CUresult(failed)
		}
	}
	delete(s.captures, h.real)
	return rc
}

// A capture is one that the client began.
type capture struct {
	graph uint64 // the graph that ends if the capture fails; 0 if the driver does not tell, or own is set
	own   bool   // the capture adds to a graph of the client's, which outlives it
}

// captured gives the graph that a stream's capture draws, 0 if the driver does not tell.
func captured(stream uint64) uint64 {
	var status C.CUstreamCaptureStatus
	var id C.cuuint64_t
	var g C.uint64_t
	var n C.size_t
	if rc := C.sl_capture_info(C.uint64_t(stream), &status, &id, &g, nil, nil, &n); rc != 0 {
		return 0
	}
	return uint64(g)
}

// dropCapture is for a capture that ends without its graph: the client may have been given
// its name meanwhile.
func (s *session) dropCapture(stream uint64) {
	if g := s.captures[stream].graph; g != 0 {
		s.dropReal(wire.KindGraph, g)
	}
	delete(s.captures, stream)
}

// Copies and views whose structures carry handles: the client puts the wire id
// where the handle stands.

// handleIn replaces an id in a structure's handle field.
func (s *session) handleIn(kind int, field unsafe.Pointer) int32 {
	p := (*uint64)(field)
	id := uint32(*p >> 4) // as in the values that programs hold; see docs/protocol.md
	real, ok := s.handle(kind, id)
	if !ok {
		return s.badHandle(kind, id)
	}
	*p = real
	return 0
}

func (s *session) cuMemcpy3DAsync_v2(c *C.CUDA_MEMCPY3D, h href) C.CUresult {
	if rc := s.copy3D(c); rc != 0 {
		return C.CUresult(rc)
	}
	return C.call_cuMemcpy3DAsync_v2(c, C.uint64_t(h.real))
}

// copy3D puts real handles into a copy and takes host addresses out of it.
func (s *session) copy3D(c *C.CUDA_MEMCPY3D) int32 {
	if c == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	c.srcHost, c.dstHost, c.reserved0, c.reserved1 = nil, nil, nil, nil
	if rc := s.side(&c.srcMemoryType, unsafe.Pointer(&c.srcArray)); rc != 0 {
		return rc
	}
	return s.side(&c.dstMemoryType, unsafe.Pointer(&c.dstArray))
}

// side puts the real handle into one side of a copy. Host addresses are the
// client's and mean nothing in this process.
func (s *session) side(t *C.CUmemorytype, array unsafe.Pointer) int32 {
	switch *t {
	case C.CU_MEMORYTYPE_UNIFIED:
		*t = C.CU_MEMORYTYPE_DEVICE
		return 0
	case C.CU_MEMORYTYPE_DEVICE:
		return 0
	case C.CU_MEMORYTYPE_ARRAY:
		return s.handleIn(wire.KindArray, array)
	}
	return C.CUDA_ERROR_INVALID_VALUE
}

func (s *session) cuMemcpy2DAsync_v2(c *C.CUDA_MEMCPY2D, h href) C.CUresult {
	if c == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	c.srcHost, c.dstHost = nil, nil
	// A device address may stand in the host field of a unified one; the
	// client puts it into the device field.
	if rc := s.side(&c.srcMemoryType, unsafe.Pointer(&c.srcArray)); rc != 0 {
		return C.CUresult(rc)
	}
	if rc := s.side(&c.dstMemoryType, unsafe.Pointer(&c.dstArray)); rc != 0 {
		return C.CUresult(rc)
	}
	return C.call_cuMemcpy2DAsync_v2(c, C.uint64_t(h.real))
}

func (s *session) cuMemcpy3DPeerAsync(c *C.CUDA_MEMCPY3D_PEER, h href) C.CUresult {
	if c == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	c.srcHost, c.dstHost = nil, nil
	for _, f := range []unsafe.Pointer{unsafe.Pointer(&c.srcContext), unsafe.Pointer(&c.dstContext)} {
		if rc := s.handleIn(wire.KindCtx, f); rc != 0 {
			return C.CUresult(rc)
		}
	}
	if rc := s.side(&c.srcMemoryType, unsafe.Pointer(&c.srcArray)); rc != 0 {
		return C.CUresult(rc)
	}
	if rc := s.side(&c.dstMemoryType, unsafe.Pointer(&c.dstArray)); rc != 0 {
		return C.CUresult(rc)
	}
	return C.call_cuMemcpy3DPeerAsync(c, C.uint64_t(h.real))
}

func (s *session) resource(d *C.CUDA_RESOURCE_DESC) int32 {
	if d == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	switch d.resType {
	case C.CU_RESOURCE_TYPE_ARRAY:
		return s.handleIn(wire.KindArray, unsafe.Pointer(&d.res))
	case C.CU_RESOURCE_TYPE_MIPMAPPED_ARRAY:
		return s.handleIn(wire.KindMipmap, unsafe.Pointer(&d.res))
	}
	return 0
}

func (s *session) cuTexObjectCreate(o *C.CUtexObject, res *C.CUDA_RESOURCE_DESC, tex *C.CUDA_TEXTURE_DESC, view *C.CUDA_RESOURCE_VIEW_DESC) C.CUresult {
	if rc := s.resource(res); rc != 0 {
		return C.CUresult(rc)
	}
	return C.call_cuTexObjectCreate(o, res, tex, view)
}

func (s *session) cuSurfObjectCreate(o *C.CUsurfObject, res *C.CUDA_RESOURCE_DESC) C.CUresult {
	if rc := s.resource(res); rc != 0 {
		return C.CUresult(rc)
	}
	return C.call_cuSurfObjectCreate(o, res)
}

// cuPointerGetAttribute answers what fits eight bytes and names nothing of the
// worker's own: the driver writes more for some, and handles for others.
func (s *session) cuPointerGetAttribute(value *uint64, attribute uint32, ptr uint64) C.CUresult {
	switch attribute {
	case C.CU_POINTER_ATTRIBUTE_CONTEXT, C.CU_POINTER_ATTRIBUTE_P2P_TOKENS, C.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		return C.CUDA_ERROR_NOT_SUPPORTED
	}
	if attribute > C.CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	var wide [64]byte
	rc := C.call_cuPointerGetAttribute(unsafe.Pointer(&wide[0]), C.uint32_t(attribute), C.uint64_t(ptr))
	*value = binary.LittleEndian.Uint64(wide[:])
	return rc
}
