package worker

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// What a client makes its session log has an end, in records and in bytes.
func TestLogIsBounded(t *testing.T) {
	var b bytes.Buffer
	long := strings.Repeat("x", 1<<16)
	log := limitLog(slog.New(slog.NewJSONHandler(&b, nil))).With("client", long)
	for range 100_000 {
		log.Error(long, "name", long, "error", errors.New(long))
	}
	// The budget grows by a record each second.
	if n := strings.Count(b.String(), "\n"); n < logBurst || n > logBurst+100 {
		t.Errorf("%d records", n)
	}
	for line := range strings.Lines(b.String()) {
		if len(line) > 5*logText {
			t.Fatalf("a record of %d bytes", len(line))
		}
	}
	// What was left out is told with the next one.
	budget := &logBudget{at: time.Unix(0, 0)}
	for i := range 7 {
		if _, ok := budget.take(time.Unix(0, int64(i))); ok {
			t.Error("a record beyond the budget")
		}
	}
	if skipped, ok := budget.take(time.Unix(1, 0)); !ok || skipped != 7 {
		t.Errorf("skipped %d, written %v", skipped, ok)
	}
}

// crash is a session process that logs a line and crashes, with many goroutines to list.
func crash(how string) {
	fmt.Fprintln(os.NewFile(control.LogFD, "log"), "logged")
	for range 1000 {
		go func() { select {} }()
	}
	switch how {
	case "panic":
		panic("a bug of ours")
	case "signal":
		_ = unix.Kill(os.Getpid(), unix.SIGSEGV)
		select {}
	case "words":
		for range 1 << 20 {
			fmt.Fprintln(os.Stderr, "words of a library")
		}
	}
}

// What a session process writes on its standard error, from a crash to a library's words, is
// one short record of its starter's log.
func TestLastWordsAreShort(t *testing.T) {
	path := filepath.Join(t.TempDir(), "stderr")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	stderr := os.Stderr
	defer func() { os.Stderr = stderr }()
	os.Stderr = f // the starter's
	for how, want := range map[string]string{"panic": "panic: a bug of ours", "signal": "SIGSEGV", "words": "words of a library"} {
		var b bytes.Buffer
		cmd := exec.Command(os.Args[0], "crash", how)
		p, err := control.Spawn(slog.New(slog.NewTextHandler(&b, nil)), cmd, cmd.Start)
		if err != nil {
			t.Fatal(err)
		}
		<-p.Done
		p.Ctl.Close()
		if !strings.Contains(b.String(), want) || b.Len() > 5<<10 || strings.Count(b.String(), "\n") != 1 {
			t.Errorf("%s: logged %d bytes: %.3000s", how, b.Len(), b.String())
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(b); !regexp.MustCompile(`^(logged session_process=[0-9]+\n){3}$`).MatchString(got) {
		t.Errorf("on the starter's standard error: %.2000s", got)
	}
}
