package rpc

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// Bounds of every connection, of both services.
const (
	maxMessage = 1 << 20 // bytes
	maxStreams = 256
	// handshakeTime is how long a connection may take to authenticate.
	handshakeTime = 5 * time.Second
	keepTime      = 30 * time.Second
	keepTimeout   = 10 * time.Second
	// batch is the most lease ids in one Renew.
	batch = 4096
	// maxProgram bounds the name of a session's program, in bytes.
	maxProgram = 256

	// localMessage is small because any user may send requests to the local socket and withhold
	// the last byte: one connection can occupy at most half a MiB of memory that way.
	localMessage = 64 << 10 // bytes
	localStreams = 8
	// window is how much a stream may send before it is read. It is fixed, since the library's
	// own grows to 16 MiB.
	window = 64 << 10 // bytes
	// idleTime is after how long without a call a connection is closed, until the next one. An
	// owner has a connection to every node that it had to do with lately.
	idleTime = 2 * time.Minute
	// buffer is how much is read from a connection or written to it at a time.
	buffer = 4 << 10 // bytes
)

// A call flows: listener (limit) -> handshake (package identity, or SO_PEERCRED)
// -> sameProtocol -> caller -> conversion -> service. gRPC runs each call on a
// goroutine of its own; there is no state here and so no lock.

// NewServer makes a server whose callers are authenticated by creds. version is Sluice's.
func NewServer(creds credentials.TransportCredentials, version string) *grpc.Server {
	message, streams := maxMessage, uint32(maxStreams)
	if _, ok := creds.(unixCreds); ok {
		message, streams = localMessage, localStreams
	}
	return grpc.NewServer(
		grpc.Creds(creds),
		grpc.ConnectionTimeout(handshakeTime),
		grpc.MaxRecvMsgSize(message),
		grpc.MaxConcurrentStreams(streams),
		grpc.StaticStreamWindowSize(window),
		grpc.ReadBufferSize(buffer), grpc.WriteBufferSize(buffer),
		grpc.MaxHeaderListSize(16<<10),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepTime, Timeout: keepTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: keepTime / 3, PermitWithoutStream: true}),
		grpc.UnaryInterceptor(sameProtocol(version)),
	)
}

// Limit bounds the connections that l accepts from each address.
func Limit(l net.Listener, t *limit.Table) net.Listener { return t.Listener(l, limit.Address) }

// --- Owner ---

// named is the AuthInfo of package identity.
type named interface{ NodeName() string }

// ServeOwner adds the Owner service to s. The host of each call is the name that the connection
// has proven.
func ServeOwner(s *grpc.Server, o lease.Owner) { pb.RegisterOwnerServer(s, &ownerServer{owner: o}) }

type ownerServer struct {
	pb.UnimplementedOwnerServer
	owner lease.Owner
}

func hostOf(ctx context.Context) (string, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if n, ok := p.AuthInfo.(named); ok && n.NodeName() != "" {
			return n.NodeName(), nil
		}
	}
	return "", toGRPC(lease.Errorf(lease.Denied, "the connection has not shown which node it comes from"))
}

func (s *ownerServer) Inventory(ctx context.Context, _ *pb.InventoryRequest) (*pb.InventoryReply, error) {
	if _, err := hostOf(ctx); err != nil {
		return nil, err
	}
	v, err := s.owner.Inventory(ctx)
	if err != nil {
		return nil, toGRPC(err)
	}
	return &pb.InventoryReply{Inventory: toInventory(v)}, nil
}

// Reserve returns a conflict as a reply, since the caller needs both the lease that is in the
// way and the reason.
func (s *ownerServer) Reserve(ctx context.Context, r *pb.ReserveRequest) (*pb.ReserveReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	l := fromLease(r.GetLease())
	switch {
	case l.Sponsor != "" && (l.Sponsor != host || !s.controller(host)):
		return nil, toGRPC(lease.Errorf(lease.Denied, "%s asks for a lease that %s sponsors: only a controller may, for itself; see slurm.controllers in the owner's sluice.yaml", host, l.Sponsor))
	case l.Sponsor == "" && l.Host != "" && l.Host != host:
		return nil, toGRPC(lease.Errorf(lease.Denied, "%s asks for a lease of host %s: a host has only its own", host, l.Host))
	case l.Sponsor == "":
		l.Host = host
	}
	got, err := s.owner.Reserve(ctx, host, l, fromDuration(r.GetTtl()))
	if f := conflict(err); f != nil {
		return &pb.ReserveReply{Lease: toLease(got), Conflict: f}, nil
	}
	if err != nil {
		return nil, toGRPC(err)
	}
	return &pb.ReserveReply{Lease: toLease(got)}, nil
}

