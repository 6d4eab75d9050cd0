package worker

// Memory pools that processes of a program share. The exporter gives out a pool, and then
// allocations of it by themselves; a session that has imported the pool imports them.
//
// The exporter stays charged for what the pool had reserved as long as another session has the pool
// or any of its allocations imported. A session that has them when the exporter ends is
// charged for as much as the pool had when the last allocation was exported.

/*
#include "ipc.h"
*/
import "C"

import (
	"crypto/rand"
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
)

func (s *session) cuMemPoolExportToShareableHandle(o *C.CUipcMemHandle, h href, kind uint32, flags uint64) C.CUresult {
	p := s.mem.pools[h.real]
	switch {
	case p == nil || flags != 0 || p.imported():
		return C.CUDA_ERROR_INVALID_VALUE
	case kind != C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
		return C.CUresult(s.refuse("handles of memory pools other than file descriptors"))
	}
	if p.token == nil {
		var fd C.int
		if rc := C.sl_ipc_export_pool(&fd, C.uint64_t(h.real)); rc != 0 {
			return C.CUresult(rc)
		}
		p.exported(s.lend(p.dev))
		p.holds(p.charged)
		t, rc := s.ipc.add(&exchange.Item{Kind: exchange.Pool, Device: p.dev, Pool: s.ipc.numberOf(p), FD: int(fd), Used: p.used})
		if rc != 0 {
			unix.Close(int(fd))
			return rc
		}
		p.token = &t
	}
	*(*exchange.Token)(unsafe.Pointer(o)) = *p.token
	return 0
}

// numberOf names a pool in what is exported of it: memory of one pool cannot be imported into another.
func (i *ipc) numberOf(p *pool) uint64 {
	for p.number == 0 {
		var b [8]byte
		_, _ = rand.Read(b[:])
		p.number = binary.LittleEndian.Uint64(b[:])
	}
	return p.number
}

// withdraw ends the export of a pool that is destroyed, if there is one.
func (i *ipc) withdraw(p *pool) {
	if p.token != nil {
		i.exports.Remove(*p.token)
		i.s.unkeep(exportCost)
		p.token = nil
	}
}

func (s *session) cuMemPoolImportFromShareableHandle(id uint32, o *C.uint64_t, h *C.CUipcMemHandle, kind uint32, flags uint64) C.CUresult {
	i := &s.ipc
	if h == nil || flags != 0 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if kind != C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
		return C.CUresult(s.refuse("handles of memory pools other than file descriptors"))
	}
	t := *(*exchange.Token)(unsafe.Pointer(h))
	if i.exports != nil && t.Slot() == i.exports.Slot() {
		it := i.exports.Own(t)
		if it == nil || it.Kind != exchange.Pool {
			return C.CUDA_ERROR_INVALID_HANDLE
		}
		return i.importPool(o, it, &opened{m: &s.mem, views: 1, dev: it.Device})
	}
	at, it, rc := i.borrow(t, exchange.Pool)
	if rc != 0 {
		return rc
	}
	defer unix.Close(it.FD)
	at.views = 1
	if rc := i.importPool(o, it, at); rc != 0 {
		at.decline()
		return rc
	}
	if s.mem.pools[uint64(*o)].opened == at {
		go at.heir(heirTime)
	}
	return 0
}

func (i *ipc) importPool(o *C.uint64_t, it *exchange.Item, at *opened) C.CUresult {
	if rc := C.sl_ipc_import_pool(o, C.int(it.FD)); rc != 0 {
		return C.CUresult(rc)
	}
	switch p := i.s.mem.pools[uint64(*o)]; {
	case p == nil:
		i.s.mem.pools[uint64(*o)] = &pool{dev: it.Device, made: true, imports: 1, opened: at, number: it.Pool}
	case p.imported() && p.number == it.Pool:
		p.imports++
		if at.use != nil {
			at.decline() // the first import's use holds the pool
		}
	default: // the driver gave a pool of this session's own
		*o = 0
		return C.CUresult(i.s.refuse("an import of a pool in the process that made it"))
	}
	return 0
}

// leave ends one use of an imported pool: the pool itself, or an allocation of it.
func (o *opened) leave() {
	o.mu.Lock()
	o.views--
	last := o.views == 0
	o.mu.Unlock()
	if last {
		o.close()
	}
}

