package worker

// A session's host memory where no control group bounds it: the session looks by itself, and ends.

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// hostLook is the time between two looks.
const hostLook = 250 * time.Millisecond

// watchHostMemory ends the session once this process has more than max bytes; 0 is no limit.
func (s *session) watchHostMemory(max uint64) {
	if max == 0 {
		return
	}
	go func() {
		for range time.Tick(hostLook) {
			n, err := hostMemory()
			if err != nil {
				s.log.Error("host memory is not bounded", "error", err)
				return
			}
			n -= min(n, s.host.shared.Load()) // memory of the client's
			if n > max {
				s.log.Error("session ends: its host memory passed worker.memory_max", "mib", n>>20, "limit_mib", max>>20)
				s.leave(fmt.Sprintf("its host memory passed worker.memory_max: %d of %d MiB", n>>20, max>>20), nil)
			}
		}
	}()
}

// hostMemory is what this process alone makes the machine hold, in bytes: no files that are mapped, which the
// kernel can drop.
func hostMemory() (sum uint64, err error) {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	found := 0
	for line := range bytes.Lines(b) {
		name, v, _ := bytes.Cut(line, []byte(":"))
		switch string(name) {
		case "RssAnon", "RssShmem", "VmSwap":
			f := bytes.Fields(v)
			if len(f) != 2 || string(f[1]) != "kB" {
				return 0, fmt.Errorf("/proc/self/status: %q", line)
			}
			n, err := strconv.ParseUint(string(f[0]), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/self/status: %w", err)
			}
			sum += n << 10
			found++
		}
	}
	if found < 2 { // VmSwap is missing where there is no swap
		return 0, errors.New("/proc/self/status does not say how much memory is anonymous")
	}
	return sum, nil
}
