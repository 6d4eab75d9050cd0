package worker

// The cap against memory that a program does not allocate by name.

import (
	"strings"
	"testing"
	"time"
)

// deepImage has a kernel with 5 KiB of local memory for each thread: 1,056 MiB
// for those that the simulated GPU can have resident.
var deepImage = []byte(".version 8.0\n.target sm_80\n.visible .entry deep()\n.visible .entry vecadd()\n\x00")

const deepBytes = 4096 * 270336

func TestLocalMemoryIsChargedAtLaunch(t *testing.T) {
	t.Setenv("SLUICE_SIM_MEM", "4G")
	for _, library := range []bool{true, false} {
		_, addr := startWorker(t, func(c *Config) { c.Mem = 1280 << 20 })
		k := dial(t, addr, [16]byte{})
		if _, rc := k.loadAs(deepImage, 1, library); rc != 0 {
			t.Fatal(rc)
		}
		name := "deep"
		k.bind(1, 1, name)
		free, _ := k.memInfo()
		p, rc := k.alloc(512 << 20)
		if rc != 0 {
			t.Fatal(rc)
		}
		k.launch(1, 0, 1, 1, u32(0))
		if r := k.streamSync(0); r.result != 2 {
			t.Fatalf("launch beyond the cap: %+v", r)
		}
		if again, _ := k.memInfo(); again != free-512<<20 {
			t.Fatalf("the refused launch cost %d bytes", int64(free-512<<20)-int64(again))
		}
		k.free(p)
		for range 3 {
			k.launch(1, 0, 1, 1, u32(0))
			if r := k.streamSync(0); r.result != 0 {
				t.Fatalf("launch within the cap: %+v", r)
			}
			if now, _ := k.memInfo(); free-now != deepBytes {
				t.Fatalf("local memory cost %d bytes, want %d", free-now, deepBytes)
			}
		}
		// The stack limit, set anew, gives it back.
		if r := k.wait(opCuCtxSetLimit, 1, u32(0), u64(1024)); r.result != 0 {
			t.Fatal(r.result)
		}
		if now, _ := k.memInfo(); now != free {
			t.Fatalf("%d bytes kept", free-now)
		}
		k.c.Close()
	}
}

func TestStreamsAreCharged(t *testing.T) {
	t.Setenv("SLUICE_SIM_STREAM_MEM", "2M")
	_, addr := startWorker(t, func(c *Config) { c.Mem = 256 << 20 })
	k := dial(t, addr, [16]byte{})
	free, _ := k.memInfo()
	made := 0
	for i := uint32(1); i <= 400 && k.deferredError() == 0; i++ {
		k.streamCreate(i)
		k.streamSync(i)
		made++
	}
	if k.deferredError() != 2 || uint64(made) > free>>21+streamsPerLook {
		t.Fatalf("%d streams of 2 MiB in %d MiB: error %d", made, free>>20, k.deferredError())
	}
	if left, total := k.memInfo(); left > total {
		t.Fatalf("%d of %d free", left, total)
	}
}

// What the driver takes without being asked, and too much of it, ends the
// session with the reason.
func TestSessionThatOutgrowsItsLeaseEnds(t *testing.T) {
	t.Setenv("SLUICE_SIM_STREAM_MEM", "64M") // fewer than are counted
	_, addr := startWorker(t, func(c *Config) { c.Mem = 256 << 20 })
	k := dial(t, addr, [16]byte{})
	other := dial(t, addr, [16]byte{})
	if _, rc := other.alloc(4096); rc != 0 {
		t.Fatal(rc)
	}
	for i := uint32(1); i < streamsPerLook; i++ {
		k.streamCreate(i)
	}
	start := time.Now()
	k.until("the end of the session", func() bool { return k.bye != "" })
	if !strings.Contains(k.bye, "larger fraction") || time.Since(start) > 5*time.Second {
		t.Fatalf("after %v: %q", time.Since(start), k.bye)
	}
	// The lease's other session goes on, with all that is now free.
	waitFor(t, "the other session", func() bool {
		p, rc := other.alloc(64 << 20)
		if rc == 0 {
			other.free(p)
		}
		return rc == 0
	})
}

// deferredError is the first error of a one-way call, 0 for none.
func (k *conn) deferredError() int32 {
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.errs) == 0 {
		return 0
	}
	return k.errs[0]
}
