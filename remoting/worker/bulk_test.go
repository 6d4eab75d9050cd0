package worker

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const bulkTime = 10 * time.Second // no answer takes longer

// bulkSession is a session whose client has the key to bulk connections.
type bulkSession struct {
	*conn
	addr string
	wire.BulkOpenReply
}

func startBulk(t testing.TB, change func(*Config)) *bulkSession {
	t.Helper()
	_, addr := startWorker(t, func(c *Config) {
		c.Bulk = 3
		c.Keepalive = time.Minute // a part that is answered later goes again, as a frame, and a busy machine is late
		if change != nil {
			change(c)
		}
	})
	k := &bulkSession{conn: dial(t, addr, [16]byte{}), addr: addr}
	r := k.wait(wire.OpBulkOpen, 1)
	d := wire.NewDecoder(r.payload)
	k.Decode(d)
	if r.result != 0 || d.Done() != nil || k.Most != 3 {
		t.Fatalf("BULK_OPEN: %d, %+v", r.result, k.BulkOpenReply)
	}
	return k
}

// open makes a bulk connection.
func (k *bulkSession) open(direction uint32) (net.Conn, error) {
	return openBulk(k.addr, k.Session, k.Key, direction, 0)
}

func openBulk(addr string, session uint32, key [16]byte, direction, zero uint32) (net.Conn, error) {
	c, err := connect(addr)
	if err != nil {
		return nil, err
	}
	h := testHello(wire.SessionBulk)
	h.Mem = uint64(session)
	var b [wire.HelloSize]byte
	h.Encode(&b)
	_ = c.SetDeadline(time.Now().Add(bulkTime))
	if _, err = c.Write(cat(b[:], key[:], u32(direction), u32(zero))); err == nil {
		var p []byte
		if p, err = wire.ReadWelcome(c); err == nil && len(p) > 0 {
			err = errors.New("a WELCOME with a payload")
		}
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (k *bulkSession) mustOpen(direction uint32) net.Conn {
	k.t.Helper()
	c, err := k.open(direction)
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(func() { c.Close() })
	return c
}

func partHead(number, offset uint64, size, zero uint32) []byte {
	return cat(u64(number), u64(offset), u32(size), u32(zero))
}

func readTaken(c net.Conn) (m wire.BulkTaken, err error) {
	var b [wire.BulkTakenSize]byte
	_ = c.SetDeadline(time.Now().Add(bulkTime))
	_, err = io.ReadFull(c, b[:])
	m.Decode(wire.NewDecoder(b[:]))
	return m, err
}

// taken reads the answer to a part, which may have to wait first.
func taken(c net.Conn) (m wire.BulkTaken, err error) {
	for err == nil && m.Number == 0 {
		m, err = readTaken(c)
	}
	return m, err
}

// put sends a part and waits until it is taken.
func put(t testing.TB, c net.Conn, number uint64, b []byte) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(bulkTime))
	if _, err := c.Write(append(partHead(number, 0, uint32(len(b)), 0), b...)); err != nil {
		t.Fatal(err)
	}
	if m, err := taken(c); err != nil || m.Number != number || m.Offset != 0 {
		t.Fatalf("part %d: taken %+v, %v", number, m, err)
	}
}

func (k *bulkSession) copyPart(dst, part uint64, size int, stream uint32) {
	k.oneway(wire.OpCopyInBulk, u64(dst), u64(part), u32(stream), u32(0), u32(uint32(size)), u32(0))
}

func randomBytes(n int, seed byte) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func (k *bulkSession) mustAlloc(n int) uint64 {
	k.t.Helper()
	p, rc := k.alloc(uint64(n))
	if rc != 0 {
		k.t.Fatal(rc)
	}
	return p
}

