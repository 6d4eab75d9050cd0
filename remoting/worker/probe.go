package worker

// The probe asks the driver everything a client's snapshot needs, once, in a
// process that then ends, so that neither the supervisor nor a session that
// starts pays for it.

/*
#include "driver.h"
#include <stdlib.h>
*/
import "C"

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// Driver says where the driver's libraries are.
type Driver struct {
	LibCUDA string
	LibNVML string
}

func openDriver(path string) error {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var msg [256]C.char
	if C.sl_driver_open(p, &msg[0], C.size_t(len(msg))) != 0 {
		return fmt.Errorf("driver: %s: is the NVIDIA driver installed? --libcuda names another library", C.GoString(&msg[0]))
	}
	if rc := C.sl_init(); rc != 0 {
		return fmt.Errorf("driver: cuInit in %s returned %d", path, int(rc))
	}
	return nil
}

// numDeviceAttrs is how many device attributes the probe asks for.
const numDeviceAttrs = 160

// probe fills facts for the first n devices that the process can see. The driver is loaded and asked under the
// sandbox that sessions have.
func probe(log *slog.Logger, cfg SessionConfig, n int) (*control.Facts, error) {
	if err := openDriver(cfg.Driver.LibCUDA); err != nil {
		return nil, err
	}
	nv := openNVML(log, cfg.Driver.LibNVML)
	if err := cfg.filter(log, nil); err != nil {
		return nil, err
	}
	f := &control.Facts{}
	var v C.int
	if rc := C.sl_driver_version(&v); rc != 0 {
		return nil, fmt.Errorf("driver: cuDriverGetVersion returned %d", int(rc))
	}
	f.Snapshot.DriverVersion = uint32(v)
	if rc := C.sl_device_count(&v); rc != 0 {
		return nil, fmt.Errorf("driver: cuDeviceGetCount returned %d", int(rc))
	}
	if int(v) != n {
		return nil, fmt.Errorf("driver: %d devices asked for by --device, the driver shows %d; does each exist, and does the driver heed CUDA_VISIBLE_DEVICES?", n, int(v))
	}
	if nv {
		f.Snapshot.DriverString, f.Snapshot.DriverBranch = nvmlDriver(), nvmlBranch()
	}
	for i := range n {
		dev, err := deviceFacts(i)
		if err != nil {
			return nil, err
		}
		var v *nvml
		if nv {
			v = newNVML([]string{dev.PCIBusID})
		}
		c, err := contextFacts(i, v, &dev)
		if err != nil {
			return nil, err
		}
		f.Snapshot.Devices = append(f.Snapshot.Devices, dev)
		f.Overhead = append(f.Overhead, c.over)
		f.Idle = append(f.Idle, c.idle)
		f.Compiled = append(f.Compiled, c.compiled)
		f.HostReach = append(f.HostReach, dev.Attr[C.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS] != 0)
	}
	return f, nil
}

// deviceError is the error of a function of the driver.
func deviceError(device int, what string, rc C.int) error {
	return fmt.Errorf("driver: device %d: %s returned %d", device, what, int(rc))
}

// deviceFacts asks for what the driver says without a context.
func deviceFacts(i int) (d wire.Device, err error) {
	dev := C.int(i)
	var name [96]C.char
	if rc := C.sl_device_name(&name[0], 95, dev); rc != 0 {
		return d, deviceError(i, "cuDeviceGetName", rc)
	}
	d.Name = C.GoString(&name[0])
	if rc := C.sl_device_uuid(unsafe.Pointer(&d.UUID[0]), dev); rc != 0 {
		return d, deviceError(i, "cuDeviceGetUuid", rc)
	}
	var n C.uint64_t
	if rc := C.sl_device_mem(&n, dev); rc != 0 {
		return d, deviceError(i, "cuDeviceTotalMem", rc)
	}
	d.PhysicalMem = uint64(n)
	d.TotalMem = uint64(n)
	for a := range numDeviceAttrs {
		var v C.int
		rc := C.sl_device_attr(&v, C.uint32_t(a), dev)
		d.Attr = append(d.Attr, int32(v))
		d.AttrOK = append(d.AttrOK, rc == 0)
	}
	d.CCMajor = d.Attr[C.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR]
	d.CCMinor = d.Attr[C.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR]
	d.PCIDomain = d.Attr[C.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID]
	d.PCIBus = d.Attr[C.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID]
	d.PCIDev = d.Attr[C.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID]
	d.PCIBusID = busID(d.PCIDomain, d.PCIBus, d.PCIDev)
	var pci [24]C.char
	if C.sl_device_pci(&pci[0], 23, dev) == 0 {
		d.PCIBusID = C.GoString(&pci[0])
	}
	d.GranMin, d.GranRec = 2<<20, 2<<20
	if C.sl_granularity(&n, dev, C.CU_MEM_ALLOC_GRANULARITY_MINIMUM) == 0 && n > 0 {
		d.GranMin = uint64(n)
	}
	if C.sl_granularity(&n, dev, C.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) == 0 && n > 0 {
		d.GranRec = uint64(n)
	}
	if C.sl_tex1d(&n, dev) == 0 {
		d.Tex1DMaxWidth = uint64(n)
	}
	for l := range d.Limits {
		d.Limits[l] = wire.Unsupported
	}

	return d, nil
}

// contextUse is what a context showed: the memory that it takes (over) and that was in use before (idle), in bytes, and
// what the driver returned for a kernel to compile.
type contextUse struct {
	over, idle uint64
	compiled   int
}

// contextFacts adds what the driver says in a context, and measures what the context takes.
func contextFacts(i int, v *nvml, d *wire.Device) (use contextUse, err error) {
	dev := C.int(i)
	use.idle, _ = v.deviceUse(0)
	var ctx C.uint64_t
	if rc := C.sl_ctx_retain(&ctx, dev); rc != 0 {
		return use, deviceError(i, "cuDevicePrimaryCtxRetain", rc)
	}
	C.sl_ctx_set(ctx)
	for l := range d.Limits {
		var n C.uint64_t
		if C.sl_ctx_limit(&n, C.uint32_t(l)) == 0 {
			d.Limits[l] = uint64(n)
		}
	}
	var least, greatest C.int
	if C.sl_ctx_prio(&least, &greatest) == 0 {
		d.PrioLeast, d.PrioGreatest = int32(least), int32(greatest)
	}
	if used, ok := v.ownUse(0); ok {
		use.over = used
	} else if now, ok := v.deviceUse(0); ok && now > use.idle {
		use.over = now - use.idle
	} else {
		var free, total C.uint64_t
		if C.sl_mem_info(&free, &total) == 0 && uint64(total-free) < 4<<30 {
			use.over = uint64(total - free)
		}
	}
	use.compiled = int(C.sl_compile())
	C.sl_ctx_release(dev)
	return use, nil
}

// Probe writes what it finds about n devices to w, for the supervisor.
func Probe(log *slog.Logger, cfg SessionConfig, n int, w io.Writer) error {
	f, err := probe(log, cfg, n)
	if err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(f)
}
