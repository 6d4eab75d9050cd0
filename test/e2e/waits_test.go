package e2e

import (
	"context"
	"maps"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

var (
	waitsHead = regexp.MustCompile(`^sluice: process (\d+) \((\S+)\) waited for the worker in these calls; times in ms$`)
	waitsRow  = regexp.MustCompile(`^sluice: +(\d+) +(\d+) +([0-9.]+) +([0-9.]+) +([0-9.]+)  (\S.*)$`)
)

// traced runs a program with --trace and returns the round trips by function of each of its processes, from the tables on stderr.
func (w *worker) traced(prog string, args ...string) (result, map[int]map[string]int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.command(ctx, runOptions{mem: "512M"}, prog, args...)
	for i, a := range cmd.Args {
		if a == "--" {
			cmd.Args = append(append(append([]string{}, cmd.Args[:i]...), "--trace"), cmd.Args[i:]...)
			break
		}
	}
	r := finish(w.t, ctx, cmd)
	tables := map[int]map[string]int{}
	var table map[string]int
	var calls, trips int
	var total float64
	for line := range strings.Lines(r.stderr) {
		line = strings.TrimSuffix(line, "\n")
		if m := waitsHead.FindStringSubmatch(line); m != nil {
			pid, _ := strconv.Atoi(m[1])
			table = map[string]int{}
			tables[pid] = table
			calls, trips, total = 0, 0, 0
			continue
		}
		m := waitsRow.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		c, _ := strconv.Atoi(m[1])
		n, _ := strconv.Atoi(m[2])
		ms, _ := strconv.ParseFloat(m[3], 64)
		longest, _ := strconv.ParseFloat(m[5], 64)
		if longest > ms {
			w.t.Errorf("the longest wait is longer than all: %s", line)
		}
		if m[6] == "all" {
			if c != calls || n != trips || ms < total-0.1 || ms > total+0.1 {
				w.t.Errorf("the sum is not the sum of %d calls, %d round trips and %.3f ms: %s", calls, trips, total, line)
			}
			continue
		}
		calls, trips, total = calls+c, trips+n, total+ms
		table[m[6]] = n
	}
	return r, tables
}

// TestRoundTrips counts what calls of 100 rounds wait for.
func TestRoundTrips(t *testing.T) {
	w := startWorker(t, workerOptions{})
	for _, c := range []struct {
		what string
		want map[string]int // beyond the beginning's
	}{
		{"pageable", map[string]int{"cuMemcpyDtoHAsync_v2": 100}},
		{"pinned", map[string]int{"cuStreamSynchronize": 100}},
		// A tenth of the rounds reads the word and waits for the device.
		{"upload", map[string]int{"cuMemcpyDtoHAsync_v2": 10, "cuCtxSynchronize": 10}},
		{"library", map[string]int{"cuMemcpyDtoHAsync_v2": 10, "cuCtxSynchronize": 10, "cuMemHostGetDevicePointer_v2": 1, "cuStreamSynchronize": 1, "cuMemcpyDtoD_v2": 1, "cuMemcpyHtoD_v2": 1}},
		{"blocking", map[string]int{"cuMemcpyDtoHAsync_v2": 10, "cuCtxSynchronize": 10}},
		{"behind", map[string]int{"cuMemcpyDtoHAsync_v2": 10, "cuCtxSynchronize": 10, "cuStreamSynchronize": 100}},
		{"questions", map[string]int{"cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": 4}},
		{"limits", map[string]int{"cuDeviceGetDefaultMemPool": 1, "cuMemPoolGetAttribute": 100}},
		{"memory", map[string]int{"cuMemGetInfo_v2": 100}},
		{"allocate", map[string]int{"cuMemAlloc_v2": 200, "cuMemAllocAsync": 100}},
	} {
		t.Run(c.what, func(t *testing.T) {
			r, tables := w.traced(program("roundtrips"), c.what)
			if want := "roundtrips: 100 rounds of " + c.what + "\nPASS\n"; r.status != 0 || r.stdout != want || len(tables) != 1 {
				t.Fatalf("status %d, %d tables\nstdout: %s\nstderr: %s", r.status, len(tables), r.stdout, r.stderr)
			}
			for _, got := range tables {
				// The context, the first memory, the first kernel and the wait for it; the module's image may have to be sent.
				delete(got, "(the runtime loads a module)")
				for begin, n := range map[string]int{"cuMemAlloc_v2": 2, "cuLaunchKernel": 1, "cuCtxSynchronize": 1} {
					if got[begin] -= n; got[begin] == 0 {
						delete(got, begin)
					}
				}
				if !maps.Equal(got, c.want) {
					t.Errorf("round trips %v, want %v\n%s", got, c.want, r.stderr)
				}
			}
		})
	}
}

// TestTraceOfForks: each process of a program that forks has a table of its own.
func TestTraceOfForks(t *testing.T) {
	w := startWorker(t, workerOptions{})
	r, tables := w.traced(program("multi_process"))
	if r.status != 0 || len(tables) != 5 {
		t.Fatalf("status %d, %d tables\n%s", r.status, len(tables), r.stderr)
	}
	copies := 0
	for _, table := range tables {
		copies += table["cuMemcpyDtoH_v2"]
	}
	if copies != 4 {
		t.Errorf("%d waits for the copies of 4 children: %v", copies, tables)
	}
}

var bytesIn = regexp.MustCompile(`^sluice: calls=.* bytes_in=(\d+)\b`)

// TestRoundTripsOfSharedMemory: what a program reads after each wait is fetched in large pieces once it is known that it reads
// most of it, and no longer when it reads little.
func TestRoundTripsOfSharedMemory(t *testing.T) {
	const fetches = "(reading memory that the GPU has written)"
	w := startWorker(t, workerOptions{})
	for _, c := range []struct {
		what         string
		trips, bytes int // at most
	}{
		// Three blocks of 256 KiB a round, in one piece each, but every 16 rounds in three that grow. It was 800.
		{"managed", 380, 100 << 20},
		{"mapped", 380, 100 << 20},
		// Ten rounds of 4 MiB, at most 16 more until the change is seen, and then 64 KiB.
		{"corner", 200, 26*4<<20 + 100*64<<10 + 1<<20},
	} {
		t.Run(c.what, func(t *testing.T) {
			r, tables := w.traced(program("roundtrips"), c.what)
			if want := "roundtrips: 100 rounds of " + c.what + "\nPASS\n"; r.status != 0 || r.stdout != want || len(tables) != 1 {
				t.Fatalf("status %d, %d tables\nstdout: %s\nstderr: %s", r.status, len(tables), r.stdout, r.stderr)
			}
			m := bytesIn.FindStringSubmatch(r.stderr)
			if m == nil {
				t.Fatalf("no bytes: %s", r.stderr)
			}
			bytes, _ := strconv.Atoi(m[1])
			for _, table := range tables {
				t.Logf("%d fetches, %d bytes", table[fetches], bytes)
				if n := table[fetches]; n == 0 || n > c.trips || bytes > c.bytes {
					t.Errorf("%d fetches of at most %d, %d bytes of at most %d\n%s", n, c.trips, bytes, c.bytes, r.stderr)
				}
			}
		})
	}
}
