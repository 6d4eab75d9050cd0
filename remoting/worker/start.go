package worker

// A session process from start to end. It is started before its client is
// known: it loads the driver, then waits on its control socket for the one
// START message, which brings the client's socket and everything the
// supervisor knows.

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/verbs"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// SessionConfig is what a session process is started with.
type SessionConfig struct {
	Driver  Driver
	Store   string
	Bounds  store.Bounds // of the store
	Sandbox sandbox.Mode
	// Content is the directory that keeps what copies to the GPU have brought. Unless its bounds have a limit nothing is kept.
	Content       string
	ContentBounds store.Bounds
}

// relist is how old a session's count of the files of content may be.
const relist = 2 * time.Second

// openContent opens the store of content, nil if there is to be none. Without it programs send everything, so nothing
// that is wrong with it ends a session.
func (c *SessionConfig) openContent(log *slog.Logger) *store.Store {
	if c.ContentBounds.Limit == 0 {
		return nil
	}
	b := c.ContentBounds
	b.Relist = relist
	b.Damaged = func(err error) { log.Warn("content sent again", "error", err) }
	st, err := store.Open(c.Content, b)
	if err != nil {
		log.Error("content of copies to the GPU is not stored: programs send it again", "error", err)
		return nil
	}
	return st
}

// RunSession is the main function of a session process. It returns when there
// was no session to run, and otherwise leaves the process itself.
func RunSession(log *slog.Logger, cfg SessionConfig) error {
	// The log may be a pipe whose reader is gone; that ends no session.
	signal.Ignore(unix.SIGPIPE)
	var out prints
	if err := out.open(); err != nil {
		return err
	}
	bad := openDriver(cfg.Driver.LibCUDA)
	haveNVML := bad == nil && openNVML(log, cfg.Driver.LibNVML)
	log = limitLog(log)
	in, err := receive(log, &cfg)
	if err != nil || in == nil {
		return err
	}
	st, fds, acct, fd := in.Start, in.fds, in.acct, in.fds[0]
	log = log.With("lease", st.Lease, "client", st.Hello.Program, "pid", st.Hello.PID)
	c, err := openClient(log, st, fd)
	if err != nil {
		return err
	}
	refuse := func(err error) error {
		_ = c.hello.Raw(wire.AppendWelcome(nil, wire.StatusInternal, []byte(err.Error())))
		acct.SetReason(err.Error())
		return err
	}
	cfg.Bounds.Damaged = func(err error) { log.Error("image sent again", "error", err) }
	images, err := store.Open(cfg.Store, cfg.Bounds)
	if err = errors.Join(bad, err); err != nil {
		return refuse(err)
	}
	s, err := newSession(log, c.stream, acct, images)
	if err != nil {
		return err
	}
	s.shm = c.pass >= 0
	s.counts, s.network, s.compressed.counts, s.reason = acct.Counts(), acct.Link(), acct.Compress(), acct.SetReason
	s.configure(st, c.keepalive)
	if !s.shm && wire.SessionComputes(s.kind) {
		s.contents.init(cfg.openContent(log))
	}
	if err := s.openGates(st, acct, fds[len(fds)-2*st.Schedules():]); err != nil {
		return refuse(err)
	}
	if st.Exchange {
		if err := s.ipc.join(st.Slot, fds[len(fds)-2*st.Schedules()-1]); err != nil {
			return refuse(err)
		}
	}
	s.prints.fds = out.fds
	if err := s.prints.start(); err != nil {
		return err
	}
	if haveNVML {
		s.nvml = newNVML(busIDs(&st.Snapshot))
	}
	if c.again != nil {
		c.again.cuts, c.again.cut = acct.Cuts(), acct.Cut
	}
	s.takeConnections(c, st)
	if !c.welcome(log, &s.snap, st.Hello.Fingerprint == apiFingerprint) {
		return nil
	}
	log.Info("session started")
	s.watchEnds(c, st.Detached)
	go s.beat()
	go s.prints.pump(s)
	go s.mem.keepMeasured()
	s.watchHostMemory(st.HostMemory)
	err = s.run()
	s.ipc.withdrawAll()
	s.gates.Quit()
	if err != nil {
		wire.Flush(c.stream, lingerTime)
		s.linger(fd)
	}
	s.placeImage()
	s.settleStores()
	s.exit(0)
	return nil
}

