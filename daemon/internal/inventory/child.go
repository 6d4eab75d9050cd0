package inventory

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Flow: the child reads a line with a number, asks NVML, and answers with a line
// of JSON that has the number. After the number the line may say that a quick look is
// enough. It ends when its input does. One thread, no locks.

// Child is the work of `sluiced nvml`. lib is the NVML library's name or path.
func Child(lib string, in io.Reader, out io.Writer) error {
	n := nvml.New(nvml.WithLibraryPath(lib))
	enc := json.NewEncoder(out)
	sc := bufio.NewScanner(in)
	c := child{n: n, seen: map[string]seen{}, slow: map[string]slowFaults{}, now: time.Now}
	for sc.Scan() {
		number, how, _ := strings.Cut(sc.Text(), " ")
		seq, err := strconv.ParseUint(number, 10, 64)
		if err != nil {
			return fmt.Errorf("nvml: request %q is not a number", sc.Text())
		}
		s := c.sample(how == quickly)
		s.Seq = seq
		if err := enc.Encode(s); err != nil {
			return err
		}
	}
	return sc.Err()
}

type child struct {
	n    nvml.Interface
	up   bool
	seen map[string]seen // by GPU: the last look at its processes
	slow map[string]slowFaults
	now  func() time.Time
}

// quickly asks for a quick look.
const quickly = "quick"

func (c *child) sample(quick bool) Sample {
	if !c.up {
		switch r, err := c.init(); {
		case err != nil:
			return Sample{Quick: quick, NoLibrary: true, Error: err.Error()}
		case r != nvml.SUCCESS:
			return Sample{Quick: quick, Error: "nvmlInit: " + text(r), NoLibrary: r == nvml.ERROR_LIBRARY_NOT_FOUND || r == nvml.ERROR_DRIVER_NOT_LOADED}
		}
		c.up = true
	}
	s := Sample{Quick: quick}
	if !quick {
		s.Driver, _ = c.n.SystemGetDriverVersion()
		s.CUDA, _ = c.n.SystemGetCudaDriverVersion()
	}
	count, r := c.n.DeviceGetCount()
	if r != nvml.SUCCESS {
		s.Error = "nvmlDeviceGetCount: " + text(r)
		return s
	}
	for i := range count {
		s.GPUs = append(s.GPUs, c.device(i, quick))
	}
	return s
}

// init is Init, but for go-nvml's panic where the library cannot be loaded at all.
func (c *child) init() (r nvml.Return, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = errors.New(strings.TrimSpace(fmt.Sprint(p)))
		}
	}()
	return c.n.Init(), nil
}

// has says whether the library exports a function: calling one that it does not
// would end the process.
func (c *child) has(name string) bool { return c.n.Extensions().LookupSymbol(name) == nil }

func (c *child) device(i int, quick bool) Device {
	d := Device{Index: i}
	h, r := c.n.DeviceGetHandleByIndex(i)
	if r != nvml.SUCCESS {
		d.fail("NVML cannot open it", r)
		d.Unread = !d.Lost
		return d
	}
	if d.UUID, r = h.GetUUID(); r != nvml.SUCCESS {
		d.fail("it has no UUID", r)
		d.UUID, d.Unread = "", !d.Lost
		return d
	}
	if c.has("nvmlDeviceGetProcessUtilization") {
		c.busy(h, &d)
	}
	if quick {
		return d
	}
	d.Name, _ = h.GetName()
	if p, r := h.GetPciInfo(); r == nvml.SUCCESS {
		d.PCI = fmt.Sprintf("%08x:%02x:%02x.0", p.Domain, p.Bus, p.Device)
	}
	if m, r := h.GetMinorNumber(); r == nvml.SUCCESS {
		d.Minor = &m
	}
	c.memory(h, &d)
	if c.has("nvmlDeviceGetMigMode") {
		if on, _, r := h.GetMigMode(); r == nvml.SUCCESS && on == nvml.DEVICE_MIG_ENABLE {
			d.MIG = true
			if d.Error == "" {
				d.Error = "it is in MIG mode; switch it off: nvidia-smi -i " + d.UUID + " -mig 0"
			}
		}
	}
	if c.has("nvmlDeviceGetUtilizationRates") {
		if u, r := h.GetUtilizationRates(); r == nvml.SUCCESS {
			d.UtilGPU, d.UtilMem = &u.Gpu, &u.Memory
		}
	}
	if c.has("nvmlDeviceGetTemperature") {
		if t, r := h.GetTemperature(nvml.TEMPERATURE_GPU); r == nvml.SUCCESS {
			d.Temperature = &t
		}
	}
	if c.has("nvmlDeviceGetPowerUsage") {
		if p, r := h.GetPowerUsage(); r == nvml.SUCCESS {
			d.Power = &p
		}
	}
	d.Faults = c.faults(h, d.UUID)
	if ps, r := h.GetComputeRunningProcesses(); r == nvml.SUCCESS {
		for _, p := range ps {
			m := Memory{PID: int(p.Pid)}
			// NVML_VALUE_NOT_AVAILABLE (nvml.h) is all ones.
			if p.UsedGpuMemory != ^uint64(0) {
				m.Used = &p.UsedGpuMemory
			}
			d.Processes = append(d.Processes, m)
		}
	}
	return d
}

// fail says that the GPU cannot be used, and why.
func (d *Device) fail(what string, r nvml.Return) {
	d.Error = what + ": " + text(r)
	d.Lost = r == nvml.ERROR_GPU_IS_LOST || r == nvml.ERROR_RESET_REQUIRED
}

// memory fills in the sizes. The second version tells apart what the driver
// reserves; the first counts it as used on new drivers, and leaves it out of the
// total on old ones.
func (c *child) memory(h nvml.Device, d *Device) {
	if c.has("nvmlDeviceGetMemoryInfo_v2") {
		if m, r := h.GetMemoryInfo_v2(); r == nvml.SUCCESS {
			d.Total, d.Reserved, d.Used = m.Total, m.Reserved, m.Used
			return
		}
	}
	m, r := h.GetMemoryInfo()
	if r != nvml.SUCCESS {
		d.fail("NVML cannot tell its memory", r)
		return
	}
	d.Total, d.Used = m.Total, m.Used
}

// text names a code without asking the library, which may lack the function.
func text(r nvml.Return) string {
	names := map[nvml.Return]string{
		nvml.ERROR_UNINITIALIZED: "not initialised", nvml.ERROR_INVALID_ARGUMENT: "invalid argument",
		nvml.ERROR_NOT_SUPPORTED: "not supported", nvml.ERROR_NO_PERMISSION: "no permission",
		nvml.ERROR_DRIVER_NOT_LOADED: "the driver is not loaded", nvml.ERROR_TIMEOUT: "timed out",
		nvml.ERROR_IRQ_ISSUE: "interrupt problem", nvml.ERROR_LIBRARY_NOT_FOUND: "the library is not there",
		nvml.ERROR_FUNCTION_NOT_FOUND: "the library lacks the function", nvml.ERROR_GPU_IS_LOST: "the GPU is lost",
		nvml.ERROR_RESET_REQUIRED: "the GPU needs a reset", nvml.ERROR_LIB_RM_VERSION_MISMATCH: "library and driver are of different versions",
		nvml.ERROR_MEMORY: "out of memory", nvml.ERROR_NO_DATA: "no data",
	}
	if s, ok := names[r]; ok {
		return s
	}
	return fmt.Sprintf("NVML error %d", int(r))
}
