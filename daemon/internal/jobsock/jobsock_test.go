package jobsock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func nobodyKnown(uint32) bool { return false }

// A user with many uids can fill the places of others, but not those of users with a job here.
func TestPlaces(t *testing.T) {
	s, err := Listen(filepath.Join(t.TempDir(), "job.sock"), nil, func(uid uint32) bool { return uid == 1000 }, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer s.l.Close()
	if s.table(0) != s.root || s.table(1000) != s.jobs || s.table(1001) != s.others || s.table(1002) != s.others {
		t.Error("uids 0, 1000, 1001 and 1002 do not have the places of root, of users with jobs and of others")
	}
}

func start(t *testing.T, env Env) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "job.sock")
	s, err := Listen(path, env, nobodyKnown, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return path
}

func ask(t *testing.T, path, line string) string {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, line); err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(c)
	return string(b)
}

func TestAnswers(t *testing.T) {
	var got rpc.Peer
	path := start(t, func(ctx context.Context, p rpc.Peer, job string, step Step) ([]rpc.EnvOp, error) {
		got = p
		switch job {
		case "1":
			return nil, nil
		case "2":
			return []rpc.EnvOp{{Name: "A", Value: "x=y"}, {Prepend: true, Name: "LD_LIBRARY_PATH", Value: "/l"}, {Prepend: true, Name: "APPTAINER_BINDPATH", Value: "/b"}}, nil
		case "3":
			return nil, lease.Errorf(lease.NoRoom, "no room\nfor you")
		case "4":
			return nil, errors.New("broken")
		case "5":
			return nil, lease.Errorf(lease.Internal, "disk full")
		case "6":
			return []rpc.EnvOp{{Name: "A", Value: "one\ntwo"}}, nil
		case "7":
			<-ctx.Done()
			return nil, ctx.Err()
		case "11": // a step with a gres of its own has longer
			until, _ := ctx.Deadline()
			return []rpc.EnvOp{{Name: "LONG", Value: fmt.Sprint(time.Until(until) > envTime)}}, nil
		case "12": // the plug-in names the job
			return nil, lease.Errorf(lease.Over, "job 12: its run has ended; ask for job 12 again")
		case "13":
			return nil, errors.New("it is not known: job c/13@n1: no answer")
		case "10":
			return []rpc.EnvOp{{Name: "STEP", Value: fmt.Sprintf("%+v", step)}}, nil
		case "8":
			return nil, lease.Errorf(lease.Denied, "%s", strings.Repeat("ü", 1000))
		}
		return []rpc.EnvOp{{Name: "A", Value: strings.Repeat("x", maxBody)}}, nil
	})
	for line, want := range map[string]string{
		"SLUICE-J 1 env 1 0\n":              "none\n",
		"SLUICE-J 1 env 2 4294967291\n":     "ok 64\nset A=x=y\nprepend LD_LIBRARY_PATH=/l\nbind APPTAINER_BINDPATH=/b\n",
		"SLUICE-J 1 env 3 0\n":              "error no room for you\n",
		"SLUICE-J 1 env 4 0\n":              "fault broken\n",
		"SLUICE-J 1 env 5 0\n":              "fault disk full\n",
		"SLUICE-J 1 env 6 0\n":              "fault A: its value has more than one line\n",
		"SLUICE-J 1 env 7 0\n":              "fault context deadline exceeded\n",
		"SLUICE-J 1 env 8 0\n":              "error " + strings.Repeat("ü", 510) + "..." + "\n",
		"SLUICE-J 1 env 9 0\n":              "fault environment of 65543 bytes, 65536 are the most\n",
		"SLUICE-J 2 env 1 0\n":              "fault not a request of version 1 to the job socket; plug-in and sluiced have to be of one release\n",
		"SLUICE-J 1 env -1 0\n":             "fault \"-1 0\" is not a job and step of Slurm's\n",
		"SLUICE-J 1 env 01 0\n":             "fault \"01 0\" is not a job and step of Slurm's\n",
		"SLUICE-J 1 env 10 3\n":             "ok 31\nset STEP={ID:3 Own:false Mem:}\n",
		"SLUICE-J 1 env 10 3 gres\n":        "ok 30\nset STEP={ID:3 Own:true Mem:}\n",
		"SLUICE-J 1 env 10 3 gres mem=5G\n": "ok 32\nset STEP={ID:3 Own:true Mem:5G}\n",
		"SLUICE-J 1 env 12 0\n":             "error its run has ended; ask for job 12 again\n",
		"SLUICE-J 1 env 13 0\n":             "fault it is not known: no answer\n",
		"SLUICE-J 1 env 11 3\n":             "ok 15\nset LONG=false\n",
		"SLUICE-J 1 env 11 3 gres\n":        "ok 14\nset LONG=true\n",
		"SLUICE-J 1 env 10 3 mem=5G\n":      "fault \"10 3 mem=5G\": a word that this daemon does not know; plug-in and sluiced have to be of one release\n",
		"SLUICE-J 1 env 10 3 gres mem=\n":   "fault \"10 3 gres mem=\": a word that this daemon does not know; plug-in and sluiced have to be of one release\n",
		"SLUICE-J 1 env 10\n":               "fault \"10\" is not a job and step of Slurm's\n",
		"SLUICE-J 1 env 1 4294967296\n":     "fault \"1 4294967296\" is not a job and step of Slurm's\n",
	} {
		if have := ask(t, path, line); have != want {
			t.Errorf("%q: %q, want %q", line, have, want)
		}
	}
	if int(got.UID) != os.Getuid() || got.PID != os.Getpid() || got.Node != "" {
		t.Errorf("peer %+v", got)
	}
	if have := ask(t, path, strings.Repeat("x", 300)); !strings.HasPrefix(have, "fault not a request") {
		t.Errorf("a long line: %q", have)
	}
}

