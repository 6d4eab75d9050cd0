package inventory

import (
	"log/slog"
	"reflect"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
)

func ptr[T any](v T) *T { return &v }

func TestSlowdown(t *testing.T) {
	for mask, want := range map[uint64]Slowdown{
		0: {}, nvml.ClocksThrottleReasonGpuIdle | nvml.ClocksThrottleReasonSwPowerCap | nvml.ClocksThrottleReasonSwThermalSlowdown: {},
		nvml.ClocksThrottleReasonHwSlowdown: {Any: true}, nvml.ClocksThrottleReasonHwThermalSlowdown: {Any: true, Thermal: true},
		nvml.ClocksThrottleReasonHwPowerBrakeSlowdown | 1: {Any: true, Brake: true},
	} {
		if got := *slowdown(mask); got != want {
			t.Errorf("%#x: %+v, want %+v", mask, got, want)
		}
	}
}

// What NVML says of the simulated GPUs' errors: of one that has all of them, of one that has no ECC, and of one that is lost.
func TestSimulatedFaults(t *testing.T) {
	simulated(t)
	t.Setenv("SLUICE_SIM_ERRORS", "0:ecc=3,0:ecc_ever=12,0:rows=4,0:pending=1,0:failed=1,0:pages=1,0:temperature=91,0:throttle=0x48,1:noecc=1,2:lost=1")
	w, _ := watch(t, "nvml", Config{})
	first(t, w)
	s := w.Seen()
	if len(s) != 3 {
		t.Fatalf("%+v", s)
	}
	want := Faults{Uncorrected: ptr(uint64(3)), UncorrectedEver: ptr(uint64(12)), Rows: &Rows{Remapped: 4, Pending: true, Failed: true}, PagesPending: ptr(true),
		SlowdownAt: ptr(uint32(89)), ShutdownAt: ptr(uint32(92)), Slowdown: &Slowdown{Any: true, Thermal: true}}
	if !reflect.DeepEqual(s[0].Faults, want) || *s[0].Temperature != 91 || s[0].Error != "" {
		t.Errorf("%+v, faults %+v", s[0], s[0].Faults)
	}
	want = Faults{SlowdownAt: ptr(uint32(89)), ShutdownAt: ptr(uint32(92)), Slowdown: &Slowdown{}}
	if !reflect.DeepEqual(s[1].Faults, want) {
		t.Errorf("without ECC: %+v", s[1].Faults)
	}
	if d := s[2]; !d.Lost || d.UUID != "" || d.Index != 2 || d.Error != "it has no UUID: the GPU is lost" {
		t.Errorf("lost: %+v", d)
	}
	if g := w.Devices(); len(g) != 2 || !g[0].Healthy || !g[1].Healthy {
		t.Errorf("devices %+v", g)
	}
}

// What changes seldom is asked for once a minute, of each GPU; a question that fails ends no finding.
func TestSlowFaults(t *testing.T) {
	ever, rows, r := 0, 0, nvml.SUCCESS
	gpu := &mock.Device{
		GetTotalEccErrorsFunc: func(_ nvml.MemoryErrorType, kind nvml.EccCounterType) (uint64, nvml.Return) {
			if kind == nvml.AGGREGATE_ECC {
				ever++
			}
			return 1, nvml.SUCCESS
		},
		GetRemappedRowsFunc:                 func() (int, int, bool, bool, nvml.Return) { rows++; return 1, 1, true, false, r },
		GetRetiredPagesPendingStatusFunc:    func() (nvml.EnableState, nvml.Return) { return nvml.FEATURE_ENABLED, r },
		GetTemperatureThresholdFunc:         func(nvml.TemperatureThresholds) (uint32, nvml.Return) { return 90, nvml.SUCCESS },
		GetCurrentClocksThrottleReasonsFunc: func() (uint64, nvml.Return) { return 0, nvml.SUCCESS },
	}
	all := &mock.ExtendedInterface{LookupSymbolFunc: func(string) error { return nil }}
	now := time.Unix(1, 0)
	c := child{n: &mock.Interface{ExtensionsFunc: func() nvml.ExtendedInterface { return all }}, slow: map[string]slowFaults{}, now: func() time.Time { return now }}
	for i, want := range []struct {
		gpu        string
		after      time.Duration
		r          nvml.Return
		asked      int
		rows, well bool // are known, wait for nothing
	}{
		{"GPU-a", 0, nvml.SUCCESS, 1, true, false},
		{"GPU-a", 59 * time.Second, nvml.SUCCESS, 1, true, false},
		{"GPU-b", 0, nvml.SUCCESS, 2, true, false},
		{"GPU-a", time.Second, nvml.SUCCESS, 3, true, false},
		{"GPU-a", time.Minute, nvml.ERROR_UNKNOWN, 4, true, false},
		{"GPU-a", time.Minute, nvml.ERROR_NOT_SUPPORTED, 5, false, true},
	} {
		now, r = now.Add(want.after), want.r
		f := c.faults(gpu, want.gpu)
		if ever != want.asked || rows != want.asked || *f.Uncorrected != 1 || *f.SlowdownAt != 90 || f.Slowdown == nil {
			t.Errorf("%d: asked %d and %d times, want %d: %+v", i, ever, rows, want.asked, f)
		}
		if (f.Rows != nil) != want.rows || (f.PagesPending != nil) != want.rows || f.Rows != nil && f.Rows.Pending == want.well {
			t.Errorf("%d: %+v", i, f)
		}
	}
	if n := len(gpu.GetTotalEccErrorsCalls()) - ever; n != 6 {
		t.Errorf("what changes often was asked for %d times", n)
	}
}

func TestSeen(t *testing.T) {
	w := New(Config{GPUs: []string{"GPU-a", "GPU-b", "1", "3"}}, slog.New(slog.DiscardHandler))
	if s := w.Seen(); s != nil {
		t.Errorf("before the first sample: %+v", s)
	}
	hot := ptr(uint32(90))
	w.publish(Sample{GPUs: []Device{{UUID: "GPU-a", PCI: "a", Temperature: hot, Total: 4}, {UUID: "GPU-b", Index: 1, Temperature: hot}, {UUID: "GPU-c", Index: 2}, {Index: 3, Error: "it has no UUID: the GPU is lost", Lost: true}}})
	w.publish(Sample{GPUs: []Device{{UUID: "GPU-c", Index: 2}, {Index: 1, Unread: true, Error: "NVML cannot open it: no permission"}, {Index: 3, Error: "the GPU is lost", Lost: true}}})
	want := []Device{
		{UUID: "GPU-a", PCI: "a", Total: 4, Lost: true, Error: "NVML does not list it any more"},
		{UUID: "GPU-b", Index: 1, Unread: true, Error: "NVML cannot open it: no permission"},
		{Index: 3, Lost: true, Error: "the GPU is lost"},
	}
	if s := w.Seen(); !reflect.DeepEqual(s, want) {
		t.Errorf("%+v", s)
	}
	if g := w.Devices(); len(g) != 2 || g[0].Why != want[0].Error || g[1].Why != want[1].Error || g[0].Healthy {
		t.Errorf("%+v", g)
	}
}
