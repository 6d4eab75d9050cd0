package worker

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// operation is one of the wire's, with a payload that has its form.
type operation struct {
	op      uint16
	name    string
	carried bool
	payload []byte
}

// controlPayloads are of the form that docs/protocol.md gives the control operations.
var controlPayloads = map[string][]byte{
	"CTX_ACTIVATE": u32(0), "THREAD_STREAM": u32(9), "IMAGE_CHUNK": make([]byte, 56), "IMAGE_LOAD": loadRequest(image0, 9, true),
	"KERNEL_BIND": cat(u32(9), u32(9), []byte{1, 0}, []byte("k")), "KERNEL_INFO": cat(u32(9), u32(0)), "LAUNCH": make([]byte, 44),
	"COPY_IN_COMPRESSED": cat(u64(1<<40), u32(0), u32(0), u32(4), u32(0), u32(4), u32(1<<16|1), u32(7)),
	"COPY_IN":            cat(u64(1<<40), u32(0), u32(0), []byte{1}), "COPY_OUT": cat(u64(1<<40), u64(1), u32(0), u32(9)),
	"ARRIVED": cat(u32(0), u32(0)), "COPY_IN_3D": make([]byte, 89), "COPY_OUT_3D": make([]byte, 92), "EVENT_WATCH": cat(u32(9), u32(1)), "HOSTFN_DONE": u32(9),
	"LAUNCH_HOST": cat(u32(0), u32(9)), "OBSERVE": u32(0), "OBSERVE_MORE": cat(u32(0), u32(1)), "OBSERVE_LINKS": u32(0),
	"OBSERVE_TEXT": cat(u32(0), u32(0)), "OBSERVE_FACTS": u32(0), "BEAT": nil,
	"HOST_MAP": cat(u64(hostAt), u64(4096), u64(0)), "HOST_UNMAP": u64(hostAt), "HOST_READ": cat(u64(hostAt), u64(8)),
	"LINK_CREATE": cat(u32(9), u32(0)), "LINK_ADD": linkAddRequest(image0, 9, 1, nil, "k"), "LINK_COMPLETE": u32(9),
	"LINK_READ":  cat(u32(9), u32(0), u64(0), u64(1)),
	"HOST_WRITE": cat(u64(hostAt), u32(0), u32(0), []byte{1}), "HOST_MERGE": cat(u64(hostAt), u32(8), u32(0), make([]byte, 9)),
	"TRACE":      cat(u32(1), u32(0)),
	"HOST_WATCH": cat(u64(hostAt), u64(8)), "HOST_SHARE": cat(u64(hostAt), u64(4096), u64(0)),
	"BULK_OPEN": nil, "COPY_IN_BULK": cat(u64(1<<40), u64(1), u64(0), u64(1)), "BULK_DROP": u64(1),
	"CONTENT_FIND": cat(u32(1), u32(0), make([]byte, 32), u32(1), u32(0)), "COPY_IN_STORED": cat(u64(1<<40), make([]byte, 32), u32(0), u32(0), u32(1), u32(0)),
	"CONTENT_KEEP":   cat(u64(1<<40), u32(1), u32(0)),
	"COPY_IN_SHARED": cat(u64(1<<40), u64(hostAt), u64(1), u64(0)), "COPY_OUT_SHARED": cat(u64(1<<40), u64(hostAt), u64(1), u64(0)),
}

// operations are all rows of the API table, all control operations, and some numbers that are neither.
func operations(t *testing.T) []operation {
	t.Helper()
	rows, err := api.Rows()
	if err != nil {
		t.Fatal(err)
	}
	var all []operation
	for _, r := range rows {
		o := operation{op: uint16(r.Op), name: r.Symbol, carried: r.Forwarded()}
		if o.carried {
			o.payload = rowPayload(r)
		}
		all = append(all, o)
	}
	for op := uint16(wire.OpControl); !strings.HasPrefix(wire.ControlName(op), "operation"); op++ {
		name := wire.ControlName(op)
		p, ok := controlPayloads[name]
		if !ok {
			t.Fatalf("%s has no payload in controlPayloads", name)
		}
		all = append(all, operation{op, name, true, p})
	}
	for _, op := range []uint16{uint16(len(rows)), wire.OpControl - 1, wire.OpControl + 0x80, 0xffff} {
		all = append(all, operation{op: op, name: opName(op)})
	}
	return all
}

// rowPayload gives a row's parameters: no pointer is there, no output is wanted, numbers and handles are 0.
func rowPayload(r api.Row) (b []byte) {
	for _, p := range r.Wire {
		switch p.Mode {
		case api.Value:
			b = append(b, make([]byte, api.ScalarSize(p.Elem))...)
		case api.New:
			b = append(b, u32(77)...)
		case api.Handle:
			b = append(b, u32(0)...)
		case api.In, api.InArray, api.Out, api.Out8, api.OutHandle, api.OutHandles:
			b = append(b, 0)
		case api.InOut, api.In8:
			b = append(b, u64(0)...)
		case api.Str:
			b = append(b, u32(wire.NullString)...)
		}
	}
	return b
}

// try sends an operation and gives its reply, or why the session ended.
func (k *conn) try(o operation) (answered bool, bye string) {
	k.t.Helper()
	k.mu.Lock()
	k.call++
	call := k.call
	k.mu.Unlock()
	k.write(wire.Request{Op: o.op, Flags: wire.FlagWait, Call: call, Ctx: 0}, o.payload)
	stop := time.AfterFunc(20*time.Second, func() { k.c.Close() })
	defer stop.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	for {
		_, answered = k.replies[call]
		if answered || k.err != nil {
			return answered, k.bye
		}
		k.cond.Wait()
	}
}

