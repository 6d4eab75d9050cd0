package host

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/audit"
	"github.com/sluice-hpc/sluice/daemon/internal/containers"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/leasesock"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Another user may connect, gets a refusal with its reason, and does not delay the owner of the socket.
func TestStrangers(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	l := s.must(ask("1", 50))
	if fi, err := os.Stat(s.Socket(l.ID)); err != nil || fi.Mode().Perm() != 0o666 {
		t.Fatal(fi, err)
	}
	cmd := exec.Command("/usr/bin/python3", "-c", `import socket, sys
held = []
for i in range(300):
    c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1]); held.append(c)
c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1])
c.send(b"SLUICE-L\1\0\0\0\1\0\0\0".ljust(64, b"\0"))
print(c.recv(4096), flush=True)
sys.stdin.read()`, s.Socket(l.ID))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1001, Gid: 1001}, Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.dir, 0o711); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(stderr.String())
		}
	}()
	said := make([]byte, 4096)
	n, err := out.Read(said)
	if err != nil || !strings.Contains(string(said[:n]), "is of uid 1000, and uid 1001 asks") {
		t.Errorf("%s, %v", said[:n], err)
	}
	start := time.Now()
	if status, _, reason, f := client(t, s.Socket(l.ID), 1, 0); status != 0 || time.Since(start) > 4*time.Second { // a request may take 5 s to arrive, a stranger's may not
		t.Error(status, reason, time.Since(start))
	} else {
		f.Close()
	}
	if n := len(s.refusals(t)); n < 1 || n > 50 {
		t.Errorf("%d lines in the audit log", n)
	}
}

