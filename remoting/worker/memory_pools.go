package worker

// Memory pools, charged by what they have reserved of the device.

/*
#include "driver.h"
*/
import "C"

import (
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

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
	n, ok := reserved(real)
	if !ok {
		return
	}
	if n = account.RoundUp(n); n+p.ghost < p.charged {
		p.ghost = p.charged - n
	}
	// What other sessions have open stays, even where this session's driver has given it back.
	if p.ghost > 0 && !p.inUse() {
		m.release(p.dev, p.ghost)
		p.charged -= p.ghost
		p.ghost = 0
	}
	p.holds(p.charged)
	if p.ended && p.charged == 0 {
		C.call_cuMemPoolDestroy(C.uint64_t(real))
		delete(m.pools, real)
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
	if n == 0 || n > 1<<50 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	m := &s.mem
	if s.capturing(h.real) { // it becomes a node, which is charged for with its executable graph
		rc := C.call_cuMemAllocFromPoolAsync(o, C.uint64_t(n), C.uint64_t(real), C.uint64_t(h.real))
		if rc == 0 {
			m.graphs.at[uint64(*o)] = dev
		}
		return rc
	}
	p := m.poolOf(real, dev)
	if p.imported() {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	m.settlePool(real, p)
	// As much as is reserved and unused may serve; then nothing grows.
	pre := uint64(0)
	if used, ok := poolUsed(real); !ok || p.charged-p.ghost < used || p.charged-p.ghost-used < n {
		pre = account.RoundUp(n)
		if !m.reserve(dev, pre) {
			return C.CUDA_ERROR_OUT_OF_MEMORY
		}
	}
	var d C.CUdeviceptr
	rc := C.call_cuMemAllocFromPoolAsync(&d, C.uint64_t(n), C.uint64_t(real), C.uint64_t(h.real))
	now, ok := reserved(real)
	now = account.RoundUp(now) + p.ghost
	if !ok {
		now = p.charged + pre
	}
	if now > p.charged+pre && !m.reserve(dev, now-p.charged-pre) {
		// The pool took more than the size (it grows in steps): give it back. A
		// stream that does not come to the free keeps it from going, and then
		// the memory is charged beyond the cap: the session ends.
		if rc == 0 {
			C.call_cuMemFreeAsync(C.uint64_t(d), C.uint64_t(h.real))
		}
		C.sl_ctx_sync()
		C.call_cuMemPoolTrimTo(C.uint64_t(real), 0)
		p.charged += pre
		m.settlePool(real, p)
		if left, ok := reserved(real); !ok || account.RoundUp(left)+p.ghost > p.charged {
			s.violation("a memory pool could not be kept within the lease")
		}
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if now < p.charged+pre {
		m.release(dev, p.charged+pre-now)
	}
	p.charged = now
	p.holds(now)
	if rc == 0 {
		m.async[uint64(d)] = poolMemory{real, n}
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
	if _, rc := s.streamCtx(h.id); rc != 0 {
		return C.CUresult(rc)
	}
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
	if s.capturing(h.real) { // it is freed when the graph gets there
		return C.call_cuMemFreeAsync(C.uint64_t(p), C.uint64_t(h.real))
	}
	if pl := s.ipc.pointers[p]; pl != nil {
		return s.freePointer(p, pl, h)
	}
	a, ok := s.mem.async[p]
	if dev, of := s.mem.graphs.at[p]; of && !ok {
		rc := C.call_cuMemFreeAsync(C.uint64_t(p), C.uint64_t(h.real))
		s.mem.settleGraphs(dev)
		return rc
	}
	if !ok {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	rc := C.call_cuMemFreeAsync(C.uint64_t(p), C.uint64_t(h.real))
	if rc == 0 {
		s.ipc.forget(p)
		delete(s.mem.async, p)
		s.mem.settlePool(a.pool, s.mem.pools[a.pool])
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
	props.handleTypes &= C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
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
	if p.imported() {
		return s.destroyImported(h, p)
	}
	// The driver's pool would live on until its last allocation is freed, but could no longer be asked what it holds:
	// only the program's handle ends here, and the driver's with the memory. Until then the pool keeps no more than its allocations.
	var none, current, own C.uint64_t
	if C.call_cuDeviceGetMemPool(&current, C.uint32_t(p.dev)) == 0 && uint64(current) == h.real &&
		C.call_cuDeviceGetDefaultMemPool(&own, C.uint32_t(p.dev)) == 0 {
		C.call_cuDeviceSetMemPool(C.uint32_t(p.dev), own)
	}
	C.sl_pool_set(C.uint64_t(h.real), C.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &none)
	C.sl_ctx_sync()
	C.call_cuMemPoolTrimTo(C.uint64_t(h.real), 0)
	p.ended = true
	s.ipc.withdraw(p)
	s.unbind(wire.KindPool, h.id)
	m.settlePool(h.real, p)
	return 0
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
