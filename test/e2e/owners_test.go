package e2e

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// leaseSocket is the daemon's end of a lease's socket, as docs/protocol.md has it: it hands out
// connections to workers that were started by hand.
type leaseSocket struct {
	t       testing.TB
	path    string
	workers []*worker
	shm     bool

	mu    sync.Mutex
	l     *net.UnixListener
	asked []request
	mood  string // "busy": it answers so; "silent": it does not answer
}

type request struct{ kind, owner uint32 }

func (s *leaseSocket) listen() {
	s.t.Helper()
	_ = os.Remove(s.path)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.path, Net: "unix"})
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	s.l = l
	s.mu.Unlock()
	go func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			go s.serve(c)
		}
	}()
}

func (s *leaseSocket) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.l != nil {
		_ = s.l.Close()
	}
}

func (s *leaseSocket) serve(c *net.UnixConn) {
	defer c.Close()
	var q [64]byte
	if _, err := io.ReadFull(c, q[:]); err != nil || string(q[:8]) != "SLUICE-L" || binary.LittleEndian.Uint32(q[8:]) != 1 {
		s.t.Errorf("request %q, %v", q, err)
		return
	}
	kind, owner := binary.LittleEndian.Uint32(q[12:]), binary.LittleEndian.Uint32(q[16:])
	s.mu.Lock()
	s.asked = append(s.asked, request{kind, owner})
	mood := s.mood
	s.mu.Unlock()
	if mood == "silent" {
		_, _ = c.Read(q[:]) // until the client gives up
		return
	}
	answer := func(status uint32, payload, rights []byte) {
		h := binary.LittleEndian.AppendUint32(nil, 0x4c4c4c53)
		h = binary.LittleEndian.AppendUint32(h, status)
		h = binary.LittleEndian.AppendUint32(h, uint32(len(s.workers)))
		h = binary.LittleEndian.AppendUint32(h, uint32(len(payload)))
		if _, _, err := c.WriteMsgUnix(append(h, payload...), rights, nil); err != nil && mood == "" { // the client gives up
			s.t.Error(err)
		}
	}
	if mood == "busy" {
		answer(6, []byte("the owner cannot be reached"), nil)
		return
	}
	if owner >= uint32(len(s.workers)) {
		answer(3, []byte("no such owner"), nil)
		return
	}
	w, err := s.workers[owner].dial()
	if err != nil {
		answer(5, []byte(err.Error()), nil)
		return
	}
	defer w.Close()
	f, err := w.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		s.t.Error(err)
		return
	}
	defer f.Close()
	var flags []byte
	if s.shm {
		flags = binary.LittleEndian.AppendUint32(nil, 1)
	}
	answer(0, flags, syscall.UnixRights(int(f.Fd())))
}

// run is a program that finds its workers through the lease's socket alone.
func (s *leaseSocket) run(prog string, args ...string) result {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, prog, args...)
	cmd.Env = append(os.Environ(), marker+"="+s.workers[0].mark, "SLUICE_SOCKET="+s.path, "LD_LIBRARY_PATH="+built("shim"))
	return finish(s.t, ctx, cmd)
}