// refusals are the lines of the audit log about sessions that were refused.
func (s *site) refusals(t *testing.T) (all []audit.Event) {
	t.Helper()
	err := audit.Read(s.cfg.AuditFile, func(e *audit.Event) bool {
		if e.Event == audit.SessionRefuse {
			all = append(all, *e)
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// A user asks at the user's own socket what is refused, as fast as can be: few of the
// refusals are written down, and they say how many were left out.
func TestOwnRefusalsAreBounded(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to be other users")
	}
	s := newSite(t, newFake("a", 1))
	l := s.must(ask("1", 50))
	if err := os.Chmod(s.dir, 0o711); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/usr/bin/python3", "-c", `import socket, sys, time
begin = time.monotonic(); n = 0
while n < 1000 or time.monotonic() < begin + 1.2:
    c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1])
    c.send(b"SLUICE-L\115\0\0\0\1\0\0\0".ljust(64, b"\0"))
    c.recv(4096); c.close(); n += 1
print(n)`, s.Socket(l.ID))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}, Pdeathsig: syscall.SIGKILL}
	begin := time.Now()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	asked, _ := strconv.Atoi(strings.TrimSpace(string(out)))
	lines := s.refusals(t)
	most := 10 * (2 + int(time.Since(begin)/time.Second))
	skipped := 0
	for _, e := range lines {
		skipped += int(e.Skipped)
	}
	if asked < 1000 || len(lines) < 10 || len(lines) > most || skipped == 0 || skipped > asked {
		t.Errorf("%d refusals have %d lines, want at most %d, which speak of %d more", asked, len(lines), most, skipped)
	}
}

// Connections in place of lost ones are counted, and attempts that failed; those of new sessions are not.
func TestAttachesCounted(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	l := s.must(ask("1", 50))
	for _, r := range []lease.SessionRequest{
		{Lease: l.ID, Kind: wire.SessionCompute}, {Lease: l.ID, Kind: wire.AttachKind(3)}, {Lease: "another", Kind: wire.AttachKind(3)}, {Lease: "another", Kind: wire.SessionCompute},
	} {
		f, _, err := s.session(t.Context(), "a", r)
		if (err == nil) != (r.Lease == l.ID) {
			t.Errorf("%+v: %v", r, err)
		}
		if err == nil {
			f.Close()
		}
	}
	if got, want := s.Counters(), (Counters{Attached: 1, AttachesFailed: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// A user's containers ask as the user's subordinate uids, which have no more lines together
// than the user. Each line names the uid that asked.
func TestSubordinateRefusalsAreBounded(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	l := s.must(ask("1", 50))
	begin := time.Now()
	for i := range uint32(200) {
		s.refused(&l, leasesock.Refusal{UID: 100000 + i, Err: errors.New("no")})
	}
	lines := s.refusals(t)
	if most := 10 * (2 + int(time.Since(begin)/time.Second)); len(lines) == 0 || len(lines) > most {
		t.Errorf("%d lines, want at most %d", len(lines), most)
	}
	for i, e := range lines {
		if e.UID == nil || *e.UID < 100000 {
			t.Errorf("line %d: %+v", i, e)
		}
	}
}

// What engines read is there from the grant to the release, also when the daemon is started
// anew, and what a crash has left goes at the next start.
func TestFiles(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	s.end()
	cfg := containers.Config{
		Leases: filepath.Join(s.cfg.RunDir, "leases"), Staging: filepath.Join(s.cfg.RunDir, "leases.new"), CDI: filepath.Join(s.dir, "cdi"),
		Lib: s.dir, Content: filepath.Join(s.dir, "content"), Hook: filepath.Join(s.dir, "hook"),
	}
	if err := errors.Join(os.Mkdir(cfg.Content, 0o755), os.WriteFile(cfg.Content+"/libcuda.so.1", nil, 0o644), os.WriteFile(cfg.Hook, nil, 0o755)); err != nil {
		t.Fatal(err)
	}
	s.cfg.Files = containers.New(cfg)
	s.start()
	l, m := s.must(ask("1", 50)), s.must(ask("2", 50))
	paths := func(id string) []string {
		return []string{cfg.Leases + "/" + id + "/containers.conf", cfg.Leases + "/" + id + "/apptainer.sh", cfg.CDI + "/sluice-" + id + ".json"}
	}
	there := func(id string, want bool) {
		t.Helper()
		for _, p := range paths(id) {
			if _, err := os.Stat(p); (err == nil) != want {
				t.Errorf("%s: %v, want it there: %v", p, err, want)
			}
		}
	}
	there(l.ID, true)
	s.end()
	there(l.ID, true) // nobody's container loses it meanwhile
	// A crash while a file was made, and while a lease ended.
	half := []string{cfg.Staging + "/" + l.ID + ".containers.conf", cfg.CDI + "/.sluice-" + l.ID + ".json.0123456789abcdef.new"}
	old := cfg.CDI + "/sluice-" + strings.Repeat("ab", 16) + ".json"
	for _, p := range half {
		if err := os.WriteFile(p, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(old, []byte(`"`+cfg.Leases+"/"+strings.Repeat("ab", 16)+`"`), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(paths(l.ID)[0]); err != nil {
		t.Fatal(err)
	}
	s.start()
	there(l.ID, true)
	for _, p := range append(half, old) {
		if _, err := os.Lstat(p); err == nil {
			t.Errorf("%s is left", p)
		}
	}
	if err := s.Release(t.Context(), root, l.ID, lease.Key{}, ""); err != nil {
		t.Fatal(err)
	}
	there(l.ID, false)
	there(m.ID, true)
}

// A lease's socket that somebody removes, with its directory or alone, is made again, and goes when the lease ends. The health says so
// while it cannot be made: then the next programs of the job find no GPU.
func TestSocketRemoved(t *testing.T) {
	s := newSite(t, newFake("a", 1))
	l := s.must(ask("1", 50))
	path := s.Socket(l.ID)
	dir := filepath.Dir(path)
	well := func() bool {
		for _, c := range s.NodeHealth(t.Context()) {
			if c.Name == "sockets" {
				if c.Text != "1 lease without socket" {
					t.Error(c.Text)
				}
				return false
			}
		}
		return true
	}
	if !well() {
		t.Error("with all sockets")
	}
	for _, gone := range []string{path, dir} {
		if err := os.RemoveAll(gone); err != nil {
			t.Fatal(err)
		}
		s.wait("the socket is made again", func() bool { return exists(path) })
		if status, _, reason, f := client(t, path, 1, 0); status != 0 || f == nil {
			t.Fatal(status, reason)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.sweep(t.Context())
		if well() {
			t.Error("without socket")
		}
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	s.wait("the socket is made again", well)
	// A daemon that stops leaves what the next one needs.
	s.mu.Lock()
	s.closed = true
	hd := s.leases[l.ID]
	s.mu.Unlock()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	s.remakeSocket(lost{hd, l.ID, 2})
	if !exists(dir) {
		t.Error("a daemon that stops has removed the directory of a lease")
	}
	s.mu.Lock()
	s.closed = false
	s.mu.Unlock()
	s.wait("the socket is made again", well)
	if err := s.Release(t.Context(), root, l.ID, lease.Key{}, ""); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.sweep(t.Context())
	}
	if exists(dir) {
		t.Error("the directory of an ended lease is there")
	}
}
