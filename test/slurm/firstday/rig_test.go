// Package firstday breaks a good site in one way after the other, as an administrator may on the first day, and looks
// whether `sluiced --check`, `sluice health` or `sluice slurm check` names what is wrong, and the remedy. What they say is a
// table in docs/troubleshooting.md. It needs root, see package lab.
package firstday

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/node"
	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

func TestMain(m *testing.M) {
	lab.Main()
	node.Main()
	os.Exit(m.Run())
}

// The commands that tell.
const (
	check      = "sluiced --check"
	start      = "sluiced"
	health     = "sluice health"
	slurmCheck = "sluice slurm check"
)

// fault is a thing that an administrator gets wrong.
type fault struct {
	wrong string // what
	tells string // which command
	says  string // a part of what it says
	cure  string // a part of the remedy that it says
	// also is the name of another finding that the same fault causes.
	also string
	do   func(*rig)
}

// finding is a line of one of the commands.
type finding struct {
	Name, Level, Text, Remedy string
}

func (f finding) String() string {
	s := f.Text
	if f.Name != "" {
		s = f.Name + ": " + s
	}
	if f.Remedy != "" {
		s += "; " + f.Remedy
	}
	return s
}

// rig is a good site of a controller, a node with a GPU, which is an owner, and a node of jobs without one.
type rig struct {
	*lab.Lab
	t        *testing.T
	ctx      context.Context
	own, job *lab.Node
	at       *lab.Node // where the command is run
	// args are more arguments of the command.
	args []string
	env  []string // more variables of sluiced
	file string   // the configuration that sluiced --check is given, here
	text string   // its contents
	dir  string   // of this fault, the same here and on every node
	n    int

	net *site.Site // another site, whose nodes have a network each; nil until a fault needs it
}

