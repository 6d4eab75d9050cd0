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

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// SessionConfig is what a session process is started with.
type SessionConfig struct {
	Driver Driver
	Store  string
	Bounds store.Bounds // of the store
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
	st, fds, err := control.Receive()
	if err != nil || st == nil {
		return err
	}
	fd := fds[0]
	// The account is root's and is opened anew: before bind.
	acct, err := openAccount(st, fds[1])
	if err == nil && st.Bind != nil {
		err = bind(st.Bind)
	}
	if st.Detached {
		control.Answer(err)
	}
	if err != nil {
		return err
	}
	log = limitLog(log).With("lease", st.Lease)
	if st.Detached {
		if err := readHello(fd, &st.Hello); err != nil {
			acct.SetReason(err.Error())
			log.Info("client refused", "reason", err)
			return nil
		}
		if err := cfg.giveStore(st, fds[2:]); err != nil {
			return err
		}
		acct.SetClient(account.Client{PID: st.Hello.PID, Name: st.Hello.Program}, st.Hello.Kind)
	}
	log = log.With("client", st.Hello.Program, "pid", st.Hello.PID)
	snap := &st.Snapshot
	keepalive := time.Duration(snap.KeepaliveMS) * time.Millisecond
	if err := wire.Tune(fd, keepalive); err != nil {
		log.Warn("socket options", "error", err)
	}
	sock, err := wire.NewSocketStream(fd, keepalive)
	if err != nil {
		return err
	}
	w := wire.NewWriter(sock)
	cfg.Bounds.Damaged = func(err error) { log.Error("image sent again", "error", err) }
	images, err := store.Open(cfg.Store, cfg.Bounds)
	if err = errors.Join(bad, err); err != nil {
		_ = w.Raw(wire.AppendWelcome(nil, wire.StatusInternal, []byte(err.Error())))
		acct.SetReason(err.Error())
		return err
	}
	// A client on this machine gets its frames through shared memory.
	stream, pass := sock, -1
	if st.Hello.Features&wire.FeatureShm != 0 && wire.SessionComputes(st.Hello.Kind) && isUnix(fd) {
		if m, p, err := wire.NewShmStream(fd, keepalive); err != nil {
			log.Warn("no shared memory: the socket serves instead", "error", err)
		} else {
			stream, pass = m, p
			snap.Features |= wire.FeatureShm
		}
	}
	s, err := newSession(log, stream, acct, images)
	if err != nil {
		return err
	}
	s.counts, s.reason = acct.Counts(), acct.SetReason
	s.configure(st, keepalive)
	if err := s.openGates(st, fds[len(fds)-2*st.Schedules():]); err != nil {
		_ = w.Raw(wire.AppendWelcome(nil, wire.StatusInternal, []byte(err.Error())))
		acct.SetReason(err.Error())
		return err
	}
	s.prints.fds = out.fds
	if err := s.prints.start(); err != nil {
		return err
	}
	if haveNVML {
		s.nvml = newNVML(busIDs(snap))
	}

	var e wire.Encoder
	s.snap.Encode(&e)
	if err := w.Raw(wire.AppendWelcome(nil, wire.StatusOK, e.Buf())); err != nil {
		return nil
	}
	if pass >= 0 {
		if err := unix.Sendmsg(fd, []byte{0}, unix.UnixRights(pass), nil, unix.MSG_NOSIGNAL); err != nil {
			return nil
		}
		unix.Close(pass)
	}
	log.Info("session started")
	if st.Detached {
		go s.watch(fd)
	} else {
		go s.watch(fd, control.FD)
	}
	go s.beat()
	go s.prints.pump(s)
	go s.mem.keepMeasured()
	s.watchHostMemory(st.HostMemory)
	err = s.run()
	s.gates.Quit()
	if err != nil {
		s.linger(fd)
	}
	s.exit(0)
	return nil
}

func busIDs(snap *wire.Snapshot) (ids []string) {
	for i := range snap.Devices {
		ids = append(ids, snap.Devices[i].PCIBusID)
	}
	return ids
}

// giveStore has a detached session use the store that came with its START.
func (c *SessionConfig) giveStore(st *control.Start, fds []int) error {
	c.Store = fmt.Sprintf("/proc/self/fd/%d/.", fds[0])
	c.Bounds = store.Bounds{Limit: st.StoreLimit, Total: st.StoreTotal, KeepFree: st.StoreKeepFree}
	if st.StoreTotal == 0 {
		return nil
	}
	var err error
	c.Bounds.Shared, err = store.OpenShared(os.NewFile(uintptr(fds[1]), "all images"))
	return err
}

// openAccount opens the session's slot of its lease's account.
func openAccount(st *control.Start, fd int) (*account.Session, error) {
	f, err := account.FromFD(fd)
	if err != nil {
		return nil, err
	}
	if f.Devices() != len(st.Snapshot.Devices) {
		return nil, fmt.Errorf("account of %d devices, %d are given", f.Devices(), len(st.Snapshot.Devices))
	}
	return f.Session(st.Slot)
}

// readHello reads the HELLO of a client that nobody has spoken with yet; h.Kind is the
// kind of session that was asked for. A refusal has been told when it returns.
func readHello(fd int, h *wire.Hello) error {
	// Blocking calls with a time limit, as NewSocketStream wants the socket anyway.
	if err := unix.SetNonblock(fd, false); err != nil {
		return fmt.Errorf("client's socket: %w", err)
	}
	var b [wire.HelloSize]byte
	until := time.Now().Add(helloTime)
	for n := 0; n < len(b); {
		left := time.Until(until)
		tv := unix.NsecToTimeval(max(left, time.Millisecond).Nanoseconds())
		_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
		k, err := unix.Read(fd, b[n:])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil || k == 0 || left <= 0:
			return fmt.Errorf("client said no hello: %d bytes in %v", n, helloTime-max(left, 0))
		default:
			n += k
		}
	}
	tv := unix.Timeval{}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		return fmt.Errorf("client's socket: %w", err)
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

func isUnix(fd int) bool {
	sa, err := unix.Getsockname(fd)
	_, ok := sa.(*unix.SockaddrUnix)
	return err == nil && ok
}

// configure takes over what the supervisor said.
func (s *session) configure(st *control.Start, keepalive time.Duration) {
	s.keepalive = keepalive
	s.snap = st.Snapshot
	s.overhead = st.Overhead
	s.client = account.Client{PID: st.Hello.PID, Name: st.Hello.Program}
	s.kind = st.Hello.Kind
	s.turns = st.Turns
	s.mem.setDevices(len(st.Snapshot.Devices), st.Idle)
}

// linger lets the last frame reach the client: a socket that is closed with
// unread data in it would take it back.
func (s *session) linger(fd int) {
	_ = unix.Shutdown(fd, unix.SHUT_WR)
	until := time.Now().Add(500 * time.Millisecond)
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
