// Package workers runs the session processes of an owner. It keeps some ready for
// each GPU, binds one to a lease when a client connects, watches it, and ends it.
// Sessions outlive the daemon, which finds them again when it starts.
package workers

// The life of a session:
//
//	warm    sluice-worker loads the driver for one GPU, in a control group of its
//	        own, behind a private /dev and without capabilities. It waits on its
//	        control socket. When the daemon dies, that socket closes, and the
//	        process ends
//	Start   claims a slot of the lease's account, takes a warm process (for several
//	        GPUs a new one), writes the record, and sends START with the client's
//	        socket, the account and the store. The process becomes the user's,
//	        filters its system calls, and answers. From then on it runs by itself
//	watch   a goroutine waits for the end of the process, then frees the slot, the
//	        control group and the record
//
// DIR/LEASE holds the files "lease", "account" and "totals" (see totals.go), one for each part (see parts.go), and for each session a record and a socket. All of
// them are root's. At the socket the session listens for the daemon, which connects the lease's sessions with each other (package
// exchange). The record is written before START, so no session is alive without one. Records name a process by its id and start
// time. Sessions write the account themselves: its numbers are shown, but no process is found or killed by them.
//
// mu guards the maps. It is never held across anything that waits.

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

// bindTime is how long a worker may take to take over a client. That includes loading the
// driver, for a worker that was not started ahead.
const bindTime = 30 * time.Second

// Config says how sessions run.
type Config struct {
	Exe     string   // sluice-worker
	Args    []string // arguments before the subcommand: --log and --log-format
	Dir     string   // directory of accounts and records, on a file system in memory
	Shared  string   // directory of what the driver shares between the sessions of a lease, on a file system in memory
	LibCUDA string
	LibNVML string
	Store   string // directory of module images; each user has a directory below it
	// Limits of the images in bytes: those of each user, those of all users (0 for none), and the
	// free space that must remain.
	StoreLimit, StoreTotal, StoreKeepFree int64
	// The same for what programs have copied to GPUs, see package store. Without a limit of each user nothing is kept.
	Content                                     string
	ContentLimit, ContentTotal, ContentKeepFree int64

	Warm       int // processes kept ready for each GPU
	Keepalive  time.Duration
	Compress   bool          // clients may compress what they send
	RDMA       control.RDMA  // which clients may have their sessions go over RDMA
	Bulk       int           // bulk connections of a session for each direction; 0: none
	Grace      time.Duration // how long a session waits for a client whose connection was lost; 0: not at all
	Seccomp    bool
	ConfineDev bool
	Sandbox    sandbox.Mode
	Pageable   string // auto, allow or refuse: see pageable
	Cgroup     string // auto, required or off
	MinUID     uint32 // lowest uid whose sessions run as that user, at least 1
	RootUID    uint32 // uid of the sessions of users below MinUID; 0 means 65534
	RootGID    uint32 // gid of those sessions, and of sessions whose group is 0
	// MemoryMax is the limit on the host memory of each session of a lease in bytes, 0 for no limit.
	// A worker that was started ahead has the limit of a lease without grants.
	MemoryMax func(lease.Lease) uint64
	PidsMax   int     // limit on the threads of a session, 0 for none
	CPUs      int     // processors that a session can use, 0 for no limit
	Turns     string  // directory of the GPUs' schedules; "" for none, and the driver shares the time
	Sharing   Sharing // used until SetSharing is called
}

