// Package inventory knows the GPUs of this machine. NVML is asked by a process
// of its own, so that a driver that hangs holds up nothing but that process.
package inventory

import "time"

// Sample is one look at all GPUs. What NVML does not know is nil: there are no
// special numbers.
type Sample struct {
	Seq    uint64   `json:"seq"`
	Driver string   `json:"driver,omitempty"`
	CUDA   int      `json:"cuda,omitempty"` // as 12040
	GPUs   []Device `json:"gpus"`
	Error  string   `json:"error,omitempty"` // NVML as a whole
	// Quick: a short look, in which devices have only Index, UUID and Busy.
	Quick bool `json:"quick,omitempty"`
	// NoLibrary: there is no NVML here, so no GPU either.
	NoLibrary bool `json:"no_library,omitempty"`

	Asked time.Time `json:"-"` // when it was asked for
	At    time.Time `json:"-"` // when it arrived
}

// Device is one GPU as NVML sees it. Memory in bytes.
type Device struct {
	Index       int      `json:"index"` // in PCI order
	UUID        string   `json:"uuid"`
	Name        string   `json:"name"`
	PCI         string   `json:"pci"`
	Minor       *int     `json:"minor,omitempty"` // of /dev/nvidiaN
	Total       uint64   `json:"total"`
	Reserved    uint64   `json:"reserved"` // by the driver and the firmware
	Used        uint64   `json:"used"`     // by processes
	UtilGPU     *uint32  `json:"util_gpu,omitempty"`
	UtilMem     *uint32  `json:"util_mem,omitempty"`
	Temperature *uint32  `json:"temperature,omitempty"` // degrees Celsius
	Power       *uint32  `json:"power,omitempty"`       // milliwatt
	MIG         bool     `json:"mig,omitempty"`
	Processes   []Memory `json:"processes,omitempty"`
	Busy        []Busy   `json:"busy,omitempty"`
	Error       string   `json:"error,omitempty"` // this GPU cannot be used
	// Lost: it does not answer on the bus, needs a reset before it does, or NVML does not list it any more. Error says which.
	Lost bool `json:"lost,omitempty"`
	// Unread: NVML could not open it for another reason than Lost, and its faults are not known. Error says why.
	Unread bool   `json:"unread,omitempty"`
	Faults Faults `json:"faults,omitzero"`
}

// Memory is what one process holds of one GPU.
type Memory struct {
	PID  int     `json:"pid"`
	Used *uint64 `json:"used,omitempty"` // bytes
}

// Busy is for how long one process kept one GPU busy since the look before, as NVML
// says, which knows nothing of processes that have ended meanwhile.
type Busy struct {
	PID  int           `json:"pid"`
	Time time.Duration `json:"time"`
}
