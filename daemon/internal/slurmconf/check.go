package slurmconf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/pattern"
)

// Slurm is what is asked of it, *slurm.Commands.
type Slurm interface {
	Config(ctx context.Context) (map[string]string, error)
	Licences(ctx context.Context) (map[string]slurm.Licence, error)
	NodeGres(ctx context.Context) (map[string]string, error)
	Partitions(ctx context.Context) ([]string, error)
}

// prologTime is the longest that a Prolog of ours takes, in seconds.
const prologTime = 30

type checker struct {
	cfg  *config.Config
	t    *Table
	conf map[string]string
	out  []rpc.Check
}

// Check looks at what this node can see of a site: slurm.conf as slurmctld has it, the
// scripts, and the plug-in. table is nil if the pools cannot be counted now, for the
// reason why. The findings are in the order of the guide.
func Check(ctx context.Context, cfg *config.Config, table *Table, why error, s Slurm) []rpc.Check {
	c := &checker{cfg: cfg, t: table}
	if why != nil {
		c.add("pools", rpc.Fail, why.Error(), "see sluice health")
	} else {
		c.ok("pools", "%d, and all their owners answer", len(table.Pools))
	}
	var err error
	if c.conf, err = s.Config(ctx); err != nil {
		text := err.Error()
		// scontrol of 24.11 and later tries again for longer than it is waited for.
		if errors.Is(err, context.DeadlineExceeded) || strings.Contains(text, "Unable to contact slurm controller") {
			text = "slurmctld does not answer: " + text
		}
		// Slurm's commands ask munge first. Their own error may have come of the end of ctx.
		if err := identity.MungeWorks(context.WithoutCancel(ctx)); err != nil {
			c.fail("munge", "systemctl restart munge, and see journalctl -u munge", "%v: scontrol cannot prove who asks", err)
			text += "; munge, above, may be why"
		}
		c.add("slurmctld", rpc.Fail, text, "see that slurmctld runs, and that scontrol works here; slurm.bin and slurm.conf in sluice.yaml say where Slurm is")
		return c.out
	}
	c.cluster()
	nodes, err := s.NodeGres(ctx)
	c.gres(nodes, err)
	c.partitions(s.Partitions(ctx))
	c.licences(s.Licences(ctx))
	c.accounting()
	if cfg.IsController() {
		c.submit()
		c.slurmUser()
	}
	c.hooks()
	c.times()
	c.users()
	c.plugin()
	c.here(nodes)
	return c.out
}

func (c *checker) add(name string, level rpc.Level, text, remedy string) {
	c.out = append(c.out, rpc.Check{Name: name, Level: level, Text: text, Remedy: remedy})
}

func (c *checker) ok(name, format string, a ...any) {
	c.add(name, rpc.OK, fmt.Sprintf(format, a...), "")
}

func (c *checker) warn(name, remedy, format string, a ...any) {
	c.add(name, rpc.Warn, fmt.Sprintf(format, a...), remedy)
}

func (c *checker) fail(name, remedy, format string, a ...any) {
	c.add(name, rpc.Fail, fmt.Sprintf(format, a...), remedy)
}