// takeConnections says who gets further connections of the lease's.
func (s *session) takeConnections(c *client, st *control.Start) {
	if s.ipc.exports == nil {
		return
	}
	if !s.shm {
		s.bulk.most = int(min(st.Bulk, wire.MaxBulk))
	}
	s.ipc.exports.OnAttach(c.attachable())
	s.ipc.exports.OnTrace(s.traceTo)
	s.ipc.exports.OnBulk(s.bulk.take)
}

// watchEnds ends the process when the client is gone, or its starter, from which a detached session has parted.
func (s *session) watchEnds(c *client, detached bool) {
	var ends []int
	if c.again != nil {
		go s.outlive(c.again)
	} else {
		ends = append(ends, c.fd)
	}
	if !detached {
		ends = append(ends, control.FD)
	}
	if len(ends) > 0 {
		go s.watch(ends...)
	}
}

// incoming is a session that is to begin.
type incoming struct {
	*control.Start
	fds  []int
	acct *account.Session
}

// receive waits for the one START message, opens the lease's account and confines the process,
// and for a detached session hears the client. It returns nil if there is no session to run.
func receive(log *slog.Logger, cfg *SessionConfig) (*incoming, error) {
	st, fds, err := control.Receive()
	if err != nil || st == nil {
		return nil, err
	}
	// The account is root's, and bind gives root up.
	acct, err := openAccount(st, fds[1:])
	if err == nil && st.SharedDir {
		at := len(fds) - 2*st.Schedules() - 1
		if st.Exchange {
			at--
		}
		err = setSharedDir(fds[at], unix.O_CLOEXEC)
	}
	if err == nil && st.Bind != nil {
		err = bind(st.Bind)
	}
	if err == nil {
		err = cfg.filter(log, st.Bind)
	}
	if st.Detached {
		control.Answer(err)
	}
	if err != nil {
		return nil, err
	}
	if st.Detached {
		if err := readHello(fds[0], &st.Hello); err != nil {
			acct.SetReason(err.Error())
			log.Info("client refused", "lease", st.Lease, "reason", err)
			return nil, nil
		}
		files := fds[2:]
		if st.Part {
			files = files[1:]
		}
		if err := cfg.giveStore(st, files); err != nil {
			return nil, err
		}
		acct.SetClient(account.Client{PID: st.Hello.PID, Name: st.Hello.Program}, st.Hello.Kind)
	}
	return &incoming{st, fds, acct}, nil
}

// filter takes from the process what a session needs none of: capabilities, if bind has not done so, and system calls.
func (c *SessionConfig) filter(log *slog.Logger, b *control.Bind) error {
	if b != nil {
		if !b.Seccomp {
			return nil
		}
		if err := loadFilter(log, c.Sandbox); err != nil {
			return fmt.Errorf("seccomp: %w; set worker.seccomp: false to run without it", err)
		}
		return nil
	}
	if c.Sandbox == sandbox.Off {
		return nil
	}
	err := dropCaps()
	if err == nil {
		err = loadFilter(log, c.Sandbox)
	}
	if err != nil && c.Sandbox == sandbox.Auto {
		log.Warn("a session goes without a sandbox of its system calls", "error", err)
		return nil
	}
	return err
}

// loadFilter refuses system calls from here on.
func loadFilter(log *slog.Logger, mode sandbox.Mode) error {
	if mode != sandbox.Log {
		return sandbox.Load(mode, nil)
	}
	l, err := newListener()
	if err != nil {
		return err
	}
	go l.each(func(call string) { log.Warn("the sandbox would refuse a system call", "call", call) })
	return sandbox.Load(mode, l.listen)
}

// client is the connection to a session's client before the session runs.
type client struct {
	fd        int
	keepalive time.Duration
	hello     *wire.Writer  // on the socket, for the WELCOME
	stream    wire.Stream   // of the frames
	pass      int           // the shared memory that goes to the client, -1 for none
	again     *resumption   // nil if the session ends with its connection
	rdma      *verbs.Stream // offered to the client, nil if it is not
}

