// Package metrics exports what the daemon knows, for Prometheus. What is not known
// is left out: no series ever shows a number that stands for "none".
package metrics

import (
	"runtime"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Flow: a scrape reads what the daemon has in memory, through Source. It calls no other process and takes no lock here.

// Source is what is exported. Every function answers at once, from memory; nil
// ones have nothing to say.
type Source struct {
	Node, Version string
	Nameless      bool               // leave out who uses what: jobs, users, accounts, programs, processes
	GPUs          func() []lease.GPU // with what is free of them
	Sample        func() *inventory.Sample
	Age           func() (age time.Duration, known bool, why string)
	Leases        func() []lease.Status // of this node's GPUs
	// Total is what a lease's sessions did, those that have ended too.
	Total    func(lease string) lease.Total
	Mismatch func() []Mismatch
	Counters func() []Counter
}

// Mismatch is what NVML says that a lease's sessions hold of a GPU less what their
// account says, in bytes: above zero is memory that escaped the account.
type Mismatch struct {
	Lease, GPU string
	Bytes      int64
}

// Counter is a number that only grows while the daemon runs; with Gauge, one that also falls.
type Counter struct {
	Name, Help string
	Value      uint64
	Gauge      bool
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("sluice_"+name, help, labels, nil)
}

var (
	build = desc("build_info", "Version of the daemon; always 1.", "version", "goversion")
	node  = desc("node_info", "Name of the node; always 1.", "node")

	nvmlUp  = desc("nvml_up", "1 if the last look of NVML came in time.")
	nvmlAge = desc("nvml_age_seconds", "Time since NVML last answered.")

	gpuInfo    = desc("gpu_info", "What a GPU is; always 1.", "gpu", "index", "name", "pci")
	gpuHealthy = desc("gpu_healthy", "1 if fractions of the GPU are granted.", "gpu")
	gpuDrained = desc("gpu_drained_timestamp_seconds", "Since when the GPU is drained; not there unless it is.", "gpu", "by", "reason")
	gpuMem     = desc("gpu_memory_lendable_bytes", "Memory that can be granted in all.", "gpu")
	gpuGranted = desc("gpu_memory_granted_bytes", "Memory that leases hold.", "gpu")
	gpuFree    = desc("gpu_memory_free_bytes", "Memory that can be granted now.", "gpu")
	gpuShare   = desc("gpu_granted_ratio", "Compute that leases hold, 0 to 1.", "gpu")
	gpuLeases  = desc("gpu_leases", "Leases on the GPU.", "gpu")
	gpuTotal   = desc("gpu_nvml_memory_total_bytes", "Memory of the GPU, as NVML says.", "gpu")
	gpuUsed    = desc("gpu_nvml_memory_used_bytes", "Memory in use by whomever, as NVML says.", "gpu")
	gpuUtil    = desc("gpu_utilisation_ratio", "Part of the time in which a kernel ran, 0 to 1, as NVML says.", "gpu")
	gpuTemp    = desc("gpu_temperature_celsius", "Temperature of the GPU.", "gpu")
	gpuPower   = desc("gpu_power_watts", "Power that the GPU draws.", "gpu")
	gpuSlowAt  = desc("gpu_temperature_slowdown_celsius", "Temperature at which the GPU lowers its clocks.", "gpu")
	gpuSlowed  = desc("gpu_hardware_slowdown", "1 if the hardware has lowered the GPU's clocks, for heat, power or current.", "gpu")
	gpuECC     = desc("gpu_ecc_uncorrected_errors_total", "ECC errors that could not be corrected, since the driver was loaded.", "gpu")
	gpuRemap   = desc("gpu_remap_pending", "1 if a row of the GPU's memory is remapped, or a page retired, at the next reset.", "gpu")
	gpuUnmap   = desc("gpu_remap_failed", "1 if a row of the GPU's memory could not be remapped.", "gpu")

	leaseInfo     = desc("lease_info", "Whose a lease is; always 1. Join it on lease.", "lease", "cluster", "job", "job_name", "uid", "account", "host", "policy")
	leaseGranted  = desc("lease_memory_granted_bytes", "Memory of the GPU that the lease grants.", "lease", "gpu")
	leaseUsed     = desc("lease_memory_used_bytes", "Memory that its sessions use, contexts included.", "lease", "gpu")
	leaseFree     = desc("lease_memory_free_bytes", "Memory that its sessions can still allocate.", "lease", "gpu")
	leasePeak     = desc("lease_memory_peak_bytes", "Most memory that its sessions have used at a time.", "lease", "gpu")
	leaseShare    = desc("lease_granted_ratio", "Compute of the GPU that the lease grants, 0 to 1.", "lease", "gpu")
	leaseIdle     = desc("lease_idle_seconds", "For how long the lease has had no work for the GPU; counts from the daemon's start at the earliest.", "lease")
	leaseSessions = desc("lease_sessions", "Live sessions of the lease.", "lease")
	leaseOpened   = desc("lease_sessions_total", "Sessions that the lease has had.", "lease")
	leaseFailed   = desc("lease_sessions_failed_total", "Sessions of the lease that did not end by themselves, nor with their client or the lease: killed, out of host memory, beyond their share.", "lease")
	leaseBusy     = desc("lease_gpu_seconds_total", "Time for which its sessions kept GPUs busy, as events and NVML's samples say.", "lease")
	leaseCalls    = desc("lease_calls_total", "Calls of the driver's interface, of all its sessions.", "lease")
	leaseWaits    = desc("lease_waits_total", "Calls that a client waited for, of all its sessions.", "lease")
	leaseIn       = desc("lease_received_bytes_total", "Bytes from the clients of all its sessions.", "lease")
	leaseOut      = desc("lease_sent_bytes_total", "Bytes to the clients of all its sessions.", "lease")
	leaseThrottle = desc("lease_throttle_seconds_total", "Time for which the compute share held all its sessions back.", "lease")
	leaseSaved    = desc("lease_saved_bytes_total", "Bytes that its sessions did not send because they compressed copies to the GPU, or the owner had stored what was copied.", "lease")
	leaseCuts     = desc("lease_cuts_total", "Cuts of its sessions' connections that are over.", "lease")
	leaseCut      = desc("lease_cut_seconds_total", "Time that those cuts lasted, added up.", "lease")
	leaseDue      = desc("lease_due_ratio", "Part of the GPU's time that the lease's policy gives it now, 0 to 1.", "lease", "gpu")
	leaseTime     = desc("lease_share_seconds_total", "Time on the GPU: held, busy of that, waited (its sessions added up), throttled of that, lent, borrowed.", "lease", "gpu", "kind")
	leaseTurns    = desc("lease_turns_total", "Turns that the lease had on the GPU.", "lease", "gpu")
	leaseOverruns = desc("lease_overruns_total", "Turns whose work went on beyond the grace, or that were taken away.", "lease", "gpu")
	leaseRevoked  = desc("lease_turns_revoked_total", "Turns that were taken away.", "lease", "gpu")
	leaseLongest  = desc("lease_overrun_longest_seconds", "Longest that work of the lease stayed on the GPU after its turn.", "lease", "gpu")
	leaseMismatch = desc("lease_memory_mismatch_bytes", "By how much NVML's figure for its sessions was above their account, or below it, at three looks in a row.", "lease", "gpu")

	sessInfo     = desc("session_info", "What a session is; always 1. Join it on session.", "session", "lease", "program", "client_pid", "worker_pid")
	sessUsed     = desc("session_memory_used_bytes", "Memory that the session uses, its context included.", "session", "gpu")
	sessPeak     = desc("session_memory_peak_bytes", "Most memory that the session has used.", "session", "gpu")
	sessCalls    = desc("session_calls_total", "Calls of the driver's interface.", "session")
	sessWaits    = desc("session_waits_total", "Calls that the client waited for.", "session")
	sessIn       = desc("session_received_bytes_total", "Bytes from the client.", "session")
	sessOut      = desc("session_sent_bytes_total", "Bytes to the client.", "session")
	sessLaunches = desc("session_launches_total", "Kernels started.", "session")
	sessErrors   = desc("session_errors_total", "Calls that failed.", "session")
	sessSaved    = desc("session_saved_bytes_total", "Bytes that it did not send because it compressed copies to the GPU, or the owner had stored what was copied.", "session")
	sessCuts     = desc("session_cuts_total", "Cuts of its connection that are over.", "session")
	sessCut      = desc("session_cut_seconds_total", "Time that those cuts lasted.", "session")
	sessThrottle = desc("session_throttle_seconds_total", "Time for which the compute share held the session back.", "session")
)

// Registry makes the registry of a daemon.
func Registry(s Source) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), process{}, collector{s})
	return r
}

