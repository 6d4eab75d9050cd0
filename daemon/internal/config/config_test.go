package config

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

func parse(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("f.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDefaults(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "---\n"} {
		c := parse(t, text)
		if c.Lease.Silence != 4*time.Minute || c.Owner.KeepMem != 512<<20 || !c.Worker.Seccomp {
			t.Errorf("%+v", c)
		}
		if p := c.Pools["default"]; len(p.Owners) != 1 || p.Owners[0].Name != c.Node {
			t.Errorf("pools %+v", c.Pools)
		}
	}
}

func TestValues(t *testing.T) {
	t.Setenv("SLUICE_LEASE_SILENCE", "2m")
	t.Setenv("SLUICE_OWNER_GPUS", "0,GPU-1")
	c := parse(t, `
node: n1
encrypt: yes
lease: {silence: 9m, renew: 2s}
owner: {enabled: no, keep_mem: 1G}
pools:
  H200.Big:
    owners: [gpu01, "gpu02:99", "gpu03=[::1]:7", n1]
    place: spread
`)
	want := Pool{Place: "spread", Licence: "rgpu_H200.Big", Owners: []Peer{{"gpu01", "gpu01:7071"}, {"gpu02", "gpu02:99"}, {"gpu03", "[::1]:7"}, {"n1", "n1:7071"}}}
	if !reflect.DeepEqual(c.Pools, map[string]Pool{"H200.Big": want}) {
		t.Errorf("pools %+v", c.Pools)
	}
	if c.Lease.Silence != 2*time.Minute || c.Lease.Renew != 2*time.Second || !c.Encrypt || c.Owner.Enabled != "no" || c.Owner.KeepMem != 1<<30 {
		t.Errorf("%+v", c)
	}
	if !reflect.DeepEqual(c.Owner.GPUs, []string{"0", "GPU-1"}) {
		t.Errorf("gpus %q", c.Owner.GPUs)
	}
	if len(c.Peers()) != 4 {
		t.Errorf("peers %v", c.Peers())
	}
}

// Where Slurm schedules the GPUs, users take none past its queue unless the site says so.
func TestUsersRun(t *testing.T) {
	for _, c := range []struct {
		text, env string
		want      bool
	}{
		{"", "", true},
		{"slurm: {controllers: [head]}\n", "", false},
		{"slurm: {controllers: [head]}\nusers: {run: true}\n", "", true},
		{"slurm: {controllers: [head]}\n", "true", true},
		{"users: {run: false}\n", "", false},
		{"", "false", false},
	} {
		t.Setenv("SLUICE_USERS_RUN", c.env)
		cfg, err := Parse("f.yaml", []byte(c.text))
		if err != nil {
			t.Fatal(err)
		}
		if cfg.Users.Run != c.want {
			t.Errorf("%q, environment %q: users.run is %v", c.text, c.env, cfg.Users.Run)
		}
	}
}

