package config

import (
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/pattern"
)

// What is named by the site: pools, and Slurm's partitions.

var (
	licenceRE = pattern.New(`^` + form.Gres + `[A-Za-z0-9_.@-]{0,59}$`)
	typeRE    = pattern.New(`^[A-Za-z][A-Za-z0-9_.-]{0,62}$`)
)

// slurm looks at what belongs together there.
func (p *parser) slurm() {
	c := &p.cfg.Slurm
	for _, n := range c.Controllers {
		if !form.IsPlainName(n) {
			p.fail("slurm.controllers", "%q is not a node name", n)
		}
	}
	if n, err := strconv.ParseUint(c.User, 10, 32); !form.IsPlainName(c.User) || err == nil && n == 1<<32-1 {
		p.fail("slurm.user", "%q is neither a user's name nor a number", c.User)
	}
	if strings.ContainsAny(c.Lib, ":;$ ") {
		p.fail("slurm.lib", "%q: a library path takes no ':', ';', '$' or space", c.Lib)
	}
}

// readPools takes the pools from the file's nodes: a pool's name is the site's,
// with its case and dots, which viper does not keep.
func (p *parser) readPools() {
	c := &p.cfg
	c.Pools = map[string]Pool{}
	addr := map[string]string{}
	_, port, _ := net.SplitHostPort(c.Listen.Control)
	if p.pools != nil && p.pools.Kind != yaml.MappingNode {
		p.failAt(p.pools, "pools wants names of pools, each with its owners")
		return
	}
	if p.pools != nil {
		for i := 0; i+1 < len(p.pools.Content); i += 2 {
			p.readPool(p.pools.Content[i], p.pools.Content[i+1], port, addr)
		}
	}
	if len(c.Pools) == 0 && len(p.errs) == 0 {
		c.Pools["default"] = Pool{Owners: []Peer{c.Self()}, Place: "best-fit", Licence: form.Gres}
	}
	p.licences()
}

// licences looks that each is of one pool, and of one of its types at most: a job's
// licences say which pool it may use.
func (p *parser) licences() {
	of := map[string]string{}
	for _, name := range p.cfg.PoolNames() {
		pool := p.cfg.Pools[name]
		mine := map[string]string{pool.Licence: "pool " + name}
		for typ, l := range pool.Types {
			if have := mine[l]; have != "" {
				p.fail("pools", "licence %s is that of %s and of type %s of pool %s", l, have, typ, name)
			}
			mine[l] = "pool " + name
		}
		for l, who := range mine {
			if of[l] != "" {
				p.fail("pools", "licence %s is that of %s and of %s; a pool needs its own: licence: rgpu_NAME", l, of[l], who)
			}
			of[l] = who
		}
	}
}

func (p *parser) readPool(key, val *yaml.Node, port string, addr map[string]string) {
	name := key.Value
	pool := Pool{Place: "best-fit"}
	switch _, twice := p.cfg.Pools[name]; {
	case !form.IsPlainName(name):
		p.failAt(key, "%q is not a pool's name: want %s", name, form.PlainNameWant)
		return
	case twice:
		p.failAt(key, "pool %s is there twice", name)
		return
	case val.Kind != yaml.MappingNode:
		p.failAt(key, "pool %s wants owners: [NODE, ...]", name)
		return
	}
	for i := 0; i+1 < len(val.Content); i += 2 {
		k, v := val.Content[i], val.Content[i+1]
		switch k.Value {
		case "place":
			pool.Place = p.oneOf(v, "pools."+name+".place", lease.Places...)
		case "licence":
			pool.Licence = p.licence(v, "pools."+name+".licence")
		case "types":
			pool.Types = p.types(v, "pools."+name+".types")
		case "owners":
			pool.Owners = p.owners(v, "pools."+name+".owners", port, addr)
		case "idle":
			pool.Idle = p.poolIdle(v, "pools."+name+".idle")
		case "grace":
			pool.Grace = p.grace(v, "pools."+name+".grace")
		default:
			p.failAt(k, "unknown key pools.%s.%s; a pool has owners, place, licence, types, grace and idle", name, k.Value)
		}
	}
	if len(pool.Owners) == 0 {
		p.failAt(key, "pool %s has no owners; name them: owners: [gpu01]", name)
	}
	switch {
	case pool.Licence != "":
	case name == "default":
		pool.Licence = form.Gres
	default:
		pool.Licence = form.Gres + "_" + name
		if !licenceRE().MatchString(pool.Licence) {
			p.failAt(key, "pool %s: %s is not a licence's name; give it one: licence: rgpu_...", name, pool.Licence)
		}
	}
	p.cfg.Pools[name] = pool
}

func (p *parser) oneOf(v *yaml.Node, key string, values ...string) string {
	if v.Kind != yaml.ScalarNode || !slices.Contains(values, v.Value) {
		p.failAt(v, "%s: %q is not known; give one of %s", key, v.Value, strings.Join(values, ", "))
	}
	return v.Value
}

