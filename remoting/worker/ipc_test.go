package worker

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
)

// fixed is an account with so many bytes left.
type fixed struct {
	ledger
	left uint64
}

func (f *fixed) Reserve(_ int, n uint64) bool {
	if n > f.left {
		return false
	}
	f.left -= n
	return true
}

func (f *fixed) Borrow(int) {}

func (f *fixed) Inherit(dev, _ int, _, n uint64) bool { return f.Reserve(dev, n) }

func (f *fixed) Release(_ int, n uint64) { f.left += n }
func (f *fixed) Info(int) account.Info   { return account.Info{} }

// opens gives an allocation that a session has open, and what ends its exporter.
func opens(t *testing.T, left, bytes uint64) (*session, *opened, func(), *fixed) {
	t.Helper()
	b := exchange.NewBroker(testLog())
	t.Cleanup(b.Close)
	var both [2]*exchange.Exports
	for slot := range both {
		c, end, err := exchange.Connect()
		if err != nil {
			t.Fatal(err)
		}
		b.Join(slot, c)
		fd, err := unix.Dup(int(end.Fd()))
		end.Close()
		if err != nil {
			t.Fatal(err)
		}
		link, err := exchange.NewLink(fd)
		if err != nil {
			t.Fatal(err)
		}
		both[slot] = exchange.New(testLog(), slot, link)
		t.Cleanup(both[slot].Close)
	}
	f := &fixed{left: left}
	s := &session{log: testLog(), ledger: f, reason: func(string) {}, exit: func(int) {}, wr: wire.NewWriter(&bytesStream{})}
	s.mem.init(s)
	s.mem.setDevices(1, []uint64{0})
	tok := both[0].Add(&exchange.Item{Kind: exchange.Memory, Used: func(int) {}})
	use, _, err := both[1].Open(tok)
	if err != nil {
		t.Fatal(err)
	}
	return s, &opened{m: &s.mem, bytes: bytes, use: use}, both[0].Close, f
}

// TestHeir: when an exporter has ended, who has its memory open is charged for it, and pays it back on closing.
func TestHeir(t *testing.T) {
	s, o, exporter, f := opens(t, 100<<20, 60<<20)
	done := make(chan struct{})
	go func() { o.heir(time.Minute); close(done) }()
	exporter()
	<-done
	if f.left != 40<<20 || s.mem.held[0] != 60<<20 {
		t.Errorf("%d MiB are left, %d are held", f.left>>20, s.mem.held[0]>>20)
	}
	o.close()
	o.close()
	if f.left != 100<<20 || s.mem.held[0] != 0 {
		t.Errorf("closed: %d MiB are left, %d are held", f.left>>20, s.mem.held[0]>>20)
	}
}

// TestHeirWithoutRoom: a session that the lease has no room for ends. What it closed before costs nothing.
func TestHeirWithoutRoom(t *testing.T) {
	s, o, exporter, _ := opens(t, 10<<20, 60<<20)
	var why string
	s.reason = func(r string) { why = r }
	ended := make(chan int, 1)
	s.exit = func(code int) { ended <- code }
	go o.heir(50 * time.Millisecond)
	exporter()
	<-ended
	if !strings.Contains(why, "60 MiB") {
		t.Errorf("the reason is %q", why)
	}

	s, o, exporter, f := opens(t, 10<<20, 60<<20)
	s.exit = func(int) { t.Error("the session ends for memory that it has closed") }
	o.close()
	exporter()
	o.heir(0)
	if f.left != 10<<20 {
		t.Errorf("%d MiB are left", f.left>>20)
	}
}

// TestBacking: memory that others have open is given back when the last of them has closed it.
func TestBacking(t *testing.T) {
	var b backing
	n := 0
	b.used(1)
	b.used(1)
	b.freed(func() { n++ })
	b.used(-1)
	if n != 0 {
		t.Error("given back while it is used")
	}
	b.used(-1)
	if n != 1 {
		t.Errorf("given back %d times", n)
	}
	new(backing).freed(func() { n++ })
	if n != 2 {
		t.Error("what nobody else uses is not given back at once")
	}
}