func TestErrors(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"lease:\n  silense: 5m\n", "f.yaml:2: unknown key lease.silense; is lease.silence meant?"},
		{"lease:\n\tsilence: 5m\n", "a line begins with a tab: indent by spaces"},
		{"nonsense: 1\n", "f.yaml:1: unknown key nonsense"},
		{"Node: x\n", "f.yaml:1: unknown key Node"},
		{"lease:\n  silence: soon\n", `f.yaml:2: lease.silence: "soon" is not a time`},
		{"lease:\n  silence: 10s\n", "f.yaml:2: lease.silence: 10s is less than three times lease.renew"},
		{"lease: 5\n", "f.yaml:1: the file lease wants keys of its own"},
		{"audit: {forward: 'log:514'}\n", `f.yaml:1: audit.forward: "log:514" is no collector; give one of tcp://HOST:PORT, udp://HOST:PORT, the path of a syslog socket such as /dev/log, or off`},
		{"auth: none\n", `f.yaml:1: auth: "none" is not known; give one of munge, tls`},
		{"auth: tls\n", "tls.ca: is empty"},
		{"users: {uid_min: 0}\n", "f.yaml:1: users.uid_min: 0 is not between 1"},
		{"encrypt: maybe\n", "f.yaml:1: encrypt:"},
		{"owner: {keep_mem: -1}\n", "f.yaml:1: owner.keep_mem:"},
		{"owner: {keep_mem: 9999999999999G}\n", "f.yaml:1: owner.keep_mem:"},
		{"owner: {gpus: [-1]}\n", "owner.gpus"},
		{"owner: {warm: 1.5}\n", "owner.warm"},
		{"owner:\n  warm:\n", "f.yaml:2: owner.warm wants a value"},
		{"listen: {control: '7071'}\n", "listen.control"},
		{"listen: {control: ':7072'}\n", "listen.data: has port 7072"},
		{"state_dir: var\n", "state_dir"},
		{"run_dir: /" + strings.Repeat("x", 80) + "\n", "too long"},
		{"node: a b\n", "node"},
		{"pools: [a]\n", "pools wants"},
		{"listen: {page: ':7074'}\n", `listen.page: ":7074" can be reached from other machines; set listen.page_token`},
		{"listen: {page: '127.0.0.1:7073'}\n", "listen.page: has port 7073 as listen.metrics does"},
		{"listen: {page: on}\n", "listen.page"},
		{"listen: {page: '10.0.0.1:7074', page_token: token}\n", `listen.page_token: "token" is no absolute, plain path`},
		{"pools: {p: {owners: []}}\n", "f.yaml:1: pool p has no owners"},
		{"pools:\n  p:\n    owners: [a]\n    place: tight\n", "f.yaml:4: pools.p.place"},
		{"pools:\n  p:\n    owners: [a]\n    grace: 25h\n", "f.yaml:4: pools.p.grace"},
		{"pools:\n  p:\n    owners: [a, a]\n", "f.yaml:3: pools.p.owners: a is there twice"},
		{"pools:\n  p:\n    owners: ['a:x']\n", "f.yaml:3"},
		{"pools:\n  p:\n    owner: [a]\n", "f.yaml:3: unknown key pools.p.owner"},
		{"pools:\n  p: {owners: [a]}\n  q: {owners: ['a:9']}\n", "f.yaml:3: pools.q.owners: a is at a:9 here"},
		{"node: a\nnode: b\n", "f.yaml"},
		{"slurm: {user: 'a b'}\n", "f.yaml:1: slurm.user"},
		{"slurm: {controllers: ['a b']}\n", "f.yaml:1: slurm.controllers"},
		{"slurm: {lib: '/a:b'}\n", "slurm.lib"},
		{"slurm: {room_wait: 1h}\n", "slurm.room_wait"},
		{"slurm: {report: on}\n", "slurm.report"},
		{"pools: {p: {owners: [a], licence: gpu}}\n", `pools.p.licence: "gpu" is not a licence of Sluice's; their names begin with rgpu`},
		{"pools: {p: {owners: [a], licence: rgpu}, default: {owners: [a]}}\n", "licence rgpu is that of pool default and of pool p"},
		{"pools: {p: {owners: [a], types: {h200: rgpu_p}}}\n", "licence rgpu_p is that of"},
		{"pools: {p: {owners: [a], types: {h200: rgpu_x, H200: rgpu_y}}}\n", "h200 is there twice"},
		{"pools: {p: {owners: [a], types: {50: rgpu_x}}}\n", `"50" is no type`},
		{"pools: {p: {owners: [a], types: [h200]}}\n", "pools.p.types wants"},
		{"partitions: [a]\n", "f.yaml:1: partitions wants"},
		{"partitions:\n  a: {pool: p}\n", `f.yaml:2: partitions.a.pool: there is no pool "p"`},
		{"partitions:\n  a: {mem: lots}\n", "f.yaml:2: partitions.a.mem"},
		{"partitions:\n  a: {mem: 0}\n", "f.yaml:2: partitions.a.mem"},
		{"partitions:\n  a: {policy: fair}\n", "f.yaml:2: partitions.a.policy"},
		{"partitions:\n  a: {gpus: 1}\n", "f.yaml:2: unknown key partitions.a.gpus"},
		{"partitions:\n  a: {}\n  a: {}\n", `mapping key "a" already defined`},
		{"users: {max_life: -1h}\n", "f.yaml:1: users.max_life: -1h0m0s is not between 0s and"},
		{"users: {max_life: 2h}\nlease: {max_life: 1h}\n", "f.yaml:1: users.max_life: 2h0m0s is more than lease.max_life (1h0m0s)"},
		{"lease:\n  idle: {after: 5s}\n", "f.yaml:2: lease.idle.after: 5s is not between 10s and 720h; 0s is never"},
		{"lease:\n  idle: {action: kill}\n", `f.yaml:2: lease.idle.action: "kill" is not known; give one of note, lend, end`},
		{"lease:\n  idle: {command: mail -s x}\n", `f.yaml:2: lease.idle.command: "mail -s x" is no absolute, plain path`},
		{"lease: {idle: 30m}\n", "f.yaml:1: the file lease.idle wants keys of its own"},
		{"lease: {idle: {afer: 30m}}\n", "f.yaml:1: unknown key lease.idle.afer; is lease.idle.after meant?"},
		{"pools:\n  p:\n    owners: [a]\n    idle: 30m\n", "f.yaml:4: pools.p.idle wants after, action and command"},
		{"pools:\n  p:\n    owners: [a]\n    idle: {after: soon}\n", `f.yaml:4: pools.p.idle.after: "soon" is not a time`},
		{"pools:\n  p:\n    owners: [a]\n    idle: {after: 1000h}\n", "f.yaml:4: pools.p.idle.after: 1000h0m0s is not between"},
		{"pools:\n  p:\n    owners: [a]\n    idle: {command: a/b}\n", `f.yaml:4: pools.p.idle.command: "a/b" is no absolute`},
		{"pools:\n  p:\n    owners: [a]\n    idle: {action: no}\n", `f.yaml:4: pools.p.idle.action: "no" is not known`},
		{"pools:\n  p:\n    owners: [a]\n    idle: {when: 1h}\n", "f.yaml:4: unknown key pools.p.idle.when; idle has after, action and command"},
		{"quotas: {percent: 50}\n", "f.yaml:1: quotas wants a list"},
		{"quotas: [50]\n", `f.yaml:1: quotas: "50" is no quota`},
		{"quotas:\n- {user: alice}\n", "f.yaml:2: quotas: the quota of user alice bounds nothing; give percent, mem or leases"},
		{"quotas:\n- {gpus: 1}\n", "f.yaml:2: unknown key quotas.gpus; a quota has user, group or account"},
		{"quotas:\n- {percent: 50%}\n", `f.yaml:2: quotas.percent: "50%" is not percent of GPUs`},
		{"quotas:\n- {leases: -1}\n", `f.yaml:2: quotas.leases: "-1" is not a number of leases`},
		{"quotas:\n- {mem: lots}\n", `f.yaml:2: quotas.mem: "lots" is not a size of memory`},
		{"quotas:\n- {pool: big, leases: 1}\n", `f.yaml:2: quotas.pool: there is no pool "big"`},
		{"quotas:\n- {user: '*', leases: 1}\n", `f.yaml:2: quotas.user: "*" is not a name; leave user out for every user`},
		{"quotas:\n- {user: a, group: b, leases: 1}\n", "f.yaml:2: quotas: a quota is of a user, of a group's members or of an account; write one for each"},
		{"quotas:\n- {account: a, group: b, leases: 1}\n", "f.yaml:2: quotas: a quota is of a user"},
		{"quotas:\n- {account: a, slurm: no, leases: 1}\n", "f.yaml:2: quotas.slurm: no, and account a: only Slurm's jobs have accounts"},
		{"quotas:\n- {slurm: perhaps, leases: 1}\n", `f.yaml:2: quotas.slurm: "perhaps" is neither true nor false`},
		{"quotas:\n- {leases: 1}\n- {percent: 50}\n", "f.yaml:3: quotas: each user has a quota of all pools together, outside of Slurm's jobs in line 2 already; put both into one"},
		{"node: [a\n", "f.yaml"},
		{"- a\n", "f.yaml:1"},
	} {
		_, err := Parse("f.yaml", []byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.text, err, c.want)
		}
	}
	t.Setenv("SLUICE_LEASE_SILENC", "3m")
	if _, err := Parse("", nil); err == nil || !strings.Contains(err.Error(), "environment variable SLUICE_LEASE_SILENC: no key has it; is SLUICE_LEASE_SILENCE meant?") {
		t.Error(err)
	}
	t.Setenv("SLUICE_LEASE_SILENC", "")
	os.Unsetenv("SLUICE_LEASE_SILENC")
	for _, others := range []string{"SLUICE_SOCKET", "SLUICE_LEASE", "SLUICE_LEASE_ID", "SLUICE_WORKER", "SLUICE_LOG", "SLUICE_TRACE", "SLUICE_STATS", "SLUICE_SLURM_ROOT", "SLUICE_ENV", "SLUICE_GPUS", "SLUICE_BIND", "SLUICE_STEP_DEVICES"} {
		t.Setenv(others, "x")
	}
	if _, err := Parse("", nil); err != nil {
		t.Errorf("variables of programs: %v", err)
	}
	t.Setenv("SLUICE_LEASE_RENEW", "x")
	if _, err := Parse("", nil); err == nil || !strings.Contains(err.Error(), "environment variable SLUICE_LEASE_RENEW") {
		t.Error(err)
	}
}

