package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"
)

// contentRun is what a run of test/cuda/content.c, which compares all bytes, has said and sent.
type contentRun struct {
	MS         []float64 `json:"ms"`
	BytesOut   int64     `json:"bytes_out"`
	Stored     int64     `json:"stored"`
	Compressed int64     `json:"compressed"`
}

// startContent starts a worker that stores content in a directory.
func startContent(t *testing.T, args ...string) (w *worker, dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "content")
	return startWorker(t, workerOptions{args: append([]string{"--content", dir, "--content-limit", "1G", "--content-keep-free", "0"}, args...)}), dir
}

// copyContent runs the program through an address.
func copyContent(t *testing.T, w *worker, addr, kind string, mib, changed, times int, env ...string) (r contentRun) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	cmd := w.direct(ctx, built("test/content"), kind, fmt.Sprint(mib), fmt.Sprint(changed), fmt.Sprint(times))
	stats := filepath.Join(t.TempDir(), "stats")
	cmd.Env = append(cmd.Env, "SLUICE_WORKER="+addr, "SLUICE_CONTENT=1", "SLUICE_STATS="+stats)
	cmd.Env = append(cmd.Env, env...)
	res := finish(t, ctx, cmd)
	if res.status != 0 || res.stderr != "" || json.Unmarshal([]byte(res.stdout), &r) != nil {
		t.Fatalf("status %d\nstdout: %s\nstderr: %s", res.status, res.stdout, tail(res.stderr, 20))
	}
	readStats(t, stats, &r)
	return r
}

// pieces gives the files of the store, once half of what so many MiB have is stored: a disk that is slow may have got no more.
func pieces(t *testing.T, dir string, mib int) (all []string) {
	t.Helper()
	waitFor(t, 30*time.Second, "the pieces are stored", func() bool {
		all, _ = filepath.Glob(filepath.Join(dir, "[0-9a-f]*"))
		return len(all) >= mib/4/2
	})
	return all
}

// What a program has sent over a slow link is not sent again, whatever it is copied from: by the same process, by the next one, with some of it changed.
// All bytes are compared, and the link counts them.
func TestContent(t *testing.T) {
	const mib = 32
	for _, c := range []struct {
		kind string
		args []string
	}{{kind: "pageable"}, {kind: "locked", args: []string{"--no-compress"}}, {kind: "async", args: []string{"--grace", "1m"}}} {
		t.Run(fmt.Sprint(c.kind, c.args), func(t *testing.T) {
			w, dir := startContent(t, c.args...)
			addr, end := slowLink(t, w, "1G")
			first := copyContent(t, w, addr, c.kind, mib, 0, 1)
			has := int64(len(pieces(t, dir, mib))) << 22
			again := copyContent(t, w, addr, c.kind, mib, 0, 2)
			changed := copyContent(t, w, addr, c.kind, mib, 5, 1)
			t.Logf("%+v, again %+v, changed %+v; %d bytes are stored, the link has passed %d on", first, again, changed, has, end())
			if first.Stored != 0 {
				t.Errorf("the first run had %d bytes from an empty store", first.Stored)
			}
			if again.Stored < has-4<<20 || again.BytesOut > 2*mib<<20-again.Stored+1<<20 {
				t.Errorf("twice the same: %+v", again)
			}
			if changed.Stored == 0 || changed.Stored > mib<<20*3/4 || changed.Stored+changed.BytesOut > mib<<20+1<<20 {
				t.Errorf("a fourth has changed: %+v", changed)
			}
			if sum := first.BytesOut + again.BytesOut + changed.BytesOut; end() > sum+sum/50 || end() < sum {
				t.Errorf("the programs say that they sent %d bytes, the link passed %d on", sum, end())
			}
		})
	}
}

