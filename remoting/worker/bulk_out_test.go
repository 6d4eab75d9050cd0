package worker

import (
	"bytes"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// A taker reads parts from the device as a client does.
type taker struct {
	k     *bulkSession
	c     net.Conn
	parts atomic.Int64
	bytes atomic.Int64
	// before is called before a part's bytes are read: they are not if it returns false, and the connection is closed.
	before func(m *wire.BulkPart) bool
}

// takeParts opens a connection and takes parts over it until its end.
func (k *bulkSession) takeParts(before func(m *wire.BulkPart) bool) *taker {
	k.t.Helper()
	x := &taker{k: k, c: k.mustOpen(wire.BulkToClient), before: before}
	go x.run()
	return x
}

func (x *taker) run() {
	defer x.c.Close()
	_ = x.c.SetDeadline(time.Time{})
	buf := make([]byte, wire.MaxBulkPart)
	for {
		var h [wire.BulkPartSize]byte
		if _, err := io.ReadFull(x.c, h[:]); err != nil {
			return
		}
		var m wire.BulkPart
		m.Decode(wire.NewDecoder(h[:]))
		if m.Size == 0 || m.Size > wire.MaxBulkPart {
			x.k.t.Errorf("%+v", m)
			return
		}
		if x.before != nil && !x.before(&m) {
			return
		}
		if _, err := io.ReadFull(x.c, buf[:m.Size]); err != nil {
			return
		}
		if !x.k.take(&m, buf[:m.Size]) {
			return
		}
		x.parts.Add(1)
		x.bytes.Add(int64(m.Size))
		if _, err := x.c.Write(cat(u64(m.Number), u64(m.Offset))); err != nil {
			return
		}
	}
}

// take writes a part where it belongs once what was sent before it has been.
func (k *bulkSession) take(m *wire.BulkPart, b []byte) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for int32(k.wrote-m.After) < 0 {
		if k.err != nil {
			return false
		}
		k.cond.Wait()
	}
	if k.over[uint32(m.Number)] {
		k.t.Errorf("a part of delivery %d, which is over", m.Number)
	}
	k.deliver(uint32(m.Number), int(m.Offset), b)
	return true
}

// upload puts bytes into new memory of the device.
func (k *bulkSession) upload(b []byte) uint64 {
	k.t.Helper()
	p := k.mustAlloc(len(b))
	k.copyIn(p, 0, b)
	return p
}

// Copies of many sizes from the device go over three connections where they are large, and all bytes are right.
func TestBulkOut(t *testing.T) {
	k := startBulk(t, nil)
	src := randomBytes(3*slotCount<<20+777, 7)
	p := k.upload(src)
	var all []*taker
	for range 3 {
		all = append(all, k.takeParts(nil))
	}
	sum := func() (n int64) {
		for _, x := range all {
			n += x.bytes.Load()
		}
		return n
	}
	for i, size := range []int{0, 1, 1 << 20, wire.BulkDownLeast - 1, wire.BulkDownLeast, wire.BulkDownLeast + 1, 20<<20 + 5, len(src)} {
		before, id := sum(), uint32(10+i)
		k.mu.Lock()
		k.inData = 0
		k.mu.Unlock()
		if got := k.copyOut(p, size, 0, id); !bytes.Equal(got, src[:size]) {
			t.Errorf("%d bytes differ", size)
		}
		by := int(sum() - before)
		k.mu.Lock()
		in := k.inData
		k.mu.Unlock()
		if want := map[bool]int{true: size}[size >= wire.BulkDownLeast]; by != want || by+in != size {
			t.Errorf("%d bytes: %d in parts, %d in DATA frames", size, by, in)
		}
	}
	// Without a wait: they are there before the answer to a wait for the stream.
	const n = 9 << 20
	for id := range uint32(5) {
		k.oneway(wire.OpCopyOut, u64(p+uint64(id)), u64(n), u32(0), u32(100+id))
	}
	k.streamSync(0)
	k.mu.Lock()
	defer k.mu.Unlock()
	for id := range uint32(5) {
		if !k.over[100+id] || !bytes.Equal(k.data[100+id], src[id:id+n]) {
			t.Errorf("delivery %d: over %v, %d bytes", id, k.over[100+id], len(k.data[100+id]))
		}
	}
}

