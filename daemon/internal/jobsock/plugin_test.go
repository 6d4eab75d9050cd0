package jobsock

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/spank"
)

// The plug-in's own C, in slurmstepd's place, understands what is answered.
func TestPlugin(t *testing.T) {
	// In ms. In a job the plug-in waits 2 s, half a second longer than the daemon for its answer. A busy machine may
	// need that half second, and here it is the answers that count.
	const patience = 30000
	ops := []rpc.EnvOp{{Name: "SLUICE_SOCKET", Value: "/run/ü=b c"}, {Prepend: true, Name: "LD_LIBRARY_PATH", Value: "/l"}, {Prepend: true, Name: "APPTAINER_BINDPATH", Value: "/b"}, {Name: "E"}}
	path := start(t, func(ctx context.Context, p rpc.Peer, job string, step Step) ([]rpc.EnvOp, error) {
		if int(p.UID) != os.Getuid() || p.PID != os.Getpid() {
			t.Errorf("peer %+v", p)
		}
		switch job {
		case "1":
			return nil, nil
		case "2":
			return ops, nil
		case "3":
			return nil, lease.Errorf(lease.NoRoom, "50%% asked,\n30%% free")
		case "4":
			return nil, errors.New("broken")
		case "5":
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return slices.Repeat(ops, 4294), nil // too long
	})
	for job, want := range map[uint32]spank.Answer{
		1: {Kind: spank.None},
		2: {Kind: spank.Env, Changes: []spank.Change{{Name: "SLUICE_SOCKET", Value: "/run/ü=b c"}, {Separator: ':', Name: "LD_LIBRARY_PATH", Value: "/l"}, {Separator: ',', Name: "APPTAINER_BINDPATH", Value: "/b"}, {Name: "E"}}},
		3: {Kind: spank.Error, Text: "50% asked, 30% free"},
		4: {Kind: spank.Silent, Text: "broken"},
		5: {Kind: spank.Silent, Text: "context deadline exceeded"},
	} {
		have := spank.Ask(path, job, 4294967291, 0, patience)
		if have.Kind != want.Kind || have.Text != want.Text || !slices.Equal(have.Changes, want.Changes) {
			t.Errorf("job %d: %+v, want %+v", job, have, want)
		}
	}
	if have := spank.Ask(path, 6, 0, 0, patience); have.Kind != spank.Silent || !strings.Contains(have.Text, "are the most") {
		t.Errorf("%+v", have)
	}
	begin := time.Now()
	for range 1000 {
		if have := spank.Ask(path, 1, 0, 0, patience); have.Kind != spank.None {
			t.Fatalf("%+v", have)
		}
	}
	t.Logf("%v for each of 1000 questions", time.Since(begin)/1000)
}

// A note is found by the plug-in where it looks for it.
func TestPluginNotes(t *testing.T) {
	path := start(t, func(context.Context, rpc.Peer, string, Step) ([]rpc.EnvOp, error) { return nil, errors.New("broken") })
	n, err := NewNotes(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Put("4711"); err != nil {
		t.Fatal(err)
	}
	for job, want := range map[uint32]bool{4711: true, 4712: false} {
		p, _ := spank.Start(spank.Remote, job, 0, 0, "socket="+path)
		begin := time.Now()
		_ = p.UserInit()
		waited := time.Since(begin) > 4*time.Second // for a daemon that can tell, which the plug-in does for 5 s
		if noted := !strings.Contains(p.Log(), "job 4712: broken"); noted != want || waited {
			t.Errorf("job %d noted: %v, want %v; waited %v; %s (%s)", job, noted, want, waited, p.Log(), filepath.Dir(path))
		}
	}
}

// The shell's and the plug-in's ways to put an item first are one.
func TestPutFirst(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var b strings.Builder
		for range r.IntN(12) {
			b.WriteByte("ab:,"[r.IntN(4)])
		}
		for name, sep := range map[string]byte{"P": ':', "X_BINDPATH": ','} {
			o := rpc.EnvOp{Prepend: true, Name: name, Value: []string{"a", "ab", "b"}[r.IntN(3)]}
			if c, g := spank.ListChange(o.Value, b.String(), sep, true), o.Apply(b.String()); c != g {
				t.Fatalf("%s first in %q: %q in C, %q in Go", o.Value, b.String(), c, g)
			}
			sp := string(sep)
			rest := slices.DeleteFunc(strings.Split(b.String(), sp), func(s string) bool { return s == o.Value })
			if c := spank.ListChange(o.Value, b.String(), sep, false); c != strings.Join(rest, sp) {
				t.Fatalf("%s taken out of %q: %q in C, want %q", o.Value, b.String(), c, strings.Join(rest, sp))
			}
		}
	}
}
