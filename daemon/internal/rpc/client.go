package rpc

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// Creds makes the credentials of connections to other daemons: package identity.
type Creds interface {
	// Client is for a connection to the owner of that node name, and no other.
	Client(node string) credentials.TransportCredentials
}

func dialOptions(creds credentials.TransportCredentials) []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithConnectParams(grpc.ConnectParams{
			// The host has a back-off of its own for owners that are away. This one only keeps
			// the library from spinning.
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: handshakeTime,
		}),
		// A controller's daemon has a connection to each of thousands of owners, and messages are small.
		grpc.WithIdleTimeout(idleTime),
		grpc.WithReadBufferSize(buffer), grpc.WithWriteBufferSize(buffer),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16*maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
	}
}

// --- Owner ---

// OwnerClient is a lease.Owner at another node. It connects when it is first used, and again
// after a failure.
type OwnerClient struct {
	conn    *grpc.ClientConn
	c       pb.OwnerClient
	name    string
	version string
}

var (
	_ lease.Owner     = (*OwnerClient)(nil)
	_ lease.Prober    = (*OwnerClient)(nil)
	_ lease.Watchable = (*OwnerClient)(nil)
	_ lease.Counter   = (*OwnerClient)(nil)
	_ lease.Promiser  = (*OwnerClient)(nil)
	_ NodeHealth      = (*OwnerClient)(nil)
)

// DialOwner makes a client for the owner called name at addr (HOST:PORT). version is this
// program's. It does not wait for the connection: if the owner cannot be reached, or is not
// name, each call fails with code Down.
func DialOwner(addr, name string, creds Creds, version string) (*OwnerClient, error) {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return nil, fmt.Errorf("owner %s: address %q: %w", name, addr, err)
	}
	opts := append(dialOptions(creds.Client(name)),
		grpc.WithAuthority(name),
		grpc.WithContextDialer(dialSoon),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepTime, Timeout: keepTimeout, PermitWithoutStream: true}),
	)
	conn, err := grpc.NewClient("passthrough:///"+addr, opts...)
	if err != nil {
		return nil, fmt.Errorf("owner %s at %s: %w", name, addr, err)
	}
	return &OwnerClient{conn: conn, c: pb.NewOwnerClient(conn), name: name, version: version}, nil
}

// Close ends the connection. Calls in progress fail.
func (o *OwnerClient) Close() error { return o.conn.Close() }

// Name is the node name that the other side has to prove.
func (o *OwnerClient) Name() string { return o.name }

func (o *OwnerClient) fail(err error) error { return fromGRPC("owner "+o.name, err) }

// Inventory implements lease.Owner.
func (o *OwnerClient) Inventory(ctx context.Context) (lease.Inventory, error) {
	r, err := o.c.Inventory(tagged(ctx, o.version), &pb.InventoryRequest{})
	if err != nil {
		return lease.Inventory{}, o.fail(err)
	}
	v := fromInventory(r.GetInventory())
	if v.Owner != o.name {
		return lease.Inventory{}, lease.Errorf(lease.Down, "owner %s calls itself %q: the names in the pools and the key node of its sluice.yaml must agree", o.name, v.Owner)
	}
	return v, nil
}

// Reserve implements lease.Owner. host must be this node's name, which the other side knows
// from the connection; a sponsor gives the name of the lease's host.
func (o *OwnerClient) Reserve(ctx context.Context, host string, l lease.Lease, ttl time.Duration) (lease.Lease, error) {
	if l.Sponsor == "" {
		l.Host = host
	}
	r, err := o.c.Reserve(tagged(ctx, o.version), &pb.ReserveRequest{Lease: toLease(l), Ttl: toDuration(ttl)})
	if err != nil {
		return lease.Lease{}, o.fail(err)
	}
	got := fromLease(r.GetLease())
	if f := r.GetConflict(); f != nil {
		return got, &lease.Error{Code: lease.Conflict, Reason: f.GetReason()}
	}
	return got, nil
}

// Confirm implements lease.Owner.
func (o *OwnerClient) Confirm(ctx context.Context, _, id string) error {
	_, err := o.c.Confirm(tagged(ctx, o.version), &pb.ConfirmRequest{Id: id})
	return o.fail(err)
}