// A connection is counted before its client knows that it is there, and no longer if the client never learns it.
func TestBulkOutJoins(t *testing.T) {
	loadFakeDriver(t)
	s, acct := fakeSession(t, nil, nil)
	t.Cleanup(func() { s.rd.Close(); acct.Close() })
	b := &s.bulk
	b.most = 1
	if err := b.prepare(); err != nil {
		t.Fatal(err)
	}
	up := func() int {
		s.out.mu.Lock()
		defer s.out.mu.Unlock()
		return s.out.up
	}
	for i := range 100 {
		fd, far := socketPair(t)
		client := os.NewFile(uintptr(far), "client")
		if _, err := client.Write(cat(b.key[:], u32(wire.BulkToClient), u32(0))); err != nil {
			t.Fatal(err)
		}
		if i%2 > 0 {
			client.Close()
		}
		b.asking++
		done := make(chan struct{})
		go func() { b.serve(fd, false); close(done) }()
		if i%2 == 0 {
			_, err := wire.ReadWelcome(client)
			if n := up(); err != nil || n != 1 {
				t.Errorf("welcomed, and %d connections are counted: %v", n, err)
			}
			client.Close()
		}
		<-done
		if n := up(); n != 0 {
			t.Errorf("%d connections are counted once it has ended", n)
		}
	}
}

// No copy is complete before its parts were answered. Where no answer comes, the bytes come in DATA frames after the keep-alive time.
func TestBulkOutUnanswered(t *testing.T) {
	const keepalive = 600 * time.Millisecond
	k := startBulk(t, func(c *Config) { c.Keepalive = keepalive })
	src := randomBytes(16<<20, 8)
	p := k.upload(src)
	k.streamSync(0)
	for range 2 {
		c := k.mustOpen(wire.BulkToClient)
		_ = c.SetDeadline(time.Time{})
		go func() { _, _ = io.Copy(io.Discard, c) }()
	}
	for i, wait := range []time.Duration{keepalive, 0} { // then the connections are gone
		begun := time.Now()
		if got := k.copyOut(p, len(src), 0, uint32(1+i)); !bytes.Equal(got, src) {
			t.Error("bytes differ")
		}
		if d := time.Since(begun); d < wait {
			t.Errorf("complete after %v", d)
		}
	}
}

// The client is told what the GPU writes to watched memory after it has answered the parts that are out, also if it waits for nothing. The parts may
// hold what the memory had before.
func TestBulkOutWatched(t *testing.T) {
	k := startBulk(t, nil)
	src := randomBytes(8<<20, 11)
	p := k.upload(src)
	if r := k.wait(wire.OpHostMap, 1, u64(hostAt), u64(4096), u64(0)); r.result != 0 {
		t.Fatalf("map: %d", r.result)
	}
	k.oneway(wire.OpHostWatch, u64(hostAt), u64(512))
	go1, arrived := make(chan struct{}), make(chan struct{}, 16)
	k.takeParts(func(*wire.BulkPart) bool { arrived <- struct{}{}; <-go1; return true })
	k.oneway(wire.OpCopyOut, u64(p), u64(uint64(len(src))), u32(0), u32(50))
	select {
	case <-arrived:
	case <-time.After(bulkTime):
		t.Fatal("no part of the copy comes by the connection")
	}
	k.oneway(opCuMemcpyDtoDAsync_v2, u64(hostAt+8), u64(p), u64(8), u32(0))
	time.Sleep(50 * time.Millisecond) // the worker looks every millisecond, and must send nothing
	k.mu.Lock()
	if told := k.hostFrames(); len(told) > 0 {
		t.Errorf("told before the parts were answered: %v", told)
	}
	k.mu.Unlock()
	close(go1)
	k.until("the change is told", func() bool { return k.hostFrames()[hostAt+8] == src[0] && k.hostFrames()[hostAt+15] == src[7] })
	k.streamSync(0)
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.over[50] || !bytes.Equal(k.data[50], src) {
		t.Error("bytes differ")
	}
}

// Connections that are cut within a part, at its beginning, or answer something else.
func TestBulkOutCut(t *testing.T) {
	k := startBulk(t, nil)
	src := randomBytes(12<<20, 9)
	p := k.upload(src)
	for i, what := range []string{"head", "within", "answer", "idle"} {
		bad := k.mustOpen(wire.BulkToClient)
		good := k.takeParts(nil)
		_ = bad.SetDeadline(time.Now().Add(bulkTime))
		go func() {
			defer bad.Close()
			b := make([]byte, wire.BulkPartSize+5000)
			switch what {
			case "idle":
				return
			case "head":
				b = b[:10]
			}
			if _, err := io.ReadFull(bad, b); err != nil {
				return
			}
			if what == "answer" {
				_, _ = bad.Write(cat(u64(binary.LittleEndian.Uint64(b)), u64(1)))
				_, _ = io.Copy(io.Discard, bad)
			}
		}()
		if got := k.copyOut(p, len(src), 0, uint32(1+i)); !bytes.Equal(got, src) {
			t.Errorf("%s: bytes differ", what)
		}
		good.c.Close()
		if got := k.copyOut(p, len(src), 0, uint32(100+i)); !bytes.Equal(got, src) {
			t.Errorf("%s: bytes differ afterwards", what)
		}
	}
}

