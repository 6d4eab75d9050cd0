package worker

import (
	"encoding/binary"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// wrong encodes a call of a one-way row that the driver or the worker must refuse: its stream is the one
// given, its other handles are of nothing, its addresses are nobody's, its structures are missing.
func wrong(r *api.Row, stream uint32) []byte {
	var b []byte
	for _, q := range r.Wire {
		switch q.Mode {
		case api.Handle:
			if q.HKind == "STREAM" {
				b = append(b, u32(stream)...)
			} else {
				b = append(b, u32(0x3ffe)...)
			}
		case api.Value:
			switch api.ScalarSize(q.Elem) {
			case 8:
				b = binary.LittleEndian.AppendUint64(b, 0x1dead0003)
			case 4:
				b = append(b, u32(0x40000)...)
			case 2:
				b = append(b, 1, 0)
			case 1:
				b = append(b, 1)
			}
		case api.New:
			b = append(b, u32(40)...)
		case api.In, api.InArray:
			b = append(b, 0)
		}
	}
	return b
}

// refusedControl are the control operations that give work to a stream, refused for want of what they name.
func refusedControl(stream uint32) map[string]func(k *conn) {
	return map[string]func(k *conn){
		"LAUNCH":  func(k *conn) { k.launch(77, stream, 1, 1, nil) },
		"COPY_IN": func(k *conn) { k.copyIn(0x1dead0003, stream, make([]byte, 64)) },
		"COPY_OUT": func(k *conn) {
			k.oneway(wire.OpCopyOut, u64(0x1dead0003), u64(64), u32(stream), u32(9))
		},
	}
}

// TestNothingBehindAFailureSucceeds sends each one-way operation of the table that is given to a stream, so
// that it must be refused, and looks at what depends on it: a wait, events in both ways of asking, a stream
// that waits for such an event, a host function. A stream that has nothing to do with it is well.
func TestNothingBehindAFailureSucceeds(t *testing.T) {
	rows, err := api.Rows()
	if err != nil {
		t.Fatal(err)
	}
	const bad, good, heir = 1, 2, 3 // streams
	cases := refusedControl(bad)
	for i := range rows {
		if r := &rows[i]; r.Late == api.LateStream {
			cases[r.Symbol] = func(k *conn) { k.oneway(uint16(r.Op), wrong(r, bad)) }
		}
	}
	if len(cases) < 25 {
		t.Fatalf("only %d operations are given to streams", len(cases))
	}
	_, addr := startWorker(t, nil)
	for name, call := range cases {
		t.Run(name, func(t *testing.T) {
			k := dial(t, addr, [16]byte{})
			for _, st := range []uint32{bad, good, heir} {
				k.oneway(opCuStreamCreateWithPriority, u32(st), u32(1), u32(0)) // non-blocking
			}
			for ev := uint32(1); ev <= 3; ev++ {
				k.oneway(opCuEventCreate, u32(ev), u32(2))
			}
			k.oneway(opCuEventRecord, u32(3), u32(bad)) // before it: not of its concern
			call(k)
			k.oneway(opCuEventRecord, u32(1), u32(bad))
			k.oneway(opCuEventRecord, u32(2), u32(good))
			k.oneway(wire.OpLaunchHost, u32(bad), u32(5))
			k.oneway(wire.OpEventWatch, u32(1), u32(7), u32(bad))
			k.oneway(opCuStreamWaitEvent, u32(heir), u32(1), u32(0))
			k.until("the failure is told", func() bool { return k.failed["host 5"] != 0 && k.failed["event 1"] != 0 })
			want := k.deferredError()
			if want == 0 || k.failed["host 5"] != want || k.failed["event 1"] != want {
				t.Errorf("refused with %d; a host function behind it with %d, an event with %d", want, k.failed["host 5"], k.failed["event 1"])
			}
			for _, c := range []struct {
				what   string
				result int32
				want   int32
			}{
				{"a query of an event behind it", k.wait(wire.OpEventWatch, 1, u32(1), u32(8), u32(0)).result, want},
				{"a wait for an event behind it", k.wait(opCuEventSynchronize, 1, u32(1)).result, want},
				{"a wait for an event before it", k.wait(opCuEventSynchronize, 1, u32(3)).result, 0},
				{"a wait for an event of another stream", k.wait(opCuEventSynchronize, 1, u32(2)).result, 0},
				{"a wait for another stream", k.streamSync(good).result, 0},
				{"a wait for a stream that waited for the event", k.streamSync(heir).result, want},
				{"a wait for its stream", k.streamSync(bad).result, want},
				{"another wait for its stream", k.streamSync(bad).result, 0},
				{"the event again", k.wait(opCuEventSynchronize, 1, u32(1)).result, want},
			} {
				if c.result != c.want {
					t.Errorf("%s: %d, want %d", c.what, c.result, c.want)
				}
			}
			k.oneway(opCuEventRecord, u32(1), u32(bad))
			if r := k.wait(opCuEventSynchronize, 1, u32(1)); r.result != 0 {
				t.Errorf("the event recorded again: %d", r.result)
			}
		})
	}
}

// TestFailuresOfNoStream: what a one-way operation without a stream failed with is told by the next wait, once;
// the end of something's life is nobody's concern.
func TestFailuresOfNoStream(t *testing.T) {
	rows, err := api.Rows()
	if err != nil {
		t.Fatal(err)
	}
	_, addr := startWorker(t, nil)
	for i := range rows {
		r := &rows[i]
		if r.Late != api.LateAny && r.Late != api.LateExec && r.Late != api.LateNothing {
			continue
		}
		t.Run(r.Symbol, func(t *testing.T) {
			k := dial(t, addr, [16]byte{})
			k.oneway(uint16(r.Op), wrong(r, 0x3ffe))
			result := k.streamSync(0).result
			if again := k.streamSync(0).result; again != 0 {
				t.Errorf("told twice: %d, %d", result, again)
			}
			if refused := k.deferredError(); r.Late != api.LateNothing && result != refused {
				t.Errorf("refused with %d, the next wait says %d", refused, result)
			}
			if r.Late == api.LateNothing && result != 0 {
				t.Errorf("a wait says %d", result)
			}
		})
	}
}

// TestLegacyStreamInherits: blocking streams and the legacy default stream wait for each other, so a failure in
// one is behind the other; a wait for the context tells of all.
func TestLegacyStreamInherits(t *testing.T) {
	_, addr := startWorker(t, nil)
	for _, c := range []struct {
		name                  string
		flags                 uint32
		fails, waits          uint32
		want                  int32
		after, ctxAfterwaited int32
	}{
		{"blocking, legacy waits", 0, 1, 0, 400, 0, 0},
		{"legacy, blocking waits", 0, 0, 1, 400, 0, 0},
		{"non-blocking, legacy waits", 1, 1, 0, 0, 0, 400},
		{"legacy, non-blocking waits", 1, 0, 1, 0, 0, 400},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := dial(t, addr, [16]byte{})
			k.oneway(opCuStreamCreateWithPriority, u32(1), u32(c.flags), u32(0))
			k.launch(77, c.fails, 1, 1, nil)
			if r := k.streamSync(c.waits); r.result != c.want {
				t.Errorf("a wait: %d, want %d", r.result, c.want)
			}
			if r := k.wait(opCuCtxSynchronize, 1); r.result != c.ctxAfterwaited {
				t.Errorf("a wait for the context: %d, want %d", r.result, c.ctxAfterwaited)
			}
			if r := k.wait(opCuCtxSynchronize, 1); r.result != 0 {
				t.Errorf("a second wait for the context: %d", r.result)
			}
		})
	}
}

