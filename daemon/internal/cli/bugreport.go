package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/redact"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/pattern"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Flow: parts are collected, each bounded in time and size, with the reason in place of one that fails; each goes through redact.Text. The
// archive is written only if none of the keys that this node has is in it.

const (
	partTime = 20 * time.Second // of one command
	partSize = 1 << 20          // of one part, in bytes: the end of it
)

// reported are the keys of slurm.conf that a report has. Others may have passwords, and are nobody's business.
var reported = pattern.New(`^(ClusterName|SlurmctldHost.*|SlurmctldParameters|SlurmUser|SLURM_VERSION|SLURM_CONF|GresTypes|Licenses|JobSubmitPlugins|Prolog.*|Epilog.*|HealthCheck.*|PlugStackConfig|PluginDir|` +
	`SelectType.*|SlurmdTimeout|KillWait|UnkillableStepTimeout|ProctrackType|TaskPlugin|JobContainerType|AccountingStorage(Type|TRES|Enforce)|AuthType|PrivateData|ReturnToService|SlurmdSpoolDir|Preempt(Mode|Type)|SchedulerType|MinJobAge|CompleteWait)$`)

type bugReport struct {
	out, config, socket string
	log                 string
	lines               int
	cfg                 *config.Config
	parts               []part
}

type part struct {
	name string
	text []byte
}

func newBugreport() *cobra.Command {
	var b bugReport
	cmd := &cobra.Command{
		Use:   "bugreport",
		Short: "Pack what a maintainer needs to know of this node, without secrets",
		Long: `Write one archive (tar, gzip; mode 0600) with versions, the configuration, health, state, the last lines
of the logs, the lines of slurm.conf that matter, kernel and driver. Run it as root on the node with the fault; on an
owner and on slurmctld's node too, if they take part in it.

Passwords, tokens, keys and credentials are taken out, and leases' ids cut short. If a key of this node were in
the archive all the same, it is not written. It has names of users, jobs, programs and nodes: look into it before you send it.

A file that is there is not overwritten.`,
		Example: "  sluice bugreport\n  sluice bugreport --out report.tar.gz && tar -tzf report.tar.gz",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := b.write(cmd.Context(), time.Now())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %d parts; it has names of users, jobs and nodes, so look into it before you send it\n", path, len(b.parts))
			return err
		},
	}
	f := cmd.Flags()
	f.StringVarP(&b.out, "out", "o", "", "archive to write (default: sluice-NODE-TIME.tar.gz in the current directory)")
	f.StringVarP(&b.config, "config", "c", config.DefaultPath, "configuration of sluiced")
	f.StringVar(&b.log, "log", "", "log of sluiced (default: systemd's journal)")
	f.IntVar(&b.lines, "log-lines", 2000, "last lines of each log")
	socketFlag(cmd, &b.socket)
	return cmd
}

func (b *bugReport) write(ctx context.Context, now time.Time) (string, error) {
	var loading error
	if b.cfg, loading = config.Load(b.config); loading != nil {
		c := config.Default()
		b.cfg = &c
	}
	if b.lines < 0 {
		return "", fmt.Errorf("--log-lines %d: give a number from 0", b.lines)
	}
	if b.out == "" {
		name := b.cfg.Node
		if name == "" {
			name, _ = os.Hostname()
		}
		b.out = fmt.Sprintf("sluice-%s-%s.tar.gz", name, now.Format("20060102-150405"))
	}
	if _, err := os.Lstat(b.out); err == nil {
		return "", fmt.Errorf("%s is there, and is not overwritten; name another by --out", b.out)
	}
	if b.socket == "" && os.Getenv("SLUICED_SOCKET") == "" {
		b.socket = b.cfg.Socket()
	}
	b.collect(ctx, loading)
	archive, err := b.pack(now)
	if err != nil {
		return "", err
	}
	if err := safefile.WriteNew(b.out, archive, safefile.How{Mode: 0o600}); errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("%s is there, and is not overwritten; name another by --out", b.out)
	} else if err != nil {
		return "", fmt.Errorf("bugreport: %w", err)
	}
	return b.out, nil
}

// add adds a part, without its secrets.
func (b *bugReport) add(name string, text []byte) {
	if len(text) > partSize {
		text = append([]byte("[the beginning is left out]\n"), text[len(text)-partSize:]...)
	}
	b.parts = append(b.parts, part{name, redact.Text(text)})
}

