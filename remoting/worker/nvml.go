package worker

/*
#include "driver.h"
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"log/slog"
	"os"
	"sync"
	"unsafe"
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

// observe answers OBSERVE: what nvidia-smi shows, as seen from the lease.
func (s *session) observe(p []byte) int32 {
	s.dec.Reset(p)
	dev := s.dec.U32()
	if s.dec.Done() != nil {
		return s.malformed(s.hdr.Op)
	}
	if int(dev) >= len(s.snap.Devices) {
		return C.CUDA_ERROR_INVALID_DEVICE
	}
	s.observeDevice(int(dev))
	return 0
}

func (s *session) observeDevice(i int) {
	e := &s.enc
	info := s.ledger.Info(i)
	e.U64(info.Total)
	e.U64(min(info.Used, info.Total))
	e.U64(info.Total - min(info.Used, info.Total))
	var d C.struct_sl_nvml_device
	if h := s.nvml.dev(i); h != nil {
		s.nvml.mu.Lock()
		C.sl_nvml_dynamic(h, &d)
		s.nvml.mu.Unlock()
	} else {
		for _, v := range []*C.uint32_t{&d.util_gpu, &d.util_mem, &d.temp, &d.power_mw, &d.power_limit_mw, &d.sm_mhz, &d.mem_mhz, &d.pstate, &d.fan, &d.persistence} {
			*v = 0xffffffff
		}
	}
	for _, v := range []C.uint32_t{d.util_gpu, d.util_mem, d.temp, d.power_mw, d.power_limit_mw, d.sm_mhz, d.mem_mhz, d.pstate, d.fan, d.persistence} {
		e.U32(uint32(v))
	}
	ps := s.ledger.Processes(i)
	e.U32(uint32(len(ps)))
	for _, q := range ps {
		e.U32(q.PID)
		e.U32(0)
		e.U64(q.Used)
		e.Fixed(q.Name, 40)
	}
}

func busID(domain, bus, dev int32) string { return fmt.Sprintf("%04x:%02x:%02x.0", domain, bus, dev) }