// openClient makes the stream of a session's frames: shared memory for a client on this
// machine, which the snapshot then says, the socket for others.
func openClient(log *slog.Logger, st *control.Start, fd int) (*client, error) {
	c := &client{fd: fd, pass: -1, keepalive: time.Duration(st.Snapshot.KeepaliveMS) * time.Millisecond}
	if err := wire.Tune(fd, c.keepalive); err != nil {
		log.Warn("socket options", "error", err)
	}
	sock, err := wire.NewSocketStream(fd, c.keepalive)
	if err != nil {
		return nil, err
	}
	c.hello, c.stream = wire.NewWriter(sock), sock
	if st.Compress && st.Hello.Features&wire.FeatureCompress != 0 && wire.SessionComputes(st.Hello.Kind) {
		st.Snapshot.Features |= wire.FeatureCompress
	}
	c.offerRDMA(log, st)
	if st.Hello.Features&wire.FeatureShm == 0 || !wire.SessionComputes(st.Hello.Kind) || !isUnix(fd) {
		if c.again, err = newResumption(log, st, fd, c.keepalive); c.again != nil {
			c.stream = c.again.stream
			st.Snapshot.Features |= wire.FeatureResume
		}
		return c, err
	}
	m, pass, err := wire.NewShmStream(fd, c.keepalive)
	if err != nil {
		log.Warn("no shared memory: the socket serves instead", "error", err)
		return c, nil
	}
	c.stream, c.pass = m, pass
	st.Snapshot.Features = st.Snapshot.Features&^wire.FeatureCompress | wire.FeatureShm
	return c, nil
}

// welcome tells the client that its session has begun, one of another release also what this worker knows. It returns false
// if the client has gone.
func (c *client) welcome(log *slog.Logger, snap *wire.Snapshot, same bool) bool {
	var e, forms wire.Encoder
	var b []byte
	snap.Encode(&e)
	if !same {
		for i := range apiForms {
			apiForms[i].Encode(&forms)
		}
		b = wire.AppendWelcome(b, wire.StatusForms, forms.Buf())
	}
	if err := c.hello.Raw(wire.AppendWelcome(b, wire.StatusOK, e.Buf())); err != nil {
		return false
	}
	if c.again != nil && c.hello.Raw(c.again.resumable()) != nil {
		return false
	}
	if c.rdma != nil {
		return c.agreeRDMA(log)
	}
	if c.pass < 0 {
		return true
	}
	if err := unix.Sendmsg(c.fd, []byte{0}, unix.UnixRights(c.pass), nil, unix.MSG_NOSIGNAL); err != nil {
		return false
	}
	unix.Close(c.pass)
	return true
}

func busIDs(snap *wire.Snapshot) (ids []string) {
	for i := range snap.Devices {
		ids = append(ids, snap.Devices[i].PCIBusID)
	}
	return ids
}

// giveStore has a detached session use the stores that came with its START.
func (c *SessionConfig) giveStore(st *control.Start, fds []int) error {
	c.Store = fmt.Sprintf("/proc/self/fd/%d/.", fds[0])
	c.Bounds = store.Bounds{Limit: st.StoreLimit, Total: st.StoreTotal, KeepFree: st.StoreKeepFree}
	fds = fds[1:]
	var err error
	if st.StoreTotal != 0 {
		if c.Bounds.Shared, err = store.OpenShared(os.NewFile(uintptr(fds[0]), "all images")); err != nil {
			return err
		}
		fds = fds[1:]
	}
	c.ContentBounds = store.Bounds{Limit: st.ContentLimit, Total: st.ContentTotal, KeepFree: st.ContentKeepFree}
	if st.ContentLimit == 0 {
		return nil
	}
	c.Content = fmt.Sprintf("/proc/self/fd/%d/.", fds[0])
	c.ContentBounds.Shared, err = store.OpenShared(os.NewFile(uintptr(fds[1]), "all content"))
	return err
}