func list(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

func (c *checker) cluster() {
	if name := c.conf["ClusterName"]; name != c.cfg.Cluster {
		c.fail("cluster", "set cluster: "+name+" in sluice.yaml on every node", "slurmctld's is %s and sluice.yaml's is %s: leases would be compared with another cluster's jobs", name, c.cfg.Cluster)
	} else {
		c.ok("cluster", "%s", name)
	}
	const remedy = "name slurmctld's nodes in sluice.yaml of every node: slurm: {controllers: [...]}"
	if len(c.cfg.Slurm.Controllers) == 0 {
		c.warn("controllers", remedy, "none: no daemon may reserve for jobs before they start, nor end what lost its Epilog")
		return
	}
	known := map[string]bool{}
	for _, n := range c.cfg.Slurm.Controllers {
		known[host(n)] = true
	}
	for _, k := range sorted(c.conf) {
		if name := host(c.conf[k]); strings.HasPrefix(k, "SlurmctldHost[") && !known[name] {
			c.warn("controllers", remedy, "%s runs slurmctld, and slurm.controllers does not name it", name)
		}
	}
}

// host is a host's name without its address and domain: head1(10.0.0.1), head1.example.org.
func host(s string) string {
	s, _, _ = strings.Cut(s, "(")
	s, _, _ = strings.Cut(s, ".")
	return s
}

func (c *checker) gres(nodes map[string]string, err error) {
	if !slices.Contains(list(c.conf["GresTypes"]), Gres) {
		c.fail("gres", "GresTypes="+Gres+" in slurm.conf, then restart slurmctld and the slurmds", "GresTypes is %q: --gres=%s is refused", c.conf["GresTypes"], Gres)
		return
	}
	if err != nil {
		c.fail("gres", "", "%v", err)
		return
	}
	var without, other []string
	want := map[string]bool{}
	if c.t != nil {
		for _, typ := range c.t.types() {
			want[typ] = true
		}
	}
	for _, n := range sorted(nodes) {
		have := map[string]bool{}
		got, err := slurm.ParseGres(strings.ReplaceAll(nodes[n], ":no_consume", "")) // which 22.05 leaves away
		untyped := false
		for _, g := range got {
			if g.Name == Gres {
				have[g.Type] = true
				untyped = untyped || g.Type == ""
			}
		}
		switch {
		case err == nil && len(have) == 0:
			without = append(without, n)
		case c.t != nil && (err != nil || untyped != (len(want) == 0) || !holds(have, want)):
			other = append(other, n)
		}
	}
	switch {
	case len(without) == len(nodes):
		c.fail("gres", "add it to the nodes whose jobs may ask: Gres="+c.gresLine(), "no node has %s", Gres)
	case len(other) > 0:
		c.fail("gres", "Gres="+c.gresLine()+", then restart slurmctld and the slurmds", "%s: no %s as the pools have it, with all types or without any", some(other), Gres)
	case len(without) > 0:
		c.ok("gres", "%d of %d nodes; not %s", len(nodes)-len(without), len(nodes), some(without))
	default:
		c.ok("gres", "%d nodes", len(nodes))
	}
}

func (c *checker) gresLine() string {
	if c.t == nil {
		return fmt.Sprintf("%s:no_consume:%d", Gres, ceiling)
	}
	return c.t.NodeGres()
}

func holds(have, want map[string]bool) bool {
	for k := range want {
		if !have[k] {
			return false
		}
	}
	return true
}

func some(names []string) string {
	if len(names) > 4 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), len(names)-3)
	}
	return strings.Join(names, ", ")
}

func (c *checker) licences(have map[string]slurm.Licence, err error) {
	if err != nil {
		c.fail("licences", "", "%v", err)
		return
	}
	if c.t == nil {
		return
	}
	want := c.t.Licences()
	for _, name := range sorted(want) {
		l, ok := have[name]
		switch n := uint64(want[name]); {
		case !ok:
			c.fail("licences", fmt.Sprintf("Licenses=%s:%d in slurm.conf, then scontrol reconfigure", name, n), "%s is missing: jobs of its pool cannot be submitted", name)
		case l.Total > n:
			c.fail("licences", fmt.Sprintf("Licenses=%s:%d in slurm.conf, then scontrol reconfigure", name, n), "%s: %d, and the GPUs are %d: Slurm would start jobs that have no room", name, l.Total, n)
		case l.Total < n:
			c.warn("licences", fmt.Sprintf("Licenses=%s:%d in slurm.conf, then scontrol reconfigure", name, n), "%s: %d, and the GPUs are %d: a part is never used", name, l.Total, n)
		default:
			c.ok("licences", "%s: %d", name, n)
		}
	}
}

func (c *checker) accounting() {
	if !strings.Contains(c.conf["AccountingStorageType"], "slurmdbd") {
		c.warn("accounting", "", "there is no slurmdbd: nothing limits or accounts the pool's licences by user")
		return
	}
	if c.t == nil {
		return
	}
	have := list(c.conf["AccountingStorageTRES"])
	for _, l := range sorted(c.t.Licences()) {
		name, _, _ := strings.Cut(l, "@")
		if !slices.Contains(have, "license/"+name) {
			c.warn("accounting", "AccountingStorageTRES=license/"+name+" in slurm.conf, then restart slurmctld", "license/%s is not accounted, and cannot be limited", name)
		}
	}
}

// A site's job_submit.lua may name its table, and calls ours in any way.
var (
	luaTable = pattern.New(`\.table\s*\(\s*["']([^"']+)["']`)
	luaCall  = pattern.New(`\.(apply|modify)\s*\(`)
)