// Renew implements lease.Owner.
func (o *OwnerClient) Renew(ctx context.Context, _ string, ids []string) ([]string, error) {
	var known []string
	for {
		n := min(len(ids), batch)
		r, err := o.c.Renew(tagged(ctx, o.version), &pb.RenewRequest{Ids: each(ids[:n], text)})
		if err != nil {
			return nil, o.fail(err)
		}
		known = append(known, r.GetKnown()...)
		if ids = ids[n:]; len(ids) == 0 {
			return known, nil
		}
	}
}

// Claim implements lease.Owner. An owner that knows of no claims renews the lease.
func (o *OwnerClient) Claim(ctx context.Context, _, id string) error {
	r, err := o.c.Renew(tagged(ctx, o.version), &pb.RenewRequest{Ids: []string{text(id)}, Claim: true})
	if err == nil && len(r.GetKnown()) == 0 {
		return lease.Errorf(lease.Over, "owner %s has ended lease %s", o.name, id)
	}
	return o.fail(err)
}

// Release implements lease.Owner.
func (o *OwnerClient) Release(ctx context.Context, _, id string, key lease.Key, reason string) error {
	_, err := o.c.Release(tagged(ctx, o.version), &pb.ReleaseRequest{Id: text(id), Key: toKey(key), Reason: text(reason)})
	return o.fail(err)
}

// List implements lease.Owner. The owner returns this node's leases only, or all for "" if this
// node is one of its controllers.
func (o *OwnerClient) List(ctx context.Context, host string) ([]lease.Status, error) {
	r, err := o.c.List(tagged(ctx, o.version), &pb.ListRequest{All: host == ""})
	if err != nil {
		return nil, o.fail(err)
	}
	return each(r.GetLeases(), fromStatus), nil
}

// Reports implements lease.Owner.
func (o *OwnerClient) Reports(ctx context.Context, _, cluster, job string) ([]lease.Report, error) {
	r, err := o.c.Reports(tagged(ctx, o.version), &pb.ReportsRequest{Cluster: text(cluster), Job: text(job)})
	if err != nil {
		return nil, o.fail(err)
	}
	return each(r.GetReports(), fromReport), nil
}

// Set implements lease.Owner.
func (o *OwnerClient) Set(ctx context.Context, _ string, c lease.Change) (lease.Lease, error) {
	r, err := o.c.Set(tagged(ctx, o.version), toChange(c))
	if err != nil {
		return lease.Lease{}, o.fail(err)
	}
	return fromLease(r.GetLease()), nil
}

// Drain implements lease.Owner.
func (o *OwnerClient) Drain(ctx context.Context, _ string, d lease.DrainOrder) ([]lease.GPU, error) {
	r, err := o.c.Drain(tagged(ctx, o.version), toOrder(d))
	if err != nil {
		return nil, o.fail(err)
	}
	return each(r.GetGpus(), fromGPU), nil
}

// Offer implements lease.Owner.
func (o *OwnerClient) Offer(ctx context.Context, _ string, q lease.SessionRequest) (lease.Offer, error) {
	r, err := o.c.Offer(tagged(ctx, o.version), toSessionRequest(q))
	if err != nil {
		return lease.Offer{}, o.fail(err)
	}
	if q.Part != nil && !r.GetPart() {
		return lease.Offer{}, lease.Errorf(lease.WrongPeer, "owner %s is of a release that gives no step a part of its job's fraction; start the step without --gres, or upgrade %s", o.name, o.name)
	}
	return fromOffer(r)
}

// Gone implements lease.Mourner.
func (o *OwnerClient) Gone(ctx context.Context, _, id string, pid uint32) error {
	if _, err := o.c.Gone(tagged(ctx, o.version), &pb.GoneRequest{Lease: text(id), Pid: pid}); err != nil {
		return o.fail(err)
	}
	return nil
}

// Held implements lease.Counter.
func (o *OwnerClient) Held(ctx context.Context, _ string, of []lease.Holding) ([]lease.Held, error) {
	r, err := o.c.Held(tagged(ctx, o.version), &pb.HeldRequest{Holdings: each(of, toHolding)})
	if err != nil {
		return nil, o.fail(err)
	}
	if n := len(r.GetHeld()); n != len(of) {
		return nil, lease.Errorf(lease.Internal, "owner %s: %d answers to %d questions of what is held", o.name, n, len(of))
	}
	return each(r.GetHeld(), fromHeld), nil
}

