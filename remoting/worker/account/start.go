package account

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
)

// StartTime is when a process started, in clock ticks since the machine did: field
// 22 of /proc/PID/stat (proc(5)). With the id it names a process for good.
func StartTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field is the name in brackets, which may hold anything.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(f))
	}
	return strconv.ParseUint(string(f[19]), 10, 64)
}
