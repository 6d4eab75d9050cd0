package cli

import (
	"context"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// envDaemon knows the environments of three jobs.
type envDaemon struct {
	rpc.LocalService
	rpc.JobService
}

func (envDaemon) Env(_ context.Context, _ rpc.Peer, job string) ([]rpc.EnvOp, error) {
	switch job {
	case "4711":
		return []rpc.EnvOp{
			{Name: "SLUICE_SOCKET", Value: "/run/it's $HOME/lease.sock"},
			{Name: "LD_LIBRARY_PATH", Value: "/usr/lib/sluice", Prepend: true},
			{Name: "APPTAINER_BINDPATH", Value: "/a", Prepend: true},
			{Name: "APPTAINER_BINDPATH", Value: "/b", Prepend: true},
		}, nil
	case "4712":
		return nil, lease.Errorf(lease.NoRoom, "gpu01 has 10%% left")
	case "4713":
		return []rpc.EnvOp{{Name: "A;reboot", Value: "x"}}, nil
	}
	return nil, nil
}

func TestEnv(t *testing.T) {
	dir, err := os.MkdirTemp("", "slu")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	l, err := rpc.ListenLocal(socket, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s := rpc.NewServer(rpc.LocalCreds(), "test")
	rpc.ServeLocal(s, envDaemon{})
	rpc.ServeJobs(s, envDaemon{})
	go func(l net.Listener) { _ = s.Serve(l) }(l)
	t.Cleanup(s.Stop)
	call := func(job string, args ...string) (string, int) {
		cmd := sluice(append([]string{"env", "--socket", socket}, args...)...)
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH=/a:/usr/lib/sluice", "SLURM_JOB_ID="+job, "APPTAINER_BINDPATH=")
		b, err := cmd.CombinedOutput()
		return string(b), exitStatus(t, err)
	}
	out, status := call("4711")
	if want := "export SLUICE_SOCKET='/run/it'\\''s $HOME/lease.sock'\nexport LD_LIBRARY_PATH='/usr/lib/sluice:/a'\nexport APPTAINER_BINDPATH='/b,/a'\n" +
		"export SLUICE_ENV='set SLUICE_SOCKET=/run/it'\\''s $HOME/lease.sock|prepend LD_LIBRARY_PATH=/usr/lib/sluice|bind APPTAINER_BINDPATH=/a|bind APPTAINER_BINDPATH=/b|'\n"; out != want || status != 0 {
		t.Errorf("env, status %d:\n%swant:\n%s", status, out, want)
	}
	shell := exec.Command("sh", "-c", out+`printf %s "$SLUICE_SOCKET"`)
	if b, err := shell.Output(); err != nil || string(b) != "/run/it's $HOME/lease.sock" {
		t.Errorf("the shell understands %q, %v", b, err)
	}
	if by, _ := call("1", "4711"); by != out {
		t.Errorf("by number: %s", by)
	}
	for _, c := range []struct{ env, arg, want string }{
		{"4712", "", "gpu01 has 10% left"},
		{"4713", "", "not the name of a variable"},
		{"1", "", "job 1 has no fraction on this node"},
		{"", "", "no job of this shell"},
		{"", "run-17", "use Slurm's own job id"},
		{"", "17_3", "-o JobIDRaw prints it"},
	} {
		args := []string{}
		if c.arg != "" {
			args = []string{c.arg}
		}
		if out, status := call(c.env, args...); status != 1 || !strings.Contains(out, c.want) {
			t.Errorf("job %q %q: status %d, %s", c.env, c.arg, status, out)
		}
	}
}
