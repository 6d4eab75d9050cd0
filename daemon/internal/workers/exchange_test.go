package workers

import (
	"encoding/binary"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
)

// exchanges connects to a session of a lease as another session of the lease does, and returns what the session says to a token
// that is none.
func exchanges(t *testing.T, p *Pool, id string, slot int) byte {
	t.Helper()
	p.mu.Lock()
	b := p.leases[id].broker
	p.mu.Unlock()
	c, end, err := exchange.Connect()
	if err != nil {
		t.Fatal(err)
	}
	const other = 99
	b.Join(other, c)
	defer b.Leave(other)
	link := asConn(t, end)
	_ = link.SetDeadline(time.Now().Add(10 * time.Second))
	req := binary.LittleEndian.AppendUint32(make([]byte, 4), uint32(slot))
	if _, err := link.Write(req); err != nil {
		t.Fatal(err)
	}
	answer, oob := make([]byte, 16), make([]byte, unix.CmsgSpace(4))
	n, on, _, _, err := link.ReadMsgUnix(answer, oob)
	if err != nil {
		t.Fatal(err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil || len(msgs) != 1 {
		t.Fatalf("the broker has no session %d: % x, %v", slot, answer[:n], err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		t.Fatal(fds, err)
	}
	session := asConn(t, os.NewFile(uintptr(fds[0]), "session"))
	_ = session.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := session.Write(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	if n, err = session.Read(answer); n != 1 || err != nil {
		t.Fatalf("session %d: % x, %v", slot, answer[:n], err)
	}
	return answer[0]
}

// asConn makes a connection of a file, which it closes.
func asConn(t *testing.T, f *os.File) *net.UnixConn {
	t.Helper()
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.UnixConn)
}

// Sessions of a lease reach each other through the daemon, whose broker has their connections and no others. Those of an
// earlier daemon are TestKilledDaemon's.
func TestExchange(t *testing.T) {
	p := newPool(t, setup(t), nil)
	l := testLease("e", 0)
	c, w := pair(t)
	s, err := p.Start(t.Context(), l, request("e"), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	if b := exchanges(t, p, s.Lease, 0); b != 0 {
		t.Errorf("a token of zeros: %d", b)
	}
	if all, err := os.ReadDir(p.cfg.Dir); err != nil || len(all) != 1 {
		t.Errorf("%v, %v", all, err)
	}
	st, err := os.Stat(p.cfg.Dir)
	if err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the directory of the sockets: %v, %v", st.Mode(), err)
	}
	c.Close()
	waitFor(t, "its end", func() bool { return len(p.Sessions(s.Lease)) == 0 })
	if _, err := os.Lstat(p.linkPath(&session{Session: s})); err == nil {
		t.Error("its socket stays")
	}
}
