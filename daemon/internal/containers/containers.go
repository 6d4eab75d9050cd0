// Package containers writes what container engines read of a lease of this node, so that
// a container in a job finds the job's fraction without the user's help.
package containers

// For each lease, from before the first task runs until the lease ends:
//
//	LEASES/ID/containers.conf   podman: the annotation that sluice-hook looks for
//	LEASES/ID/apptainer.sh      Apptainer, Singularity: run in the container before its program
//	LEASES/ID/cdi/sluice.json   Charliecloud: see charliecloud.go
//	CDI/sluice-ID.json          engines with --device sluice.dev/gpu=JOB
//
// The job's environment names the first two. All are root's, and everybody can read them: they
// contain the lease's id, which the names of directories show anyway. The daemon decides
// at each connection who may use the lease.
//
// Each is written under another name and renamed, so that no engine sees half of one, and
// written again when the daemon starts. The directory of CDI files is not this daemon's
// alone. Keep finds what a crash has left there: a file of ours names a lease's directory.

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/oci-hook/cdi"
)

// Target is where an OCI container gets our libraries, and the lease's directory below it.
const Target = "/usr/lib/sluice"

const (
	shim          = "libcuda.so.1"
	podmanFile    = "containers.conf"
	apptainerFile = "apptainer.sh"
	maxSpec       = 64 << 10
)

// Config says where things are on this node.
type Config struct {
	Leases  string // directory of the leases' directories
	Staging string // on the same file system, root's alone
	Lib     string // the shim's directory, at the same path in every job
	Hook    string // sluice-hook
	Content string // what sluice-hook prepare has made
	CDI     string // directory of CDI specifications; "" for none
	Log     *slog.Logger
}

// Files are those of all leases of this node.
type Files struct {
	cfg Config
	log *slog.Logger
}

// New looks at nothing yet: the hook may be installed later.
func New(cfg Config) *Files {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Files{cfg: cfg, log: cfg.Log}
}

