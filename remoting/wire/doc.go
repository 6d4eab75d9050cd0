// Package wire is the byte format between the shim (remoting/client, C) and
// the worker (remoting/worker): handshake, frame headers, a bounded codec, and
// the worker's end of a connection. docs/protocol.md is the specification; all
// numbers are little endian.
package wire
