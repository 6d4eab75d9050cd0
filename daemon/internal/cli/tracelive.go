package cli

// The traces of a lease's sessions that run. For each process and each owner of the lease:
//
//	LEASE_REQUEST at the lease's socket -> its daemon sees by the kernel who asks, and passes a connection to the session
//	-> HELLO, TRACE_REQUEST -> WELCOME -> the trace, into a file
//
// All run at the same time, each in a goroutine of its own; nothing is shared. ^C ends each where it is: a trace that has begun is
// kept as far as it came, and of one that has not there is no file.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// askTime bounds what comes before the trace, and traceSlack what its last bytes take.
const (
	askTime    = 20 * time.Second
	traceSlack = 15 * time.Second
)

var (
	// errNoSession says that a process has no session at an owner.
	errNoSession = errors.New("no session there")
	// errStopped says that the user had enough before a trace began.
	errStopped = errors.New("stopped before a trace began; no timeline is written")
)

// traceLease writes the timeline of a lease's sessions.
func traceLease(ctx context.Context, socket, name string, d time.Duration, out string, say func(string, ...any)) error {
	name, err := jobNumber(ctx, name)
	if err != nil {
		return err
	}
	ls, err := leases(ctx, socket)
	if err != nil {
		return err
	}
	id, err := named(ls, name)
	if err != nil {
		return err
	}
	if socket == "" {
		socket = defaultSocket()
	}
	at := slices.IndexFunc(ls, func(l lease.Status) bool { return l.ID == id })
	if at < 0 {
		return fmt.Errorf("lease %s is not on this node, or not yours; see sluice list", id)
	}
	l := &ls[at]
	pids := clients(l)
	if len(pids) == 0 {
		return fmt.Errorf("lease %s has no sessions now: no program in it uses a GPU; see sluice list --sessions", short(id))
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGINT, unix.SIGTERM) // before there is a folder, which a signal would leave behind
	defer stop()
	c, err := collect(out)
	if err != nil {
		return err
	}
	path := filepath.Join(filepath.Dir(socket), "leases", id, "sock")
	say("tracing %d processes of lease %s for %v", len(pids), short(id), d)
	if err := traceAll(ctx, path, pids, len(lease.Owners(l.Grants)), d, c.dir, say); err != nil {
		c.drop()
		return fmt.Errorf("lease %s: %w", short(id), err)
	}
	if !c.finish(say) {
		return &exitError{status: exitFailure}
	}
	return nil
}

