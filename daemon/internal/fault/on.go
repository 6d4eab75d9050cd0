//go:build faults

package fault

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// Enabled says whether this program has fault points.
const Enabled = true

var (
	target string
	passes atomic.Int64
)

func init() {
	v := os.Getenv("SLUICE_FAULT")
	if v == "" {
		return
	}
	name, count, ok := strings.Cut(v, ":")
	n, err := strconv.ParseInt(count, 10, 64)
	if !ok || err != nil || n < 1 || !slices.Contains(names, name) {
		fmt.Fprintf(os.Stderr, "SLUICE_FAULT=%s: want NAME:N with N from 1 and NAME one of %s\n", v, strings.Join(names, " "))
		os.Exit(2)
	}
	target = name
	passes.Store(n)
}

// Point is a step named name.
func Point(name string) {
	if name != target || passes.Add(-1) != 0 {
		return
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // the signal is on its way
}