func (s *ownerServer) Confirm(ctx context.Context, r *pb.ConfirmRequest) (*pb.ConfirmReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	return &pb.ConfirmReply{}, toGRPC(s.owner.Confirm(ctx, host, r.GetId()))
}

func (s *ownerServer) Renew(ctx context.Context, r *pb.RenewRequest) (*pb.RenewReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	if n := len(r.GetIds()); n > batch {
		return nil, toGRPC(lease.Errorf(lease.Invalid, "%d leases in one renewal: at most %d", n, batch))
	}
	if r.GetClaim() {
		return s.claim(ctx, host, r.GetIds())
	}
	known, err := s.owner.Renew(ctx, host, r.GetIds())
	return &pb.RenewReply{Known: each(known, text)}, toGRPC(err)
}

func (s *ownerServer) claim(ctx context.Context, host string, ids []string) (*pb.RenewReply, error) {
	if len(ids) != 1 {
		return nil, toGRPC(lease.Errorf(lease.Invalid, "%d leases in one claim: want one", len(ids)))
	}
	switch err := s.owner.Claim(ctx, host, ids[0]); {
	case err == nil:
		return &pb.RenewReply{Known: each(ids, text)}, nil
	case lease.CodeOf(err) == lease.Over:
		return &pb.RenewReply{}, nil
	default:
		return nil, toGRPC(err)
	}
}

func (s *ownerServer) Release(ctx context.Context, r *pb.ReleaseRequest) (*pb.ReleaseReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	return &pb.ReleaseReply{}, toGRPC(s.owner.Release(ctx, host, r.GetId(), fromKey(r.GetKey()), r.GetReason()))
}

// List returns the caller's own leases, or all to a controller that asks for them.
func (s *ownerServer) List(ctx context.Context, r *pb.ListRequest) (*pb.ListReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	whose := host
	if r.GetAll() {
		if !s.controller(host) {
			return nil, toGRPC(lease.Errorf(lease.Denied, "%s asks for the leases of all nodes: only a controller may; see slurm.controllers in the owner's sluice.yaml", host))
		}
		whose = ""
	}
	list, err := s.owner.List(ctx, whose)
	return &pb.ListReply{Leases: each(list, toStatus)}, toGRPC(err)
}

func (s *ownerServer) Reports(ctx context.Context, r *pb.ReportsRequest) (*pb.ReportsReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	list, err := s.owner.Reports(ctx, host, r.GetCluster(), r.GetJob())
	return &pb.ReportsReply{Reports: each(list, toReport)}, toGRPC(err)
}

func (s *ownerServer) Set(ctx context.Context, r *pb.SetRequest) (*pb.SetReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	l, err := s.owner.Set(ctx, host, fromChange(r))
	return &pb.SetReply{Lease: toLease(l)}, toGRPC(err)
}

func (s *ownerServer) Drain(ctx context.Context, r *pb.DrainRequest) (*pb.DrainReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	gpus, err := s.owner.Drain(ctx, host, fromOrder(r))
	return &pb.DrainReply{Gpus: each(gpus, toGPU)}, toGRPC(err)
}

func (s *ownerServer) Offer(ctx context.Context, r *pb.OfferRequest) (*pb.OfferReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	if n := len(r.GetCertHash()); n != 0 && n != 32 || r.GetEncrypt() != (n != 0) {
		return nil, toGRPC(lease.Errorf(lease.Invalid, "certificate hash of %d bytes: an encrypted connection has 32, another none", n))
	}
	// It is kept with the ticket, and goes into logs.
	if n := len(r.GetProgram()); n > maxProgram {
		return nil, toGRPC(lease.Errorf(lease.Invalid, "program name of %d bytes: at most %d", n, maxProgram))
	}
	o, err := s.owner.Offer(ctx, host, fromSessionRequest(r))
	if err != nil {
		return nil, toGRPC(err)
	}
	o.Part = r.GetPart() != nil
	return toOffer(o), nil
}

