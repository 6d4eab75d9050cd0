package cli

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// The tests run sluice as its users do, as a process: this test binary, when
// asked by the environment, is sluice.
func TestMain(m *testing.M) {
	if os.Getenv("SLUICE_TEST_AS_SLUICE") != "" {
		os.Unsetenv("SLUICE_TEST_AS_SLUICE")
		os.Exit(Main(os.Args[1:], os.Stdout, os.Stderr))
	}
	// Background jobs and what nohup runs begin with these ignored, and so would the programs
	// that the tests interrupt; what is caught here they begin with the default of.
	for _, sig := range []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT} {
		if signal.Ignored(sig) {
			signal.Notify(make(chan os.Signal, 1), sig)
		}
	}
	os.Exit(m.Run())
}

// asSluice is the environment in which this test is sluice. The Makefile has the race detector hold a process that ends for less than its second.
func asSluice() []string {
	return []string{"SLUICE_TEST_AS_SLUICE=1", "GOCOVERDIR=" + os.TempDir(), "GORACE=" + os.Getenv("GORACE")}
}

const testToken = "00112233445566778899aabbccddeeff"

// fakeWorker grants every lease, or refuses it with reason.
type fakeWorker struct {
	addr   string
	hellos chan wire.Hello
	conns  chan net.Conn
}

func startWorker(t *testing.T, network, addr, refuse string) *fakeWorker {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	w := &fakeWorker{addr: network + ":" + ln.Addr().String(), hellos: make(chan wire.Hello, 8), conns: make(chan net.Conn, 8)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			var b [wire.HelloSize]byte
			var h wire.Hello
			if _, err := io.ReadFull(c, b[:]); err != nil || h.Decode(&b) != nil {
				t.Errorf("hello %x: %v", b, err)
				c.Close()
				continue
			}
			w.hellos <- h
			if refuse != "" {
				_, _ = c.Write(wire.AppendWelcome(nil, wire.StatusNoMemory, []byte(refuse)))
				c.Close()
				continue
			}
			token := []byte{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}
			_, _ = c.Write(wire.AppendWelcome(nil, wire.StatusOK, token))
			w.conns <- c
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
		close(w.conns)
		for c := range w.conns {
			c.Close()
		}
	})
	return w
}

// serve ends every lease when its client does, as a worker has to.
func (w *fakeWorker) serve() {
	for c := range w.conns {
		go func() {
			_, _ = io.Copy(io.Discard, c)
			c.Close()
		}()
	}
}

// lease is the connection of the lease that sluice has just been given.
func (w *fakeWorker) lease(t *testing.T) net.Conn {
	t.Helper()
	select {
	case c := <-w.conns:
		t.Cleanup(func() { c.Close() })
		return c
	case <-time.After(10 * time.Second):
		t.Fatal("nobody asked for a lease")
		return nil
	}
}