// join begins the use of an allocation of an imported pool that had reserved so many bytes.
func (o *opened) join(bytes uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.views++
	if !o.charged { // otherwise the exporter has ended, and nothing new is exported
		o.bytes = max(o.bytes, bytes)
	}
}

func (s *session) destroyImported(h href, p *pool) C.CUresult {
	rc := C.call_cuMemPoolDestroy(C.uint64_t(h.real))
	if rc == 0 {
		s.unbind(wire.KindPool, h.id)
		if p.imports--; p.imports == 0 {
			delete(s.mem.pools, h.real)
			p.opened.leave()
		}
	}
	return rc
}

func (s *session) cuMemPoolExportPointer(o *C.CUmemPoolPtrExportData, ptr uint64) C.CUresult {
	i := &s.ipc
	a, ok := s.mem.async[ptr]
	p := s.mem.pools[a.pool]
	if !ok || p == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	t, have := i.tokens[ptr]
	if !have {
		it := &exchange.Item{Kind: exchange.Pointer, Device: p.dev, Size: a.size, Charged: max(p.charged, a.size), Pool: i.numberOf(p), Used: p.used}
		if rc := C.sl_ipc_export_pointer(unsafe.Pointer(&it.Handle), C.uint64_t(ptr)); rc != 0 {
			return C.CUresult(rc)
		}
		var rc C.CUresult
		if t, rc = i.add(it); rc != 0 {
			return rc
		}
		i.tokens[ptr] = t
	}
	*(*exchange.Token)(unsafe.Pointer(o)) = t
	return 0
}

// cuMemPoolImportPointer also gives the allocation's size, its device, and whether it is imported for the first time. No
// context need be current, as for the export.
func (s *session) cuMemPoolImportPointer(o *C.CUdeviceptr, size *C.size_t, opens *C.uint, dev *C.int, h href, data *C.CUmemPoolPtrExportData) C.CUresult {
	i := &s.ipc
	p := s.mem.pools[h.real]
	if data == nil || p == nil || !p.imported() {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	use, it, rc := i.open(*(*exchange.Token)(unsafe.Pointer(data)), exchange.Pointer)
	if rc == C.CUDA_ERROR_INVALID_HANDLE || rc == C.CUDA_ERROR_INVALID_CONTEXT { // unknown, freed or its own: the driver knows one word for all
		return C.CUDA_ERROR_INVALID_VALUE
	} else if rc != 0 {
		return rc
	}
	// The use of the pool holds all of it.
	defer use.Close()
	if it.Pool != p.number {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	var d C.uint64_t
	if rc := C.sl_ipc_import_pointer(&d, C.uint64_t(h.real), unsafe.Pointer(&it.Handle)); rc != 0 {
		return C.CUresult(rc)
	}
	*o, *size, *opens, *dev = C.CUdeviceptr(d), C.size_t(it.Size), 2, C.int(p.dev)
	if i.pointers[uint64(d)] == nil {
		i.pointers[uint64(d)] = p
		p.opened.join(it.Charged)
		*opens = 1
	}
	return 0
}

// freePointer frees an imported allocation in a stream. Its use ends when the stream has got there.
func (s *session) freePointer(ptr uint64, p *pool, h href) C.CUresult {
	ctx, rc := s.streamCtx(h.id)
	if rc != 0 {
		return C.CUresult(rc)
	}
	ev, rc := s.events.get(ctx)
	if rc != 0 {
		return C.CUresult(rc)
	}
	if rc := C.call_cuMemFreeAsync(C.uint64_t(ptr), C.uint64_t(h.real)); rc != 0 {
		s.events.put(ctx, ev)
		return rc
	}
	delete(s.ipc.pointers, ptr)
	if rc := C.sl_event_record(C.uint64_t(ev), C.uint64_t(h.real)); rc != 0 {
		s.events.put(ctx, ev)
		return rc // the use stays: better charged for too long than not at all
	}
	s.waiters.do(job{ctx, func() {
		if C.sl_event_sync(C.uint64_t(ev)) == 0 {
			p.opened.leave()
		}
		s.events.put(ctx, ev)
	}})
	return 0
}
