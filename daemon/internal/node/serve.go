package node

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/remoting/version"
)

// graceful is how long calls in progress may take when the daemon stops.
const graceful = 3 * time.Second

// serve runs a gRPC server until Stop.
// serve serves until Stop. ending is called first then: it ends the calls that would wait for long.
func (n *Node) serve(what string, s *grpc.Server, l net.Listener, ending func()) {
	n.run(what, func(ctx context.Context) error {
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
		}
		ending()
		stopped := make(chan struct{})
		go func() { s.GracefulStop(); close(stopped) }()
		select {
		case <-stopped:
		case <-time.After(graceful):
			s.Stop()
		}
		return nil
	})
}

// Serve runs the daemon until SIGTERM or SIGINT: readiness, watchdog, reloads. reload reads the
// configuration.
func (n *Node) Serve(ctx context.Context, reload func() (*config.Config, error)) error {
	sig := make(chan os.Signal, 4)
	signal.Notify(sig, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(sig)
	c := n.cfg.Load()
	n.log.Info("ready", "node", c.Node, "version", version.Commit, "owner", n.owner != nil, "socket", c.Socket())
	n.notify(daemon.SdNotifyReady + "\nSTATUS=" + n.status())
	var beat <-chan time.Time
	if every, err := daemon.SdWatchdogEnabled(false); err == nil && every > 0 {
		t := time.NewTicker(every / 3)
		defer t.Stop()
		beat = t.C
	}
	for {
		select {
		case err := <-n.fatal:
			n.notify(daemon.SdNotifyStopping)
			return err
		case <-ctx.Done():
			n.notify(daemon.SdNotifyStopping)
			return nil
		case <-beat:
			if n.alive() {
				n.notify(daemon.SdNotifyWatchdog + "\nSTATUS=" + n.status())
			}
		case s := <-sig:
			if s != syscall.SIGHUP {
				n.log.Info("stopping; leases and sessions stay", "signal", s.String())
				n.notify(daemon.SdNotifyStopping)
				return nil
			}
			// Type=notify-reload also wants the time of the reload, sd_notify(3).
			var ts unix.Timespec
			_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
			n.notify(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, ts.Nano()/1000))
			n.reload(reload)
			n.notify(daemon.SdNotifyReady + "\nSTATUS=" + n.status())
		}
	}
}

func (n *Node) notify(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		n.log.Warn("the service manager cannot be notified", "error", err)
	}
}

// alive makes a call to each role that needs its locks and nothing else. A daemon that cannot
// answer it should be restarted, which ends no session.
func (n *Node) alive() bool {
	done := make(chan struct{})
	go func() {
		if n.owner != nil {
			_, _ = n.owner.Inventory(context.Background())
		}
		n.host.SetUsers(n.cfg.Load().Users.Run)
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-time.After(5 * time.Second):
		n.log.Error("the daemon does not answer itself; the watchdog will restart it")
		return false
	}
}

func (n *Node) status() string {
	if n.owner == nil {
		return "host"
	}
	inv, err := n.owner.Inventory(context.Background())
	if err != nil {
		return "owner: " + err.Error()
	}
	leases := 0
	for _, g := range inv.GPUs {
		leases += g.Leases
	}
	return fmt.Sprintf("owner of %d GPUs, %d fractions granted", len(inv.GPUs), leases)
}

// notReloaded remembers for metrics and health that what the files have now is not in force.
func (n *Node) notReloaded(what string, err error) {
	n.log.Error(what+" not reloaded; the old one stays in force", "error", err)
	err = fmt.Errorf("%s not reloaded: %w", what, err)
	n.unread.Store(&err)
}

// reload applies what can change while the daemon runs. A wrong configuration changes nothing.
func (n *Node) reload(read func() (*config.Config, error)) {
	now, err := read()
	if err != nil {
		n.notReloaded("configuration", err)
		return
	}
	old := n.cfg.Load()
	if keys := config.Restart(old, now); len(keys) > 0 {
		n.log.Warn("these keys need a restart, which ends no session", "keys", strings.Join(keys, ", "))
	}
	next := config.Live(old, now)
	if err := n.host.SetPools(pools(next)); err != nil {
		n.notReloaded("configuration", err)
		return
	}
	n.host.SetUsers(next.Users.Run)
	n.host.SetController(next.IsController())
	n.host.SetQuotas(quotas(next))
	n.host.SetRunLife(next.Users.MaxLife)
	n.jobs.SetSettings(settings(next))
	if n.owner != nil {
		n.owner.SetLimits(limits(next))
		n.owner.SetControllers(next.Slurm.Controllers)
		n.pool.SetSharing(sharing(next))
	}
	n.unread.Store(nil)
	if err := n.id.Reload(); err != nil {
		n.notReloaded("identity", err)
	}
	SetLevel(n.level, next.Log.Level)
	n.cfg.Store(next)
	n.log.Info("configuration reloaded", "pools", len(next.Pools))
}
