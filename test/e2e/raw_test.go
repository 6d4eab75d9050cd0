package e2e

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// rawClient speaks the protocol by hand, to say what no shim would.
type rawClient struct {
	t testing.TB
	c net.Conn
	w *worker
}

// opOf is the operation number of a driver function.
func opOf(t testing.TB, symbol string) uint16 {
	t.Helper()
	rows, err := api.Rows()
	if err != nil {
		t.Fatal(err)
	}
	for i := range rows {
		if rows[i].Symbol == symbol {
			return uint16(i)
		}
	}
	t.Fatalf("the API table has no %s", symbol)
	return 0
}

func goodHello(kind uint32) wire.Hello {
	return wire.Hello{Version: wire.Version, Kind: kind, Fingerprint: api.Fingerprint(), PID: uint32(os.Getpid()), UID: uint32(os.Getuid()), Program: "e2e"}
}

// connect connects and sends raw bytes.
func connect(t testing.TB, w *worker, first []byte) *rawClient {
	t.Helper()
	c, err := w.dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	r := &rawClient{t, c, w}
	r.send(first)
	return r
}

func helloBytes(h wire.Hello) []byte {
	var b [wire.HelloSize]byte
	h.Encode(&b)
	return b[:]
}

// session opens a compute session in the default lease.
func session(t testing.TB, w *worker) *rawClient {
	t.Helper()
	r := connect(t, w, helloBytes(goodHello(wire.SessionCompute)))
	_ = r.c.SetReadDeadline(time.Now().Add(10 * time.Second))
	p, err := wire.ReadWelcome(r.c)
	if err != nil {
		t.Fatalf("no session: %v", err)
	}
	var s wire.Snapshot
	if err := s.Decode(p); err != nil || len(s.Devices) == 0 {
		t.Fatalf("snapshot: %v, %d devices", err, len(s.Devices))
	}
	return r
}

func (r *rawClient) send(b []byte) {
	r.t.Helper()
	_ = r.c.SetWriteDeadline(time.Now().Add(10 * time.Second))
	if _, err := r.c.Write(b); err != nil {
		r.t.Fatalf("send: %v", err)
	}
}

// frame is a request as bytes; size may lie about the payload.
func frame(op uint16, flags uint16, call, ctx uint32, payload []byte) []byte {
	var b [wire.RequestSize]byte
	h := wire.Request{Size: uint32(len(payload)), Op: op, Flags: flags, Call: call, Ctx: ctx}
	h.Encode(&b)
	return append(b[:], payload...)
}

// ask sends a waiting call and returns its reply.
func (r *rawClient) ask(op uint16, call, ctx uint32, payload []byte) (wire.Reply, []byte) {
	r.t.Helper()
	r.send(frame(op, wire.FlagWait, call, ctx, payload))
	for {
		h, p, err := r.next(10 * time.Second)
		if err != nil {
			r.t.Fatalf("no reply to %s: %v", wire.ControlName(op), err)
		}
		if h.Kind == wire.FrameReply && h.Call == call {
			return h, p
		}
		if h.Kind == wire.FrameBye {
			r.t.Fatalf("the worker said goodbye: %s", p)
		}
	}
}

func (r *rawClient) next(limit time.Duration) (wire.Reply, []byte, error) {
	_ = r.c.SetReadDeadline(time.Now().Add(limit))
	var b [wire.ReplySize]byte
	var h wire.Reply
	if _, err := io.ReadFull(r.c, b[:]); err != nil {
		return h, nil, err
	}
	if err := h.Decode(&b); err != nil {
		return h, nil, err
	}
	p := make([]byte, h.Size)
	_, err := io.ReadFull(r.c, p)
	return h, p, err
}

// end reads until the worker closes the connection, at the latest after limit, and returns the
// reason it gave.
func (r *rawClient) end(limit time.Duration) string {
	r.t.Helper()
	deadline := time.Now().Add(limit)
	reason := ""
	for {
		h, p, err := r.next(time.Until(deadline))
		if h.Kind == wire.FrameBye {
			reason = string(p)
		}
		var timeout net.Error
		switch {
		case errors.As(err, &timeout) && timeout.Timeout():
			r.t.Fatalf("the connection is still open after %s", limit)
		case err != nil:
			return reason
		}
	}
}

func u32s(v ...uint32) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, x)
	}
	return b
}

// activate makes the primary context of device 0 and returns its id.
func (r *rawClient) activate() uint32 {
	r.t.Helper()
	if h, _ := r.ask(wire.OpCtxActivate, 1, 0, u32s(0)); h.Result != 0 {
		r.t.Fatalf("CTX_ACTIVATE: result %d", h.Result)
	}
	return 1
}

// alloc allocates device memory.
func (r *rawClient) alloc(ctx uint32, n uint64) uint64 {
	r.t.Helper()
	p := append([]byte{1}, binary.LittleEndian.AppendUint64(nil, n)...)
	h, out := r.ask(opOf(r.t, "cuMemAlloc_v2"), 2, ctx, p)
	if h.Result != 0 || len(out) < 8 {
		r.t.Fatalf("cuMemAlloc_v2: result %d, %d bytes", h.Result, len(out))
	}
	return binary.LittleEndian.Uint64(out)
}