func TestUnsafeFile(t *testing.T) {
	p := filepath.Join(t.TempDir(), "sluice.yaml")
	if err := os.WriteFile(p, []byte("node: a\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(p); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(p, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(p); err == nil || !strings.Contains(err.Error(), "chmod go-w") {
		t.Error(err)
	}
	if _, err := Load(p + "x"); err == nil {
		t.Error("a file that is not there was loaded")
	}
}

// The forms of audit.forward.
func TestCollector(t *testing.T) {
	for _, s := range []string{"/dev/log", "/run/systemd/journal/syslog", "tcp://log.example.org:514", "udp://10.0.0.1:514", "tcp://[fd00::1]:601"} {
		a := Audit{Forward: s}
		if got, ok := a.Collector(); !ok || got.String() != s {
			t.Errorf("%s: %v %v", s, got, ok)
		}
	}
	for _, s := range []string{"", "off", "on", "/", "dev/log", "/dev/../log", "/dev/log/", "/" + strings.Repeat("x", sunPath), "unixgram:///dev/log", "tcp://", "tcp://log", "tcp://:514", "tcp://log:0",
		"tcp://log:65536", "tcp://log:http", "udp://log:514/x", "tcp://a/b:514", "tls://log:6514", "log:514", "tcp:log:514"} {
		a := Audit{Forward: s}
		if got, ok := a.Collector(); ok {
			t.Errorf("%q: %v", s, got)
		}
	}
}

// What etc/sluice.yaml shows as defaults are the defaults, and it shows all keys.
func TestShippedFile(t *testing.T) {
	text, err := os.ReadFile("../../../etc/sluice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Parse("sluice.yaml", text); err != nil {
		t.Errorf("as it is shipped: %v", err)
	}
	on := regexp.MustCompile(`(?m)^(\s*)#([a-z_]+:)`).ReplaceAllString(strings.Split(string(text), "\n#pools:")[0], "$1$2")
	c := parse(t, on)
	def := parse(t, "")
	for _, k := range Keys() {
		if a, b := k.Value(c), k.Value(def); a != b {
			t.Errorf("%s: the file shows %s, the default is %s", k.Name, a, b)
		}
		last := k.Name[strings.LastIndex(k.Name, ".")+1:]
		if !regexp.MustCompile(`(?m)^\s*` + last + `:`).MatchString(on) {
			t.Errorf("%s is not in etc/sluice.yaml", k.Name)
		}
	}
}

// docs/admin.md has a row for every key, with its default, and no other rows.
func TestDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../docs/admin.md")
	if err != nil {
		t.Fatal(err)
	}
	// The table of keys alone: others have names of other things.
	_, table, ok := strings.Cut(string(text), "| key | default |")
	if !ok {
		t.Fatal("docs/admin.md has no table of keys")
	}
	table, _, _ = strings.Cut(table, "\n\n")
	rows := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_.]+)` \\| ([^|]*) \\|").FindAllStringSubmatch(table, -1) {
		rows[m[1]] = strings.Trim(m[2], "` ")
	}
	def := Default()
	for _, k := range Keys() {
		want := k.Value(&def)
		if d, err := time.ParseDuration(want); err == nil && strings.HasSuffix(want, "s") {
			want = short(d)
		}
		if got, ok := rows[k.Name]; !ok || got != want {
			t.Errorf("docs/admin.md: row %s has %q, want `%s`", k.Name, got, want)
		}
		delete(rows, k.Name)
	}
	for name := range rows {
		if !strings.HasPrefix(name, "pools") {
			t.Errorf("docs/admin.md: %s is no key", name)
		}
	}
}

