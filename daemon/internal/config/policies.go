package config

import (
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/pattern"
)

// Limits of a site besides Slurm's own: quotas, and leases without work.

// Quota bounds what a user, or all jobs of an account together, may hold at the same time.
type Quota struct {
	User    string  // name or number
	Group   string  // name or number: each of its members by itself
	Account string  // Slurm's; "*" each by itself that has no line of its own
	Pool    string  // "" is all pools together
	Slurm   bool    // leases of Slurm's jobs count, and are refused; otherwise only those outside of jobs
	Percent *uint64 // of GPUs, added up; nil any
	Mem     *Size   // bytes of GPUs' memory; nil any
	Leases  *int    // nil any
}

// Whose says whom a quota is of, as in messages.
func (q *Quota) Whose() string {
	switch {
	case q.User != "":
		return "user " + q.User
	case q.Group != "":
		return "each user of group " + q.Group
	case q.Account == lease.EachAccount:
		return "each account"
	case q.Account != "":
		return "account " + q.Account
	}
	return "each user"
}

// Of says what a quota bounds, as in messages.
func (q *Quota) Of() string {
	of := "all pools together"
	if q.Pool != "" {
		of = "pool " + q.Pool
	}
	if !q.Slurm {
		of += ", outside of Slurm's jobs"
	}
	return of
}

// Idle says what is done about leases without work.
type Idle struct {
	After   time.Duration `key:"after" live:"yes"`                        // without work; 0 nothing becomes of them
	Action  string        `key:"action" oneof:"note|lend|end" live:"yes"` // see docs/admin.md
	Command string        `key:"command" live:"yes"`                      // a program of the site's; "" none
}

// Bounds of lease.idle.after.
const (
	minIdle = 10 * time.Second
	maxIdle = 30 * 24 * time.Hour
)

// userRE is what a user's, a group's or an account's name may be: POSIX', and those of directory servers.
var userRE = pattern.New(`^[A-Za-z0-9_][A-Za-z0-9_.@\\ -]{0,254}\$?$`)

const quotaWants = "a quota has user, group or account, then pool and slurm, then percent, mem and leases"

// readQuotas takes the quotas from the file's nodes.
func (p *parser) readQuotas() {
	if p.quotas == nil {
		return
	}
	if p.quotas.Kind != yaml.SequenceNode {
		p.failAt(p.quotas, "quotas wants a list: [{user: alice, percent: 200}, ...]; %s", quotaWants)
		return
	}
	seen := map[string]int{}
	for _, n := range p.quotas.Content {
		if n.Kind != yaml.MappingNode {
			p.failAt(n, "quotas: %q is no quota; write it as {user: alice, percent: 200}; %s", n.Value, quotaWants)
			continue
		}
		before := len(p.errs)
		q := p.quota(n)
		if len(p.errs) > before {
			continue
		}
		name := q.Whose() + "\x00" + q.Of()
		if line := seen[name]; line > 0 {
			p.failAt(n, "quotas: %s has a quota of %s in line %d already; put both into one", q.Whose(), q.Of(), line)
			continue
		}
		seen[name] = n.Line
		p.cfg.Quotas = append(p.cfg.Quotas, q)
	}
}

