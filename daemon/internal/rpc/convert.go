package rpc

import (
	"math"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// Values are converted field by field both ways. Nothing here judges a value: a percent of 4
// billion arrives as it is, and the code that knows the limits refuses it. Numbers that Go
// keeps as int are clamped to its range, never wrapped. A field that is forgotten here, or where a
// call makes its message itself, fails TestConvert or TestCalls.

// text makes a string valid UTF-8, as messages require: a job's name may be anything.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

func toTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func fromTime(t *timestamppb.Timestamp) time.Time {
	if t == nil || !t.IsValid() {
		return time.Time{}
	}
	return t.AsTime()
}

func toDuration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func fromDuration(d *durationpb.Duration) time.Duration {
	return d.AsDuration() // saturates; nil is 0
}

func fromInt(n int64) int {
	return int(min(max(n, math.MinInt), math.MaxInt))
}

// each converts a list. An empty one becomes nil, as it does on the wire.
func each[A, B any](in []A, f func(A) B) []B {
	if len(in) == 0 {
		return nil
	}
	out := make([]B, len(in))
	for i, a := range in {
		out[i] = f(a)
	}
	return out
}

// --- what is asked for ---

func toKey(k lease.Key) *pb.Key {
	return &pb.Key{Cluster: text(k.Cluster), Job: text(k.Job), Node: text(k.Node), Incarnation: k.Incarnation}
}

func fromKey(k *pb.Key) lease.Key {
	return lease.Key{Cluster: k.GetCluster(), Job: k.GetJob(), Node: k.GetNode(), Incarnation: k.GetIncarnation()}
}

func toProcess(p lease.Process) *pb.Process {
	if p == (lease.Process{}) {
		return nil
	}
	return &pb.Process{Pid: int64(p.PID), Start: p.Start}
}

func fromProcess(p *pb.Process) lease.Process {
	return lease.Process{PID: fromInt(p.GetPid()), Start: p.GetStart()}
}

func toFraction(f lease.Fraction) *pb.Fraction {
	return &pb.Fraction{Percent: f.Percent, Mem: f.Mem}
}

func fromFraction(f *pb.Fraction) lease.Fraction {
	return lease.Fraction{Percent: f.GetPercent(), Mem: f.GetMem()}
}

func toRequest(r lease.Request) *pb.Request {
	return &pb.Request{
		Key:       toKey(r.Key),
		Fractions: each(r.Fractions, toFraction),
		Type:      text(r.Type), MinMem: r.MinMem, SameOwner: r.SameOwner,
		Uid: r.UID, Gid: r.GID,
		Policy: text(string(r.Policy)), Place: text(string(r.Place)), Pool: text(r.Pool),
		Life:    toDuration(r.Life),
		Account: text(r.Account), JobName: text(r.JobName),
		Holder: toProcess(r.Holder), Restart: r.Restart, Lend: text(string(r.Lend)), Grace: toDuration(r.Grace), Nodes: r.Nodes,
	}
}

func fromRequest(r *pb.Request) lease.Request {
	return lease.Request{
		Key:       fromKey(r.GetKey()),
		Fractions: each(r.GetFractions(), fromFraction),
		Type:      r.GetType(), MinMem: r.GetMinMem(), SameOwner: r.GetSameOwner(),
		UID: r.GetUid(), GID: r.GetGid(),
		Policy: lease.Policy(r.GetPolicy()), Place: lease.Place(r.GetPlace()), Pool: r.GetPool(),
		Life:    fromDuration(r.GetLife()),
		Account: r.GetAccount(), JobName: r.GetJobName(),
		Holder: fromProcess(r.GetHolder()), Restart: r.GetRestart(), Lend: lease.Lend(r.GetLend()), Grace: fromDuration(r.GetGrace()), Nodes: r.GetNodes(),
	}
}

// --- what is granted ---

func toGrant(g lease.Grant) *pb.Grant {
	return &pb.Grant{Owner: text(g.Owner), Gpu: text(g.GPU), Percent: g.Percent, Mem: g.Mem, Order: int64(g.Order), First: g.First}
}

func fromGrant(g *pb.Grant) lease.Grant {
	return lease.Grant{Owner: g.GetOwner(), GPU: g.GetGpu(), Percent: g.GetPercent(), Mem: g.GetMem(), Order: fromInt(g.GetOrder()), First: g.GetFirst()}
}

func toLease(l lease.Lease) *pb.Lease {
	return &pb.Lease{
		Id: text(l.ID), Request: toRequest(l.Request), Grants: each(l.Grants, toGrant), State: text(string(l.State)),
		Made: toTime(l.Made), Expires: toTime(l.Expires), Host: text(l.Host), Epoch: l.Epoch, Sponsor: text(l.Sponsor),
	}
}

func fromLease(l *pb.Lease) lease.Lease {
	return lease.Lease{
		ID: l.GetId(), Request: fromRequest(l.GetRequest()), Grants: each(l.GetGrants(), fromGrant), State: lease.State(l.GetState()),
		Made: fromTime(l.GetMade()), Expires: fromTime(l.GetExpires()), Host: l.GetHost(), Epoch: l.GetEpoch(), Sponsor: l.GetSponsor(),
	}
}

func toGPU(g lease.GPU) *pb.GPU {
	return &pb.GPU{
		Owner: text(g.Owner), Uuid: text(g.UUID), Index: int64(g.Index), Name: text(g.Name), Pci: text(g.PCI),
		Mem: g.Mem, Overhead: g.Overhead, Healthy: g.Healthy, Why: text(g.Why),
		FreePercent: g.FreePercent, FreeMem: g.FreeMem, Leases: int64(g.Leases), Drain: toDrain(g.Drain),
	}
}

func fromGPU(g *pb.GPU) lease.GPU {
	return lease.GPU{
		Owner: g.GetOwner(), UUID: g.GetUuid(), Index: fromInt(g.GetIndex()), Name: g.GetName(), PCI: g.GetPci(),
		Mem: g.GetMem(), Overhead: g.GetOverhead(), Healthy: g.GetHealthy(), Why: g.GetWhy(),
		FreePercent: g.GetFreePercent(), FreeMem: g.GetFreeMem(), Leases: fromInt(g.GetLeases()), Drain: fromDrain(g.GetDrain()),
	}
}

func toDrain(d lease.Drain) *pb.Drain {
	if d.IsZero() {
		return nil
	}
	return &pb.Drain{By: text(d.By), Since: toTime(d.Since), Reason: text(d.Reason)}
}

func fromDrain(d *pb.Drain) lease.Drain {
	return lease.Drain{By: d.GetBy(), Since: fromTime(d.GetSince()), Reason: d.GetReason()}
}

func toOrder(d lease.DrainOrder) *pb.DrainRequest {
	return &pb.DrainRequest{Owner: text(d.Owner), Gpu: text(d.GPU), Resume: d.Resume, Reason: text(d.Reason), By: d.By}
}

func fromOrder(d *pb.DrainRequest) lease.DrainOrder {
	return lease.DrainOrder{Owner: d.GetOwner(), GPU: d.GetGpu(), Resume: d.GetResume(), Reason: d.GetReason(), By: d.GetBy()}
}

func toInventory(v lease.Inventory) *pb.Inventory {
	return &pb.Inventory{Owner: text(v.Owner), Version: text(v.Version), Gpus: each(v.GPUs, toGPU), Age: toDuration(v.Age), Time: toTime(v.Time)}
}

func fromInventory(v *pb.Inventory) lease.Inventory {
	return lease.Inventory{Owner: v.GetOwner(), Version: v.GetVersion(), GPUs: each(v.GetGpus(), fromGPU), Age: fromDuration(v.GetAge()), Time: fromTime(v.GetTime())}
}

// --- large pools ---

func toMark(m lease.Mark) *pb.Mark { return &pb.Mark{Epoch: m.Epoch, Seq: m.Seq} }

func fromMark(m *pb.Mark) lease.Mark { return lease.Mark{Epoch: m.GetEpoch(), Seq: m.GetSeq()} }

func toRef(r lease.Ref) *pb.LeaseRef {
	return &pb.LeaseRef{Id: text(r.ID), Key: toKey(r.Key), Over: r.Over}
}

func fromRef(r *pb.LeaseRef) lease.Ref {
	return lease.Ref{ID: r.GetId(), Key: fromKey(r.GetKey()), Over: r.GetOver()}
}

func toChanges(c lease.Changes) *pb.WatchReply {
	return &pb.WatchReply{Inventory: toInventory(c.Inventory), At: toMark(c.At), Whole: c.Whole, Leases: each(c.Leases, toRef)}
}

func fromChanges(c *pb.WatchReply) lease.Changes {
	return lease.Changes{Inventory: fromInventory(c.GetInventory()), At: fromMark(c.GetAt()), Whole: c.GetWhole(), Leases: each(c.GetLeases(), fromRef)}
}

func toWhereabouts(w lease.Whereabouts) *pb.Whereabouts {
	return &pb.Whereabouts{Node: text(w.Node), Owners: each(w.Owners, text)}
}

func fromWhereabouts(w *pb.Whereabouts) lease.Whereabouts {
	return lease.Whereabouts{Node: w.GetNode(), Owners: each(w.GetOwners(), text)}
}

// --- what lives on it ---

func toUse(u lease.Use) *pb.Use {
	return &pb.Use{Granted: u.Granted, Used: u.Used, Overhead: u.Overhead, Peak: u.Peak}
}

func fromUse(u *pb.Use) lease.Use {
	return lease.Use{Granted: u.GetGranted(), Used: u.GetUsed(), Overhead: u.GetOverhead(), Peak: u.GetPeak()}
}

func toCounts(c lease.Counts) *pb.Counts {
	return &pb.Counts{
		Calls: c.Calls, Waits: c.Waits, BytesIn: c.BytesIn, BytesOut: c.BytesOut,
		Launches: c.Launches, Errors: c.Errors, Throttle: toDuration(c.Throttle),
		Cuts: c.Cuts, CutTime: toDuration(c.CutTime), Saved: c.Saved,
	}
}

func fromCounts(c *pb.Counts) lease.Counts {
	return lease.Counts{
		Calls: c.GetCalls(), Waits: c.GetWaits(), BytesIn: c.GetBytesIn(), BytesOut: c.GetBytesOut(),
		Launches: c.GetLaunches(), Errors: c.GetErrors(), Throttle: fromDuration(c.GetThrottle()),
		Cuts: c.GetCuts(), CutTime: fromDuration(c.GetCutTime()), Saved: c.GetSaved(),
	}
}

func toSession(s lease.Session) *pb.Session {
	return &pb.Session{
		Id: text(s.ID), Lease: text(s.Lease), Worker: toProcess(s.Worker), ClientPid: s.Client, Program: []byte(s.Program),
		Kind: s.Kind, Started: toTime(s.Started), Use: each(s.Use, toUse), Counts: toCounts(s.Counts), Link: toLink(s.Link), Part: toPart(s.Part),
	}
}

func fromSession(s *pb.Session) lease.Session {
	return lease.Session{
		ID: s.GetId(), Lease: s.GetLease(), Worker: fromProcess(s.GetWorker()), Client: s.GetClientPid(), Program: string(s.GetProgram()),
		Kind: s.GetKind(), Started: fromTime(s.GetStarted()), Use: each(s.GetUse(), fromUse), Counts: fromCounts(s.GetCounts()), Link: fromLink(s.GetLink()), Part: fromPart(s.GetPart()),
	}
}

func toPart(p *lease.Part) *pb.Part {
	if p == nil {
		return nil
	}
	return &pb.Part{Step: p.Step, Percent: p.Percent, Mem: p.Mem, Gpus: p.GPUs}
}

func fromPart(p *pb.Part) *lease.Part {
	if p == nil {
		return nil
	}
	return &lease.Part{Step: p.GetStep(), Percent: p.GetPercent(), Mem: p.GetMem(), GPUs: p.GetGpus()}
}

func toLink(l lease.Link) *pb.Link {
	return &pb.Link{RoundTrip: toDuration(l.RoundTrip), Resent: l.Resent}
}

func fromLink(l *pb.Link) lease.Link {
	return lease.Link{RoundTrip: fromDuration(l.GetRoundTrip()), Resent: l.GetResent()}
}

func toShare(s lease.Share) *pb.Share {
	return &pb.Share{
		Held: toDuration(s.Held), Busy: toDuration(s.Busy), Waited: toDuration(s.Waited), Throttled: toDuration(s.Throttled),
		Lent: toDuration(s.Lent), Borrowed: toDuration(s.Borrowed), Longest: toDuration(s.Longest),
		Turns: s.Turns, Overruns: s.Overruns, Revoked: s.Revoked, Due: s.Due,
	}
}

func fromShare(s *pb.Share) lease.Share {
	return lease.Share{
		Held: fromDuration(s.GetHeld()), Busy: fromDuration(s.GetBusy()), Waited: fromDuration(s.GetWaited()), Throttled: fromDuration(s.GetThrottled()),
		Lent: fromDuration(s.GetLent()), Borrowed: fromDuration(s.GetBorrowed()), Longest: fromDuration(s.GetLongest()),
		Turns: s.GetTurns(), Overruns: s.GetOverruns(), Revoked: s.GetRevoked(), Due: s.GetDue(),
	}
}

func toChange(c lease.Change) *pb.SetRequest {
	return &pb.SetRequest{Lease: text(c.Lease), Shares: c.Shares, Policy: text(string(c.Policy)), Lend: text(string(c.Lend)), Beyond: c.Beyond, By: c.By}
}

func fromChange(c *pb.SetRequest) lease.Change {
	return lease.Change{Lease: c.GetLease(), Shares: c.GetShares(), Policy: lease.Policy(c.GetPolicy()), Lend: lease.Lend(c.GetLend()), Beyond: c.GetBeyond(), By: c.GetBy()}
}

func toStatus(s lease.Status) *pb.Status {
	return &pb.Status{
		Lease: toLease(s.Lease), Use: each(s.Use, toUse), Sessions: each(s.Sessions, toSession), Renewed: toTime(s.Renewed), Shares: each(s.Shares, toShare),
		Idle: toDuration(s.Idle), IdleNoted: s.IdleNoted,
	}
}

func fromStatus(s *pb.Status) lease.Status {
	return lease.Status{
		Lease: fromLease(s.GetLease()), Use: each(s.GetUse(), fromUse), Sessions: each(s.GetSessions(), fromSession), Renewed: fromTime(s.GetRenewed()),
		Shares: each(s.GetShares(), fromShare), Idle: fromDuration(s.GetIdle()), IdleNoted: s.GetIdleNoted(),
	}
}

func toHolding(h lease.Holding) *pb.Holding {
	return &pb.Holding{Uid: h.UID, Account: text(h.Account), Cluster: text(h.Cluster), Pool: text(h.Pool), Jobs: h.Jobs, Except: text(h.Except)}
}

func fromHolding(h *pb.Holding) lease.Holding {
	return lease.Holding{UID: h.GetUid(), Account: h.GetAccount(), Cluster: h.GetCluster(), Pool: h.GetPool(), Jobs: h.GetJobs(), Except: h.GetExcept()}
}

func toHeld(h lease.Held) *pb.Held {
	return &pb.Held{Percent: h.Percent, Mem: h.Mem, Leases: uint32(max(0, h.Leases)), Reserved: uint32(max(0, h.Reserved))}
}

func fromHeld(h *pb.Held) lease.Held {
	return lease.Held{Percent: h.GetPercent(), Mem: h.GetMem(), Leases: fromInt(int64(h.GetLeases())), Reserved: fromInt(int64(h.GetReserved()))}
}

func toHeldPart(p lease.HeldPart) *pb.HeldPart {
	return &pb.HeldPart{Id: text(p.ID), Uid: p.UID, Cluster: text(p.Cluster), Account: text(p.Account), Pool: text(p.Pool), Run: p.Run, Held: toHeld(p.Held)}
}

func fromHeldPart(p *pb.HeldPart) lease.HeldPart {
	return lease.HeldPart{ID: p.GetId(), UID: p.GetUid(), Cluster: p.GetCluster(), Account: p.GetAccount(), Pool: p.GetPool(), Run: p.GetRun(), Held: fromHeld(p.GetHeld())}
}

func toQuestion(q lease.HeldQuestion) *pb.HeldQuestion {
	return &pb.HeldQuestion{Id: q.ID, Holdings: each(q.Holdings, toHolding), Owners: q.Owners}
}

func fromQuestion(q *pb.HeldQuestion) lease.HeldQuestion {
	return lease.HeldQuestion{ID: q.GetId(), Holdings: each(q.GetHoldings(), fromHolding), Owners: q.GetOwners()}
}

func toSum(s lease.HeldSum) *pb.HeldSum {
	return &pb.HeldSum{Known: s.Known, Held: each(s.Held, toHeld), At: each(s.At, text), Many: s.Many, Unsure: each(s.Unsure, text)}
}

func fromSum(s *pb.HeldSum) lease.HeldSum {
	return lease.HeldSum{Known: s.GetKnown(), Held: each(s.GetHeld(), fromHeld), At: s.GetAt(), Many: s.GetMany(), Unsure: s.GetUnsure()}
}

func toHeldWatch(q lease.HeldWatch) *pb.WatchHeldRequest {
	return &pb.WatchHeldRequest{Since: toMark(q.Since), Wait: toDuration(q.Wait), Gap: toDuration(q.Gap), Answers: each(q.Answers, func(a lease.HeldAnswer) *pb.HeldAnswer {
		return &pb.HeldAnswer{Id: a.ID, Sum: toSum(a.Sum)}
	})}
}

func fromHeldWatch(q *pb.WatchHeldRequest) lease.HeldWatch {
	return lease.HeldWatch{Since: fromMark(q.GetSince()), Wait: fromDuration(q.GetWait()), Gap: fromDuration(q.GetGap()), Answers: each(q.GetAnswers(), func(a *pb.HeldAnswer) lease.HeldAnswer {
		return lease.HeldAnswer{ID: a.GetId(), Sum: fromSum(a.GetSum())}
	})}
}

func toHeldChanges(c lease.HeldChanges) *pb.WatchHeldReply {
	return &pb.WatchHeldReply{Changes: toChanges(c.Changes), Parts: each(c.Parts, toHeldPart), Promise: toDuration(c.Promise), Waited: toDuration(c.Waited), Questions: each(c.Questions, toQuestion)}
}

func fromHeldChanges(c *pb.WatchHeldReply) lease.HeldChanges {
	return lease.HeldChanges{Changes: fromChanges(c.GetChanges()), Parts: each(c.GetParts(), fromHeldPart), Promise: fromDuration(c.GetPromise()), Waited: fromDuration(c.GetWaited()), Questions: each(c.GetQuestions(), fromQuestion)}
}

// --- sessions ---

func toSessionRequest(r lease.SessionRequest) *pb.OfferRequest {
	return &pb.OfferRequest{
		Lease: text(r.Lease), Kind: r.Kind, Pid: r.PID, Uid: r.UID, Program: []byte(r.Program), Encrypt: r.Encrypt, CertHash: r.CertHash,
		Part: toPart(r.Part),
	}
}

func fromSessionRequest(r *pb.OfferRequest) lease.SessionRequest {
	return lease.SessionRequest{
		Lease: r.GetLease(), Kind: r.GetKind(), PID: r.GetPid(), UID: r.GetUid(), Program: string(r.GetProgram()), Encrypt: r.GetEncrypt(), CertHash: r.GetCertHash(),
		Part: fromPart(r.GetPart()),
	}
}

func toOffer(o lease.Offer) *pb.OfferReply {
	return &pb.OfferReply{Addr: text(o.Addr), Ticket: o.Ticket[:], Secret: o.Secret[:], CertHash: o.CertHash, Part: o.Part}
}

// fromOffer refuses an offer whose ticket or secret is of another length.
func fromOffer(o *pb.OfferReply) (lease.Offer, error) {
	out := lease.Offer{Addr: o.GetAddr(), CertHash: o.GetCertHash(), Part: o.GetPart()}
	if len(o.GetTicket()) != len(out.Ticket) || len(o.GetSecret()) != len(out.Secret) {
		return lease.Offer{}, lease.Errorf(lease.Internal, "offer with a ticket of %d bytes and a secret of %d; this daemon knows %d and %d",
			len(o.GetTicket()), len(o.GetSecret()), len(out.Ticket), len(out.Secret))
	}
	copy(out.Ticket[:], o.GetTicket())
	copy(out.Secret[:], o.GetSecret())
	return out, nil
}

// --- for the command line ---

func toPool(p Pool) *pb.Pool {
	return &pb.Pool{Name: text(p.Name), Place: text(string(p.Place)), Owners: each(p.Owners, func(o PoolOwner) *pb.PoolOwner {
		return &pb.PoolOwner{Name: text(o.Name), Inventory: toInventory(o.Inventory), Error: text(o.Error)}
	})}
}

func fromPool(p *pb.Pool) Pool {
	return Pool{Name: p.GetName(), Place: lease.Place(p.GetPlace()), Owners: each(p.GetOwners(), func(o *pb.PoolOwner) PoolOwner {
		return PoolOwner{Name: o.GetName(), Inventory: fromInventory(o.GetInventory()), Error: o.GetError()}
	})}
}

func toCheck(c Check) *pb.Check {
	return &pb.Check{Name: text(c.Name), Level: text(string(c.Level)), Text: text(c.Text), Remedy: text(c.Remedy), Node: c.Node, Unknown: c.Unknown}
}

func fromCheck(c *pb.Check) Check {
	return Check{Name: c.GetName(), Level: Level(c.GetLevel()), Text: c.GetText(), Remedy: c.GetRemedy(), Node: c.GetNode(), Unknown: c.GetUnknown()}
}

func toHealthAll(a HealthAll) *pb.HealthAllReply {
	return &pb.HealthAllReply{
		Findings: each(a.Findings, func(c NodesCheck) *pb.NodesCheck {
			return &pb.NodesCheck{Check: toCheck(c.Check), Nodes: each(c.Nodes, text)}
		}),
		Asked: uint32(a.Asked), Well: uint32(a.Well), Warned: uint32(a.Warned), Failed: uint32(a.Failed), Unheard: uint32(a.Unheard), LeftOut: uint32(a.LeftOut),
	}
}

func fromHealthAll(a *pb.HealthAllReply) HealthAll {
	return HealthAll{
		Findings: each(a.GetFindings(), func(c *pb.NodesCheck) NodesCheck { return NodesCheck{fromCheck(c.GetCheck()), c.GetNodes()} }),
		Asked:    int(a.GetAsked()), Well: int(a.GetWell()), Warned: int(a.GetWarned()), Failed: int(a.GetFailed()), Unheard: int(a.GetUnheard()), LeftOut: int(a.GetLeftOut()),
	}
}

func toEvent(e Event) *pb.Event {
	return &pb.Event{
		Time: toTime(e.Time), Seq: e.Seq, Event: text(e.Event), Node: text(e.Node), Lease: text(e.Lease), Key: toKey(e.Key),
		Uid: e.UID, Host: text(e.Host), Owner: text(e.Owner), Gpus: each(e.GPUs, text), Reason: text(e.Reason),
		Grants: each(e.Grants, toGrant), Times: e.Times,
	}
}

func fromEvent(e *pb.Event) Event {
	return Event{
		Time: fromTime(e.GetTime()), Seq: e.GetSeq(), Event: e.GetEvent(), Node: e.GetNode(), Lease: e.GetLease(), Key: fromKey(e.GetKey()),
		UID: e.GetUid(), Host: e.GetHost(), Owner: e.GetOwner(), GPUs: each(e.GetGpus(), text), Reason: e.GetReason(),
		Grants: each(e.GetGrants(), fromGrant), Times: e.GetTimes(),
	}
}

func toStats(s Stats) *pb.StatsReply {
	return &pb.StatsReply{
		Node: text(s.Node), Version: text(s.Version), Time: toTime(s.Time), Leases: each(s.Leases, toStatus),
		Gpus: each(s.GPUs, func(g GPUStats) *pb.GPUStats {
			return &pb.GPUStats{
				Gpu: toGPU(g.GPU), Known: g.Known, Utilisation: g.Utilisation, MemUsed: g.MemUsed, MemTotal: g.MemTotal,
				Age: toDuration(g.Age), GrantedMem: g.GrantedMem, UsedMem: g.UsedMem,
			}
		}),
	}
}

func fromStats(s *pb.StatsReply) Stats {
	return Stats{
		Node: s.GetNode(), Version: s.GetVersion(), Time: fromTime(s.GetTime()), Leases: each(s.GetLeases(), fromStatus),
		GPUs: each(s.GetGpus(), func(g *pb.GPUStats) GPUStats {
			return GPUStats{
				GPU: fromGPU(g.GetGpu()), Known: g.GetKnown(), Utilisation: g.GetUtilisation(), MemUsed: g.GetMemUsed(), MemTotal: g.GetMemTotal(),
				Age: fromDuration(g.GetAge()), GrantedMem: g.GetGrantedMem(), UsedMem: g.GetUsedMem(),
			}
		}),
	}
}
