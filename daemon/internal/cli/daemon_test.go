package cli

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// call runs sluice and answers what it said and its exit status.
func (d *fakeDaemon) call(args ...string) (stdout, stderr string, status int) {
	d.t.Helper()
	var out, errs bytes.Buffer
	cmd := d.command(args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	status = exitStatus(d.t, cmd.Run())
	d.sync()
	return out.String(), errs.String(), status
}

func (d *fakeDaemon) command(args ...string) *exec.Cmd {
	d.sync()
	cmd := sluice(args...)
	cmd.Env = append(cmd.Env, "SLUICED_SOCKET="+d.socket)
	return cmd
}

func TestRunByDaemon(t *testing.T) {
	d := startDaemon(t)
	lib := shimLib(t)
	cmd := d.command("run", "--fraction", "50,150", "--mem", "20G", "--type", "h200", "--min-mem", "80G", "--pool", "train", "--policy", "fixed",
		"--place", "spread", "--same-owner", "--time", "1:30:00", "--lib", lib, "--", "sh", "-c",
		`echo "$SLUICE_SOCKET|$SLUICE_WORKER|$SLUICE_LEASE|$LD_LIBRARY_PATH"; test -d "${SLUICE_SOCKET%/*}"`)
	cmd.Env = append(cmd.Env, "SLUICE_WORKER=unix:/stale", "SLUICE_LEASE=stale", "SLUICE_SOCKET=/stale")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	d.sync()
	r := d.requests[0]
	me := d.peers[0]
	if r.Holder.PID != me.PID || r.Holder.Start == 0 || me.PID != cmd.Process.Pid {
		t.Errorf("holder %+v, caller %+v, process %d", r.Holder, me, cmd.Process.Pid)
	}
	if !strings.HasPrefix(r.Key.Job, "run-") || r.JobName != "sh" {
		t.Errorf("key %v, job name %q", r.Key, r.JobName)
	}
	r.Key, r.Holder = lease.Key{}, lease.Process{}
	want := lease.Request{Fractions: []lease.Fraction{{Percent: 50, Mem: 20 << 30}, {Percent: 100, Mem: 20 << 30}, {Percent: 50, Mem: 20 << 30}},
		Type: "h200", MinMem: 80 << 30, SameOwner: true, Policy: lease.Fixed, Place: lease.Spread, Pool: "train", Life: 90 * time.Minute,
		UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), JobName: "sh"}
	if !reflect.DeepEqual(r, want) {
		t.Errorf("request %+v\nwant    %+v", r, want)
	}
	if len(d.released) != 1 || len(d.leases) != 0 {
		t.Fatalf("released %v, left %v", d.released, d.leases)
	}
	for id, reason := range d.released {
		if want := filepath.Join(d.dir, id, "sock") + "|||" + lib + "\n"; string(out) != want {
			t.Errorf("environment %q, want %q", out, want)
		}
		if !strings.Contains(reason, "program has ended") {
			t.Errorf("reason %q", reason)
		}
	}
}

func TestRunByDaemonExitStatus(t *testing.T) {
	d := startDaemon(t)
	run := []string{"run", "--fraction", "50", "--lib", shimLib(t)}
	for _, c := range []struct {
		args   []string
		status int
		stderr string
	}{
		{append(run, "--", "true"), 0, ""},
		{append(run, "--", "sh", "-c", "exit 7"), 7, ""},
		{append(run, "--", "sh", "-c", "kill -KILL $$"), 137, ""},
		{append(run, "--", "no-such-program"), 127, "not found"},
		{append(run, "--worker", "gpu01:1", "--", "true"), 125, "--fraction needs the daemon"},
		{append(run, "--fraction", "0", "--", "true"), 125, `fraction "0"`},
		{append(run, "--fraction", "-5", "--", "true"), 125, `fraction "-5"`},
		{append(run, "--fraction", "50,x", "--", "true"), 125, `fraction "x"`},
		{append(run, "--fraction", "99999999999", "--", "true"), 125, "at most 1600"},
		{append(run, "--count", "17", "--", "true"), 125, "1 to 16"},
		{append(run, "--fraction", "250", "--count", "6", "--", "true"), 125, "18 fractions: a lease has 1 to 16"},
		{append(run, "--policy", "fair", "--", "true"), 125, "best-effort, equal, equal-lend, fixed, fixed-lend"},
		{append(run, "--lend=perhaps", "--", "true"), 125, "neither true nor false"},
		{append(run, "--time", "soon", "--", "true"), 125, "1:30:00"},
		{append(run, "--socket", "/nowhere/s.sock", "--", "true"), 125, "start the service sluiced"},
		{append(run, "--socket", "/"+strings.Repeat("x", 108), "--", "true"), 125, "at most 107 bytes"},
		{[]string{"run", "--lib", shimLib(t), "true"}, 125, "use --fraction PERCENT or --mem SIZE"},
	} {
		_, errs, status := d.call(c.args...)
		if status != c.status || !strings.Contains(errs, c.stderr) || c.stderr == "" && errs != "" {
			t.Errorf("%q: exit status %d, want %d; stderr %q, want %q in it", c.args, status, c.status, errs, c.stderr)
		}
	}
	if len(d.leases) != 0 {
		t.Errorf("leases left: %v", d.leases)
	}
}

