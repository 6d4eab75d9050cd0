package worker

// Device memory, charged.
//
// Nothing here asks the driver for memory before the ledger has agreed, and
// nothing is given back to the ledger before the driver has it back. Only the
// executor uses this, but for measure, which reads held under mu.
//
//	linear    <= 1 MiB from 2 MiB slabs (package slab), larger rounded up to 2 MiB
//	pitched   the same, with a pitch of 512 bytes
//	arrays    what cuArrayGetMemoryRequirements says, rounded up
//	VMM       cuMemCreate's size; free when no handle and no mapping is left
//	pools     what the pool has reserved, looked at after every call on it
//	overhead  what NVML says the process uses beyond all of this

/*
#include "driver.h"
*/
import "C"

import (
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/slab"
)

// charge is memory that stands in the ledger.
type charge struct {
	dev   int
	bytes uint64
	ctx   uint32 // id of the context it goes with, 0 when it outlives contexts
	size  uint64 // bytes asked for
}

type vmmHandle struct {
	charge
	handles int // ids that the client holds
	maps    int
}

type vmmMap struct {
	size uint64
	h    uint64
}

type pool struct {
	dev     int
	charged uint64
	made    bool // by the client, not the device's own
}

type memory struct {
	s      *session
	linear map[uint64]charge // by address
	arenas map[uint32]*arena // by context id
	arrays map[uint64]charge // arrays and mipmaps, by driver handle
	vmm    map[uint64]*vmmHandle
	maps   map[uint64]vmmMap // by address
	pools  map[uint64]*pool
	async  map[uint64]uint64 // address to pool
	limits map[[2]uint32]charge
	ctxs   []int // contexts per device

	mu      sync.Mutex
	held    []uint64 // reserved, per device
	over    []uint64 // overhead told to the ledger
	wantNow chan struct{}
	shrink  bool // pools may have given memory back
	base    []uint64
	told    bool
	moves   uint64 // reservations and releases so far
	lower   []lower
}

// lower is a look at the overhead that found less than is charged.
type lower struct{ moves, over uint64 }

type arena struct {
	*slab.Arena
	dev int
}

func (m *memory) init(s *session) {
	m.s = s
	m.linear = make(map[uint64]charge)
	m.arenas = make(map[uint32]*arena)
	m.arrays = make(map[uint64]charge)
	m.vmm = make(map[uint64]*vmmHandle)
	m.maps = make(map[uint64]vmmMap)
	m.pools = make(map[uint64]*pool)
	m.async = make(map[uint64]uint64)
	m.limits = make(map[[2]uint32]charge)
	m.wantNow = make(chan struct{}, 1)
}

// setDevices prepares for n devices; base is what each had in use when nothing
// of ours ran on it.
func (m *memory) setDevices(n int, base []uint64) {
	m.ctxs = make([]int, n)
	m.held = make([]uint64, n)
	m.over = make([]uint64, n)
	m.lower = make([]lower, n)
	m.base = base
}

// reserve takes memory from the ledger, after giving back what is held in
// stock if it is short.
func (m *memory) reserve(dev int, bytes uint64) bool {
	ok := m.s.ledger.Reserve(dev, bytes)
	if !ok && m.trim(dev) {
		ok = m.s.ledger.Reserve(dev, bytes)
	}
	if ok {
		m.mu.Lock()
		m.held[dev] += bytes
		m.moves++
		m.mu.Unlock()
	}
	return ok
}

func (m *memory) release(dev int, bytes uint64) {
	if bytes == 0 {
		return
	}
	m.mu.Lock()
	m.held[dev] -= bytes
	m.moves++
	m.mu.Unlock()
	m.s.ledger.Release(dev, bytes)
}

// trim makes pools give back what they keep in stock.
func (m *memory) trim(dev int) bool {
	some := false
	for real, p := range m.pools {
		if p.dev == dev && p.charged > 0 {
			C.sl_ctx_sync()
			C.call_cuMemPoolTrimTo(C.uint64_t(real), 0)
			before := p.charged
			m.settlePool(real, p)
			some = some || p.charged < before
		}
	}
	return some
}

