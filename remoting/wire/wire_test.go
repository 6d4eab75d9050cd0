package wire

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestDecoderErrorsStick(t *testing.T) {
	d := NewDecoder([]byte{1, 2, 3})
	if d.U16() != 0x0201 || d.Err() != nil {
		t.Fatal("u16")
	}
	if d.U32() != 0 || !errors.Is(d.Err(), ErrShort) {
		t.Fatal("short read not noticed")
	}
	if d.U8() != 0 || d.Rest() != nil || d.Str() != "" || d.Bytes(0) != nil {
		t.Fatal("reads after an error give something")
	}
	if d := NewDecoder([]byte{0xff, 0xff, 0xff, 0xff}); d.Bytes(-1) != nil || d.Err() == nil {
		t.Fatal("negative length")
	}
	if d := NewDecoder([]byte{0xff, 0xff, 0xff, 0x7f, 1}); d.Count(8, 1<<31-1) != 0 || !errors.Is(d.Err(), ErrShort) {
		t.Fatal("count beyond the message")
	}
	if d := NewDecoder([]byte{9, 0, 0, 0}); d.Count(0, 8) != 0 || !errors.Is(d.Err(), ErrRange) {
		t.Fatal("count beyond the limit")
	}
}

func TestCodecRoundTrip(t *testing.T) {
	e := new(Encoder)
	e.U8(1)
	e.U16(2)
	e.U32(3)
	e.U64(4)
	e.I8(-1)
	e.I16(-2)
	e.I32(-3)
	e.I64(-4)
	e.F32(1.5)
	e.F64(-2.5)
	e.Str("text")
	e.U32(NullString)
	e.Fixed("long name", 5)
	e.Align(8)
	d := NewDecoder(e.Buf())
	ok := d.U8() == 1 && d.U16() == 2 && d.U32() == 3 && d.U64() == 4 && d.I8() == -1 && d.I16() == -2 && d.I32() == -3 &&
		d.I64() == -4 && d.F32() == 1.5 && d.F64() == -2.5 && d.Str() == "text" && d.Str() == "" && fixedString(d.Bytes(5)) == "long"
	d.Rest()
	if !ok || d.Done() != nil {
		t.Fatal("fields differ", d.Err())
	}
}

func TestHeaders(t *testing.T) {
	r := Request{Size: 7, Op: OpLaunch, Flags: FlagWait, Call: 9, Ctx: 3}
	var b [RequestSize]byte
	r.Encode(&b)
	var q Request
	if err := q.Decode(&b); err != nil || q != r {
		t.Fatal(q, err)
	}
	for _, bad := range []Request{{Size: MaxPayload + 1}, {Flags: 2}, {Flags: FlagWait}, {Call: 1}} {
		bad.Encode(&b)
		if q.Decode(&b) == nil {
			t.Errorf("%+v accepted", bad)
		}
	}
	p := Reply{Size: 1, Kind: FrameData, Op: 2, Call: 3, Result: -4, Arg: 5}
	var c [ReplySize]byte
	p.Encode(&c)
	var o Reply
	if err := o.Decode(&c); err != nil || o != p {
		t.Fatal(o, err)
	}
}

func testSnapshot() Snapshot {
	d := Device{DeviceHead: DeviceHead{
		Name: "GPU", UUID: [16]byte{1, 2}, TotalMem: 20 << 30, PhysicalMem: 140 << 30, PCIBus: 1, PCIBusID: "0000:01:00.0",
		GranMin: 2 << 20, GranRec: 2 << 20, PrioGreatest: -5, CCMajor: 9, NAttr: 3,
	},
		Attr: []int32{0, 1024, -1}, AttrOK: []bool{false, true, true},
	}
	d.Limits[0] = 1024
	e := d
	e.Attr, e.AttrOK, e.NAttr = []int32{}, []bool{}, 0
	return Snapshot{DriverVersion: 13000, KeepaliveMS: 10000, DriverString: "580.1", DriverBranch: "r580_00", Devices: []Device{d, e}}
}