// What the daemon refuses is told in its words, with a remedy.
func TestRunRefused(t *testing.T) {
	d := startDaemon(t)
	for _, c := range []struct {
		refuse error
		want   []string
	}{
		{lease.Errorf(lease.NoRoom, "fraction 50%%: no GPU has room"), []string{"no lease: fraction 50%: no GPU has room; see sluice gpus"}},
		{lease.Errorf(lease.NoRoom, "71565 MiB asked, 9216 MiB free; see sluice list"), []string{"9216 MiB free; see sluice list\n"}},
		{lease.Errorf(lease.Denied, "users may not acquire leases"), []string{"users may not acquire", "ask root"}},
		{lease.Errorf(lease.Down, "owner gpu01 does not answer in time"), []string{"owner gpu01", "sluice health"}},
		{lease.Errorf(lease.Internal, "ledger: no space left on device"), []string{"no space left", "log of sluiced"}},
	} {
		d.refuse = c.refuse
		_, errs, status := d.call("run", "--fraction", "50", "--lib", shimLib(t), "--", "true")
		if status != exitRunFailed {
			t.Errorf("%v: exit status %d", c.refuse, status)
		}
		for _, w := range c.want {
			if !strings.Contains(errs, w) {
				t.Errorf("%v: stderr %q lacks %q", c.refuse, errs, w)
			}
		}
	}
}

// startHeld runs a shell script by the daemon and answers when it says ready.
func startHeld(t *testing.T, d *fakeDaemon, script string) (cmd *exec.Cmd, program int, errs *bytes.Buffer, out *bufio.Reader, l lease.Lease) {
	t.Helper()
	errs = new(bytes.Buffer)
	cmd = d.command("run", "--fraction", "50", "--lib", shimLib(t), "--", "sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = errs
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	out = bufio.NewReader(pipe)
	line, err := out.ReadString('\n')
	if err != nil {
		t.Fatalf("%v; stderr %q", err, errs)
	}
	if program, err = strconv.Atoi(strings.TrimSpace(line)); err != nil {
		t.Fatal(err)
	}
	return cmd, program, errs, out, d.one()
}

// Killed, sluice can return nothing: the daemon sees its end, and the program,
// which can only fail from then on, is ended.
func TestRunKilled(t *testing.T) {
	d := startDaemon(t)
	cmd, program, _, _, l := startHeld(t, d, "echo $$; while :; do sleep 0.05; done")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = cmd.Process.Wait()
	eventually(t, "the daemon has ended the lease", func() bool { return d.why(l.ID) == "the holder has ended" })
	eventually(t, "the program has ended", func() bool { s := state(program); return s == 0 || s == 'Z' })
}

// A signal to sluice alone reaches the program; the lease goes with it.
func TestRunSignalled(t *testing.T) {
	d := startDaemon(t)
	cmd, _, errs, _, l := startHeld(t, d, "trap 'exit 9' TERM; echo $$; while :; do sleep 0.05; done")
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := exitStatus(t, cmd.Wait()); got != 9 || errs.Len() != 0 {
		t.Fatalf("exit status %d, stderr %q", got, errs)
	}
	if why := d.why(l.ID); !strings.Contains(why, "program has ended") {
		t.Fatalf("released because %q", why)
	}
}

// The daemon is killed while the program runs, and is back before it ends, or
// only after, or never. The program and its exit status show nothing of it.
func TestRunThroughRestart(t *testing.T) {
	for _, back := range []bool{true, false} {
		d := startDaemon(t)
		cmd, _, errs, out, l := startHeld(t, d, "trap 'exit 5' USR1; echo $$; while :; do echo; sleep 0.05; done")
		d.kill()
		if back {
			d.start()
		}
		for range 30 { // longer than a look at the lease takes to come round
			if _, err := out.ReadString('\n'); err != nil {
				t.Fatalf("the program was disturbed: %v, %q", err, errs)
			}
		}
		if err := cmd.Process.Signal(syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, out)
		if got := exitStatus(t, cmd.Wait()); got != 5 || errs.Len() != 0 {
			t.Fatalf("back %v: exit status %d, stderr %q", back, got, errs)
		}
		eventually(t, "the lease is returned", func() bool { return d.why(l.ID) != "" })
		if back && !strings.Contains(d.why(l.ID), "program has ended") {
			t.Errorf("released because %q", d.why(l.ID))
		}
	}
}

// A daemon between two lives is waited for.
func TestRunWaitsForRestart(t *testing.T) {
	d := startDaemon(t)
	d.kill()
	cmd := d.command("run", "--fraction", "50", "--lib", shimLib(t), "--", "true")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond) // it has most likely been refused by now; either way it must work
	d.start()
	if got := exitStatus(t, cmd.Wait()); got != 0 {
		t.Fatalf("exit status %d", got)
	}
}

