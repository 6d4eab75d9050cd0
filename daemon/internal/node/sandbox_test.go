package node

import (
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// The default sandbox takes nothing from a site that has asked for RDMA, for the machine's /dev, or for no filter of system calls.
func TestSandboxMode(t *testing.T) {
	for _, c := range []struct {
		file    string
		mode    sandbox.Mode
		without string // part of the reason
	}{
		{"", sandbox.Auto, ""},
		{"session: {rdma: on}", sandbox.Off, "session.rdma is on"},
		{"session: {rdma: mlx5_0}", sandbox.Off, "session.rdma is mlx5_0"},
		{"{session: {rdma: on}, worker: {sandbox: on}}", sandbox.On, ""},
		{"{session: {rdma: on}, worker: {sandbox: off}}", sandbox.Off, ""},
		{"worker: {confine_dev: false}", sandbox.Off, "worker.confine_dev is false"},
		{"worker: {confine_dev: false, sandbox: on}", sandbox.On, ""},
		{"worker: {seccomp: false}", sandbox.Off, "worker.seccomp is false"},
		{"worker: {seccomp: false, sandbox: log}", sandbox.Off, "worker.seccomp is false"},
		{"worker: {seccomp: false, sandbox: off}", sandbox.Off, ""},
	} {
		cfg, err := config.Parse("f.yaml", []byte(c.file))
		if err != nil {
			t.Fatal(err)
		}
		if mode, without := sandboxMode(cfg); mode != c.mode || !strings.Contains(without, c.without) || (without == "") != (c.without == "") {
			t.Errorf("%q: %s, %q", c.file, mode, without)
		}
	}
}