type collector struct{ s Source }

// Describe sends nothing: what there is depends on the leases.
func (c collector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	out := sink{ch}
	out.gauge(build, 1, with("goversion", runtime.Version(), "version", c.s.Version))
	out.gauge(node, 1, with("node", c.s.Node))
	if c.s.Age != nil {
		age, known, why := c.s.Age()
		out.gauge(nvmlUp, truth(known && why == ""), none)
		if known {
			out.gauge(nvmlAge, age.Seconds(), none)
		}
	}
	if c.s.GPUs != nil {
		c.gpus(out)
	}
	if c.s.Leases != nil {
		c.leases(out)
	}
	if c.s.Mismatch != nil {
		for _, m := range c.s.Mismatch() {
			out.gauge(leaseMismatch, float64(m.Bytes), with("gpu", m.GPU, "lease", m.Lease))
		}
	}
	if c.s.Counters != nil {
		for _, n := range c.s.Counters() {
			if n.Gauge {
				out.gauge(desc(n.Name, n.Help), float64(n.Value), none)
			} else {
				out.count(desc(n.Name, n.Help), float64(n.Value), none)
			}
		}
	}
}

func (c collector) gpus(out sink) {
	lend := map[string]bool{}
	for _, g := range c.s.GPUs() {
		lend[g.UUID] = true
		gpu := with("gpu", g.UUID)
		out.gauge(gpuInfo, 1, with("gpu", g.UUID, "index", strconv.Itoa(g.Index), "name", g.Name, "pci", g.PCI))
		out.gauge(gpuHealthy, truth(g.Healthy), gpu)
		if !g.Drain.IsZero() {
			out.gauge(gpuDrained, float64(g.Drain.Since.Unix()), with("by", g.Drain.By, "gpu", g.UUID, "reason", g.Drain.Reason))
		}
		out.gauge(gpuMem, float64(g.Mem), gpu)
		if g.FreeMem <= g.Mem {
			out.gauge(gpuGranted, float64(g.Mem-g.FreeMem), gpu)
			out.gauge(gpuFree, float64(g.FreeMem), gpu)
		}
		if g.FreePercent <= 100 {
			out.gauge(gpuShare, float64(100-g.FreePercent)/100, gpu)
		}
		out.gauge(gpuLeases, float64(g.Leases), gpu)
	}
	if c.s.Sample == nil {
		return
	}
	s := c.s.Sample()
	if s == nil {
		return
	}
	for _, d := range s.GPUs {
		if !lend[d.UUID] {
			continue
		}
		gpu := with("gpu", d.UUID)
		if d.Total > 0 {
			out.gauge(gpuTotal, float64(d.Total), gpu)
			out.gauge(gpuUsed, float64(d.Used), gpu)
		}
		if d.UtilGPU != nil {
			out.gauge(gpuUtil, float64(*d.UtilGPU)/100, gpu)
		}
		if d.Temperature != nil {
			out.gauge(gpuTemp, float64(*d.Temperature), gpu)
		}
		if d.Power != nil {
			out.gauge(gpuPower, float64(*d.Power)/1000, gpu)
		}
		faults(out, d, gpu)
	}
}

