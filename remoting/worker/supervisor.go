package worker

// The supervisor decides which clients may start a session, and how much all sessions may hold.
//
//	accept -> hello (one goroutine per connection, 5 s) ->
//	    lease kind:    a lease with a random token; its connection is its life
//	    other kinds:   a session process takes the socket and a slot of the
//	                   lease's account; once it has been reaped, its slot is freed
//
// mu guards leases and sessions; the book has a lock of its own. One process
// is always started ahead, so that a client does not wait for the driver.

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// Limits of a worker.
const (
	helloTime   = 5 * time.Second
	maxHellos   = 128 // connections that have not said HELLO yet
	maxSessions = 512
	probeTime   = 2 * time.Minute
)

// Config is a worker's configuration.
type Config struct {
	Listen    string // tcp:HOST:PORT or unix:PATH
	Devices   []int
	Mem       uint64 // bytes offered of each device, 0 for all it has
	Keepalive time.Duration
	Grace     time.Duration // how long a session waits for a client whose connection was lost; 0: not at all
	Plain     bool          // clients may not compress what they send
	RDMA      control.RDMA  // which sessions are offered RDMA
	Bulk      int           // bulk connections of a session for each direction; 0: none
	Session   SessionConfig
	Turns     *Turns // how the devices' time is shared; nil: as the driver does
	// Exe and Args start a session process ("session" is appended) or the
	// probe ("probe"). Empty means this program.
	Exe  string
	Args []string
}

// Supervisor runs a worker.
type Supervisor struct {
	log   *slog.Logger
	cfg   Config
	facts *control.Facts
	book  *account.Book
	turns *schedules // nil when devices are not shared by turns
	spawn chan func()

	mu       sync.Mutex
	leases   map[[16]byte]*lease
	sessions int
	warm     *control.Process
	closed   bool
	wg       sync.WaitGroup
}

// lease is a lease and the processes of its sessions.
type lease struct {
	*account.Lease
	token   [16]byte
	procs   map[*control.Process]bool
	own     bool // the default lease: it lives as long as its sessions
	tenants []int
	broker  *exchange.Broker // of the exports of its sessions
}

