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
		return fail(runtime(settings.Path, args[1:]))
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
	var err error
	switch command, rest := args[1], args[2:]; command {
	case ldcache.Argument:
		if len(rest) != 1 {
			return 2
		}
		err = ldcache.Child(rest[0])
	case "createContainer", "runtime", "prepare", "cdi":
		err = run(command, rest, stdin, stdout, stderr)
	default:
		fmt.Fprint(stderr, usage)
		return 2
	}
	switch {
	case errors.Is(err, errUsage):
		return 2
	case err != nil:
		return fail(err)
	}
	return 0
}

// errUsage stands for a wrong command line, whose error package flag has printed.
var errUsage = errors.New("wrong command line")

// options are those of all commands.
type options struct {
	config, lease, name, dir, from, smi string
	hostPath                            bool
}

// run runs one of the commands that take options.
func run(command string, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	if command == "createContainer" {
		// What a hook inherits belongs to the engine or to the image: it is neither used nor passed on.
		if err := isolate(); err != nil {
			return err
		}
	}
	var o options
	flags := flag.NewFlagSet(command, flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.config, "config", settings.Path, "the settings, a file of root's")
	flags.StringVar(&o.lease, "lease", "", "the lease's id")
	flags.BoolVar(&o.hostPath, wrapper.HostPath, false, "the lease at its path of the host, too")
	flags.StringVar(&o.name, "name", "", "the device's name")
	flags.StringVar(&o.dir, "dir", "", "the directory of CDI specifications, as /etc/cdi or /run/cdi")
	flags.StringVar(&o.from, "from", "", "the directory with the shim and NVML")
	flags.StringVar(&o.smi, "nvidia-smi", "", "the site's nvidia-smi, for images without one")
	if flags.Parse(args) != nil {
		return errUsage
	}
	switch command {
	case "createContainer":
		return createContainer(o, stdin, stderr)
	case "runtime":
		return runtime(o.config, flags.Args())
	}
	set, err := settings.Load(o.config)
	if err != nil {
		return err
	}
	unix.Umask(0o022) // every user's container reads what is made
	if command == "prepare" {
		return content.Prepare(set.Lib, o.from, set.Socket(), o.smi)
	}
	return specification(o, set, stdout)
}

// createContainer is the hook. Its error goes to the host's log, too.
func createContainer(o options, stdin io.Reader, stderr io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), ownTimeout)
	defer cancel()
	err := hook.Run(ctx, stdin, hook.Entry{Settings: o.config, Lease: o.lease, HostPath: o.hostPath}, stderr)
	if err != nil {
		syslog(err)
	}
	return err
}

// specification writes a CDI specification into a directory, and its path to stdout; or to
// stdout itself.
func specification(o options, set settings.Settings, stdout io.Writer) error {
	h, err := entry(o.config)
	if err != nil {
		return err
	}
	d := cdi.Device{Name: o.name, Lease: o.lease}
	p := cdi.Place{Lib: set.Lib, Leases: set.Leases, Target: set.Target, Socket: set.Socket(), Hook: h}
	if o.dir == "" {
		b, err := cdi.Spec(d, p)
		if err == nil {
			_, _ = stdout.Write(b)
		}
		return err
	}
	path, err := cdi.Write(o.dir, d, p)
	if err == nil {
		fmt.Fprintln(stdout, path)
	}
	return err
}

// runtime becomes the real runtime. It returns only if it cannot.
func runtime(config string, args []string) error {
	set, broken := settings.Load(config)
	if broken != nil {
		syslog(broken) // containers that ask for no fraction start all the same
		set = settings.Default()
	}
	h, err := entry(config)
	if err != nil {
		return err
	}
	return wrapper.Run(args, set, broken, h)
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
