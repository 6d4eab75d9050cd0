package rpc

import (
	"context"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Protocol is the version of sluice.proto. Programs with different versions refuse to talk. It
// is raised when a field changes its meaning, not when a field is added.
const Protocol = 1

// Headers of every call and of its answer.
const (
	headerProtocol = "sluice-protocol"
	headerVersion  = "sluice-version"
)

// tagged returns the context of a call with this side's versions.
func tagged(ctx context.Context, version string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, headerProtocol, strconv.Itoa(Protocol), headerVersion, text(version))
}

// sameProtocol refuses a call of another protocol with an error that any version can read, and
// sends the caller this side's version.
func sameProtocol(version string) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		got, theirs := first(md, headerProtocol), first(md, headerVersion)
		if got != strconv.Itoa(Protocol) {
			return nil, toGRPC(lease.Errorf(lease.WrongPeer,
				"the caller is sluice %q with protocol %q, this daemon is sluice %q with protocol %d; run the same version on both", theirs, got, version, Protocol))
		}
		_ = grpc.SetHeader(ctx, metadata.Pairs(headerProtocol, strconv.Itoa(Protocol), headerVersion, text(version)))
		return next(ctx, req)
	}
}

func first(md metadata.MD, key string) string {
	if v := md.Get(key); len(v) > 0 {
		return v[0]
	}
	return ""
}