func short(d time.Duration) string {
	switch {
	case d != 0 && d%time.Hour == 0:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d != 0 && d%time.Minute == 0:
		return fmt.Sprintf("%dm", d/time.Minute)
	}
	return d.String()
}

func TestSite(t *testing.T) {
	c := parse(t, `
node: ctl1
slurm: {controllers: [ctl1, ctl2], controller: auto, report: no}
pools:
  default: {owners: [a], types: {H200: rgpu_h200}}
  small: {owners: [b]}
  old: {owners: [b], licence: rgpu_k80}
partitions:
  debug: {pool: small, policy: equal, lend: yes, place: spread, mem: 4G}
`)
	if !c.IsController() || c.Slurm.Report != "no" {
		t.Errorf("%+v", c.Slurm)
	}
	got := [...]string{c.Pools["default"].Licence, c.Pools["default"].Types["h200"], c.Pools["small"].Licence, c.Pools["old"].Licence}
	if got != [...]string{"rgpu", "rgpu_h200", "rgpu_small", "rgpu_k80"} {
		t.Errorf("licences %q", got)
	}
	if p := c.Partitions["debug"]; p != (Partition{"small", "equal", "yes", "spread", 4 << 30}) {
		t.Errorf("partition %+v", p)
	}
	if d := parse(t, "node: n1\nslurm: {controllers: [ctl1]}\n"); d.IsController() || d.Pools["default"].Licence != "rgpu" {
		t.Errorf("%+v", d)
	}
	if d := parse(t, "slurm: {controller: yes}\n"); !d.IsController() {
		t.Error("controller: yes makes none")
	}
}