// device is the device of the current context.
func (s *session) device() (int, int32) {
	if c := s.context(); c != nil {
		return c.dev, 0
	}
	return 0, C.CUDA_ERROR_INVALID_CONTEXT
}

func (s *session) cuMemAlloc_v2(o *C.CUdeviceptr, n uint64) C.CUresult {
	dev, rc := s.device()
	if rc != 0 {
		return C.CUresult(rc)
	}
	if n == 0 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	p, rc := s.mem.alloc(dev, n)
	*o = C.CUdeviceptr(p)
	return C.CUresult(rc)
}

func (m *memory) alloc(dev int, n uint64) (uint64, int32) {
	if n <= slab.MaxSize {
		p, ok := m.arena(dev).Alloc(n)
		if !ok {
			return 0, C.CUDA_ERROR_OUT_OF_MEMORY
		}
		return p, 0
	}
	return m.allocWhole(dev, n)
}

func (m *memory) allocWhole(dev int, n uint64) (uint64, int32) {
	bytes := account.RoundUp(n)
	if !m.reserve(dev, bytes) {
		return 0, C.CUDA_ERROR_OUT_OF_MEMORY
	}
	var p C.uint64_t
	if rc := C.sl_mem_alloc(&p, C.uint64_t(n)); rc != 0 {
		m.release(dev, bytes)
		return 0, int32(rc)
	}
	m.linear[uint64(p)] = charge{dev, bytes, m.s.cur, n}
	return uint64(p), 0
}

// arena gives the current context's small blocks.
func (m *memory) arena(dev int) *arena {
	a := m.arenas[m.s.cur]
	if a == nil {
		take := func() (uint64, bool) {
			p, rc := m.allocWhole(dev, slab.SlabSize)
			return p, rc == 0
		}
		give := func(addr uint64) { m.freeWhole(addr) }
		fence := func() { C.sl_ctx_sync() }
		a = &arena{slab.New(take, give, fence), dev}
		m.arenas[m.s.cur] = a
	}
	return a
}

