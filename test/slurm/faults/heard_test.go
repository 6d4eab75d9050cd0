package faults

import (
	"fmt"
	"strings"
	"sync"
	"testing"
)

// heard remembers what a test fails of, to say it once more at the end: behind many lines of logs.
type heard struct {
	*testing.T
	mu    sync.Mutex
	fails []string
}

func (h *heard) note(s string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	first, _, _ := strings.Cut(s, "\n")
	h.fails = append(h.fails, first[:min(len(first), 300)])
}

func (h *heard) Errorf(format string, args ...any) {
	h.Helper()
	h.note(fmt.Sprintf(format, args...))
	h.T.Errorf(format, args...)
}

func (h *heard) Fatalf(format string, args ...any) {
	h.Helper()
	h.note(fmt.Sprintf(format, args...))
	h.T.Fatalf(format, args...)
}

func (h *heard) Fatal(args ...any) {
	h.Helper()
	h.note(fmt.Sprint(args...))
	h.T.Fatal(args...)
}

// again says it.
func (h *heard) again() {
	h.mu.Lock()
	defer h.mu.Unlock()
	const most = 10
	if k := len(h.fails); k > most {
		h.fails = append(h.fails[:most], fmt.Sprintf("and %d more", k-most))
	}
	if len(h.fails) > 0 {
		h.Logf("%s failed:\n%s", h.Name(), strings.Join(h.fails, "\n"))
	}
}
