package worker

// Memory that the driver takes for a context: its limits, its local memory, and what
// nobody asked for by name, the overhead.

/*
#include "driver.h"
*/
import "C"

import (
	"fmt"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

// Limits that make the driver take memory.

// defaultHeap is what the driver takes without being asked; it is part of the
// measured overhead.
const defaultHeap = 8 << 20

// defaultStack is the local memory of a thread, in bytes, that the measured overhead
// holds. More of it is held for every thread that the device can have resident, from
// the first launch of a kernel that wants it until the stack limit is set again
// (measured on an H200: 264 MiB for each KiB and thread).
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
	m := &s.mem
	old := m.limits[limitKey{s.cur, limit}]
	var want uint64
	fits := true
	switch limit {
	case C.CU_LIMIT_MALLOC_HEAP_SIZE, C.CU_LIMIT_PRINTF_FIFO_SIZE:
		if fits = value < 1<<50; fits && value > defaultHeap {
			want = account.RoundUp(value - defaultHeap)
		}
	case C.CU_LIMIT_STACK_SIZE:
		want, fits = s.localBytes(dev, value)
	default:
		rc := C.sl_ctx_set_limit(C.uint32_t(limit), C.uint64_t(value))
		m.measureSoon()
		return rc
	}
	if !fits || want > old.bytes && !m.reserve(dev, want-old.bytes) {
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
	m.limits[limitKey{s.cur, limit}] = charge{dev: dev, bytes: want, ctx: s.cur, size: value}
	return 0
}

// localBytes is what local memory of n bytes for each thread takes beyond what
// every context has; false for more than any device has.
func (s *session) localBytes(dev int, n uint64) (uint64, bool) {
	threads := s.residentThreads(dev)
	switch {
	case n <= defaultStack:
		return 0, true
	case n-defaultStack > (1<<50)/threads:
		return 0, false
	}
	return account.RoundUp((n - defaultStack) * threads), true
}

// takeLocal charges the current context for a kernel whose threads have n bytes of
// local memory each, before the driver takes it at the kernel's launch.
func (s *session) takeLocal(n uint64) int32 {
	dev, rc := s.device()
	if rc != 0 {
		return rc
	}
	m := &s.mem
	key := limitKey{s.cur, C.CU_LIMIT_STACK_SIZE}
	old := m.limits[key]
	if n <= old.size {
		return 0
	}
	want, ok := s.localBytes(dev, n)
	if !ok || want > old.bytes && !m.reserve(dev, want-old.bytes) {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	m.limits[key] = charge{dev: dev, bytes: max(want, old.bytes), ctx: s.cur, size: n}
	return 0
}

// streamsPerLook is after how many new streams the overhead is looked at: each
// takes half a MiB (measured on an H200).
const streamsPerLook = 16

// newStream counts a stream that was made, or undoes it when its memory does not fit.
func (s *session) newStream(o *C.uint64_t, rc C.CUresult) C.CUresult {
	if rc != 0 {
		return rc
	}
	if s.mem.streams++; s.mem.streams%streamsPerLook == 0 && !s.mem.settleOverhead() {
		C.sl_stream_destroy(*o)
		*o = 0
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	if C.sl_stream_blocking(*o) == 0 {
		s.awaitArrived(true)
	}
	return 0
}

func (s *session) cuStreamCreate(id uint32, o *C.uint64_t, flags uint32) C.CUresult {
	return s.newStream(o, C.call_cuStreamCreate(o, C.uint32_t(flags)))
}

func (s *session) cuStreamCreateWithPriority(id uint32, o *C.uint64_t, flags, priority uint32) C.CUresult {
	return s.newStream(o, C.call_cuStreamCreateWithPriority(o, C.uint32_t(flags), C.uint32_t(priority)))
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
			m.s.ipc.forget(p)
			m.s.ipc.freed(p, func() { m.release(c.dev, c.bytes) })
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
	m.s.ipc.dropContext(id)
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
			m.afterTheFact(dev, true)
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
	t := time.NewTicker(2 * time.Second)
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
				m.afterTheFact(dev, false)
			}
		}
	}
}

// overSlack is how far what the driver takes unasked may pass the cap, in bytes,
// before the session that took it ends: code of kernels that are loaded when all
// memory is allocated should not cost a program its life.
const overSlack = 128 << 20

// afterTheFact measures by force, and ends the session when it has grown out of
// its lease.
func (m *memory) afterTheFact(dev int, quiet bool) {
	m.mu.Lock()
	before := m.over[dev]
	m.mu.Unlock()
	m.measure(dev, true, quiet)
	m.mu.Lock()
	grown := m.over[dev] > before
	m.mu.Unlock()
	if !grown {
		return
	}
	if i := m.s.ledger.Info(dev); i.Used > i.Total+overSlack {
		err := fmt.Errorf("device %d: the lease grants %d MiB and the driver has taken %d MiB for this session's code, streams, graphs or local memory: ask for a larger fraction", dev, i.Total>>20, i.Used>>20)
		_ = m.s.farewell(err)
		m.s.leave("over the cap", err)
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
		// A call with force may have reported it meanwhile.
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

// nodeBytes is reserved for each node of a graph while it is made executable; the
// driver takes about 2 KiB of the device (measured on an H200).
const nodeBytes = 4096

// cuGraphInstantiateWithFlags: an executable graph whose memory does not fit is
// undone; how much it really takes is measured.
func (s *session) cuGraphInstantiateWithFlags(id uint32, o *C.uint64_t, g href, flags uint64) C.CUresult {
	if rc := s.tellAny(); rc != 0 {
		return C.CUresult(rc) // of a node, as likely as not: the graph may lack it
	}
	dev, _ := s.device()
	var nodes C.size_t
	if rc := C.call_cuGraphGetNodes(C.uint64_t(g.real), nil, &nodes); rc != 0 {
		return rc
	}
	n := account.RoundUp(uint64(nodes) * nodeBytes)
	if !s.mem.reserve(dev, n) {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	takes, ok := s.takeGraph(g.real)
	if !ok {
		s.mem.release(dev, n)
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	defer func() { s.madeGraph(*o, takes) }()
	rc := C.call_cuGraphInstantiateWithFlags(o, C.uint64_t(g.real), C.uint64_t(flags))
	s.mem.release(dev, n)
	if rc == 0 && !s.mem.settleOverhead() {
		C.call_cuGraphExecDestroy(*o)
		*o = 0
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	return rc
}