// TestCaptureHoldsFailure: a capture in which an operation failed ends with that error, and so does instantiating
// a graph to which a node could not be added.
func TestCaptureHoldsFailure(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	k.oneway(opCuStreamCreateWithPriority, u32(1), u32(1), u32(0))
	if r := k.wait(opCuStreamBeginCapture_v2, 1, u32(1), u32(2)); r.result != 0 {
		t.Fatalf("begin: %d", r.result)
	}
	k.launch(77, 1, 1, 1, nil)
	if r := k.wait(opCuStreamEndCapture, 1, u32(1), []byte{1}); r.result != 400 {
		t.Errorf("end of a capture that lacks a launch: %d", r.result)
	}
	k.oneway(opCuGraphCreate, u32(2), u32(0))
	k.oneway(opCuGraphAddMemsetNode, u32(3), u32(2), []byte{0}, u64(0), []byte{0}, u32(1))
	if r := k.wait(opCuGraphInstantiateWithFlags, 1, u32(4), u32(2), u64(0)); r.result == 0 {
		t.Error("a graph that lacks a node was instantiated")
	}
}

// TestFailedEdit: a launch of an executable graph that could not be changed as the program wanted fails, and what is behind
// it fails with it; once a wait has told of that, the graph can be launched as it was.
func TestFailedEdit(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	k.oneway(opCuStreamCreateWithPriority, u32(1), u32(1), u32(0))
	k.oneway(opCuGraphCreate, u32(2), u32(0))
	k.oneway(opCuGraphAddEmptyNode, u32(3), u32(2), []byte{0}, u64(0))
	for _, id := range []uint32{4, 5} {
		if r := k.wait(opCuGraphInstantiateWithFlags, 1, u32(id), u32(2), u64(0)); r.result != 0 {
			t.Fatalf("instantiate: %d", r.result)
		}
	}
	k.oneway(opCuStreamCreateWithPriority, u32(2), u32(1), u32(0))
	for ev := uint32(1); ev <= 2; ev++ {
		k.oneway(opCuEventCreate, u32(ev), u32(2))
	}
	k.oneway(opCuGraphExecMemsetNodeSetParams, u32(4), u32(3), []byte{0}, u32(1))
	for n := uint32(1); n <= 2; n++ { // the changed one in stream 1, the other in stream 2
		k.oneway(opCuGraphLaunch, u32(3+n), u32(n))
		k.oneway(opCuEventRecord, u32(n), u32(n))
	}
	again := func() int32 {
		k.oneway(opCuGraphLaunch, u32(4), u32(1))
		return k.streamSync(1).result
	}
	event := k.wait(opCuEventSynchronize, 1, u32(1)).result
	want := k.deferredError()
	if want == 0 || event != want {
		t.Errorf("refused with %d; an event behind a launch of that graph: %d", want, event)
	}
	for _, c := range []struct {
		what         string
		result, want int32
	}{
		{"a wait for its stream", k.streamSync(1).result, want},
		{"an event behind a launch of another graph", k.wait(opCuEventSynchronize, 1, u32(2)).result, 0},
		{"a launch after that", again(), 0},
	} {
		if c.result != c.want {
			t.Errorf("%s: %d, want %d", c.what, c.result, c.want)
		}
	}
}

