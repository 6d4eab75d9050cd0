package rpc

// The Jobs service: JobService over the local socket, both ends.

import (
	"context"
	"maps"
	"slices"

	"google.golang.org/grpc"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// --- conversion ---

func toReport(r lease.Report) *pb.Report {
	return &pb.Report{
		Lease: text(r.Lease), Key: toKey(r.Key), Owner: text(r.Owner), Uid: r.UID, Account: text(r.Account), JobName: text(r.JobName),
		Asked: each(r.Asked, toFraction), Grants: each(r.Grants, toGrant), Use: each(r.Use, toUse),
		Counts: toCounts(r.Counts), Sessions: r.Sessions, GpuTime: toDuration(r.GPUTime),
		Made: toTime(r.Made), Ended: toTime(r.Ended), Reason: text(r.Reason),
		Shares: each(r.Shares, toShare), Policy: text(string(r.Policy)), Lend: text(string(r.Lend)),
		Lost: r.Lost, Failed: r.Failed, Failure: text(r.Failure),
	}
}

func fromReport(r *pb.Report) lease.Report {
	return lease.Report{
		Lease: r.GetLease(), Key: fromKey(r.GetKey()), Owner: r.GetOwner(), UID: r.GetUid(), Account: r.GetAccount(), JobName: r.GetJobName(),
		Asked: each(r.GetAsked(), fromFraction), Grants: each(r.GetGrants(), fromGrant), Use: each(r.GetUse(), fromUse),
		Counts: fromCounts(r.GetCounts()), Sessions: r.GetSessions(), GPUTime: fromDuration(r.GetGpuTime()),
		Made: fromTime(r.GetMade()), Ended: fromTime(r.GetEnded()), Reason: r.GetReason(),
		Shares: each(r.GetShares(), fromShare), Policy: lease.Policy(r.GetPolicy()), Lend: lease.Lend(r.GetLend()),
		Lost: r.GetLost(), Failed: r.GetFailed(), Failure: r.GetFailure(),
	}
}

func toJobRun(r JobRun) *pb.JobRun {
	out := &pb.JobRun{
		Job: text(r.Job), Restart: r.Restart, Nodes: each(r.Nodes, text), Uid: r.UID, Gid: r.GID,
		User: text(r.User), Account: text(r.Account), Name: text(r.Name), Partition: text(r.Partition),
		Stdout: text(r.Stdout), WorkDir: text(r.WorkDir),
	}
	if r.Licences != nil {
		out.LicencesKnown, out.Licences = true, text(*r.Licences)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Options)) {
		out.Wishes = append(out.Wishes, &pb.Wish{Name: text(name), Value: text(r.Options[name])})
	}
	return out
}

func fromJobRun(r *pb.JobRun) JobRun {
	out := JobRun{
		Job: r.GetJob(), Restart: r.GetRestart(), Nodes: each(r.GetNodes(), text), UID: r.GetUid(), GID: r.GetGid(),
		User: r.GetUser(), Account: r.GetAccount(), Name: r.GetName(), Partition: r.GetPartition(),
		Stdout: r.GetStdout(), WorkDir: r.GetWorkDir(),
	}
	if r.GetLicencesKnown() {
		s := r.GetLicences()
		out.Licences = &s
	}
	if w := r.GetWishes(); len(w) > 0 {
		out.Options = make(map[string]string, len(w))
		for _, x := range w {
			out.Options[x.GetName()] = x.GetValue()
		}
	}
	return out
}

func toJobAnswer(a JobAnswer) *pb.JobAnswerReply {
	return &pb.JobAnswerReply{Outcome: text(string(a.Outcome)), Lease: text(a.Lease), Reason: text(a.Reason)}
}

func fromJobAnswer(a *pb.JobAnswerReply) JobAnswer {
	return JobAnswer{Outcome: JobOutcome(a.GetOutcome()), Lease: a.GetLease(), Reason: a.GetReason()}
}

func toEnvOp(e EnvOp) *pb.EnvOp {
	return &pb.EnvOp{Prepend: e.Prepend, Name: text(e.Name), Value: text(e.Value)}
}

func fromEnvOp(e *pb.EnvOp) EnvOp {
	return EnvOp{Prepend: e.GetPrepend(), Name: e.GetName(), Value: e.GetValue()}
}

// --- the daemon's end ---

