package e2e

import (
	"strings"
	"testing"
)

// TestPageableHidden checks that a program is told that kernels do not reach pageable memory, although the GPU says that they do: they reach
// the session's memory, not the program's. The worker's log warns unless sessions have a sandbox.
func TestPageableHidden(t *testing.T) {
	const warning = "clients can take their sessions over"
	for _, sandbox := range []string{"off", "auto", "on"} {
		w := startWorker(t, workerOptions{sandbox: sandbox, env: []string{"SLUICE_SIM_PAGEABLE=1"}})
		if r := w.run(runOptions{}, built("test/nvml"), "attributes", "88", "100", "10"); r.stdout != "0\n0\n32\n" {
			t.Errorf("sandbox %s: attributes %q, %s", sandbox, r.stdout, r.stderr)
		}
		if got := strings.Contains(w.log.String(), warning); got != (sandbox == "off") {
			t.Errorf("sandbox %s: warns: %v", sandbox, got)
		}
	}
}