// yesNo reads a boolean as yes or no.
func (p *parser) yesNo(v *yaml.Node, key string) string {
	switch strings.ToLower(v.Value) {
	case "true", "yes":
		return "yes"
	case "false", "no":
		return "no"
	}
	p.failAt(v, "%s: %q is neither true nor false", key, v.Value)
	return ""
}

func (p *parser) licence(v *yaml.Node, key string) string {
	if v.Kind != yaml.ScalarNode || !licenceRE().MatchString(v.Value) {
		p.failAt(v, "%s: %q is not a licence of Sluice's; their names begin with %s", key, v.Value, form.Gres)
	}
	return v.Value
}

func (p *parser) types(v *yaml.Node, key string) map[string]string {
	out := map[string]string{}
	if v.Kind != yaml.MappingNode {
		p.failAt(v, "%s wants types of GPUs, each with its licence: {h200: rgpu_h200}", key)
		return nil
	}
	for i := 0; i+1 < len(v.Content); i += 2 {
		typ := strings.ToLower(v.Content[i].Value)
		switch {
		case !typeRE().MatchString(typ):
			p.failAt(v.Content[i], "%s: %q is no type as --gres=rgpu:TYPE:N takes it (a letter, then letters, digits, '_', '.', '-')", key, v.Content[i].Value)
		case out[typ] != "":
			p.failAt(v.Content[i], "%s: %s is there twice", key, typ)
		default:
			out[typ] = p.licence(v.Content[i+1], key+"."+typ)
		}
	}
	return out
}

func (p *parser) owners(v *yaml.Node, key, port string, addr map[string]string) []Peer {
	if v.Kind != yaml.SequenceNode {
		p.failAt(v, "%s wants a list: [gpu01, gpu02]", key)
		return nil
	}
	var out []Peer
	for _, o := range v.Content {
		peer, why := parsePeer(o.Value, port)
		switch {
		case o.Kind != yaml.ScalarNode || why != "":
			p.failAt(o, "%s: %q: %s", key, o.Value, why)
			continue
		case addr[peer.Name] != "" && addr[peer.Name] != peer.Addr:
			p.failAt(o, "%s: %s is at %s here and at %s before", key, peer.Name, peer.Addr, addr[peer.Name])
			continue
		}
		for _, have := range out {
			if have.Name == peer.Name {
				p.failAt(o, "%s: %s is there twice", key, peer.Name)
			}
		}
		addr[peer.Name] = peer.Addr
		out = append(out, peer)
	}
	return out
}

// readPartitions takes Slurm's partitions, whose names are the site's as well.
func (p *parser) readPartitions() {
	p.cfg.Partitions = map[string]Partition{}
	if p.parts == nil {
		return
	}
	if p.parts.Kind != yaml.MappingNode {
		p.failAt(p.parts, "partitions wants names of Slurm's partitions, each with pool, policy, lend, place or mem")
		return
	}
	for i := 0; i+1 < len(p.parts.Content); i += 2 {
		key, val := p.parts.Content[i], p.parts.Content[i+1]
		name := key.Value
		switch _, twice := p.cfg.Partitions[name]; {
		case !form.IsPlainName(name):
			p.failAt(key, "%q is not a partition's name: want %s", name, form.PlainNameWant)
		case twice:
			p.failAt(key, "partition %s is there twice", name)
		case val.Kind != yaml.MappingNode:
			p.failAt(key, "partition %s wants pool, policy, lend, place or mem", name)
		default:
			p.cfg.Partitions[name] = p.partition("partitions."+name+".", val)
		}
	}
}

func (p *parser) partition(prefix string, val *yaml.Node) Partition {
	var out Partition
	for i := 0; i+1 < len(val.Content); i += 2 {
		k, v := val.Content[i], val.Content[i+1]
		switch key := prefix + k.Value; k.Value {
		case "pool":
			if out.Pool = v.Value; p.pools != nil && !p.hasPool(v.Value) || p.pools == nil && v.Value != "default" {
				p.failAt(v, "%s: there is no pool %q", key, v.Value)
			}
		case "policy":
			out.Policy = p.oneOf(v, key, string(lease.Fixed), string(lease.Equal), string(lease.BestEffort))
		case "lend":
			out.Lend = p.yesNo(v, key)
		case "place":
			out.Place = p.oneOf(v, key, lease.Places...)
		case "mem":
			m, err := form.ParseBytes(v.Value)
			if err != nil || m == 0 {
				p.failAt(v, "%s: %q is not a size of memory; write it as 512M or 20G", key, v.Value)
			}
			out.Mem = m
		default:
			p.failAt(k, "unknown key %s; a partition has pool, policy, lend, place and mem", key)
		}
	}
	return out
}

// grace is how long sessions wait for a program whose connection was lost.
func (p *parser) grace(v *yaml.Node, key string) *time.Duration {
	d, err := time.ParseDuration(v.Value)
	if err != nil || d < 0 || d > maxGrace {
		p.failAt(v, "%s: %q is not a time from 0s to 24h; write it as 90s or 10m", key, v.Value)
	}
	return &d
}

func (p *parser) hasPool(name string) bool {
	_, ok := p.cfg.Pools[name]
	return ok
}
