package firstday

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// networkFaults are told by sluice health of a node whose owner is across a network. Each has two nodes of its own.
func networkFaults() []fault {
	hostPool := func(owner string) func(*rig) {
		return func(r *rig) { r.two(map[string]string{"pools.default.owners": owner}, nil) }
	}
	return []fault{
		{wrong: "sluiced does not run on an owner", tells: health, says: "connection refused", cure: "start sluiced on gpu01", do: func(r *rig) {
			r.two(nil, nil)
			r.must(r.net.Owners[0].Kill())
		}},
		{wrong: "a firewall or a cable between node and owner", tells: health, says: "owner gpu01", cure: "no firewall drops packets to its ports 7071", do: func(r *rig) {
			r.two(nil, nil)
			r.must(r.net.Net.Cut(r.net.Owners[0].Node, true))
		}},
		{wrong: "an owner's port is wrong in pools", tells: health, says: "connection refused", cure: "or correct the port in pools", do: hostPool(`["gpu00=10.77.0.2:7081"]`)},
		{wrong: "an owner's name has no address", tells: health, says: "owner gpu01", cure: "correct the name in pools, /etc/hosts or DNS", do: hostPool(`[gpu00]`)},
		{wrong: "an owner's name is 127.0.1.1 in /etc/hosts of another node", tells: health, says: "owner gpu01", cure: "gpu01 is 127.0.1.1 on this node", do: func(r *rig) {
			r.two(map[string]string{"pools.default.owners": `[gpu00]`}, func() { r.hosts("127.0.1.1 gpu00\n") })
		}},
		{wrong: "pools name an owner by another name than its own", tells: health, says: `is node "gpu01", not "gpu02"`, cure: "see pools in sluice.yaml", do: hostPool(`["gpu02=10.77.0.2:7071"]`)},
		{wrong: "the munge keys differ", tells: health, says: "munge credential refused by gpu01", cure: "compare sha256sum /etc/munge/munge.key", do: func(r *rig) {
			r.two(nil, func() { r.munged("another key of a site ", "") })
		}},
		{wrong: "munged has ended on the node of jobs", tells: health, says: "munge: this node cannot show others who it is", cure: "systemctl status munge", also: "owner gpu01", do: func(r *rig) {
			r.two(nil, nil)
			_, err := r.net.Hosts[0].Node.Run(r.ctx, node.Command{Argv: []string{"sh", "-c", "kill $(cat /run/munge/pid)"}})
			r.must(err)
		}},
		{wrong: "the clocks are minutes apart", tells: health, says: "munge credential refused by gpu01", cure: "their clocks at most 5 minutes apart", do: func(r *rig) {
			r.two(nil, func() { r.munged("the key of this site ", r.shifted(20*time.Minute)) })
		}},
		{wrong: "an owner's clock is a minute and a half ahead", tells: health, says: "this node's clock is 1m30s behind that of gpu01", cure: "chronyc tracking", also: "runs sluice", do: func(r *rig) { r.other("90s", "") }},
		{wrong: "half of the nodes are upgraded", tells: health, says: "runs sluice 1.0-old", cure: "finish the upgrade", do: func(r *rig) { r.other("0s", "1.0-old") }},
		{wrong: "auth is munge on one node and tls on the other", tells: health, says: "auth must be the same on both nodes", cure: "", do: func(r *rig) {
			d := filepath.Join(r.dir, "tls")
			r.tls("host00")
			r.two(map[string]string{"auth": "tls", "tls.ca": d + "/ca.pem", "tls.cert": d + "/host00.pem", "tls.key": d + "/host00.key"}, nil)
		}},
		{wrong: "the container hook of another release", tells: health, says: "containers get another release's", cure: "sluice-hook prepare", do: func(r *rig) {
			d := filepath.Join(r.dir, "content")
			r.must(os.MkdirAll(d, 0o755))
			r.must(os.WriteFile(filepath.Join(d, "libcuda.so.1"), []byte("old"), 0o644))
			r.restart(r.job, func(s string) string { return s + "containers: {hook: /usr/bin/true, lib: " + d + "}\n" }, "")
		}},
	}
}