// shimLib is a directory that looks as if the shim were in it.
func shimLib(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, shimFile), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func sluice(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(asSluice(), "PATH="+os.Getenv("PATH"))
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

func exitStatus(t *testing.T, err error) int {
	t.Helper()
	var ee *exec.ExitError
	if errors.As(err, &ee) {
		return ee.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0
}

func TestExitStatus(t *testing.T) {
	w := startWorker(t, "tcp", "127.0.0.1:0", "")
	go w.serve()
	lib := shimLib(t)
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("\x7fELF nonsense"), 0o755); err != nil {
		t.Fatal(err)
	}
	empty := t.TempDir()
	worker := []string{"run", "--worker", w.addr, "--lib", lib}
	for _, c := range []struct {
		args   []string
		status int
		stderr string // what the message must hold
	}{
		{append(worker, "--", "true"), 0, ""},
		{append(worker, "true", "--", "--worker"), 0, ""},
		{append(worker, "--", "sh", "-c", "exit 7"), 7, ""},
		{append(worker, "--", "sh", "-c", "exit 125"), 125, ""},
		{append(worker, "--", "sh", "-c", "kill -TERM $$"), 143, ""},
		{append(worker, "--", "sh", "-c", "kill -KILL $$"), 137, ""},
		{append(worker, "--", "no-such-program"), 127, "no-such-program not found"},
		{append(worker, "--", "./no-such-program"), 127, "./no-such-program not found"},
		{append(worker, "--", plain), 126, plain + " cannot be executed"},
		{append(worker, "--", garbage), 126, garbage + " cannot be executed"},
		{worker, 125, "no program given"},
		{[]string{"run", "--bogus"}, 125, "--bogus"},
		{[]string{"run", "--lib", lib, "--", "true"}, 125, "no fraction given"},
		{append(worker, "--mem", "20X", "true"), 125, "512M or 20G"},
		{append(worker, "--log", "loud", "true"), 125, `"loud" is not one of error, warn, info, debug`},
		{[]string{"run", "--worker", "gpu01", "true"}, 125, "give HOST:PORT"},
		{[]string{"run", "--worker", w.addr, "--lib", empty, "true"}, 125, empty + " has no libcuda.so.1"},
		{[]string{"run", "--worker", w.addr, "true"}, 125, "--lib"},
		{[]string{"version"}, 0, ""},
		{[]string{"version", "extra"}, 1, "extra"},
		{[]string{"no-such-command"}, 1, "no-such-command"},
		{[]string{"completion", "bash"}, 0, ""},
	} {
		var out, errs bytes.Buffer
		cmd := sluice(c.args...)
		cmd.Stdout, cmd.Stderr = &out, &errs
		if got := exitStatus(t, cmd.Run()); got != c.status {
			t.Errorf("%q: exit status %d, want %d; stderr %q", c.args, got, c.status, errs.String())
		}
		switch got := errs.String(); {
		case c.stderr == "" && got != "":
			t.Errorf("%q: stderr %q, want none", c.args, got)
		case c.stderr != "" && (!strings.HasPrefix(got, "sluice: ") || !strings.Contains(got, c.stderr) || strings.Count(got, "\n") != 1):
			t.Errorf("%q: stderr %q, want one line with %q", c.args, got, c.stderr)
		}
	}
}

func TestUnreachable(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	ln.Close()
	socket := filepath.Join(t.TempDir(), "gone.sock")
	for worker, want := range map[string][]string{
		"localhost:" + port:     {"localhost", port, "refused", "start sluice-worker", "--worker"},
		"tcp:127.0.0.1:" + port: {"127.0.0.1", port, "refused"},
		"unix:" + socket:        {socket, "no such file", "start sluice-worker"},
	} {
		cmd := sluice("run", "--worker", worker, "--lib", shimLib(t), "--", "true")
		out, err := cmd.CombinedOutput()
		if got := exitStatus(t, err); got != exitRunFailed {
			t.Errorf("%s: exit status %d, want %d", worker, got, exitRunFailed)
		}
		for _, s := range want {
			if !strings.Contains(string(out), s) {
				t.Errorf("%s: message %q lacks %q", worker, out, s)
			}
		}
	}
}

func TestRefused(t *testing.T) {
	w := startWorker(t, "tcp", "127.0.0.1:0", "20480 MiB asked, 9216 MiB free on gpu 0")
	out, err := sluice("run", "--worker", w.addr, "--lib", shimLib(t), "--mem", "20G", "--", "true").CombinedOutput()
	if got := exitStatus(t, err); got != exitRunFailed {
		t.Errorf("exit status %d, want %d", got, exitRunFailed)
	}
	if !strings.Contains(string(out), "lease refused: 20480 MiB asked, 9216 MiB free on gpu 0") {
		t.Errorf("message %q lacks the worker's reason", out)
	}
}

// Somebody else's server must not be taken for a worker.
func TestNoWorker(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
			c.Close()
		}
	}()
	out, err := sluice("run", "--worker", ln.Addr().String(), "--lib", shimLib(t), "--", "true").CombinedOutput()
	if got := exitStatus(t, err); got != exitRunFailed {
		t.Errorf("exit status %d, want %d", got, exitRunFailed)
	}
	if !strings.Contains(string(out), "is a sluice-worker listening there?") {
		t.Errorf("message %q", out)
	}
}

func TestEnvironment(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "w.sock")
	for _, w := range []*fakeWorker{
		startWorker(t, "tcp", "127.0.0.1:0", ""),
		startWorker(t, "tcp", "[::1]:0", ""),
		startWorker(t, "unix", sock, ""),
	} {
		go w.serve()
		lib := shimLib(t)
		cmd := sluice("run", "--worker", w.addr, "--lib", lib, "--mem", "20G", "--log", "debug", "--trace", "--",
			"sh", "-c", `echo "$SLUICE_WORKER|$SLUICE_LEASE|$LD_LIBRARY_PATH|$SLUICE_LOG|$SLUICE_TRACE|$KEPT"`)
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH=/opt/a:/opt/b", "SLUICE_LEASE=stale", "KEPT=kept")
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%s: %v", w.addr, err)
		}
		want := w.addr + "|" + testToken + "|" + lib + ":/opt/a:/opt/b|debug|1|kept\n"
		if string(out) != want {
			t.Errorf("environment %q, want %q", out, want)
		}
		h := <-w.hellos
		if h.Version != wire.Version || h.Kind != wire.SessionLease || h.Mem != 20<<30 || h.Program != "sh" ||
			h.UID != uint32(os.Getuid()) || h.PID == 0 || h.Token != [16]byte{} {
			t.Errorf("hello %+v", h)
		}
	}
}

