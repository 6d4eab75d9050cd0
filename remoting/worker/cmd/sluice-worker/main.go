// Command sluice-worker lends the GPUs of its machine to remote programs.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/version"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

func main() {
	if err := root().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "sluice-worker:", err)
		os.Exit(1)
	}
}

func root() *cobra.Command {
	var cfg worker.Config
	var mem, level, format string
	var sizes storeSizes
	var share shareFlags
	cmd := &cobra.Command{
		Use:           "sluice-worker --listen tcp:HOST:PORT|unix:PATH",
		Short:         "lend this machine's GPUs to remote programs",
		Version:       version.Commit,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(*cobra.Command, []string) (err error) {
			cfg.Session.Sandbox, err = sandbox.ParseMode(string(cfg.Session.Sandbox))
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			size, err := form.ParseBytes(mem)
			if err != nil {
				return fmt.Errorf("--mem: %w", err)
			}
			cfg.Mem = uint64(size)
			if err = sizes.parse(&cfg.Session); err != nil {
				return err
			}
			if cfg.Turns, err = share.turns(); err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			cfg.Args = []string{"--log", level, "--log-format", format}
			return serve(ctx, logger(os.Stderr, level, format), cfg)
		},
	}
	offerFlags(cmd.Flags(), &cfg, &mem)
	share.add(cmd.Flags())
	p := cmd.PersistentFlags()
	sessionFlags(p, &cfg.Session, &sizes)
	p.StringVar(&format, "log-format", "text", "text or json")
	p.StringVar(&level, "log", "info", "least level to log: error, warn, info, debug")
	var devices int
	var confine worker.Confinement
	session := &cobra.Command{
		Use: "session", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := sizes.parse(&cfg.Session); err != nil {
				return err
			}
			log := logger(os.NewFile(control.LogFD, "log"), level, format)
			if confine.Devices != "" {
				return become(log, confine, cfg.Session)
			}
			return worker.RunSession(log, cfg.Session)
		},
	}
	probe := &cobra.Command{
		Use: "probe", Hidden: true, Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			log := logger(os.Stderr, level, format)
			if confine.Devices != "" {
				return become(log, confine, cfg.Session)
			}
			return worker.Probe(log, cfg.Session, devices, os.Stdout)
		},
	}
	for _, c := range []*cobra.Command{session, probe} {
		c.Flags().StringVar(&confine.Devices, "confine", "", "device files to see, or none")
		c.Flags().StringVar(&confine.Dir, "accounts", "", "directory of accounts")
		c.Flags().StringVar(&confine.Shared, "shared", "", "directory of the leases' directories for /dev/shm")
		c.Flags().IntVar(&devices, "devices", 1, "number of devices")
	}
	cmd.AddCommand(session, probe)
	cmd.CompletionOptions.HiddenDefaultCmd = true
	return cmd
}

// offerFlags adds the flags of what is lent and how sessions are kept.
func offerFlags(f *pflag.FlagSet, cfg *worker.Config, mem *string) {
	f.StringVar(&cfg.Listen, "listen", "tcp:127.0.0.1:7070", "where to listen: tcp:HOST:PORT or unix:PATH")
	f.IntSliceVar(&cfg.Devices, "device", []int{0}, "devices to lend, by their number in PCI order")
	f.StringVar(mem, "mem", "0", "device memory to lend of each, as 20G or 512M; 0 for all of it, and then only by lease")
	f.DurationVar(&cfg.Keepalive, "keepalive", 10*time.Second, "how long a peer may be silent")
	f.DurationVar(&cfg.Grace, "grace", 0, "how long a session waits for a client whose connection was lost; 0: it ends with the connection")
	f.IntVar(&cfg.Bulk, "bulk", 8, "most bulk connections of a session for each direction, over which large copies go; 0 for none")
	f.StringVar((*string)(&cfg.RDMA), "rdma", "off", "offer RDMA to clients that ask for it over TCP: off, on, or the name of the one device to use")
	f.BoolVar(&cfg.Plain, "no-compress", false, "have no client compress what it sends over a slow link")
}

// add adds the flags of how the devices' time is shared.
func (s *shareFlags) add(f *pflag.FlagSet) {
	f.StringVar(&s.policy, "turns", "", "share the devices' time by turns: "+strings.Join(form.Policies, ", ")+"; empty leaves it to the driver")
	f.IntSliceVar(&s.percents, "percent", nil, "with --turns: percent of each lease, in the order in which they come")
	f.DurationVar(&s.quantum, "quantum", 0, "with --turns: length of a turn; 0 for the default")
}

// storeSizes are the bounds of the stores, as they are given.
type storeSizes struct{ limit, keepFree, contentLimit, contentKeepFree string }