// A link is measured first: what it brought until then is sent each time.
func TestContentMeasured(t *testing.T) {
	const mib = 96
	w, dir := startContent(t)
	addr, _ := slowLink(t, w, "1G")
	env := []string{"SLUICE_CONTENT=", "SLUICE_COMPRESS=1"}
	copyContent(t, w, addr, "pageable", mib, 0, 1, env...)
	pieces(t, dir, mib/8)
	if r := copyContent(t, w, addr, "pageable", mib, 0, 1, env...); r.Stored == 0 || r.Stored > (mib-8)<<20 {
		t.Errorf("the second run: %+v", r)
	}
}

// Without a store nothing is asked more than once; within one machine, and where the program says so, not at all.
func TestContentOff(t *testing.T) {
	w := startWorker(t, workerOptions{})
	addr, _ := slowLink(t, w, "1G")
	if r := copyContent(t, w, addr, "pageable", 16, 0, 2); r.Stored != 0 {
		t.Errorf("no store: %+v", r)
	}
	w, dir := startContent(t)
	for _, env := range []string{"SLUICE_CONTENT=0", "SLUICE_CONTENT="} {
		if r := copyContent(t, w, w.addr, "pageable", 16, 0, 2, env); r.Stored != 0 {
			t.Errorf("%s: %+v", env, r)
		}
	}
	if all := pieces(t, dir, 0); len(all) > 0 {
		t.Errorf("stored: %v", all)
	}
}

// Files that are damaged, and a store that is full, cost time and no byte.
func TestContentDamaged(t *testing.T) {
	const mib = 32
	w, dir := startContent(t)
	addr, _ := slowLink(t, w, "1G")
	copyContent(t, w, addr, "pageable", mib, 0, 1)
	pieces(t, dir, mib)
	waitFor(t, 30*time.Second, "the session, which stores them, has ended", func() bool { return len(w.sessions()) == 0 })
	all := pieces(t, dir, mib)
	slices.Sort(all)
	damaged := 0
	for i, f := range all {
		var err error
		if i%3 < 2 {
			damaged++
		}
		switch i % 3 {
		case 0:
			b, e := os.ReadFile(f)
			b[len(b)/2] ^= 1
			err = e
			if e == nil {
				err = os.WriteFile(f, b, 0o600)
			}
		case 1:
			err = os.Truncate(f, 4096)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if r := copyContent(t, w, addr, "pageable", mib, 0, 1); r.Stored > int64(len(all)-damaged)<<22 {
		t.Errorf("%d of %d files were damaged: %+v", damaged, len(all), r)
	}
}

// Two programs at a time share a store.
func TestContentTogether(t *testing.T) {
	const mib = 32
	w, dir := startContent(t)
	addr, _ := slowLink(t, w, "1G")
	both := func() (all [2]contentRun) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			all[1] = copyContent(t, w, addr, "async", mib, 0, 1)
		}()
		all[0] = copyContent(t, w, addr, "pageable", mib, 0, 1)
		<-done
		return all
	}
	both()
	pieces(t, dir, 8)
	if all := both(); all[0].Stored+all[1].Stored == 0 {
		t.Errorf("%+v", all)
	}
}

// A connection that is lost while content is asked for, copied and stored is made again, and nothing is lost.
func TestContentCut(t *testing.T) {
	const mib = 32
	w, dir := startContent(t, "--grace", "1m")
	addr, _ := slowLink(t, w, "1G")
	copyContent(t, w, addr, "pageable", mib, 0, 1)
	pieces(t, dir, mib)
	for seed, kind := range []string{"pageable", "async"} {
		slow := *w
		slow.addr = addr
		cut := newCutter(t, &slow, uint64(seed), 3, 4<<20, 0)
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		cmd := w.direct(ctx, built("test/content"), kind, fmt.Sprint(mib), "4", "2")
		cmd.Env = append(cmd.Env, "SLUICE_WORKER="+cut.addr(), "SLUICE_CONTENT=1")
		if res := finish(t, ctx, cmd); res.status != 0 {
			t.Errorf("%s: status %d\nstdout: %s\nstderr: %s", kind, res.status, res.stdout, tail(res.stderr, 20))
		}
		if cut.again.Load() == 0 {
			t.Errorf("%s: nothing was cut", kind)
		}
	}
}