func TestSnapshot(t *testing.T) {
	s := testSnapshot()
	var e Encoder
	s.Encode(&e)
	if e.Len()%8 != 0 {
		t.Fatalf("%d bytes", e.Len())
	}
	var got Snapshot
	if err := got.Decode(e.Buf()); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, s) {
		t.Fatalf("%+v\n%+v", got, s)
	}
	for n := range e.Len() {
		if err := got.Decode(e.Buf()[:n]); err == nil {
			t.Fatalf("%d bytes of %d accepted", n, e.Len())
		}
	}
}

func TestWelcome(t *testing.T) {
	p, err := ReadWelcome(bytes.NewReader(AppendWelcome(nil, StatusOK, []byte("hi"))))
	if err != nil || string(p) != "hi" {
		t.Fatal(p, err)
	}
	_, err = ReadWelcome(bytes.NewReader(AppendWelcome(nil, StatusLease, []byte("no such lease"))))
	var r *Refusal
	if !errors.As(err, &r) || r.Status != StatusLease || r.Error() != "no such lease" {
		t.Fatal(err)
	}
}

// pair is two ends of a socket: the worker's stream and the client's file.
func pair(t *testing.T, keepalive time.Duration) (Stream, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewSocketStream(fds[0], keepalive)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[1]), "client")
	t.Cleanup(func() { f.Close(); s.Close() })
	return s, f
}

func frame(op uint16, payload []byte) []byte {
	var b [RequestSize]byte
	(&Request{Size: uint32(len(payload)), Op: op}).Encode(&b)
	return append(b[:], payload...)
}

