package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// startBase starts munged and, with accounting, the database.
func (l *Lab) startBase(ctx context.Context) error {
	key, sock := l.Path("munge.key"), "/run/munge/munge.socket.2"
	if _, err := l.base.Run(ctx, Root, "munged", "--force", "--num-threads=4", "--socket="+sock, "--key-file="+key,
		"--pid-file=/run/munge/munged.pid", "--log-file="+l.Path("log", "munged.log"), "--seed-file="+l.Path("munge", "seed")); err != nil {
		return fmt.Errorf("%w; install the package munge", err)
	}
	if !l.Options.Accounting {
		return nil
	}
	return l.startDatabase(ctx)
}

func (l *Lab) startDatabase(ctx context.Context) error {
	// Temporary tables are named by the process's number, which is the same in every cluster's own PID namespace.
	dir, tmp := l.Path("mysql"), l.Path("mysql.tmp")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Mkdir(tmp, 0o700)); err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "chown", "mysql:mysql", dir, tmp).CombinedOutput(); err != nil {
		return fmt.Errorf("chown: %w: %s; install the package mariadb-server", err, out)
	}
	cnf := l.Path("my.cnf")
	text := fmt.Sprintf("[mysqld]\ndatadir=%s\ntmpdir=%s\nsocket=%s/sock\nport=%d\nbind-address=127.0.0.1\nuser=mysql\nskip-log-bin\ninnodb_buffer_pool_size=32M\ninnodb_log_file_size=16M\ninnodb_flush_log_at_trx_commit=0\ninnodb_lock_wait_timeout=900\npid-file=%s/pid\nlog-error=%s\ninit-file=%s\n",
		dir, tmp, dir, l.Port+portSQL, dir, filepath.Join(dir, "error.log"), l.Path("init.sql"))
	if err := os.WriteFile(cnf, []byte(text), 0o644); err != nil {
		return err
	}
	sql := "CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'lab';\nCREATE USER IF NOT EXISTS 'slurm'@'localhost' IDENTIFIED BY 'lab';\n" +
		"GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\nGRANT ALL ON slurm_acct_db.* TO 'slurm'@'localhost';\n"
	if err := os.WriteFile(l.Path("init.sql"), []byte(sql), 0o644); err != nil {
		return err
	}
	if _, err := l.base.Run(ctx, Root, "mariadb-install-db", "--defaults-file="+cnf, "--auth-root-authentication-method=normal", "--skip-test-db"); err != nil {
		return err
	}
	if err := l.base.detach(ctx, l.Path("log", "mariadbd.log"), nil, "mariadbd", "--defaults-file="+cnf); err != nil {
		return err
	}
	return l.listening(ctx, portSQL, "mariadbd")
}

func (l *Lab) listening(ctx context.Context, port int, what string) error {
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(l.Port+port))
		if err == nil {
			return c.Close()
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			log, _ := l.Ctl.Run(context.WithoutCancel(ctx), Root, "tail", "-n", "8", "/var/log/slurm/"+what+".log")
			return fmt.Errorf("lab: %s does not listen: %w; its log ends:\n%s", what, err, log)
		}
	}
}

// StartController starts what runs on the controller: slurmdbd where there is accounting, slurmctld, sluiced.
func (l *Lab) StartController(ctx context.Context) error {
	if l.Options.Accounting && len(l.Ctl.PIDs("slurmdbd")) == 0 {
		if _, err := l.Ctl.Run(ctx, Slurm, "slurmdbd"); err != nil {
			return err
		}
		if err := l.listening(ctx, portDBD, "slurmdbd"); err != nil {
			return err
		}
		if err := l.accounts(ctx); err != nil {
			return err
		}
	}
	return errors.Join(l.Ctl.StartSluiced(ctx), l.StartSlurmctld(ctx))
}

