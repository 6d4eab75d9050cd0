//go:build faults

package fault

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

func TestPointKillsAtTheCount(t *testing.T) {
	if len(names) == 0 {
		t.Fatal("there are no points")
	}
	if os.Getenv("SLUICE_FAULT") != "" {
		Point(names[0])
		Point("another")
		Point(names[0])
		os.Exit(3)
	}
	for count, want := range map[string]int{"1": -9, "2": -9, "3": 3, "0": 2, "x": 2} {
		cmd := exec.Command(os.Args[0], "-test.run", t.Name())
		cmd.Env = append(os.Environ(), "SLUICE_FAULT="+names[0]+":"+count)
		err := cmd.Run()
		var ee *exec.ExitError
		if !errors.As(err, &ee) {
			t.Fatal(count, err)
		}
		have := ee.ExitCode()
		if ws := ee.Sys().(syscall.WaitStatus); ws.Signaled() {
			have = -int(ws.Signal())
		}
		if have != want {
			t.Errorf("count %s: ended with %d, want %d", count, have, want)
		}
	}
}
