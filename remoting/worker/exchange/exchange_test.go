package exchange

import (
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/unixsock"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// lease is the broker of a lease without sessions.
func lease(t *testing.T) *Broker {
	b := NewBroker(slog.New(slog.NewTextHandler(io.Discard, nil)))
	t.Cleanup(b.Close)
	return b
}

// session makes the exports of a session in a slot of a lease.
func session(t *testing.T, b *Broker, slot int) *Exports {
	t.Helper()
	c, end, err := Connect()
	if err != nil {
		t.Fatal(err)
	}
	b.Join(slot, c)
	fd, err := unix.Dup(int(end.Fd()))
	end.Close()
	if err != nil {
		t.Fatal(err)
	}
	k, err := NewLink(fd)
	if err != nil {
		t.Fatal(err)
	}
	e := New(b.log, slot, k)
	t.Cleanup(e.Close)
	return e
}

func wantToken(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, ErrToken) {
		t.Errorf("%s: %v", what, err)
	}
}

func TestExchange(t *testing.T) {
	b := lease(t)
	e, me := session(t, b, 0), session(t, b, 1)
	var used atomic.Int32
	it := &Item{Kind: Memory, Device: 3, Offset: 512, Size: 1000, Charged: 2 << 20, Used: func(n int) { used.Add(int32(n)) }}
	copy(it.Handle[:], "the driver's")
	tok := e.Add(it)
	use, got, err := me.Open(tok)
	if err != nil {
		t.Fatal(err)
	}
	if got.Kind != Memory || got.Device != 3 || got.Offset != 512 || got.Size != 1000 || got.Charged != 2<<20 || got.Handle != it.Handle || got.FD != -1 {
		t.Errorf("%+v", got)
	}
	if used.Load() != 1 {
		t.Errorf("%d sessions use it", used.Load())
	}
	for i := range tok {
		forged := tok
		forged[i] ^= 0x10
		_, _, err := me.Open(forged)
		wantToken(t, "a forged token", err)
		if e.Own(forged) != nil {
			t.Errorf("a token with byte %d changed is the session's own", i)
		}
	}
	if _, _, err := e.Open(tok); !errors.Is(err, ErrOwn) {
		t.Errorf("its own: %v", err)
	}
	e.Remove(tok)
	_, _, err = me.Open(tok)
	wantToken(t, "a token that was withdrawn", err)
	use.Close()
	for until := time.Now().Add(5 * time.Second); used.Load() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the exporter does not see that nobody uses it")
		}
	}
}

// A descriptor is passed, and is the same file.
func TestExchangeFile(t *testing.T) {
	b := lease(t)
	e, me := session(t, b, 0), session(t, b, 1)
	fd, err := unix.MemfdCreate("file", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Write(fd, []byte("here")); err != nil {
		t.Fatal(err)
	}
	tok := e.Add(&Item{Kind: File, FD: fd, Used: func(int) {}})
	use, got, err := me.Open(tok)
	if err != nil {
		t.Fatal(err)
	}
	defer use.Close()
	e.Remove(tok)
	text := make([]byte, 4)
	if _, err := unix.Pread(got.FD, text, 0); err != nil || string(text) != "here" {
		t.Errorf("%q, %v", text, err)
	}
	unix.Close(got.FD)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
		t.Error("the exporter keeps the descriptor of an export that it has withdrawn")
	}
}

// A session of another lease gets nothing, even with a token.
func TestExchangeStranger(t *testing.T) {
	e := session(t, lease(t), 0)
	tok := e.Add(&Item{Kind: Memory, Used: func(int) { t.Error("a stranger uses it") }})
	other := lease(t)
	stranger := session(t, other, 1)
	_, _, err := stranger.Open(tok)
	wantToken(t, "a stranger", err)
	session(t, other, 0) // in the place of the exporter, without exports
	_, _, err = stranger.Open(tok)
	wantToken(t, "a stranger whose lease has a session of that number", err)
}

// What an exporter that has ended had exported is no export any more.
func TestExporterEnds(t *testing.T) {
	b := lease(t)
	e, me := session(t, b, 0), session(t, b, 1)
	tok := e.Add(&Item{Kind: Memory, Used: func(int) {}})
	e.Close()
	_, _, err := me.Open(tok)
	wantToken(t, "an exporter that has ended", err)
	b.Leave(0)
	_, _, err = me.Open(tok)
	wantToken(t, "an exporter that has left", err)
	if _, _, err := session(t, b, 1).Open(tok); !errors.Is(err, ErrToken) {
		t.Error(err)
	}
}

