// Package workers runs the session processes of an owner: it keeps some ready for
// each GPU, binds one to a lease when a client comes, watches it, and ends it. They
// are meant to outlive the daemon, which finds them again when it starts.
package workers

// How a session comes and goes.
//
//	warm    sluice-worker loads the driver for one GPU, in a control group of its
//	        own, behind a private /dev and without capabilities, and waits on its control socket; when the daemon
//	        dies, that closes, and it ends
//	Start   slot of the lease's account -> a warm process, or a new one for several
//	        GPUs -> record -> START with client's socket, account and store
//	        -> the process becomes the user's, filters its system calls, answers,
//	        and is on its own
//	watch   a goroutine waits for the process's end, then frees slot, cgroup, record
//
// DIR/LEASE holds "lease", "account", "totals" (see totals.go), and a record and a socket for each session, all root's. The
// session listens at the socket for the daemon, which connects its lease's sessions with each other (package exchange). The
// record is written before START, so a session is never alive without one; records
// name the process by id and start time. What the account says is the session's own
// word: numbers are shown, but no process is found or killed by it.
//
// mu guards the maps and is never held over anything that waits.

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// bindTime is how long a worker may take to take over a client, a driver that is
// loaded only then included.
const bindTime = 30 * time.Second

// Config says how sessions run.
type Config struct {
	Exe     string   // sluice-worker
	Args    []string // before the subcommand: --log and --log-format
	Dir     string   // of accounts and records; on a file system in memory
	Shared  string   // of what the driver shares between the sessions of a lease; on a file system in memory
	LibCUDA string
	LibNVML string
	Store   string // directory of module images, one below it for each user
	// Bounds of the images: of each user, of all (0 for none), and the free space that they
	// leave. In bytes.
	StoreLimit, StoreTotal, StoreKeepFree int64

	Warm       int // processes kept ready for each GPU
	Keepalive  time.Duration
	Compress   bool          // clients may compress what they send
	Grace      time.Duration // how long a session waits for a client whose connection was lost; 0: not at all
	Seccomp    bool
	ConfineDev bool
	Sandbox    sandbox.Mode
	Cgroup     string // auto, required or off
	MinUID     uint32 // of the users whose sessions run as themselves, at least 1
	RootUID    uint32 // as whom those of lower uids run; 0 is 65534
	RootGID    uint32 // the same, and in place of group 0
	// MemoryMax is the most host memory of each session of a lease in bytes, 0 for no limit. A
	// session that waits for its client has that of a lease without grants.
	MemoryMax func(lease.Lease) uint64
	PidsMax   int     // threads of a session, 0 for no limit
	CPUs      int     // processors that a session can use, 0 for no limit
	Turns     string  // directory of the GPUs' schedules, "" for none: then the driver shares the time
	Sharing   Sharing // until SetSharing
}

// Pool implements owner.Workers.
type Pool struct {
	log *slog.Logger
	cfg Config
	cg  *cgroups

	mu        sync.Mutex
	facts     map[string]*control.Facts // by GPU
	sandbox   map[string]sandbox.Mode   // by GPU, once there are facts
	kept      []string                  // GPUs whose facts are an earlier daemon's; see Recheck
	leases    map[string]*leased
	warm      map[string][]*worker
	fails     map[string]int  // spawns in a row that came to nothing
	soon      map[string]bool // a fill is to come after such
	closed    bool
	onEnd     func(lease.Session, string)
	missed    []ended                    // before onEnd was set
	schedules map[string]*turns.Schedule // by GPU
	tenancies map[string]*tenancy        // by lease
	over      map[overrunKey]lateWork    // work that stays on a GPU while others wait
	stopStore func()
	stopRoom  func()
	overran   []Overrun // of sessions that ended themselves, to be told of
	sampled   time.Time // when AddBusy was called last

	sharing Sharing
}

type ended struct {
	session *session
	out     lease.Session
	reason  string
}

// leased is a lease with an account here.
type leased struct {
	id       string
	gpus     []string
	file     *account.File // nil once it has been ended
	sessions map[*session]bool
	over     bool // being ended
	totals   totals
	ghosts   []ghost
	broker   *exchange.Broker // of what its sessions export
}

type session struct {
	lease.Session // what does not change
	l             *leased
	slot          int
	proc          *worker       // nil for one that an earlier daemon started
	pidfd         *os.File      // of those
	open          bool          // it has its client
	why           string        // it was killed
	done          chan struct{} // closed when it has ended and all is cleaned up
}

