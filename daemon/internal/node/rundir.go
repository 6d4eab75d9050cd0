package node

// run_dir belongs to one daemon, and to the ledgers with which that daemon filled it. The
// sessions and sockets in it belong to leases in these ledgers: a daemon with other ledgers
// would take them for leftovers and end them. So a start does this before it changes anything
// else:
//
//	lock      run_dir/lock, held until the process ends
//	identity  run_dir/owner.db.id and run_dir/host.db.id name the ledgers; a ledger
//	          that is missing, or has another identity, ends the start
//
// A ledger is created before its identity is written, and its identity is written before
// anything else in run_dir. A daemon that is killed in between leaves a ledger that no file
// names yet, and the next start writes its name. A reboot empties run_dir, and ends all
// sessions as well: then any ledger will do.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

// The ledgers of a node, below state_dir.
const (
	ownerLedger = "owner.db"
	hostLedger  = "host.db"
)

// lockWait is how long a start waits for a daemon that is stopping.
const lockWait = 2 * time.Second

// lockRunDir makes run_dir and takes its lock. The lock lasts until the file is closed or the
// process ends. wait is how long to wait for another daemon that holds it.
func lockRunDir(cfg *config.Config, wait time.Duration) (*os.File, error) {
	if err := os.MkdirAll(cfg.RunDir, 0o755); err != nil {
		return nil, fmt.Errorf("run_dir: %w", err)
	}
	if err := safefile.Dir(cfg.RunDir); err != nil {
		return nil, fmt.Errorf("run_dir: %w", err)
	}
	path := filepath.Join(cfg.RunDir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("run_dir: %w", err)
	}
	for end := time.Now().Add(wait); ; time.Sleep(20 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, unix.EINTR):
		case !errors.Is(err, unix.EWOULDBLOCK):
			f.Close()
			return nil, fmt.Errorf("run_dir: lock %s: %w", path, err)
		case time.Now().After(end):
			f.Close()
			return nil, fmt.Errorf("run_dir %s: another sluiced uses it (fuser %s says which); stop that one first, or set another run_dir", cfg.RunDir, path)
		}
	}
}

func ledgerPath(cfg *config.Config, name string) string { return filepath.Join(cfg.StateDir, name) }

func identityFile(cfg *config.Config, name string) string {
	return filepath.Join(cfg.RunDir, name+".id")
}

// identityOf reads which ledger of this name has filled run_dir, "" for none.
func identityOf(cfg *config.Config, name string) (string, error) {
	b, err := os.ReadFile(identityFile(cfg, name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	id := strings.TrimSpace(string(b))
	if err == nil && id == "" {
		err = errors.New("it is empty")
	}
	if err != nil {
		return "", fmt.Errorf("run_dir: which %s it belongs to cannot be read from %s: %w", name, identityFile(cfg, name), err)
	}
	return id, nil
}

// setIdentity names the ledger that fills run_dir from now on.
func setIdentity(cfg *config.Config, name, id string) error {
	if err := safefile.Write(identityFile(cfg, name), []byte(id+"\n"), safefile.How{Volatile: true}); err != nil {
		return fmt.Errorf("run_dir: %w", err)
	}
	return nil
}

// otherLedger adds the remedy to an error that wraps ledger.ErrOther, and returns any
// other error as it is.
func otherLedger(cfg *config.Config, name string, err error) error {
	if !errors.Is(err, ledger.ErrOther) {
		return err
	}
	lost := "the jobs here lose the sockets of their leases until the owners have been asked"
	if name == ownerLedger {
		lost = "all sessions on this node's GPUs end"
	}
	return fmt.Errorf("run_dir %s is in use with another %s: %w; see that state_dir (%s) is mounted and spelled right. Nothing was changed. "+
		"If that ledger is lost for good, remove %s and start again: then %s", cfg.RunDir, name, err, cfg.StateDir, identityFile(cfg, name), lost)
}

// roleLedgers are the ledgers that this node may need.
func roleLedgers(cfg *config.Config) []string {
	if cfg.Owner.Enabled == "no" {
		return []string{hostLedger}
	}
	return []string{ownerLedger, hostLedger}
}

// ledgersThere refuses a state_dir that lacks a ledger which run_dir names.
func ledgersThere(cfg *config.Config) error {
	for _, name := range roleLedgers(cfg) {
		id, err := identityOf(cfg, name)
		if err != nil {
			return err
		}
		if id == "" {
			continue
		}
		if err := ledger.Missing(ledgerPath(cfg, name)); err != nil {
			return otherLedger(cfg, name, err)
		}
	}
	return nil
}

// openLedger opens the ledger that run_dir names. If run_dir names none, it opens any, and
// writes its name into run_dir.
func openLedger(cfg *config.Config, name string) (*ledger.Ledger, error) {
	id, err := identityOf(cfg, name)
	if err != nil {
		return nil, err
	}
	led, err := ledger.Open(ledgerPath(cfg, name), cfg.Node, ledger.Options{ID: id})
	if err != nil {
		return nil, otherLedger(cfg, name, err)
	}
	if id == "" {
		if err := setIdentity(cfg, name, led.ID()); err != nil {
			led.Close()
			return nil, err
		}
	}
	return led, nil
}