// Write makes a lease's files; its directory is there. One that cannot be made is left
// out: the job's own programs do not need it.
func (f *Files) Write(l lease.Lease) error {
	errs := []error{f.put(l.ID, apptainerFile, f.script(l.ID)), f.charliecloud(l)}
	if f.hooked() {
		errs = append(errs, f.put(l.ID, podmanFile, fmt.Sprintf("[containers]\nannotations = [\"dev.sluice.lease=%s\"]\n", l.ID)))
		if f.cfg.CDI != "" && f.prepared() {
			errs = append(errs, f.spec(l))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("files for containers: %w", err)
	}
	return nil
}

// Remove removes what is not in the lease's directory.
func (f *Files) Remove(id string) {
	if f.cfg.CDI == "" || !form.LeaseID(id).Valid() {
		return
	}
	if err := os.Remove(f.specPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		f.log.Warn("CDI file of an ended lease stays", "lease", id, "error", err)
	}
}

// Keep removes what earlier daemons left of leases that are no more.
func (f *Files) Keep(live func(id string) bool) {
	if f.cfg.CDI == "" {
		return
	}
	entries, err := os.ReadDir(f.cfg.CDI)
	if err != nil {
		return // it is made with the first file in it
	}
	for _, e := range entries {
		name := e.Name()
		of, half := safefile.Unfinished(name)
		if half {
			name = of
		}
		id, prefix := strings.CutPrefix(name, "sluice-")
		id, suffix := strings.CutSuffix(id, ".json")
		if !prefix || !suffix || !form.LeaseID(id).Valid() || !e.Type().IsRegular() || !half && live(id) {
			continue
		}
		path := filepath.Join(f.cfg.CDI, e.Name())
		if !f.ours(path, id) {
			continue // of another sluiced, or somebody's own
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			f.log.Warn("CDI file of an ended lease stays", "path", path, "error", err)
		}
	}
}

// Env is what a job's tasks need besides what leads to the shim.
func (f *Files) Env(l lease.Lease) []rpc.EnvOp {
	dir := filepath.Join(f.cfg.Leases, l.ID)
	var out []rpc.EnvOp
	for _, c := range []string{"APPTAINER", "SINGULARITY"} {
		bind := func(from, to string) {
			out = append(out, rpc.EnvOp{Prepend: true, Name: c + "_BINDPATH", Value: from + ":" + to + ":ro"})
		}
		// For --cleanenv, also where the site lets users bind nothing.
		out = append(out,
			rpc.EnvOp{Name: c + "ENV_SLUICE_SOCKET", Value: filepath.Join(dir, "sock")},
			rpc.EnvOp{Name: c + "ENV_SLUICE_LEASE_ID", Value: l.ID},
		)
		if there(filepath.Join(dir, apptainerFile)) {
			bind(filepath.Join(dir, apptainerFile), "/.singularity.d/env/95-sluice.sh")
		}
		bind(dir, dir)
		bind(f.cfg.Lib, f.cfg.Lib)
	}
	if conf := filepath.Join(dir, podmanFile); there(conf) {
		out = append(out, rpc.EnvOp{Name: "CONTAINERS_CONF_OVERRIDE", Value: conf})
	}
	return append(out, f.charlieEnv(l)...)
}

// Checks are findings about what has to be installed; none where no hook is.
func (f *Files) Checks() []rpc.Check {
	if !f.hooked() {
		return nil
	}
	c := rpc.Check{Name: "containers", Level: rpc.OK, Text: "engines are told of leases"}
	warn := func(remedy, format string, a ...any) {
		c.Level, c.Text, c.Remedy = rpc.Warn, fmt.Sprintf(format, a...), remedy
	}
	prepare := "sluice-hook prepare --from " + f.cfg.Lib
	theirs, err := os.ReadFile(filepath.Join(f.cfg.Content, shim))
	ours, missing := os.ReadFile(filepath.Join(f.cfg.Lib, shim))
	switch {
	case err != nil:
		warn(prepare, "containers get no fraction: %v", err)
	case missing == nil && !bytes.Equal(theirs, ours):
		warn(prepare, "%s in %s is not that of %s: containers get another release's", shim, f.cfg.Content, f.cfg.Lib)
	case f.cfg.CDI != "":
		if err := safefile.Dir(f.cfg.CDI); err != nil && !errors.Is(err, fs.ErrNotExist) {
			warn("see the text, or set containers.cdi_dir", "containers.cdi_dir: %v", err)
		}
	}
	return []rpc.Check{c}
}

// script is run in an Apptainer container after the image's own: what an image says of the
// library path stays, behind ours. Where the site has prepared an nvidia-smi for
// containers, it is found unless the image has one.
func (f *Files) script(id string) string {
	return fmt.Sprintf(`# Written by sluiced for one lease, and removed with it.
export LD_LIBRARY_PATH=%[1]s"${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export SLUICE_SOCKET=%[2]s
export SLUICE_LEASE_ID=%[3]s
export PATH="$PATH":%[4]s
`, quote(f.cfg.Lib), quote(filepath.Join(f.cfg.Leases, id, "sock")), id, quote(filepath.Join(f.cfg.Lib, "container/bin")))
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// spec writes the CDI file.
func (f *Files) spec(l lease.Lease) error {
	b, err := cdi.Spec(cdi.Device{Name: l.Request.Key.Job, Lease: l.ID}, cdi.Place{
		Lib: f.cfg.Content, Leases: f.cfg.Leases, Target: Target, Socket: Target + "/lease/sock",
		Hook: cdi.Hook(f.cfg.Hook),
	})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.cfg.CDI, 0o755); err != nil {
		return fmt.Errorf("containers.cdi_dir: %w", err)
	}
	// Engines do as root what is said there.
	if err := safefile.Dir(f.cfg.CDI); err != nil {
		return fmt.Errorf("containers.cdi_dir: %w", err)
	}
	return safefile.Write(f.specPath(l.ID), b, readable)
}

func (f *Files) specPath(id string) string { return filepath.Join(f.cfg.CDI, "sluice-"+id+".json") }

// ours says whether a file names that lease in this daemon's directory, or nothing at all:
// then it is what a crash has left of one.
func (f *Files) ours(path, id string) bool {
	r, err := os.Open(path)
	if err != nil {
		return false
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxSpec))
	return err == nil && (len(b) == 0 || bytes.Contains(b, []byte(`"`+filepath.Join(f.cfg.Leases, id)+`"`)))
}

// put makes a file in a lease's directory, which once was its user's: nothing in it is
// opened.
func (f *Files) put(id, name, text string) error {
	if _, err := form.ParseLeaseID(id); err != nil {
		return err
	}
	return safefile.Write(filepath.Join(f.cfg.Leases, id, name), []byte(text), f.staged())
}

// readable is how a file is written that everybody may read. The daemon writes them all
// again when it starts, so none has to outlive a crash of the machine.
var readable = safefile.How{Mode: 0o644, Volatile: true}

// staged is readable for a lease's directory.
func (f *Files) staged() safefile.How {
	how := readable
	how.Staging = f.cfg.Staging
	return how
}

// hooked says whether the hook is installed: without it, an engine that is told to run it
// starts no container.
func (f *Files) hooked() bool {
	fi, err := os.Stat(f.cfg.Hook)
	return err == nil && fi.Mode().IsRegular() && fi.Mode().Perm()&0o111 != 0
}

// prepared says whether there is something to mount.
func (f *Files) prepared() bool { return there(filepath.Join(f.cfg.Content, shim)) }

func there(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.Mode().IsRegular()
}
