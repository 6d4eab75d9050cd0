package leasesock

import (
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

func FuzzRequest(f *testing.F) {
	b := make([]byte, wire.LeaseRequestSize)
	copy(b, wire.LeaseRequestMagic)
	f.Add(b)
	f.Add([]byte(wire.LeaseRequestMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseRequest(b)
		if (err == nil) != (len(b) == wire.LeaseRequestSize && string(b[:8]) == wire.LeaseRequestMagic) {
			t.Fatal(err)
		}
		if len(r.program) > 40 || strings.ContainsRune(r.program, 0) {
			t.Fatalf("%q", r.program)
		}
	})
}

// A program that asks too late learns that its lease has ended; another user's program learns
// nothing about the lease.
func TestEndedLease(t *testing.T) {
	var refused []Refusal
	s, err := New(Config{
		RunDir: t.TempDir(), Base: t.Context(), Log: slog.New(slog.DiscardHandler),
		Lease:   func(string) (lease.Lease, bool) { return lease.Lease{}, false },
		Refused: func(l *lease.Lease, r Refusal) { refused = append(refused, r) },
		Point:   func(string) {},
	})
	if err != nil {
		t.Fatal(err)
	}
	l := &lease.Lease{ID: form.NewLeaseID(), Request: lease.Request{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Key: lease.Key{Job: "1"}}}
	if err := s.MakeDir(l.ID); err != nil {
		t.Fatal(err)
	}
	sock, err := s.Listen(l)
	if err != nil {
		t.Fatal(err)
	}
	sock.Serve()
	c, err := net.Dial("unix", s.Path(l.ID))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := make([]byte, wire.LeaseRequestSize)
	copy(b, wire.LeaseRequestMagic)
	b[8], b[12] = wire.LeaseVersion, wire.SessionCompute
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	said, err := io.ReadAll(c)
	sock.Close()
	s.Wait()
	if err != nil || !strings.Contains(string(said), "lease "+l.ID+" has ended") {
		t.Errorf("%q, %v", said, err)
	}
	if len(refused) != 1 || refused[0].Stranger || refused[0].UID != l.Request.UID {
		t.Errorf("%+v", refused)
	}
	if ids := s.Leftovers(); len(ids) != 1 || ids[0] != l.ID {
		t.Errorf("left are %v", ids)
	}
	if err := s.RemoveDir(l.ID); err != nil || len(s.Leftovers()) != 0 {
		t.Errorf("%v, and %v is left", err, s.Leftovers())
	}
}