// A lease that is taken away is told to the user; the program goes on.
func TestRunLeaseEnded(t *testing.T) {
	d := startDaemon(t)
	cmd := d.command("run", "--fraction", "50", "--lib", shimLib(t), "--", "sh", "-c", "read x; exit 3")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	l := d.one()
	out, _, status := d.call("release", l.ID[:8])
	if status != 0 || out != "released "+l.ID+"\n" {
		t.Fatalf("release: exit status %d, %q", status, out)
	}
	line, err := bufio.NewReader(errs).ReadString('\n')
	if err != nil || !strings.Contains(line, "lease "+short(l.ID)+" has ended") {
		t.Fatalf("stderr %q, %v", line, err)
	}
	fmt.Fprintln(in)
	if got := exitStatus(t, cmd.Wait()); got != 3 {
		t.Fatalf("exit status %d", got)
	}
}

// If the site limits how long a lease lives, sluice run tells the user when the lease begins and shortly before it ends.
func TestRunLife(t *testing.T) {
	d := startDaemon(t)
	d.life = time.Hour
	out, errs, status := d.call("run", "--fraction", "50", "--lib", shimLib(t), "--", "echo", "done")
	if status != 0 || out != "done\n" || errs != "sluice: the lease ends after 1h0m0s, by the site's users.max_life or lease.max_life\n" {
		t.Errorf("exit status %d, %q, %q", status, out, errs)
	}
	if _, errs, _ = d.call("run", "--fraction", "50", "--time", "30", "--lib", shimLib(t), "--", "true"); errs != "" {
		t.Errorf("it asked for less: %q", errs)
	}
	var said []string
	now := time.Now()
	h := &heldLease{id: idA, ends: now.Add(time.Hour), warn: 6 * time.Minute, say: func(f string, a ...any) { said = append(said, fmt.Sprintf(f, a...)) }}
	for m := range 61 {
		h.warned(now.Add(time.Duration(m) * time.Minute))
	}
	if len(said) != 1 || !strings.HasPrefix(said[0], "lease "+short(idA)+" ends in 6m0s, at ") {
		t.Errorf("%q", said)
	}
	h = &heldLease{say: func(string, ...any) { t.Error("a lease without end ends") }}
	h.warned(now)
}

func TestJobName(t *testing.T) {
	for program, want := range map[string]string{"/usr/bin/python3": "python3", "a\nb": "a b", "./" + strings.Repeat("é", 40): strings.Repeat("é", 30) + "...", "\xff": "?"} {
		if got := jobName(program); strings.ToValidUTF8(got, "") != got || got != want {
			t.Errorf("%q is %q, want %q", program, got, want)
		}
	}
}

// --log takes the levels that the shim knows.
func TestLogLevels(t *testing.T) {
	code, err := os.ReadFile("../../../remoting/client/log.c")
	if err != nil {
		t.Fatal(err)
	}
	if want := `names[] = { "` + strings.Join(logLevels, `", "`) + `" };`; !strings.Contains(string(code), want) {
		t.Errorf("remoting/client/log.c does not have %s", want)
	}
}