// Probe implements lease.Prober.
func (o *OwnerClient) Probe(ctx context.Context, _ string, q lease.ProbeRequest) ([]lease.Offer, error) {
	r, err := o.c.Probe(tagged(ctx, o.version), toProbeOrder(q))
	if err != nil {
		return nil, o.newer("probe", err)
	}
	return fromProbeOffer(r)
}

// maxHealth bounds one node's answer, in bytes, and maxChecks its findings, which may be very small: many nodes are asked
// at the same time.
const (
	maxHealth = 128 << 10
	maxChecks = 512
)

// Health implements NodeHealth.
func (o *OwnerClient) Health(ctx context.Context, _ string) ([]Check, error) {
	bound := newFew(maxChecks)
	r, err := o.c.Health(tagged(ctx, o.version), &pb.HealthRequest{}, grpc.MaxCallRecvMsgSize(maxHealth), grpc.ForceCodecV2(bound))
	switch {
	case bound.over:
		return nil, lease.Errorf(lease.Internal, "owner %s: an answer of more than %d findings", o.name, maxChecks)
	case err != nil:
		return nil, o.newer("health of other nodes", err)
	}
	return each(r.GetChecks(), fromCheck), nil
}

// newer is the error of a call that earlier releases do not have.
func (o *OwnerClient) newer(what string, err error) error {
	if st := status.Convert(err); st.Code() == codes.Unimplemented && failure(st) == nil { // not a refusal of sluiced's own, as of another protocol
		return lease.Errorf(lease.WrongPeer, "owner %s runs a release that has no %s; install the same release of sluiced there", o.name, what)
	}
	return o.fail(err)
}

// Watch implements lease.Watchable.
func (o *OwnerClient) Watch(ctx context.Context, _ string, since lease.Mark, wait time.Duration) (lease.Changes, error) {
	r, err := o.c.Watch(tagged(ctx, o.version), &pb.WatchRequest{Since: toMark(since), Wait: toDuration(wait)})
	if err != nil {
		return lease.Changes{}, o.newer("watch", err)
	}
	return fromChanges(r), nil
}

// WatchHeld implements lease.Promiser.
func (o *OwnerClient) WatchHeld(ctx context.Context, _ string, q lease.HeldWatch) (lease.HeldChanges, error) {
	r, err := o.c.WatchHeld(tagged(ctx, o.version), toHeldWatch(q))
	if err != nil {
		return lease.HeldChanges{}, o.newer("watch for quotas", err)
	}
	return fromHeldChanges(r), nil
}

// HeldEverywhere implements lease.Promiser.
func (o *OwnerClient) HeldEverywhere(ctx context.Context, _ string, q lease.HeldQuestion) (lease.HeldSum, error) {
	r, err := o.c.HeldEverywhere(tagged(ctx, o.version), toQuestion(q))
	if err != nil {
		return lease.HeldSum{}, o.newer("question for what is held at all owners", err)
	}
	return fromSum(r), nil
}

// Register implements lease.Watchable.
func (o *OwnerClient) Register(ctx context.Context, _, cluster, job string, leases []lease.Whereabouts) error {
	_, err := o.c.Register(tagged(ctx, o.version), &pb.RegisterRequest{Cluster: text(cluster), Job: text(job), Leases: each(leases, toWhereabouts)})
	if err != nil {
		return o.newer("register", err)
	}
	return nil
}

// Where implements lease.Watchable.
func (o *OwnerClient) Where(ctx context.Context, _, cluster, job string) ([]string, error) {
	r, err := o.c.Where(tagged(ctx, o.version), &pb.WhereRequest{Cluster: text(cluster), Job: text(job)})
	if err != nil {
		return nil, o.newer("where", err)
	}
	return r.GetOwners(), nil
}

// --- Local ---

// LocalClient is the LocalService of this node's daemon, called as this process.
type LocalClient struct {
	conn    *grpc.ClientConn
	c       pb.LocalClient
	jobs    pb.JobsClient
	path    string
	version string
}