// faults exports the GPU's own errors.
func faults(out sink, d inventory.Device, gpu labels) {
	f := d.Faults
	if f.SlowdownAt != nil {
		out.gauge(gpuSlowAt, float64(*f.SlowdownAt), gpu)
	}
	if f.Slowdown != nil {
		out.gauge(gpuSlowed, truth(f.Slowdown.Any), gpu)
	}
	if f.Uncorrected != nil {
		out.count(gpuECC, float64(*f.Uncorrected), gpu)
	}
	if f.Rows != nil || f.PagesPending != nil {
		out.gauge(gpuRemap, truth(f.Rows != nil && f.Rows.Pending || f.PagesPending != nil && *f.PagesPending), gpu)
	}
	if f.Rows != nil {
		out.gauge(gpuUnmap, truth(f.Rows.Failed), gpu)
	}
}

func (c collector) leases(out sink) {
	for _, l := range c.s.Leases() {
		if l.State == lease.Ended {
			continue
		}
		k := l.Request.Key
		who := []string{k.Job, l.Request.JobName, strconv.FormatUint(uint64(l.Request.UID), 10), l.Request.Account}
		if c.s.Nameless {
			clear(who)
		}
		byLease, byGPU := with("lease", l.ID), make([]labels, len(l.Grants))
		for i, g := range l.Grants {
			byGPU[i] = with("gpu", g.GPU, "lease", l.ID)
		}
		out.gauge(leaseInfo, 1, with("account", who[3], "cluster", k.Cluster, "host", l.Host, "job", who[0], "job_name", who[1], "lease", l.ID, "policy", l.Request.PolicyName(), "uid", who[2]))
		out.gauge(leaseSessions, float64(len(l.Sessions)), byLease)
		if l.State == lease.Granted {
			out.gauge(leaseIdle, l.Idle.Seconds(), byLease)
		}
		for i, g := range l.Grants {
			out.gauge(leaseGranted, float64(g.Mem), byGPU[i])
			out.gauge(leaseShare, float64(g.Percent)/100, byGPU[i])
			if i < len(l.Use) {
				u := l.Use[i]
				out.gauge(leaseUsed, float64(u.Used), byGPU[i])
				out.gauge(leasePeak, float64(u.Peak), byGPU[i])
				out.gauge(leaseFree, float64(u.Granted-min(u.Granted, u.Used)), byGPU[i])
			}
		}
		if c.s.Total != nil {
			t := c.s.Total(l.ID)
			n := &t.Counts
			out.count(leaseOpened, float64(t.Sessions), byLease)
			out.count(leaseFailed, float64(t.Failed), byLease)
			out.count(leaseBusy, t.GPUTime.Seconds(), byLease)
			out.count(leaseCalls, float64(n.Calls), byLease)
			out.count(leaseWaits, float64(n.Waits), byLease)
			out.count(leaseIn, float64(n.BytesIn), byLease)
			out.count(leaseOut, float64(n.BytesOut), byLease)
			out.count(leaseSaved, float64(n.Saved), byLease)
			out.count(leaseCuts, float64(n.Cuts), byLease)
			out.count(leaseCut, n.CutTime.Seconds(), byLease)
			throttled := n.Throttle
			if len(l.Shares) > 0 {
				throttled = 0
				for _, x := range l.Shares {
					throttled += x.Throttled
				}
			}
			out.count(leaseThrottle, throttled.Seconds(), byLease)
		}
		for i, x := range l.Shares {
			if i < len(l.Grants) {
				share(out, l.ID, l.Grants[i].GPU, byGPU[i], x)
			}
		}
		for _, s := range l.Sessions {
			c.session(out, l, s)
		}
	}
}