// TestKernelNumbersAgain: once an image is unloaded the client may give its kernels' numbers to others, which a program that
// loads and unloads many soon does; the old ones are then nobody's.
func TestKernelNumbersAgain(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	for round := uint32(0); round < 600; round++ {
		id := round%256<<genShift | 1
		if _, rc := k.load(deepImage, id); rc != 0 {
			t.Fatalf("round %d: load: %d", round, rc)
		}
		k.bind(id, id, "deep")
		k.oneway(opCuLibraryUnload, u32(id))
	}
	k.launch(255<<genShift|1, 0, 1, 1, u32(0))
	if r := k.streamSync(0); r.result != 400 {
		t.Errorf("a launch of a kernel that is unloaded: %d", r.result)
	}
}

// TestFailuresStayFew: a client that never waits for what failed cannot make the worker remember more and more.
func TestFailuresStayFew(t *testing.T) {
	s, _ := activeSession(t)
	for id := range uint32(1000) {
		s.given = 1 + id // a stream that is not live
		s.failed(opCuMemsetD8Async, 400)
	}
	for id := range uint32(1000) {
		p := place{ctx: s.curReal, stream: 5000 + id}
		s.failures.add(failure{place: p, blocking: true, result: 401})
		s.failures.orphan(p)
	}
	if n := len(s.failures.list); n != 1 {
		t.Errorf("%d failures are kept", n)
	}
	if rc := s.tellAny(); rc != 400 || !s.failures.none() {
		t.Errorf("told %d", rc)
	}
}

// TestRefusedRecord: an event whose record was refused does not look as if it had been recorded, until it is.
func TestRefusedRecord(t *testing.T) {
	s, _ := activeSession(t)
	for _, c := range []struct{ result, want int32 }{{0, 0}, {400, 400}, {0, 0}} {
		s.recorded(3, legacyStream, c.result)
		if rc := s.tellEvent(3); rc != c.want {
			t.Errorf("recorded with %d: %d", c.result, rc)
		}
	}
}