// ServeJobs adds the Jobs service to s, which has LocalCreds.
func ServeJobs(s *grpc.Server, svc JobService) { pb.RegisterJobsServer(s, &jobsServer{svc: svc}) }

type jobsServer struct {
	pb.UnimplementedJobsServer
	svc JobService
}

func (s *jobsServer) Prolog(ctx context.Context, r *pb.JobRunRequest) (*pb.JobAnswerReply, error) {
	return answer(ctx, r, s.svc.Prolog)
}

func (s *jobsServer) PrologController(ctx context.Context, r *pb.JobRunRequest) (*pb.JobAnswerReply, error) {
	return answer(ctx, r, s.svc.PrologController)
}

func (s *jobsServer) Epilog(ctx context.Context, r *pb.JobRunRequest) (*pb.ReportsReply, error) {
	return reports(ctx, fromJobRun(r.GetRun()), s.svc.Epilog)
}

func (s *jobsServer) EpilogController(ctx context.Context, r *pb.JobRunRequest) (*pb.ReportsReply, error) {
	return reports(ctx, fromJobRun(r.GetRun()), s.svc.EpilogController)
}

func (s *jobsServer) Report(ctx context.Context, r *pb.JobRequest) (*pb.ReportsReply, error) {
	return reports(ctx, r.GetJob(), s.svc.Report)
}

func (s *jobsServer) Env(ctx context.Context, r *pb.JobRequest) (*pb.EnvReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	ops, err := s.svc.Env(ctx, p, r.GetJob())
	return &pb.EnvReply{Ops: each(ops, toEnvOp)}, toGRPC(err)
}

func answer(ctx context.Context, r *pb.JobRunRequest, f func(context.Context, Peer, JobRun) (JobAnswer, error)) (*pb.JobAnswerReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	a, err := f(ctx, p, fromJobRun(r.GetRun()))
	return toJobAnswer(a), toGRPC(err)
}

func reports[T any](ctx context.Context, of T, f func(context.Context, Peer, T) ([]lease.Report, error)) (*pb.ReportsReply, error) {
	p, err := userOf(ctx)
	if err != nil {
		return nil, err
	}
	list, err := f(ctx, p, of)
	return &pb.ReportsReply{Reports: each(list, toReport)}, toGRPC(err)
}

// --- the caller's end ---

var _ JobService = (*LocalClient)(nil)

// Prolog implements JobService, as the others here; the peer is this process.
func (l *LocalClient) Prolog(ctx context.Context, _ Peer, run JobRun) (JobAnswer, error) {
	a, err := l.jobs.Prolog(tagged(ctx, l.version), &pb.JobRunRequest{Run: toJobRun(run)})
	return fromJobAnswer(a), l.fail(err)
}

// PrologController implements JobService.
func (l *LocalClient) PrologController(ctx context.Context, _ Peer, run JobRun) (JobAnswer, error) {
	a, err := l.jobs.PrologController(tagged(ctx, l.version), &pb.JobRunRequest{Run: toJobRun(run)})
	return fromJobAnswer(a), l.fail(err)
}

// Epilog implements JobService.
func (l *LocalClient) Epilog(ctx context.Context, _ Peer, run JobRun) ([]lease.Report, error) {
	r, err := l.jobs.Epilog(tagged(ctx, l.version), &pb.JobRunRequest{Run: toJobRun(run)})
	return each(r.GetReports(), fromReport), l.fail(err)
}

// EpilogController implements JobService.
func (l *LocalClient) EpilogController(ctx context.Context, _ Peer, run JobRun) ([]lease.Report, error) {
	r, err := l.jobs.EpilogController(tagged(ctx, l.version), &pb.JobRunRequest{Run: toJobRun(run)})
	return each(r.GetReports(), fromReport), l.fail(err)
}

// Env implements JobService.
func (l *LocalClient) Env(ctx context.Context, _ Peer, job string) ([]EnvOp, error) {
	r, err := l.jobs.Env(tagged(ctx, l.version), &pb.JobRequest{Job: text(job)})
	return each(r.GetOps(), fromEnvOp), l.fail(err)
}

// Report implements JobService.
func (l *LocalClient) Report(ctx context.Context, _ Peer, job string) ([]lease.Report, error) {
	r, err := l.jobs.Report(tagged(ctx, l.version), &pb.JobRequest{Job: text(job)})
	return each(r.GetReports(), fromReport), l.fail(err)
}