// StartSlurmctld starts slurmctld with these arguments and waits until it answers.
func (l *Lab) StartSlurmctld(ctx context.Context, args ...string) error {
	if len(l.Ctl.PIDs("slurmctld")) > 0 {
		return nil
	}
	if _, err := l.Ctl.Run(ctx, Slurm, append([]string{"slurmctld"}, args...)...); err != nil {
		return err
	}
	if err := l.listening(ctx, portCtld, "slurmctld"); err != nil {
		return err
	}
	// From 24.11 on it listens before it has read all of its files, such as job_submit.lua.
	return Until(ctx, 60*time.Second, "slurmctld answers", func() error {
		out, err := l.Ctl.Run(ctx, Root, "scontrol", "ping")
		if err == nil && !strings.Contains(out, "is UP") {
			err = fmt.Errorf("scontrol ping: %s", out)
		}
		return err
	})
}

// accounts makes the account of the cluster's users.
func (l *Lab) accounts(ctx context.Context) error {
	for _, c := range [][]string{
		{"add", "cluster", l.Options.Name},
		{"add", "account", "research", "Cluster=" + l.Options.Name},
		{"add", "user", "alice,bob", "Account=research"},
	} {
		out, err := l.Ctl.Run(ctx, Root, append([]string{"sacctmgr", "-i"}, c...)...)
		if err != nil && !isThere(out+err.Error()) {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

// isThere is sacctmgr's refusal of what is in the database already, as everything is at a second start. Slurm 26.05 has other words for it.
func isThere(said string) bool {
	return slices.ContainsFunc([]string{"Nothing new added", "already exists", "Already existing", "Request didn't affect anything"},
		func(words string) bool { return strings.Contains(said, words) })
}

// Ready waits until every compute node that runs is idle or in use, and every owner's GPUs are seen.
func (l *Lab) Ready(ctx context.Context) error {
	return Until(ctx, poolWait, "the cluster is ready", func() error {
		out, err := l.Ctl.Run(ctx, Root, "sinfo", "-h", "-N", "-o", "%N %t")
		if err != nil {
			return err
		}
		ready := map[string]bool{}
		for line := range strings.Lines(out) {
			if f := strings.Fields(line); len(f) == 2 && (f[1] == "idle" || f[1] == "mix" || f[1] == "alloc" || f[1] == "comp") {
				ready[f[0]] = true
			}
		}
		for _, n := range l.Nodes {
			if !n.Up() || ready[n.Name] {
				continue
			}
			// sinfo lists no node that is in no partition, as an owner may be.
			if state, err := l.Ctl.Run(ctx, Root, "scontrol", "-o", "show", "node", n.Name); err != nil || !strings.Contains(state, " State=IDLE ") {
				return fmt.Errorf("node %s is not ready: %s", n.Name, out)
			}
		}
		return l.poolReady(ctx)
	})
}

// Ahead gives the cluster's daemons, and all that they start from now on, the processors before everybody else's
// programs: for measurements. A daemon that is started later is not one of them.
func (l *Lab) Ahead(ctx context.Context) error {
	args := []string{"--all-tasks", "--rr", "--pid", "1"}
	for _, n := range l.all() {
		for _, pid := range n.PIDs("") {
			// Threads end meanwhile, and whole processes.
			for tries := 0; startTime(pid) != 0; tries++ {
				out, err := exec.CommandContext(ctx, "chrt", append(args, strconv.Itoa(pid))...).CombinedOutput()
				if err == nil {
					break
				}
				if tries == 5 || ctx.Err() != nil {
					return fmt.Errorf("lab: chrt: %w: %s", err, out)
				}
			}
		}
	}
	return nil
}

// Until asks until f is content.
func Until(ctx context.Context, limit time.Duration, what string, f func() error) error {
	deadline := time.Now().Add(limit)
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, 200*time.Millisecond) {
		err := f()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s, not after %v: %w", what, limit, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w: %w", what, ctx.Err(), err)
		case <-time.After(wait):
		}
	}
}
