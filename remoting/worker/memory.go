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
//	local     a kernel's local memory for every resident thread, at its first launch
//	overhead  what NVML says the process uses beyond all of this

/*
#include "driver.h"
*/
import "C"

import (
	"maps"
	"sync"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
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
	opened  *opened // memory of another session, which is charged for it
	token   *exchange.Token
	*backing
}

type vmmMap struct {
	size uint64
	h    uint64
}

type pool struct {
	dev     int
	charged uint64
	made    bool // by the client, not the device's own
	ended   bool // destroyed by the client, with memory in use

	imports int     // how often this session has imported the pool, which the driver counts too; 0 for its own pools
	opened  *opened // of another session, see ipc_pools.go
	token   *exchange.Token
	number  uint64 // names it among all sessions' pools: random, 0 before it or memory of it is exported
	backing        // in use by other sessions
	ghost   uint64 // of charged: what the pool has given back while other sessions used it
}

// imported reports whether the pool is another session's.
func (p *pool) imported() bool { return p.imports > 0 }

// poolMemory is an allocation of a pool.
type poolMemory struct{ pool, size uint64 }

type memory struct {
	s       *session
	linear  map[uint64]charge // by address
	arenas  map[uint32]*arena // by context id
	arrays  map[uint64]charge // arrays and mipmaps, by driver handle
	vmm     map[uint64]*vmmHandle
	maps    map[uint64]vmmMap // by address
	pools   map[uint64]*pool
	async   map[uint64]poolMemory // by address
	graphs  graphMemory
	limits  map[limitKey]charge // size: the limit, in its own unit
	ctxs    []int               // contexts per device
	streams uint64              // made so far

	mu      sync.Mutex
	held    []uint64 // reserved, per device
	over    []uint64 // overhead that the ledger has
	wantNow chan struct{}
	shrink  bool // pools may have given memory back
	base    []uint64
	told    bool
	moves   uint64 // reservations and releases so far
	lower   []lower
}

// lower is a look at the overhead that found less than is charged.
type lower struct{ moves, over uint64 }

// limitKey is a limit (CUlimit) of a context.
type limitKey struct{ ctx, limit uint32 }

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
	m.async = make(map[uint64]poolMemory)
	m.graphs.init()
	m.limits = make(map[limitKey]charge)
	m.wantNow = make(chan struct{}, 1)
}

// setDevices prepares for n devices; base is what each had in use when nothing
// of ours ran on it.
func (m *memory) setDevices(n int, base []uint64) {
	m.ctxs = make([]int, n)
	m.held = make([]uint64, n)
	m.over = make([]uint64, n)
	m.lower = make([]lower, n)
	m.graphs.charged = make([]uint64, n)
	m.base = base
}

// reserve takes memory from the ledger, after giving back what is held in
// stock if it is short.
func (m *memory) reserve(dev int, bytes uint64) bool {
	return m.take(dev, bytes) || m.trim(dev) && m.take(dev, bytes)
}

// take takes memory from the ledger.
func (m *memory) take(dev int, bytes uint64) bool {
	if !m.s.ledger.Reserve(dev, bytes) {
		return false
	}
	m.mu.Lock()
	m.held[dev] += bytes
	m.moves++
	m.mu.Unlock()
	return true
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
	some := m.trimGraphs(dev)
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
		m.s.ipc.forget(addr)
		m.s.ipc.freed(addr, func() { m.release(c.dev, c.bytes) })
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
			s.ipc.forget(p)
			a.Free(p)
			return 0
		}
	}
	if pl := s.ipc.pointers[p]; pl != nil {
		rc := C.sl_mem_free(C.uint64_t(p))
		if rc == 0 {
			delete(s.ipc.pointers, p)
			pl.opened.leave()
		}
		return rc
	}
	if a, ok := m.async[p]; ok {
		rc := C.sl_mem_free(C.uint64_t(p))
		if rc == 0 {
			s.ipc.forget(p)
			delete(m.async, p)
			m.settlePool(a.pool, m.pools[a.pool])
		}
		return rc
	}
	c, ok := m.linear[p]
	if ok && m.isSlab(p, c) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if dev, of := m.graphs.at[p]; of && !ok {
		rc := C.sl_mem_free(C.uint64_t(p))
		m.settleGraphs(dev)
		return rc
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
	for b, v := range s.ipc.views {
		if p >= b && p-b < v.size {
			*base, *size = C.CUdeviceptr(b), C.size_t(v.size)
			return 0
		}
	}
	return C.call_cuMemGetAddressRange_v2(base, size, C.uint64_t(p))
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
	// A file descriptor is the one form of handle that goes to other processes (ipc.go).
	prop.requestedHandleTypes &= C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
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
	m.vmm[uint64(*o)] = &vmmHandle{charge: charge{dev: dev, bytes: bytes, size: size}, handles: 1, backing: new(backing)}
	return 0
}

// vmmFree gives a charge back when nothing holds the memory any more.
func (m *memory) vmmFree(v *vmmHandle) {
	if v.handles > 0 || v.maps > 0 {
		return
	}
	maps.DeleteFunc(m.vmm, func(_ uint64, w *vmmHandle) bool { return w == v })
	if v.token != nil {
		m.s.ipc.exports.Remove(*v.token)
		m.s.unkeep(exportCost)
	}
	if v.opened != nil {
		v.opened.close()
		return
	}
	v.freed(func() { m.release(v.dev, v.bytes) })
}

func (s *session) cuMemRelease(h href) C.CUresult {
	rc := C.call_cuMemRelease(C.uint64_t(h.real))
	s.unbind(wire.KindMemHandle, h.id)
	if v := s.mem.vmm[h.real]; v != nil && rc == 0 {
		v.handles--
		s.mem.vmmFree(v)
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
			m.vmmFree(v)
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