// callsOurs says whether a job_submit.lua has jobs charged.
func callsOurs(text []byte) bool {
	calls := map[string]bool{}
	for _, m := range luaCall().FindAllSubmatch(text, -1) {
		calls[string(m[1])] = true
	}
	return bytes.Contains(text, []byte("sluice.lua")) && calls["apply"] && calls["modify"]
}

func (c *checker) submit() {
	if !slices.Contains(list(c.conf["JobSubmitPlugins"]), "lua") {
		c.fail("job_submit", "JobSubmitPlugins=lua in slurm.conf, then restart slurmctld", "JobSubmitPlugins is %q: no job is charged", c.conf["JobSubmitPlugins"])
		return
	}
	dir := filepath.Dir(c.conf["SLURM_CONF"])
	script := filepath.Join(dir, "job_submit.lua")
	text, err := os.ReadFile(script)
	switch {
	case err != nil:
		c.fail("job_submit", "copy it from "+Scripts, "%v", err)
		return
	case !callsOurs(text):
		c.fail("job_submit", "load "+Scripts+"/sluice.lua in it, and call apply and modify; see "+Scripts+"/job_submit.lua", "%s does not call Sluice's", script)
		return
	}
	if !c.loads(text) {
		return
	}
	table := filepath.Join("/etc/slurm", TableName)
	if m := luaTable().FindSubmatch(text); m != nil {
		table = string(m[1])
	}
	got, err := os.ReadFile(table)
	switch {
	case err != nil:
		c.fail("job_submit", "sluice slurm lua --out "+table, "%v: jobs that ask are refused", err)
	case c.t != nil && !bytes.Equal(got, c.t.Lua()):
		c.fail("job_submit", "sluice slurm lua --out "+table, "%s is not that of the pools as they are", table)
	default:
		c.ok("job_submit", "%s, %s", script, table)
	}
}

// hooks looks whether each script is named, and runs ours. A script that cannot be
// read from here may be another node's.
func (c *checker) hooks() {
	for _, h := range hooks {
		ctld := strings.HasSuffix(h.key, "Slurmctld")
		if ctld && !c.cfg.IsController() {
			continue
		}
		files := c.scripts(h.key)
		remedy := fmt.Sprintf("%s=%s/%s.sh in slurm.conf, or its line in the site's own", h.key, Scripts, h.file)
		switch found, read := calls(files, "sluice "+h.file, Scripts+"/"+h.file+".sh"); {
		case len(files) == 0 && h.key == "PrologSlurmctld":
			c.warn(h.key, remedy, "is not set: a job that finds no room is requeued only once its nodes have started it")
		case len(files) == 0:
			c.fail(h.key, remedy, "is not set")
		case executable(files) != "":
			c.fail(h.key, "chmod 0755 "+executable(files), "%s cannot be executed", executable(files))
		case !found && read:
			c.fail(h.key, remedy, "%s does not run sluice %s", strings.Join(files, ", "), h.file)
		case !found:
			c.warn(h.key, "run this check on a node that has them", "%s cannot be read here", strings.Join(files, ", "))
		default:
			c.ok(h.key, "%s", strings.Join(files, ", "))
		}
	}
	flags := strings.ToLower(c.conf["PrologFlags"])
	switch {
	case strings.Contains(flags, "contain"):
		c.ok("PrologFlags", "%s", c.conf["PrologFlags"])
	default:
		c.warn("PrologFlags", "PrologFlags=Contain in slurm.conf, then restart slurmctld and the slurmds", "without Contain a node of a job without a step has no lease, and a daemon cannot tell which jobs live")
	}
}

// scripts are the files of a key: one, several with their number, or a pattern.
func (c *checker) scripts(key string) []string {
	var out []string
	for _, k := range sorted(c.conf) {
		if name, _, _ := strings.Cut(k, "["); name != key || c.conf[k] == "" {
			continue
		}
		for _, p := range list(c.conf[k]) {
			if match, err := filepath.Glob(p); err == nil && len(match) > 0 {
				out = append(out, match...)
			} else {
				out = append(out, p)
			}
		}
	}
	return out
}

func calls(files []string, what ...string) (found, read bool) {
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		read = true
		for line := range bytes.Lines(text) {
			line = bytes.TrimSpace(line)
			if !bytes.HasPrefix(line, []byte("#")) && slices.ContainsFunc(what, func(w string) bool { return word(line, w) }) {
				return true, true
			}
		}
	}
	return false, read
}

