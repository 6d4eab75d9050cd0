// Package trace keeps what a session does while somebody wants to know: its work on the GPU with the times of events around it,
// the calls that its client waits for, and its turns.
package trace