func (m *memory) freeWhole(addr uint64) int32 {
	c, ok := m.linear[addr]
	if !ok {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.sl_mem_free(C.uint64_t(addr))
	// A sticky error keeps the driver from freeing; the process is then good
	// for nothing, and its end returns everything.
	if rc == 0 {
		delete(m.linear, addr)
		m.release(c.dev, c.bytes)
	}
	return int32(rc)
}

func (s *session) cuMemFree_v2(p uint64) C.CUresult {
	m := &s.mem
	if p == 0 {
		return 0
	}
	for _, a := range m.arenas {
		if a.Owns(p) {
			a.Free(p)
			return 0
		}
	}
	if real, ok := m.async[p]; ok {
		rc := C.sl_mem_free(C.uint64_t(p))
		if rc == 0 {
			delete(m.async, p)
			m.settlePool(real, m.pools[real])
		}
		return rc
	}
	if c, ok := m.linear[p]; ok && m.isSlab(p, c) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	return C.CUresult(m.freeWhole(p))
}

// isSlab says whether an allocation is a slab of ours, which the client must
// not free although its address may be that of a block freed before.
func (m *memory) isSlab(p uint64, c charge) bool {
	a := m.arenas[c.ctx]
	return a != nil && c.bytes == slab.SlabSize && a.Holds(p)
}

// pitchUnit is the pitch's granularity in bytes; all of CUDA's alignment rules
// for pitched memory divide it.
const pitchUnit = 512

func (s *session) cuMemAllocPitch_v2(o *C.CUdeviceptr, pitch *C.size_t, w, h uint64, elem uint32) C.CUresult {
	dev, rc := s.device()
	if rc != 0 {
		return C.CUresult(rc)
	}
	if w == 0 || h == 0 || elem != 4 && elem != 8 && elem != 16 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if w > maxSide || h > maxSide {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	row := (w + pitchUnit - 1) &^ (pitchUnit - 1)
	if row > (1<<50)/h {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	p, rc := s.mem.alloc(dev, row*h)
	if rc == 0 {
		*o = C.CUdeviceptr(p)
		*pitch = C.size_t(row)
	}
	return C.CUresult(rc)
}

func (s *session) cuMemGetInfo_v2(free, total *C.size_t) C.CUresult {
	dev, rc := s.device()
	if rc != 0 {
		return C.CUresult(rc)
	}
	s.mem.settlePools()
	i := s.ledger.Info(dev)
	*free, *total = C.size_t(i.Free()), C.size_t(i.Total)
	return 0
}

// cuMemGetAddressRange_v2 answers for what the worker cut out itself; the
// driver knows the rest.
func (s *session) cuMemGetAddressRange_v2(base *C.CUdeviceptr, size *C.size_t, p uint64) C.CUresult {
	m := &s.mem
	for _, a := range m.arenas {
		if b, n, ok := a.Find(p); ok {
			*base, *size = C.CUdeviceptr(b), C.size_t(n)
			return 0
		}
	}
	for b, c := range m.linear {
		if p < b || p-b >= c.bytes {
			continue
		}
		if p-b >= c.size || m.isSlab(b, c) {
			return C.CUDA_ERROR_NOT_FOUND
		}
		*base, *size = C.CUdeviceptr(b), C.size_t(c.size)
		return 0
	}
	return C.call_cuMemGetAddressRange_v2(base, size, C.uint64_t(p))
}

// Arrays.

// texel is the size of an element in bytes; 16 for formats that pack several.
func texel(format, channels uint32) uint64 {
	switch format {
	case C.CU_AD_FORMAT_UNSIGNED_INT8, C.CU_AD_FORMAT_SIGNED_INT8:
		return uint64(channels)
	case C.CU_AD_FORMAT_UNSIGNED_INT16, C.CU_AD_FORMAT_SIGNED_INT16, C.CU_AD_FORMAT_HALF:
		return 2 * uint64(channels)
	case C.CU_AD_FORMAT_UNSIGNED_INT32, C.CU_AD_FORMAT_SIGNED_INT32, C.CU_AD_FORMAT_FLOAT:
		return 4 * uint64(channels)
	}
	return 16
}

// arrayBytes estimates an array from its sides. The driver keeps arrays in tiles
// 64 bytes wide and 8 rows high (seen on an H200: 1 x 16384 x 1024 bytes take
// 1 GiB), so that is what the sides are rounded up to.
func arrayBytes(w, h, d uint64, format, channels uint32) (uint64, bool) {
	const tileBytes, tileRows = 64, 8
	if w > maxSide || h > maxSide {
		return 0, false
	}
	row := (max(w, 1)*texel(format, min(channels, 4)) + tileBytes - 1) &^ (tileBytes - 1)
	if h > 1 {
		h = (h + tileRows - 1) &^ (tileRows - 1)
	}
	n := uint64(1)
	for _, v := range [...]uint64{row, max(h, 1), max(d, 1)} {
		if v > maxSide || n > (1<<50)/v {
			return 0, false
		}
		n *= v
	}
	return account.RoundUp(n), true
}

// newArray makes an array within the charge for est bytes; need tells what it
// really takes.
func (s *session) newArray(est uint64, ok bool, o *C.uint64_t, create func() C.CUresult, need func() (uint64, bool), destroy func()) C.CUresult {
	dev, rc := s.device()
	if rc != 0 {
		return C.CUresult(rc)
	}
	m := &s.mem
	if !ok || !m.reserve(dev, est) {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if rc := create(); rc != 0 {
		m.release(dev, est)
		return rc
	}
	if n, ok := need(); ok {
		n = account.RoundUp(n)
		if n > est && !m.reserve(dev, n-est) {
			destroy()
			m.release(dev, est)
			*o = 0
			return C.CUDA_ERROR_OUT_OF_MEMORY
		}
		if n < est {
			m.release(dev, est-n)
		}
		est = n
	}
	m.arrays[uint64(*o)] = charge{dev: dev, bytes: est, ctx: s.cur}
	return 0
}

func (s *session) arrayNeed(o *C.uint64_t) func() (uint64, bool) {
	return func() (uint64, bool) {
		var r C.CUDA_ARRAY_MEMORY_REQUIREMENTS
		dev, _ := s.device()
		rc := C.call_cuArrayGetMemoryRequirements(&r, *o, C.uint32_t(dev))
		return uint64(r.size), rc == 0 && r.size > 0
	}
}

func (s *session) cuArrayCreate_v2(id uint32, o *C.uint64_t, d *C.CUDA_ARRAY_DESCRIPTOR) C.CUresult {
	if d == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	est, ok := arrayBytes(uint64(d.Width), uint64(d.Height), 1, uint32(d.Format), uint32(d.NumChannels))
	return s.newArray(est, ok, o, func() C.CUresult { return C.call_cuArrayCreate_v2(o, d) },
		s.arrayNeed(o), func() { C.call_cuArrayDestroy(*o) })
}

// Flags of arrays whose memory comes later, by cuMemMapArrayAsync.
const arraySparse = 0x40 | 0x80

func (s *session) cuArray3DCreate_v2(id uint32, o *C.uint64_t, d *C.CUDA_ARRAY3D_DESCRIPTOR) C.CUresult {
	if d == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if d.Flags&arraySparse != 0 {
		return C.CUresult(s.refuse("sparse or deferred-mapping arrays"))
	}
	est, ok := arrayBytes(uint64(d.Width), uint64(d.Height), uint64(d.Depth), uint32(d.Format), uint32(d.NumChannels))
	return s.newArray(est, ok, o, func() C.CUresult { return C.call_cuArray3DCreate_v2(o, d) },
		s.arrayNeed(o), func() { C.call_cuArrayDestroy(*o) })
}

func (s *session) cuMipmappedArrayCreate(id uint32, o *C.uint64_t, d *C.CUDA_ARRAY3D_DESCRIPTOR, levels uint32) C.CUresult {
	if d == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if d.Flags&arraySparse != 0 {
		return C.CUresult(s.refuse("sparse or deferred-mapping arrays"))
	}
	est, ok := arrayBytes(uint64(d.Width), uint64(d.Height), uint64(d.Depth), uint32(d.Format), uint32(d.NumChannels))
	// All levels together are at most twice the first.
	est = account.RoundUp(2 * est)
	need := func() (uint64, bool) {
		var r C.CUDA_ARRAY_MEMORY_REQUIREMENTS
		dev, _ := s.device()
		rc := C.call_cuMipmappedArrayGetMemoryRequirements(&r, *o, C.uint32_t(dev))
		return uint64(r.size), rc == 0 && r.size > 0
	}
	return s.newArray(est, ok, o, func() C.CUresult { return C.call_cuMipmappedArrayCreate(o, d, C.uint32_t(levels)) },
		need, func() { C.call_cuMipmappedArrayDestroy(*o) })
}

func (s *session) freeArray(real uint64) {
	if c, ok := s.mem.arrays[real]; ok {
		delete(s.mem.arrays, real)
		s.mem.release(c.dev, c.bytes)
	}
}

func (s *session) cuArrayDestroy(h href) C.CUresult {
	rc := C.call_cuArrayDestroy(C.uint64_t(h.real))
	if rc == 0 {
		s.freeArray(h.real)
		s.unbind(wire.KindArray, h.id)
	}
	return rc
}

func (s *session) cuMipmappedArrayDestroy(h href) C.CUresult {
	rc := C.call_cuMipmappedArrayDestroy(C.uint64_t(h.real))
	if rc == 0 {
		s.freeArray(h.real)
		s.unbind(wire.KindMipmap, h.id)
	}
	return rc
}

// Physical memory of the VMM interface.

func (s *session) cuMemCreate(id uint32, o *C.uint64_t, size uint64, prop *C.CUmemAllocationProp, flags uint64) C.CUresult {
	if prop == nil || size == 0 || size > 1<<50 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	dev := int(prop.location.id)
	if prop.location._type != C.CU_MEM_LOCATION_TYPE_DEVICE {
		return C.CUresult(s.refuse("cuMemCreate of host memory"))
	}
	if dev < 0 || dev >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	// Handles for other processes cannot be exported; asked for, they are
	// left out, and the export is refused by name.
	prop.requestedHandleTypes = 0
	prop.win32HandleMetaData = nil
	bytes := account.RoundUp(size)
	m := &s.mem
	if !m.reserve(dev, bytes) {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	rc := C.call_cuMemCreate(o, C.uint64_t(size), prop, C.uint64_t(flags))
	if rc != 0 {
		m.release(dev, bytes)
		return rc
	}
	m.vmm[uint64(*o)] = &vmmHandle{charge: charge{dev: dev, bytes: bytes}, handles: 1}
	return 0
}

// vmmFree gives a charge back when nothing holds the memory any more.
func (m *memory) vmmFree(real uint64, v *vmmHandle) {
	if v.handles == 0 && v.maps == 0 {
		delete(m.vmm, real)
		m.release(v.dev, v.bytes)
	}
}

func (s *session) cuMemRelease(h href) C.CUresult {
	rc := C.call_cuMemRelease(C.uint64_t(h.real))
	s.unbind(wire.KindMemHandle, h.id)
	if v := s.mem.vmm[h.real]; v != nil && rc == 0 {
		v.handles = 0
		s.mem.vmmFree(h.real, v)
	}
	return rc
}

func (s *session) cuMemMap(ptr, size, offset uint64, h href, flags uint64) C.CUresult {
	rc := C.call_cuMemMap(C.uint64_t(ptr), C.uint64_t(size), C.uint64_t(offset), C.uint64_t(h.real), C.uint64_t(flags))
	if rc == 0 {
		s.mem.maps[ptr] = vmmMap{size, h.real}
		if v := s.mem.vmm[h.real]; v != nil {
			v.maps++
		}
	}
	return rc
}

func (s *session) cuMemUnmap(ptr, size uint64) C.CUresult {
	rc := C.call_cuMemUnmap(C.uint64_t(ptr), C.uint64_t(size))
	if rc != 0 {
		return rc
	}
	m := &s.mem
	// CUDA unmaps whole mappings only, usually one.
	drop := func(addr uint64, q vmmMap) {
		delete(m.maps, addr)
		if v := m.vmm[q.h]; v != nil {
			v.maps--
			m.vmmFree(q.h, v)
		}
	}
	if q, ok := m.maps[ptr]; ok && q.size == size {
		drop(ptr, q)
		return 0
	}
	for addr, q := range m.maps {
		if addr >= ptr && addr-ptr < size {
			drop(addr, q)
		}
	}
	return 0
}

// Pools.

// poolOf finds or begins the account of a pool.
func (m *memory) poolOf(real uint64, dev int) *pool {
	p := m.pools[real]
	if p == nil {
		p = &pool{dev: dev}
		m.pools[real] = p
	}
	return p
}

// reserved is what a pool holds of its device, in bytes.
func reserved(real uint64) (uint64, bool) {
	var n uint64
	rc := C.sl_pool_reserved(C.uint64_t(real), (*C.uint64_t)(&n))
	return n, rc == 0
}

// settlePool brings a pool's charge down to what it holds. Growth is charged
// where it is caused.
func (m *memory) settlePool(real uint64, p *pool) {
	if p == nil {
		return
	}
	if n, ok := reserved(real); ok {
		if n = account.RoundUp(n); n < p.charged {
			m.release(p.dev, p.charged-n)
			p.charged = n
		}
	}
}

func (m *memory) settlePools() {
	m.mu.Lock()
	m.shrink = false
	m.mu.Unlock()
	for real, p := range m.pools {
		if p.charged > 0 {
			m.settlePool(real, p)
		}
	}
}

// poolsMayShrink notes a synchronisation, where pools give memory back.
func (m *memory) poolsMayShrink() {
	m.mu.Lock()
	m.shrink = true
	m.mu.Unlock()
}

// poolAlloc allocates n bytes from a pool in a stream. What the pool will take
// cannot be known before, so the size is reserved first and the rest, or
// what was too much, settled after; a growth that does not fit is undone.
func (s *session) poolAlloc(o *C.CUdeviceptr, n uint64, real uint64, dev int, h href) C.CUresult {
	if s.capturing(h.real) {
		s.refuse("stream-ordered allocation in a stream that is captured")
		return C.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
	}
	if n == 0 || n > 1<<50 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	m := &s.mem
	p := m.poolOf(real, dev)
	m.settlePool(real, p)
	// As much as is reserved and unused may serve; then nothing grows.
	pre := uint64(0)
	if used, ok := poolUsed(real); !ok || p.charged < used || p.charged-used < n {
		pre = account.RoundUp(n)
		if !m.reserve(dev, pre) {
			return C.CUDA_ERROR_OUT_OF_MEMORY
		}
	}
	var d C.CUdeviceptr
	rc := C.call_cuMemAllocFromPoolAsync(&d, C.uint64_t(n), C.uint64_t(real), C.uint64_t(h.real))
	now, ok := reserved(real)
	now = account.RoundUp(now)
	if !ok {
		now = p.charged + pre
	}
	if now > p.charged+pre && !m.reserve(dev, now-p.charged-pre) {
		// The pool took more than the size (it grows in steps): give it back.
		if rc == 0 {
			C.call_cuMemFreeAsync(C.uint64_t(d), C.uint64_t(h.real))
		}
		C.sl_ctx_sync()
		C.call_cuMemPoolTrimTo(C.uint64_t(real), 0)
		p.charged += pre
		m.settlePool(real, p)
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if now < p.charged+pre {
		m.release(dev, p.charged+pre-now)
	}
	p.charged = now
	if rc == 0 {
		m.async[uint64(d)] = real
		*o = d
	}
	return rc
}

// poolUsed is what allocations have of a pool's memory.
func poolUsed(real uint64) (uint64, bool) {
	var n uint64
	rc := C.sl_pool_used(C.uint64_t(real), (*C.uint64_t)(&n))
	return n, rc == 0
}

func (s *session) cuMemAllocAsync(o *C.CUdeviceptr, n uint64, h href) C.CUresult {
	if _, rc := s.streamCtx(h.id); rc != 0 {
		return C.CUresult(rc)
	}
	dev, rc := s.device()
	if rc != 0 {
		return C.CUresult(rc)
	}
	var real C.uint64_t
	if rc := C.call_cuDeviceGetMemPool(&real, C.uint32_t(dev)); rc != 0 {
		return rc
	}
	return s.poolAlloc(o, n, uint64(real), dev, h)
}

func (s *session) cuMemAllocFromPoolAsync(o *C.CUdeviceptr, n uint64, ph href, h href) C.CUresult {
	dev := 0
	if p := s.mem.pools[ph.real]; p != nil {
		dev = p.dev
	} else {
		// A device's own pool: it is the device whose default pool this is.
		for d := range s.snap.Devices {
			var real C.uint64_t
			if C.call_cuDeviceGetDefaultMemPool(&real, C.uint32_t(d)) == 0 && uint64(real) == ph.real {
				dev = d
			}
		}
	}
	return s.poolAlloc(o, n, ph.real, dev, h)
}

func (s *session) cuMemFreeAsync(p uint64, h href) C.CUresult {
	real, ok := s.mem.async[p]
	if !ok {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.call_cuMemFreeAsync(C.uint64_t(p), C.uint64_t(h.real))
	if rc == 0 {
		delete(s.mem.async, p)
		s.mem.settlePool(real, s.mem.pools[real])
	}
	return rc
}

func (s *session) cuMemPoolCreate(id uint32, o *C.uint64_t, props *C.CUmemPoolProps) C.CUresult {
	if props == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if props.location._type != C.CU_MEM_LOCATION_TYPE_DEVICE {
		return C.CUresult(s.refuse("memory pools of host memory"))
	}
	if props.allocType != C.CU_MEM_ALLOCATION_TYPE_PINNED {
		return C.CUresult(s.refuse("memory pools of managed memory"))
	}
	dev := int(props.location.id)
	if dev < 0 || dev >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	props.handleTypes = 0
	props.win32SecurityAttributes = nil
	rc := C.call_cuMemPoolCreate(o, props)
	if rc == 0 {
		p := s.mem.poolOf(uint64(*o), dev)
		p.made = true
		// A pool may hold memory from the start.
		if n, ok := reserved(uint64(*o)); ok && n > 0 {
			n = account.RoundUp(n)
			if !s.mem.reserve(dev, n) {
				C.call_cuMemPoolDestroy(*o)
				delete(s.mem.pools, uint64(*o))
				*o = 0
				return C.CUDA_ERROR_OUT_OF_MEMORY
			}
			p.charged = n
		}
	}
	return rc
}

func (s *session) cuMemPoolDestroy(h href) C.CUresult {
	m := &s.mem
	p := m.pools[h.real]
	if p == nil || !p.made {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	// The pool lives on until its last allocation is freed, but can no longer
	// be asked: what it holds then stays charged with its allocations.
	C.sl_ctx_sync()
	C.call_cuMemPoolTrimTo(C.uint64_t(h.real), 0)
	m.settlePool(h.real, p)
	busy := false
	for _, real := range m.async {
		busy = busy || real == h.real
	}
	if busy {
		return C.CUresult(s.refuse("cuMemPoolDestroy with allocations left"))
	}
	rc := C.call_cuMemPoolDestroy(C.uint64_t(h.real))
	if rc == 0 {
		m.release(p.dev, p.charged)
		delete(m.pools, h.real)
		s.unbind(wire.KindMemPool, h.id)
	}
	return rc
}

func (s *session) cuMemPoolTrimTo(h href, keep uint64) C.CUresult {
	rc := C.call_cuMemPoolTrimTo(C.uint64_t(h.real), C.uint64_t(keep))
	s.mem.settlePool(h.real, s.mem.pools[h.real])
	return rc
}

func (s *session) cuMemPoolSetAttribute(h href, attr uint32, value *uint64) C.CUresult {
	rc := C.sl_pool_set(C.uint64_t(h.real), C.uint32_t(attr), (*C.uint64_t)(value))
	s.mem.settlePool(h.real, s.mem.pools[h.real])
	return rc
}

// Limits that make the driver take memory.

// defaultHeap is what the driver takes without being asked; it is part of the
// measured overhead.
const defaultHeap = 8 << 20

// defaultStack is the stack of a thread, in bytes, that the measured overhead holds.
const defaultStack = 1024

// residentThreads is how many threads a device runs at a time.
func (s *session) residentThreads(dev int) uint64 {
	attr := func(n int) uint64 {
		if a := s.snap.Devices[dev].Attr; n < len(a) && a[n] > 0 {
			return uint64(a[n])
		}
		return 0
	}
	n := attr(C.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) * attr(C.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)
	return max(n, 1)
}

func (s *session) cuCtxSetLimit(limit uint32, value uint64) C.CUresult {
	dev, rc := s.device()
	if rc != 0 {
		return C.CUresult(rc)
	}
	// A stack is held for every thread that the device can have resident.
	threads := uint64(1)
	free := uint64(defaultHeap)
	switch limit {
	case C.CU_LIMIT_MALLOC_HEAP_SIZE, C.CU_LIMIT_PRINTF_FIFO_SIZE:
	case C.CU_LIMIT_STACK_SIZE:
		threads, free = s.residentThreads(dev), defaultStack
	default:
		rc := C.sl_ctx_set_limit(C.uint32_t(limit), C.uint64_t(value))
		s.mem.measureSoon()
		return rc
	}
	m := &s.mem
	key := [2]uint32{s.cur, limit}
	old := m.limits[key]
	want := uint64(0)
	if value > free {
		if value-free > (1<<50)/threads {
			return C.CUDA_ERROR_OUT_OF_MEMORY
		}
		want = account.RoundUp((value - free) * threads)
	}
	if want > old.bytes && !m.reserve(dev, want-old.bytes) {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if rc := C.sl_ctx_set_limit(C.uint32_t(limit), C.uint64_t(value)); rc != 0 {
		if want > old.bytes {
			m.release(dev, want-old.bytes)
		}
		return rc
	}
	if want < old.bytes {
		m.release(dev, old.bytes-want)
	}
	m.limits[key] = charge{dev: dev, bytes: want, ctx: s.cur}
	return 0
}

// Contexts.

// chargeContext charges one more context's overhead, as the probe measured it;
// measure corrects it later.
func (m *memory) chargeContext(dev int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	want := m.over[dev] + m.s.overhead[dev]
	if !m.s.ledger.Overhead(dev, want, false) {
		return false
	}
	m.over[dev] = want
	m.ctxs[dev]++
	return true
}

func (m *memory) unchargeContext(dev int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ctxs[dev]--
	n := min(m.s.overhead[dev], m.over[dev])
	if m.ctxs[dev] == 0 {
		n = m.over[dev]
	}
	m.over[dev] -= n
	m.s.ledger.Overhead(dev, m.over[dev], true)
}

// dropContext gives back what went with a context.
func (m *memory) dropContext(id uint32, dev int) {
	if a := m.arenas[id]; a != nil {
		a.Drop()
		delete(m.arenas, id)
	}
	for p, c := range m.linear {
		if c.ctx == id {
			delete(m.linear, p)
			m.release(c.dev, c.bytes)
		}
	}
	for p, c := range m.arrays {
		if c.ctx == id {
			delete(m.arrays, p)
			m.release(c.dev, c.bytes)
		}
	}
	for k, c := range m.limits {
		if c.ctx == id {
			delete(m.limits, k)
			m.release(c.dev, c.bytes)
		}
	}
	m.unchargeContext(dev)
	m.measureSoon()
}

// Overhead.

// settleOverhead measures now, on behalf of a call that made the driver take
// memory; false when it does not fit.
func (m *memory) settleOverhead() bool {
	ok := true
	for dev := range m.ctxs {
		if m.ctxs[dev] > 0 {
			ok = m.measure(dev, false, true) && ok
		}
	}
	return ok
}

// measureAll measures now, after the fact.
func (m *memory) measureAll() {
	for dev := range m.ctxs {
		if m.ctxs[dev] > 0 {
			m.measure(dev, true, true)
		}
	}
}

// measureSoon has the overhead measured within a short while.
func (m *memory) measureSoon() {
	select {
	case m.wantNow <- struct{}{}:
	default:
	}
}

// keepMeasured measures when asked, a little later, so that a burst of loads
// costs one look; and now and then anyway.
func (m *memory) keepMeasured() {
	t := time.NewTicker(5 * time.Second)
	defer t.Stop()
	for {
		select {
		case <-m.wantNow:
			time.Sleep(100 * time.Millisecond)
		case <-t.C:
		}
		for dev := range m.ctxs {
			m.mu.Lock()
			n := m.ctxs[dev]
			m.mu.Unlock()
			if n > 0 {
				m.measure(dev, true, false)
			}
		}
	}
}

// measure compares what NVML says the process uses with what is reserved, and
// tells the ledger the difference. Holding mu over all of it keeps
// reservations that are under way from being counted twice. Without force it
// says whether the overhead fits. quiet means that the executor asks, so that
// no reservation can be waiting for its memory.
func (m *memory) measure(dev int, force, quiet bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	used, ok := m.s.nvml.ownUse(dev)
	if !ok {
		// NVML does not see this process (another PID namespace). When no
		// other session is on the device, its growth since nothing ran there
		// is ours; the limit keeps a stranger's use out of the account.
		if m.s.ledger.Info(dev).Sessions != 1 || dev >= len(m.base) {
			return true
		}
		all, ok := m.s.nvml.deviceUse(dev)
		if !ok || all < m.base[dev] || all-m.base[dev] > m.held[dev]+m.s.overhead[dev]*uint64(m.ctxs[dev])+2<<30 {
			return true
		}
		used = all - m.base[dev]
		if !m.told {
			m.told = true
			m.s.log.Info("nvml does not list this process: overhead is taken from the device's total use")
		}
	}
	over := uint64(0)
	if used > m.held[dev] {
		over = used - m.held[dev]
	}
	// What the probe saw a context take is there from its beginning; sizes
	// rounded up in held and not by the driver must not hide it.
	over = max(over, m.s.overhead[dev]*uint64(m.ctxs[dev]))
	if over == m.over[dev] {
		if force {
			return true
		}
		// Somebody else may have told it, by force.
		i := m.s.ledger.Info(dev)
		return i.Used <= i.Total
	}
	// Memory that is reserved and not yet taken from the driver looks like
	// less overhead. Less is believed only when it is seen twice with no
	// reservation between.
	if over < m.over[dev] && !quiet {
		seen := lower{m.moves, over}
		again := m.lower[dev] == seen
		m.lower[dev] = seen
		if !again {
			return true
		}
	}
	if !m.s.ledger.Overhead(dev, over, force) {
		return false
	}
	m.over[dev] = over
	return true
}
