package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// GPU is what `sluice gpus --json` says of one.
type GPU struct {
	Owner       string `json:"owner"`
	UUID        string `json:"uuid"`
	Mem         uint64 `json:"mem"`
	Healthy     bool   `json:"healthy"`
	FreePercent uint32 `json:"free_percent"`
	FreeMem     uint64 `json:"free_mem"`
	Leases      int    `json:"leases"`
}

// Lease is what `sluice list --json` says of one.
type Lease struct {
	ID      string `json:"id"`
	State   string `json:"state"`
	Host    string `json:"host"`
	Sponsor string `json:"sponsor"`
	Request struct {
		Key struct {
			Cluster, Job, Node string
		} `json:"key"`
		UID     uint32 `json:"uid"`
		Restart uint32 `json:"restart"`
	} `json:"request"`
	Grants []struct {
		Owner   string `json:"owner"`
		GPU     string `json:"gpu"`
		Percent uint32 `json:"percent"`
		Mem     uint64 `json:"mem"`
	} `json:"grants"`
	Sessions []struct {
		ID      string `json:"id"`
		Client  int    `json:"client_pid"`
		Program string `json:"program"`
	} `json:"sessions"`
}

// ask has the node's sluice print something as JSON.
func (n *Node) ask(ctx context.Context, v any, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := n.Run(ctx, Root, append([]string{"sluice"}, args...)...)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), v); err != nil {
		return fmt.Errorf("%s: sluice %s: %w: %s", n.Name, strings.Join(args, " "), err, out)
	}
	return nil
}

// Leases are those that the node's daemon has: as host, and as owner.
func (n *Node) Leases(ctx context.Context) ([]Lease, error) {
	var ls []Lease
	return ls, n.ask(ctx, &ls, "list", "--json")
}

// GPUs are those of the pools that the node's jobs may use. An owner that does not answer is an error.
func (n *Node) GPUs(ctx context.Context) ([]GPU, error) {
	var pools []struct {
		Owners []struct {
			Name      string
			Error     string
			Inventory struct {
				GPUs []GPU `json:"gpus"`
			}
		}
	}
	if err := n.ask(ctx, &pools, "gpus", "--json"); err != nil {
		return nil, err
	}
	var all []GPU
	for _, p := range pools {
		for _, o := range p.Owners {
			if x := n.lab.Node(o.Name); o.Error != "" && (x == nil || x.Up()) {
				return nil, fmt.Errorf("owner %s: %s", o.Name, o.Error)
			}
			all = append(all, o.Inventory.GPUs...)
		}
	}
	return all, nil
}

// sluices are the nodes that should have a running sluiced.
func (l *Lab) sluices() []*Node {
	if l.Options.NoSluice {
		return nil
	}
	var up []*Node
	for _, n := range append([]*Node{l.Ctl}, l.Nodes...) {
		if n.Up() {
			up = append(up, n)
		}
	}
	return up
}

func (l *Lab) poolReady(ctx context.Context) error {
	want := 0
	for _, n := range l.Nodes {
		if n.Up() {
			want += n.spec.GPUs
		}
	}
	for _, n := range l.sluices() {
		all, err := n.GPUs(ctx)
		if err != nil {
			return err
		}
		healthy := map[string]bool{}
		for _, g := range all {
			healthy[g.UUID+g.Owner] = g.Healthy
		}
		if len(healthy) != want {
			return fmt.Errorf("node %s sees %d of %d GPUs", n.Name, len(healthy), want)
		}
		for id, ok := range healthy {
			if !ok {
				return fmt.Errorf("node %s: gpu %s is not healthy", n.Name, id)
			}
		}
	}
	return nil
}