// DialLocal makes a client for the daemon whose local socket is at path. version is this
// program's. It does not wait for the connection: if no daemon answers, each call fails with
// code Down.
func DialLocal(path, version string) (*LocalClient, error) {
	opts := append(dialOptions(insecure.NewCredentials()), grpc.WithAuthority("local"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
	conn, err := grpc.NewClient("passthrough:///local", opts...)
	if err != nil {
		return nil, fmt.Errorf("local socket %s: %w", path, err)
	}
	return &LocalClient{conn: conn, c: pb.NewLocalClient(conn), jobs: pb.NewJobsClient(conn), path: path, version: version}, nil
}

// Close ends the connection.
func (l *LocalClient) Close() error { return l.conn.Close() }

func (l *LocalClient) fail(err error) error {
	return fromGRPC("sluiced of this node (socket "+l.path+"; is the service running?)", err)
}

// Acquire asks for a lease, and returns the path of its socket too.
func (l *LocalClient) Acquire(ctx context.Context, r lease.Request) (lease.Lease, string, error) {
	a, err := l.c.Acquire(tagged(ctx, l.version), &pb.AcquireRequest{Request: toRequest(r)})
	if err != nil {
		return lease.Lease{}, "", l.fail(err)
	}
	return fromLease(a.GetLease()), a.GetSocket(), nil
}

// Release ends a lease, named by id or, with id "", by key.
func (l *LocalClient) Release(ctx context.Context, id string, key lease.Key, reason string) error {
	_, err := l.c.Release(tagged(ctx, l.version), &pb.ReleaseRequest{Id: text(id), Key: toKey(key), Reason: text(reason)})
	return l.fail(err)
}

// List returns the leases of this node that the caller may see.
func (l *LocalClient) List(ctx context.Context) ([]lease.Status, error) {
	r, err := l.c.List(tagged(ctx, l.version), &pb.ListRequest{})
	if err != nil {
		return nil, l.fail(err)
	}
	return each(r.GetLeases(), fromStatus), nil
}

// Pool returns the owners of a pool, or of all pools for "".
func (l *LocalClient) Pool(ctx context.Context, name string) ([]Pool, error) {
	r, err := l.c.Pool(tagged(ctx, l.version), &pb.PoolRequest{Name: text(name)})
	if err != nil {
		return nil, l.fail(err)
	}
	return each(r.GetPools(), fromPool), nil
}

// Health returns the daemon's findings.
func (l *LocalClient) Health(ctx context.Context) ([]Check, error) {
	r, err := l.c.Health(tagged(ctx, l.version), &pb.HealthRequest{})
	if err != nil {
		return nil, l.fail(err)
	}
	return each(r.GetChecks(), fromCheck), nil
}

// HealthAll returns the findings of this node and of all owners.
func (l *LocalClient) HealthAll(ctx context.Context) (HealthAll, error) {
	r, err := l.c.HealthAll(tagged(ctx, l.version), &pb.HealthAllRequest{})
	if err != nil {
		return HealthAll{}, l.fail(err)
	}
	return fromHealthAll(r), nil
}

// Explain returns what the audit log has about a job.
func (l *LocalClient) Explain(ctx context.Context, job string) ([]Event, error) {
	r, err := l.c.Explain(tagged(ctx, l.version), &pb.ExplainRequest{Job: text(job)})
	if err != nil {
		return nil, l.fail(err)
	}
	return each(r.GetEvents(), fromEvent), nil
}

// Stats returns the live state of this node's GPUs and leases.
func (l *LocalClient) Stats(ctx context.Context) (Stats, error) {
	r, err := l.c.Stats(tagged(ctx, l.version), &pb.StatsRequest{})
	if err != nil {
		return Stats{}, l.fail(err)
	}
	return fromStats(r), nil
}

// Set changes share or policy of a lease, and returns the changed lease.
func (l *LocalClient) Set(ctx context.Context, c lease.Change) (lease.Lease, error) {
	r, err := l.c.Set(tagged(ctx, l.version), toChange(c))
	if err != nil {
		return lease.Lease{}, l.fail(err)
	}
	return fromLease(r.GetLease()), nil
}

// Drain has new leases get no GPU of an owner, or one of them, or get it again.
func (l *LocalClient) Drain(ctx context.Context, d lease.DrainOrder) ([]lease.GPU, error) {
	r, err := l.c.Drain(tagged(ctx, l.version), toOrder(d))
	if err != nil {
		return nil, l.fail(err)
	}
	return each(r.GetGpus(), fromGPU), nil
}

// Probe measures the link to an owner.
func (l *LocalClient) Probe(ctx context.Context, owner string) (lease.Probe, error) {
	r, err := l.c.Probe(tagged(ctx, l.version), &pb.ProbeRequest{Owner: text(owner)})
	if err != nil {
		return lease.Probe{}, l.fail(err)
	}
	return fromProbe(r.GetProbe()), nil
}
