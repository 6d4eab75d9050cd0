package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// bulkMost is session.bulk_connections of TestBulk. Encrypted sessions have fewer.
const bulkMost, encryptedMost = 16, 2

// TestBulk: the client of a session opens all of its bulk connections at once, plain and encrypted, though the lease may have only
// few sessions. Other keys, and other sessions' numbers, get none.
func TestBulk(t *testing.T) {
	t.Parallel()
	for _, encrypt := range []string{"false", "true"} {
		t.Run("encrypt="+encrypt, func(t *testing.T) {
			s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 1, Config: map[string]string{
				"encrypt": encrypt, "session.max_per_lease": "2", "session.bulk_connections": fmt.Sprint(bulkMost),
			}})
			h := s.Hosts[0]
			p, err := h.Node.Start(h.Run(user, "--fraction", "40", "--", s.Program("steady"), "5"))
			if err != nil {
				t.Fatal(err)
			}
			var id string
			eventually(t, 20*time.Second, "the program computes", func() error {
				ls, err := list(h)
				if len(ls) != 1 || len(ls[0].Sessions) != 1 || ls[0].Sessions[0].Counts.Launches == 0 {
					return fmt.Errorf("%d leases, %v", len(ls), err)
				}
				id = ls[0].ID
				return nil
			})
			bulk := &bulkClient{t: t, most: map[string]uint32{"false": bulkMost, "true": encryptedMost}[encrypt], path: h.Node.Path("/run/sluice/leases/" + id + "/sock")}
			bulk.begin()
			bulk.all()
			bulk.refused(id)
			bulk.session.Close()
			eventually(t, 20*time.Second, "the session's number is not known any more", func() error {
				f, err := site.Knock(bulk.path, wire.BulkKind(bulk.Session), 0)
				if err == nil {
					f.Close()
					return errors.New("a connection")
				}
				if !strings.Contains(err.Error(), "has no session") {
					t.Fatal(err)
				}
				return nil
			})
			_ = p.Signal(syscall.SIGTERM)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := p.Wait(ctx); err != nil {
				t.Errorf("the program: %v", err)
			}
			if got := audited(t, s.Owners[0], audit.SessionOpen); got != 2 {
				t.Errorf("%d sessions were begun", got)
			}
		})
	}
}

// TestBulkProgram: the large copies of a program go by bulk connections, plain and encrypted, up to as many as the owner allows.
func TestBulkProgram(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		encrypt, most string
		some          bool
	}{{"false", "8", true}, {"true", "8", true}, {"true", "1", true}, {"false", "0", false}} {
		t.Run("encrypt="+c.encrypt+" most="+c.most, func(t *testing.T) {
			s := start(t, site.Options{Hosts: 1, Owners: 1, GPUs: 1, Config: map[string]string{"encrypt": c.encrypt, "session.bulk_connections": c.most}})
			h := s.Hosts[0]
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			run := h.Run(user, "--fraction", "60", "--trace", "--", s.Opt("bulk"), "2")
			run.Env = append(run.Env, "SLUICE_BULK=3")
			out, err := h.Node.Run(ctx, run)
			if err != nil || !strings.Contains(out, "PASS") {
				t.Fatalf("%v: %s", err, out)
			}
			var to, from int64
			_, counters, _ := strings.Cut(out, " bulk_out=")
			if _, err := fmt.Sscanf(counters, "%d bulk_in=%d", &to, &from); err != nil || c.some != (to > 100<<20) || c.some != (from > 100<<20) {
				t.Errorf("%d bytes to the device and %d from it by bulk connections, %v", to, from, err)
			}
			allFree(t, s, nil)
		})
	}
}

// bulkClient is the client of a session.
type bulkClient struct {
	t       *testing.T
	path    string // of the lease's socket
	most    uint32 // connections for each direction
	session *os.File
	wire.BulkOpenReply
}

func helloOf(kind, session uint32) []byte {
	var b [wire.HelloSize]byte
	(&wire.Hello{Version: wire.Version, Kind: kind, Fingerprint: api.Fingerprint(), Mem: uint64(session), Program: "bulk"}).Encode(&b)
	return b[:]
}