// New asks the driver about the devices and prepares a worker.
func New(ctx context.Context, log *slog.Logger, cfg Config) (*Supervisor, error) {
	if cfg.Exe == "" {
		exe, err := os.Executable()
		if err != nil {
			return nil, fmt.Errorf("own path: %w", err)
		}
		cfg.Exe = exe
	}
	if len(cfg.Devices) == 0 || len(cfg.Devices) > wire.MaxDevices {
		return nil, fmt.Errorf("%d devices: give 1 to %d by --device", len(cfg.Devices), wire.MaxDevices)
	}
	st, err := store.Open(cfg.Session.Store, cfg.Session.Bounds)
	if err != nil {
		return nil, err
	}
	if err := st.Clean(time.Now()); err != nil {
		return nil, err
	}
	if ct := cfg.Session.openContent(log); ct != nil {
		if err := ct.Clean(time.Now()); err != nil { // nothing that is wrong with content ends a worker
			log.Error("what unfinished pieces of content have left is not removed", "error", err)
		}
	}
	s := &Supervisor{log: log, cfg: cfg, leases: make(map[[16]byte]*lease), spawn: make(chan func())}
	go s.spawner()
	var why error
	s.facts, s.cfg.Session.Sandbox, why, err = control.Choose(cfg.Session.Sandbox, func(m sandbox.Mode) (*control.Facts, error) { return s.probe(ctx, m) })
	if err != nil {
		return nil, err
	}
	if why != nil {
		log.Warn("the sandbox of sessions is not whole", "sandbox", s.cfg.Session.Sandbox, "error", why)
	}
	if s.facts.Pageable() && (why != nil || !s.cfg.Session.Sandbox.Files()) {
		log.Warn("clients can take their sessions over", "devices", cfg.Devices, "reason", control.PageableReason+", and sessions have no sandbox; "+control.PageableRemedy+", or start the worker with --sandbox on")
	}
	var offered []uint64
	for i := range s.facts.Snapshot.Devices {
		d := &s.facts.Snapshot.Devices[i]
		n := d.PhysicalMem &^ (account.Granule - 1)
		if cfg.Mem > n {
			return nil, fmt.Errorf("device %d: --mem asks for %d MiB, it has %d", cfg.Devices[i], cfg.Mem>>20, n>>20)
		}
		if cfg.Mem > 0 {
			n = cfg.Mem
		}
		offered = append(offered, n)
		log.Info("device", "device", cfg.Devices[i], "name", d.Name, "offered_mib", n>>20, "physical_mib", d.PhysicalMem>>20,
			"context_mib", s.facts.Overhead[i]>>20, "driver", s.facts.Snapshot.DriverString)
	}
	s.book = account.NewBook(offered)
	if cfg.Turns != nil {
		if s.turns, err = newSchedules(cfg.Turns, len(cfg.Devices)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// spawner starts all processes on one thread that never ends: the kernel
// kills a child with PDEATHSIG when the thread that made it ends.
func (s *Supervisor) spawner() {
	runtime.LockOSThread()
	for f := range s.spawn {
		f()
	}
}

func (s *Supervisor) command(sub string, mode sandbox.Mode) *exec.Cmd {
	c := control.Command{
		Exe: s.cfg.Exe, Args: s.cfg.Args, LibCUDA: s.cfg.Session.Driver.LibCUDA, LibNVML: s.cfg.Session.Driver.LibNVML,
		Store: s.cfg.Session.Store, Limit: s.cfg.Session.Bounds.Limit, KeepFree: s.cfg.Session.Bounds.KeepFree, Sandbox: mode,
		Content: s.cfg.Session.Content, ContentLimit: s.cfg.Session.ContentBounds.Limit, ContentKeepFree: s.cfg.Session.ContentBounds.KeepFree,
	}
	for _, d := range s.cfg.Devices {
		c.Devices = append(c.Devices, strconv.Itoa(d))
	}
	cmd := c.Cmd(sub)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// on runs f on the spawner's thread.
func (s *Supervisor) on(f func() error) error {
	ch := make(chan error, 1)
	s.spawn <- func() { ch <- f() }
	return <-ch
}

// probe has a process of its own ask the driver.
func (s *Supervisor) probe(ctx context.Context, mode sandbox.Mode) (*control.Facts, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	cmd := s.command("probe", mode)
	var out strings.Builder
	cmd.Stdout = &out
	if err := s.on(cmd.Start); err != nil {
		return nil, fmt.Errorf("probe: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	if err := cmd.Wait(); err != nil {
		return nil, fmt.Errorf("the driver could not be asked (see above): %w", err)
	}
	return control.ReadFacts([]byte(out.String()), len(s.cfg.Devices))
}

// start starts a session process that waits for its client.
func (s *Supervisor) start() (*control.Process, error) {
	cmd := s.command("session", s.cfg.Session.Sandbox)
	return control.Spawn(s.log, cmd, func() error { return s.on(cmd.Start) })
}

// take gives the process that was started ahead, or a new one, and starts the
// next.
func (s *Supervisor) take() (*control.Process, error) {
	s.mu.Lock()
	p := s.warm
	s.warm = nil
	s.mu.Unlock()
	if p != nil && p.Ended() { // it died waiting
		p.Ctl.Close()
		p = nil
	}
	var err error
	if p == nil {
		p, err = s.start()
	}
	go s.prepare()
	return p, err
}

// prepare starts a process ahead.
func (s *Supervisor) prepare() {
	s.mu.Lock()
	have := s.warm != nil || s.closed
	s.mu.Unlock()
	if have {
		return
	}
	p, err := s.start()
	if err != nil {
		s.log.Error("no session process started ahead", "error", err)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.warm != nil || s.closed {
		go p.End()
		return
	}
	s.warm = p
}

// Serve accepts clients until ctx ends.
func (s *Supervisor) Serve(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	if s.turns != nil {
		go s.turns.sweep(ctx)
	}
	defer stop()
	go s.prepare()
	var silent silentConns
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				s.close()
				return nil
			}
			if errors.Is(err, net.ErrClosed) {
				s.close()
				return fmt.Errorf("accept: %w", err)
			}
			s.log.Warn("accept", "error", err)
			time.Sleep(50 * time.Millisecond)
			continue
		}
		silent.add(c)
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			s.hello(c, func() { silent.remove(c) })
		}()
	}
}

// close ends all sessions and leases.
func (s *Supervisor) close() {
	s.mu.Lock()
	s.closed = true
	var ps []*control.Process
	for _, l := range s.leases {
		for p := range l.procs {
			ps = append(ps, p)
		}
	}
	if s.warm != nil {
		ps = append(ps, s.warm)
		s.warm = nil
	}
	s.mu.Unlock()
	endAll(ps)
}

// endAll ends processes at once: the kernel needs a while for each.
func endAll(ps []*control.Process) {
	var all sync.WaitGroup
	for _, p := range ps {
		all.Go(p.End)
	}
	all.Wait()
}

// refuse tells a client why not, and closes.
func refuse(c net.Conn, status uint32, reason string) {
	_ = c.SetDeadline(time.Now().Add(helloTime))
	_, _ = c.Write(wire.AppendWelcome(nil, status, []byte(reason)))
	if t, ok := c.(interface{ CloseWrite() error }); ok {
		// Close with the client's bytes unread would take the reason back.
		_ = t.CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<20))
	}
	c.Close()
}

