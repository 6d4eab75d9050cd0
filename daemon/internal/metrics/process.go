package metrics

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// client_golang's own process collector exports the node's network and, as 2^64,
// limits that do not exist. These are the daemon's, under the usual names.
var (
	procCPU   = prometheus.NewDesc("process_cpu_seconds_total", "Processor time of the daemon.", nil, nil)
	procRSS   = prometheus.NewDesc("process_resident_memory_bytes", "Resident memory of the daemon.", nil, nil)
	procFDs   = prometheus.NewDesc("process_open_fds", "Descriptors that the daemon has open.", nil, nil)
	procStart = prometheus.NewDesc("process_start_time_seconds", "Start of the daemon since 1970.", nil, nil)
)

var started = time.Now()

type process struct{}

// Describe implements prometheus.Collector.
func (process) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{procCPU, procRSS, procFDs, procStart} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (process) Collect(ch chan<- prometheus.Metric) {
	out := sink{ch}
	out.gauge(procStart, float64(started.UnixMilli())/1000, none)
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err == nil {
		out.count(procCPU, time.Duration(u.Utime.Nano()+u.Stime.Nano()).Seconds(), none)
	}
	// proc(5): the second field of statm is the resident pages.
	if b, err := os.ReadFile("/proc/self/statm"); err == nil {
		if f := strings.Fields(string(bytes.TrimSpace(b))); len(f) > 1 {
			if n, err := strconv.ParseUint(f[1], 10, 64); err == nil {
				out.gauge(procRSS, float64(n*uint64(os.Getpagesize())), none)
			}
		}
	}
	if d, err := os.Open("/proc/self/fd"); err == nil {
		names, _ := d.Readdirnames(-1)
		d.Close()
		out.gauge(procFDs, float64(len(names)), none)
	}
}
