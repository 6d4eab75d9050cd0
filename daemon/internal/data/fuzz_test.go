package data

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

type script struct {
	io.Reader
	io.Writer
}

// FuzzResponse is a server that says anything to a host.
func FuzzResponse(f *testing.F) {
	f.Add(make([]byte, challengeSize+resultSize))
	f.Fuzz(func(t *testing.T, in []byte) {
		var said bytes.Buffer
		if respond(script{bytes.NewReader(in), &said}, [16]byte{1}, [32]byte{2}, false) == nil {
			t.Fatal("a server without the secret is believed")
		}
		if said.Len() != helloSize {
			t.Fatal("the client answered a server without the secret")
		}
		_ = readResult(bytes.NewReader(in))
	})
}

// wall is a connection from which the server reads what the fuzzer gives.
type wall struct {
	net.Conn
	in  *bytes.Reader
	out bytes.Buffer
}

func (w *wall) Read(b []byte) (int, error)       { return w.in.Read(b) }
func (w *wall) Write(b []byte) (int, error)      { return w.out.Write(b) }
func (w *wall) Close() error                     { return nil }
func (w *wall) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (w *wall) SetDeadline(time.Time) error      { return nil }
func (w *wall) SetWriteDeadline(time.Time) error { return nil }

// FuzzPreamble is a stranger at an owner's data port. It may even know the number
// of a ticket.
func FuzzPreamble(f *testing.F) {
	h := hello{ticket: [16]byte{1, 2, 3}}
	good := h.encode()
	f.Add(append(good[:], make([]byte, responseSize)...))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	sum := sha256.Sum256([]byte("secret"))
	f.Fuzz(func(t *testing.T, in []byte) {
		s := NewServer(Config{Admit: func(context.Context, lease.SessionRequest, *os.File) error {
			t.Error("a stranger is let in")
			return nil
		}})
		s.tickets.out[[16]byte{1, 2, 3}] = &ticket{secret: sum, request: lease.SessionRequest{Lease: "l"}, until: time.Now().Add(time.Hour)}
		w := &wall{in: bytes.NewReader(in)}
		c := s.table.Add(w, "k")
		if _, err := s.handshake(t.Context(), c); err == nil {
			t.Fatal("a stranger's handshake succeeds")
		}
		if n := w.out.Len(); n != 0 && n != challengeSize {
			t.Fatalf("the server said %d bytes", n)
		}
		_ = c.Close()
	})
}
