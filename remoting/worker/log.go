package worker

// A session's log is its owner's, and what a session logs its client can cause: so it has a
// limit. Several go on in one burst, then one each second; a record that is left out is
// counted in the next one.

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Limits of a session's log: records in a burst, and bytes of a text in a record.
const (
	logBurst = 256
	logText  = 256
)

type logLimit struct {
	slog.Handler
	b *logBudget
}

type logBudget struct {
	mu      sync.Mutex
	left    int
	at      time.Time // when left was true
	skipped int
}

// limitLog gives a logger that writes no more of a session than its owner can bear.
func limitLog(log *slog.Logger) *slog.Logger {
	return slog.New(logLimit{log.Handler(), &logBudget{left: logBurst, at: time.Now()}})
}

// take reports whether a record may be written at a time, and how many were not before it.
func (b *logBudget) take(now time.Time) (skipped int, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := int(now.Sub(b.at) / time.Second); n > 0 {
		b.left = min(b.left+n, logBurst)
		b.at = b.at.Add(time.Duration(n) * time.Second)
	}
	if b.left == 0 {
		b.skipped++
		return 0, false
	}
	b.left--
	skipped, b.skipped = b.skipped, 0
	return skipped, true
}

// Handle implements slog.Handler.
func (l logLimit) Handle(ctx context.Context, r slog.Record) error {
	skipped, ok := l.b.take(time.Now())
	if !ok {
		return nil
	}
	out := slog.NewRecord(r.Time, r.Level, clip(r.Message), r.PC)
	r.Attrs(func(a slog.Attr) bool {
		out.AddAttrs(clipAttr(a))
		return true
	})
	if skipped > 0 {
		out.AddAttrs(slog.Int("skipped", skipped))
	}
	return l.Handler.Handle(ctx, out)
}

// WithAttrs implements slog.Handler.
func (l logLimit) WithAttrs(as []slog.Attr) slog.Handler {
	clipped := make([]slog.Attr, len(as))
	for i, a := range as {
		clipped[i] = clipAttr(a)
	}
	return logLimit{l.Handler.WithAttrs(clipped), l.b}
}

// WithGroup implements slog.Handler.
func (l logLimit) WithGroup(name string) slog.Handler {
	return logLimit{l.Handler.WithGroup(name), l.b}
}

func clip(s string) string {
	if len(s) > logText {
		return s[:logText] + "..."
	}
	return s
}

func clipAttr(a slog.Attr) slog.Attr {
	switch v := a.Value.Resolve(); v.Kind() {
	case slog.KindString:
		a.Value = slog.StringValue(clip(v.String()))
	case slog.KindAny:
		if err, ok := v.Any().(error); ok {
			a.Value = slog.StringValue(clip(err.Error()))
		}
	}
	return a
}