// MemoryByLease is the host memory that a session of a lease may have unless the site says
// otherwise, in bytes. A real program's session takes 0.5 to 3 GiB: the driver's state for each GPU, images
// that are being loaded, and staging; besides, kernels may reach wire.MaxHostMap of host memory.
func MemoryByLease(l lease.Lease) uint64 {
	n := uint64(4<<30 + wire.MaxHostMap)
	for i, g := range l.Grants {
		n += g.Mem / 8
		if i > 0 {
			n += 1 << 30
		}
	}
	return n
}

// nobody is the uid and gid of the user "nobody" on Linux.
const nobody = 65534

// as is the user as whom a lease's sessions run: its own, but never root, nor any other
// user of the system. The host's word decides whose a lease is, and what a session of
// root's on that node may touch is not what it may touch here: this daemon's ledger, the
// accounts and schedules of other leases, munge's key. A session needs nothing of its user's files.
func (c *Config) as(r *lease.Request) (uid, gid uint32) {
	uid, gid = r.UID, r.GID
	if uid < max(1, c.MinUID) {
		uid, gid = c.RootUID, c.RootGID
	}
	if uid == 0 {
		uid = nobody
	}
	if gid == 0 {
		if gid = c.RootGID; gid == 0 {
			gid = nobody
		}
	}
	return uid, gid
}

// New finds the sessions of an earlier daemon again.
func New(log *slog.Logger, cfg Config) (*Pool, error) {
	if cfg.MemoryMax == nil {
		cfg.MemoryMax = func(lease.Lease) uint64 { return 0 }
	}
	if cfg.StoreTotal == 0 {
		cfg.StoreTotal = 1 << 62
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("workers: %w", err)
	}
	// Users reach their own part of these by descriptor only.
	if err := os.MkdirAll(cfg.Shared, 0o700); err != nil {
		return nil, fmt.Errorf("workers: %w", err)
	}
	if err := os.MkdirAll(cfg.Store, 0o700); err != nil {
		return nil, fmt.Errorf("owner.store: %w", err)
	}
	cg, err := newCgroups(log, cfg)
	if err != nil {
		return nil, err
	}
	p := &Pool{
		log: log, cfg: cfg, sharing: cfg.Sharing, cg: cg, facts: map[string]*control.Facts{}, sandbox: map[string]sandbox.Mode{}, leases: map[string]*leased{},
		warm: map[string][]*worker{}, fails: map[string]int{}, soon: map[string]bool{},
	}
	p.warnOfDisk()
	if err := p.openSchedules(); err != nil {
		return nil, err
	}
	if err := p.adopt(); err != nil {
		return nil, err
	}
	for id := range p.leases {
		p.keepDebts(id)
	}
	// Those of workers that had not ended yet, or were too fresh.
	time.AfterFunc(2*time.Minute, cg.sweep)
	if err := p.keepStore(); err != nil {
		return nil, err
	}
	p.keepRoom()
	return p, nil
}

// grace is how long a lease's sessions wait for their clients.
func (p *Pool) grace(l lease.Lease) time.Duration {
	switch g := l.Request.Grace; g {
	case 0:
		return p.cfg.Grace
	case lease.NoGrace:
		return 0
	default:
		return g
	}
}

// Start implements owner.Workers.
func (p *Pool) Start(ctx context.Context, l lease.Lease, r lease.SessionRequest, conn *os.File, gpus []lease.GPU) (lease.Session, error) {
	if len(gpus) == 0 || len(gpus) != len(l.Grants) || len(gpus) > account.MaxDevices {
		return lease.Session{}, lease.Errorf(lease.Invalid, "lease %s: %d grants on %d GPUs: 1 to %d of one owner can be used", l.ID, len(l.Grants), len(gpus), account.MaxDevices)
	}
	st, err := p.startMessage(ctx, l, gpus)
	if err != nil {
		return lease.Session{}, lease.Errorf(lease.Down, "lease %s: %v", l.ID, err)
	}
	s, err := p.claim(l, r)
	if err != nil {
		return lease.Session{}, err
	}
	if r.PID != 0 { // else nobody could tell that the client has ended
		st.GraceMS = uint32(p.grace(l) / time.Millisecond)
	}
	st.Compress = p.cfg.Compress
	st.Hello.Kind = r.Kind // others is counted by it, so the client must keep to it
	if err := p.launch(ctx, s, l, st, conn, gpus); err != nil {
		p.log.Error("session not started", "lease", l.ID, "error", err)
		p.mu.Lock()
		s.why = "not started"
		p.mu.Unlock()
		if s.proc != nil {
			s.proc.End()
		}
		p.finish(s, false)
		return lease.Session{}, lease.Errorf(lease.Down, "lease %s: %v", l.ID, err)
	}
	return p.show(s), nil
}