// Pool implements owner.Workers.
type Pool struct {
	log *slog.Logger
	cfg Config
	cg  *cgroups

	mu         sync.Mutex
	facts      map[string]*control.Facts // by GPU
	sandbox    map[string]sandbox.Mode   // by GPU; set together with the GPU's facts
	unlent     map[string]error          // by GPU; why it is not lent, see pageable
	kept       []string                  // GPUs whose facts an earlier daemon kept; see Recheck
	leases     map[string]*leased
	warm       map[string][]*worker // by GPU; workers that were started ahead
	fails      map[string]int       // by GPU; consecutive workers that ended before they had a client
	soon       map[string]bool      // by GPU; a fill is due, see later
	filling    sync.WaitGroup       // processes that are being started ahead
	closed     bool
	onEnd      func(lease.Session, string)
	missed     []ended                    // sessions that ended before onEnd was set
	schedules  map[string]*turns.Schedule // by GPU
	readings   map[string]reading         // of these, by GPU; see readingOf
	tenancies  map[string]*tenancy        // by lease
	overdue    map[overrunKey]overdueWork // work that stays on a GPU while others wait
	stopStores func()
	stopRoom   func()
	overran    []Overrun // sessions that ended themselves, to be returned by overruns
	sampled    time.Time // when AddBusy was called last

	sharing Sharing
	idle    map[string]bool // leases that lend because they have no work
}

type ended struct {
	session *session
	out     lease.Session
	reason  string
	failed  bool // see lease.Report
}

// leased is a lease with an account here.
type leased struct {
	id       string
	gpus     []string
	file     *account.File // nil once the lease has been ended
	sessions map[*session]bool
	ending   bool
	totals   totals
	ghosts   []ghost
	broker   *exchange.Broker // connects sessions that share memory
	parts    map[uint32]*part // by step
}

type session struct {
	lease.Session // the part that does not change
	l             *leased
	part          *part // nil: all of the lease
	slot          int
	proc          *worker       // nil if an earlier daemon started the process
	pidfd         *os.File      // the process, if an earlier daemon started it
	open          bool          // it has its client
	release       func()        // lets the client's connection end; nil if an earlier daemon started the process
	why           string        // why it was killed
	meant         bool          // and it was, with its client or its lease
	done          chan struct{} // closed when it has ended and everything is cleaned up
}

// MemoryByLease returns the default limit on the host memory of a session, in bytes. The session of a real program
// takes 0.5 to 3 GiB: the driver's state for each GPU, images that are being loaded, and staging buffers. In addition
// kernels may reach up to wire.MaxHostMap of host memory.
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

// as returns the user that a lease's sessions run as. That is the lease's user, but never root
// or another system user. The host alone says whose a lease is, and a root user there must not
// become root here: root here can reach this daemon's ledger, the accounts and schedules of
// other leases, and munge's key. A session needs none of its user's files.
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

// New returns a Pool. It finds the sessions that an earlier daemon started.
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
	// Users have only descriptors of their own parts of these directories.
	if err := os.MkdirAll(cfg.Shared, 0o700); err != nil {
		return nil, fmt.Errorf("workers: %w", err)
	}
	if err := os.MkdirAll(cfg.Store, 0o700); err != nil {
		return nil, fmt.Errorf("owner.store: %w", err)
	}
	if cfg.ContentLimit > 0 {
		if err := os.MkdirAll(cfg.Content, 0o700); err != nil {
			log.Error("nothing that programs copy to the GPUs is stored", "owner.content", cfg.Content, "error", err)
			cfg.ContentLimit = 0
		}
	}
	cg, err := newCgroups(log, cfg)
	if err != nil {
		return nil, err
	}
	p := &Pool{
		log: log, cfg: cfg, sharing: cfg.Sharing, cg: cg, facts: map[string]*control.Facts{}, sandbox: map[string]sandbox.Mode{}, unlent: map[string]error{}, leases: map[string]*leased{},
		warm: map[string][]*worker{}, fails: map[string]int{}, soon: map[string]bool{}, idle: map[string]bool{},
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
	p.endLostParts()
	// Sweep again for the groups of workers that had not ended yet, and for groups that were too recent.
	time.AfterFunc(2*time.Minute, cg.sweep)
	if err := p.keepStores(); err != nil {
		return nil, err
	}
	p.keepRoom()
	return p, nil
}

// encryptedBulk is the most bulk connections of an encrypted session for each direction: each of them takes a process on either side.
const encryptedBulk = 2