func share(out sink, id, gpu string, l labels, x lease.Share) {
	out.gauge(leaseDue, float64(x.Due)/10000, l)
	for kind, t := range map[string]time.Duration{
		"held": x.Held, "busy": x.Busy, "waited": x.Waited, "throttled": x.Throttled, "lent": x.Lent, "borrowed": x.Borrowed,
	} {
		out.count(leaseTime, t.Seconds(), with("gpu", gpu, "kind", kind, "lease", id))
	}
	out.count(leaseTurns, float64(x.Turns), l)
	out.count(leaseOverruns, float64(x.Overruns), l)
	out.count(leaseRevoked, float64(x.Revoked), l)
	out.gauge(leaseLongest, x.Longest.Seconds(), l)
}

func (c collector) session(out sink, l lease.Status, s lease.Session) {
	if !c.s.Nameless {
		out.gauge(sessInfo, 1, with("client_pid", strconv.FormatUint(uint64(s.Client), 10), "lease", l.ID, "program", s.Program, "session", s.ID, "worker_pid", strconv.Itoa(s.Worker.PID)))
	}
	for i, u := range s.Use {
		if i < len(l.Grants) {
			byGPU := with("gpu", l.Grants[i].GPU, "session", s.ID)
			out.gauge(sessUsed, float64(u.Used), byGPU)
			out.gauge(sessPeak, float64(u.Peak), byGPU)
		}
	}
	bySession := with("session", s.ID)
	out.count(sessCalls, float64(s.Counts.Calls), bySession)
	out.count(sessWaits, float64(s.Counts.Waits), bySession)
	out.count(sessIn, float64(s.Counts.BytesIn), bySession)
	out.count(sessOut, float64(s.Counts.BytesOut), bySession)
	out.count(sessLaunches, float64(s.Counts.Launches), bySession)
	out.count(sessErrors, float64(s.Counts.Errors), bySession)
	out.count(sessSaved, float64(s.Counts.Saved), bySession)
	out.count(sessCuts, float64(s.Counts.Cuts), bySession)
	out.count(sessCut, s.Counts.CutTime.Seconds(), bySession)
	out.count(sessThrottle, s.Counts.Throttle.Seconds(), bySession)
}

