package worker

import (
	"encoding/binary"
	"math/rand"
	"runtime"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

// call runs one operation of the table in the context of device 0.
func (s *session) call(op uint16, parts ...[]byte) ([]byte, int32) {
	s.gates.StepOut()
	s.hdr = wire.Request{Op: op, Ctx: 1}
	if s.cur != 1 {
		if rc := s.setCtx(1); rc != 0 {
			return nil, rc
		}
	}
	s.enc.Reset()
	s.dec.Reset(cat(parts...))
	rc, _ := s.dispatch(op, &s.dec, &s.enc)
	return s.enc.Buf(), rc
}

// A million random allocations and frees of every kind, by several sessions of
// one lease, on a driver that fails one call in eleven: the account never
// passes the cap, never says less than what is held, and ends where it began.
func TestEveryKindAgainstModel(t *testing.T) {
	loadFakeDriver(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	n := 1_000_000
	if testing.Short() {
		n = 50_000
	}
	l, err := account.NewBook([]uint64{testMem}).Grant(0)
	if err != nil {
		t.Fatal(err)
	}
	type holding struct {
		bytes uint64
		free  func() int32
	}
	type client struct {
		s     *session
		acct  *account.Session
		live  []holding
		ids   [wire.NumKinds]uint32
		maps  uint64
		limit uint64
	}
	r := rand.New(rand.NewSource(4))
	var cs []*client
	for range 4 {
		s, acct := fakeSessionOf(t, l, nil, nil)
		defer s.rd.Close()
		if rc := s.ctxActivate(u32(0)); rc != 0 {
			t.Fatal(rc)
		}
		cs = append(cs, &client{s: s, acct: acct})
	}
	base := cs[0].acct.Info(0).Used
	// id gives ids as a client does: each index again and again, with its
	// generation counted up.
	id := func(c *client, kind int) uint32 {
		c.ids[kind]++
		v := c.ids[kind]
		return v&0xfff + 1 | (v>>12)<<genShift
	}
	var held uint64
	denied, failed := 0, 0
	for i := range n {
		c := cs[r.Intn(len(cs))]
		s := c.s
		var rc int32
		var h holding
		switch op := r.Intn(17); {
		case op < 5: // linear
			size := uint64(1) << r.Intn(27)
			size += uint64(r.Intn(int(size)))
			var out []byte
			if out, rc = s.call(opCuMemAlloc_v2, []byte{1}, u64(size)); rc == 0 {
				p := binary.LittleEndian.Uint64(out)
				h = holding{size, func() int32 { _, rc := s.call(opCuMemFree_v2, u64(p)); return rc }}
			}
		case op == 5: // pitched
			w, rows := uint64(r.Intn(4000)+1), uint64(r.Intn(2000)+1)
			var out []byte
			if out, rc = s.call(opCuMemAllocPitch_v2, []byte{1, 1}, u64(w), u64(rows), u32(4)); rc == 0 {
				p := binary.LittleEndian.Uint64(out)
				h = holding{w * rows, func() int32 { _, rc := s.call(opCuMemFree_v2, u64(p)); return rc }}
			}
		case op == 6: // array
			w, rows := uint64(r.Intn(4000)+1), uint64(r.Intn(2000)+1)
			a := id(c, wire.KindArray)
			d := cat([]byte{1}, u64(w), u64(rows), u32(32), u32(2))
			if _, rc = s.call(opCuArrayCreate_v2, u32(a), d); rc == 0 {
				h = holding{w * rows * 8, func() int32 { _, rc := s.call(opCuArrayDestroy, u32(a)); return rc }}
			}
		case op == 7: // physical memory, mapped
			size := uint64(r.Intn(16)+1) << 21
			m := id(c, wire.KindMemHandle)
			prop := cat([]byte{1}, u32(1), u32(0), u32(1), u32(0), u64(0), u64(0))
			if _, rc = s.call(opCuMemCreate, u32(m), u64(size), prop, u64(0)); rc == 0 {
				c.maps += 1 << 30
				at := 1<<45 + c.maps
				_, mapped := s.call(opCuMemMap, u64(at), u64(size), u64(0), u32(m), u64(0))
				h = holding{size, func() int32 {
					_, rc := s.call(opCuMemRelease, u32(m))
					if mapped == 0 {
						if used := c.acct.Info(0).Used; rc == 0 && used < held {
							t.Error("memory that is still mapped was given back")
						}
						_, rc = s.call(opCuMemUnmap, u64(at), u64(size))
					}
					return rc
				}}
			}
		case op == 8: // a limit
			c.limit = uint64(r.Intn(64)) << 20
			_, rc = s.call(opCuCtxSetLimit, u32(2), u64(c.limit))
		default:
			if len(c.live) > 0 {
				k := r.Intn(len(c.live))
				if v := c.live[k]; v.free() == 0 {
					held -= v.bytes
					c.live[k] = c.live[len(c.live)-1]
					c.live = c.live[:len(c.live)-1]
				}
			}
		}
		switch {
		case h.free != nil:
			held += h.bytes
			c.live = append(c.live, h)
		case rc == 2:
			denied++
		case rc != 0:
			failed++
		}
		info := c.acct.Info(0)
		if info.Used > info.Total || info.Used < held {
			t.Fatalf("op %d: account says %d of %d used, the model holds %d", i, info.Used, info.Total, held)
		}
		if s.ended != "" {
			t.Fatalf("op %d: %s", i, s.ended)
		}
	}
	t.Logf("%d denied, %d failed by the driver", denied, failed)
	if denied == 0 || failed == 0 {
		t.Error("the test did not meet the cap, or no failure")
	}
	for _, c := range cs {
		for _, v := range c.live {
			for v.free() != 0 {
			}
			held -= v.bytes
		}
		for {
			if _, rc := c.s.call(opCuCtxSetLimit, u32(2), u64(0)); rc == 0 {
				break
			}
		}
	}
	if got := cs[0].acct.Info(0).Used; got != base {
		t.Fatalf("%d bytes of drift", int64(got)-int64(base))
	}
}
