// Package rpc carries the interfaces of package lease over gRPC: Owner between daemons, over
// TLS 1.3 and with the host's name proven by package identity; Local between the command line
// and its daemon, over a Unix socket, where the kernel identifies the caller.
package rpc

//go:generate protoc --go_out=../../.. --go_opt=module=github.com/sluice-hpc/sluice --go-grpc_out=../../.. --go-grpc_opt=module=github.com/sluice-hpc/sluice -I ../../.. daemon/internal/rpc/sluice.proto
