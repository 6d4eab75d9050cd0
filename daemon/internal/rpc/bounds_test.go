package rpc

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/identity/mungetest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
)

// hold opens streams on c, says on each that a message of size bytes comes, sends as
// much of it as the other side lets it but for the last byte, and answers how much the
// other side took within a moment.
func hold(t *testing.T, c net.Conn, streams, size int) (took int) {
	t.Helper()
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	fr := http2.NewFramer(c, c)
	var head bytes.Buffer
	enc := hpack.NewEncoder(&head)
	for _, h := range []hpack.HeaderField{
		{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: "/sluice.v1.Local/Acquire"},
		{Name: ":authority", Value: "local"}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"},
	} {
		if err := enc.WriteField(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := fr.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	if err := fr.WriteWindowUpdate(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	left, window := map[uint32]int{}, map[uint32]int{}
	conn := 65535
	send := func(id uint32, b []byte) {
		if err := fr.WriteData(id, false, b); err != nil {
			t.Fatal(err)
		}
		conn, window[id], left[id], took = conn-len(b), window[id]-len(b), left[id]-len(b), took+len(b)
	}
	start := make([]byte, 5)
	binary.BigEndian.PutUint32(start[1:], uint32(size))
	for i := range streams {
		id := uint32(2*i + 1)
		if err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: head.Bytes(), EndHeaders: true}); err != nil {
			t.Fatal(err)
		}
		left[id], window[id] = size+4, 65535
		send(id, start)
	}
	zeros := make([]byte, 16<<10)
	for {
		for id := range left {
			for n := 1; n > 0; {
				if n = min(len(zeros), left[id], window[id], conn); n > 0 {
					send(id, zeros[:n])
				}
			}
		}
		_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		f, err := fr.ReadFrame()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return took
		}
		if err != nil {
			t.Fatal(err)
		}
		switch f := f.(type) {
		case *http2.WindowUpdateFrame:
			if f.StreamID == 0 {
				conn += int(f.Increment)
			} else {
				window[f.StreamID] += int(f.Increment)
			}
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = fr.WriteSettingsAck()
			}
		case *http2.PingFrame:
			if !f.IsAck() {
				_ = fr.WritePing(true, f.Data)
			}
		case *http2.RSTStreamFrame:
			delete(left, f.StreamID)
		case *http2.MetaHeadersFrame, *http2.HeadersFrame:
			// refused before it is read
			delete(left, f.Header().StreamID)
		}
	}
}

// serveLocal runs a service at a socket that any user can reach.
func serveLocal(t *testing.T, change func(*localListener)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenLocal(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(l.(*localListener))
	}
	s := NewServer(LocalCreds(), "test")
	ServeLocal(s, &desk{})
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return path
}

// What any user can make the daemon keep for requests that are never finished.
func TestUnfinished(t *testing.T) {
	path := serveLocal(t, nil)
	for streams, size := range map[int]int{localStreams: localMessage, 2 * maxStreams: maxMessage} {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		if n := hold(t, c, streams, size); n > 2*localStreams*localMessage || streams == localStreams && n < localMessage/2 {
			t.Errorf("%d streams of %d bytes: the daemon keeps %d bytes for one connection", streams, size, n)
		}
		_ = c.Close()
	}
}

// dialAs connects as another user.
func dialAs(t *testing.T, path string, uid int) net.Conn {
	t.Helper()
	type made struct {
		c   net.Conn
		err error
	}
	ch := make(chan made)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			ch <- made{err: errno}
			return
		}
		c, err := net.Dial("unix", path)
		ch <- made{c, err}
	}()
	m := <-ch
	if m.err != nil {
		t.Fatal(m.err)
	}
	t.Cleanup(func() { _ = m.c.Close() })
	return m.c
}

// Users that fill all places there are leave root's free.
func TestRootsPlaces(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root connects as others")
	}
	sock := serveLocal(t, func(l *localListener) { l.users = limit.New(limit.Bounds{Trusted: 4, TrustedKey: 2}) })
	for dir := filepath.Dir(sock); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	refused := 0
	for i := range 6 {
		c := dialAs(t, sock, 70001+i/2)
		if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
			refused++
			continue
		}
		fr := http2.NewFramer(c, c)
		_ = fr.WriteSettings()
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := fr.ReadFrame(); err != nil {
			refused++
		}
	}
	if refused != 2 {
		t.Errorf("%d users' connections of 6 refused, with room for 4", refused)
	}
	c, err := DialLocal(sock, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.List(t.Context()); err != nil {
		t.Error(err)
	}
}

// A daemon that has too much to do to accept is not one that is gone.
func TestBusySocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path) // fills the backlog
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := ListenLocal(path, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "another sluiced") {
		t.Errorf("its socket was taken: %v", err)
	}
}

// Nodes behind one address have their places each; a node has so many.
func TestPlacesOfNodes(t *testing.T) {
	socket := mungetest.Start(t, "k")
	addr := serve(t, &book{name: "gpu01"}, known(t, "gpu01", socket), limit.New(limit.Bounds{TrustedKey: 1}))
	for _, node := range []string{"node01", "node02"} {
		if _, err := dial(t, addr, "gpu01", known(t, node, socket)).Inventory(t.Context()); err != nil {
			t.Errorf("%s: %v", node, err)
		}
	}
	if _, err := dial(t, addr, "gpu01", known(t, "node02", socket)).Inventory(t.Context()); code(err) != lease.Down {
		t.Errorf("a second connection of node02: %v", err)
	}
}