// Many more parts than there are slots go over three connections, in any order, and all bytes are right.
func TestBulkIn(t *testing.T) {
	k := startBulk(t, nil)
	const size = 3*bulkSlots<<20 + 12345
	src := randomBytes(size, 1)
	dst := k.mustAlloc(size)
	var off []int
	for at := 0; at < size; at += wire.MaxBulkPart {
		off = append(off, at)
	}
	rand.Shuffle(len(off), func(i, j int) { off[i], off[j] = off[j], off[i] })
	var wg sync.WaitGroup
	for i := range 3 {
		c := k.mustOpen(wire.BulkToWorker)
		wg.Go(func() {
			for j := i; j < len(off); j += 3 {
				b := src[off[j]:min(off[j]+wire.MaxBulkPart, size)]
				put(t, c, uint64(1000-j), b)
				k.copyPart(dst+uint64(off[j]), uint64(1000-j), len(b), 0)
			}
		})
	}
	wg.Wait()
	if got := k.copyOut(dst, size, 0, 1); !bytes.Equal(got, src) {
		t.Error("bytes differ")
	}
}

// More parts are sent than there are slots, before any is copied: the rest is taken when slots are free, by their copies or because they are dropped.
func TestBulkFull(t *testing.T) {
	k := startBulk(t, nil)
	c := k.mustOpen(wire.BulkToWorker)
	src, dst := randomBytes(wire.MaxBulkPart, 2), k.mustAlloc(wire.MaxBulkPart)
	for i := uint64(1); i <= bulkSlots; i++ {
		put(t, c, i, src[:1000+i])
	}
	more := make(chan error, 1)
	go func() {
		_, err := c.Write(append(partHead(100, 0, wire.MaxBulkPart, 0), src...))
		more <- err
	}()
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	var b [wire.BulkTakenSize]byte // zeros say that it has to wait
	if n, err := c.Read(b[:]); err == nil && (n < len(b) || b != [len(b)]byte{}) {
		t.Fatal("a part was taken for which there is no slot")
	}
	k.oneway(wire.OpBulkDrop, u64(5))
	if m, err := taken(c); err != nil || m.Number != 100 {
		t.Fatalf("%+v, %v", m, err)
	}
	if err := <-more; err != nil {
		t.Fatal(err)
	}
	k.copyPart(dst, 7, 1007, 0)
	put(t, c, 101, src[:10])
	k.copyPart(dst, 100, wire.MaxBulkPart, 0)
	if got := k.copyOut(dst, wire.MaxBulkPart, 0, 1); !bytes.Equal(got, src) {
		t.Error("bytes differ")
	}
}

