// Package fault holds the numbered steps at which a test may kill the daemon.
// Without the build tag "faults" a point is nothing at all. With it the variable
// SLUICE_FAULT=NAME:N, read once at start, has the process kill itself with
// signal 9 when it passes point NAME for the N-th time (N from 1).
package fault

//go:generate go test -run TestNames -update

// Names lists all points in the daemon's sources, sorted.
func Names() []string { return append([]string(nil), names...) }