func newRig(t *testing.T) *rig {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	l, err := lab.Up(ctx, lab.Options{
		Name: "fd" + strconv.Itoa(os.Getpid()), Jobs: true, Nodes: []lab.NodeSpec{{GPUs: 1}, {}},
		Sluice: map[string]string{"users.run": `"false"`, "lease.silence": "40s", "partitions.main.policy": "equal", "owner.store_keep_free": "1M", "owner.poll": "500ms"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	return &rig{Lab: l, t: t, ctx: ctx, own: l.Nodes[0], job: l.Nodes[1]}
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// on runs a command as root on a node, which must succeed.
func (r *rig) on(n *lab.Node, argv ...string) string {
	r.t.Helper()
	out, err := n.Run(r.ctx, lab.Root, argv...)
	if err != nil {
		r.t.Fatalf("%v %s", err, out)
	}
	return out
}

// undo has f run when the fault has been told.
func (r *rig) undo(f func()) { r.t.Cleanup(f) }

// put writes a file, and writes what was there again afterwards.
func (r *rig) put(path, text string) {
	r.t.Helper()
	was, err := os.ReadFile(path)
	fi, _ := os.Stat(path)
	r.undo(func() {
		if err != nil {
			_ = os.Remove(path)
			return
		}
		_ = os.WriteFile(path, was, fi.Mode())
	})
	r.must(os.MkdirAll(filepath.Dir(path), 0o755))
	r.must(os.WriteFile(path, []byte(text), 0o644))
}

// chmod changes a mode until the fault has been told.
func (r *rig) chmod(path string, mode os.FileMode) {
	r.t.Helper()
	fi, err := os.Stat(path)
	r.must(err)
	r.must(os.Chmod(path, mode))
	r.undo(func() { _ = os.Chmod(path, fi.Mode()) })
}

// bind puts something else at a path of a node that has its files from elsewhere, for a time.
func (r *rig) bind(n *lab.Node, from, to string) {
	r.t.Helper()
	r.on(n, "mount", "--bind", from, to)
	r.undo(func() { r.on(n, "umount", to) })
}

// slurm changes keys of slurm.conf; how is "reconfigure", "restart" of slurmctld, or "anew" without its state of nodes.
func (r *rig) slurm(how string, keys map[string]string, lines ...string) {
	r.t.Helper()
	was, wasLines, gres, licences := r.Options.Slurm, r.Options.SlurmLines, r.Options.Gres, r.Options.Licences
	put := func() {
		r.must(r.WriteSlurm())
		if how != "reconfigure" {
			r.must(r.Ctl.Stop("slurmctld"))
			if how == "anew" { // else it goes on with what it knew of the nodes
				r.on(r.Ctl, "sh", "-c", "rm -f /var/spool/slurmctld/node_state*")
			}
			r.must(r.StartSlurmctld(r.ctx))
			return
		}
		r.on(r.Ctl, "scontrol", "reconfigure")
	}
	r.Options.Slurm = map[string]string{}
	for k, v := range was {
		r.Options.Slurm[k] = v
	}
	for k, v := range keys {
		switch k {
		case "Gres":
			r.Options.Gres = v
		case "Licenses":
			r.Options.Licences = v
		default:
			r.Options.Slurm[k] = v
		}
	}
	r.Options.SlurmLines = append(slices.Clone(wasLines), lines...)
	r.undo(func() {
		r.Options.Slurm, r.Options.SlurmLines, r.Options.Gres, r.Options.Licences = was, wasLines, gres, licences
		put()
	})
	put()
}

// ask runs the command that tells, and answers its findings.
func (r *rig) ask(tells string) []finding {
	r.t.Helper()
	if tells == health || tells == slurmCheck {
		// The exit status is that of the findings.
		argv := append(strings.Fields(tells), append([]string{"--json"}, r.args...)...)
		var out string
		var err error
		if r.net != nil {
			out, err = r.askAcross()
		} else {
			out, err = r.at.Run(r.ctx, lab.Root, argv...)
		}
		var found []finding
		if json.Unmarshal([]byte(out), &found) != nil {
			return lines(out, err)
		}
		return found
	}
	argv := []string{"/usr/sbin/sluiced", "--config", r.file}
	if tells == check {
		argv = append(argv, "--check")
	}
	ctx, cancel := context.WithTimeout(r.ctx, 5*time.Second)
	defer cancel()
	out, err := r.at.Run(ctx, lab.Root, slices.Concat([]string{"env", "SLUICE_SIM_DEVICES=0"}, r.env, argv)...)
	if err == nil {
		return nil
	}
	return lines(out, err)
}

// lines are the findings of a command that says them in lines.
func lines(out string, err error) []finding {
	text := out
	if err != nil {
		text += err.Error()
	}
	if i := strings.LastIndex(text, "exit status"); i >= 0 {
		text = text[i:]
		_, text, _ = strings.Cut(text, ": ")
	}
	var found []finding
	for l := range strings.Lines(text) {
		l = strings.TrimPrefix(strings.TrimPrefix(strings.TrimSpace(l), "sluiced: "), "sluice: ")
		if l != "" && !strings.HasPrefix(l, "time=") {
			found = append(found, finding{Text: l, Level: "fail"})
		}
	}
	return found
}

var (
	ports     = regexp.MustCompile(`(127\.0\.0\.1|10\.77\.0\.\d):\d+`)
	durations = regexp.MustCompile(`\b\d+(\.\d+)?(ms|µs|s) ago\b`)
	numbers   = regexp.MustCompile(`\b(2\d{3}-\d\d-\d\d(T[\d:]+Z)?)`)
	free      = regexp.MustCompile(`has \d+ MiB free`)
	builds    = regexp.MustCompile(`and this node \S+;`)
	lookups   = regexp.MustCompile(`lookup gpu01[^;]*;`) // what a resolver says depends on the machine's
	ledgers   = regexp.MustCompile(`\b[0-9a-f]{16,64}\b`)
)

// plain is what was said without what differs from run to run.
func (r *rig) plain(s string) string {
	for _, p := range [][2]string{
		{filepath.Join(r.dir, "v.yaml"), "/etc/sluice/sluice.yaml"}, {r.dir, "/var/lib/site"},
		{r.Ctl.Name, "head"}, {r.own.Name, "gpu01"}, {r.job.Name, "node01"}, {r.Options.Name, "prod"}, {"gpu00", "gpu01"}, {"host00", "node01"},
	} {
		s = strings.ReplaceAll(s, p[0], p[1])
	}
	if r.net != nil {
		s = strings.ReplaceAll(s, r.net.Dir, "")
	}
	s = free.ReplaceAllString(s, "has 11 MiB free")
	s = builds.ReplaceAllString(s, "and this node 1.1;")
	s = lookups.ReplaceAllString(s, "lookup gpu01: no such host;")
	s = ports.ReplaceAllString(s, "$1:7071")
	s = durations.ReplaceAllString(s, "1s ago")
	s = numbers.ReplaceAllString(s, "2027-01-01")
	return ledgers.ReplaceAllString(s, "0123456789abcdef")
}

// good is the configuration that faults of sluiced --check begin with.
func (r *rig) good() string {
	return fmt.Sprintf(`node: %s
cluster: %s
state_dir: %s/state
run_dir: %[3]s/run
audit: {file: %[3]s/log/audit.log}
listen:
  control: "127.0.0.1:17071"
  data: "127.0.0.1:17072"
  metrics: "off"
lease:
  silence: 4m
owner:
  enabled: "no"
pools:
  default: {owners: [%[1]s]}
`, r.own.Name, r.Options.Name, r.dir)
}

// edit replaces a part of the good configuration.
func (r *rig) edit(from, to string) {
	r.t.Helper()
	if !strings.Contains(r.text, from) {
		r.t.Fatalf("the good configuration has no %q", from)
	}
	r.text = strings.Replace(r.text, from, to, 1)
	r.must(os.WriteFile(r.file, []byte(r.text), 0o644))
}

// add adds lines to it.
func (r *rig) add(text string) {
	r.t.Helper()
	r.text += text
	r.must(os.WriteFile(r.file, []byte(r.text), 0o644))
}

// begin makes the folder and the good configuration of a fault.
func (r *rig) begin(t *testing.T) *rig {
	t.Helper()
	r.n++
	b := *r
	b.t, b.at, b.args, b.env, b.net = t, r.own, nil, nil, nil
	b.dir = r.Path("day", strconv.Itoa(r.n))
	for d, mode := range map[string]os.FileMode{"": 0o755, "state": 0o700, "run": 0o755, "log": 0o750} {
		b.must(os.MkdirAll(filepath.Join(b.dir, d), mode))
	}
	b.file, b.text = filepath.Join(b.dir, "v.yaml"), ""
	b.add(b.good())
	return &b
}

// issue makes a certificate of that node with another end than sluice ca gives, by the CA in dir.
func (r *rig) issue(dir, name string, end time.Time) {
	r.t.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca.key"))
	r.must(err)
	ca, err := x509.ParseCertificate(pair.Certificate[0])
	r.must(err)
	own, err := tls.LoadX509KeyPair(filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key"))
	r.must(err)
	c, err := x509.ParseCertificate(own.Certificate[0])
	r.must(err)
	c.NotBefore, c.NotAfter = time.Now().Add(-48*time.Hour), end
	der, err := x509.CreateCertificate(rand.Reader, c, ca, c.PublicKey, pair.PrivateKey)
	r.must(err)
	r.must(os.WriteFile(filepath.Join(dir, name+".pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
}

// expire makes the certificate anew, with an end in the past.
func (r *rig) expire() {
	r.issue(filepath.Join(r.dir, "tls"), r.own.Name, time.Now().Add(-24*time.Hour))
}

// endsSoon has a node show a certificate that ends in nine days.
func (r *rig) endsSoon() {
	r.tls(r.job.Name)
	d := filepath.Join(r.dir, "tls")
	r.issue(d, r.job.Name, time.Now().Add(9*24*time.Hour+time.Hour))
	r.restart(r.job, func(s string) string {
		return s + "auth: tls\ntls: {ca: " + d + "/ca.pem, cert: " + d + "/" + r.job.Name + ".pem, key: " + d + "/" + r.job.Name + ".key}\n"
	}, "")
}

// oldPlugin puts the plug-in of another release of Slurm in its place.
func (r *rig) oldPlugin() {
	r.t.Helper()
	path := filepath.Join(r.dir, "spank_sluice.so")
	cmd := exec.Command("cc", "-shared", "-fPIC", "-o", path, "-x", "c", "-")
	cmd.Stdin = strings.NewReader("const unsigned int plugin_version = 20 << 16 | 11 << 8;\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		r.t.Fatalf("cc: %v: %s", err, out)
	}
	r.put(r.Path("etc/plugstack.conf.d/sluice.conf"), "optional "+path+"\n")
}
