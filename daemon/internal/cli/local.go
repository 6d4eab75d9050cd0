package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/remoting/version"
)

// callTime bounds a call to the daemon, which itself waits at most a few seconds for any owner.
const callTime = 30 * time.Second

// local is this node's daemon: *rpc.LocalClient.
type local interface {
	Acquire(ctx context.Context, r lease.Request) (lease.Lease, string, error)
	Release(ctx context.Context, id string, key lease.Key, reason string) error
	List(ctx context.Context) ([]lease.Status, error)
	Pool(ctx context.Context, name string) ([]rpc.Pool, error)
	Health(ctx context.Context) ([]rpc.Check, error)
	HealthAll(ctx context.Context) (rpc.HealthAll, error)
	Explain(ctx context.Context, job string) ([]rpc.Event, error)
	Stats(ctx context.Context) (rpc.Stats, error)
	Set(ctx context.Context, c lease.Change) (lease.Lease, error)
	Drain(ctx context.Context, d lease.DrainOrder) ([]lease.GPU, error)
	Probe(ctx context.Context, owner string) (lease.Probe, error)
	Close() error
}

// defaultSocket is where the daemon listens unless its run_dir says otherwise.
func defaultSocket() string {
	if s := os.Getenv("SLUICED_SOCKET"); s != "" {
		return s
	}
	c := config.Default()
	return c.Socket()
}

func socketFlag(cmd *cobra.Command, socket *string) {
	// pflag does not know the default, so help and manual pages do not depend on the
	// environment in which they were made.
	cmd.Flags().StringVar(socket, "socket", "", "socket of this node's sluiced (default: $SLUICED_SOCKET, else /run/sluice/sluiced.sock)")
	_ = cmd.MarkFlagFilename("socket", "sock")
}

func dial(socket string) (local, string, error) {
	if socket == "" {
		socket = defaultSocket()
	}
	if len(socket) >= 108 { // sun_path
		return nil, socket, fmt.Errorf("socket %s: a path of a socket has at most 107 bytes; set run_dir of sluiced to a shorter one", socket)
	}
	d, err := rpc.DialLocal(socket, version.Commit)
	if err != nil {
		return nil, socket, err
	}
	return d, socket, nil
}

// question makes one call to the daemon and adds a remedy to its error.
func question[T any](ctx context.Context, socket string, put func(context.Context, local) (T, error)) (T, error) {
	return within(ctx, callTime, socket, put)
}

// within is a question whose answer may take that long.
func within[T any](ctx context.Context, limit time.Duration, socket string, put func(context.Context, local) (T, error)) (T, error) {
	var zero T
	d, socket, err := dial(socket)
	if err != nil {
		return zero, err
	}
	defer d.Close()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	v, err := put(ctx, d)
	if err != nil {
		return zero, daemonError(socket, err)
	}
	return v, nil
}

// errNoDaemon is wrapped by every error that says that no daemon answers at the socket.
var errNoDaemon = errors.New("no daemon")

type noDaemon struct {
	text  string
	cause error
}

func (e *noDaemon) Error() string        { return e.text }
func (e *noDaemon) Unwrap() error        { return e.cause }
func (e *noDaemon) Is(target error) bool { return target == errNoDaemon }

// reach returns nil if a daemon listens at the socket, else why not, with a remedy.
func reach(socket string) error {
	c, err := (&net.Dialer{Timeout: time.Second}).Dial("unix", socket)
	if err == nil {
		_ = c.Close()
		return nil
	}
	var text string
	switch {
	case errors.Is(err, unix.ENOENT):
		text = fmt.Sprintf("no sluiced at socket %s: no such file; start the service sluiced on this node, or give its socket with --socket", socket)
	case errors.Is(err, unix.ECONNREFUSED):
		text = fmt.Sprintf("sluiced at socket %s has stopped: connection refused; start the service sluiced on this node", socket)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		text = fmt.Sprintf("socket %s: permission denied; its directory must be 0755 and the socket 0666, and SELinux must allow it, see docs/admin.md#selinux", socket)
	case errors.Is(err, unix.ENOTSOCK):
		text = fmt.Sprintf("socket %s is not a socket; give that of sluiced with --socket", socket)
	default:
		text = fmt.Sprintf("sluiced at socket %s cannot be reached: %v; see the log of the service sluiced", socket, err)
	}
	return &noDaemon{text, err}
}

// daemonError adds to the daemon's error the remedy for its code, if the error names none
// itself.
func daemonError(socket string, err error) error {
	var e *lease.Error
	if !errors.As(err, &e) {
		return err
	}
	if e.Code == lease.Down {
		if unreached := reach(socket); unreached != nil {
			return unreached
		}
	}
	remedy := map[lease.Code]string{
		lease.NoRoom:    "see sluice gpus for what is free; wait, or ask for less",
		lease.Never:     "see sluice gpus for what the pools have; ask for less",
		lease.NotFound:  "see sluice list and sluice gpus",
		lease.Denied:    "users may use only their own leases; ask root",
		lease.Over:      "see sluice explain for why it ended",
		lease.Conflict:  "try again",
		lease.Down:      "try again; see sluice health for what is down",
		lease.Internal:  "see sluice health and the log of sluiced",
		lease.WrongPeer: "run the same version of sluice and sluiced; see sluice version",
	}[e.Code]
	if remedy == "" || strings.Contains(e.Reason, ";") {
		return err
	}
	return fmt.Errorf("%w; %s", err, remedy)
}
