package worker

// Memory and events that processes of a program share: CUDA's IPC.
//
// Each process has a session of its own, so what one exports another session of the lease opens
// (package exchange). The program holds a token where CUDA has a handle; the driver's handle never
// leaves the owner.
//
// The exporter is charged for its memory, and stays so until it has freed the memory and no other
// session has it open. If the exporter ends before, each session that has the memory open is
// charged for it: the driver keeps the memory for them. Until then it is charged as the exporter's estate (package account).
//
// Only the executor uses this, except where a part says otherwise.

/*
#include "ipc.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
)

// exportCost is what an export takes of the worker's memory, in bytes.
const exportCost = 1 << 10

type ipc struct {
	s       *session
	exports *exchange.Exports         // nil if the session was started without a link to others
	tokens  map[uint64]exchange.Token // of memory of this session, by address
	events  map[uint32]exchange.Token // by id
	backing map[uint64]*backing       // by the driver's address
	views   map[uint64]*view          // opened memory, by the program's address
	opens   map[[64]byte]*opened      // by the driver's handle
	// pointers are allocations of other sessions' pools, and the pools as this session imported them.
	pointers map[uint64]*pool
}

// A view is memory of another session as the program has it open: all of an allocation of the
// driver's, or a part.
type view struct {
	*opened
	token exchange.Token
	size  uint64
	opens int
}

// opened is an allocation of another session.
type opened struct {
	m     *memory
	ctx   uint32
	real  uint64 // the driver's address
	views int
	dev   int
	bytes uint64 // that the exporter is charged
	use   *exchange.Use
	from  exporter

	mu      sync.Mutex // over what follows, which heir has too
	charged bool       // to this session, because the exporter has ended
	closed  bool
}

// An exporter is a session of the lease by its slot in the account, and its life there.
type exporter struct {
	slot int
	life uint64
}

// A backing is an allocation of the driver's that other sessions may have open. Safe for
// concurrent use.
type backing struct {
	mu      sync.Mutex
	users   int
	charged uint64           // bytes, see holds
	lend    func(more int64) // tells the account what others have open; nil before the first export
	release func()           // once it has been freed while others use it
}

// exported must be called before the first export. lend is called with the bytes that other sessions have open.
func (b *backing) exported(lend func(more int64)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.lend == nil {
		b.lend = lend
	}
}

// holds says how many bytes this session is charged for it now.
func (b *backing) holds(bytes uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.users > 0 && b.lend != nil && bytes != b.charged {
		b.lend(int64(b.users) * (int64(bytes) - int64(b.charged)))
	}
	b.charged = bytes
}

// used counts a session that begins (1) or ends (-1) to use it.
func (b *backing) used(n int) {
	b.mu.Lock()
	b.users += n
	if b.lend != nil {
		b.lend(int64(n) * int64(b.charged))
	}
	var f func()
	if b.users == 0 {
		f, b.release = b.release, nil
	}
	b.mu.Unlock()
	if f != nil {
		f()
	}
}

// inUse reports whether other sessions use it.
func (b *backing) inUse() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.users > 0
}

// freed calls release, now or when the last user has ended.
func (b *backing) freed(release func()) {
	b.mu.Lock()
	if b.users > 0 {
		b.release, release = release, nil
	}
	b.mu.Unlock()
	if release != nil {
		release()
	}
}

func (i *ipc) init(s *session) {
	i.s = s
	i.tokens = make(map[uint64]exchange.Token)
	i.events = make(map[uint32]exchange.Token)
	i.backing = make(map[uint64]*backing)
	i.views = make(map[uint64]*view)
	i.opens = make(map[[64]byte]*opened)
	i.pointers = make(map[uint64]*pool)
}

// join links the session, which has this slot of the lease's account, to the others of its lease by a descriptor that
// it takes over. It comes before all other calls.
func (i *ipc) join(slot, fd int) error {
	link, err := exchange.NewLink(fd)
	if err == nil {
		i.exports = exchange.New(i.s.log, slot, link)
	}
	return err
}

// withdrawAll withdraws all exports of a session that ends, before what else its end takes. Any goroutine may call it.
func (i *ipc) withdrawAll() {
	if i.exports != nil {
		i.exports.Withdraw()
	}
}

// stop ends the exchange; see waiters.stop.
func (i *ipc) stop() {
	if i.exports != nil {
		i.exports.Close()
	}
}

// noLink is what a session lacks that a starter of another release, or a test, has started.
const noLink = "IPC in a session without a link to others"

// add exports an item, or says why not.
func (i *ipc) add(it *exchange.Item) (t exchange.Token, rc C.CUresult) {
	if i.exports == nil {
		return t, C.CUresult(i.s.refuse(noLink))
	}
	if !i.s.keep("exports", exportCost) {
		return t, C.CUDA_ERROR_OUT_OF_MEMORY
	}
	return i.exports.Add(it), 0
}

// lend gives what tells the account of memory of a device that other sessions open or close.
func (s *session) lend(dev int) func(int64) {
	return func(more int64) { s.ledger.Lend(dev, more) }
}

// forget withdraws the export of memory that is freed, if there is one.
func (i *ipc) forget(p uint64) {
	if t, ok := i.tokens[p]; ok {
		delete(i.tokens, p)
		i.exports.Remove(t)
		i.s.unkeep(exportCost)
	}
}

// freed calls release when no session uses an allocation that the driver has freed.
func (i *ipc) freed(real uint64, release func()) {
	b := i.backing[real]
	if b == nil {
		release()
		return
	}
	delete(i.backing, real)
	b.freed(release)
}

// located is what cuIpcGetMemHandle finds: the program's allocation, and the driver's that holds it.
type located struct {
	base, size uint64
	real       uint64
	charge
}

func (m *memory) locate(p uint64) (at located, ok bool) {
	for _, a := range m.arenas {
		if b, n, found := a.Find(p); found {
			at.base, at.size, ok = b, n, true
			p = b
			break
		}
	}
	for real, c := range m.linear {
		if p < real || p-real >= c.bytes {
			continue
		}
		at.real, at.charge = real, c
		if !ok {
			at.base, at.size = real, c.size
		}
		return at, ok || p-real < c.size && !m.isSlab(real, c)
	}
	return at, false
}

func (s *session) cuIpcGetMemHandle(o *C.CUipcMemHandle, p uint64) C.CUresult {
	i := &s.ipc
	at, ok := s.mem.locate(p)
	if !ok {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	t, have := i.tokens[at.base]
	if !have {
		it := &exchange.Item{Kind: exchange.Memory, Device: at.dev, Offset: at.base - at.real, Size: at.size, Charged: at.bytes}
		if rc := C.sl_ipc_get_mem(unsafe.Pointer(&it.Handle), C.uint64_t(at.real)); rc != 0 {
			return C.CUresult(rc)
		}
		b := i.backing[at.real]
		if b == nil {
			b = new(backing)
		}
		b.exported(s.lend(at.dev))
		b.holds(at.bytes)
		it.Used = b.used
		var rc C.CUresult
		if t, rc = i.add(it); rc != 0 {
			return rc
		}
		i.backing[at.real], i.tokens[at.base] = b, t
	}
	*(*exchange.Token)(unsafe.Pointer(o)) = t
	return 0
}

// failed is what an export that cannot be opened gives.
func (i *ipc) failed(err error) C.CUresult {
	switch {
	case errors.Is(err, exchange.ErrOwn):
		return C.CUDA_ERROR_INVALID_CONTEXT
	case errors.Is(err, exchange.ErrToken):
		return C.CUDA_ERROR_INVALID_HANDLE
	}
	i.s.log.Error("no exchange with other sessions", "error", err)
	return C.CUDA_ERROR_OPERATING_SYSTEM
}

// open opens another session's export.
func (i *ipc) open(t exchange.Token, kind uint32) (*exchange.Use, *exchange.Item, C.CUresult) {
	switch {
	case i.exports == nil:
		return nil, nil, C.CUresult(i.s.refuse(noLink))
	case t.Kind() != kind:
		return nil, nil, C.CUDA_ERROR_INVALID_VALUE
	case t.Slot() == i.exports.Slot() && i.exports.Own(t) == nil:
		return nil, nil, C.CUDA_ERROR_INVALID_HANDLE
	}
	use, it, err := i.exports.Open(t)
	if err != nil {
		return nil, nil, i.failed(err)
	}
	// Another session's word: it must not make this one wrong about itself.
	if it.Device < 0 || it.Device >= len(i.s.snap.Devices) || it.Charged > 1<<50 || it.Size > it.Charged || it.Offset > it.Charged-it.Size {
		use.Close()
		if it.FD >= 0 {
			unix.Close(it.FD)
		}
		return nil, nil, C.CUDA_ERROR_INVALID_VALUE
	}
	return use, it, 0
}

// borrow opens another session's memory for as long as this session has it open.
func (i *ipc) borrow(t exchange.Token, kind uint32) (*opened, *exchange.Item, C.CUresult) {
	l := i.s.ledger
	l.Borrow(1)
	// Before it is opened: the slot may have another session soon.
	from := exporter{t.Slot(), l.Life(t.Slot())}
	use, it, rc := i.open(t, kind)
	if rc != 0 {
		l.Borrow(-1)
		return nil, nil, rc
	}
	return &opened{m: &i.s.mem, dev: it.Device, bytes: it.Charged, use: use, from: from}, it, 0
}

// decline ends what borrow began, where the memory was not opened after all.
func (o *opened) decline() {
	o.use.Close()
	o.m.s.ledger.Borrow(-1)
}

func (s *session) cuIpcOpenMemHandle_v2(o *C.CUdeviceptr, size *C.size_t, opens *C.uint, h *C.CUipcMemHandle, flags uint32) C.CUresult {
	i := &s.ipc
	if h == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if _, rc := s.device(); rc != 0 {
		return C.CUresult(rc)
	}
	if flags != C.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	t := *(*exchange.Token)(unsafe.Pointer(h))
	p, v := i.view(t)
	if v == nil {
		at, it, rc := i.borrow(t, exchange.Memory)
		if rc != 0 {
			return rc
		}
		at, rc = i.mapMemory(at, it, flags)
		if rc != 0 {
			return rc
		}
		p = at.real + it.Offset
		if i.views[p] != nil { // a token of its earlier life
			i.closeView(at)
			return C.CUDA_ERROR_INVALID_VALUE
		}
		v = &view{opened: at, token: t, size: it.Size}
		i.views[p] = v
	}
	v.opens++
	*o, *size, *opens = C.CUdeviceptr(p), C.size_t(v.size), C.uint(v.opens)
	return 0
}

// view gives what a token has been opened as in the current context; nil if it has not.
func (i *ipc) view(t exchange.Token) (uint64, *view) {
	for p, v := range i.views {
		if v.token == t && v.ctx == i.s.cur {
			return p, v
		}
	}
	return 0, nil
}

// mapMemory has the driver open an allocation that has been borrowed, unless it has already.
func (i *ipc) mapMemory(at *opened, it *exchange.Item, flags uint32) (*opened, C.CUresult) {
	if before := i.opens[it.Handle]; before != nil && before.ctx == i.s.cur {
		at.decline() // one is enough: it holds the whole allocation
		before.views++
		return before, 0
	}
	var real C.uint64_t
	if rc := C.sl_ipc_open_mem(&real, unsafe.Pointer(&it.Handle), C.uint32_t(flags)); rc != 0 {
		at.decline()
		return nil, C.CUresult(rc)
	}
	at.ctx, at.real, at.views = i.s.cur, uint64(real), 1
	i.opens[it.Handle] = at
	go at.heir(heirTime)
	return at, 0
}

func (s *session) cuIpcCloseMemHandle(p uint64, left *C.uint) C.CUresult {
	i := &s.ipc
	v := i.views[p]
	if v == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if v.opens--; v.opens == 0 {
		delete(i.views, p)
		if rc := i.closeView(v.opened); rc != 0 {
			return rc
		}
	}
	*left = C.uint(v.opens)
	return 0
}

func (i *ipc) closeView(at *opened) C.CUresult {
	if at.views--; at.views > 0 {
		return 0
	}
	rc := C.sl_ipc_close_mem(C.uint64_t(at.real))
	i.gone(at)
	return C.CUresult(rc)
}

// gone forgets an allocation that the driver has closed.
func (i *ipc) gone(at *opened) {
	for h, o := range i.opens {
		if o == at {
			delete(i.opens, h)
		}
	}
	at.close()
}

// dropContext forgets what was opened in a context that is gone.
func (i *ipc) dropContext(id uint32) {
	for p, v := range i.views {
		if v.ctx == id {
			delete(i.views, p)
			i.gone(v.opened)
		}
	}
}

// close ends the use of another session's memory, which the driver no longer has open here.
func (o *opened) close() {
	o.mu.Lock()
	was := o.closed
	o.closed = true
	charged := o.charged
	o.charged = false
	o.mu.Unlock()
	if was {
		return
	}
	if o.use != nil {
		o.use.Close()
	}
	if charged {
		o.m.release(o.dev, o.bytes)
	}
}

// heirTime is how long a session may wait until it is charged for memory that it has open and whose exporter has ended:
// until the exporter's process has wholly ended, which takes the driver a while.
const heirTime = 10 * time.Second

// heir waits for the exporter's end, and then charges this session within the time given, or ends it. What it has closed by
// then is charged no longer.
func (o *opened) heir(patience time.Duration) {
	defer o.m.s.ledger.Borrow(-1)
	o.use.Wait()
	if o.over() { // it is this session's end of the use, as like as not
		o.inherit()
		return
	}
	for until := time.Now().Add(patience); !o.inherit(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(until) {
			if o.over() {
				return
			}
			err := fmt.Errorf("device %d: another process of the lease has ended whose memory this one has open, %d MiB, and the lease has no room for it", o.dev, o.bytes>>20)
			_ = o.m.s.farewell(err)
			o.m.s.leave("over the cap", err)
			return
		}
	}
}

func (o *opened) over() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.closed
}

// inherit charges this session for what it has open, or gives up its part of the exporter's estate if it has
// closed that meanwhile. False: the exporter is still charged, or there is no room.
func (o *opened) inherit() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.m.s.ledger.Inherit(o.dev, o.from.slot, o.from.life, o.bytes) {
		return false
	}
	if o.closed {
		o.m.s.ledger.Release(o.dev, o.bytes)
		return true
	}
	o.m.mu.Lock()
	o.m.held[o.dev] += o.bytes
	o.m.moves++
	o.m.mu.Unlock()
	o.charged = true
	return true
}

// Events.

func (s *session) cuIpcGetEventHandle(o *C.CUipcEventHandle, h href) C.CUresult {
	i := &s.ipc
	t, ok := i.events[h.id]
	if !ok {
		it := &exchange.Item{Kind: exchange.Event, Used: func(int) {}}
		if rc := C.sl_ipc_get_event(unsafe.Pointer(&it.Handle), C.uint64_t(h.real)); rc != 0 {
			return C.CUresult(rc)
		}
		var rc C.CUresult
		if t, rc = i.add(it); rc != 0 {
			return rc
		}
		i.events[h.id] = t
	}
	*(*exchange.Token)(unsafe.Pointer(o)) = t
	return 0
}

// forgetEvent withdraws the export of an event that is destroyed, if there is one.
func (i *ipc) forgetEvent(id uint32) {
	if t, ok := i.events[id]; ok {
		delete(i.events, id)
		i.exports.Remove(t)
		i.s.unkeep(exportCost)
	}
}

func (s *session) cuIpcOpenEventHandle(id uint32, o *C.uint64_t, h *C.CUipcEventHandle) C.CUresult {
	if h == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	use, it, rc := s.ipc.open(*(*exchange.Token)(unsafe.Pointer(h)), exchange.Event)
	if rc != 0 {
		return rc
	}
	defer use.Close()
	return C.CUresult(C.sl_ipc_open_event(o, unsafe.Pointer(&it.Handle)))
}

// Memory of cuMemCreate. The program's file descriptor holds the token.

func (s *session) cuMemExportToShareableHandle(o *C.CUipcMemHandle, h href, kind uint32, flags uint64) C.CUresult {
	v := s.mem.vmm[h.real]
	switch {
	case v == nil || flags != 0:
		return C.CUDA_ERROR_INVALID_VALUE
	case kind != C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
		return C.CUresult(s.refuse("handles of memory other than file descriptors"))
	case v.opened != nil:
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if v.token == nil {
		var fd C.int
		if rc := C.sl_ipc_export(&fd, C.uint64_t(h.real)); rc != 0 {
			return C.CUresult(rc)
		}
		v.exported(s.lend(v.dev))
		v.holds(v.bytes)
		it := &exchange.Item{Kind: exchange.File, Device: v.dev, Size: v.size, Charged: v.bytes, FD: int(fd), Used: v.used}
		t, rc := s.ipc.add(it)
		if rc != 0 {
			unix.Close(int(fd))
			return rc
		}
		v.token = &t
	}
	*(*exchange.Token)(unsafe.Pointer(o)) = *v.token
	return 0
}

func (s *session) cuMemImportFromShareableHandle(id uint32, o *C.uint64_t, h *C.CUipcMemHandle, kind uint32) C.CUresult {
	i := &s.ipc
	if h == nil {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if kind != C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
		return C.CUresult(s.refuse("handles of memory other than file descriptors"))
	}
	t := *(*exchange.Token)(unsafe.Pointer(h))
	if i.exports != nil && t.Slot() == i.exports.Slot() {
		return i.importOwn(o, t)
	}
	at, it, rc := i.borrow(t, exchange.File)
	if rc != 0 {
		return rc
	}
	defer unix.Close(it.FD)
	if rc := C.sl_ipc_import(o, C.int(it.FD)); rc != 0 {
		at.decline()
		return C.CUresult(rc)
	}
	if v := s.mem.vmm[uint64(*o)]; v != nil { // imported before, and the driver counts
		v.handles++
		at.decline()
		return 0
	}
	s.mem.vmm[uint64(*o)] = &vmmHandle{charge: charge{dev: it.Device, size: it.Size}, handles: 1, opened: at, backing: new(backing)}
	go at.heir(heirTime)
	return 0
}

// importOwn imports what this session exported: another handle of the same memory.
func (i *ipc) importOwn(o *C.uint64_t, t exchange.Token) C.CUresult {
	it := i.exports.Own(t)
	if it == nil || it.Kind != exchange.File {
		return C.CUDA_ERROR_INVALID_HANDLE
	}
	for _, v := range i.s.mem.vmm {
		if v.token == nil || *v.token != t {
			continue
		}
		if rc := C.sl_ipc_import(o, C.int(it.FD)); rc != 0 {
			return C.CUresult(rc)
		}
		v.handles++
		i.s.mem.vmm[uint64(*o)] = v
		return 0
	}
	return C.CUDA_ERROR_INVALID_VALUE
}

func (s *session) cuMemRetainAllocationHandle(id uint32, o *C.uint64_t, p uint64) C.CUresult {
	rc := C.sl_ipc_retain(o, C.uint64_t(p))
	if rc != 0 {
		return C.CUresult(rc)
	}
	v := s.mem.vmm[uint64(*o)]
	if v == nil { // not of cuMemCreate
		C.call_cuMemRelease(*o)
		*o = 0
		return C.CUDA_ERROR_INVALID_VALUE
	}
	v.handles++
	return 0
}