// hello reads a connection's HELLO and acts on it; said is called once it is no
// longer one of those that have said nothing.
func (s *Supervisor) hello(c net.Conn, said func()) {
	var once sync.Once
	done := func() { once.Do(said) }
	defer done()
	_ = c.SetDeadline(time.Now().Add(helloTime))
	var b [wire.HelloSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		s.log.Info("client said nothing", "from", c.RemoteAddr(), "error", err)
		c.Close()
		return
	}
	done()
	_ = c.SetDeadline(time.Time{})
	var h wire.Hello
	if err := h.Decode(&b); err != nil {
		s.log.Info("client refused", "from", c.RemoteAddr(), "error", err)
		c.Close()
		return
	}
	status, err := judge(&h)
	if err != nil {
		s.log.Warn("client refused", "from", c.RemoteAddr(), "client", h.Program, "pid", h.PID, "reason", err)
		refuse(c, status, err.Error())
		return
	}
	if h.Kind == wire.SessionLease {
		s.serveLease(c, &h)
		return
	}
	switch h.Kind {
	case wire.SessionAttach:
		s.pass(c, &h, (*exchange.Broker).Attach)
		return
	case wire.SessionBulk:
		s.pass(c, &h, (*exchange.Broker).Bulk)
		return
	case wire.SessionTrace:
		refuse(c, wire.StatusLease, "a worker that was started by hand gives no traces of sessions that run; start the program with sluice trace")
		return
	}
	s.serveSession(c, &h)
}

func judge(h *wire.Hello) (uint32, error) {
	switch {
	case h.Version != wire.Version:
		return wire.StatusVersion, fmt.Errorf("client speaks protocol version %d, this worker version %d; install the same release on both sides", h.Version, wire.Version)
	case !wire.SessionKnown(h.Kind):
		return wire.StatusVersion, fmt.Errorf("client asks for session kind %d, which this worker does not know", h.Kind)
	}
	return 0, nil
}

// serveLease grants a lease for as long as the connection stands.
func (s *Supervisor) serveLease(c net.Conn, h *wire.Hello) {
	defer c.Close()
	if tc, ok := c.(*net.TCPConn); ok {
		tune(tc, s.cfg.Keepalive)
	}
	var token [16]byte
	if _, err := rand.Read(token[:]); err != nil {
		refuse(c, wire.StatusInternal, err.Error())
		return
	}
	granted, err := s.book.Grant(h.Mem)
	if err != nil {
		s.log.Warn("lease refused", "client", h.Program, "pid", h.PID, "reason", err)
		refuse(c, wire.StatusNoMemory, err.Error())
		return
	}
	l := &lease{Lease: granted, token: token, procs: make(map[*control.Process]bool), broker: exchange.NewBroker(s.log)}
	if l.tenants, err = s.turns.add(shortToken(token), granted); err != nil {
		s.log.Warn("lease refused", "client", h.Program, "pid", h.PID, "reason", err)
		refuse(c, wire.StatusBusy, err.Error())
		granted.End()
		return
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.turns.remove(l.tenants)
		granted.End()
		return
	}
	s.leases[token] = l
	s.mu.Unlock()
	s.log.Info("lease granted", "lease", shortToken(token), "client", h.Program, "pid", h.PID, "mib", granted.Cap(0)>>20)
	_ = c.SetWriteDeadline(time.Now().Add(helloTime))
	_, err = c.Write(wire.AppendWelcome(nil, wire.StatusOK, token[:]))
	_ = c.SetWriteDeadline(time.Time{})
	if err == nil {
		// Nothing is expected; the end is what counts.
		_, _ = io.Copy(io.Discard, c)
	}
	if s.cfg.Grace > 0 {
		s.outlast(l)
	}
	s.endLease(l)
	s.log.Info("lease ended", "lease", shortToken(token))
}

