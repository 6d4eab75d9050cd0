package worker

// A session process from start to end. It is started before its client is
// known: it loads the driver, then waits on its control socket for the one
// START message, which brings the client's socket and everything the
// supervisor knows.

/*
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// controlFD is the session process's end of its control socket.
const controlFD = 3

// SessionConfig is what a session process is started with.
type SessionConfig struct {
	Driver     Driver
	Store      string
	StoreLimit int64 // bytes
}

// start is the START message.
type start struct {
	hello    wire.Hello
	snap     wire.Snapshot // TotalMem is what the lease grants
	overhead []uint64
	idle     []uint64
}

func (st *start) encode() []byte {
	var snap, e wire.Encoder
	st.snap.Encode(&snap)
	var h [wire.HelloSize]byte
	st.hello.Encode(&h)
	e.Bytes(h[:])
	e.U32(uint32(snap.Len()))
	e.Bytes(snap.Buf())
	for i := range st.snap.Devices {
		e.U64(st.overhead[i])
		e.U64(st.idle[i])
	}
	return e.Buf()
}

func (st *start) decode(b []byte) error {
	d := wire.NewDecoder(b)
	h := d.Bytes(wire.HelloSize)
	n := d.Count(1, wire.MaxWelcome)
	snap := d.Bytes(n)
	if d.Err() != nil {
		return fmt.Errorf("start message: %w", d.Err())
	}
	if err := st.hello.Decode((*[wire.HelloSize]byte)(h)); err != nil {
		return fmt.Errorf("start message: %w", err)
	}
	if err := st.snap.Decode(snap); err != nil {
		return fmt.Errorf("start message: %w", err)
	}
	for range st.snap.Devices {
		st.overhead = append(st.overhead, d.U64())
		st.idle = append(st.idle, d.U64())
	}
	if err := d.Done(); err != nil {
		return fmt.Errorf("start message: %w", err)
	}
	return nil
}

// maxStart is the largest START message, in bytes.
const maxStart = 128 << 10

// receiveStart waits for START and the client's socket.
func receiveStart() (*start, int, error) {
	buf := make([]byte, maxStart)
	oob := make([]byte, unix.CmsgSpace(4))
	var n, on int
	var err error
	for {
		n, on, _, _, err = unix.Recvmsg(controlFD, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, 0, fmt.Errorf("control socket: %w", err)
	}
	if n == 0 {
		return nil, 0, nil // the supervisor is gone, or needs no more sessions
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil || len(msgs) != 1 {
		return nil, 0, fmt.Errorf("start message: no socket came with it")
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		return nil, 0, fmt.Errorf("start message: no socket came with it")
	}
	st := &start{}
	if err := st.decode(buf[:n]); err != nil {
		unix.Close(fds[0])
		return nil, 0, err
	}
	return st, fds[0], nil
}

// RunSession is the main function of a session process. It returns when there
// was no session to run, and otherwise leaves the process itself.
func RunSession(log *slog.Logger, cfg SessionConfig) error {
	C.sl_die_with_parent()
	out := prints{}
	if err := out.open(); err != nil {
		return err
	}
	bad := openDriver(cfg.Driver.LibCUDA)
	haveNVML := bad == nil && openNVML(log, cfg.Driver.LibNVML)
	st, fd, err := receiveStart()
	if err != nil || st == nil {
		return err
	}
	log = log.With("client", st.hello.Program, "pid", st.hello.PID, "lease", shortToken(st.hello.Token))
	keepalive := time.Duration(st.snap.KeepaliveMS) * time.Millisecond
	if err := wire.Tune(fd, keepalive); err != nil {
		log.Warn("socket options", "error", err)
	}
	sock, err := wire.NewSocketStream(fd, keepalive)
	if err != nil {
		return err
	}
	w := wire.NewWriter(sock)
	if bad != nil {
		_ = w.Raw(wire.AppendWelcome(nil, wire.StatusInternal, []byte(bad.Error())))
		return bad
	}
	images, err := store.Open(cfg.Store, cfg.StoreLimit)
	if err != nil {
		_ = w.Raw(wire.AppendWelcome(nil, wire.StatusInternal, []byte(err.Error())))
		return err
	}
	// A client on this machine gets its frames through shared memory.
	stream, pass := sock, -1
	if st.hello.Features&wire.FeatureShm != 0 && st.hello.Kind == wire.SessionCompute && isUnix(fd) {
		if m, p, err := wire.NewShmStream(fd, keepalive); err != nil {
			log.Warn("no shared memory: the socket serves instead", "error", err)
		} else {
			stream, pass = m, p
			st.snap.Features |= wire.FeatureShm
		}
	}
	var s *session
	ledger := account.NewRemote(controlCall, func(err error) { s.leave("control socket", err) })
	if s, err = newSession(log, stream, ledger, images); err != nil {
		return err
	}
	s.configure(st, keepalive)
	s.prints.fd, s.prints.buf = out.fd, out.buf
	s.prints.on.Store(true)
	if haveNVML {
		var ids []string
		for i := range st.snap.Devices {
			ids = append(ids, st.snap.Devices[i].PCIBusID)
		}
		s.nvml = newNVML(ids)
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
	go s.watch(fd, controlFD)
	go s.beat()
	go s.prints.pump(s)
	go s.mem.keepMeasured()
	if err := s.run(); err != nil {
		s.linger(fd)
	}
	s.exit(0)
	return nil
}

func isUnix(fd int) bool {
	sa, err := unix.Getsockname(fd)
	_, ok := sa.(*unix.SockaddrUnix)
	return err == nil && ok
}

// configure takes over what the supervisor said.
func (s *session) configure(st *start, keepalive time.Duration) {
	s.keepalive = keepalive
	s.snap = st.snap
	s.overhead = st.overhead
	s.client = account.Client{PID: st.hello.PID, Name: st.hello.Program}
	s.mem.setDevices(len(st.snap.Devices), st.idle)
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

// controlCall does one round trip with the supervisor.
func controlCall(req, reply []byte) (int, error) {
	if _, err := unix.SendmsgN(controlFD, req, nil, nil, unix.MSG_NOSIGNAL); err != nil {
		return 0, fmt.Errorf("control socket: %w", err)
	}
	for {
		n, err := unix.Read(controlFD, reply)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("control socket: %w", err)
		}
		if n == 0 {
			return 0, fmt.Errorf("control socket: %w", os.ErrClosed)
		}
		return n, nil
	}
}