// Clean says what is left of jobs: in the queue, at the owners, as processes, as licences, as nodes that are not
// fit for work. nil is the state of a cluster that has never seen one.
func (l *Lab) Clean(ctx context.Context) error {
	var errs []error
	out, err := l.Ctl.Run(ctx, Root, "squeue", "-h", "-o", "%i %T %r")
	if err != nil {
		return err
	}
	if out = strings.TrimSpace(out); out != "" {
		errs = append(errs, fmt.Errorf("jobs: %s", strings.ReplaceAll(out, "\n", "; ")))
	}
	if out, err = l.Ctl.Run(ctx, Root, "sinfo", "-h", "-N", "-o", "%N %T %E"); err != nil {
		return err
	}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) < 2 || f[1] != "idle" {
			errs = append(errs, fmt.Errorf("node %s", strings.TrimSpace(line)))
		}
	}
	lics, err := l.Licences(ctx)
	errs = append(errs, err)
	for name, v := range lics {
		if v.Used != 0 {
			errs = append(errs, fmt.Errorf("licence %s: %d of %d in use", name, v.Used, v.Total))
		}
	}
	if l.Options.NoSluice {
		return errors.Join(errs...)
	}
	for _, n := range l.sluices() {
		ls, err := n.Leases(ctx)
		errs = append(errs, err)
		for _, s := range ls {
			errs = append(errs, fmt.Errorf("%s: lease %s of job %s on %s (%s), %d sessions", n.Name, s.ID, s.Request.Key.Job, s.Request.Key.Node, s.State, len(s.Sessions)))
		}
	}
	if up := l.sluices(); len(up) > 0 {
		gpus, err := up[0].GPUs(ctx)
		errs = append(errs, err)
		for _, g := range gpus {
			if g.FreePercent != 100 || g.FreeMem != g.Mem || g.Leases != 0 {
				errs = append(errs, fmt.Errorf("gpu %s of %s: %d%% and %d of %d bytes free, %d leases", g.UUID, g.Owner, g.FreePercent, g.FreeMem, g.Mem, g.Leases))
			}
		}
	}
	for _, n := range l.Nodes {
		errs = append(errs, n.leftovers())
	}
	return errors.Join(errs...)
}

// leftovers are processes and sockets of jobs on a node. A worker that is kept ready for a session is none.
func (n *Node) leftovers() error {
	if !n.Up() {
		return nil
	}
	var errs []error
	for _, pid := range n.PIDs("") {
		if uid, name := owner(pid); uid == Alice.UID || uid == Bob.UID || name == "slurmstepd" {
			errs = append(errs, fmt.Errorf("%s: process %d (%s) of user %d", n.Name, pid, name, uid))
		}
	}
	warm := 1
	if w, err := strconv.Atoi(n.lab.Options.Sluice["owner.warm"]); err == nil {
		warm = w
	}
	if k := len(n.PIDs("sluice-worker")); k > warm*n.spec.GPUs {
		errs = append(errs, fmt.Errorf("%s: %d workers for %d GPUs", n.Name, k, n.spec.GPUs))
	}
	for _, d := range []string{"leases", "leases.new", "owner"} {
		all, _ := os.ReadDir(filepath.Join(n.Dir, "run/sluice", d))
		for _, e := range all {
			errs = append(errs, fmt.Errorf("%s: /run/sluice/%s/%s", n.Name, d, e.Name()))
		}
	}
	cdi, _ := os.ReadDir(filepath.Join(n.Dir, "run/cdi"))
	for _, e := range cdi {
		errs = append(errs, fmt.Errorf("%s: /run/cdi/%s", n.Name, e.Name()))
	}
	return errors.Join(errs...)
}

// owner is a process's real user and its name.
func owner(pid int) (uid int, name string) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return -1, ""
	}
	uid = -1
	for line := range strings.Lines(string(b)) {
		switch f := strings.Fields(line); {
		case len(f) > 1 && f[0] == "Name:":
			name = f[1]
		case len(f) > 1 && f[0] == "Uid:":
			uid, _ = strconv.Atoi(f[1])
		}
	}
	return uid, name
}
