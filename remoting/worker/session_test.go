package worker

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

func floats(n int, f func(i int) float32) []byte {
	b := make([]byte, 0, 4*n)
	for i := range n {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f(i)))
	}
	return b
}

func TestVectorAdd(t *testing.T) {
	for _, listen := range []string{"", "tcp:127.0.0.1:0"} {
		_, addr := startWorker(t, func(c *Config) {
			if listen != "" {
				c.Listen = listen
			}
		})
		k := dial(t, addr, [16]byte{})
		if got := k.snap.Devices[0].TotalMem; got != testMem {
			t.Fatalf("total memory %d, granted %d", got, testMem)
		}
		names, rc := k.load(image0, 1)
		if rc != 0 {
			t.Fatalf("load: %d", rc)
		}
		if !slices.Contains(names, "vecadd") {
			t.Fatalf("kernels %q: vecadd missing", names)
		}
		k.bind(1, 1, "vecadd")
		r := k.wait(wire.OpKernelInfo, 1, u32(1), u32(0))
		if r.result != 0 {
			t.Fatalf("kernel info: %d", r.result)
		}
		want := cat(u32(4), u32(0), u32(8), u32(8), u32(8), u32(16), u32(8), u32(24), u32(4))
		if !bytes.HasPrefix(r.payload, want) {
			t.Fatalf("parameter layout %x", r.payload)
		}
		const n = 1 << 20
		var p [3]uint64
		for i := range p {
			var rc int32
			if p[i], rc = k.alloc(4 * n); rc != 0 {
				t.Fatalf("alloc: %d", rc)
			}
		}
		k.copyIn(p[0], 0, floats(n, func(i int) float32 { return float32(i) }))
		k.copyIn(p[1], 0, floats(n, func(i int) float32 { return 2 * float32(i) }))
		k.launch(1, 0, n/256, 256, cat(u64(p[0]), u64(p[1]), u64(p[2]), u32(n)))
		got := k.copyOut(p[2], 4*n, 0, 7)
		if !bytes.Equal(got, floats(n, func(i int) float32 { return 3 * float32(i) })) {
			t.Fatal("wrong sum")
		}
		for _, q := range p {
			k.free(q)
		}
		if r := k.streamSync(0); r.result != 0 {
			t.Fatalf("sync: %d", r.result)
		}
	}
}

func TestCopySizes(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	const room = 100 << 20
	p, rc := k.alloc(room)
	if rc != 0 {
		t.Fatal(rc)
	}
	b := make([]byte, room)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	k.streamCreate(1)
	for _, n := range []int{1, 4, 100, 64<<10 - 1, 64 << 10, 64<<10 + 1, 1<<20 - 1, 1 << 20, 1<<20 + 1, 5 << 20, room} {
		k.copyIn(p, 1, b[:n])
		if got := k.copyOut(p, n, 1, uint32(n)); !bytes.Equal(got, b[:n]) {
			t.Fatalf("%d bytes came back different", n)
		}
	}
	// Many small copies at different places, in two streams.
	for i := range 5000 {
		k.copyIn(p+uint64(i*300), uint32(i&1), b[i*7:i*7+300])
	}
	if r := k.wait(opCuCtxSynchronize, 1); r.result != 0 {
		t.Fatal(r.result)
	}
	got := k.copyOut(p, 5000*300, 0, 99)
	for i := range 5000 {
		if !bytes.Equal(got[i*300:i*300+300], b[i*7:i*7+300]) {
			t.Fatalf("small copy %d came back different", i)
		}
	}
}

// release ends a host function, which holds its stream, once it has been called.
func (k *conn) release(id uint32) {
	k.t.Helper()
	called := fmt.Sprintf("host %d", id)
	k.until(called, func() bool { return slices.Contains(k.order, called) })
	k.oneway(wire.OpHostFnDone, u32(id))
}

// slow is a client with a kernel 1 that takes as many ns as it is told, and streams from 1 on.
func slow(t *testing.T, streams uint32) *conn {
	t.Helper()
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatal(rc)
	}
	k.bind(1, 1, "slow")
	for id := range streams {
		k.streamCreate(id + 1)
	}
	return k
}