func (s *ownerServer) Gone(ctx context.Context, r *pb.GoneRequest) (*pb.GoneReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	if m, ok := s.owner.(lease.Mourner); ok {
		err = m.Gone(ctx, host, r.GetLease(), r.GetPid())
	}
	return &pb.GoneReply{}, toGRPC(err)
}

func (s *ownerServer) Probe(ctx context.Context, r *pb.ProbeOrder) (*pb.ProbeOffer, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	p, ok := s.owner.(lease.Prober)
	if !ok {
		return s.UnimplementedOwnerServer.Probe(ctx, r)
	}
	offers, err := p.Probe(ctx, host, fromProbeOrder(r))
	if err != nil {
		return nil, toGRPC(err)
	}
	return &pb.ProbeOffer{Offers: each(offers, toOffer)}, nil
}

func (s *ownerServer) Held(ctx context.Context, r *pb.HeldRequest) (*pb.HeldReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	c, ok := s.owner.(lease.Counter)
	if !ok {
		return s.UnimplementedOwnerServer.Held(ctx, r)
	}
	if n := len(r.GetHoldings()); n > lease.MaxHoldings {
		return nil, toGRPC(lease.Errorf(lease.Invalid, "%d holdings in one question: at most %d", n, lease.MaxHoldings))
	}
	held, err := c.Held(ctx, host, each(r.GetHoldings(), fromHolding))
	if err != nil {
		return nil, toGRPC(err)
	}
	return &pb.HeldReply{Held: each(held, toHeld)}, nil
}

func (s *ownerServer) WatchHeld(ctx context.Context, r *pb.WatchHeldRequest) (*pb.WatchHeldReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	p, ok := s.owner.(lease.Promiser)
	if !ok {
		return s.UnimplementedOwnerServer.WatchHeld(ctx, r)
	}
	c, err := p.WatchHeld(ctx, host, fromHeldWatch(r))
	if err != nil {
		return nil, toGRPC(err)
	}
	return toHeldChanges(c), nil
}

func (s *ownerServer) HeldEverywhere(ctx context.Context, r *pb.HeldQuestion) (*pb.HeldSum, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	p, ok := s.owner.(lease.Promiser)
	if !ok {
		return s.UnimplementedOwnerServer.HeldEverywhere(ctx, r)
	}
	sum, err := p.HeldEverywhere(ctx, host, fromQuestion(r))
	if err != nil {
		return nil, toGRPC(err)
	}
	return toSum(sum), nil
}

func (s *ownerServer) Health(ctx context.Context, r *pb.HealthRequest) (*pb.HealthReply, error) {
	host, err := hostOf(ctx)
	if err != nil {
		return nil, err
	}
	n, ok := s.owner.(NodeHealth)
	if !ok {
		return s.UnimplementedOwnerServer.Health(ctx, r)
	}
	checks, err := n.Health(ctx, host)
	if err != nil {
		return nil, toGRPC(err)
	}
	return &pb.HealthReply{Checks: each(checks, toCheck)}, nil
}

func (s *ownerServer) Watch(ctx context.Context, r *pb.WatchRequest) (*pb.WatchReply, error) {
	host, w, err := s.watchable(ctx)
	if err != nil {
		return nil, err
	}
	c, err := w.Watch(ctx, host, fromMark(r.GetSince()), fromDuration(r.GetWait()))
	if err != nil {
		return nil, toGRPC(err)
	}
	return toChanges(c), nil
}

func (s *ownerServer) Register(ctx context.Context, r *pb.RegisterRequest) (*pb.RegisterReply, error) {
	host, w, err := s.watchable(ctx)
	if err != nil {
		return nil, err
	}
	return &pb.RegisterReply{}, toGRPC(w.Register(ctx, host, r.GetCluster(), r.GetJob(), each(r.GetLeases(), fromWhereabouts)))
}

func (s *ownerServer) Where(ctx context.Context, r *pb.WhereRequest) (*pb.WhereReply, error) {
	host, w, err := s.watchable(ctx)
	if err != nil {
		return nil, err
	}
	owners, err := w.Where(ctx, host, r.GetCluster(), r.GetJob())
	return &pb.WhereReply{Owners: each(owners, text)}, toGRPC(err)
}

