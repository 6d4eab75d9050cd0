package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// TestTrace: a user has what runs in a lease of his traced for a while, over both owners and encrypted as well. Others' leases are
// refused, root may trace them, and the programs notice nothing.
func TestTrace(t *testing.T) {
	t.Parallel()
	for _, encrypt := range []string{"false", "true"} {
		t.Run("encrypt="+encrypt, func(t *testing.T) {
			s := start(t, site.Options{Hosts: 1, Owners: 2, GPUs: 1, Config: map[string]string{"encrypt": encrypt}})
			h := s.Hosts[0]
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var programs []*node.Process
			for uid, fractions := range map[int]string{user: "40,40", other: "30"} {
				p, err := h.Node.Start(h.Run(uid, "--fraction", fractions, "--", s.Program("steady"), "5"))
				if err != nil {
					t.Fatal(err)
				}
				programs = append(programs, p)
			}
			ids := map[uint32]lease.Status{}
			eventually(t, 20*time.Second, "both programs compute", func() error {
				ls, err := list(h)
				for _, l := range ls {
					launches := 0
					for _, s := range l.Sessions {
						if s.Counts.Launches > 0 {
							launches++
						}
					}
					if launches == len(l.Grants) {
						ids[l.Request.UID] = l
					}
				}
				if len(ids) != 2 {
					return fmt.Errorf("%d leases, %v", len(ids), err)
				}
				return nil
			})
			dir := filepath.Join(h.Node.Dir, "timelines")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(dir, 0o777); err != nil {
				t.Fatal(err)
			}
			n := 0
			trace := func(uid int, name string, more ...string) (out, path string, err error) {
				n++
				path = filepath.Join(dir, strconv.Itoa(n)+".json")
				argv := append([]string{s.Opt("bin/sluice"), "trace", name, "-o", path, "--seconds", "0.5"}, more...)
				out, err = h.Node.Run(ctx, node.Command{Argv: argv, Env: h.Env(), UID: uid, GID: uid, Dir: "/"})
				return out, path, err
			}
			for _, c := range []struct {
				uid  int
				of   uint32
				want int
			}{{user, user, 2}, {other, other, 1}, {0, other, 1}, {user, user, 2}} {
				out, path, err := trace(c.uid, ids[c.of].ID[:12])
				if err != nil {
					t.Fatalf("uid %d: %v: %s", c.uid, err, out)
				}
				if sessions, kernels := readTrace(t, path); sessions != c.want || kernels < c.want {
					t.Errorf("uid %d: %d sessions and %d kernels, want %d sessions", c.uid, sessions, kernels, c.want)
				}
			}
			// Another user's lease, by its whole id and by its socket.
			if out, path, err := trace(user, ids[other].ID); err == nil || exists(path) || !strings.Contains(out+err.Error(), "not yours") {
				t.Errorf("a lease of another user: %v: %s", err, out)
			}
			knockTrace(t, h, ids[user])
			for _, p := range programs {
				_ = p.Signal(syscall.SIGTERM)
			}
			for _, p := range programs {
				if err := p.Wait(ctx); err != nil {
					t.Errorf("a program that was traced: %v", err)
				}
			}
			if out, _, err := trace(user, ids[user].ID); err == nil || !strings.Contains(out+err.Error(), "not on this node") {
				t.Errorf("a lease that has ended: %v: %s", err, out)
			}
		})
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// knockTrace asks for traces at a lease's socket: for a process that has no session there, with a process number of 0, and of a session
// that is traced already.
func knockTrace(t *testing.T, h *site.Daemon, l lease.Status) {
	t.Helper()
	path := h.Node.Path("/run/sluice/leases/" + l.ID + "/sock")
	for kind, want := range map[uint32]string{wire.TraceKind(1): "has no session", wire.SessionTrace: "session of kind 5"} {
		if f, err := site.Knock(path, kind, 0); err == nil || !strings.Contains(err.Error(), want) {
			if f != nil {
				_ = f.Close()
			}
			t.Errorf("kind %#x: %v, want %q", kind, err, want)
		}
	}
	pid := uint32(0)
	for _, s := range l.Sessions {
		if wire.SessionComputes(s.Kind) {
			pid = s.Client
		}
	}
	ask := func(ms uint32) (*os.File, error) {
		f, err := site.Knock(path, wire.TraceKind(pid), 0)
		if err != nil {
			t.Fatal(err)
		}
		var b [wire.HelloSize]byte
		(&wire.Hello{Version: wire.Version, Kind: wire.SessionTrace}).Encode(&b)
		var e wire.Encoder
		(&wire.TraceRequest{MS: ms}).Encode(&e)
		if _, err := f.Write(append(b[:], e.Buf()...)); err != nil {
			t.Fatal(err)
		}
		_, err = wire.ReadWelcome(f)
		return f, err
	}
	one, err := ask(20_000)
	if err != nil {
		t.Fatal(err)
	}
	two, err := ask(100)
	if err == nil || !strings.Contains(err.Error(), "traced already") {
		t.Errorf("a second trace: %v", err)
	}
	_ = two.Close()
	if _, err := io.ReadFull(one, make([]byte, wire.TraceHeadSize)); err != nil {
		t.Error(err)
	}
	_ = one.Close()
}

// readTrace counts the sessions of a timeline that have a head, and the kernels with times of the GPU.
func readTrace(t *testing.T, path string) (sessions, kernels int) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var f struct {
		Events []struct {
			Name, Ph string
			Args     map[string]any
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatal(err)
	}
	for _, e := range f.Events {
		if e.Name == "process_name" {
			sessions++
		}
		if strings.Contains(e.Name, "vecadd") && e.Args["given"] != nil {
			kernels++
		}
	}
	return sessions, kernels
}