// word is whether what is in line and is no part of a longer one: prolog-ctld is not
// prolog.
func word(line []byte, what string) bool {
	i := bytes.Index(line, []byte(what))
	return i >= 0 && (i+len(what) == len(line) || bytes.ContainsAny(line[i+len(what):i+len(what)+1], " \t\"';|&>)"))
}

func seconds(s string) (int, bool) {
	f := strings.Fields(s)
	if len(f) == 0 {
		return 0, false
	}
	n, err := strconv.Atoi(f[0])
	return n, err == nil
}

func (c *checker) times() {
	silence := c.cfg.Lease.Silence
	if n, ok := seconds(c.conf["SlurmdTimeout"]); ok && n > 0 {
		if limit := time.Duration(n) * time.Second; silence >= limit {
			c.fail("SlurmdTimeout", fmt.Sprintf("lease.silence below %v in sluice.yaml of the owners, or a longer SlurmdTimeout", limit),
				"is %v and lease.silence %v: the licences of a dead node's job go to the next before its GPUs do", limit, silence)
		} else {
			c.ok("SlurmdTimeout", "%v, and lease.silence %v", limit, silence)
		}
	}
	for _, key := range []string{"PrologEpilogTimeout", "PrologTimeout", "EpilogTimeout"} {
		if n, ok := seconds(c.conf[key]); ok && n > 0 && n < prologTime {
			c.fail(key, fmt.Sprintf("%s=%d or more in slurm.conf", key, prologTime), "is %d s: slurmd would drain the node of a job whose pool answers slowly", n)
		}
	}
}

func (c *checker) users() {
	if c.cfg.Users.Run {
		c.warn("users.run", "users: {run: false} in sluice.yaml, live", "users get fractions outside of jobs too, by sluice run: Slurm neither limits nor accounts those")
	} else {
		c.ok("users.run", "fractions are for jobs only")
	}
}

func (c *checker) plugin() {
	file := c.conf["PlugStackConfig"]
	if file == "" {
		file = filepath.Join(filepath.Dir(c.conf["SLURM_CONF"]), "plugstack.conf")
	}
	so, line := findPlugin(file, 0)
	remedy := "include plugstack.conf.d/*.conf in " + file + ", with sluice.conf there; on the nodes that submit jobs too"
	if so == "" {
		c.fail("plug-in", remedy, "%s does not name spank_sluice.so", file)
		return
	}
	path := so
	if !filepath.IsAbs(path) {
		path = filepath.Join(c.conf["PluginDir"], so)
	}
	built, err := release(path)
	var runs string
	if v := strings.Split(c.conf["SLURM_VERSION"], "."); len(v) > 1 {
		runs = v[0] + "." + v[1]
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		c.fail("plug-in", "install the package sluice-spank on every node", "%v", err)
	case err != nil:
		c.fail("plug-in", "install the package sluice-spank again", "%s: %v", path, err)
	case built != "" && runs != "" && built != runs:
		c.fail("plug-in", "install sluice-spank, which is for all releases, or that of "+runs, "%s is for Slurm %s and this is %s: it is left out, and jobs with a fraction have no GPU", path, built, runs)
	case strings.HasPrefix(line, "required"):
		c.warn("plug-in", "write optional", "%s is required: after an upgrade of Slurm a plug-in that does not fit keeps slurmd from starting", so)
	default:
		c.ok("plug-in", "%s", path)
	}
}

// findPlugin reads plugstack.conf and what it includes.
func findPlugin(file string, depth int) (so, line string) {
	text, err := os.ReadFile(file)
	if err != nil || depth > 4 {
		return "", ""
	}
	for l := range strings.Lines(string(text)) {
		f := strings.Fields(l)
		switch {
		case len(f) < 2 || strings.HasPrefix(f[0], "#"):
		case f[0] == "include":
			pattern := f[1]
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(filepath.Dir(file), pattern)
			}
			match, _ := filepath.Glob(pattern)
			for _, m := range match {
				if so, line := findPlugin(m, depth+1); so != "" {
					return so, line
				}
			}
		case filepath.Base(f[1]) == "spank_sluice.so":
			return f[1], l
		}
	}
	return "", ""
}
