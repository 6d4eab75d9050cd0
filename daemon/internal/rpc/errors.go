package rpc

import (
	"context"
	"errors"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// statusOf maps each code of package lease to the gRPC status that comes closest. The code
// itself travels as a detail.
var statusOf = map[lease.Code]codes.Code{
	lease.Invalid:   codes.InvalidArgument,
	lease.NoRoom:    codes.ResourceExhausted,
	lease.Never:     codes.OutOfRange,
	lease.NotFound:  codes.NotFound,
	lease.Denied:    codes.PermissionDenied,
	lease.Over:      codes.FailedPrecondition,
	lease.Conflict:  codes.Aborted,
	lease.Down:      codes.Unavailable,
	lease.Internal:  codes.Internal,
	lease.WrongPeer: codes.Unimplemented,
}

// toGRPC converts a service's error to a gRPC error.
func toGRPC(err error) error {
	if err == nil {
		return nil
	}
	var e *lease.Error
	if !errors.As(err, &e) {
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			return status.Error(codes.DeadlineExceeded, text(err.Error()))
		case errors.Is(err, context.Canceled):
			return status.Error(codes.Canceled, text(err.Error()))
		}
		e = &lease.Error{Code: lease.Internal, Reason: err.Error()}
	}
	code, ok := statusOf[e.Code]
	if !ok {
		code = codes.Unknown
	}
	st := status.New(code, text(e.Reason))
	if with, derr := st.WithDetails(&pb.Failure{Code: text(string(e.Code)), Reason: text(e.Reason)}); derr == nil {
		st = with
	}
	return st.Err()
}

// fromGRPC converts a gRPC error of a call to peer to a *lease.Error. An error that is not of
// the other daemon's service means that the daemon cannot be asked.
func fromGRPC(peer string, err error) error {
	if err == nil {
		return nil
	}
	st := status.Convert(err)
	if f := failure(st); f != nil {
		return &lease.Error{Code: lease.Code(f.GetCode()), Reason: f.GetReason()}
	}
	switch st.Code() {
	case codes.Unimplemented:
		return lease.Errorf(lease.WrongPeer, "%s does not know this call: %s; run the same version of sluiced on both nodes", peer, st.Message())
	case codes.DeadlineExceeded:
		return lease.Errorf(lease.Down, "%s does not answer in time", peer)
	case codes.Canceled:
		return lease.Errorf(lease.Down, "%s: the call was given up", peer)
	case codes.ResourceExhausted:
		return lease.Errorf(lease.Down, "%s: %s", peer, st.Message())
	case codes.Unavailable, codes.Unauthenticated, codes.PermissionDenied:
		return lease.Errorf(lease.Down, "%s cannot be asked: %s", peer, cause(st.Message()))
	}
	return lease.Errorf(lease.Internal, "%s: %s", peer, st.Message())
}

// failure is what sluiced itself says of an error, nil if it is gRPC's.
func failure(st *status.Status) *pb.Failure {
	for _, d := range st.Details() {
		if f, ok := d.(*pb.Failure); ok && f.GetCode() != "" {
			return f
		}
	}
	return nil
}

// conflict returns the detail of err if its code is Conflict, else nil.
func conflict(err error) *pb.Failure {
	var e *lease.Error
	if !errors.As(err, &e) || e.Code != lease.Conflict {
		return nil
	}
	return &pb.Failure{Code: string(e.Code), Reason: text(e.Reason)}
}

// cause removes the library's wrapping from the reason of a failed connection: `connection
// error: desc = "transport: Error while dialing: ..."`.
func cause(s string) string {
	if i := strings.LastIndex(s, "desc = \""); i >= 0 {
		if u, err := strconv.Unquote(s[i+len("desc = "):]); err == nil {
			s = u
		}
	}
	s = strings.TrimPrefix(s, "transport: ")
	s = strings.TrimPrefix(s, "authentication handshake failed: ")
	return strings.TrimPrefix(s, "Error while dialing: ")
}
