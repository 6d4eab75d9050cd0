package control

import "slices"

// A driver with HMM or ATS lets kernels use any address of their process. A session's client chooses the kernels, so it can then read and
// write all memory of the session process, and so has taken the session over. Then only the sandbox protects the machine.

// Pageable says whether kernels on one of the devices reach all memory of their process.
func (f *Facts) Pageable() bool { return slices.Contains(f.HostReach, true) }

// What is said of a device for which Pageable is true: why it is dangerous, and what helps on every machine.
const (
	PageableReason = "its kernels can read and write all host memory of their session (HMM or ATS: PAGEABLE_MEMORY_ACCESS is 1)"
	PageableRemedy = "load nvidia_uvm with uvm_disable_hmm=1"
)
