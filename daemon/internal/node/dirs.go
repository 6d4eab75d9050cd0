package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/daemon/internal/ledger"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Prepare makes the directories, removes what earlier daemons left unfinished in run_dir, and
// refuses directories that somebody else could write: who can write them decides who gets a
// GPU.
func Prepare(cfg *config.Config) error {
	for _, d := range []struct {
		key, path string
		mode      os.FileMode
	}{
		{"state_dir", cfg.StateDir, 0o700},
		{"run_dir", cfg.RunDir, 0o755},
		{"audit.file", filepath.Dir(cfg.Audit.File), 0o750},
	} {
		if err := os.MkdirAll(d.path, d.mode); err != nil {
			return fmt.Errorf("%s: %w", d.key, err)
		}
		if err := safefile.Dir(d.path); err != nil {
			return fmt.Errorf("%s: %w", d.key, err)
		}
	}
	if err := safefile.SweepAbandoned(cfg.RunDir, ""); err != nil {
		return fmt.Errorf("run_dir: %w", err)
	}
	return nil
}

// Check looks at everything that a start needs and changes nothing: the second half
// of `sluiced --check`, after the configuration itself.
func Check(cfg *config.Config) error {
	var errs []error
	for _, d := range []struct{ key, path string }{
		{"state_dir", cfg.StateDir}, {"run_dir", cfg.RunDir}, {"audit.file", filepath.Dir(cfg.Audit.File)},
	} {
		if _, err := os.Stat(d.path); errors.Is(err, os.ErrNotExist) {
			continue // a start makes it
		}
		if err := safefile.Dir(d.path); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", d.key, err))
		}
	}
	for _, name := range roleLedgers(cfg) {
		id, err := identityOf(cfg, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if id == "" && ledger.Missing(ledgerPath(cfg, name)) != nil {
			continue // a start makes it, or goes on with one that it had only created
		}
		// A running daemon holds its ledger, which it has checked itself.
		if err := ledger.Check(ledgerPath(cfg, name), cfg.Node, id); err != nil && !errors.Is(err, ledger.ErrInUse) {
			errs = append(errs, otherLedger(cfg, name, err))
		}
	}
	if lends(cfg) {
		errs = append(errs, missing("owner.libnvml", cfg.Owner.LibNVML), missing("owner.libcuda", cfg.Owner.LibCUDA))
	}
	if cfg.Auth == "tls" {
		before := len(errs)
		for _, f := range []struct {
			key, path string
			mask      os.FileMode
		}{{"tls.ca", cfg.TLS.CA, 0o022}, {"tls.cert", cfg.TLS.Cert, 0o022}, {"tls.key", cfg.TLS.Key, 0o077}} {
			if _, err := os.Stat(f.path); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", f.key, err))
			} else if err := safefile.File(f.path, f.mask); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", f.key, err))
			}
		}
		if len(errs) == before {
			_, err := identity.New(identity.Config{Node: cfg.Node, Auth: cfg.Auth, CA: cfg.TLS.CA, Cert: cfg.TLS.Cert, Key: cfg.TLS.Key})
			errs = append(errs, err)
		}
	}
	if cfg.Owner.Enabled == "yes" {
		if _, err := workerExe(cfg); err != nil {
			errs = append(errs, err)
		}
		if _, _, err := rootUser(cfg); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// lends says whether a pool names this node as owner.
func lends(cfg *config.Config) bool {
	return slices.ContainsFunc(cfg.Peers(), func(p config.Peer) bool { return p.Name == cfg.Node })
}

// missing is an error where a key names a library by a path that is not there.
func missing(key, path string) error {
	if _, err := os.Stat(path); filepath.IsAbs(path) && err != nil {
		return fmt.Errorf("%s: %w; name the driver's library, or leave the key out", key, err)
	}
	return nil
}

// Summary says in a few words what a node with this configuration does.
func Summary(cfg *config.Config) string {
	var in []string
	for name, p := range cfg.Pools {
		if slices.ContainsFunc(p.Owners, func(o config.Peer) bool { return o.Name == cfg.Node }) {
			in = append(in, name)
		}
	}
	slices.Sort(in)
	switch {
	case len(in) > 0:
		return "lends its GPUs to pool " + strings.Join(in, ", ")
	case cfg.Owner.Enabled == "yes":
		return "no pool names it as owner: its GPUs are lent to nobody"
	}
	return "no pool names it as owner: it lends no GPU"
}