func TestAsyncCopyOut(t *testing.T) {
	k := slow(t, 2)
	const n = 3<<20 + 5
	p, _ := k.alloc(n)
	b := make([]byte, n)
	_, _ = rand.Read(b)
	k.copyIn(p, 1, b)
	k.launch(1, 1, 1, 1, u64(uint64(50*time.Millisecond)))
	k.oneway(wire.OpCopyOut, u64(p), u64(n), u32(1), u32(5))
	k.oneway(wire.OpCopyOut, u64(p), u64(10), u32(2), u32(6))
	if r := k.streamSync(1); r.result != 0 {
		t.Fatal(r.result)
	}
	k.mu.Lock()
	if !k.over[5] || !bytes.Equal(k.data[5], b) {
		t.Error("the reply of the synchronisation came before the data")
	}
	k.mu.Unlock()
	k.until("other stream's copy", func() bool { return k.over[6] })
	// Nobody synchronises: the bytes come by themselves.
	k.oneway(wire.OpCopyOut, u64(p), u64(n), u32(1), u32(8))
	k.until("copy by itself", func() bool { return k.over[8] })
}

func TestEvents(t *testing.T) {
	k := slow(t, 1)
	k.oneway(opCuEventCreate, u32(1), u32(0))
	k.launch(1, 1, 1, 1, u64(uint64(80*time.Millisecond)))
	k.oneway(opCuEventRecord, u32(1), u32(1))
	if r := k.wait(wire.OpEventWatch, 1, u32(1), u32(42), u32(0)); r.result != 600 {
		t.Fatalf("watch: %d", r.result)
	}
	// Destroyed while it is waited for.
	k.oneway(opCuEventDestroy_v2, u32(1))
	k.until("event", func() bool { return k.events[1] == 42 })
	k.oneway(opCuEventCreate, u32(2), u32(0))
	k.oneway(opCuEventRecord, u32(2), u32(1))
	if r := k.wait(opCuEventSynchronize, 1, u32(2)); r.result != 0 {
		t.Fatal(r.result)
	}
	if r := k.wait(wire.OpEventWatch, 1, u32(2), u32(1), u32(0)); r.result != 0 {
		t.Fatal(r.result)
	}
	if r := k.wait(wire.OpEventWatch, 1, u32(1), u32(1), u32(0)); r.result != 400 {
		t.Fatalf("destroyed event: %d", r.result)
	}
}

// An EVENT that was asked for without an answer comes for each record, whatever becomes of it.
func TestFollow(t *testing.T) {
	k := slow(t, 2)
	hold := func(id uint32) { k.oneway(wire.OpLaunchHost, u32(1), u32(id)) } // stream 1, until the function is done
	for id := uint32(1); id <= 4; id++ {
		k.oneway(opCuEventCreate, u32(id), u32(0))
	}
	record := func(event, gen, stream uint32) {
		k.oneway(opCuEventRecord, u32(event), u32(stream))
		k.oneway(wire.OpEventWatch, u32(event), u32(gen), u32(stream))
	}
	record(1, 1, 1) // done at once
	k.until("event 1", func() bool { return k.events[1] == 1 })
	// Recorded anew while the first record is looked for: what is between the two does not wait for the second.
	hold(8)
	record(1, 2, 1)
	record(2, 1, 1)
	hold(9)
	record(1, 3, 1)
	record(3, 1, 2) // another stream waits for nothing of it
	record(4, 1, 1)
	k.oneway(opCuEventDestroy_v2, u32(4)) // while it is looked for
	k.wait(wire.OpBeat, 1)                // all of it has been executed
	k.release(8)
	k.until("events 2 and 3", func() bool { return k.events[2] == 1 && k.events[3] == 1 })
	k.mu.Lock()
	if n := k.events[1]; n != 1 {
		t.Errorf("event 1 was done in its record %d, which stands for a newer one", n)
	}
	k.mu.Unlock()
	k.release(9)
	k.until("event 1 again", func() bool { return k.events[1] == 3 && k.events[4] == 1 })
	k.oneway(wire.OpEventWatch, u32(9), u32(7), u32(0)) // nobody's: somebody may be waiting for it all the same
	k.until("an event that is none", func() bool { return k.events[9] == 7 })
}