// sessionFlags are those of a session, which its own process is given, too.
func sessionFlags(p *pflag.FlagSet, s *worker.SessionConfig, sizes *storeSizes) {
	p.StringVar(&s.Store, "store", defaultStore("images"), "directory that keeps module images")
	p.StringVar(&sizes.limit, "store-limit", "20G", "most bytes that it may hold")
	p.StringVar(&sizes.keepFree, "store-keep-free", "2G", "space of its file system that it leaves free")
	p.StringVar(&s.Content, "content", defaultStore("content"), "directory that keeps what programs have copied to the GPU over slow links, so that they need not send it again")
	p.StringVar(&sizes.contentLimit, "content-limit", "0", "most bytes that it may hold; 0 keeps nothing")
	p.StringVar(&sizes.contentKeepFree, "content-keep-free", "10G", "space of its file system that it leaves free")
	p.StringVar(&s.Driver.LibCUDA, "libcuda", "libcuda.so.1", "the CUDA driver's library")
	p.StringVar(&s.Driver.LibNVML, "libnvml", "libnvidia-ml.so.1", "the NVML library")
	p.StringVar((*string)(&s.Sandbox), "sandbox", string(sandbox.Off), "have sessions compute and nothing else: off, auto, on, or log, which logs the system calls that would be refused")
}

// parse sets a session's bounds.
func (z *storeSizes) parse(s *worker.SessionConfig) error {
	for _, f := range []struct {
		name, text string
		to         *int64
	}{
		{"store-limit", z.limit, &s.Bounds.Limit}, {"store-keep-free", z.keepFree, &s.Bounds.KeepFree},
		{"content-limit", z.contentLimit, &s.ContentBounds.Limit}, {"content-keep-free", z.contentKeepFree, &s.ContentBounds.KeepFree},
	} {
		n, err := form.ParseBytes(f.text)
		if err != nil {
			return fmt.Errorf("--%s: %w", f.name, err)
		}
		*f.to = int64(n)
	}
	return nil
}

// become confines this process, and restarts it as the same command without that step.
func become(log *slog.Logger, c worker.Confinement, s worker.SessionConfig) error {
	c.Log, c.Sandbox, c.Driver, c.Store = log, s.Sandbox, s.Driver, s.Store
	if s.ContentBounds.Limit > 0 {
		c.Content = s.Content
	}
	return worker.Confine(c, withoutFlag(os.Args, "--confine"))
}

// shareFlags say how the devices' time is shared.
type shareFlags struct {
	policy   string
	percents []int
	quantum  time.Duration
}

func (f *shareFlags) turns() (*worker.Turns, error) {
	if f.policy == "" {
		return nil, nil
	}
	t := &worker.Turns{Percents: f.percents, Site: turns.Site{Quantum: f.quantum}}
	for _, n := range f.percents {
		if n < 1 || n > 100 {
			return nil, fmt.Errorf("--percent %d: give 1 to 100", n)
		}
	}
	name, lend := strings.CutSuffix(f.policy, "-lend")
	t.Lend = lend
	switch name {
	case "best-effort":
	case "equal":
		t.Kind = turns.Equal
	case "fixed":
		t.Kind = turns.Fixed
	default:
		return nil, fmt.Errorf("--turns %q: give one of %s", f.policy, strings.Join(form.Policies, ", "))
	}
	return t, nil
}

func serve(ctx context.Context, log *slog.Logger, cfg worker.Config) error {
	if cfg.Keepalive < 100*time.Millisecond || cfg.Keepalive > time.Hour {
		return fmt.Errorf("--keepalive %v: give 100ms to 1h", cfg.Keepalive)
	}
	if cfg.Grace < 0 || cfg.Grace > 24*time.Hour {
		return fmt.Errorf("--grace %v: give 0 to 24h", cfg.Grace)
	}
	if cfg.Bulk < 0 || cfg.Bulk > wire.MaxBulk {
		return fmt.Errorf("--bulk %d: give 0 to %d", cfg.Bulk, wire.MaxBulk)
	}
	s, err := worker.New(ctx, log, cfg)
	if err != nil {
		return err
	}
	l, err := wire.Listen(ctx, cfg.Listen)
	if err != nil {
		return err
	}
	log.Info("listening", "address", l.Addr().Network()+":"+l.Addr().String())
	return s.Serve(ctx, l)
}

// withoutFlag is args without a flag and its value.
func withoutFlag(args []string, flag string) []string {
	if i := slices.Index(args, flag); i >= 0 && i+1 < len(args) {
		return slices.Delete(slices.Clone(args), i, i+2)
	}
	return args
}

func logger(w io.Writer, level, format string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo
	}
	o := &slog.HandlerOptions{Level: l}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// defaultStore is where a store is unless a flag says so.
func defaultStore(of string) string {
	if d, err := os.UserCacheDir(); err == nil {
		return filepath.Join(d, "sluice", of)
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("sluice-%s-%d", of, os.Getuid()))
}
