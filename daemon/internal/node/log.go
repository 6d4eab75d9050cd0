package node

import (
	"io"
	"log/slog"
)

// Logger makes the daemon's log and the variable that holds its level.
func Logger(w io.Writer, level, format string) (*slog.Logger, *slog.LevelVar) {
	v := new(slog.LevelVar)
	SetLevel(v, level)
	o := &slog.HandlerOptions{Level: v}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, o)), v
	}
	return slog.New(slog.NewTextHandler(w, o)), v
}

// SetLevel sets the level by its name in the configuration.
func SetLevel(v *slog.LevelVar, name string) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(name)); err == nil {
		v.Set(l)
	}
}
