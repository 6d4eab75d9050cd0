package inventory

import (
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Faults is what NVML says of a GPU's own errors. What the GPU does not have, or the driver does not tell, is nil:
// memory without ECC has no counts, for one.
type Faults struct {
	// Uncorrected are the ECC errors since the driver was loaded, or the GPU reset, that could not be corrected, and
	// UncorrectedEver those in the GPU's life.
	Uncorrected     *uint64 `json:"uncorrected,omitempty"`
	UncorrectedEver *uint64 `json:"uncorrected_ever,omitempty"`
	// Rows are the rows of the memory that have been remapped, from Ampere on.
	Rows *Rows `json:"rows,omitempty"`
	// PagesPending: pages of the memory wait for a reset to be retired, before Ampere.
	PagesPending *bool `json:"pages_pending,omitempty"`
	// SlowdownAt and ShutdownAt are the temperatures at which the GPU lowers its clocks, and ends itself, in degrees Celsius.
	SlowdownAt *uint32 `json:"slowdown_at,omitempty"`
	ShutdownAt *uint32 `json:"shutdown_at,omitempty"`
	// Slowdown are the reasons for which the hardware has lowered the clocks.
	Slowdown *Slowdown `json:"slowdown,omitempty"`
}

// Rows says how the GPU has replaced rows of its memory by spare ones.
type Rows struct {
	Remapped int  `json:"remapped"`          // for whatever reason
	Pending  bool `json:"pending,omitempty"` // more will be at the next reset
	Failed   bool `json:"failed,omitempty"`  // one could not be
}

// Slowdown has the reasons of the hardware that NVML knows: heat, the brake signal of the power supply, and any,
// which has both and more, as too high a current.
type Slowdown struct {
	Any     bool `json:"any,omitempty"`
	Thermal bool `json:"thermal,omitempty"`
	Brake   bool `json:"brake,omitempty"`
}

// faultsFor is how long the answers that change seldom are good: to ask for them takes the driver longer than for the others.
const faultsFor = time.Minute

// faults asks for a GPU's own errors: each time for those since the driver was loaded and for the clocks, and once in faultsFor for the rest.
func (c *child) faults(h nvml.Device, uuid string) Faults {
	k, now := c.slow[uuid], c.now()
	if k.at.IsZero() || now.Sub(k.at) >= faultsFor {
		k = slowFaults{now, c.askSlow(h, k.Faults)}
		c.slow[uuid] = k
	}
	f := k.Faults
	if c.has("nvmlDeviceGetTotalEccErrors") {
		if n, r := h.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC); r == nvml.SUCCESS {
			f.Uncorrected = &n
		}
	}
	// The newer name of the function, GetCurrentClocksEventReasons, is of driver 535 and does the same.
	if c.has("nvmlDeviceGetCurrentClocksThrottleReasons") {
		if m, r := h.GetCurrentClocksThrottleReasons(); r == nvml.SUCCESS {
			f.Slowdown = slowdown(m)
		}
	}
	return f
}

// slowFaults are the answers that change seldom, and when they were asked for.
type slowFaults struct {
	at time.Time
	Faults
}

// askSlow asks for what changes seldom. A question about rows or pages that fails leaves what was known: no answer is no sign that they are well.
func (c *child) askSlow(h nvml.Device, was Faults) Faults {
	f := Faults{}
	if c.has("nvmlDeviceGetTotalEccErrors") {
		if n, r := h.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC); r == nvml.SUCCESS {
			f.UncorrectedEver = &n
		}
	}
	if c.has("nvmlDeviceGetRemappedRows") {
		switch corrected, uncorrected, pending, failed, r := h.GetRemappedRows(); r {
		case nvml.SUCCESS:
			f.Rows = &Rows{Remapped: corrected + uncorrected, Pending: pending, Failed: failed}
		case nvml.ERROR_NOT_SUPPORTED:
		default:
			f.Rows = was.Rows
		}
	}
	if c.has("nvmlDeviceGetRetiredPagesPendingStatus") {
		switch s, r := h.GetRetiredPagesPendingStatus(); r {
		case nvml.SUCCESS:
			pending := s == nvml.FEATURE_ENABLED
			f.PagesPending = &pending
		case nvml.ERROR_NOT_SUPPORTED:
		default:
			f.PagesPending = was.PagesPending
		}
	}
	if c.has("nvmlDeviceGetTemperatureThreshold") {
		if t, r := h.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SLOWDOWN); r == nvml.SUCCESS {
			f.SlowdownAt = &t
		}
		if t, r := h.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SHUTDOWN); r == nvml.SUCCESS {
			f.ShutdownAt = &t
		}
	}
	return f
}

// slowdown picks the hardware's reasons out of NVML's mask (nvmlClocksEventReasons in the documentation of NVML). The others are
// not errors: nobody works, or a limit that was set, for power or for clocks, holds.
func slowdown(mask uint64) *Slowdown {
	s := &Slowdown{
		Thermal: mask&nvml.ClocksThrottleReasonHwThermalSlowdown != 0,
		Brake:   mask&nvml.ClocksThrottleReasonHwPowerBrakeSlowdown != 0,
	}
	s.Any = s.Thermal || s.Brake || mask&nvml.ClocksThrottleReasonHwSlowdown != 0
	return s
}