// watchable returns who asks, and the owner if it can be asked.
func (s *ownerServer) watchable(ctx context.Context) (host string, w lease.Watchable, err error) {
	if host, err = hostOf(ctx); err != nil {
		return "", nil, err
	}
	w, ok := s.owner.(lease.Watchable)
	if !ok {
		return "", nil, status.Error(codes.Unimplemented, "this owner cannot be watched")
	}
	return host, w, nil
}

// controller says whether the owner lets that node act for all nodes.
func (s *ownerServer) controller(node string) bool {
	c, ok := s.owner.(interface{ Controller(node string) bool })
	return ok && c.Controller(node)
}

// --- Local ---

// ServeLocal adds the Local service to s, which has LocalCreds.
func ServeLocal(s *grpc.Server, svc LocalService) {
	pb.RegisterLocalServer(s, &localServer{svc: svc})
}

type localServer struct {
	pb.UnimplementedLocalServer
	svc LocalService
}

func userOf(ctx context.Context) (Peer, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if u, ok := p.AuthInfo.(unixInfo); ok {
			return u.peer, nil
		}
	}
	return Peer{}, toGRPC(lease.Errorf(lease.Denied, "the kernel does not name the caller; use the local socket"))
}

func (s *localServer) Acquire(ctx context.Context, r *pb.AcquireRequest) (*pb.AcquireReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	l, socket, err := s.svc.Acquire(ctx, p, fromRequest(r.GetRequest()))
	return &pb.AcquireReply{Lease: toLease(l), Socket: text(socket)}, toGRPC(err)
}

func (s *localServer) Release(ctx context.Context, r *pb.ReleaseRequest) (*pb.ReleaseReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	return &pb.ReleaseReply{}, toGRPC(s.svc.Release(ctx, p, r.GetId(), fromKey(r.GetKey()), r.GetReason()))
}

func (s *localServer) List(ctx context.Context, _ *pb.ListRequest) (*pb.ListReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	list, err := s.svc.List(ctx, p)
	return &pb.ListReply{Leases: each(list, toStatus)}, toGRPC(err)
}

func (s *localServer) Pool(ctx context.Context, r *pb.PoolRequest) (*pb.PoolReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	pools, err := s.svc.Pool(ctx, p, r.GetName())
	return &pb.PoolReply{Pools: each(pools, toPool)}, toGRPC(err)
}

func (s *localServer) Health(ctx context.Context, _ *pb.HealthRequest) (*pb.HealthReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	checks, err := s.svc.Health(ctx, p)
	return &pb.HealthReply{Checks: each(checks, toCheck)}, toGRPC(err)
}

func (s *localServer) HealthAll(ctx context.Context, _ *pb.HealthAllRequest) (*pb.HealthAllReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	all, err := s.svc.HealthAll(ctx, p)
	if err != nil {
		return nil, toGRPC(err)
	}
	return toHealthAll(all), nil
}

func (s *localServer) Explain(ctx context.Context, r *pb.ExplainRequest) (*pb.ExplainReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	events, err := s.svc.Explain(ctx, p, r.GetJob())
	return &pb.ExplainReply{Events: each(events, toEvent)}, toGRPC(err)
}

func (s *localServer) Stats(ctx context.Context, _ *pb.StatsRequest) (*pb.StatsReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	st, err := s.svc.Stats(ctx, p)
	return toStats(st), toGRPC(err)
}

// Set takes only the change from the caller. Who the caller is comes from the kernel.
func (s *localServer) Set(ctx context.Context, r *pb.SetRequest) (*pb.SetReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	c := fromChange(r)
	c.Beyond, c.By = p.UID == 0, p.UID
	l, err := s.svc.Set(ctx, p, c)
	return &pb.SetReply{Lease: toLease(l)}, toGRPC(err)
}

// Drain takes only the order from the caller. Who the caller is comes from the kernel.
func (s *localServer) Drain(ctx context.Context, r *pb.DrainRequest) (*pb.DrainReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	d := fromOrder(r)
	d.By = p.UID
	gpus, err := s.svc.Drain(ctx, p, d)
	return &pb.DrainReply{Gpus: each(gpus, toGPU)}, toGRPC(err)
}

func (s *localServer) Probe(ctx context.Context, r *pb.ProbeRequest) (*pb.ProbeReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	v, err := s.svc.Probe(ctx, p, r.GetOwner())
	return &pb.ProbeReply{Probe: toProbe(v)}, toGRPC(err)
}