// A client whose part has to wait hears so, for longer than the keep-alive time. One that has gone is noticed.
func TestBulkWaits(t *testing.T) {
	const keepalive = 1500 * time.Millisecond // answers come every third of it, so one may be late by two thirds
	k := startBulk(t, func(c *Config) { c.Keepalive = keepalive })
	c := k.mustOpen(wire.BulkToWorker)
	for i := range uint64(bulkSlots) {
		put(t, c, i+1, []byte{1})
	}
	_, _ = c.Write(append(partHead(100, 0, 1, 0), 2))
	heard := 0
	for begun := time.Now(); time.Since(begun) < keepalive; heard++ {
		begun := time.Now()
		if m, err := readTaken(c); err != nil || m.Number != 0 || m.Offset != 0 || time.Since(begun) > keepalive {
			t.Fatalf("%+v, %v after %v", m, err, time.Since(begun))
		}
	}
	if heard < 3 {
		t.Errorf("heard %d times", heard)
	}
	k.oneway(wire.OpBulkDrop, u64(3))
	if m, err := taken(c); err != nil || m.Number != 100 {
		t.Fatalf("%+v, %v", m, err)
	}
	// As many connections as there may be wait, and are closed: others take their places.
	all := []net.Conn{c, k.mustOpen(wire.BulkToWorker), k.mustOpen(wire.BulkToWorker)}
	for i, c := range all {
		_, _ = c.Write(append(partHead(uint64(200+i), 0, 1, 0), 2))
	}
	for _, c := range all {
		if m, err := readTaken(c); err != nil || m.Number != 0 {
			t.Fatalf("%+v, %v", m, err)
		}
		c.Close()
	}
	for end := time.Now().Add(bulkTime); ; time.Sleep(keepalive / 10) {
		d, err := k.open(wire.BulkToWorker)
		if err == nil {
			d.Close()
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// Nothing is written to a client whose part has to wait any more once its answer may come.
func TestBulkReassured(t *testing.T) {
	loadFakeDriver(t)
	s, acct := fakeSession(t, nil, nil)
	t.Cleanup(func() { s.rd.Close(); acct.Close() })
	s.keepalive = 3 * time.Millisecond
	fd, far := socketPair(t)
	client := os.NewFile(uintptr(far), "client")
	defer client.Close()
	c := &bulkConn{fd: fd}
	var err error
	if c.out, err = wire.NewSocketStream(fd, time.Second); err != nil {
		t.Fatal(err)
	}
	stop := s.bulk.reassure(c)
	c.writing.Lock()
	time.Sleep(20 * time.Millisecond) // it is about to write
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	select {
	case <-stopped:
		t.Error("stopped while it writes")
	case <-time.After(20 * time.Millisecond):
	}
	c.writing.Unlock()
	<-stopped
	c.writing.Lock()
	err = c.answer(7)
	c.writing.Unlock()
	unix.Close(fd)
	b, readErr := io.ReadAll(client)
	var last wire.BulkTaken
	last.Decode(wire.NewDecoder(b[max(0, len(b)-wire.BulkTakenSize):]))
	if err != nil || readErr != nil || last.Number != 7 {
		t.Errorf("%x, %v, %v", b, err, readErr)
	}
}

// A part that is dropped before it has arrived, or while it does, is taken and thrown away.
func TestBulkDrop(t *testing.T) {
	k := startBulk(t, nil)
	c := k.mustOpen(wire.BulkToWorker)
	b := randomBytes(100<<10, 3)
	k.oneway(wire.OpBulkDrop, u64(1))
	if _, err := c.Write(append(partHead(2, 0, uint32(len(b)), 0), b[:5000]...)); err != nil {
		t.Fatal(err)
	}
	k.oneway(wire.OpBulkDrop, u64(2))
	k.wait(wire.OpBeat, 1) // they have been executed
	if _, err := c.Write(b[5000:]); err != nil {
		t.Fatal(err)
	}
	if m, err := taken(c); err != nil || m.Number != 2 {
		t.Fatalf("%+v, %v", m, err)
	}
	put(t, c, 1, b)
	for i := range uint64(2 * wire.MaxBulkDrops) { // of parts that never come
		k.oneway(wire.OpBulkDrop, u64(1000+i))
	}
	dst := k.mustAlloc(len(b))
	for i := range uint64(3 * bulkSlots) { // no slot is lost
		put(t, c, 10+i, b)
		k.oneway(wire.OpBulkDrop, u64(10+i))
	}
	put(t, c, 9, b)
	k.copyPart(dst, 9, len(b), 0)
	if got := k.copyOut(dst, len(b), 0, 1); !bytes.Equal(got, b) {
		t.Error("bytes differ")
	}
	k.copyPart(dst, 1, len(b), 0)
	k.until("the session ends", func() bool { return k.bye != "" })
	if !strings.Contains(k.bye, "COPY_IN_BULK: malformed") {
		t.Errorf("bye %q", k.bye)
	}
}

// Parts that are not there, or of another size, end the session.
func TestBulkUnknown(t *testing.T) {
	for name, f := range map[string]func(k *bulkSession, dst uint64){
		"unknown": func(k *bulkSession, dst uint64) { k.copyPart(dst, 2, 100, 0) },
		"size":    func(k *bulkSession, dst uint64) { k.copyPart(dst, 1, 99, 0) },
		"twice":   func(k *bulkSession, dst uint64) { k.copyPart(dst, 1, 100, 0); k.copyPart(dst, 1, 100, 0) },
		"last": func(k *bulkSession, dst uint64) {
			k.oneway(wire.OpCopyInBulk, u64(dst), u64(1), u32(0), u32(2), u32(100), u32(0))
		},
		"short": func(k *bulkSession, dst uint64) { k.oneway(wire.OpCopyInBulk, u64(dst)) },
		"drop":  func(k *bulkSession, _ uint64) { k.oneway(wire.OpBulkDrop, u32(1)) },
	} {
		k := startBulk(t, nil)
		put(t, k.mustOpen(wire.BulkToWorker), 1, make([]byte, 100))
		f(k, k.mustAlloc(100))
		k.until("the session ends", func() bool { return k.bye != "" })
		if !strings.Contains(k.bye, "malformed") {
			t.Errorf("%s: bye %q", name, k.bye)
		}
	}
}

// A client without the key is refused, and so is one connection too many.
func TestBulkRefused(t *testing.T) {
	k := startBulk(t, nil)
	wrong := k.Key
	wrong[15] ^= 1
	for _, c := range []struct {
		session, direction, zero uint32
		key                      [16]byte
		status                   uint32
	}{{k.Session, 0, 0, wrong, wire.StatusLease}, {k.Session, 2, 0, k.Key, wire.StatusLease}, {k.Session, 0, 1, k.Key, wire.StatusLease}, {k.Session + 1, 0, 0, k.Key, wire.StatusLease}} {
		var r *wire.Refusal
		if _, err := openBulk(k.addr, c.session, c.key, c.direction, c.zero); !errors.As(err, &r) || r.Status != c.status {
			t.Errorf("%+v: %v", c, err)
		}
	}
	for _, d := range []uint32{wire.BulkToWorker, wire.BulkToClient} {
		var open []net.Conn
		for range k.Most {
			open = append(open, k.mustOpen(d))
		}
		var r *wire.Refusal
		if _, err := k.open(d); !errors.As(err, &r) || r.Status != wire.StatusBusy {
			t.Errorf("one too many: %v", err)
		}
		open[0].Close()
		for end := time.Now().Add(bulkTime); ; time.Sleep(time.Millisecond) {
			if c, err := k.open(d); err == nil {
				c.Close()
				break
			} else if time.Now().After(end) {
				t.Fatalf("direction %d: no connection in place of one that was closed: %v", d, err)
			}
		}
	}
}

func TestBulkNone(t *testing.T) {
	_, addr := startWorker(t, nil)
	k := dial(t, addr, [16]byte{})
	if r := k.wait(wire.OpBulkOpen, 1); r.result != 801 {
		t.Errorf("BULK_OPEN of a worker without: %d", r.result)
	}
	var r *wire.Refusal
	if _, err := openBulk(addr, 0, [16]byte{}, 0, 0); !errors.As(err, &r) || r.Status != wire.StatusLease {
		t.Errorf("a key of zeros: %v", err)
	}
}

// Parts that make no sense end their connection, and nothing else.
func TestBulkMalformed(t *testing.T) {
	k := startBulk(t, nil)
	b := make([]byte, 100)
	put(t, k.mustOpen(wire.BulkToWorker), 1, b)
	for name, head := range map[string][]byte{
		"empty": partHead(2, 0, 0, 0), "number": partHead(0, 0, 100, 0), "large": partHead(2, 0, wire.MaxBulkPart+1, 0), "offset": partHead(2, 1, 100, 0), "zero": partHead(2, 0, 100, 1),
		"again": partHead(1, 0, 100, 0), "cut": partHead(3, 0, 200, 0), "head": partHead(3, 0, 200, 0)[:20],
	} {
		c := k.mustOpen(wire.BulkToWorker)
		if name == "head" {
			_, _ = c.Write(head)
		} else {
			_, _ = c.Write(append(head, b...))
		}
		_ = c.(interface{ CloseWrite() error }).CloseWrite()
		if _, err := readTaken(c); err == nil || errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
		c.Close()
	}
	dst, c := k.mustAlloc(200), k.mustOpen(wire.BulkToWorker)
	b = randomBytes(200, 5)
	put(t, c, 3, b) // half of it has come over another connection
	k.copyPart(dst, 3, 200, 0)
	k.copyPart(dst, 1, 100, 0)
	if got := k.copyOut(dst, 200, 0, 1); !bytes.Equal(got, append(make([]byte, 100), b[100:]...)) {
		t.Error("bytes differ")
	}
}

// A connection over which the rest of a part does not come ends after the keep-alive time; one that is silent between parts stays.
func TestBulkStalls(t *testing.T) {
	k := startBulk(t, func(c *Config) { c.Keepalive = 300 * time.Millisecond })
	idle, c := k.mustOpen(wire.BulkToWorker), k.mustOpen(wire.BulkToWorker)
	put(t, idle, 1, make([]byte, 10))
	if _, err := c.Write(partHead(2, 0, 1000, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := readTaken(c); !errors.Is(err, io.EOF) {
		t.Errorf("%v", err)
	}
	put(t, idle, 3, make([]byte, 10))
}

// If a part cannot be copied, the client is told and its next wait fails, as with COPY_IN. The slot is free again, whatever the reason.
func TestBulkFailed(t *testing.T) {
	k := startBulk(t, nil)
	c := k.mustOpen(wire.BulkToWorker)
	src, dst := randomBytes(1000, 4), k.mustAlloc(1000)
	number := uint64(1)
	for name, bad := range map[string]func(){
		"address": func() { k.copyPart(1<<50, number, len(src), 0) },
		"stream":  func() { k.copyPart(dst, number, len(src), 99) },
		"context": func() {
			k.write(wire.Request{Op: wire.OpCopyInBulk, Ctx: 77}, u64(dst), u64(number), u32(0), u32(0), u32(uint32(len(src))), u32(0))
		},
	} {
		for range bulkSlots + 1 {
			number++
			put(t, c, number, src)
			bad()
		}
		if r := k.streamSync(0); r.result == 0 {
			t.Errorf("%s: the wait returned no error", name)
		}
		k.mu.Lock()
		if len(k.errs) != bulkSlots+1 {
			t.Errorf("%s: %d errors", name, len(k.errs))
		}
		k.errs = nil
		k.mu.Unlock()
	}
	number++
	put(t, c, number, src)
	k.copyPart(dst, number, len(src), 0)
	if got := k.copyOut(dst, len(src), 0, 1); !bytes.Equal(got, src) {
		t.Error("bytes differ")
	}
}

// A context ends between parts and their commands, the one in which the slots are registered as well.
func TestBulkContexts(t *testing.T) {
	k := startBulk(t, nil)
	c := k.mustOpen(wire.BulkToWorker)
	src := randomBytes(2*bulkSlots<<20, 6)
	part := func(i int) []byte { return src[i<<20 : (i+1)<<20] }
	number := uint64(1)
	for round := range 3 {
		ctx := uint32(100 + round)
		if r := k.wait(opCuCtxCreate_v2, 0, u32(ctx), u32(0), u32(0)); r.result != 0 {
			t.Fatal(r.result)
		}
		r := k.wait(opCuMemAlloc_v2, ctx, []byte{1}, u64(64<<20))
		if r.result != 0 {
			t.Fatal(r.result)
		}
		dst := binary.LittleEndian.Uint64(r.payload)
		own := k.mustAlloc(64 << 20)
		for i := range 10 {
			put(t, c, number, part(i))
			k.write(wire.Request{Op: wire.OpCopyInBulk, Ctx: ctx}, u64(dst), u64(number), u32(0), u32(0), u32(1<<20), u32(0))
			put(t, c, number+1, part(i+round))
			k.copyPart(own+uint64(i)<<20, number+1, 1<<20, 0)
			number += 2
		}
		put(t, c, number, part(30))
		k.write(wire.Request{Op: opCuCtxDestroy_v2, Ctx: 1}, u32(ctx))
		k.copyPart(own+10<<20, number, 1<<20, 0)
		number++
		if got := k.copyOut(own, 11<<20, 0, uint32(round+1)); !bytes.Equal(got, cat(src[round<<20:(10+round)<<20], part(30))) {
			t.Errorf("round %d: bytes differ", round)
		}
		k.free(own)
	}
}

// FuzzBulk is what may come over a bulk connection to the device: nothing but the key is welcomed, and when the connection has ended, all
// slots are free but those of the parts that were taken.
func FuzzBulk(f *testing.F) {
	key := [16]byte{1, 2, 3}
	hello := func(kind uint32) []byte {
		h := testHello(kind)
		var b [wire.HelloSize]byte
		h.Encode(&b)
		return b[:]
	}
	begin := func(direction uint32) []byte { return cat(hello(wire.SessionBulk), key[:], u32(direction), u32(0)) }
	part := func(number uint64, size int) []byte {
		return append(partHead(number, 0, uint32(size), 0), make([]byte, size)...)
	}
	f.Add(cat(begin(0), part(1, 1), part(2, 100), part(3, 5)), true, uint64(2))
	f.Add(cat(begin(0), part(1, 1), part(1, 1)), true, uint64(1))
	f.Add(cat(begin(0), part(1, 100)[:60]), true, uint64(1))
	f.Add(cat(begin(0), partHead(1, 0, 0, 0)), true, uint64(1))
	f.Add(cat(begin(0), partHead(1, 1, 1, 1)), true, uint64(1))
	f.Add(begin(1), true, uint64(1))
	f.Add(begin(2), true, uint64(1))
	f.Add(cat(hello(wire.SessionAttach), key[:], u64(0)), true, uint64(1))
	f.Add(cat(make([]byte, 16), u64(0), part(1, 1)), false, uint64(1))
	f.Add(cat(key[:], u64(0), part(1, 1)), false, uint64(1))
	loadFakeDriver(f)
	s, acct := fakeSession(f, nil, nil)
	f.Cleanup(func() { s.rd.Close(); acct.Close() })
	b := &s.bulk
	b.most = 1
	if err := b.prepare(); err != nil {
		f.Fatal(err)
	}
	b.key = key
	f.Fuzz(func(t *testing.T, in []byte, raw bool, drop uint64) {
		fd, far := socketPair(t)
		if err := unix.SetsockoptInt(far, unix.SOL_SOCKET, unix.SO_SNDBUF, 4<<20); err != nil {
			t.Fatal(err)
		}
		_, _ = unix.SendmsgN(far, in, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		_ = unix.Shutdown(far, unix.SHUT_WR)
		b.asking++
		done := make(chan struct{})
		go func() { b.serve(fd, raw); close(done) }()
		b.drop(drop)
		for over := false; !over; {
			select {
			case <-done:
				over = true
			case <-time.After(time.Millisecond): // more parts may come than there are slots
			}
			b.mu.Lock()
			taken := slices.Collect(maps.Keys(b.parts))
			b.mu.Unlock()
			for _, n := range taken {
				b.drop(n)
			}
		}
		unix.Close(far)
		b.mu.Lock()
		defer b.mu.Unlock()
		if len(b.free) != bulkSlots || len(b.parts)+len(b.busy)+len(b.arriving)+len(b.conns)+len(b.drops)+b.open[0]+b.open[1]+b.asking+s.out.up != 0 {
			t.Fatalf("%d slots are free, %d parts, %d busy, %d arriving, connections %v %v, %d drops, %d asking, %d up", len(b.free), len(b.parts), len(b.busy), len(b.arriving), b.conns, b.open, len(b.drops), b.asking, s.out.up)
		}
	})
}
