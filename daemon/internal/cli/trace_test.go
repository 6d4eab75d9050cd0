package cli

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// leaseDaemon has one lease, in which one process computes.
type leaseDaemon struct {
	rpc.LocalService
	l lease.Status
}

func (d *leaseDaemon) List(context.Context, rpc.Peer) ([]lease.Status, error) {
	return []lease.Status{d.l}, nil
}

// TestTraceStopped: ^C before a trace has begun ends sluice trace at once with a message that says so, and leaves no file, whether the
// daemon or the session does not answer.
func TestTraceStopped(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef"
	for _, silent := range []string{"the daemon", "the session", "the session after its WELCOME"} {
		t.Run(silent, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "slu") // short: it holds sockets
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			local, err := rpc.ListenLocal(filepath.Join(dir, "sluiced.sock"), slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			server := rpc.NewServer(rpc.LocalCreds(), "test")
			rpc.ServeLocal(server, &leaseDaemon{l: lease.Status{
				Lease:    lease.Lease{ID: id, Grants: []lease.Grant{{Owner: "o"}}},
				Sessions: []lease.Session{{Lease: id, Client: 7, Kind: wire.SessionCompute}},
			}})
			go func() { _ = server.Serve(local) }()
			defer server.Stop()
			at := filepath.Join(dir, "leases", id)
			if err := os.MkdirAll(at, 0o700); err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("unix", filepath.Join(at, "sock"))
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			over := make(chan struct{})
			defer close(over)
			go func() {
				c, err := l.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				if err := answerTrace(t, c.(*net.UnixConn), silent); err != nil {
					t.Error(err)
				}
				stop()
				<-over
			}()
			tmp, out := t.TempDir(), t.TempDir()
			t.Setenv("TMPDIR", tmp)
			begun := time.Now()
			err = traceLease(ctx, filepath.Join(dir, "sluiced.sock"), id, time.Minute, filepath.Join(out, "t.json"), t.Logf)
			if err == nil || !strings.Contains(err.Error(), errStopped.Error()) || time.Since(begun) > askTime/2 {
				t.Errorf("after %v: %v", time.Since(begun), err)
			}
			for _, dir := range []string{tmp, out} {
				if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
					t.Errorf("left in %s: %v, %v", dir, left, err)
				}
			}
		})
	}
}

// answerTrace answers a request for a trace up to where somebody is silent.
func answerTrace(t *testing.T, c *net.UnixConn, silent string) error {
	if _, err := c.Read(make([]byte, wire.LeaseRequestSize)); err != nil || silent == "the daemon" {
		return err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	session, passed := fds[0], fds[1]
	t.Cleanup(func() { _ = unix.Close(session) })
	var b [wire.LeaseAnswerSize]byte
	(&wire.LeaseAnswer{Status: wire.StatusOK}).Encode(&b)
	if _, _, err := c.WriteMsgUnix(b[:], unix.UnixRights(passed), nil); err != nil {
		return err
	}
	_ = unix.Close(passed)
	if _, err := unix.Read(session, make([]byte, wire.HelloSize+wire.TraceRequestSize)); err != nil || silent == "the session" {
		return err
	}
	_, err = unix.Write(session, wire.AppendWelcome(nil, wire.StatusOK, nil))
	return err
}
