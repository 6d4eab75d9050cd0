// Package command is the command line of sluice-hook.
package command

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/oci-hook/cdi"
	"github.com/sluice-hpc/sluice/oci-hook/internal/client"
	"github.com/sluice-hpc/sluice/oci-hook/internal/content"
	"github.com/sluice-hpc/sluice/oci-hook/internal/hook"
	"github.com/sluice-hpc/sluice/oci-hook/internal/ldcache"
	"github.com/sluice-hpc/sluice/oci-hook/internal/settings"
	"github.com/sluice-hpc/sluice/oci-hook/internal/wrapper"
)

// RuntimeName is the name under which the program is the wrapper.
const RuntimeName = "sluice-runtime"

const usage = `usage:
  sluice-hook createContainer [--config FILE] [--lease ID]   as a hook; the state is on standard input
  sluice-hook runtime [--config FILE] -- ARGUMENTS           as a runtime; so does the name sluice-runtime
  sluice-hook prepare [--config FILE] --from DIR [--nvidia-smi PATH]
                                                             makes the directory that containers get
  docker|podman|ch-run ARGUMENTS                             under these names, also with sluice- before them: the
                                                             engine's client, with the job's lease
  sluice-hook cdi --lease ID --name NAME [--dir DIR]         writes a CDI specification; without --dir to standard output
`

// ownTimeout is less than what the hook's entry in a specification gives it.
const ownTimeout = 12 * time.Second

// Main runs the program and returns its exit status.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	fail := func(err error) int {
		fmt.Fprintln(stderr, "sluice-hook:", form.Printable(err.Error()))
		return 1
	}
	if os.Getuid() != os.Geteuid() || os.Getgid() != os.Getegid() {
		return fail(errors.New("must not be installed set-user-id or set-group-id; remedy: chmod ug-s"))
	}
	if filepath.Base(args[0]) == RuntimeName {
		return runtime(settings.Path, args[1:], fail)
	}
	if name, ok := client.Engine(args[0]); ok {
		return fail(client.Run(name, args[1:], os.Environ(), func() (string, error) {
			set, err := settings.Load(settings.Path)
			return set.Lib, err
		}))
	}
	if len(args) < 2 {
		fmt.Fprint(stderr, usage)
		return 2
	}
	// What a hook inherits is the engine's or the image's, not ours to use or to hand on.
	if args[1] == "createContainer" {
		if err := isolate(); err != nil {
			return fail(err)
		}
	}
	flags := flag.NewFlagSet(args[1], flag.ContinueOnError)
	flags.SetOutput(stderr)
	config := flags.String("config", settings.Path, "the settings, a file of root's")
	lease := flags.String("lease", "", "the lease's id")
	hostPath := flags.Bool(wrapper.HostPath, false, "the lease at its path of the host, too")
	name := flags.String("name", "", "the device's name")
	dir := flags.String("dir", "", "the directory of CDI specifications, as /etc/cdi or /run/cdi")
	from := flags.String("from", "", "the directory with the shim and NVML")
	smi := flags.String("nvidia-smi", "", "the site's nvidia-smi, for images without one")
	switch args[1] {
	case ldcache.Argument:
		if len(args) != 3 {
			return 2
		}
		return fail(ldcache.Child(args[2]))
	case "createContainer", "runtime", "prepare", "cdi":
		if flags.Parse(args[2:]) != nil {
			return 2
		}
	default:
		fmt.Fprint(stderr, usage)
		return 2
	}
	switch args[1] {
	case "createContainer":
		ctx, cancel := context.WithTimeout(context.Background(), ownTimeout)
		defer cancel()
		if err := hook.Run(ctx, stdin, hook.Entry{Settings: *config, Lease: *lease, HostPath: *hostPath}, stderr); err != nil {
			syslog(err)
			return fail(err)
		}
		return 0
	case "runtime":
		return runtime(*config, flags.Args(), fail)
	}
	set, err := settings.Load(*config)
	if err != nil {
		return fail(err)
	}
	unix.Umask(0o022) // every user's container reads what is made
	if args[1] == "prepare" {
		if err := content.Prepare(set.Lib, *from, set.Socket(), *smi); err != nil {
			return fail(err)
		}
		return 0
	}
	h, err := entry(*config)
	if err != nil {
		return fail(err)
	}
	d := cdi.Device{Name: *name, Lease: *lease}
	p := cdi.Place{Lib: set.Lib, Leases: set.Leases, Target: set.Target, Socket: set.Socket(), Hook: h}
	if *dir == "" {
		b, err := cdi.Spec(d, p)
		if err != nil {
			return fail(err)
		}
		_, _ = stdout.Write(b)
		return 0
	}
	path, err := cdi.Write(*dir, d, p)
	if err != nil {
		return fail(err)
	}
	fmt.Fprintln(stdout, path)
	return 0
}

func runtime(config string, args []string, fail func(error) int) int {
	set, broken := settings.Load(config)
	if broken != nil {
		syslog(broken) // containers that do not ask start all the same
		set = settings.Default()
	}
	h, err := entry(config)
	if err != nil {
		return fail(err)
	}
	return fail(wrapper.Run(args, set, broken, h))
}

// entry is the hook as it stands in specifications.
func entry(config string) (specs.Hook, error) {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return specs.Hook{}, fmt.Errorf("this program's path: %w", err)
	}
	if config == settings.Path {
		return cdi.Hook(self), nil
	}
	return cdi.Hook(self, "--config", config), nil
}

// syslog tells the host's log, too: not every runtime hands on what a hook says. It is
// the host's socket still, since the runtime has not entered the container's root.
func syslog(reason error) {
	c, err := net.DialTimeout("unixgram", "/dev/log", time.Second)
	if err != nil {
		return
	}
	defer c.Close()
	const daemonError = 3<<3 | 3
	_ = c.SetDeadline(time.Now().Add(time.Second))
	_, _ = fmt.Fprintf(c, "<%d>sluice-hook[%d]: %s", daemonError, os.Getpid(), form.Printable(reason.Error()))
}

// isolate takes the process out of whatever it was started in: its directory, its mask
// and its descriptors, none of which a child gets.
func isolate() error {
	if err := unix.Chdir("/"); err != nil {
		return err
	}
	unix.Umask(0o022)
	if err := unix.CloseRange(3, ^uint(0), unix.CLOSE_RANGE_CLOEXEC); err != nil && !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("inherited descriptors: %w", err)
	}
	debug.SetMemoryLimit(64 << 20)
	return nil
}
