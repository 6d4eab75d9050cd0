package workers

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// A daemon keeps what the driver says of each GPU in a file, for the daemon that is started after it. Asking the
// driver needs a context on each GPU, and after each restart programs would have to wait for that. Besides, the size of a
// context is best measured before sessions compute on the GPU.

// keptFacts is the contents of a GPU's file.
type keptFacts struct {
	Source string // what factsSource returned
	Mode   sandbox.Mode
	Facts  control.Facts
}

// factsDir returns the directory of these files. It is in run_dir, next to the directory of the leases.
func (p *Pool) factsDir() string { return filepath.Clean(p.cfg.Dir) + "-facts" }

// factsPath returns the path of a GPU's file.
func (p *Pool) factsPath(uuid string) string {
	return filepath.Join(p.factsDir(), filepath.Base(uuid))
}

// factsSource identifies everything that the facts of a GPU depend on: the boot, the program that asks
// the driver, the driver, and the environment variables that the driver reads.
func (p *Pool) factsSource() (string, error) {
	h := sha256.New()
	for _, path := range []string{"/proc/sys/kernel/random/boot_id", "/proc/driver/nvidia/version", "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm"} {
		b, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		fmt.Fprintf(h, "%q\n", b)
	}
	for _, path := range []string{p.cfg.Exe, p.cfg.LibCUDA, p.cfg.LibNVML} {
		fmt.Fprintf(h, "%q", path)
		if filepath.IsAbs(path) { // otherwise the loader finds the library, whose version is the kernel module's
			fi, err := os.Stat(path)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(h, " %d %d", fi.Size(), fi.ModTime().UnixNano())
		}
	}
	fmt.Fprintf(h, "\n%q %v %v %q\n", p.cfg.Sandbox, p.cfg.Seccomp, p.cfg.ConfineDev, p.cfg.Pageable)
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return !slices.ContainsFunc([]string{"CUDA_", "NVIDIA_", "LD_", "SLUICE_SIM_"}, func(prefix string) bool { return strings.HasPrefix(v, prefix) })
	})
	slices.Sort(env)
	fmt.Fprintf(h, "%q", env)
	return hex.EncodeToString(h.Sum(nil)), nil
}

// recall returns the facts of a GPU that an earlier daemon kept. It returns nil if there are none, or if they may be out of date.
func (p *Pool) recall(uuid string) *keptFacts {
	b, err := os.ReadFile(p.factsPath(uuid))
	if err != nil {
		return nil
	}
	var k keptFacts
	if err := json.Unmarshal(b, &k); err != nil {
		return nil
	}
	if source, err := p.factsSource(); err != nil || source != k.Source || k.Facts.Check(1) != nil {
		return nil
	}
	return &k
}

// keep writes the facts of a GPU for the next daemon. It only logs a failure, since the next daemon then asks the driver.
func (p *Pool) keep(uuid string, f *control.Facts, mode sandbox.Mode) {
	err := func() error {
		source, err := p.factsSource()
		if err != nil {
			return err
		}
		b, err := json.Marshal(keptFacts{source, mode, *f})
		if err != nil {
			return err
		}
		if err := os.MkdirAll(p.factsDir(), 0o700); err != nil {
			return err
		}
		// An earlier daemon that was killed here left a temporary file behind.
		if err := safefile.SweepAbandoned(p.factsDir(), ""); err != nil {
			return err
		}
		return safefile.Write(p.factsPath(uuid), b, safefile.How{Volatile: true})
	}()
	if err != nil {
		p.log.Warn("the facts of a GPU cannot be kept for the next daemon", "gpu", uuid, "error", err)
	}
}

// Recheck asks the driver about each GPU whose facts an earlier daemon kept. The facts stay as they are, because
// sessions may be computing and would distort new ones. A GPU that does not answer has no facts from then on; the
// error names those GPUs.
func (p *Pool) Recheck(ctx context.Context) error {
	p.mu.Lock()
	kept := p.kept
	p.kept = nil
	p.mu.Unlock()
	var errs []error
	for _, uuid := range kept {
		p.mu.Lock()
		mode := p.sandbox[uuid]
		p.mu.Unlock()
		if !mode.Files() {
			mode = sandbox.Off
		}
		_, err := p.ask(ctx, uuid, mode)
		if err == nil || ctx.Err() != nil {
			continue
		}
		_ = os.Remove(p.factsPath(uuid))
		p.mu.Lock()
		delete(p.facts, uuid)
		delete(p.sandbox, uuid)
		p.mu.Unlock()
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
