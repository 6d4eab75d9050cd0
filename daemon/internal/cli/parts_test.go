package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// partsOf is an accounting with one answer; with no answer it waits.
type partsOf struct {
	list []slurm.Part
	err  error
	wait bool
}

func (a partsOf) Parts(ctx context.Context, _ string) ([]slurm.Part, error) {
	if a.wait {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return a.list, a.err
}

func TestPartsInWords(t *testing.T) {
	many := []slurm.Part{{ID: "119", Name: "119_12"}}
	for n := range 12 {
		many = append(many, slurm.Part{ID: fmt.Sprint(120 + n), Name: fmt.Sprintf("119_%d", n)})
	}
	for _, c := range []struct {
		job           string
		in            partsOf
		shown, choice string
	}{
		{"119", partsOf{}, "", ""},
		{"119", partsOf{err: errors.New("sacct: no")}, "", ""},
		{"run-1", partsOf{list: many}, "", ""},
		{"119_1", partsOf{list: many}, "", ""},
		{"119", partsOf{list: []slurm.Part{{ID: "120", Name: "119_1"}, {ID: "121", Name: "119_2"}, {ID: "119", Name: "119_3"}}},
			"job 119 is an array: this is its task 119_3; others: 119_1, 119_2", "; job 119 is an array, and each task has a record of its own: 119_1, 119_2, 119_3"},
		{"119", partsOf{list: []slurm.Part{{ID: "119", Name: "119+0"}, {ID: "120", Name: "119+1"}}},
			"job 119 is a heterogeneous job: this is its component 119+0; others: 119+1", "; job 119 is a heterogeneous job, and each component has a record of its own: 119+0, 119+1"},
		{"119", partsOf{list: []slurm.Part{{ID: "119", Name: "119_7"}}}, "job 119 is an array: this is its task 119_7", "; job 119 is an array, and each task has a record of its own: 119_7"},
		{"119", partsOf{list: []slurm.Part{{ID: "120", Name: "119_1"}, {ID: "119", Name: "119_[2-5,7]"}}}, "", "; job 119 is an array, and each task has a record of its own: 119_1, 119_[2-5,7]"},
		{"119", partsOf{list: many}, "job 119 is an array: this is its task 119_12; others: 119_0, 119_1, 119_2, 119_3, 119_4, 119_5, 119_6, 119_7, 119_8, 119_9 and 2 more",
			"; job 119 is an array, and each task has a record of its own: 119_12, 119_0, 119_1, 119_2, 119_3, 119_4, 119_5, 119_6, 119_7, 119_8 and 3 more"},
	} {
		p := askParts(t.Context(), c.job, c.in)()
		if got := p.shown(); got != c.shown {
			t.Errorf("%s, %+v: shown %q, want %q", c.job, c.in, got, c.shown)
		}
		if got := p.choice(); got != c.choice {
			t.Errorf("%s, %+v: choice %q, want %q", c.job, c.in, got, c.choice)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	wait := askParts(ctx, "119", partsOf{wait: true})
	cancel()
	if p := wait(); p.shown() != "" || p.choice() != "" {
		t.Errorf("without an answer: %+v", p)
	}
}

// explain and report say of which part they tell, and which others there are. Without the accounting they tell the same of the part.
func TestPartShown(t *testing.T) {
	d := startDaemon(t)
	d.mu.Lock()
	d.events = []rpc.Event{{Time: time.Unix(1.8e9, 0), Event: "grant", Key: lease.Key{Job: "4711", Node: "n1"}}}
	d.mu.Unlock()
	reports := startReportDaemon(t, lease.Report{Key: lease.Key{Job: "4711", Node: "n1"}, Owner: "gpu01", Made: time.Unix(1.8e9, 0)})
	sacct := t.TempDir()
	const script = "#!/bin/sh\ncase \"$*\" in *--jobs=4711\\ *) printf '4712|4711_1\\n4711|4711_2\\n';; *--jobs=9\\ *) printf '9|9+0\\n10|9+1\\n';; *) echo no >&2; exit 1;; esac\n"
	if err := os.WriteFile(filepath.Join(sacct, "sacct"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	const told = "sluice: job 4711 is an array: this is its task 4711_2; others: 4711_1\n"
	for _, c := range []struct {
		path, args string
		status     int
		stdout     string // in it
		stderr     string // in it; "" none
	}{
		{sacct, "explain 4711", 0, "grant", told},
		{sacct, "explain --json 4711", 0, "[", told},
		{sacct, "report 4711", 0, "job 4711 of", told},
		{sacct, "report --json 4711", 0, "[", told},
		{"/nonexistent", "explain 4711", 0, "grant", ""},
		{"/nonexistent", "report 4711", 0, "job 4711 of", ""},
		{sacct, "explain 9", 1, "", "for jobs with leases; job 9 is a heterogeneous job, and each component has a record of its own: 9+0, 9+1"},
		{sacct, "report 9", 1, "", "AdminComment%200; job 9 is a heterogeneous job"},
		{sacct, "explain 8", 1, "", `know nothing about job "8"`},
		{sacct, "report 8", 1, "", "sacct -j 8"},
		{sacct, "report 8_1", 1, "", "sluice: job 8_1: no word from Slurm of its own job id: "},
	} {
		words := strings.Fields(c.args)
		socket := d.socket
		if words[0] == "report" {
			socket = reports
		}
		cmd := sluice(append(words, "--socket", socket)...)
		cmd.Env = append(asSluice(), "PATH="+c.path)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		status := exitStatus(t, cmd.Run())
		if status != c.status || !strings.Contains(stdout.String(), c.stdout) || !strings.Contains(stderr.String(), c.stderr) || c.stderr == "" && stderr.Len() > 0 {
			t.Errorf("%s with %s: exit status %d, %q, %q", c.args, c.path, status, stdout.String(), stderr.String())
		}
	}
}