// openAccount opens the session's slot of its lease's account, and the part of the lease that it belongs to, if it does. fds begin with theirs.
// What bounds the session comes with START: another session of the lease can write anything into the files.
func openAccount(st *control.Start, fds []int) (*account.Session, error) {
	var own []uint64
	for _, d := range st.Snapshot.Devices {
		own = append(own, d.TotalMem)
	}
	granted := own
	if st.Part {
		granted = st.Grants
	}
	f, err := account.FromFD(fds[0], granted)
	if err != nil {
		return nil, err
	}
	if f.Devices() != len(own) {
		return nil, fmt.Errorf("account of %d devices, %d are given", f.Devices(), len(own))
	}
	s, err := f.Session(st.Slot)
	if err != nil || !st.Part {
		return s, err
	}
	part, err := account.PartFromFD(fds[1], own)
	if err != nil {
		return nil, err
	}
	return s, s.Join(part)
}

// readHello reads the HELLO of a client that nobody has spoken with yet; h.Kind is the
// kind of session that was asked for. If it returns an error, it has sent the refusal to the client.
func readHello(fd int, h *wire.Hello) error {
	// Blocking calls with a time limit, as NewSocketStream wants the socket anyway.
	if err := unix.SetNonblock(fd, false); err != nil {
		return fmt.Errorf("client's socket: %w", err)
	}
	var b [wire.HelloSize]byte
	if err := readWithin(fd, b[:], helloTime); err != nil {
		return err
	}
	asked := h.Kind
	if err := h.Decode(&b); err != nil {
		return err
	}
	status, err := judge(h)
	if err == nil && h.Kind != asked {
		status, err = wire.StatusVersion, fmt.Errorf("client asked for a session of kind %d and says hello as kind %d", asked, h.Kind)
	}
	if err == nil && !wire.SessionOpens(h.Kind) {
		status, err = wire.StatusVersion, errors.New("a lease asks for a lease: unset SLUICE_WORKER inside of one")
	}
	if err != nil {
		_, _ = unix.Write(fd, wire.AppendWelcome(nil, status, []byte(err.Error())))
		_ = unix.Shutdown(fd, unix.SHUT_WR)
	}
	return err
}

// readWithin fills b from a blocking socket.
func readWithin(fd int, b []byte, limit time.Duration) error {
	until := time.Now().Add(limit)
	for n := 0; n < len(b); {
		left := time.Until(until)
		tv := unix.NsecToTimeval(max(left, time.Millisecond).Nanoseconds())
		_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
		k, err := unix.Read(fd, b[n:])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil || k == 0 || left <= 0:
			return fmt.Errorf("client said no hello: %d bytes in %v", n, limit-max(left, 0))
		default:
			n += k
		}
	}
	tv := unix.Timeval{}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return fmt.Errorf("client's socket: %w", err)
	}
	return nil
}

func isUnix(fd int) bool {
	sa, err := unix.Getsockname(fd)
	_, ok := sa.(*unix.SockaddrUnix)
	return err == nil && ok
}

// configure takes over what the supervisor said.
func (s *session) configure(st *control.Start, keepalive time.Duration) {
	s.keepalive = keepalive
	s.snap = st.Snapshot
	s.compressed.agreed = st.Snapshot.Features&wire.FeatureCompress != 0
	s.overhead = st.Overhead
	s.client = account.Client{PID: st.Hello.PID, Name: st.Hello.Program}
	s.kind, s.number = st.Hello.Kind, st.Slot
	s.turns = st.Turns
	s.mem.setDevices(len(st.Snapshot.Devices), st.Idle)
}

// lingerTime is the patience with a client that does not take the last frame.
const lingerTime = 500 * time.Millisecond

// linger lets the last frame reach the client: a socket that is closed with
// unread data in it would take it back.
func (s *session) linger(fd int) {
	_ = unix.Shutdown(fd, unix.SHUT_WR)
	until := time.Now().Add(lingerTime)
	var b [64 << 10]byte
	for time.Now().Before(until) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(p, int(time.Until(until).Milliseconds())); n <= 0 || err != nil {
			return
		}
		if n, err := unix.Read(fd, b[:]); n <= 0 || err != nil {
			return
		}
	}
}