// Deliveries with one destination, small and large ones, come in the order of their calls, however slow any connection is.
func TestBulkOutOrder(t *testing.T) {
	k := startBulk(t, nil)
	const size = 8 << 20
	dst := make([]byte, size)
	slow := func() { time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond) }
	var srcs [][]byte
	var at []uint64
	for i := range 3 {
		srcs = append(srcs, randomBytes(size, byte(20+i)))
		at = append(at, k.upload(srcs[i]))
	}
	k.streamSync(0)
	k.mu.Lock()
	k.lag = slow
	k.onData = func(_ uint32, off int, b []byte) { copy(dst[off:], b) }
	k.mu.Unlock()
	for range 3 {
		k.takeParts(func(*wire.BulkPart) bool { slow(); return true })
	}
	want := make([]byte, size)
	id := uint32(0)
	for round := range 10 {
		for range 6 {
			id++
			n, i := pickOne(size, 1000, 5<<20), rand.IntN(3)
			k.oneway(wire.OpCopyOut, u64(at[i]), u64(uint64(n)), u32(0), u32(id))
			copy(want, srcs[i][:n])
		}
		k.streamSync(0)
		k.mu.Lock()
		if !bytes.Equal(dst, want) {
			t.Errorf("round %d: bytes differ", round)
		}
		k.mu.Unlock()
	}
}

func pickOne(of ...int) int { return of[rand.IntN(len(of))] }

// Copies both ways in several streams while connections come and go at any moment.
func TestBulkStorm(t *testing.T) {
	k := startBulk(t, nil)
	var end atomic.Bool
	var wg, takers sync.WaitGroup
	defer takers.Wait()
	defer end.Store(true)
	for range 3 {
		takers.Go(func() {
			for !end.Load() {
				c, err := k.open(wire.BulkToClient)
				if err != nil {
					time.Sleep(time.Millisecond) // the worker has not seen yet that another one has ended
					continue
				}
				left := rand.IntN(12)
				x := &taker{k: k, c: c, before: func(m *wire.BulkPart) bool {
					if left--; left >= 0 {
						return true
					}
					_, _ = io.CopyN(io.Discard, c, rand.Int64N(int64(m.Size)))
					return false
				}}
				stop := time.AfterFunc(time.Duration(rand.IntN(200))*time.Millisecond, func() { c.Close() })
				x.run()
				stop.Stop()
			}
		})
	}
	src := randomBytes(24<<20, 10)
	p := k.upload(src)
	for id := range uint32(3) {
		k.streamCreate(1 + id)
	}
	k.streamSync(0)
	var next atomic.Uint32
	var number atomic.Uint64
	for range 2 {
		wg.Go(func() {
			own := k.mustAlloc(len(src))
			for range 12 {
				// To the device: a connection for each copy, which may be cut.
				c, err := k.open(wire.BulkToWorker)
				for off := 0; off < len(src); off += 1 << 20 {
					b, n := src[off:off+1<<20], number.Add(1)
					if err == nil && rand.IntN(30) == 0 {
						_, _ = c.Write(append(partHead(n, 0, 1<<20, 0), b[:rand.IntN(1<<20)]...))
						c.Close()
						err = io.EOF
						k.oneway(wire.OpBulkDrop, u64(n))
					}
					if err == nil {
						put(t, c, n, b)
						k.copyPart(own+uint64(off), n, len(b), 1)
					} else {
						k.oneway(wire.OpCopyIn, u64(own+uint64(off)), u32(1), u32(0), b)
					}
				}
				if err == nil {
					c.Close()
				}
				k.streamSync(1)
				at := pickOne(0, 4096, 1<<20)
				n, from, st := len(src)-at, slices.Clone([]uint64{p, own})[rand.IntN(2)], uint32(pickOne(0, 2, 3))
				if got := k.copyOut(from+uint64(at), n, st, next.Add(1)); !bytes.Equal(got, src[at:]) {
					t.Errorf("bytes of a copy differ")
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(2 * time.Minute):
		t.Error("copies hang")
	}
}
