package worker

import (
	"bytes"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// held is a session whose streams can be held up, for so long: stream 1 is non-blocking, at is device memory of 64 bytes, which are zero.
func held(t *testing.T, addr string, d time.Duration) (k *conn, at uint64, hold func(stream uint32)) {
	t.Helper()
	k = dial(t, addr, [16]byte{})
	k.streamCreate(1)
	if _, rc := k.load(image0, 1); rc != 0 {
		t.Fatalf("load: %d", rc)
	}
	k.bind(2, 1, "slow")
	at, rc := k.alloc(64)
	if rc != 0 {
		t.Fatalf("alloc: %d", rc)
	}
	k.copyIn(at, 0, make([]byte, 64))
	if r := k.wait(opCuCtxSynchronize, 1); r.result != 0 {
		t.Fatalf("synchronize: %d", r.result)
	}
	return k, at, func(stream uint32) { k.launch(2, stream, 1, 1, u64(uint64(d))) }
}

var fresh = bytes.Repeat([]byte{7}, 64)

func (k *conn) arrived(stream uint32, later uint32) {
	k.oneway(wire.OpArrived, u32(stream), u32(later))
}

func (k *conn) expect(what string, got []byte, want []byte) {
	k.t.Helper()
	if !bytes.Equal(got, want) {
		k.t.Errorf("%s: %v, want %v", what, got[:4], want[:4])
	}
}

// TestArrived: what follows in other streams, known or made later, blocking or not, comes after copies that the client takes as arrived.
func TestArrived(t *testing.T) {
	_, addr := startWorker(t, nil)
	const copying, legacy = 1, 0
	for name, c := range map[string]struct {
		from   uint32
		stream func(k *conn) uint32 // another
		after  bool                 // make it after the copy
	}{
		"legacy":            {from: copying, stream: func(*conn) uint32 { return legacy }},
		"non-blocking":      {from: copying, stream: func(k *conn) uint32 { k.streamCreate(5); return 5 }},
		"blocking":          {from: copying, stream: func(k *conn) uint32 { k.oneway(opCuStreamCreate, u32(5), u32(0)); return 5 }},
		"made later":        {from: copying, stream: func(k *conn) uint32 { k.streamCreate(5); return 5 }, after: true},
		"of a thread":       {from: copying, stream: func(k *conn) uint32 { k.oneway(wire.OpThreadStream, u32(5)); return 5 }, after: true},
		"from legacy":       {from: legacy, stream: func(k *conn) uint32 { return copying }},
		"from legacy later": {from: legacy, stream: func(k *conn) uint32 { k.streamCreate(5); return 5 }, after: true},
	} {
		t.Run(name, func(t *testing.T) {
			k, at, hold := held(t, addr, 100*time.Millisecond)
			var other uint32
			if !c.after {
				other = c.stream(k)
			}
			hold(c.from)
			k.copyIn(at, c.from, fresh)
			k.arrived(c.from, 0)
			if c.after {
				other = c.stream(k)
			}
			k.expect("read in another stream", k.copyOut(at, 64, other, 1), fresh)
			hold(c.from)
			k.copyIn(at, c.from, make([]byte, 64))
			k.arrived(c.from, 0)
			k.oneway(opCuMemsetD8Async, u64(at), []byte{9}, u64(64), u32(other))
			if r := k.wait(opCuCtxSynchronize, 1); r.result != 0 {
				t.Errorf("synchronize: %d", r.result)
			}
			k.expect("filled in another stream", k.copyOut(at, 64, other, 1), bytes.Repeat([]byte{9}, 64))
			// Copies in a row, each taken as arrived, and one in another stream behind them.
			hold(c.from)
			for i := range byte(20) {
				k.copyIn(at, c.from, bytes.Repeat([]byte{i}, 64))
				k.arrived(c.from, 0)
			}
			k.copyIn(at, other, fresh)
			k.arrived(other, 0)
			k.expect("copied in another stream", k.copyOut(at, 64, c.from, 1), fresh)
			k.copyIn(at, c.from, bytes.Repeat([]byte{8}, 64))
			k.arrived(c.from, 0)
			k.expect("copied last", k.copyOut(at, 64, other, 1), bytes.Repeat([]byte{8}, 64))
		})
	}
}

// TestArrivedLater: a blocking copy behind other work holds up no stream that there is, but those that are made later; work that the
// client gives behind the copy does not.
func TestArrivedLater(t *testing.T) {
	_, addr := startWorker(t, func(c *Config) { c.Bulk = 1 })
	// Each prepares the copy, and gives what makes it.
	for name, prepare := range map[string]func(k *conn, at uint64) func(){
		"by its last frame": func(k *conn, at uint64) func() {
			return func() { k.oneway(wire.OpCopyIn, u64(at), u32(0), u32(1), fresh) }
		},
		"by its last part": func(k *conn, at uint64) func() {
			b := &bulkSession{conn: k, addr: addr}
			b.Decode(wire.NewDecoder(k.wait(wire.OpBulkOpen, 1).payload))
			put(k.t, b.mustOpen(wire.BulkToWorker), 1, fresh)
			return func() {
				k.oneway(wire.OpCopyInBulk, u64(at), u64(1), u32(0), u32(1), u32(uint32(len(fresh))), u32(0))
			}
		},
		"by a frame": func(k *conn, at uint64) func() { return func() { k.copyIn(at, 0, fresh); k.arrived(0, 1) } },
	} {
		t.Run(name, func(t *testing.T) {
			k, at, hold := held(t, addr, 500*time.Millisecond) // within which the worker answers two calls
			arrive := prepare(k, at)
			hold(0)
			arrive()
			k.memInfo() // holds up nothing
			k.oneway(opCuEventCreate, u32(1), u32(2))
			k.oneway(opCuEventRecord, u32(1), u32(0))
			if r := k.wait(wire.OpEventWatch, 1, u32(1), u32(1), u32(0)); r.result != 600 {
				t.Errorf("a call that has nothing to do with it has waited for the copy: %d", r.result)
			}
			hold(0)
			k.oneway(opCuEventRecord, u32(1), u32(0))
			k.streamCreate(5)
			k.expect("read in a stream that was made behind it", k.copyOut(at, 64, 5, 1), fresh)
			if r := k.wait(wire.OpEventWatch, 1, u32(1), u32(2), u32(0)); r.result != 600 {
				t.Errorf("the new stream has waited for work behind the copy: %d", r.result)
			}
		})
	}
}

// TestArrivedAwaited checks that an operation waits for the copies if its streams or memory are not known, or while a stream captures.
func TestArrivedAwaited(t *testing.T) {
	_, addr := startWorker(t, nil)
	for name, op := range map[string]func(k *conn){
		"free memory":   func(k *conn) { k.memInfo() },
		"a new context": func(k *conn) { k.wait(opCuCtxCreate_v2, 0, u32(0x40), u32(0), u32(0)) },
		"a capture":     func(k *conn) { k.wait(opCuStreamBeginCapture_v2, 1, u32(6), u32(2)) },
	} {
		t.Run(name, func(t *testing.T) {
			k, at, hold := held(t, addr, 100*time.Millisecond)
			k.streamCreate(6)
			k.oneway(opCuEventCreate, u32(1), u32(2))
			hold(1)
			k.copyIn(at, 1, fresh)
			k.oneway(opCuEventRecord, u32(1), u32(1))
			k.arrived(1, 0)
			op(k)
			if r := k.wait(wire.OpEventWatch, 1, u32(1), u32(1), u32(0)); r.result != 0 {
				t.Errorf("the copies are not there: %d", r.result)
			}
			// Copies that arrive while a stream captures, or just before: the capture is not spoilt.
			k.copyIn(at, 1, make([]byte, 64))
			k.arrived(1, 0)
			k.launch(2, 6, 1, 1, u64(1))
			if name == "a capture" {
				if r := k.wait(opCuStreamEndCapture, 1, u32(6), []byte{1}); r.result != 0 {
					t.Errorf("the capture: %d", r.result)
				}
			}
		})
	}
}

// TestArrivedFailure: a copy that failed and was taken as arrived fails what is given to any stream behind it, until a wait has told of it.
func TestArrivedFailure(t *testing.T) {
	_, addr := startWorker(t, nil)
	for name, tell := range map[string]func(k *conn) int32{
		"its stream":     func(k *conn) int32 { return k.streamSync(1).result },
		"another stream": func(k *conn) int32 { return k.streamSync(0).result },
		"a new stream":   func(k *conn) int32 { k.streamCreate(7); return k.streamSync(7).result },
		"an event":       func(k *conn) int32 { return k.wait(opCuEventSynchronize, 1, u32(3)).result },
		"the context":    func(k *conn) int32 { return k.wait(opCuCtxSynchronize, 1).result },
	} {
		t.Run(name, func(t *testing.T) {
			k, at, _ := held(t, addr, 100*time.Millisecond)
			for ev := uint32(1); ev <= 3; ev++ {
				k.oneway(opCuEventCreate, u32(ev), u32(2))
			}
			k.oneway(opCuEventRecord, u32(3), u32(0)) // before it
			k.copyIn(0x1dead0003, 1, fresh)
			k.arrived(1, 0)
			k.streamCreate(5)
			k.oneway(opCuEventRecord, u32(1), u32(5))
			k.oneway(wire.OpLaunchHost, u32(5), u32(5))
			k.oneway(wire.OpLaunchHost, u32(0), u32(6))
			k.until("host functions are refused", func() bool { return k.failed["host 5"] != 0 && k.failed["host 6"] != 0 })
			want := k.deferredError()
			if r := k.wait(wire.OpEventWatch, 1, u32(1), u32(1), u32(0)); r.result != want {
				t.Errorf("an event behind it: %d, want %d", r.result, want)
			}
			if rc := tell(k); rc != want {
				t.Errorf("told %d, want %d", rc, want)
			}
			k.copyIn(at, 1, fresh)
			k.arrived(1, 0)
			if r := k.streamSync(5); r.result != 0 {
				t.Errorf("after it was told: %d", r.result)
			}
			k.expect("after it was told", k.copyOut(at, 64, 5, 1), fresh)
		})
	}
}

// TestArrivedEnds: the stream, or the context, goes while copies in it are taken as arrived.
func TestArrivedEnds(t *testing.T) {
	_, addr := startWorker(t, nil)
	k, at, hold := held(t, addr, 100*time.Millisecond)
	hold(1)
	k.copyIn(at, 1, fresh)
	k.arrived(1, 0)
	k.oneway(opCuStreamDestroy_v2, u32(1))
	k.expect("the stream is gone", k.copyOut(at, 64, 0, 1), fresh)
	hold(0)
	k.oneway(wire.OpCopyIn, u64(at), u32(0), u32(1), fresh)
	k.arrived(0, 1)
	k.arrived(0, 0)
	if r := k.wait(opCuDevicePrimaryCtxReset_v2, 0, u32(0)); r.result != 0 {
		t.Fatalf("reset: %d", r.result)
	}
	if r := k.wait(wire.OpCtxActivate, 0, u32(0)); r.result != 0 {
		t.Fatalf("activate: %d", r.result)
	}
	k.streamCreate(3)
	at, _ = k.alloc(64)
	k.copyIn(at, 3, fresh)
	k.arrived(3, 0)
	k.expect("a new context", k.copyOut(at, 64, 0, 1), fresh)
	for st := uint32(100); st < 100+3*maxArrivals; st++ {
		k.streamCreate(st)
		k.copyIn(at, st, bytes.Repeat([]byte{byte(st)}, 64))
		k.arrived(st, st%2)
		k.arrived(st, 0)
	}
	k.expect("many streams", k.copyOut(at, 64, 0, 1), bytes.Repeat([]byte{99 + 3*maxArrivals}, 64))
}