// sink takes the figures of one scrape.
type sink struct{ ch chan<- prometheus.Metric }

// labels are the values of some labels, in the order of their names. Many figures share them: those of a lease, for one.
type labels []*dto.LabelPair

// none are the labels of what there is one of.
var none = labels{}

// with makes labels of names and values in turn, in the order of the names. It returns nil if a value has no valid form, as a program's
// name that is no UTF-8: one client's odd name must not cost the others their metrics.
func with(pairs ...string) labels {
	l := make(labels, 0, len(pairs)/2)
	for i := 0; i < len(pairs); i += 2 {
		if !utf8.ValidString(pairs[i+1]) {
			return nil
		}
		l = append(l, &dto.LabelPair{Name: &pairs[i], Value: &pairs[i+1]})
	}
	return l
}

func (s sink) gauge(d *prometheus.Desc, v float64, l labels) {
	if l != nil {
		s.ch <- &figure{d: d, labels: l, gauge: &dto.Gauge{Value: &v}}
	}
}

func (s sink) count(d *prometheus.Desc, v float64, l labels) {
	if l != nil {
		s.ch <- &figure{d: d, labels: l, counter: &dto.Counter{Value: &v}}
	}
}

// figure is a prometheus.Metric whose labels are made once for many.
type figure struct {
	d       *prometheus.Desc
	labels  labels
	gauge   *dto.Gauge
	counter *dto.Counter
}

func (f *figure) Desc() *prometheus.Desc { return f.d }

func (f *figure) Write(m *dto.Metric) error {
	m.Label, m.Gauge, m.Counter = f.labels, f.gauge, f.counter
	return nil
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