// The lease lives exactly as long as the program.
func TestLeaseLife(t *testing.T) {
	w := startWorker(t, "tcp", "127.0.0.1:0", "")
	cmd := sluice("run", "--worker", w.addr, "--lib", shimLib(t), "--", "cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lease := w.lease(t)
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil { // so cat runs
		t.Fatal(err)
	}
	_ = lease.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, err := lease.Read(make([]byte, 1)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("lease read %d bytes, %v, while the program runs", n, err)
	}
	in.Close()
	_ = lease.SetReadDeadline(time.Now().Add(10 * time.Second))
	if n, err := lease.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Fatalf("lease read %d bytes, %v, after the program's end", n, err)
	}
	lease.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}

// A worker that goes away is named, and a connection to it that is lost; the program's own status stays.
func TestLeaseLost(t *testing.T) {
	for _, c := range []struct {
		how  string
		end  func(net.Conn) error
		want []string
	}{
		{"closed", net.Conn.Close, []string{" ended the lease; CUDA calls fail from here on"}},
		{"reset", func(c net.Conn) error {
			return errors.Join(c.(*net.TCPConn).SetLinger(0), c.Close())
		}, []string{" was lost (connection reset by peer)", "go on if the worker has --grace"}},
	} {
		t.Run(c.how, func(t *testing.T) {
			w := startWorker(t, "tcp", "127.0.0.1:0", "")
			cmd := sluice("run", "--worker", w.addr, "--lib", shimLib(t), "--", "sh", "-c", "read line; exit 3")
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
			if err := c.end(w.lease(t)); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 1024)
			n, err := errs.Read(b)
			for _, want := range append(c.want, "worker "+w.addr) {
				if err != nil || !strings.Contains(string(b[:n]), want) {
					t.Errorf("stderr %q, %v: no %q", b[:n], err, want)
				}
			}
			fmt.Fprintln(in)
			if got := exitStatus(t, cmd.Wait()); got != 3 {
				t.Errorf("exit status %d, want 3", got)
			}
		})
	}
}

// running is a program under sluice that has said its process id.
type running struct {
	*exec.Cmd
	program int
	out     io.Reader
}

func start(t *testing.T, script string) *running {
	t.Helper()
	w := startWorker(t, "tcp", "127.0.0.1:0", "")
	cmd := sluice("run", "--worker", w.addr, "--lib", shimLib(t), "--", "sh", "-c", "echo $$; "+script)
	// A group of its own is never a terminal's foreground, whoever runs the tests.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	go w.serve()
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return &running{cmd, pid, lines}
}

// state is a process's state letter, 0 when there is no such process.
func state(pid int) byte {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	return b[bytes.LastIndexByte(b, ')')+2]
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("not so in time: %s", what)
}

