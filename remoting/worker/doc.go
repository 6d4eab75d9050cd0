// Package worker executes the CUDA calls of remote programs on the GPUs of its
// machine and holds each of them to its grant.
//
// A supervisor accepts connections, keeps leases and their memory accounts, and
// starts one session process per client process; a session process owns one
// client's command stream and one CUDA driver. docs/design.md has the picture.
package worker