// TestSeveralOwners runs one program on the devices of two workers: given as a list, and through a
// lease's socket, over TCP, Unix sockets and shared memory.
func TestSeveralOwners(t *testing.T) {
	for _, c := range []struct {
		name, network string
		devices       int
		shm           bool
		clash         bool // both workers give the same addresses
	}{{"tcp", "tcp", 1, false, false}, {"unix", "unix", 1, false, false}, {"shm", "unix", 2, true, false}, {"clash", "unix", 1, false, true}} {
		t.Run(c.name, func(t *testing.T) {
			if c.clash {
				sameAddresses(t)
			}
			a := startWorker(t, workerOptions{network: c.network, devices: c.devices})
			b := startWorker(t, workerOptions{network: c.network, devices: c.devices})
			dir, err := os.MkdirTemp("", "e2e")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			s := &leaseSocket{t: t, path: filepath.Join(dir, "sock"), workers: []*worker{a, b}, shm: c.shm}
			t.Cleanup(s.close)

			ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
			defer cancel()
			list := a.direct(ctx, program("two_devices"))
			list.Env = append(list.Env, "SLUICE_WORKER="+a.addr+","+b.addr)
			check(t, finish(t, ctx, list), "two_devices: ok\nPASS\n")

			// The daemon is being restarted: its directory is there, its socket comes later.
			go func() {
				time.Sleep(100 * time.Millisecond)
				s.listen()
			}()
			check(t, s.run(program("two_devices")), "two_devices: ok\nPASS\n")
			check(t, s.run(program("vecadd")), "vecadd: n=1048576 sum=1337185854\nPASS\n")
			if r := s.run(built("test/nvml")); r.status != 0 || !strings.Contains(r.stdout, "NVML and CUDA agree") {
				t.Errorf("nvml: status %d: %s%s", r.status, r.stdout, r.stderr)
			}
			s.mu.Lock()
			seen := map[request]int{}
			for _, q := range s.asked {
				seen[q]++
			}
			s.mu.Unlock()
			for kind := uint32(1); kind <= 2; kind++ {
				for owner := range uint32(2) {
					if seen[request{kind, owner}] == 0 {
						t.Errorf("nobody asked owner %d for a session of kind %d", owner, kind)
					}
				}
			}
		})
	}
}

// sameAddresses has what this test starts from here on laid out alike in memory, as the real
// driver's address spaces are.
func sameAddresses(t *testing.T) {
	t.Helper()
	const addrNoRandomize = 0x0040000
	runtime.LockOSThread()
	was, _, err := syscall.RawSyscall(syscall.SYS_PERSONALITY, addrNoRandomize, 0, 0)
	if err != 0 {
		t.Skipf("personality: %v", err)
	}
	t.Cleanup(func() {
		_, _, _ = syscall.RawSyscall(syscall.SYS_PERSONALITY, was, 0, 0)
		runtime.UnlockOSThread()
	})
}

// TestOwnerLost ends one of two workers: the program is told, and told soon.
func TestOwnerLost(t *testing.T) {
	a := startWorker(t, workerOptions{network: "unix"})
	b := startWorker(t, workerOptions{network: "unix"})
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	cmd := a.direct(ctx, program("two_devices"), "forever")
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+a.addr+","+b.addr)
	go func() {
		for len(b.sessions()) == 0 && ctx.Err() == nil {
			time.Sleep(5 * time.Millisecond)
		}
		time.Sleep(300 * time.Millisecond)
		for _, pid := range b.sessions() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}()
	r := finish(t, ctx, cmd)
	// The program's threads fail together, and may leave together: how it ends is its own affair.
	if r.status == 0 || !strings.Contains(r.stderr, "cudaError") {
		t.Errorf("status %d after %v: %s", r.status, r.took, r.stderr)
	}
}

// TestPrintLocked: what a kernel prints waits for no lock that the program holds.
func TestPrintLocked(t *testing.T) {
	w := startWorker(t, workerOptions{})
	r := w.run(runOptions{mem: "512M", timeout: 20 * time.Second}, program("printf_locked"))
	check(t, r, "printf_locked: before\nprintf: device line 0 of 2, even 0.00\nprintf: device line 1 of 2, odd 0.25\nprintf_locked: after\nPASS\n")
}

// TestLeaseRefused tells the program CUDA's own codes when the daemon has no session for it.
func TestLeaseRefused(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "gone", "sock")
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program("vecadd"))
	cmd.Env = append(os.Environ(), "SLUICE_SOCKET="+path, "LD_LIBRARY_PATH="+built("shim"))
	r := finish(t, ctx, cmd)
	if r.status == 0 || !strings.Contains(r.stderr, "the lease has ended") || r.took > 3*time.Second {
		t.Errorf("status %d after %v: %s", r.status, r.took, r.stderr)
	}
}
