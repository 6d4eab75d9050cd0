package wire

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"
)

func FuzzDecoder(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, bytes.Repeat([]byte{3, 0, 0, 0, 'a', 'b', 'c'}, 20))
	f.Add([]byte{4, 4, 4}, []byte{0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, ops, b []byte) {
		d := NewDecoder(b)
		left := d.Left()
		for _, op := range ops {
			failed := d.Err() != nil
			switch op % 10 {
			case 0:
				d.U8()
			case 1:
				d.U16()
			case 2:
				d.U32()
			case 3:
				d.U64()
			case 4:
				_ = d.Str()
			case 5:
				if p := d.Bytes(int(op)); p != nil && len(p) != int(op) {
					t.Fatal("length")
				}
			case 6:
				if n := d.Count(int(op>>4), 1000); n > 1000 || n*int(op>>4) > d.Left() {
					t.Fatal("count lets more through than there is")
				}
			case 7:
				d.F64()
			case 8:
				d.Rest()
			case 9:
				d.I32()
			}
			if d.Left() > left || d.Left() < 0 || failed && (d.Err() == nil || d.Left() != left) {
				t.Fatal("the decoder moved as it must not")
			}
			left = d.Left()
		}
	})
}

func FuzzHello(f *testing.F) {
	var b [HelloSize]byte
	(&Hello{Version: 1, Kind: SessionCompute, PID: 1, Program: "a.out", Mem: 1 << 30}).Encode(&b)
	f.Add(b[:])
	f.Add(bytes.Repeat([]byte{0xff}, HelloSize))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) < HelloSize {
			return
		}
		var h Hello
		if err := h.Decode((*[HelloSize]byte)(in)); err != nil {
			if !errors.Is(err, ErrNotSluice) {
				t.Fatal(err)
			}
			return
		}
		var out [HelloSize]byte
		h.Encode(&out)
		var g Hello
		if err := g.Decode(&out); err != nil {
			t.Fatal(err)
		}
		// The name's last byte is always NUL when we write it.
		h.Program = h.Program[:min(len(h.Program), 39)]
		if g != h {
			t.Fatalf("%+v\n%+v", g, h)
		}
	})
}

func FuzzSnapshot(f *testing.F) {
	s := testSnapshot()
	var e Encoder
	s.Encode(&e)
	f.Add(e.Buf())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var s Snapshot
		if s.Decode(b) != nil {
			return
		}
		var e Encoder
		s.Encode(&e)
		var again Snapshot
		if err := again.Decode(e.Buf()); err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
	})
}

// memStream is a stream out of memory that gives its bytes in odd pieces.
type memStream struct {
	b    []byte
	step int
}

func (m *memStream) Read2(a, b []byte) (int, error) {
	if len(m.b) == 0 {
		return 0, io.EOF
	}
	n := copy(a, m.b[:min(len(m.b), m.step)])
	if n == len(a) && n < m.step && len(m.b) > n {
		n += copy(b, m.b[n:min(len(m.b), m.step)])
	}
	m.b = m.b[n:]
	return n, nil
}

func (m *memStream) Write([][]byte) error        { return nil }
func (m *memStream) Readable(time.Duration) bool { return len(m.b) > 0 }
func (m *memStream) FD() int                     { return -1 }
func (m *memStream) Close() error                { return nil }

func FuzzReader(f *testing.F) {
	f.Add(append(frame(OpLaunch, make([]byte, 100)), frame(OpCopyIn, make([]byte, 70000))...), uint16(1000), uint8(1))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), uint16(1), uint8(0))
	f.Fuzz(func(t *testing.T, b []byte, step uint16, how uint8) {
		r, err := NewReader(&memStream{b: append([]byte(nil), b...), step: int(step) + 1})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		rest := b
		for {
			var h Request
			if r.Next(&h) != nil {
				return
			}
			var p []byte
			switch how % 3 {
			case 0:
				p, err = r.Payload()
			case 1:
				p = make([]byte, r.Left())
				err = r.ReadFull(p)
			case 2:
				var head []byte
				head, err = r.Peek(min(r.Left(), 7))
				p = append(p, head...)
				if err == nil {
					tail := make([]byte, r.Left())
					err = r.ReadFull(tail)
					p = append(p, tail...)
				}
			}
			r.Done()
			if err != nil {
				return
			}
			want := rest[RequestSize : RequestSize+int(h.Size)]
			if !bytes.Equal(p, want) {
				t.Fatal("payload differs from what was sent")
			}
			rest = rest[RequestSize+int(h.Size):]
			how = how*5 + 1
		}
	})
}
