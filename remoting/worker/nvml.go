package worker

/*
#include "driver.h"
#include <stdlib.h>
*/
import "C"

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// nvml asks libnvidia-ml about the session's devices. Without the library
// everything answers "not known".
type nvml struct {
	mu   sync.Mutex
	devs []unsafe.Pointer
}

var nvmlOnce sync.Once

// openNVML loads the library once for the process; false when it is not there.
func openNVML(log *slog.Logger, path string) bool {
	ok := false
	nvmlOnce.Do(func() {
		p := C.CString(path)
		defer C.free(unsafe.Pointer(p))
		var msg [256]C.char
		if C.sl_nvml_open(p, &msg[0], C.size_t(len(msg))) != 0 {
			log.Warn("no NVML: overhead is estimated, and programs see no utilisation", "error", C.GoString(&msg[0]))
			return
		}
		ok = true
	})
	return ok
}

// newNVML finds the devices by their bus ids.
func newNVML(busIDs []string) *nvml {
	n := &nvml{devs: make([]unsafe.Pointer, len(busIDs))}
	for i, id := range busIDs {
		s := C.CString(id)
		C.sl_nvml_find(s, &n.devs[i])
		C.free(unsafe.Pointer(s))
	}
	return n
}

func (n *nvml) dev(i int) unsafe.Pointer {
	if n == nil || i < 0 || i >= len(n.devs) {
		return nil
	}
	return n.devs[i]
}