// Every operation in a session of every kind: what the kind may not do ends the session with a reason.
func TestKinds(t *testing.T) {
	// What a kind that does not compute may do is written down here once more.
	observing := []string{"OBSERVE", "OBSERVE_MORE", "OBSERVE_LINKS", "OBSERVE_TEXT", "OBSERVE_FACTS", "BEAT"}
	const no = "not allowed in a session of kind observe"
	_, addr := startWorker(t, nil)
	all := operations(t)
	if len(all) < 550 {
		t.Fatalf("%d operations", len(all))
	}
	each := func(kind uint32, judge func(o operation, answered bool, bye string) bool) {
		work := make(chan operation)
		var wg sync.WaitGroup
		for range 4 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				var k *conn
				for o := range work {
					if k == nil {
						k = dialKind(t, addr, kind, [16]byte{})
					}
					answered, bye := k.try(o)
					if !judge(o, answered, bye) {
						t.Errorf("%s in a session of kind %s: answered %v, bye %q", o.name, wire.SessionName(kind), answered, bye)
					}
					if !answered {
						k = nil
					}
				}
			}()
		}
		for _, o := range all {
			work <- o
		}
		close(work)
		wg.Wait()
	}
	for kind := range uint32(300) {
		switch kind {
		case wire.SessionCompute:
			each(kind, func(o operation, answered bool, bye string) bool {
				return o.carried == answered || o.carried && !strings.Contains(bye, "unknown") && !strings.Contains(bye, "not allowed")
			})
		case wire.SessionObserve:
			each(kind, func(o operation, answered bool, bye string) bool {
				if slices.Contains(observing, o.name) {
					return answered
				}
				return !answered && bye == o.name+": "+no
			})
		case wire.SessionLease: // its connection carries no frames: nothing is answered, and none is the end of it
			_, addr := startWorker(t, nil) // nothing of this one's memory is granted
			c, _, err := dialHello(addr, testHello(kind))
			if err != nil {
				t.Fatal(err)
			}
			k := newConn(t, c)
			for _, o := range all {
				k.write(wire.Request{Op: o.op, Flags: wire.FlagWait, Call: 1}, o.payload)
			}
			c.(interface{ CloseWrite() error }).CloseWrite()
			k.until("the lease ends", func() bool { return k.err != nil || len(k.replies) > 0 || k.bye != "" })
			if len(k.replies) > 0 || k.bye != "" {
				t.Errorf("a lease's connection answered: %v, bye %q", k.replies, k.bye)
			}
		case wire.SessionAttach: // goes on with a session of another kind: there is none of that number
			h := testHello(kind)
			h.Mem = account.MaxSlots - 1 // the sessions above have the first numbers, and some of them may live
			_, _, err := dialHello(addr, h)
			if err == nil || !strings.Contains(err.Error(), "no such session") {
				t.Errorf("attach without a session: %v", err)
			}
		case wire.SessionTrace: // of another session, which a worker by hand does not give
			if _, _, err := dialHello(addr, testHello(kind)); err == nil || !strings.Contains(err.Error(), "sluice trace") {
				t.Errorf("a trace of a worker by hand: %v", err)
			}
		case wire.SessionBulk: // carries bytes of a session of another kind: there is none of that number
			h := testHello(kind)
			h.Mem = account.MaxSlots - 1
			if _, _, err := dialHello(addr, h); err == nil || !strings.Contains(err.Error(), "no such session") {
				t.Errorf("a bulk connection without a session: %v", err)
			}
		default:
			if wire.SessionKnown(kind) {
				t.Errorf("session of kind %d: this test does not know what it may do", kind)
			}
			if _, _, err := dialHello(addr, testHello(kind)); err == nil || !strings.Contains(err.Error(), "does not know") {
				t.Errorf("session of kind %d: %v", kind, err)
			}
		}
	}
}

// A session that was given no place among those that take turns gets no context, whatever its kind may do.
func TestNoTurnsNoContext(t *testing.T) {
	loadFakeDriver(t)
	for name, c := range map[string]struct {
		turns []control.Turn
		works bool
	}{
		"no turns are kept":       {control.NoTurns(1), true},
		"nothing said":            {nil, false},
		"a tenant without a gate": {[]control.Turn{{Tenant: 3}}, false},
	} {
		for _, op := range []operation{{op: wire.OpCtxActivate, payload: u32(0)}, {op: opCuCtxCreate_v2, payload: cat(u32(20), u32(0), u32(0))}} {
			b := frame(op.op, 1, op.payload)
			clear(b[wire.RequestSize-4 : wire.RequestSize]) // no context is current
			s, acct := fakeSession(t, nil, b)
			s.turns = c.turns
			err := s.run()
			if works := len(s.ctxs) == 1; works != c.works {
				t.Errorf("%s: %s made %d contexts", name, opName(op.op), len(s.ctxs))
			}
			if !c.works && (err == nil || !strings.Contains(err.Error(), "no turns on device 0")) {
				t.Errorf("%s: %s: session ended with %v", name, opName(op.op), err)
			}
			acct.Close()
		}
	}
}

// Contexts come from newContext alone, which holds the session to its turns.
func TestContextsHaveOneMaker(t *testing.T) {
	makes := regexp.MustCompile(`C\.(sl_ctx_retain|sl_ctx_create|call_cuCtxCreate\w*|call_cuDevicePrimaryCtxRetain)\(`)
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if n := len(makes.FindAll(b, -1)); n > 0 {
			seen[f] = n
		}
	}
	// The probe has no client.
	if len(seen) != 2 || seen["contexts.go"] != 2 || seen["probe.go"] != 1 {
		t.Errorf("contexts are made in %v, want newContext and the probe only", seen)
	}
}
