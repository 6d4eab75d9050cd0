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

// What the driver says of a GPU is kept in a file for the next daemon. Asking takes a context
// on each GPU, for which a daemon that was restarted would have to let programs wait; and what a context takes
// is measured best before sessions compute there.

// keptFacts is the content of such a file.
type keptFacts struct {
	Source string // what the facts are of; see factsSource
	Mode   sandbox.Mode
	Facts  control.Facts
}

// factsPath is the path of a GPU's file, beside the directory of the leases, in memory.
func (p *Pool) factsPath(uuid string) string {
	return filepath.Join(filepath.Clean(p.cfg.Dir)+"-facts", filepath.Base(uuid))
}

// factsSource identifies all that the facts of a GPU depend on: the boot, the program that asks,
// the driver, and what the environment tells the driver.
func (p *Pool) factsSource() (string, error) {
	h := sha256.New()
	for _, path := range []string{"/proc/sys/kernel/random/boot_id", "/proc/driver/nvidia/version"} {
		b, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		fmt.Fprintf(h, "%q\n", b)
	}
	for _, path := range []string{p.cfg.Exe, p.cfg.LibCUDA, p.cfg.LibNVML} {
		fmt.Fprintf(h, "%q", path)
		if filepath.IsAbs(path) { // else the loader finds it, and it is of the kernel's version
			fi, err := os.Stat(path)
			if err != nil {
				return "", err
			}
			fmt.Fprintf(h, " %d %d", fi.Size(), fi.ModTime().UnixNano())
		}
	}
	fmt.Fprintf(h, "\n%q %v %v\n", p.cfg.Sandbox, p.cfg.Seccomp, p.cfg.ConfineDev)
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return !slices.ContainsFunc([]string{"CUDA_", "NVIDIA_", "LD_", "SLUICE_SIM_"}, func(prefix string) bool { return strings.HasPrefix(v, prefix) })
	})
	slices.Sort(env)
	fmt.Fprintf(h, "%q", env)
	return hex.EncodeToString(h.Sum(nil)), nil
}

// recall gives the facts of a GPU that an earlier daemon learned, nil if there are none that hold.
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

// keep writes down what the driver said of a GPU. Without it the next daemon asks again.
func (p *Pool) keep(uuid string, f *control.Facts, mode sandbox.Mode) {
	source, err := p.factsSource()
	if err != nil {
		return
	}
	b, err := json.Marshal(keptFacts{source, mode, *f})
	if err == nil {
		if err = os.MkdirAll(filepath.Dir(p.factsPath(uuid)), 0o700); err == nil {
			err = safefile.Write(p.factsPath(uuid), b, safefile.How{Volatile: true})
		}
	}
	if err != nil {
		p.log.Warn("what the driver said of a GPU cannot be kept for the next daemon", "gpu", uuid, "error", err)
	}
}

// Recheck asks the driver about the GPUs whose facts are an earlier daemon's, one at a time.
// What it says changes no fact, since sessions may be computing; but a GPU that does not
// answer is unknown from then on. The error names those.
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