// run adds what commands print, or why they do not. Each is a program with its arguments.
func (b *bugReport) run(ctx context.Context, name string, commands ...[]string) {
	var out bytes.Buffer
	for _, argv := range commands {
		fmt.Fprintf(&out, "$ %s\n", strings.Join(argv, " "))
		c, cancel := context.WithTimeout(ctx, partTime)
		cmd := exec.CommandContext(c, argv[0], argv[1:]...)
		cmd.WaitDelay = time.Second
		cmd.Env = append(os.Environ(), "LC_ALL=C", "SYSTEMD_PAGER=", "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin:/usr/bin:/bin")
		text, err := cmd.CombinedOutput()
		cancel()
		out.Write(text[max(0, len(text)-partSize):])
		if err != nil {
			fmt.Fprintf(&out, "[%v]\n", err)
		}
		out.WriteByte('\n')
	}
	b.add(name, out.Bytes())
}

// file adds the end of a file, or why it cannot be read.
func (b *bugReport) file(name, path string, lines int) {
	f, err := os.Open(path)
	if err != nil {
		b.add(name, []byte(err.Error()+"\n"))
		return
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil && fi.Mode().IsRegular() && fi.Size() > partSize {
		_, _ = f.Seek(-partSize, io.SeekEnd)
	}
	text, err := io.ReadAll(io.LimitReader(f, partSize))
	if err != nil {
		text = append(text, err.Error()...)
	}
	b.add(name, lastLines(text, lines))
}

// lastLines are the last n lines; 0 is all.
func lastLines(text []byte, n int) []byte {
	at := len(bytes.TrimRight(text, "\n"))
	for range n {
		if at = bytes.LastIndexByte(text[:at], '\n'); at < 0 {
			return text
		}
	}
	if n == 0 {
		return text
	}
	return text[at+1:]
}

func (b *bugReport) collect(ctx context.Context, loading error) {
	self, err := os.Executable()
	if err != nil {
		self = "sluice"
	}
	daemon := "/usr/sbin/sluiced"
	if _, err := os.Stat(daemon); err != nil {
		daemon = "sluiced"
	}
	cfg := b.cfg
	b.add("README", []byte("Made by sluice bugreport. Secrets are replaced by "+redact.Removed+", and ids are cut short.\n"))
	b.run(ctx, "versions", []string{self, "version"}, []string{daemon, "--version"}, []string{filepath.Join(filepath.Dir(daemon), "sluice-worker"), "--version"},
		[]string{"sha256sum", filepath.Join(cfg.Slurm.Lib, "libcuda.so.1"), filepath.Join(cfg.Slurm.Lib, "libnvidia-ml.so.1")},
		[]string{"uname", "-a"}, []string{"cat", "/etc/os-release"}, []string{"ldd", "--version"}, []string{"systemctl", "--version"}, []string{"munge", "--version"}, []string{"scontrol", "--version"})
	if loading != nil {
		b.add("configuration-error", []byte(loading.Error()+"\n"))
	}
	b.file("sluice.yaml", b.config, 0)
	b.add("environment", environment())
	b.run(ctx, "check", []string{daemon, "--check", "--config", b.config})
	for name, argv := range map[string][]string{"health": {"health"}, "gpus": {"gpus"}, "list": {"list", "--sessions"}, "top": {"top", "--once"}} {
		b.run(ctx, name, append([]string{self}, append(argv, "--socket", b.socket)...))
	}
	b.run(ctx, "slurm-check", []string{self, "slurm", "check", "--config", b.config, "--socket", b.socket})
	b.slurm(ctx)
	if b.log != "" {
		b.file("sluiced.log", b.log, b.lines)
	} else {
		b.run(ctx, "sluiced.log", []string{"journalctl", "--unit", "sluiced", "--lines", strconv.Itoa(b.lines), "--no-pager"})
	}
	b.run(ctx, "unit", []string{"systemctl", "cat", "sluiced", "sluice-sessions", "--no-pager"}, []string{"systemctl", "status", "sluiced", "sluice-sessions", "--no-pager"})
	b.run(ctx, "audit", []string{self, "audit", "--file", cfg.Audit.File, "--last", strconv.Itoa(b.lines)})
	b.metrics(ctx)
	b.add("files", listing(cfg.StateDir, cfg.RunDir, filepath.Dir(cfg.Audit.File), cfg.Slurm.Lib, filepath.Dir(b.config), filepath.Dir(cfg.Socket())))
	b.run(ctx, "machine", []string{"df", "-hT", cfg.StateDir, cfg.RunDir, filepath.Dir(cfg.Audit.File)}, []string{"cat", "/proc/mounts"}, []string{"cat", "/proc/meminfo"}, []string{"ip", "address"}, []string{"ss", "-ltn"},
		[]string{"chronyc", "tracking"}, []string{"timedatectl"}, []string{"ps", "-eo", "pid,ppid,user,stat,etime,rss,comm"})
	b.run(ctx, "driver", []string{"cat", "/proc/driver/nvidia/version"}, []string{"nvidia-smi"}, []string{"nvidia-smi", "-q"}, []string{"sh", "-c", "ls -l /dev/nvidia*"})
	b.run(ctx, "kernel", []string{"sh", "-c", "dmesg --ctime | grep -iE 'nvrm|xid|nvidia|out of memory|oom|sluice|I/O error' | tail -n 500"})
}

// environment are the variables that Sluice's and Slurm's programs read.
func environment() []byte {
	var out []string
	for _, kv := range os.Environ() {
		if strings.HasPrefix(kv, "SLUICE") || strings.HasPrefix(kv, "SLURM") || strings.HasPrefix(kv, "LD_") || strings.HasPrefix(kv, "PATH=") || strings.HasPrefix(kv, "CUDA") {
			out = append(out, kv)
		}
	}
	slices.Sort(out)
	return []byte(strings.Join(out, "\n") + "\n")
}

// slurm adds the keys of slurm.conf that matter, and what names the plug-in.
func (b *bugReport) slurm(ctx context.Context) {
	c, cancel := context.WithTimeout(ctx, partTime)
	defer cancel()
	conf, err := slurm.New(b.cfg.Slurm.Bin, b.cfg.Slurm.Conf).Config(c)
	if err != nil {
		b.add("slurm.conf", []byte(err.Error()+"\n"))
		return
	}
	var out bytes.Buffer
	for k, v := range conf {
		if reported().MatchString(k) {
			fmt.Fprintf(&out, "%s=%s\n", k, v)
		}
	}
	lines := strings.SplitAfter(out.String(), "\n")
	slices.Sort(lines)
	b.add("slurm.conf", []byte(strings.Join(lines, "")))
	stack := conf["PlugStackConfig"]
	if stack == "" {
		stack = filepath.Join(filepath.Dir(conf["SLURM_CONF"]), "plugstack.conf")
	}
	b.file("plugstack.conf", stack, 0)
}

// metrics adds what the daemon exports, if it does.
func (b *bugReport) metrics(ctx context.Context) {
	if b.cfg.Listen.Metrics == "off" {
		return
	}
	host, port, _ := net.SplitHostPort(b.cfg.Listen.Metrics)
	if host == "" || host == "0.0.0.0" || host == "::" {
		host = "127.0.0.1"
	}
	ctx, cancel := context.WithTimeout(ctx, partTime)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/metrics", nil)
	if err != nil {
		return
	}
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		b.add("metrics", []byte(err.Error()+"\n"))
		return
	}
	defer r.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(r.Body, partSize))
	b.add("metrics", text)
}