// grace returns how long a lease's sessions wait for a client whose connection was lost.
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
	s, err := p.claim(l, r, st.Overhead[0])
	if err != nil {
		return lease.Session{}, err
	}
	if s.part != nil {
		st.Part, st.Grants, st.Snapshot.Devices[0].TotalMem = true, capsOf(l), s.part.Mem
	}
	if r.PID != 0 { // without a process id nobody could say that the client has ended
		st.GraceMS = uint32(p.grace(l) / time.Millisecond)
	}
	st.Compress, st.Bulk, st.RDMA = p.cfg.Compress, uint32(p.cfg.Bulk), p.cfg.RDMA
	if r.Encrypt {
		st.Bulk = min(st.Bulk, encryptedBulk)
	}
	st.Hello.Kind = r.Kind // the client must keep to this kind: others counts the sessions by it
	if err := p.launch(ctx, s, l, st, conn, gpus); err != nil {
		level := slog.LevelError
		if errors.Is(err, errCancelled) { // nothing has failed, and the client asks again
			level = slog.LevelInfo
		}
		p.log.Log(ctx, level, "session not started", "lease", l.ID, "error", err)
		p.mu.Lock()
		s.why, s.meant = "not started", true
		p.mu.Unlock()
		if s.proc != nil {
			s.proc.End()
		}
		p.finish(s, false)
		return lease.Session{}, lease.Errorf(lease.Down, "lease %s: %v", l.ID, err)
	}
	return p.show(s), nil
}