func (p *parser) quota(n *yaml.Node) (q Quota) {
	slurm := ""
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		key := "quotas." + k.Value
		switch k.Value {
		case "user":
			q.User = p.userName(v, key)
		case "group":
			q.Group = p.userName(v, key)
		case "account":
			if q.Account = v.Value; v.Value != lease.EachAccount {
				q.Account = strings.ToLower(p.userName(v, key)) // as Slurm keeps it
			}
		case "pool":
			if q.Pool = v.Value; !p.hasPool(v.Value) {
				p.failAt(v, "%s: there is no pool %q; name one of pools, or leave it out for all together", key, v.Value)
			}
		case "slurm":
			slurm = p.yesNo(v, key)
		case "percent":
			q.Percent = p.bound(v, key, "percent of GPUs, added up, as 250")
		case "mem":
			m, err := form.ParseBytes(v.Value)
			if err != nil {
				p.failAt(v, "%s: %q is not a size of memory; write it as 512M or 20G", key, v.Value)
			}
			q.Mem = &m
		case "leases":
			if l := p.bound(v, key, "a number of leases"); l != nil {
				count := int(*l)
				q.Leases = &count
			}
		default:
			p.failAt(k, "unknown key %s; %s", key, quotaWants)
		}
	}
	q.Slurm = slurm == "yes" || q.Account != ""
	switch {
	case q.User != "" && q.Group != "" || q.Account != "" && q.User+q.Group != "":
		p.failAt(n, "quotas: a quota is of a user, of a group's members or of an account; write one for each")
	case q.Account != "" && slurm == "no":
		p.failAt(n, "quotas.slurm: no, and account %s: only Slurm's jobs have accounts; leave slurm out", q.Account)
	case q.Percent == nil && q.Mem == nil && q.Leases == nil:
		p.failAt(n, "quotas: the quota of %s bounds nothing; give percent, mem or leases, of which 0 is nothing at all", q.Whose())
	}
	return q
}

func (p *parser) userName(v *yaml.Node, key string) string {
	if v.Kind != yaml.ScalarNode || !userRE().MatchString(v.Value) {
		p.failAt(v, "%s: %q is not a name; leave %s out for every user", key, v.Value, strings.TrimPrefix(key, "quotas."))
	}
	return v.Value
}

// maxBound is more than all GPUs of a site have.
const maxBound = 1e9

func (p *parser) bound(v *yaml.Node, key, what string) *uint64 {
	n, err := strconv.ParseUint(v.Value, 10, 32)
	if v.Kind != yaml.ScalarNode || err != nil || n > maxBound {
		p.failAt(v, "%s: %q is not %s, 0 to %d", key, v.Value, what, uint64(maxBound))
		return nil
	}
	return &n
}

// poolIdle reads what is done about a pool's leases without work. lease.idle has the rest.
func (p *parser) poolIdle(v *yaml.Node, key string) *Idle {
	out := p.cfg.Lease.Idle
	if v.Kind != yaml.MappingNode {
		p.failAt(v, "%s wants after, action and command, as {after: 30m, action: note}", key)
		return nil
	}
	for i := 0; i+1 < len(v.Content); i += 2 {
		k, v := v.Content[i], v.Content[i+1]
		switch name := key + "." + k.Value; k.Value {
		case "after":
			d, err := time.ParseDuration(v.Value)
			if err != nil {
				p.failAt(v, "%s: %q is not a time; write it as 30m or 1h, or 0s for never", name, v.Value)
				continue
			}
			out.After = d
		case "action":
			out.Action = p.oneOf(v, name, "note", "lend", "end")
		case "command":
			out.Command = v.Value
		default:
			p.failAt(k, "unknown key %s; idle has after, action and command", name)
		}
	}
	if what, why := out.wrong(); what != "" {
		p.failAt(v, "%s.%s: %s", key, what, why)
	}
	return &out
}

// wrong says which of the keys has a wrong value, and why. It returns "" if none has.
func (i *Idle) wrong() (key, why string) {
	switch {
	case i.After != 0 && (i.After < minIdle || i.After > maxIdle):
		return "after", i.After.String() + " is not between 10s and 720h; 0s is never"
	case i.Command != "" && (!filepath.IsAbs(i.Command) || filepath.Clean(i.Command) != i.Command):
		return "command", strconv.Quote(i.Command) + " is no absolute, plain path of a program; arguments belong into a script"
	}
	return "", ""
}

// IdleOf returns what this owner does about a pool's leases without work.
func (c *Config) IdleOf(pool string) Idle {
	if p, ok := c.Pools[pool]; ok && p.Idle != nil {
		return *p.Idle
	}
	return c.Lease.Idle
}