// A session of a daemon's waits for the next daemon where one has ended, and keeps what it has open meanwhile.
func TestNextBroker(t *testing.T) {
	dir := t.TempDir()
	connect := func(b *Broker, slot int) {
		t.Helper()
		c, err := unixsock.DialPackets(filepath.Join(dir, strconv.Itoa(slot)))
		if err != nil {
			t.Fatal(err)
		}
		b.Join(slot, c)
	}
	b := lease(t)
	var all []*Exports
	for slot := range 2 {
		l, err := unixsock.ListenPackets(filepath.Join(dir, strconv.Itoa(slot)))
		if err != nil {
			t.Fatal(err)
		}
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		fd, err := unix.Dup(int(f.Fd()))
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		connect(b, slot)
		k, err := NewLink(fd)
		if err != nil {
			t.Fatal(err)
		}
		e := New(b.log, slot, k)
		t.Cleanup(e.Close)
		all = append(all, e)
	}
	ended := make(chan struct{})
	tok := all[0].Add(&Item{Kind: Memory, Used: func(n int) {
		if n < 0 {
			close(ended)
		}
	}})
	use, _, err := all[1].Open(tok)
	if err != nil {
		t.Fatal(err)
	}
	b.Close()
	opened := make(chan error)
	tok2 := all[0].Add(&Item{Kind: Memory, Used: func(int) {}})
	go func() {
		_, _, err := all[1].Open(tok2)
		opened <- err
	}()
	next := lease(t)
	connect(next, 0)
	connect(next, 1)
	if err := <-opened; err != nil {
		t.Errorf("with the next daemon: %v", err)
	}
	select {
	case <-ended:
		t.Error("the use ended with the daemon")
	default:
	}
	use.Close()
	<-ended
}