// clients are the processes that compute in a lease.
func clients(l *lease.Status) (pids []uint32) {
	for _, s := range l.Sessions {
		if wire.SessionComputes(s.Kind) && s.Client != 0 {
			pids = append(pids, s.Client)
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

// traceAll writes the traces of all processes into a folder, and says which could not be had. It is an error if there is none.
func traceAll(ctx context.Context, path string, pids []uint32, owners int, d time.Duration, dir string, say func(string, ...any)) error {
	var all sync.WaitGroup
	errs := make([]error, len(pids)*owners)
	for i := range errs {
		pid, owner := pids[i/owners], i%owners
		all.Go(func() {
			errs[i] = traceOne(ctx, path, pid, owner, d, filepath.Join(dir, fmt.Sprintf("%d-%d.trace", pid, owner)))
		})
	}
	all.Wait()
	var others []error
	traced, stopped := false, 0
	for _, err := range errs {
		switch {
		case err == nil:
			traced = true
		case errors.Is(err, errStopped):
			stopped++
		case !errors.Is(err, errNoSession):
			others = append(others, err)
		}
	}
	switch {
	case traced:
		for _, err := range others {
			say("not traced: %v", err)
		}
		if stopped > 0 {
			say("not traced: %d sessions whose trace had not begun when it was stopped", stopped)
		}
		return nil
	case stopped > 0:
		return errors.Join(append(others, errStopped)...)
	case len(others) > 0:
		return errors.Join(others...)
	}
	return errNoSession
}

// traceOne writes the trace of one session into a file. The error is errStopped if ctx ends before the trace begins.
func traceOne(ctx context.Context, path string, pid uint32, owner int, d time.Duration, to string) error {
	c, err := askForTrace(ctx, path, pid, owner)
	if ctx.Err() != nil {
		if err == nil {
			_ = c.Close()
		}
		return errStopped
	}
	if err != nil {
		return err
	}
	defer c.Close()
	defer until(ctx, c, askTime)()
	var hello [wire.HelloSize]byte
	(&wire.Hello{Version: wire.Version, Kind: wire.SessionTrace, PID: uint32(os.Getpid()), UID: uint32(os.Getuid()), Program: "sluice trace"}).Encode(&hello)
	var e wire.Encoder
	(&wire.TraceRequest{MS: uint32(d.Milliseconds())}).Encode(&e)
	_, err = c.Write(append(hello[:], e.Buf()...))
	if err == nil {
		_, err = wire.ReadWelcome(c)
	}
	var refusal *wire.Refusal
	switch {
	case err != nil && ctx.Err() != nil:
		return errStopped
	case errors.As(err, &refusal):
		return fmt.Errorf("process %d: %w", pid, err)
	case err != nil:
		return fmt.Errorf("process %d: its session does not answer; it may be of a release that has no traces: those that begin now have them (%w)", pid, err)
	}
	defer until(ctx, c, d+traceSlack)()
	f, err := safefile.Create(to, safefile.How{Volatile: true})
	if err != nil {
		return err
	}
	n, err := io.Copy(f, io.LimitReader(c, wire.MaxTrace))
	switch {
	case err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, unix.ECONNRESET):
		_ = f.Close()
		return fmt.Errorf("process %d: %w", pid, err)
	case n < wire.TraceHeadSize && ctx.Err() != nil:
		_ = f.Close()
		return errStopped
	}
	return f.Commit() // also of a trace that was cut short
}

// until bounds what is done on a connection by d, and by ctx. The function that it returns lets go of ctx.
func until(ctx context.Context, c net.Conn, d time.Duration) func() bool {
	_ = c.SetDeadline(time.Now().Add(d)) // first: ctx may be over, and its deadline is to stay
	return context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
}

// askForTrace has the daemon pass a connection to the session of a process at an owner of the lease.
func askForTrace(ctx context.Context, path string, pid uint32, owner int) (net.Conn, error) {
	dialer := net.Dialer{Timeout: askTime}
	d, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket of the lease: %w; is this the lease's node?", err)
	}
	defer d.Close()
	defer until(ctx, d, askTime)()
	var q [wire.LeaseRequestSize]byte
	(&wire.LeaseRequest{Version: wire.LeaseVersion, Kind: wire.TraceKind(pid), Owner: uint32(owner), Program: "sluice trace"}).Encode(&q)
	if _, err := d.Write(q[:]); err != nil {
		return nil, fmt.Errorf("socket of the lease: %w", err)
	}
	status, reason, f, err := readAnswer(d.(*net.UnixConn))
	switch {
	case err != nil:
		return nil, fmt.Errorf("socket of the lease: %w", err)
	case status != wire.StatusOK:
		return nil, fmt.Errorf("%s", reason)
	case f == nil:
		return nil, errors.New("socket of the lease: no connection came with the answer")
	}
	defer f.Close()
	return net.FileConn(f)
}

// readAnswer reads a LEASE_ANSWER, its payload and the connection that came with it.
func readAnswer(c *net.UnixConn) (status uint32, reason string, f *os.File, err error) {
	b := make([]byte, wire.LeaseAnswerSize+wire.MaxLeasePayload)
	oob := make([]byte, unix.CmsgSpace(4))
	n, on, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return 0, "", nil, err
	}
	if msgs, perr := unix.ParseSocketControlMessage(oob[:on]); perr == nil && len(msgs) > 0 {
		if fds, _ := unix.ParseUnixRights(&msgs[0]); len(fds) > 0 {
			unix.CloseOnExec(fds[0])
			f = os.NewFile(uintptr(fds[0]), "trace")
		}
	}
	var h wire.LeaseAnswer
	if n < wire.LeaseAnswerSize {
		var k int
		k, err = io.ReadFull(c, b[n:wire.LeaseAnswerSize])
		n += k
	}
	if err == nil {
		err = h.Decode((*[wire.LeaseAnswerSize]byte)(b))
	}
	if err == nil && h.Size > wire.MaxLeasePayload {
		err = errors.New("the answer cannot be read")
	}
	if end := wire.LeaseAnswerSize + int(h.Size); err == nil && n < end {
		_, err = io.ReadFull(c, b[n:end])
	}
	if err != nil {
		if f != nil {
			_ = f.Close()
		}
		return 0, "", nil, err
	}
	return h.Status, plain(string(b[wire.LeaseAnswerSize : wire.LeaseAnswerSize+int(h.Size)])), f, nil
}