// One client thread waits while another goes on.
func TestWaitingAside(t *testing.T) {
	k := slow(t, 2)
	k.oneway(wire.OpLaunchHost, u32(1), u32(3)) // the stream is held until the function is done
	k.write(wire.Request{Op: opCuStreamSynchronize, Flags: wire.FlagWait, Call: 1000, Ctx: 1}, u32(1))
	for range 10 {
		if r := k.streamSync(2); r.result != 0 {
			t.Fatal(r.result)
		}
	}
	k.mu.Lock()
	if _, ok := k.replies[1000]; ok {
		t.Error("the wait has ended before its stream")
	}
	k.mu.Unlock()
	k.release(3)
	if r := k.await(opCuStreamSynchronize, 1000); r.result != 0 {
		t.Fatal(r.result)
	}
}

func TestPrint(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatal(rc)
	}
	k.bind(1, 1, "hello")
	k.launch(1, 0, 1, 1, u32(17))
	if r := k.streamSync(0); r.result != 0 {
		t.Fatal(r.result)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if string(k.printed) != "hello 17\n" {
		t.Fatalf("printed %q", k.printed)
	}
}

func TestHostFunction(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	k.onHost = func(id uint32) { time.Sleep(20 * time.Millisecond); k.oneway(wire.OpHostFnDone, u32(id)) }
	k.streamCreate(1)
	p, _ := k.alloc(4 << 20)
	for i := range uint32(5) {
		k.oneway(wire.OpCopyOut, u64(p), u64(100), u32(1), u32(50+i))
		k.oneway(wire.OpLaunchHost, u32(1), u32(9))
		if i%2 == 0 {
			// Freeing waits for the stream, which waits for the answer.
			k.free(p)
			p, _ = k.alloc(4 << 20)
		}
	}
	if r := k.streamSync(1); r.result != 0 {
		t.Fatal(r)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	n := 0
	for i, s := range k.order {
		if s == "host 9" {
			if want := "data " + string(rune('5')) + string(rune('0'+n)); !slices.Contains(k.order[:i], want) {
				t.Errorf("host function %d was called before its data: %q", n, k.order)
			}
			n++
		}
	}
	if n != 5 {
		t.Fatalf("%d calls: %q", n, k.order)
	}
}

// Bytes that wait for slots behind a host function must not keep its answer
// from being read.
func TestHostFunctionBeforeBulk(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	k.onHost = func(id uint32) { time.Sleep(100 * time.Millisecond); k.oneway(wire.OpHostFnDone, u32(id)) }
	k.streamCreate(1)
	const n = 3 * slotCount * slotSize
	p, rc := k.alloc(n)
	if rc != 0 {
		t.Fatal(rc)
	}
	b := make([]byte, n)
	_, _ = rand.Read(b)
	k.oneway(wire.OpLaunchHost, u32(1), u32(3))
	go k.copyIn(p, 1, b)
	k.until("host function", func() bool { return slices.Contains(k.order, "host 3") })
	if got := k.copyOut(p, n, 1, 4); !bytes.Equal(got, b) {
		// The blocking copy may have overtaken the end of the copies in, which
		// another thread sends; once more behind them.
		if got := k.copyOut(p, n, 1, 5); !bytes.Equal(got, b) {
			t.Fatal("bytes differ")
		}
	}
}

func TestErrors(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	k.launch(77, 0, 1, 1, nil) // no such kernel
	if r := k.streamSync(0); r.result != 400 {
		t.Fatalf("foreign kernel: %d", r.result)
	}
	if r := k.streamSync(0); r.result != 0 {
		t.Fatal("an error was told twice")
	}
	if r := k.streamSync(33); r.result != 400 {
		t.Fatalf("foreign stream: %d", r.result)
	}
	if r := k.wait(opCuStreamSynchronize, 99, u32(0)); r.result != 201 {
		t.Fatalf("foreign context: %d", r.result)
	}
	// What ends the life of something fails for itself alone: programs ignore that natively too.
	k.free(0x1234560000)
	p, _ := k.alloc(1000)
	k.free(p)
	k.free(p)
	if r := k.streamSync(0); r.result != 0 || len(k.errs) != 1 {
		t.Fatalf("frees of what is not there: %d, %d errors told", r.result, len(k.errs))
	}
	// An id of an old generation.
	k.streamCreate(5)
	k.oneway(opCuStreamDestroy_v2, u32(5))
	k.streamCreate(5 | 1<<24)
	if r := k.streamSync(5); r.result != 400 {
		t.Fatalf("destroyed stream: %d", r.result)
	}
	if r := k.streamSync(5 | 1<<24); r.result != 0 {
		t.Fatalf("new stream: %d", r.result)
	}
	// A kernel that crashes spoils the context, as CUDA has it.
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatal(rc)
	}
	k.bind(1, 1, "crash")
	k.launch(1, 0, 1, 1, u64(8))
	if r := k.streamSync(0); r.result != 700 {
		t.Fatalf("illegal address: %d", r.result)
	}
	if r := k.streamSync(0); r.result != 700 {
		t.Fatalf("the error does not stick: %d", r.result)
	}
}