func TestShares(t *testing.T) {
	c := parse(t, "run_dir: /r\n")
	if s := c.Shares; !s.Turns || s.Quantum != turns.DefaultQuantum || s.Equal != "present" || s.Lend || s.Overrun != (Overrun{time.Second, "auto"}) || c.TurnsDir() != "/r/turns" {
		t.Errorf("%+v", s)
	}
	c = parse(t, "shares: {turns: no, quantum: 5ms, equal: active, lend: yes, overrun: {limit: 30s, action: end}}\n")
	if s := c.Shares; s.Turns || s.Quantum != 5*time.Millisecond || s.Equal != "active" || !s.Lend || s.Overrun != (Overrun{30 * time.Second, "end"}) || c.TurnsDir() != "" {
		t.Errorf("%+v", s)
	}
	for text, want := range map[string]string{
		"shares: {quantum: 1s}":                 "f.yaml:1: shares.quantum: 1s is not between 1ms and 100ms",
		"shares: {equal: both}":                 `"both" is not known; give one of present, active`,
		"shares: {overrun: {limit: 1ms}}":       "1ms is not between 100ms and 1h0m0s",
		"shares: {overrun: {action: kill}}":     `"kill" is not known; give one of auto, warn, end`,
		"partitions: {a: {lend: perhaps}}":      `partitions.a.lend: "perhaps" is neither true nor false`,
		"partitions: {a: {policy: fixed-lend}}": `"fixed-lend" is not known; give one of fixed, equal, best-effort`,
	} {
		if _, err := Parse("f.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestReload(t *testing.T) {
	old := parse(t, "node: a\n")
	now := parse(t, "node: b\nlog: {level: debug}\nlease: {silence: 9m}\npools: {p: {owners: [x]}}\n")
	got := Live(old, now)
	if got.Node != "a" || got.Log.Level != "debug" || got.Lease.Silence != 9*time.Minute || len(got.Pools["p"].Owners) != 1 {
		t.Errorf("%+v", got)
	}
	if r := Restart(old, now); !reflect.DeepEqual(r, []string{"node"}) {
		t.Errorf("restart for %v", r)
	}
}

func TestPolicies(t *testing.T) {
	c := parse(t, `
node: n
lease: {idle: {after: 1h, command: /usr/local/sbin/mail}}
users: {max_life: 8h}
pools:
  default: {owners: [n]}
  batch: {owners: [n], licence: rgpu_b, idle: {after: 10m, action: lend}}
  free: {owners: [n], licence: rgpu_f, idle: {after: 0s}}
quotas:
- {percent: 200, mem: 80G, leases: 4}
- {slurm: yes, percent: 400}
- {pool: batch, percent: 0}
- {user: 1000, leases: 9}
- {group: students, pool: batch, percent: 50}
- {account: Physics, percent: 800}
- {account: "*", percent: 100}
`)
	if c.Users.MaxLife != 8*time.Hour || c.IdleOf("default") != (Idle{time.Hour, "note", "/usr/local/sbin/mail"}) || c.IdleOf("gone") != c.Lease.Idle ||
		c.IdleOf("batch") != (Idle{10 * time.Minute, "lend", "/usr/local/sbin/mail"}) || c.IdleOf("free").After != 0 {
		t.Errorf("%+v, %+v", c.Users, c.Lease.Idle)
	}
	var got []string
	for i := range c.Quotas {
		q := &c.Quotas[i]
		text := q.Whose() + ": " + q.Of()
		if q.Percent != nil {
			text += fmt.Sprintf(" %d%%", *q.Percent)
		}
		if q.Mem != nil {
			text += fmt.Sprintf(" %v", *q.Mem)
		}
		if q.Leases != nil {
			text += fmt.Sprintf(" %d leases", *q.Leases)
		}
		got = append(got, text)
	}
	want := []string{
		"each user: all pools together, outside of Slurm's jobs 200% 80G 4 leases", "each user: all pools together 400%", "each user: pool batch, outside of Slurm's jobs 0%",
		"user 1000: all pools together, outside of Slurm's jobs 9 leases", "each user of group students: pool batch, outside of Slurm's jobs 50%",
		"account physics: all pools together 800%", "each account: all pools together 100%",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	later := Live(parse(t, "node: n\n"), c)
	if len(later.Quotas) != len(want) || later.Users.MaxLife != 8*time.Hour || later.Lease.Idle != c.Lease.Idle || later.IdleOf("batch") != c.IdleOf("batch") {
		t.Errorf("not taken over: %+v", later)
	}
	if r := Restart(parse(t, "node: n\n"), c); len(r) > 0 {
		t.Errorf("restart for %v", r)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("lease: {silence: 5m}\npools: {p: {owners: [a]}}\n")
	f.Add("owner: {gpus: [0, GPU-1], keep_mem: 1G}")
	f.Add("quotas: [{user: a, pool: default, percent: 5, mem: 1G, leases: 0}, {account: '*', slurm: yes, leases: 1}]\npools: {default: {owners: [a], idle: {after: 1h, action: lend}}}")
	f.Fuzz(func(t *testing.T, text string) {
		if c, err := Parse("f", []byte(text)); err == nil && (c.Node == "" || len(c.Pools) == 0) {
			t.Errorf("%+v", c)
		}
	})
}

func TestSecondDocument(t *testing.T) {
	if _, err := Parse("f.yaml", []byte("node: a\n---\nnode: b\n")); err == nil || !strings.Contains(err.Error(), "f.yaml:2: ") {
		t.Errorf("a second document: %v", err)
	}
	if c := parse(t, "---\nnode: a\n...\n"); c.Node != "a" {
		t.Errorf("node %q", c.Node)
	}
}