// listing is owner, mode, size and time of what is in directories; no contents.
func listing(dirs ...string) []byte {
	var out bytes.Buffer
	slices.Sort(dirs)
	const most = 2000
	n := 0
	for _, d := range slices.Compact(dirs) {
		_ = filepath.WalkDir(d, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				fmt.Fprintf(&out, "%s: %v\n", path, err)
				return nil
			}
			if n++; n > most {
				return fs.SkipAll
			}
			if fi, err := e.Info(); err == nil {
				fmt.Fprintf(&out, "%s %s %12d %s %s\n", fi.Mode(), ownerText(fi), fi.Size(), fi.ModTime().UTC().Format(time.RFC3339), path)
			}
			return nil
		})
	}
	return out.Bytes()
}

// secrets are those that this node has, and this user may read.
func (b *bugReport) secrets() redact.Known {
	var k redact.Known
	files := []string{"/etc/munge/munge.key", "/var/spool/slurmctld/jwt_hs256.key", "/etc/slurm/jwt_hs256.key", "/etc/slurm/slurm.key", b.cfg.TLS.Key}
	more, _ := filepath.Glob("/etc/sluice/*/*.key")
	here, _ := filepath.Glob(filepath.Join(filepath.Dir(b.config), "*.key"))
	for _, f := range slices.Concat(files, more, here) {
		if text, err := os.ReadFile(f); f != "" && err == nil && len(text) < 64<<10 {
			k.Add(text)
		}
	}
	return k
}

func (b *bugReport) pack(now time.Time) ([]byte, error) {
	known := b.secrets()
	slices.SortFunc(b.parts, func(x, y part) int { return strings.Compare(x.name, y.name) })
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := tar.NewWriter(z)
	for _, p := range b.parts {
		if known.In(p.text) {
			return nil, fmt.Errorf("bugreport: part %s would have a key of this node; nothing is written. Please report that alone", p.name)
		}
		h := &tar.Header{Name: "sluice-bugreport/" + p.name, Mode: 0o600, Size: int64(len(p.text)), ModTime: now.Truncate(time.Second), Format: tar.FormatPAX}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(p.text); err != nil {
			return nil, err
		}
	}
	err := errors.Join(w.Close(), z.Close()) // before the bytes are taken
	return out.Bytes(), err
}

// ownerText is a file's owner and group, by number.
func ownerText(fi fs.FileInfo) string {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return fmt.Sprintf("%d:%d", st.Uid, st.Gid)
	}
	return "?"
}
