package process

import (
	"fmt"
	"os"
	"strconv"
)

// Scores for SetOOMScore.
const (
	OOMDaemon  = -900 // jobs ask it when the machine is out of memory
	OOMSession = 500  // costs one program
)

// SetOOMScore says how likely this process, and those that it starts, are to be killed when memory is
// short: from -1000, never, to 1000, first (proc(5), oom_score_adj). To lower it takes
// CAP_SYS_RESOURCE.
func SetOOMScore(score int) error {
	f, err := os.OpenFile("/proc/self/oom_score_adj", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(strconv.Itoa(score)); err != nil {
		return fmt.Errorf("oom score %d: %w", score, err)
	}
	return nil
}