// startMessage returns the START message for a session of l.
func (p *Pool) startMessage(ctx context.Context, l lease.Lease, gpus []lease.GPU) (*control.Start, error) {
	uid, gid := p.cfg.as(&l.Request)
	st := &control.Start{
		Lease: l.ID, Detached: true, StoreLimit: p.cfg.StoreLimit, StoreTotal: p.cfg.StoreTotal, StoreKeepFree: p.cfg.StoreKeepFree,
		ContentLimit: p.cfg.ContentLimit, ContentTotal: p.cfg.ContentTotal, ContentKeepFree: p.cfg.ContentKeepFree,
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

// claim makes a session. It has a slot and no process yet. overhead is what a context takes on the first GPU, in bytes.
func (p *Pool) claim(l lease.Lease, r lease.SessionRequest, overhead uint64) (*session, error) {
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
	if a.ending {
		return nil, lease.Errorf(lease.Over, "lease %s is ending", l.ID)
	}
	of, err := p.partOf(a, &l, &r, overhead)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	slot, err := a.file.Claim(account.Client{PID: r.PID, Name: r.Program}, r.Kind, now.UnixNano())
	if err == nil && of != nil {
		if err = of.file.Add(a.file, slot); err != nil {
			_ = a.file.Free(slot)
		}
	}
	if err != nil {
		p.leavePart(a, of)
	}
	if errors.Is(err, account.ErrFull) {
		return nil, lease.Errorf(lease.NoRoom, "lease %s: %v", l.ID, err)
	} else if err != nil {
		return nil, lease.Errorf(lease.Internal, "lease %s: %v", l.ID, err)
	}
	s := &session{
		Session: lease.Session{Lease: l.ID, Client: r.PID, Program: r.Program, Kind: r.Kind, Started: now, Part: r.Part},
		l:       a, part: of, slot: slot, done: make(chan struct{}),
	}
	a.sessions[s] = true
	p.others()
	return s, nil
}

// errCancelled is the error of a start whose context has ended.
var errCancelled = errors.New("the start was cancelled: the daemon is stopping, or the lease is ending")

// launch gives a claimed session a process and its client. If ctx ends first, the error is errCancelled.
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
	over := s.l.ending
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
	if s.part != nil {
		fds = append(fds, s.part.file.FD())
	}
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
		if st.Turns, schedules, err = p.startTurns(s, l); err != nil {
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
	// If the call is cancelled, or the lease is ended meanwhile, the process is killed, which ends the wait.
	stop := context.AfterFunc(ctx, func() { _ = proc.Cmd.Process.Kill() })
	err = proc.Await(time.Now().Add(bindTime))
	if !stop() { // it is being killed, whatever it has answered
		return errCancelled
	}
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.l.ending {
		return errors.New("the lease has ended")
	}
	s.open, s.release = true, control.Hold(conn)
	go p.watch(s)
	return nil
}

// watch waits for a session to end and cleans up after it.
func (p *Pool) watch(s *session) {
	if s.proc != nil {
		<-s.proc.Done
	} else {
		waitPidfd(s.pidfd)
	}
	p.finish(s, true)
}

// finish cleans up after a session whose process has ended. If report is set, it reports the end to the owner, and does so before
// it removes the record. So if the daemon is killed in between, the next daemon reports the end again: it is reported at least once.
func (p *Pool) finish(s *session, report bool) {
	reason, failed := p.reason(s)
	out := p.show(s)
	if err := s.l.file.Ended(s.slot); err != nil {
		p.log.Error("account", "lease", s.Lease, "error", err)
	}
	if s.release != nil {
		s.release()
	}
	if s.proc != nil {
		s.proc.Ctl.Close()
	}
	p.cg.remove(s.ID)
	p.mu.Lock()
	p.clearMember(s)
	p.endedItself(s, reason)
	if s.pidfd != nil {
		// mu is held, so that End does not use the descriptor's number when it names another file.
		s.pidfd.Close()
		s.pidfd = nil
	}
	f := p.onEnd
	if report && f == nil && s.proc == nil {
		p.missed = append(p.missed, ended{s, out, reason, failed}) // OnEnd does the rest
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	p.forget(ended{s, out, reason, failed}, f, report)
}

// forget reports a session's end to f if report is set, and removes what is left of the session.
func (p *Pool) forget(e ended, f func(lease.Session, string), report bool) {
	s := e.session
	if report {
		p.count(&e)
		p.log.Info("session over", "lease", s.Lease, "session", s.ID, "client", s.Program, "client_pid", s.Client, "reason", e.reason)
		if f != nil {
			f(e.out, e.reason)
		}
	}
	s.l.broker.Leave(s.slot)
	p.removeRecord(s)
	p.mu.Lock()
	if err := s.l.file.Free(s.slot); err != nil {
		p.log.Error("account", "lease", s.Lease, "error", err)
	}
	delete(s.l.sessions, s)
	p.leavePart(s.l, s.part)
	s.l.uncount(s.ID)
	p.others()
	p.mu.Unlock()
	close(s.done)
}

// OnEnd implements owner.Workers. Sessions that ended while no daemon ran are
// reported at once.
func (p *Pool) OnEnd(f func(lease.Session, string)) {
	p.mu.Lock()
	missed := p.missed
	p.onEnd, p.missed = f, nil
	p.mu.Unlock()
	for _, m := range missed {
		p.forget(m, f, true)
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

// End implements owner.Workers. Total can be called for the lease until Forget.
func (p *Pool) End(ctx context.Context, id string) error {
	p.mu.Lock()
	l := p.leases[id]
	if l == nil || l.file == nil {
		p.mu.Unlock()
		return nil
	}
	l.ending = true
	var all []*session
	for s := range l.sessions {
		all = append(all, s)
		if s.why == "" {
			s.why, s.meant = "the lease ended", true
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

// kill kills the session's process. mu is held, and a process is not reaped before watch
// has seen its end, so the process id is still its own.
func (s *session) kill() {
	switch {
	case s.proc != nil:
		_ = s.proc.Cmd.Process.Kill()
	case s.pidfd != nil:
		_ = unix.PidfdSendSignal(int(s.pidfd.Fd()), unix.SIGKILL, nil, 0)
	}
}

// others writes into each account how many sessions of other leases compute on its GPUs.
// mu is held.
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

// Close ends the workers that have no client. Sessions live on.
func (p *Pool) Close() {
	p.mu.Lock()
	p.closed = true
	var all []*worker
	for _, ps := range p.warm {
		all = append(all, ps...)
	}
	p.warm = map[string][]*worker{}
	for _, l := range p.leases {
		l.broker.Close() // the next daemon's broker serves the sessions
	}
	p.closeSchedules()
	p.mu.Unlock()
	p.stopStores()
	p.stopRoom()
	for _, w := range all {
		p.discard(w)
	}
	p.filling.Wait()
}