func TestSignals(t *testing.T) {
	for _, c := range []struct {
		sig    syscall.Signal
		trap   string
		status int
	}{
		{syscall.SIGTERM, "", 143},
		{syscall.SIGINT, "", 130},
		{syscall.SIGHUP, "", 129},
		{syscall.SIGTERM, "trap 'exit 9' TERM; ", 9},
		{syscall.SIGUSR1, "trap 'exit 10' USR1; ", 10},
		{syscall.SIGQUIT, "trap 'exit 11' QUIT; ", 11},
	} {
		p := start(t, c.trap+"echo ready; while :; do sleep 0.05; done")
		if c.trap != "" { // its process id is said before the trap is set
			if _, err := io.ReadFull(p.out, make([]byte, len("ready\n"))); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Process.Signal(c.sig); err != nil {
			t.Fatal(err)
		}
		if got := exitStatus(t, p.Wait()); got != c.status {
			t.Errorf("%v, program %q: exit status %d, want %d", c.sig, c.trap, got, c.status)
		}
		eventually(t, "the program is gone", func() bool { return state(p.program) == 0 })
	}
}

// Stopped, sluice and its program stop together; continued, both go on.
func TestStop(t *testing.T) {
	p := start(t, "exec sleep 100")
	for range 3 {
		if err := p.Process.Signal(syscall.SIGTSTP); err != nil {
			t.Fatal(err)
		}
		eventually(t, "both stopped", func() bool { return state(p.program) == 'T' && state(p.Process.Pid) == 'T' })
		if err := p.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		eventually(t, "both go on", func() bool { return state(p.program) == 'S' && state(p.Process.Pid) == 'S' })
	}
	_ = p.Process.Signal(syscall.SIGTERM)
	if got := exitStatus(t, p.Wait()); got != 143 {
		t.Fatalf("exit status %d, want 143", got)
	}
}

// Killed outright, sluice takes its program along.
func TestKilled(t *testing.T) {
	p := start(t, "exec sleep 100")
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.Wait()
	eventually(t, "the program is gone", func() bool { s := state(p.program); return s == 0 || s == 'Z' })
}

func TestSize(t *testing.T) {
	for s, want := range map[string]uint64{
		"1": 1, "21474836480": 20 << 30, "20G": 20 << 30, "20g": 20 << 30, "512M": 512 << 20, "64K": 64 << 10,
		"2T": 2 << 40, "8388607T": 8388607 << 40, "20GiB": 20 << 30,
	} {
		var got size
		if err := got.Set(s); err != nil || uint64(got) != want {
			t.Errorf("size %q is %d, %v; want %d", s, uint64(got), err, want)
		}
	}
	for _, s := range []string{"", "G", "0", "0G", "-1", "-1G", "1.5G", "20 G", "20X", "1e9", "0x10", "+1", "8388608T", "18446744073709551616"} {
		var got size
		if err := got.Set(s); err == nil {
			t.Errorf("size %q was taken as %d", s, uint64(got))
		}
	}
	for n, want := range map[size]string{0: "", 20 << 30: "20G", 1536 << 20: "1536M", 1000: "1000", 3 << 40: "3T"} {
		if got := n.String(); got != want {
			t.Errorf("size %d is printed %q, want %q", uint64(n), got, want)
		}
	}
}

func TestAddress(t *testing.T) {
	for s, want := range map[string]string{
		"gpu01:7070":      "tcp:gpu01:7070",
		"tcp:gpu01:7070":  "tcp:gpu01:7070",
		"[::1]:7070":      "tcp:[::1]:7070",
		"unix:/run/w.sck": "unix:/run/w.sck",
	} {
		if got, err := parseAddress(s); err != nil || got.String() != want {
			t.Errorf("address %q is %v, %v; want %s", s, got, err, want)
		}
	}
	if got, err := parseAddress("unix:w.sock"); err != nil || !filepath.IsAbs(got.addr) {
		t.Errorf("a relative path became %v, %v", got, err)
	}
	for _, s := range []string{"", "gpu01", ":7070", "gpu01:", "gpu01:0", "unix:", "tcp:", "::1:7070", "a:b:c"} {
		if got, err := parseAddress(s); err == nil {
			t.Errorf("address %q was taken as %v", s, got)
		}
	}
}

// A terminal's ^C reaches sluice and its program both; the program must not get
// it twice, since to many a second one means "leave at once".
func TestKeyboard(t *testing.T) {
	ptmx, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ptmx.Close()
	fd := int(ptmx.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()

	w := startWorker(t, "tcp", "127.0.0.1:0", "")
	go w.serve()
	got := filepath.Join(t.TempDir(), "got")
	// After the first, it waits for a second that must not come.
	cmd := sluice("run", "--worker", w.addr, "--lib", shimLib(t), "--",
		"sh", "-c", `trap 'echo INT >>"$0"' INT; trap 'exit 4' USR1; echo ready; while :; do sleep 0.05; done`, got)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Process.Kill()
	line, err := bufio.NewReader(ptmx).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != "ready" {
		t.Fatalf("program said %q, %v", line, err)
	}
	if _, err := ptmx.Write([]byte{3}); err != nil {
		t.Fatal(err)
	}
	read := func() string {
		b, _ := os.ReadFile(got) // not there before the first
		return string(b)
	}
	eventually(t, "the program has got ^C", func() bool { return read() != "" })
	// USR1 goes the way a second INT would have gone, after it.
	if err := cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if status := exitStatus(t, cmd.Wait()); status != 4 {
		t.Fatalf("exit status %d, want 4", status)
	}
	if s := read(); s != "INT\n" {
		t.Fatalf("program got %q, want one INT", s)
	}
}