// startMessage is the START of a session of l.
func (p *Pool) startMessage(ctx context.Context, l lease.Lease, gpus []lease.GPU) (*control.Start, error) {
	uid, gid := p.cfg.as(&l.Request)
	st := &control.Start{
		Lease: l.ID, Detached: true, StoreLimit: p.cfg.StoreLimit, StoreTotal: p.cfg.StoreTotal, StoreKeepFree: p.cfg.StoreKeepFree,
		Bind: &control.Bind{UID: uid, GID: gid, Seccomp: p.cfg.Seccomp},
	}
	for i, g := range gpus {
		f, err := p.factsOf(ctx, g.UUID)
		if err != nil {
			return nil, err
		}
		d := f.Snapshot.Devices[0]
		d.TotalMem = l.Grants[i].Mem
		devs := append(st.Snapshot.Devices, d)
		st.Snapshot = f.Snapshot
		st.Snapshot.Devices = devs
		st.Overhead = append(st.Overhead, f.Overhead[0])
		st.Idle = append(st.Idle, f.Idle[0])
	}
	st.Snapshot.KeepaliveMS = uint32(p.cfg.Keepalive / time.Millisecond)
	return st, nil
}

// claim makes a session that has a slot and no process.
func (p *Pool) claim(l lease.Lease, r lease.SessionRequest) (*session, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, lease.Errorf(lease.Down, "the daemon is stopping")
	}
	a := p.leases[l.ID]
	if a == nil {
		var err error
		if a, err = p.openLease(l); err != nil {
			return nil, lease.Errorf(lease.Internal, "lease %s: %v", l.ID, err)
		}
		p.leases[l.ID] = a
	}
	if a.over {
		return nil, lease.Errorf(lease.Over, "lease %s is ending", l.ID)
	}
	now := time.Now()
	slot, err := a.file.Claim(account.Client{PID: r.PID, Name: r.Program}, r.Kind, now.UnixNano())
	if errors.Is(err, account.ErrFull) {
		return nil, lease.Errorf(lease.NoRoom, "lease %s: %v", l.ID, err)
	} else if err != nil {
		return nil, lease.Errorf(lease.Internal, "lease %s: %v", l.ID, err)
	}
	s := &session{
		Session: lease.Session{Lease: l.ID, Client: r.PID, Program: r.Program, Kind: r.Kind, Started: now},
		l:       a, slot: slot, done: make(chan struct{}),
	}
	a.sessions[s] = true
	p.others()
	return s, nil
}

// launch gives a claimed session a process and its client.
func (p *Pool) launch(ctx context.Context, s *session, l lease.Lease, st *control.Start, conn *os.File, gpus []lease.GPU) error {
	proc, err := p.take(gpus)
	if err != nil {
		return err
	}
	pid := proc.Cmd.Process.Pid
	start, err := process.Start(pid)
	if err != nil {
		p.discard(proc)
		return fmt.Errorf("session process: %w", err)
	}
	p.mu.Lock()
	s.proc, s.ID = proc, proc.id
	s.Worker = lease.Process{PID: pid, Start: start}
	over := s.l.over
	p.mu.Unlock()
	if over {
		return errors.New("the lease has ended")
	}
	if err := p.writeRecord(s); err != nil {
		return err
	}
	if err := s.l.file.Bind(s.slot, pid, start); err != nil {
		return err
	}
	files, err := p.sessionFiles(s, st)
	defer closeAll(files)
	if err != nil {
		return err
	}
	if max := p.cfg.MemoryMax(l); !p.cg.setMemory(proc.id, max) {
		st.HostMemory = max
	}
	st.Slot = s.slot
	fds := []int{int(conn.Fd()), s.l.file.FD()}
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	if wire.SessionComputes(s.Kind) {
		link, err := p.link(s)
		if err != nil {
			return err
		}
		defer link.Close()
		st.Exchange, fds = true, append(fds, int(link.Fd()))
		var schedules []*os.File
		if st.Turns, schedules, err = p.startTurns(l); err != nil {
			return err
		}
		for _, f := range schedules {
			defer f.Close()
			fds = append(fds, int(f.Fd()))
		}
	}
	if err := proc.Give(st, fds...); err != nil {
		return err
	}
	// Whoever calls off or ends the lease meanwhile ends the process, and so the wait.
	stop := context.AfterFunc(ctx, func() { _ = proc.Cmd.Process.Kill() })
	defer stop()
	if err := proc.Await(time.Now().Add(bindTime)); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.l.over {
		return errors.New("the lease has ended")
	}
	s.open = true
	go p.watch(s)
	return nil
}