// A session that was taken over cannot stop the others' exchange: neither by requests that make no sense, nor
// by not reading what it is sent.
func TestHostileSession(t *testing.T) {
	b := lease(t)
	e, me := session(t, b, 0), session(t, b, 1)
	bad, end, err := Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	b.Join(2, bad)
	fd := int(end.Fd())
	req := make([]byte, wire.ExporterWantedSize) // of slot 0, again and again, and never read
	for i := range burst / 2 {
		if _, err := unix.Write(fd, req); err != nil {
			t.Fatal(i, err)
		}
	}
	tok := e.Add(&Item{Kind: Memory, Used: func(int) {}})
	if _, _, err := me.Open(tok); err != nil {
		t.Error("beside a session that does not read:", err)
	}
	// One that is connected to, and never reads, is busy; nobody waits for it for ever.
	silent, unread, err := Connect()
	if err != nil {
		t.Fatal(err)
	}
	defer unread.Close()
	b.Join(3, silent)
	began := time.Now()
	for range 2000 {
		r, err := me.link.ask(3, time.Now().Add(openTime))
		if err != nil {
			t.Fatal(err)
		}
		if r.status == statusFull {
			break
		}
		unix.Close(r.fd)
		if time.Since(began) > openTime {
			t.Fatal("a queue without end")
		}
	}
	if _, err := unix.Write(fd, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := me.Open(e.Add(&Item{Kind: Memory, Used: func(int) {}})); err != nil {
		t.Error("after a request that makes no sense:", err)
	}
}

// FuzzBroker sends what a session that was taken over may send, in packets. The broker goes on for the others.
func FuzzBroker(f *testing.F) {
	f.Add([]byte{8, 0, 0, 0, 1, 0, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0, 1})
	f.Add([]byte{8, 0, 0, 0, 1, 255, 255, 255, 255, 1, 7, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		b := NewBroker(slog.New(slog.NewTextHandler(io.Discard, nil)))
		defer b.Close()
		e, me := session(t, b, 0), session(t, b, 1)
		c, end, err := Connect()
		if err != nil {
			t.Fatal(err)
		}
		defer end.Close()
		b.Join(2, c)
		fd := int(end.Fd())
		for len(data) > 0 {
			n := min(int(data[0]%16), len(data)-1)
			// Besides, a descriptor that nobody has asked for.
			if unix.Sendmsg(fd, data[1:1+n], unix.UnixRights(0), nil, unix.MSG_NOSIGNAL) != nil {
				break // the broker has done with it
			}
			data = data[1+n:]
		}
		use, _, err := me.Open(e.Add(&Item{Kind: Memory, Used: func(int) {}}))
		if err != nil {
			t.Fatal(err)
		}
		use.Close()
	})
}

// TestAnswer: what an exporter says arrives, and a session of an earlier release and one of this understand each other, except about
// which pool memory is of.
func TestAnswer(t *testing.T) {
	for _, it := range []Item{
		{Kind: Memory, Device: 3, Offset: 512, Size: 1000, Charged: 2 << 20, Handle: [64]byte{63: 9}, FD: -1},
		{Kind: Pointer, Device: 1, Size: 1000, Charged: 2 << 20, Pool: 0xfedcba9876543210, Handle: [64]byte{1, 63: 9}, FD: -1},
	} {
		b := encode(&it)
		if want := 96; it.Pool == 0 && len(b) != want {
			t.Errorf("%d bytes, %d with an earlier release", len(b), want)
		}
		if got := decode(b); !reflect.DeepEqual(*got, it) {
			t.Errorf("%+v instead of %+v", *got, it)
		}
		it.Pool = 0
		if got := decode(b[:96]); !reflect.DeepEqual(*got, it) {
			t.Errorf("an earlier release's: %+v instead of %+v", *got, it)
		}
	}
}

// What earlier releases send and understand, byte by byte: sessions of two releases share a lease while a node is upgraded, and a
// session outlives the daemon that is its broker.
func TestPacketsStay(t *testing.T) {
	var packets wire.Encoder
	(&wire.ExporterWanted{Number: 0x04030201, Slot: 0x08070605}).Encode(&packets)
	(&wire.Brokered{Kind: packetAnswer, Number: 0x04030201, Status: statusFull}).Encode(&packets)
	e := New(slog.Default(), 0x0102, &Link{})
	tok := e.Add(&Item{Kind: Pool})
	export := Item{Kind: File, Device: 3, Offset: 0x0a, Size: 0x0b, Charged: 0x0c, Handle: [64]byte{0: 0xaa, 63: 0xbb}}
	plain := encode(&export)
	export.Pool = 0x0807060504030201
	for _, c := range []struct {
		what, have, want string
	}{
		{"packets of a broker", hex.EncodeToString(packets.Buf()), "01020304" + "05060708" + "01000000" + "01020304" + "02000000"},
		{"a token behind its secret", hex.EncodeToString(tok[16:]), "02010000" + "04000000" + strings.Repeat("00", 40)},
		{"an export", hex.EncodeToString(plain), "03000000" + "03000000" + "0a00000000000000" + "0b00000000000000" + "0c00000000000000" + "aa" + strings.Repeat("00", 62) + "bb"},
		{"that of a pool", hex.EncodeToString(encode(&export)), hex.EncodeToString(plain) + "0102030405060708"},
	} {
		if c.have != c.want {
			t.Errorf("%s: %s, with earlier releases %s", c.what, c.have, c.want)
		}
	}
	if tok[0]++; e.Own(tok) != nil {
		t.Error("a token with another secret is taken")
	}
	if tok[0]--; e.Own(tok) == nil {
		t.Error("the session's own token is not")
	}
	if tok[40] = 1; e.Own(tok) != nil || tok.plain() {
		t.Error("a token with something where zeroes belong is taken")
	}
}

// New connections of a client that come before their session can take any wait for it, a bounded number of them.
func TestEarlyNewcomers(t *testing.T) {
	b := lease(t)
	e := session(t, b, 0)
	var far []int
	for range maxEarly + 1 {
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(p[1])
		if err := b.Attach(0, p[0], true); err != nil {
			t.Fatal(err)
		}
		unix.Close(p[0])
		far = append(far, p[1])
	}
	var c [1]byte
	if n, err := unix.Read(far[maxEarly], c[:]); n != 0 || err != nil { // waits until all have come
		t.Errorf("one too many: %d, %v", n, err)
	}
	e.OnAttach(func(fd int, raw bool) {
		if _, err := unix.Write(fd, []byte{7}); err != nil || !raw {
			t.Errorf("raw %v, %v", raw, err)
		}
		unix.Close(fd)
	})
	for i, fd := range far[:maxEarly] {
		if n, err := unix.Read(fd, c[:]); n != 1 || err != nil {
			t.Errorf("number %d: %d, %v", i, n, err)
		}
	}
}

// A bulk connection is passed on with what has been read of it, and closed before the session takes any.
func TestBulk(t *testing.T) {
	b := lease(t)
	e := session(t, b, 0)
	pass := func(slot int, raw bool) (far int, err error) {
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(p[1]) })
		defer unix.Close(p[0])
		return p[1], b.Bulk(slot, p[0], raw)
	}
	var c [1]byte
	far, err := pass(0, true)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Read(far, c[:]); n != 0 || err != nil {
		t.Errorf("before the session takes any: %d, %v", n, err)
	}
	e.OnBulk(func(fd int, raw bool) {
		what := byte(1)
		if raw {
			what = 2
		}
		_, _ = unix.Write(fd, []byte{what})
		unix.Close(fd)
	})
	for raw, want := range map[bool]byte{false: 1, true: 2} {
		far, err := pass(0, raw)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := unix.Read(far, c[:]); n != 1 || c[0] != want || err != nil {
			t.Errorf("raw %v: %d, %d, %v", raw, n, c[0], err)
		}
	}
	if _, err := pass(1, true); !errors.Is(err, ErrAbsent) {
		t.Errorf("a slot without a session: %v", err)
	}
}
