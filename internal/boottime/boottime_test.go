package boottime

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestNow compares Now with what the kernel says in /proc/uptime, in hundredths of a second.
func TestNow(t *testing.T) {
	before := Now()
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		t.Fatal(err)
	}
	after := Now()
	up, err := strconv.ParseFloat(strings.Fields(string(b))[0], 64)
	if err != nil {
		t.Fatal(err)
	}
	const step = 10 * time.Millisecond
	if d := time.Duration(up * float64(time.Second)); d < before-step || d > after+step {
		t.Errorf("up for %v between %v and %v", d, before, after)
	}
}