// outlast keeps a lease whose connection has ended until its last session has: that connection may have been lost with theirs.
func (s *Supervisor) outlast(l *lease) {
	for l.Sessions() > 0 {
		s.mu.Lock()
		closed := s.closed
		s.mu.Unlock()
		if closed {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// endLease kills the lease's sessions and takes the memory back.
func (s *Supervisor) endLease(l *lease) {
	s.mu.Lock()
	delete(s.leases, l.token)
	var ps []*control.Process
	for p := range l.procs {
		ps = append(ps, p)
	}
	s.mu.Unlock()
	l.End()
	endAll(ps)
	s.turns.remove(l.tenants)
}

// shortToken names a lease in the log without giving its token away.
func shortToken(t [16]byte) string { return fmt.Sprintf("%x", t[:4]) }

// claim gives a client a slot of its lease.
func (s *Supervisor) claim(h *wire.Hello) (l *lease, slot int, status uint32, err error) {
	// Until the slot is taken, the end of another session could end the default lease.
	s.mu.Lock()
	defer s.mu.Unlock()
	if l, status, err = s.find(h.Token); err != nil {
		return nil, 0, status, err
	}
	slot, err = l.Claim(account.Client{PID: h.PID, Name: h.Program}, h.Kind)
	if errors.Is(err, account.ErrFull) {
		return nil, 0, wire.StatusBusy, err
	} else if err != nil {
		return nil, 0, wire.StatusLease, err
	}
	return l, slot, 0, nil
}

// find gives the lease of a token; the zero token is the default lease, which
// is made when it is needed. mu is held.
func (s *Supervisor) find(token [16]byte) (*lease, uint32, error) {
	if s.closed {
		return nil, wire.StatusBusy, errors.New("the worker is stopping")
	}
	if l := s.leases[token]; l != nil {
		return l, 0, nil
	}
	if token != ([16]byte{}) {
		return nil, wire.StatusLease, fmt.Errorf("lease %s is not known here, or has ended", shortToken(token))
	}
	if s.cfg.Mem == 0 {
		return nil, wire.StatusLease, errors.New("no lease given: use sluice run, or start the worker with --mem")
	}
	granted, err := s.book.Grant(0)
	if err != nil {
		return nil, wire.StatusNoMemory, err
	}
	l := &lease{Lease: granted, procs: make(map[*control.Process]bool), own: true, broker: exchange.NewBroker(s.log)}
	if l.tenants, err = s.turns.add(shortToken(token), granted); err != nil {
		granted.End()
		return nil, wire.StatusBusy, err
	}
	s.leases[token] = l
	return l, 0, nil
}

// serveSession hands a client to a session process and keeps its account.
func (s *Supervisor) serveSession(c net.Conn, h *wire.Hello) {
	log := s.log.With("client", h.Program, "pid", h.PID)
	s.mu.Lock()
	busy := s.sessions >= maxSessions
	if !busy {
		s.sessions++
	}
	s.mu.Unlock()
	if busy {
		refuse(c, wire.StatusBusy, fmt.Sprintf("the worker has %d sessions, which is its limit", maxSessions))
		return
	}
	defer func() {
		s.mu.Lock()
		s.sessions--
		s.mu.Unlock()
	}()
	l, slot, status, err := s.claim(h)
	if err != nil {
		log.Warn("client refused", "reason", err)
		refuse(c, status, err.Error())
		return
	}
	release := func() {}
	defer func() { release() }() // once its memory is free for others
	defer s.closeSession(l, slot)
	p, err := s.take()
	if err != nil {
		log.Error("no session process", "error", err)
		refuse(c, wire.StatusInternal, err.Error())
		return
	}
	defer p.End()
	s.mu.Lock()
	live := s.leases[l.token] == l && !s.closed
	if live {
		l.procs[p] = true
	}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(l.procs, p)
		s.mu.Unlock()
	}()
	if !live {
		refuse(c, wire.StatusLease, "the lease has ended")
		return
	}
	if err := s.hand(p, c, h, l, slot); err != nil {
		log.Error("session not started", "error", err)
		refuse(c, wire.StatusInternal, err.Error())
		return
	}
	release = control.Hold(c)
	c.Close() // the process has its own descriptor
	<-p.Done
	s.turns.gone(p.Cmd.Process.Pid)
	log.Info("session over", "status", p.Cmd.ProcessState.String())
}

// pass passes a client's further connection to its session.
func (s *Supervisor) pass(c net.Conn, h *wire.Hello, how func(b *exchange.Broker, slot, fd int, raw bool) error) {
	s.mu.Lock()
	l := s.leases[h.Token]
	s.mu.Unlock()
	if l == nil || h.Mem >= account.MaxSlots {
		refuse(c, wire.StatusLease, noSuchSession)
		return
	}
	f, err := socketOf(c)
	if err == nil {
		err = how(l.broker, int(h.Mem), int(f.Fd()), false)
		f.Close()
	}
	switch {
	case errors.Is(err, exchange.ErrAbsent):
		refuse(c, wire.StatusLease, noSuchSession)
	case err != nil:
		refuse(c, wire.StatusBusy, err.Error())
	default:
		c.Close()
	}
}

const noSuchSession = "there is no such session here, or it has ended"

// socketOf gives a descriptor of a connection's socket.
func socketOf(c net.Conn) (*os.File, error) {
	fc, ok := c.(interface{ File() (*os.File, error) })
	if !ok {
		return nil, fmt.Errorf("connection of type %T has no descriptor", c)
	}
	f, err := fc.File()
	if err != nil {
		return nil, fmt.Errorf("client's socket: %w", err)
	}
	return f, nil
}

// closeSession gives back what a session held, and the default lease with its
// last session.
func (s *Supervisor) closeSession(l *lease, slot int) {
	l.broker.Leave(slot)
	l.Free(slot)
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.own && l.Sessions() == 0 && s.leases[l.token] == l {
		delete(s.leases, l.token)
		l.End()
		s.turns.remove(l.tenants)
	}
}

// hand sends START with the client's socket.
func (s *Supervisor) hand(p *control.Process, c net.Conn, h *wire.Hello, l *lease, slot int) error {
	f, err := socketOf(c)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := l.Bind(slot, p.Cmd.Process.Pid); err != nil {
		return fmt.Errorf("session process: %w", err)
	}
	st := control.Start{Facts: *s.facts, Lease: shortToken(l.token), Slot: slot, Hello: *h}
	st.Snapshot.KeepaliveMS = uint32(s.cfg.Keepalive / time.Millisecond)
	st.GraceMS = uint32(s.cfg.Grace / time.Millisecond)
	st.Compress = !s.cfg.Plain
	st.Bulk, st.RDMA = uint32(s.cfg.Bulk), s.cfg.RDMA
	st.Snapshot.Devices = append([]wire.Device(nil), s.facts.Snapshot.Devices...)
	for i := range st.Snapshot.Devices {
		st.Snapshot.Devices[i].TotalMem = l.Cap(i)
	}
	// File sets the descriptor's mode for everybody who shares it; the
	// session process sets what it needs itself.
	fds := []int{int(f.Fd()), l.FD()}
	if wire.SessionComputes(h.Kind) {
		link, end, err := exchange.Connect()
		if err != nil {
			return fmt.Errorf("exchange: %w", err)
		}
		defer end.Close()
		l.broker.Join(slot, link)
		st.Exchange, fds = true, append(fds, int(end.Fd()))
		st.Turns, fds = s.turns.share(len(st.Snapshot.Devices), l.tenants, fds)
	}
	return p.Give(&st, fds...)
}

func tune(c *net.TCPConn, keepalive time.Duration) {
	if r, err := c.SyscallConn(); err == nil {
		_ = r.Control(func(fd uintptr) { _ = wire.Tune(int(fd), keepalive) })
	}
}