// watch waits for a session's end.
func (p *Pool) watch(s *session) {
	if s.proc != nil {
		<-s.proc.Done
	} else {
		waitPidfd(s.pidfd)
	}
	p.finish(s, true)
}

// finish cleans up after a session whose process has ended. Its end is told before its record goes, so that
// a daemon that is killed in between leaves it to the next one: the end is told once or, then, twice.
func (p *Pool) finish(s *session, tell bool) {
	reason := p.reason(s)
	out := p.show(s)
	if s.proc != nil {
		s.proc.Ctl.Close()
	}
	p.cg.remove(s.ID)
	p.mu.Lock()
	p.clearMember(s)
	p.endedItself(s, reason)
	if s.pidfd != nil {
		// Under mu: the number must not be another's when End uses it.
		s.pidfd.Close()
		s.pidfd = nil
	}
	f := p.onEnd
	if tell && f == nil && s.proc == nil {
		p.missed = append(p.missed, ended{s, out, reason}) // OnEnd does the rest
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	p.forget(s, out, reason, f, tell)
}

// forget tells of a session's end and removes what is left of it.
func (p *Pool) forget(s *session, out lease.Session, reason string, f func(lease.Session, string), tell bool) {
	if tell {
		p.count(s, out.Counts)
		p.log.Info("session over", "lease", s.Lease, "session", s.ID, "client", s.Program, "client_pid", s.Client, "reason", reason)
		if f != nil {
			f(out, reason)
		}
	}
	s.l.broker.Leave(s.slot)
	p.removeRecord(s)
	p.mu.Lock()
	if err := s.l.file.Free(s.slot); err != nil {
		p.log.Error("account", "lease", s.Lease, "error", err)
	}
	delete(s.l.sessions, s)
	s.l.uncount(s.ID)
	p.others()
	p.mu.Unlock()
	close(s.done)
}

// OnEnd implements owner.Workers; sessions that ended while no daemon ran are told
// of at once.
func (p *Pool) OnEnd(f func(lease.Session, string)) {
	p.mu.Lock()
	missed := p.missed
	p.onEnd, p.missed = f, nil
	p.mu.Unlock()
	for _, m := range missed {
		p.forget(m.session, m.out, m.reason, f, true)
	}
}

// Leases implements owner.Adopted.
func (p *Pool) Leases() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ids []string
	for id := range p.leases {
		ids = append(ids, id)
	}
	for id := range p.tenancies {
		if p.leases[id] == nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// End implements owner.Workers. What Total says of the lease stays until Forget.
func (p *Pool) End(ctx context.Context, id string) error {
	p.mu.Lock()
	l := p.leases[id]
	if l == nil || l.file == nil {
		p.mu.Unlock()
		return nil
	}
	l.over = true
	var all []*session
	for s := range l.sessions {
		all = append(all, s)
		if s.why == "" {
			s.why = "the lease ended"
		}
		s.kill()
	}
	p.mu.Unlock()
	for _, s := range all {
		select {
		case <-s.done:
		case <-ctx.Done():
			return fmt.Errorf("session %s, process %d, has not ended: %w", s.ID, s.Worker.PID, ctx.Err())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.file == nil {
		return nil // another End was faster
	}
	p.closeAccount(l)
	return nil
}

// kill ends the process; mu is held, and the process is not reaped before watch has
// seen its end, so the number is still its own.
func (s *session) kill() {
	switch {
	case s.proc != nil:
		_ = s.proc.Cmd.Process.Kill()
	case s.pidfd != nil:
		_ = unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0)
	}
}

// others tells every account how many sessions of other leases are on its GPUs; mu
// is held.
func (p *Pool) others() {
	n := map[string]uint64{}
	count := func(l *leased) (k uint64) {
		for s := range l.sessions {
			if wire.SessionComputes(s.Kind) {
				k++
			}
		}
		return k
	}
	for _, l := range p.leases {
		for _, g := range l.gpus {
			n[g] += count(l)
		}
	}
	for _, l := range p.leases {
		if l.file == nil {
			continue
		}
		own := count(l)
		for d, g := range l.gpus {
			_ = l.file.SetOthers(d, n[g]-own)
		}
	}
}

// Close ends the processes that have no client; sessions stay.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	var all []*worker
	for _, ps := range p.warm {
		all = append(all, ps...)
	}
	p.warm = map[string][]*worker{}
	for _, l := range p.leases {
		l.broker.Close() // the next daemon serves its sessions
	}
	p.closeSchedules()
	p.mu.Unlock()
	p.stopStore()
	p.stopRoom()
	for _, w := range all {
		p.discard(w)
	}
}
