package jobreport

// The end of a job's output.
//
// The Epilog runs as root, and the user chose the output's path: it may name any file of any
// file system, and that may hang. So a child with the user's own rights opens the file; it
// has nothing of the Epilog's but the text, and the Epilog waits three seconds for it. The
// child opens no link, and no device or pipe in a way that has an effect. It creates no file:
// if the job's output does not exist, nothing is written.
//
// The child starts as root and becomes the user by itself. So the kernel lets nobody but root
// trace it. That matters because the child is in none of the user's control groups and under none of
// a job's limits: a user who traces it could run anything in it.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// AppendCommand is the hidden command of sluice that Append runs: its arguments are who
// writes and the file, its input the text. It does Become and AppendTo.
const AppendCommand = "report-append"

// Option is the one that asks for the report, without "--rgpu-".
const Option = "report"

// appendTime is how long a file system may take.
const appendTime = 3 * time.Second

// maxText is more than any report.
const maxText = 4096

// maxGroups of a user are handed on: what one argument of a program can hold.
const maxGroups = 4096

// exitRefused is the child's exit status for a file that it does not write.
const exitRefused = 3

// Asked says whether the job asks for its report in its output.
func Asked(run rpc.JobRun) bool {
	w, ok := run.Options[Option]
	return ok && w != "no" && w != "0"
}

// Append writes the job's line at the end of its output, run.Stdout, if the job asks
// for that. It is for the node that the batch script ran on.
func Append(ctx context.Context, run rpc.JobRun, reports []lease.Report) error {
	text := Line(reports)
	if !Asked(run) || text == "" {
		return nil
	}
	if run.UID != reports[0].UID {
		return fmt.Errorf("job %s: report not appended: Slurm calls its user %d, the lease %d", run.Job, run.UID, reports[0].UID)
	}
	path := run.Stdout
	if path == "" || path == os.DevNull {
		return nil // srun and salloc have no file
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(run.WorkDir, path)
	}
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) {
		return fmt.Errorf("job %s: report not appended: output %q is no path", run.Job, run.Stdout)
	}
	if err := appendAs(ctx, run.UID, run.GID, path, text+"\n"); err != nil {
		return fmt.Errorf("job %s: report not appended to %q: %w", run.Job, path, err)
	}
	return nil
}

// appendAs runs the child.
func appendAs(ctx context.Context, uid, gid uint32, path, text string) error {
	ctx, cancel := context.WithTimeout(ctx, appendTime)
	defer cancel()
	// The directory of users may be as slow as the file.
	got := make(chan []uint32, 1)
	go func() { got <- groups(uid, gid) }()
	var gs []uint32
	select {
	case gs = <-got:
	case <-ctx.Done():
		return fmt.Errorf("groups of user %d: %w", uid, ctx.Err())
	}
	// Not CommandContext and Wait: a child in a system call of a dead file server
	// cannot be killed, and this process must end all the same.
	as := []string{strconv.FormatUint(uint64(uid), 10)}
	for _, g := range gs[:min(len(gs), maxGroups)] {
		as = append(as, strconv.FormatUint(uint64(g), 10))
	}
	cmd := exec.Command("/proc/self/exe", AppendCommand, strings.Join(as, ","), path)
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, out, err := os.Pipe()
	if err != nil {
		return err
	}
	// It fits the pipe whole.
	_, err = out.WriteString(text[:min(len(text), maxText)])
	out.Close()
	cmd.Stdin = in
	if err == nil {
		err = cmd.Start()
	}
	in.Close()
	if err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err = <-done:
	case <-ctx.Done():
		_ = cmd.Process.Kill()
		return fmt.Errorf("its file system does not answer: %w", ctx.Err())
	}
	var ee *exec.ExitError
	switch {
	case errors.As(err, &ee) && ee.ExitCode() == exitRefused:
		return errors.New("it is no regular file that the user may write")
	case err != nil:
		return fmt.Errorf("child: %w", err)
	}
	return nil
}

// groups are a user's, the primary one first.
func groups(uid, gid uint32) []uint32 {
	out := []uint32{gid}
	u, err := user.LookupId(strconv.FormatUint(uint64(uid), 10))
	if err != nil {
		return out
	}
	ids, err := u.GroupIds()
	if err != nil {
		return out
	}
	for _, id := range ids {
		if n, err := strconv.ParseUint(id, 10, 32); err == nil && uint32(n) != gid {
			out = append(out, uint32(n))
		}
	}
	return out
}

// Become makes root's process that of a user for good: as is the number of the user, of
// the group, and of the others that the user is in. Anybody else's stays whose it is.
func Become(as string) error {
	var ids []int
	for _, f := range strings.Split(as, ",") {
		n, err := strconv.ParseUint(f, 10, 32)
		if err != nil || n == math.MaxUint32 { // that would leave it as it is
			return fmt.Errorf("user %q: %q is not the number of a user or a group", as, f)
		}
		ids = append(ids, int(n))
	}
	if len(ids) < 2 {
		return fmt.Errorf("user %q: want UID,GID and further groups", as)
	}
	if os.Geteuid() != 0 {
		return nil
	}
	uid, gid := ids[0], ids[1]
	if err := errors.Join(syscall.Setgroups(ids[1:]), syscall.Setresgid(gid, gid, gid), syscall.Setresuid(uid, uid, uid)); err != nil {
		return fmt.Errorf("become user %d: %w", uid, err)
	}
	// The kernel has done so, unless fs.suid_dumpable says otherwise.
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// AppendTo is the child's work; it answers the exit status.
func AppendTo(path string, in io.Reader) int {
	text, err := io.ReadAll(io.LimitReader(in, maxText))
	if err != nil {
		return 1
	}
	// Looked at before it is opened: opening a device or a pipe does something.
	look, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return exitRefused
	}
	var st unix.Stat_t
	if unix.Fstat(look, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return exitRefused
	}
	const flags = unix.O_APPEND | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC
	same := fmt.Sprintf("/proc/self/fd/%d", look)
	fd, err := unix.Open(same, unix.O_RDWR|flags, 0)
	if err != nil {
		if fd, err = unix.Open(same, unix.O_WRONLY|flags, 0); err != nil {
			return exitRefused
		}
	}
	// A last line without end is not to be ours.
	var last [1]byte
	if n, _ := unix.Pread(fd, last[:], st.Size-1); n == 1 && last[0] != '\n' {
		text = append([]byte{'\n'}, text...)
	}
	if n, err := unix.Write(fd, text); err != nil || n != len(text) {
		return 1
	}
	if unix.Close(fd) != nil { // where NFS tells of a full disk
		return 1
	}
	return 0
}
