package timeline

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// file is a timeline as a viewer reads it.
type file struct {
	Events []struct {
		Name, Cat, Ph string
		TS, Dur       float64
		PID, TID      int
		Args          map[string]any
	} `json:"traceEvents"`
	Other map[string]any `json:"otherData"`
}

func head(program string, wall time.Time) []byte {
	var e wire.Encoder
	(&wire.TraceHead{Magic: wire.TraceMagic, Version: wire.TraceVersion, Wall: uint64(wall.UnixNano()), PID: 7, Program: program}).Encode(&e)
	return e.Buf()
}

func record(m wire.TraceRecord, name string) []byte {
	m.Size = wire.TraceRecordSize
	var rest []byte
	if m.Kind == wire.SpanName {
		rest = append(binary.LittleEndian.AppendUint32(nil, uint32(len(name))), name...)
		rest = append(rest, make([]byte, (8-len(rest)%8)%8)...)
		m.Size += uint32(len(rest))
	}
	var e wire.Encoder
	m.Encode(&e)
	return append(e.Buf(), rest...)
}

func timeline(t *testing.T, most int64, traces ...[]byte) (file, *Writer) {
	t.Helper()
	var out bytes.Buffer
	w := New(&out, most)
	for _, tr := range traces {
		if err := w.Add(bytes.NewReader(tr), ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if int64(out.Len()) > most {
		t.Errorf("%d bytes of at most %d", out.Len(), most)
	}
	var f file
	d := json.NewDecoder(&out)
	if err := d.Decode(&f); err != nil {
		t.Fatalf("it is no JSON: %v", err)
	}
	return f, w
}

var start = time.Unix(1_800_000_000, 0)

// Two sessions that began at different times, with names that no JSON may have as they are.
func TestTwoSessions(t *testing.T) {
	hostile := "k\"},{\"ph\":\"X\\\n\x00\xff</script>\u2028"
	one := bytes.Join([][]byte{
		head("one\"\xfe", start),
		record(wire.TraceRecord{Kind: wire.SpanName, Name: 1}, hostile),
		record(wire.TraceRecord{Kind: wire.SpanKernel, Flags: wire.TraceGPU, Stream: 4, Name: 1, Given: 1000, Begin: 2500, End: 5000, Grid: [3]uint32{1, 2, 3}}, ""),
		record(wire.TraceRecord{Kind: wire.SpanKernel, Flags: wire.TraceGPU, Stream: 4, Name: 1, Given: 1000, Begin: 4900, End: 5100}, ""), // its times overlap by what they are inexact by
		record(wire.TraceRecord{Kind: wire.SpanCopyOut, Flags: wire.TraceGPU, Amount: 99, Begin: 1, End: 2}, ""),
		record(wire.TraceRecord{Kind: wire.SpanWait, Begin: 10, End: 90}, ""),
		record(wire.TraceRecord{Kind: wire.SpanWait, Begin: 20, End: 80}, ""),
		record(wire.TraceRecord{Kind: wire.SpanWait, Flags: wire.TraceOpen, Begin: 95, End: 96}, ""),
		record(wire.TraceRecord{Kind: 999, Begin: 95, End: 96}, ""), // of a later release
		record(wire.TraceRecord{Kind: wire.SpanLost, Amount: 12}, ""),
		record(wire.TraceRecord{Kind: wire.SpanTurn}, "")[:50], // the program was killed
	}, nil)
	two := append(head("two", start.Add(time.Millisecond)), record(wire.TraceRecord{Kind: wire.SpanTurnWait, Device: 1, Begin: 1000, End: 2000}, "")...)
	f, w := timeline(t, DefaultMost, one, two)
	var got []string
	for _, e := range f.Events {
		if e.Ph != "M" {
			got = append(got, fmt.Sprintf("%d/%s %g+%g", e.PID, e.Name, e.TS, e.Dur))
		}
	}
	k := "1/" + strings.ToValidUTF8(hostile, "\ufffd")
	want := []string{k + " 2.5+2.5", k + " 5+0.1", "1/copy from the GPU 0.001+0.001", "1/call 0.01+0.08", "1/call 0.02+0.06", "1/call 0.095+0.001", "1/12 records lost 0+0", "2/waits for a turn 1001+1"}
	if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	tracks := map[[2]int]bool{}
	for _, e := range f.Events {
		if e.Cat == "wait" {
			if (e.TS == 0.095) != (e.Args["unfinished"] == true) {
				t.Errorf("a wait at %g has %v", e.TS, e.Args)
			}
			tracks[[2]int{e.PID, e.TID}] = true
		}
	}
	if len(tracks) != 2 || w.Lost != 12 || f.Other["records_lost_by_workers"] != 12.0 || f.Other["sessions"] != 2.0 {
		t.Errorf("%d tracks of waits, %v", len(tracks), f.Other)
	}
}

// A file has its limit, is whole all the same, and says what it lacks.
func TestSize(t *testing.T) {
	tr := head("p", start)
	const n = 5000
	for range n {
		tr = append(tr, record(wire.TraceRecord{Kind: wire.SpanFill, Flags: wire.TraceGPU, Begin: 1}, "")...)
	}
	f, w := timeline(t, 200<<10, tr)
	have := 0
	for _, e := range f.Events {
		if e.Name == "fill" {
			have++
		}
	}
	if w.Dropped == 0 || have+int(w.Dropped) != n || f.Other["events_dropped_for_size"] != float64(w.Dropped) {
		t.Errorf("%d events and %d dropped of %d: %v", have, w.Dropped, n, f.Other)
	}
}

func TestNoTrace(t *testing.T) {
	for _, b := range [][]byte{nil, []byte("x"), make([]byte, 200), append(head("p", start), make([]byte, wire.TraceRecordSize)...)} {
		if err := New(&bytes.Buffer{}, DefaultMost).Add(bytes.NewReader(b), ""); !errors.Is(err, ErrNotTrace) {
			t.Errorf("%d bytes: %v", len(b), err)
		}
	}
}

// Whatever a trace holds, the file is JSON within its limit.
func FuzzTrace(f *testing.F) {
	f.Add(append(head("p", start), record(wire.TraceRecord{Kind: wire.SpanName, Name: 1}, "\xff\"")...))
	f.Add(append(head("p", start), record(wire.TraceRecord{Kind: wire.SpanWait, Begin: 1 << 63, End: 5}, "")...))
	f.Fuzz(func(t *testing.T, b []byte) {
		var out bytes.Buffer
		w := New(&out, 1<<20)
		_ = w.Add(bytes.NewReader(b), "\xff")
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if !json.Valid(out.Bytes()) || out.Len() > 2<<20 {
			t.Fatalf("%d bytes: %q", out.Len(), out.Bytes())
		}
	})
}
