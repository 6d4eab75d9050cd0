package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/safefile"
)

// What the machine under the daemon lacks: room on its disks, a disk that outlives a reboot, a certificate that is still good.

const (
	// diskFail is the free space with which the next lease, or its line of the audit log, may not be kept any more, and diskWarn is
	// what a day of either fits into. In bytes.
	diskFail = 16 << 20
	diskWarn = 256 << 20
	// inodesWarn is the number of files that can still be made.
	inodesWarn = 1000
	// certWarn is how long before it expires a certificate is reported.
	certWarn = 30 * 24 * time.Hour
)

// machine returns the findings about this machine.
func (n *Node) machine(ctx context.Context) []rpc.Check {
	cfg := n.cfg.Load()
	out := append(disks(cfg, n.owner != nil), modes(cfg)...)
	if n.id != nil {
		if err := n.id.Works(ctx); err != nil {
			out = append(out, rpc.Check{Name: "munge", Level: rpc.Fail, Node: true, Text: fmt.Sprintf("this node cannot show others who it is: %v", err),
				Remedy: "systemctl status munge on this node; munge -n | unmunge has to work as root"})
		}
		if end, ok := n.id.Expires(); ok {
			out = append(out, certificate(cfg.TLS.Cert, time.Now(), end))
		}
	}
	return out
}

// disks looks at the file systems that the daemon writes to, each once.
func disks(cfg *config.Config, owner bool) []rpc.Check {
	var out []rpc.Check
	seen := map[unix.Fsid]bool{}
	good := 0
	for _, d := range []struct{ key, path string }{{"state_dir", cfg.StateDir}, {"audit.file", filepath.Dir(cfg.Audit.File)}, {"run_dir", cfg.RunDir}} {
		var st unix.Statfs_t
		if err := unix.Statfs(d.path, &st); err != nil {
			out = append(out, rpc.Check{Name: "disk", Level: rpc.Fail, Node: true, Text: fmt.Sprintf("%s %s: %v", d.key, d.path, err), Remedy: "mount it, or correct " + d.key})
			continue
		}
		if d.key == "state_dir" && memory(&st) {
			out = append(out, rpc.Check{Name: "disk", Level: rpc.Warn, Remedy: "put state_dir on a disk: " + d.path + " must outlive a reboot, which run_dir must not",
				Text: fmt.Sprintf("state_dir %s is in memory: after a reboot nobody knows who had which GPU", d.path)})
		}
		if seen[st.Fsid] {
			continue
		}
		seen[st.Fsid] = true
		if c := room(d.key, d.path, &st); c.Level != rpc.OK {
			out = append(out, c)
		} else {
			good++
		}
	}
	if owner {
		var st unix.Statfs_t
		err := unix.Statfs(cfg.StoreDir(), &st)
		if free := st.Bavail * uint64(st.Bsize); err == nil && free < uint64(cfg.Owner.StoreKeepFree) {
			out = append(out, rpc.Check{Name: "store", Level: rpc.Warn, Remedy: "make room there, move it by owner.store, or lower owner.store_keep_free",
				Text: fmt.Sprintf("%s has %d MiB free, and owner.store_keep_free is %v: programs send their images each time they start", cfg.StoreDir(), free>>20, cfg.Owner.StoreKeepFree)})
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			out = append(out, rpc.Check{Name: "store", Level: rpc.Warn, Text: fmt.Sprintf("%s: %v", cfg.StoreDir(), err), Remedy: "mount it, or correct owner.store"})
		}
	}
	if good > 0 && len(out) == 0 {
		out = append(out, rpc.Check{Name: "disk", Level: rpc.OK, Text: "there is room"})
	}
	return out
}

// modes looks for what an administrator's chmod or chown has made of the daemon's directories and sockets: users no longer reach the daemon, or it
// will not start again.
func modes(cfg *config.Config) []rpc.Check {
	var out []rpc.Check
	for _, p := range []struct {
		path       string
		want, need fs.FileMode // need is what users need of it: to pass a directory, and to write to a socket
	}{
		{cfg.RunDir, 0o755, 0o001}, {filepath.Join(cfg.RunDir, "leases"), 0o755, 0o001},
		{cfg.Socket(), 0o666, 0o002}, {cfg.JobSocket(), 0o666, 0o002},
	} {
		// What is not there is made again.
		if st, err := os.Lstat(p.path); err == nil && st.Mode()&p.need == 0 {
			out = append(out, rpc.Check{Name: "modes", Level: rpc.Fail, Node: true, Remedy: fmt.Sprintf("chmod %04o %s", p.want, p.path),
				Text: fmt.Sprintf("%s has mode %04o: users and their jobs cannot reach this daemon", p.path, st.Mode().Perm())})
		}
	}
	for _, d := range []struct{ key, path string }{{"state_dir", cfg.StateDir}, {"run_dir", cfg.RunDir}, {"audit.file", filepath.Dir(cfg.Audit.File)}} {
		if err := safefile.Dir(d.path); errors.Is(err, safefile.ErrUnsafe) {
			out = append(out, rpc.Check{Name: "modes", Level: rpc.Fail, Text: fmt.Sprintf("the daemon will not start again: %s: %v", d.key, err), Remedy: "sluiced --check says whether it would"})
		}
	}
	return out
}

// memory says whether a file system is in memory.
func memory(st *unix.Statfs_t) bool {
	return st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC
}

// room looks at what is free of one file system.
func room(key, path string, st *unix.Statfs_t) rpc.Check {
	c := rpc.Check{Name: "disk", Level: rpc.OK, Remedy: "make room there; leases and jobs that run go on"}
	free := st.Bavail * uint64(st.Bsize)
	switch {
	case st.Flags&unix.ST_RDONLY != 0:
		c.Level, c.Node = rpc.Fail, true
		c.Text, c.Remedy = fmt.Sprintf("%s %s is mounted read-only", key, path), "see dmesg for errors of its disk, and mount it for writing"
	case free < diskFail:
		c.Level, c.Node = rpc.Fail, true
		c.Text = fmt.Sprintf("%s %s has %d MiB free: nothing is granted once a lease cannot be written down", key, path, free>>20)
	case st.Files > 0 && st.Ffree < inodesWarn:
		c.Level = rpc.Warn
		c.Text = fmt.Sprintf("%s %s has room for %d files", key, path, st.Ffree)
	case free < diskWarn:
		c.Level = rpc.Warn
		c.Text = fmt.Sprintf("%s %s has %d MiB free", key, path, free>>20)
	}
	return c
}

// certificate says when the node's certificate ends.
func certificate(path string, now, end time.Time) rpc.Check {
	c := rpc.Check{Name: "certificate", Level: rpc.OK, Text: fmt.Sprintf("good until %s", end.UTC().Format(time.DateOnly))}
	switch left := end.Sub(now); {
	case left <= 0:
		c.Level, c.Node = rpc.Fail, true
		c.Text = fmt.Sprintf("%s has ended at %s: no other node talks to this one", path, end.UTC().Format(time.RFC3339))
	case left < certWarn:
		c.Level = rpc.Warn
		c.Text = fmt.Sprintf("%s, or its CA's, ends at %s, in %d days", path, end.UTC().Format(time.RFC3339), int(left.Hours()/24))
	}
	if c.Level != rpc.OK {
		c.Remedy = "sluice ca issue NODE where the CA is, copy both files here, systemctl reload sluiced"
	}
	return c
}