// Silent clients are disconnected, and do not keep others from being served.
func TestSilentClients(t *testing.T) {
	path := start(t, func(context.Context, rpc.Peer, string, Step) ([]rpc.EnvOp, error) { return nil, nil })
	var quiet []net.Conn
	for range 600 {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		quiet = append(quiet, c)
	}
	if have := ask(t, path, "SLUICE-J 1 env 1 0\n"); have != "none\n" {
		t.Errorf("beside silent clients: %q", have)
	}
	last := quiet[len(quiet)-1]
	_ = last.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := last.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the answer came after silent clients were let go: %v", err)
	}
	for _, c := range quiet {
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
			t.Errorf("a silent client was told %q, %v", b, err)
		}
	}
}

// Those that are being answered are bounded for each user.
func TestBounds(t *testing.T) {
	hold := make(chan struct{})
	var inside atomic.Int32
	path := start(t, func(_ context.Context, _ rpc.Peer, job string, step Step) ([]rpc.EnvOp, error) {
		if job == "1" {
			inside.Add(1)
			<-hold
		}
		return nil, nil
	})
	release := sync.OnceFunc(func() { close(hold) })
	t.Cleanup(release)
	most := maxUser
	if os.Getuid() == 0 {
		most = 1024
	}
	for n, end := 0, time.Now().Add(10*time.Second); int(inside.Load()) < most && time.Now().Before(end); n++ {
		if n%50 == 0 {
			time.Sleep(time.Millisecond) // not more than can be read
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "SLUICE-J 1 env 1 0\n"); err != nil {
			t.Fatal(err)
		}
	}
	if have := ask(t, path, "SLUICE-J 1 env 2 0\n"); have != "" {
		t.Errorf("beyond the bound: %q", have)
	}
	if n := int(inside.Load()); n != most {
		t.Errorf("%d are answered at once, and %d may be", n, most)
	}
	release()
	for end := time.Now().Add(5 * time.Second); ask(t, path, "SLUICE-J 1 env 2 0\n") != "none\n"; {
		if time.Now().After(end) {
			t.Fatal("what was left is not given on")
		}
	}
}

// A user's garbage does not fill the disk with the daemon's log.
func TestLogBounded(t *testing.T) {
	var lines atomic.Int32
	s := &Server{log: slog.New(slog.NewTextHandler(counter{&lines}, nil))}
	for range 1000 {
		s.report(slog.LevelInfo, "job socket: bad request")
	}
	if n := lines.Load(); n < 1 || n > 40 { // a few seconds on a busy machine
		t.Errorf("%d lines of 1000 requests", n)
	}
}

type counter struct{ n *atomic.Int32 }

func (c counter) Write(b []byte) (int, error) { c.n.Add(1); return len(b), nil }

// A daemon that takes over replaces the socket of the one before, and nothing else.
func TestListen(t *testing.T) {
	var answered atomic.Int32
	env := func(context.Context, rpc.Peer, string, Step) ([]rpc.EnvOp, error) { answered.Add(1); return nil, nil }
	path := filepath.Join(t.TempDir(), "job.sock")
	for range 2 {
		s, err := Listen(path, env, nobodyKnown, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Serve(ctx) }()
		if have := ask(t, path, "SLUICE-J 1 env 1 0\n"); have != "none\n" {
			t.Errorf("answer %q", have)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := net.Dial("unix", path); err == nil {
			t.Error("a daemon that stopped still listens")
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o666 {
		t.Errorf("socket: %v %v", fi, err)
	}
	other := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(other, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(other, env, nobodyKnown, slog.New(slog.DiscardHandler)); err == nil {
		t.Error("a file was replaced by a socket")
	}
}

func TestNotes(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "job.sock")
	n, err := NewNotes(sock)
	if err != nil {
		t.Fatal(err)
	}
	has := func(job string) bool {
		_, err := os.Stat(filepath.Join(filepath.Dir(sock), "jobs", job))
		return err == nil
	}
	for _, job := range []string{"1", "2", "3", "run-7", "../x"} {
		if err := n.Put(job); err != nil {
			t.Error(err)
		}
	}
	n.Remove("1")
	if _, err = NewNotes(sock); err != nil {
		t.Error(err)
	}
	n.Keep(map[string]bool{"2": true})
	if has("1") || !has("2") || has("3") || has("run-7") || has("../x") {
		t.Error("not only job 2 is noted")
	}
}

func FuzzParse(f *testing.F) {
	f.Add("SLUICE-J 1 env 1 0")
	f.Add("SLUICE-J 1 env 4294967295 4294967291")
	f.Add("SLUICE-J 1 env  1")
	f.Add("SLUICE-J 1 env 1 0 gres mem=5G")
	f.Fuzz(func(t *testing.T, line string) {
		job, step, err := parse(line)
		again := magic + job + " " + step.ID
		if step.Own {
			again += " gres"
		}
		if step.Mem != "" {
			again += " mem=" + step.Mem
		}
		if err == nil && again != line {
			t.Errorf("%q is read as %s %+v", line, job, step)
		}
		if text := plain(line); len(text) > maxText || strings.ContainsAny(text, "\n\r\x00\x1b") {
			t.Errorf("plain(%q) = %q", line, text)
		}
	})
}