func TestReader(t *testing.T) {
	s, f := pair(t, time.Second)
	r, err := NewReader(s)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	sizes := []int{0, 1, 100, 4096, readBuffer - RequestSize, readBuffer, readBuffer + 1, 3 << 20, 5, 0}
	var want [][]byte
	for _, n := range sizes {
		b := make([]byte, n)
		_, _ = rand.Read(b)
		want = append(want, b)
	}
	go func() {
		for round := range 4 {
			for i, b := range want {
				_, _ = f.Write(frame(uint16(10*round+i), b))
			}
		}
		f.Close()
	}()
	var h Request
	for round := range 4 {
		for i, b := range want {
			if err := r.Next(&h); err != nil {
				t.Fatal(err)
			}
			if int(h.Size) != len(b) || h.Op != uint16(10*round+i) {
				t.Fatalf("frame %d: %+v", i, h)
			}
			var got []byte
			switch round {
			case 0:
				got, err = r.Payload()
			case 1: // in pieces, some straight
				n := min(len(b), 16)
				var p []byte
				if p, err = r.Peek(n); err == nil {
					got = append(got, p...)
					rest := make([]byte, r.Left())
					err = r.ReadFull(rest)
					got = append(got, rest...)
				}
			case 2:
				err = r.Skip()
				got = b
			case 3:
				got = make([]byte, len(b))
				err = r.ReadFull(got)
			}
			if err != nil || !bytes.Equal(got, b) {
				t.Fatalf("round %d frame %d: %v", round, i, err)
			}
			if _, err := r.Peek(1); !errors.Is(err, ErrShort) {
				t.Fatal("read beyond the frame")
			}
			r.Done()
		}
	}
	if err := r.Next(&h); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

func TestReadAhead(t *testing.T) {
	s, f := pair(t, time.Second)
	r, err := NewReader(s)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var h Request
	_, _ = f.Write(append(frame(1, []byte("first")), frame(2, []byte("second"))...))
	if err := r.Next(&h); err != nil {
		t.Fatal(err)
	}
	p, _ := r.Payload()
	r.Done()
	for round := range 3 {
		go func() {
			_, _ = f.Write(append(frame(3, bytes.Repeat([]byte{byte(round)}, readBuffer*2)), frame(4, []byte("now"))...))
		}()
		var now int
		for now == 0 {
			err := r.ReadAhead(10*time.Millisecond, func(h *Request, p []byte) bool {
				if h.Op == 4 {
					now++
				}
				return h.Op == 4
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		if string(p) != "first" {
			t.Fatalf("the frame in execution was overwritten: %q", p)
		}
	}
	_, _ = f.Write(frame(5, nil))
	for _, op := range []uint16{2, 3, 3, 3, 5} {
		if err := r.Next(&h); err != nil {
			t.Fatal(err)
		}
		p, err := r.Payload()
		r.Done()
		if err != nil || h.Op != op || len(p) != int(h.Size) {
			t.Fatalf("%+v %v, want op %d", h, err, op)
		}
		if op == 2 && string(p) != "second" {
			t.Fatalf("%q", p)
		}
	}
}

// What is to be done before the reader waits is called before it waits for the stream, or for another thread that
// reads it, and not otherwise.
func TestBeforeRead(t *testing.T) {
	s, f := pair(t, 10*time.Second)
	r, err := NewReader(s)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	called := make(chan bool, 100)
	r.BeforeRead(func() { called <- true })
	next := func() (uint16, error) {
		var h Request
		if err := r.Next(&h); err != nil {
			return 0, err
		}
		defer r.Done()
		_, err := r.Payload()
		return h.Op, err
	}
	one := frame(1, []byte("payload"))
	_, _ = f.Write(append(bytes.Repeat(one, 3), one[:RequestSize+2]...))
	for i, want := range []int{1, 0, 0} {
		if op, err := next(); err != nil || op != 1 || len(called) != want {
			t.Fatalf("frame %d: called %d times, wanted %d: %v", i, len(called), want, err)
		}
		for len(called) > 0 {
			<-called
		}
	}
	ahead := make(chan error)
	go func() { ahead <- r.ReadAhead(time.Second, func(*Request, []byte) bool { return false }) }()
	for r.mu.TryLock() { // until it waits for the rest
		r.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	got := make(chan error)
	go func() {
		_, err := next()
		got <- err
	}()
	select {
	case <-called:
	case <-time.After(10 * time.Second):
		t.Error("not called before another thread's read was waited for")
	}
	_, _ = f.Write(one[RequestSize+2:])
	if err := errors.Join(<-ahead, <-got); err != nil {
		t.Error(err)
	}
}

func TestWriter(t *testing.T) {
	s, f := pair(t, 200*time.Millisecond)
	w := NewWriter(s)
	go func() {
		_ = w.Hold(&Reply{Kind: FrameData, Call: 1}, []byte("a"), []byte("b"))
		_ = w.Send(&Reply{Kind: FrameReply, Call: 2}, []byte("c"), nil)
		_ = w.Hold(&Reply{Kind: FrameData, Call: 3}, nil, make([]byte, holdMax))
		_ = w.Hold(&Reply{Kind: FrameBeat}, nil, nil)
		_ = w.Flush()
	}()
	for i, want := range []Reply{{Size: 2, Kind: FrameData, Call: 1}, {Size: 1, Kind: FrameReply, Call: 2}, {Size: holdMax, Kind: FrameData, Call: 3}, {Kind: FrameBeat}} {
		var b [ReplySize]byte
		if _, err := io.ReadFull(f, b[:]); err != nil {
			t.Fatal(err)
		}
		var h Reply
		if err := h.Decode(&b); err != nil || h != want {
			t.Fatalf("frame %d: %+v %v", i, h, err)
		}
		if _, err := io.CopyN(io.Discard, f, int64(h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	// A client that stops reading.
	start := time.Now()
	var err error
	for range 100 {
		if err = w.Send(&Reply{Kind: FrameData}, nil, make([]byte, 1<<20)); err != nil {
			break
		}
	}
	if !errors.Is(err, ErrStalled) || time.Since(start) > 5*time.Second {
		t.Fatalf("%v after %v", err, time.Since(start))
	}
	if err := w.Send(&Reply{}, nil, nil); !errors.Is(err, ErrStalled) {
		t.Fatal("the error does not stick")
	}
}

// TestHoldLast: a held payload is sent in the order of the frames, together with the next frame, and sent is called once, after that.
func TestHoldLast(t *testing.T) {
	s, f := pair(t, 200*time.Millisecond)
	w := NewWriter(s)
	var given atomic.Int32
	big := func(fill byte) []byte { return bytes.Repeat([]byte{fill}, 3*holdMax) }
	hold := func(call uint32, b []byte) {
		t.Helper()
		if err := w.HoldLast(&Reply{Kind: FrameData, Call: call}, []byte("head"), b, func() { given.Add(1) }); err != nil {
			t.Error(err)
		}
	}
	go func() {
		hold(1, []byte("small"))
		hold(2, big('x'))
		if n := given.Load(); n != 1 {
			t.Errorf("%d were given back before they were sent", n-1)
		}
		_ = w.Hold(&Reply{Kind: FrameBeat, Call: 3}, nil, nil)
		hold(4, big('y'))
		hold(5, big('z'))
		_ = w.Send(&Reply{Kind: FrameReply, Call: 6}, []byte("r"), nil)
		hold(7, big('w'))
		_ = w.Flush()
		_ = w.Send(&Reply{Kind: FrameReply, Call: 8}, nil, nil)
	}()
	for call, want := range []string{1: "headsmall", 2: "head" + string(big('x')), 3: "", 4: "head" + string(big('y')), 5: "head" + string(big('z')), 6: "r", 7: "head" + string(big('w')), 8: ""} {
		if call == 0 {
			continue
		}
		var b [ReplySize]byte
		var h Reply
		if _, err := io.ReadFull(f, b[:]); err != nil {
			t.Fatal(err)
		}
		if err := h.Decode(&b); err != nil || int(h.Call) != call || int(h.Size) != len(want) {
			t.Fatalf("frame %d: %+v %v", call, h, err)
		}
		got := make([]byte, h.Size)
		if _, err := io.ReadFull(f, got); err != nil || string(got) != want {
			t.Fatalf("frame %d: other bytes, %v", call, err)
		}
	}
	if n := given.Load(); n != 5 {
		t.Errorf("given back %d times of 5", n)
	}
	f.Close()
	for range 100 { // until the writer has its error
		if w.HoldLast(&Reply{Kind: FrameData}, nil, big('v'), func() { given.Add(-1) }) != nil {
			break
		}
		given.Add(1)
	}
	_ = w.Flush()
	if n := given.Load(); n != 4 {
		t.Errorf("after an error, given back %d times too often", 4-n)
	}
}

func TestListenUnix(t *testing.T) {
	ctx := context.Background()
	dir := t.TempDir()
	p := filepath.Join(dir, "s")
	l, err := Listen(ctx, "unix:"+p)
	if err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(p)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", fi.Mode(), err)
	}
	if _, err := Listen(ctx, "unix:"+p); err == nil {
		t.Fatal("a socket in use was replaced")
	}
	l.Close()
	// Left behind by a process that was killed.
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: p, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	if l, err = Listen(ctx, "unix:"+p); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := os.WriteFile(p, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(ctx, "unix:"+p); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Fatalf("a file was replaced: %v", err)
	}
}

func TestParseAddress(t *testing.T) {
	for in, want := range map[string][2]string{
		"tcp:h:1": {"tcp", "h:1"}, "h:1": {"tcp", "h:1"}, "unix:/p": {"unix", "/p"}, "tcp:[::1]:7": {"tcp", "[::1]:7"},
	} {
		n, a, err := ParseAddress(in)
		if err != nil || n != want[0] || a != want[1] {
			t.Errorf("%s: %s %s %v", in, n, a, err)
		}
	}
	for _, in := range []string{"", "unix:", "tcp:host", "/path"} {
		if _, _, err := ParseAddress(in); !errors.Is(err, ErrAddress) {
			t.Errorf("%q: %v", in, err)
		}
	}
}