// ownUse is the device memory this process uses, in bytes.
func (n *nvml) ownUse(dev int) (uint64, bool) {
	d := n.dev(dev)
	if d == nil {
		return 0, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var used C.uint64_t
	ok := C.sl_nvml_process(d, C.uint32_t(os.Getpid()), &used) == 0
	return uint64(used), ok
}

// deviceUse is the device memory everybody uses, in bytes.
func (n *nvml) deviceUse(dev int) (uint64, bool) {
	d := n.dev(dev)
	if d == nil {
		return 0, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var total, used, free C.uint64_t
	ok := C.sl_nvml_memory(d, &total, &used, &free) == 0
	return uint64(used), ok
}

func nvmlDriver() string {
	var s [80]C.char
	if C.sl_nvml_driver(&s[0], C.uint32_t(len(s))) != 0 {
		return ""
	}
	return C.GoString(&s[0])
}

// nvmlBranch is the driver's branch, empty if NVML does not know.
func nvmlBranch() string {
	var s [80]C.char
	if C.sl_nvml_branch(&s[0], C.uint32_t(len(s))) != 0 {
		return ""
	}
	s[len(s)-1] = 0
	return C.GoString(&s[0])
}

// observe answers OBSERVE: what nvidia-smi shows, as seen from the lease.
func (s *session) observe(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.Observe
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if int(m.Device) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	s.observeDevice(int(m.Device))
	return 0
}

func (s *session) observeDevice(i int) {
	info := s.ledger.Info(i)
	used := min(info.Used, info.Total)
	ps := s.ledger.Processes(i)
	ps = ps[:min(len(ps), wire.MaxProcesses)]
	const unknown = wire.UnknownReading
	r := wire.ObserveReply{
		MemTotal: info.Total, MemUsed: used, MemFree: info.Total - used,
		UtilGPU: unknown, UtilMem: unknown, Temp: unknown, PowerMW: unknown, PowerLimitMW: unknown,
		SMMHz: unknown, MemMHz: unknown, Pstate: unknown, Fan: unknown, Persistence: unknown,
		NProc: uint32(len(ps)),
	}
	if h := s.nvml.dev(i); h != nil {
		var d C.struct_sl_nvml_device
		s.nvml.mu.Lock()
		C.sl_nvml_dynamic(h, &d)
		s.nvml.mu.Unlock()
		r.UtilGPU, r.UtilMem = uint32(d.util_gpu), uint32(d.util_mem)
		r.Temp, r.Fan = uint32(d.temp), uint32(d.fan)
		r.PowerMW, r.PowerLimitMW = uint32(d.power_mw), uint32(d.power_limit_mw)
		r.SMMHz, r.MemMHz = uint32(d.sm_mhz), uint32(d.mem_mhz)
		r.Pstate, r.Persistence = uint32(d.pstate), uint32(d.persistence)
	}
	r.Encode(&s.enc)
	for _, q := range ps {
		(&wire.Process{PID: q.PID, Used: q.Used, Name: q.Name}).Encode(&s.enc)
	}
}

// readings answers OBSERVE_MORE: the further readings that tools such as nvidia-smi -q show.
func (s *session) readings(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.ObserveMore
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if int(m.Device) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	var r wire.ObserveMoreReply
	for i := range r.Value {
		r.Value[i] = wire.UnknownReading
	}
	if h := s.nvml.dev(int(m.Device)); h != nil {
		s.nvml.mu.Lock()
		C.sl_nvml_readings(h, C.uint32_t(m.Traffic), (*C.uint32_t)(&r.Value[0]))
		s.nvml.mu.Unlock()
	}
	r.Encode(&s.enc)
	return 0
}

// links answers OBSERVE_LINKS: how a device reaches the others of the session.
func (s *session) links(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.ObserveLinks
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if int(m.Device) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	var r wire.ObserveLinksReply
	for _, values := range [][]uint32{r.Peer[:], r.Ancestor[:], r.Nvlink[:]} {
		for i := range values {
			values[i] = wire.UnknownReading
		}
	}
	if h := s.nvml.dev(int(m.Device)); h != nil {
		s.nvml.mu.Lock()
		for i := range min(len(s.snap.Devices), len(r.Ancestor)) {
			if other := s.nvml.dev(i); other != nil {
				C.sl_nvml_peer(h, other, (*C.uint32_t)(&r.Peer[i*len(r.Peer)/len(r.Ancestor)]), (*C.uint32_t)(&r.Ancestor[i]))
			}
		}
		for i := range uint32(wire.NvlinkCount) {
			C.sl_nvml_link(h, C.uint32_t(i), (*C.uint32_t)(&r.Nvlink[i*wire.NvlinkValues]))
		}
		s.nvml.mu.Unlock()
	}
	r.Encode(&s.enc)
	return 0
}

// text answers OBSERVE_TEXT: what NVML has in words.
func (s *session) text(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.ObserveText
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if int(m.Device) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	if m.Which >= wire.TextCount {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	var r wire.ObserveTextReply
	if h := s.nvml.dev(int(m.Device)); h != nil {
		var text C.struct_wire_observe_text_reply
		s.nvml.mu.Lock()
		C.sl_nvml_text(h, C.uint32_t(m.Which), &text.text[0])
		s.nvml.mu.Unlock()
		b := C.GoBytes(unsafe.Pointer(&text), C.int(unsafe.Sizeof(text)))
		b, _, _ = bytes.Cut(b, []byte{0})
		r.Text = string(b)
	}
	r.Encode(&s.enc)
	return 0
}

// facts answers OBSERVE_FACTS: numbers that do not change, or hardly ever.
func (s *session) facts(p []byte) int32 {
	s.dec.Reset(p)
	var m wire.ObserveFacts
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	if int(m.Device) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	var r wire.ObserveFactsReply
	for i := range r.Value {
		r.Value[i] = wire.UnknownReading
	}
	if h := s.nvml.dev(int(m.Device)); h != nil {
		s.nvml.mu.Lock()
		C.sl_nvml_facts(h, (*C.uint32_t)(&r.Value[0]))
		s.nvml.mu.Unlock()
	}
	r.Encode(&s.enc)
	return 0
}

func busID(domain, bus, dev int32) string { return fmt.Sprintf("%04x:%02x:%02x.0", domain, bus, dev) }