// two makes an owner and a node of jobs, each with a network and a munged of its own. host are keys of the
// second's sluice.yaml; before is done before its daemon starts.
func (r *rig) two(host map[string]string, before func()) {
	r.t.Helper()
	s, err := site.New(site.Options{Hosts: 1, Owners: 1, GPUs: 1, Build: r.Options.Build, CUDA: r.Options.CUDA, Config: map[string]string{"owner.store_keep_free": "1M", "log.level": "info"}})
	r.must(err)
	r.undo(s.Close)
	r.net = s
	r.must(s.Hosts[0].Configure(host))
	if before != nil {
		before()
	}
	for _, d := range s.Daemons() { // the owner first
		_, err := d.Up(r.ctx)
		r.must(err)
	}
}

// other has an owner that differs in its clock or its version.
func (r *rig) other(ahead, version string) {
	r.t.Helper()
	s, err := site.New(site.Options{Hosts: 1, Owners: 1, Build: r.Options.Build, CUDA: r.Options.CUDA})
	r.must(err)
	r.undo(s.Close)
	r.net = s
	o := s.Owners[0].Node
	c := o.Role(site.OtherOwner, o.Name, ahead, version)
	c.Stdout = filepath.Join(o.Dir, "other.out")
	c.Stderr = c.Stdout
	_, err = o.Start(c)
	r.must(err)
	r.must(lab.Until(r.ctx, 10*time.Second, "the other owner listens", func() error {
		text, err := os.ReadFile(c.Stdout)
		if err == nil && !strings.Contains(string(text), "ready") {
			err = os.ErrNotExist
		}
		return err
	}))
	_, err = s.Hosts[0].Up(r.ctx)
	r.must(err)
}

// hosts gives the node of jobs an /etc/hosts of its own.
func (r *rig) hosts(text string) {
	r.t.Helper()
	h := r.net.Hosts[0].Node
	path := filepath.Join(h.Dir, "hosts")
	r.must(os.WriteFile(path, []byte("127.0.0.1 localhost\n"+text), 0o644))
	_, err := h.Run(r.ctx, node.Command{Argv: []string{"mount", "--bind", path, "/etc/hosts"}})
	r.must(err)
}

// munged replaces the munged of the node of jobs by one with another key, or with a library before its others.
func (r *rig) munged(key, preload string) {
	r.t.Helper()
	h := r.net.Hosts[0].Node
	_, err := h.Run(r.ctx, node.Command{Argv: []string{"sh", "-c", "p=$(cat /run/munge/pid); kill $p; while kill -0 $p; do sleep 0.01; done 2>/dev/null; true"}})
	r.must(err)
	file := filepath.Join(h.Dir, "other.key")
	r.must(os.WriteFile(file, bytes.Repeat([]byte(key), 16), 0o600))
	argv := []string{"munged", "--force", "--num-threads=2", "--socket=/run/munge/munge.socket.2", "--key-file=" + file, "--pid-file=/run/munge/pid2",
		"--log-file=" + filepath.Join(h.Dir, "munged2.log"), "--seed-file=" + filepath.Join(h.Dir, "munge2.seed")}
	_, err = h.Run(r.ctx, node.Command{Argv: argv, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LD_PRELOAD=" + preload}})
	r.must(err)
}

// shifted makes a library that has a program's clock behind by d.
func (r *rig) shifted(d time.Duration) string {
	r.t.Helper()
	path := filepath.Join(r.net.Dir, "clock.so")
	cmd := exec.Command("cc", "-shared", "-fPIC", "-o", path, "-x", "c", "-", fmt.Sprintf("-DBEHIND=%d", int(d.Seconds())))
	cmd.Stdin = strings.NewReader(`#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
time_t time(time_t *t)
{
	struct timespec now;
	syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
	now.tv_sec -= BEHIND;
	if (t)
		*t = now.tv_sec;
	return now.tv_sec;
}
`)
	if out, err := cmd.CombinedOutput(); err != nil {
		r.t.Fatalf("cc: %v: %s", err, out)
	}
	return path
}

// askAcross runs sluice health on the node of jobs of the other site.
func (r *rig) askAcross() (string, error) {
	h := r.net.Hosts[0]
	return h.Node.Run(r.ctx, node.Command{Argv: []string{r.net.Opt("bin/sluice"), "health", "--json"}, Env: h.Env()})
}