// begin opens a session, and asks for the key.
func (c *bulkClient) begin() {
	c.t.Helper()
	f, err := site.Knock(c.path, wire.SessionCompute, 0)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { f.Close() })
	c.session = f
	if _, err := f.Write(helloOf(wire.SessionCompute, 0)); err != nil {
		c.t.Fatal(err)
	}
	if _, err := wire.ReadWelcome(f); err != nil {
		c.t.Fatal(err)
	}
	var b [wire.RequestSize]byte
	(&wire.Request{Op: wire.OpBulkOpen, Flags: wire.FlagWait, Call: 1}).Encode(&b)
	if _, err := f.Write(b[:]); err != nil {
		c.t.Fatal(err)
	}
	for {
		var b [wire.ReplySize]byte
		if _, err := io.ReadFull(f, b[:]); err != nil {
			c.t.Fatal(err)
		}
		var h wire.Reply
		if err := h.Decode(&b); err != nil {
			c.t.Fatal(err)
		}
		p := make([]byte, h.Size)
		if _, err := io.ReadFull(f, p); err != nil {
			c.t.Fatal(err)
		}
		if h.Kind != wire.FrameReply {
			continue
		}
		d := wire.NewDecoder(p)
		if c.Decode(d); h.Result != 0 || d.Done() != nil || c.Most != c.most {
			c.t.Fatalf("BULK_OPEN: %d, %+v", h.Result, c.BulkOpenReply)
		}
		return
	}
}

func (c *bulkClient) open(session uint32, key [16]byte, direction uint32) (*os.File, error) {
	f, err := site.Knock(c.path, wire.BulkKind(session), 0)
	if err != nil {
		return nil, err
	}
	var e wire.Encoder
	(&wire.BulkKey{Key: key, Direction: direction}).Encode(&e)
	if _, err = f.Write(append(helloOf(wire.SessionBulk, session), e.Buf()...)); err == nil {
		_, err = wire.ReadWelcome(f)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	c.t.Cleanup(func() { f.Close() })
	return f, nil
}

// all opens all connections at once, and sends a part over each that takes parts.
func (c *bulkClient) all() {
	c.t.Helper()
	var wg sync.WaitGroup
	for i := range 2 * c.most {
		wg.Go(func() {
			f, err := c.open(c.Session, c.Key, i%2)
			if err == nil && i%2 == wire.BulkToWorker {
				var e wire.Encoder
				(&wire.BulkPart{Number: uint64(i) + 1, Size: wire.MaxBulkPart}).Encode(&e)
				if _, err = f.Write(append(e.Buf(), make([]byte, wire.MaxBulkPart)...)); err == nil {
					var b [wire.BulkTakenSize]byte
					_, err = io.ReadFull(f, b[:])
				}
			}
			if err != nil {
				c.t.Errorf("connection %d: %v", i, err)
			}
		})
	}
	wg.Wait()
}

func (c *bulkClient) refused(id string) {
	c.t.Helper()
	for direction := range uint32(2) {
		var r *wire.Refusal
		if _, err := c.open(c.Session, c.Key, direction); !errors.As(err, &r) || r.Status != wire.StatusBusy {
			c.t.Errorf("one too many of direction %d: %v", direction, err)
		}
	}
	var r *wire.Refusal
	if _, err := c.open(c.Session, [16]byte{1}, 0); !errors.As(err, &r) || r.Status != wire.StatusLease {
		c.t.Errorf("another key: %v", err)
	}
	// The other session is another process's, which alone may have connections for it, whatever key comes with them.
	var no *site.Refused
	for _, kind := range []uint32{wire.BulkKind(1 - c.Session), wire.AttachKind(1 - c.Session)} {
		f, err := site.Knock(c.path, kind, 0)
		if err == nil {
			f.Close()
		}
		if !errors.As(err, &no) || !strings.Contains(no.Reason, fmt.Sprintf("session %d of lease %s is not of process ", 1-c.Session, id)) {
			c.t.Errorf("the other session's number, kind %d: %v", kind, err)
		}
	}
	if _, err := c.open(77, c.Key, 0); !errors.As(err, &no) || !strings.Contains(no.Reason, "lease "+id+" has no session 77") {
		c.t.Errorf("a session that does not exist: %v", err)
	}
	// The lease is full of sessions, and has as many as before.
	if f, err := site.Knock(c.path, wire.SessionCompute, 0); err == nil || !strings.Contains(err.Error(), "has 2 sessions") {
		if err == nil {
			f.Close()
		}
		c.t.Errorf("a third session: %v", err)
	}
}