func TestViolationsSayWhy(t *testing.T) {
	_, addr := startWorker(t, nil)
	for _, c := range []struct {
		name, want string
		send       func(k *conn)
	}{
		{"unknown operation", "unknown operation", func(k *conn) { k.oneway(0xEFFF) }},
		{"unknown control operation", "unknown operation", func(k *conn) { k.oneway(0xF0F0) }},
		{"short launch", "malformed", func(k *conn) { k.oneway(wire.OpLaunch, u32(1)) }},
		{"short copy", "malformed", func(k *conn) { k.oneway(wire.OpCopyIn, u32(1)) }},
		{"frame too large", "limit", func(k *conn) {
			var b [wire.RequestSize]byte
			binary.LittleEndian.PutUint32(b[:], wire.MaxPayload+1)
			_, _ = k.c.Write(b[:])
		}},
		{"memory to share, over a socket", "shares no memory", func(k *conn) {
			k.write(wire.Request{Op: wire.OpHostShare, Flags: wire.FlagWait, Call: 5}, u64(hostAt), u64(4096), u64(0))
		}},
		{"call without flag", "flags", func(k *conn) { k.write(wire.Request{Op: wire.OpBeat, Call: 5}) }},
	} {
		k := dial(t, addr, [16]byte{})
		c.send(k)
		k.until(c.name, func() bool { return k.bye != "" })
		if !strings.Contains(k.bye, c.want) {
			t.Errorf("%s: bye %q", c.name, k.bye)
		}
		k.c.Close()
	}
}

// A copy is not sent before an older one that it may have waited for on the GPU: they may have the
// same destination.
func TestNoChunkOvertakes(t *testing.T) {
	const busy = 600 // CUDA_ERROR_NOT_READY
	for _, c := range []struct {
		name string
		ids  []uint32
		ends []int // at which question a chunk is complete
		want []bool
	}{
		{"in order", []uint32{1, 2}, []int{0, 0}, []bool{true, true}},
		{"the older one was asked too early", []uint32{1, 2}, []int{1, 1}, []bool{true, true}},
		{"of three", []uint32{1, 2, 3}, []int{1, 1, 2}, []bool{true, true, true}},
		{"another stream's is slower", []uint32{1, 2}, []int{100, 0}, []bool{false, true}},
		{"two are slower, one of them ends meanwhile", []uint32{1, 2, 3}, []int{100, 3, 0}, []bool{false, true, true}},
		{"a delivery in its order", []uint32{1, 1, 1}, []int{0, 100, 0}, []bool{true, false, false}},
		{"its rest", []uint32{1, 1, 2}, []int{1, 1, 1}, []bool{true, true, true}},
	} {
		list := make([]chunk, len(c.ids))
		for i := range list {
			list[i] = chunk{id: c.ids[i], off: uint64(i)}
		}
		questions := 0
		got := complete(list, func(k *chunk) int32 {
			defer func() { questions++ }()
			if questions < c.ends[k.off] {
				return busy
			}
			return 0
		})
		for i := range got {
			if (got[i] == 0) != c.want[i] {
				t.Errorf("%s: chunk %d: %d", c.name, i, got[i])
			}
		}
	}
}
