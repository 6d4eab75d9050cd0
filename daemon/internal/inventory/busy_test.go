package inventory

import (
	"context"
	"log/slog"
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func TestBusyTimes(t *testing.T) {
	s := func(pid, util uint32) nvml.ProcessUtilizationSample {
		return nvml.ProcessUtilizationSample{Pid: pid, SmUtil: util}
	}
	for _, c := range []struct {
		in   []nvml.ProcessUtilizationSample
		want []Busy
	}{
		{nil, nil},
		{[]nvml.ProcessUtilizationSample{s(9, 0)}, nil},
		{[]nvml.ProcessUtilizationSample{s(9, 50), s(7, 1)}, []Busy{{7, 100 * time.Millisecond}, {9, 5 * time.Second}}},
		{[]nvml.ProcessUtilizationSample{s(9, 50), s(9, 100), s(9, 0)}, []Busy{{9, 5 * time.Second}}},
		{[]nvml.ProcessUtilizationSample{s(0, 50), s(8, 101), s(8, ^uint32(0)), s(9, 100)}, []Busy{{9, 10 * time.Second}}},
	} {
		if got := busyTimes(c.in, 10*time.Second); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v: %v, want %v", c.in, got, c.want)
		}
	}
}

// A quick look can be had at any time; it is told of, and is no sample for anybody else.
func TestLook(t *testing.T) {
	simulated(t)
	t.Setenv("TEST_CHILD", "nvml")
	w := New(Config{Command: []string{os.Args[0]}, Poll: time.Hour}, slog.New(slog.DiscardHandler))
	told := make(chan *Sample, 10)
	w.OnSample(func(s *Sample) { told <- s })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { w.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	one := <-told
	before := time.Now()
	for range 3 { // one look does for all who want one
		w.Look()
	}
	two := <-told
	if one.Seq != 1 || one.Quick || two.Seq != 2 || !two.Quick || two.Asked.Before(before) || two.At.Before(two.Asked) ||
		len(two.GPUs) != 3 || two.GPUs[2].UUID != one.GPUs[2].UUID || two.GPUs[2].Total != 0 || one.GPUs[2].Total == 0 {
		t.Errorf("%+v, %+v", one, two)
	}
	if s := w.Last(); s.Seq != 1 || w.Devices()[0].Mem == 0 {
		t.Errorf("a quick look is taken for a sample: %+v", s)
	}
	w.Look()
	if three := <-told; three.Seq > 4 {
		t.Errorf("%d looks", three.Seq)
	}
}
