package workers

import (
	"bytes"
	"context"
	"encoding/binary"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// What does not work leaves nothing behind, and takes nothing of others along.
func TestFailedStart(t *testing.T) {
	dir := setup(t)
	exe := filepath.Join(t.TempDir(), "sluice-worker") // a link, which can be away for a while
	var program string
	p := newPool(t, dir, func(c *Config) { program, c.Exe, c.Warm = c.Exe, exe, 0 })
	if err := os.Symlink(program, exe); err != nil {
		t.Fatal(err)
	}
	if err := p.Probe(t.Context(), gpus(0)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(exe); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	p.cfg.Warm = 1 // only now, so that no worker was started while there was a program
	p.mu.Unlock()
	for range 20 {
		_, w := pair(t)
		if _, err := p.Start(t.Context(), testLease("c", 0), request("c"), w, gpus(0)); err == nil {
			t.Fatal("started without a program")
		}
	}
	for _, d := range p.cg.dirs {
		if _, err := os.Stat(d); err != nil {
			t.Errorf("the groups' own directory is gone: %v", err)
		}
	}
	waitFor(t, "a retry", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.soon[simUUID(0)] })
	p.mu.Lock()
	if n := p.fails[simUUID(0)]; n > 3 {
		t.Errorf("%d retries are on their way, one is enough", n)
	}
	p.mu.Unlock()
	if err := os.Symlink(program, exe); err != nil {
		t.Fatal(err)
	}

	// A client that asks for one kind of session and begins another.
	c, w := pair(t)
	r := request("c")
	r.Kind = wire.SessionObserve
	s, err := p.Start(t.Context(), testLease("c", 0), r, w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.helloAs(wire.SessionCompute); err == nil || !strings.Contains(err.Error(), "kind") {
		t.Errorf("observer that computes: %v", err)
	}
	waitFor(t, "its end", func() bool { return len(p.Sessions(s.Lease)) == 0 })
	if u := p.Use(s.Lease); len(u) != 1 || u[0].Used != 0 {
		t.Errorf("%+v", u)
	}
}

// If the daemon stops while it starts a session, it tells the client to try again and logs no error. The
// next session is not affected by the cancelled one.
func TestCancelledStart(t *testing.T) {
	dir := setup(t)
	var said bytes.Buffer
	p := newPool(t, dir, func(c *Config) { c.Warm = 0 })
	p.log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := p.Probe(t.Context(), gpus(0)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, w := pair(t)
	_, err := p.Start(ctx, testLease("e", 0), request("e"), w, gpus(0))
	if lease.CodeOf(err) != lease.Down || !strings.Contains(err.Error(), "stopping") || said.Len() > 0 {
		t.Errorf("%v, log %q", err, said.String())
	}
	if n := len(p.Sessions(strings.Repeat("e", 32))); n != 0 {
		t.Errorf("%d sessions", n)
	}
	c, w := pair(t)
	if _, err := p.Start(t.Context(), testLease("e", 0), request("e"), w, gpus(0)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Error(err)
	}
}

// The sessions of root, and of other users of the system, run as a user who owns nothing.
func TestSquashedSession(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, func(c *Config) { c.MinUID, c.RootUID, c.RootGID = 900, 7777, 8888 })
	for id, from := range map[string][2]uint32{"d": {0, 0}, "e": {899, 5}} {
		l := testLease(id, 0)
		l.Request.UID, l.Request.GID = from[0], from[1]
		c, w := pair(t)
		s, err := p.Start(t.Context(), l, request(id), w, gpus(0))
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
		if err := c.hello(); err != nil {
			t.Fatal(err)
		}
		if err := c.activate(0); err != nil {
			t.Fatal(err)
		}
		tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(s.Worker.PID) + "/task/*/status")
		if len(tasks) < 3 {
			t.Errorf("threads: %v", tasks)
		}
		for _, f := range tasks {
			b, _ := os.ReadFile(f)
			want := []string{"Uid:\t7777\t7777\t7777\t7777\n", "Gid:\t8888\t8888\t8888\t8888\n", "Groups:\t \n"}
			for _, set := range []string{"Inh", "Prm", "Eff", "Amb"} {
				want = append(want, "Cap"+set+":\t0000000000000000\n")
			}
			for _, w := range want {
				if !strings.Contains(string(b), w) {
					t.Errorf("uid %d, %s: no %q in %s", from[0], f, w, b)
				}
			}
		}
	}
	if all, err := os.ReadDir(p.cfg.Store); err != nil || len(all) != 1 || all[0].Name() != "7777" {
		t.Errorf("image stores: %v, %v", all, err)
	}
}

func TestRunsAs(t *testing.T) {
	for _, c := range []struct {
		cfg      Config
		uid, gid uint32 // the lease's
		as, of   uint32
	}{
		{Config{}, 1000, 100, 1000, 100},
		{Config{}, 1, 1, 1, 1},
		{Config{}, 0, 0, nobody, nobody},
		{Config{}, 0, 100, nobody, nobody},
		{Config{}, 1000, 0, 1000, nobody}, // group 0 may read what is root's
		{Config{MinUID: 1000, RootUID: 5000, RootGID: 6000}, 999, 999, 5000, 6000},
		{Config{MinUID: 1000, RootUID: 5000, RootGID: 6000}, 0, 1000, 5000, 6000},
		{Config{MinUID: 1000, RootUID: 5000, RootGID: 6000}, 1000, 0, 1000, 6000},
	} {
		if as, of := c.cfg.as(&lease.Request{UID: c.uid, GID: c.gid}); as != c.as || of != c.of {
			t.Errorf("%d:%d runs as %d:%d, want %d:%d", c.uid, c.gid, as, of, c.as, c.of)
		}
	}
}

// A session cuts the account short, and the daemon starts anew: the session is not
// lost sight of, and the lease can be used again.
func TestDamagedAccount(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	c, w := pair(t)
	s, err := p.Start(t.Context(), testLease("e", 0), request("e"), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(p.cfg.Dir, s.Lease, "account"), 0); err != nil {
		t.Fatal(err)
	}
	_ = p.Sessions(s.Lease) // survives
	next := newPool(t, dir, nil)
	// All that remains of the lease is its tenant, which it has from its grant to its end.
	if ids := next.Leases(); len(ids) != 1 || next.Use(s.Lease) != nil || len(next.Sessions(s.Lease)) != 0 {
		t.Errorf("leases %v", ids)
	}
	if err := c.activate(0); err == nil {
		t.Error("a session without account goes on")
	}
	// One that was being made when the daemon died.
	half := filepath.Join(p.cfg.Dir, strings.Repeat("f", 32))
	if err := os.Mkdir(half, 0o700); err != nil {
		t.Fatal(err)
	}
	newPool(t, dir, nil)
	// Only now: the first daemon, which lives on in this test, notes the session's end in there, and may do
	// so while the second clears up.
	if _, err := os.Stat(filepath.Join(p.cfg.Dir, s.Lease)); err == nil {
		t.Error("its directory is left")
	}
	if _, err := os.Stat(half); err == nil {
		t.Error("half a lease is left")
	}
	c, w = pair(t)
	if s, err = next.Start(t.Context(), testLease("e", 0), request("e"), w, gpus(0)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := next.End(ctx, s.Lease); err != nil {
		t.Error(err)
	}
}

// The job's own processes may not reach into its session, and so not at the account,
// though they are the same user's.
func TestSameUser(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	c, w := pair(t)
	s, err := p.Start(t.Context(), testLease("9", 0), request("9"), w, gpus(0))
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := c.hello(); err != nil {
		t.Fatal(err)
	}
	proc := "/proc/" + strconv.Itoa(s.Worker.PID)
	for _, try := range []string{
		"ls " + proc + "/fd", "ls " + proc + "/map_files", "cat " + proc + "/mem", "cat " + proc + "/environ", "cat " + proc + "/maps",
		"readlink " + proc + "/exe", "cd " + proc + " && ls root/", "ls " + proc + "/cwd/", "echo 0 >" + proc + "/oom_score_adj", "ls " + p.cfg.Dir, "ls " + p.cfg.Store,
	} {
		cmd := exec.Command("sh", "-c", try)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: testUID, Gid: testUID}}
		if out, err := cmd.CombinedOutput(); err == nil {
			t.Errorf("%s: %s", try, out)
		}
	}
	// Stopped by them, it holds up neither the daemon nor the end of its lease.
	if out, err := exec.Command("setpriv", "--reuid", strconv.Itoa(testUID), "--clear-groups", "kill", "-STOP", strconv.Itoa(s.Worker.PID)).CombinedOutput(); err != nil {
		t.Logf("not stopped: %s", out)
	}
	began := time.Now()
	if len(p.Sessions(s.Lease)) != 1 || len(p.Use(s.Lease)) != 1 {
		t.Error("a stopped session is not shown")
	}
	if err := p.End(t.Context(), s.Lease); err != nil || time.Since(began) > 5*time.Second {
		t.Errorf("end of a stopped session: %v after %v", err, time.Since(began))
	}
	if err := p.Forget(s.Lease); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(p.cfg.Dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// A probe of a driver that hangs ends with a daemon that is killed.
func TestProbeEndsWithDaemon(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	noted := filepath.Join(dir, "pid")
	script := "#!/bin/sh\necho $$ >" + noted + ".new && mv " + noted + ".new " + noted + " && exec sleep 1000\n"
	if err := os.WriteFile(filepath.Join(dir, "sluice-worker"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	_, w := pair(t)
	cmd := exec.Command("/proc/self/exe", "daemon", dir)
	cmd.ExtraFiles = []*os.File{w}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	waitFor(t, "a probe", func() bool {
		b, _ := os.ReadFile(noted)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		return pid > 0
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	waitFor(t, "its end", func() bool {
		st, err := process.Read(pid)
		return err != nil || st.Ended()
	})
}

// A session that was taken over writes other caps into the files of its lease and of its step. Those that come later are bounded as
// before, those of the next daemon too.
func TestCapIsTold(t *testing.T) {
	dir := setup(t)
	l := testLease("a", 0) // 256 MiB
	three := &lease.Part{Step: 3, Percent: 10, Mem: 80 << 20}
	p := newPool(t, dir, nil)
	p.OnEnd(func(lease.Session, string) {})
	if err := p.Share(l); err != nil {
		t.Fatal(err)
	}
	_, _ = p.open(t, l, nil)
	_, _ = p.open(t, l, three)
	for _, name := range []string{accountName, partPrefix + "3"} {
		f, err := os.OpenFile(filepath.Join(p.cfg.Dir, l.ID, name), os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		// The first cap of both files: account/file.go, account/part.go.
		if _, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, 1<<40), 32); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	bounded := func(p *Pool) {
		t.Helper()
		// Two contexts of 64 MiB are there, and a third one comes: 64 MiB are left.
		whole, c := p.open(t, l, nil)
		if err := c.alloc(66 << 20); err == nil {
			t.Error("a session has more than its lease")
		}
		if err := c.alloc(32 << 20); err != nil {
			t.Errorf("a session has less than its lease: %v", err)
		}
		if u := p.Use(l.ID); u[0].Granted != 256<<20 {
			t.Errorf("%+v", u)
		}
		kill(t, p, whole)
	}
	bounded(p)
	q := newPool(t, dir, nil)
	q.OnEnd(func(lease.Session, string) {})
	if err := q.Share(l); err != nil {
		t.Fatal(err)
	}
	bounded(q)
	roomy, c := q.open(t, l, &lease.Part{Step: 4, Percent: 10, Mem: 200 << 20})
	if err := c.alloc(66 << 20); err == nil {
		t.Error("a session of a part has more than its lease")
	}
	kill(t, q, roomy)
	// The step has 80 MiB and a context already.
	cc, w := pair(t)
	r := request("a")
	r.Part = three
	if _, err := q.Start(t.Context(), l, r, w, gpus(0)); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := cc.hello(); err != nil {
		t.Fatal(err)
	}
	if err := cc.activate(0); err == nil {
		t.Error("a session has more than its part")
	}
}
