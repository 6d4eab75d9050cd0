package inventory

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestMain plays the child: the real one, or one that misbehaves.
func TestMain(m *testing.M) {
	switch os.Getenv("TEST_CHILD") {
	case "":
		os.Exit(m.Run())
	case "nvml":
		if err := Child(os.Getenv("TEST_LIB"), os.Stdin, os.Stdout); err != nil {
			os.Exit(1)
		}
	case "hang":
		fmt.Println(`{"seq":1,"gpus":[{"index":0,"uuid":"GPU-a","name":"x","total":1073741824}]}`)
		time.Sleep(time.Hour)
	case "wrong":
		fmt.Println(`{"seq":77,"gpus":[]}`)
		time.Sleep(time.Hour)
	case "garbage":
		fmt.Println("\x00\xff{")
	}
	os.Exit(0)
}

func watch(t *testing.T, child string, cfg Config) (*Watch, context.CancelFunc) {
	t.Helper()
	t.Setenv("TEST_CHILD", child)
	cfg.Command = []string{os.Args[0]}
	if cfg.Poll == 0 {
		cfg.Poll = 50 * time.Millisecond
	}
	w := New(cfg, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { w.Run(ctx); close(done) }()
	stop := func() { cancel(); <-done }
	t.Cleanup(stop)
	return w, stop
}

func first(t *testing.T, w *Watch) *Sample {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	s, err := w.First(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func simulated(t *testing.T) {
	t.Helper()
	lib, err := filepath.Abs("../../../build/simgpu/libnvidia-ml.so.1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(lib); err != nil {
		t.Fatal("make simgpu first: ", err)
	}
	t.Setenv("TEST_LIB", lib)
	t.Setenv("SLUICE_SIM_STATE", filepath.Join(t.TempDir(), "sim"))
	t.Setenv("SLUICE_SIM_DEVICES", "3")
	t.Setenv("SLUICE_SIM_MEM", "4G")
}

func TestSimulatedGPUs(t *testing.T) {
	simulated(t)
	w, _ := watch(t, "nvml", Config{GPUs: []string{"0", "2", "9"}, KeepMem: 512<<20 + 1,
		Overhead: func(uuid string) (uint64, error) {
			if strings.HasSuffix(uuid, "2") {
				return 0, errors.New("not measured")
			}
			return 64 << 20, nil
		}})
	s := first(t, w)
	if len(s.GPUs) != 3 || s.Driver == "" || s.GPUs[1].Total != 4<<30 {
		t.Errorf("sample %+v", s)
	}
	g := w.Devices()
	if len(g) != 2 || g[0].Index != 0 || g[1].Index != 2 || g[0].PCI == "" {
		t.Fatalf("devices %+v", g)
	}
	want := (s.GPUs[0].Total - s.GPUs[0].Reserved - 512<<20 - 1) >> 21 << 21
	if g[0].Mem != want || !g[0].Healthy || g[0].Overhead != 64<<20 {
		t.Errorf("%+v, want %d bytes", g[0], want)
	}
	if g[1].Healthy || g[1].Why != "not measured" {
		t.Errorf("%+v", g[1])
	}
	if m := w.Missing(); len(m) != 1 || m[0] != "9" {
		t.Errorf("missing %v", m)
	}
}

func TestNoLibrary(t *testing.T) {
	t.Setenv("TEST_LIB", "/nowhere/libnvidia-ml.so.1")
	w, _ := watch(t, "nvml", Config{})
	if s := first(t, w); !s.NoLibrary || s.Error == "" || len(s.GPUs) != 0 {
		t.Errorf("%+v", s)
	}
}

func TestHang(t *testing.T) {
	w, stop := watch(t, "hang", Config{})
	first(t, w)
	deadline := time.Now().Add(20 * time.Second)
	for w.Misses() == 0 {
		at := time.Now()
		w.Devices()
		if time.Since(at) > time.Second {
			t.Fatal("a hanging NVML blocks its readers")
		}
		if time.Now().After(deadline) {
			t.Fatal("the hang was not noticed")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if age, known, why := w.Age(); !known || why == "" || age < time.Second {
		t.Errorf("age %v %v %q", age, known, why)
	}
	if g := w.Devices(); len(g) != 1 || !g[0].Healthy {
		t.Errorf("what was known is gone: %+v", g)
	}
	stop()
}

func TestWrongAnswers(t *testing.T) {
	for _, c := range []string{"wrong", "garbage", "gone"} {
		w, stop := watch(t, c, Config{})
		ctx, cancel := context.WithTimeout(context.Background(), 1500*time.Millisecond)
		if s, err := w.First(ctx); err == nil {
			t.Errorf("%s: %+v", c, s)
		}
		cancel()
		if n := w.Starts(); n > 3 {
			t.Errorf("%s: %d starts without back-off", c, n)
		}
		stop()
	}
}

func TestVanishedGPU(t *testing.T) {
	w := New(Config{}, slog.New(slog.DiscardHandler))
	w.publish(Sample{GPUs: []Device{{UUID: "GPU-a", Total: 1 << 30}, {UUID: "GPU-b", Index: 1, Total: 1 << 30}}})
	w.publish(Sample{GPUs: []Device{{UUID: "GPU-b", Index: 1, Error: "the GPU is lost"}}})
	g := w.Devices()
	if len(g) != 2 || g[0].Healthy || g[0].Why == "" || g[1].Why != "the GPU is lost" || g[1].Mem != 1<<30 {
		t.Errorf("%+v", g)
	}
	w.publish(Sample{Error: "driver unloaded"})
	if _, _, why := w.Age(); why != "driver unloaded" || len(w.Last().GPUs) != 1 {
		t.Error("an NVML that fails as a whole wiped out what was known")
	}
}
