// Package config reads sluiced's configuration: a YAML file, then the
// environment over it. Whatever is wrong is named with its file and line.
package config

import (
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// DefaultPath is where the file is looked for.
const DefaultPath = "/etc/sluice/sluice.yaml"

// Config is the whole of it. The tag key names a key in the file; live marks the
// keys that a reload (SIGHUP) takes over, the others need a restart.
type Config struct {
	Node      string  `key:"node"`      // this node's name, as Slurm's NodeName; "" the host name without its domain
	Cluster   string  `key:"cluster"`   // Slurm's ClusterName
	StateDir  string  `key:"state_dir"` // ledgers, identity, store: survives a reboot
	RunDir    string  `key:"run_dir"`   // sockets and accounts: gone with a reboot
	Encrypt   bool    `key:"encrypt" live:"yes"`
	Auth      string  `key:"auth" oneof:"munge|tls"`
	Advertise string  `key:"advertise"` // address that others dial; "" the node's name
	Log       Log     `key:"log"`
	Audit     Audit   `key:"audit"`
	Listen    Listen  `key:"listen"`
	Munge     Munge   `key:"munge"`
	TLS       TLS     `key:"tls"`
	Users     Users   `key:"users"`
	Owner     Owner   `key:"owner"`
	Lease     Lease   `key:"lease"`
	Session   Session `key:"session"`
	Worker    Worker  `key:"worker"`
	Shares    Shares  `key:"shares"`
	Slurm     Slurm   `key:"slurm"`

	Containers Containers `key:"containers"`

	// Pools and Slurm's partitions by name. Names are the site's own, so they are no
	// keys of this table.
	Pools      map[string]Pool
	Partitions map[string]Partition

	Quotas []Quota // in the order of the file
}

// Log says what goes to standard error.
type Log struct {
	Level  string `key:"level" oneof:"error|warn|info|debug" live:"yes"`
	Format string `key:"format" oneof:"text|json"`
}

// Audit is the audit log.
type Audit struct {
	File    string `key:"file"`
	MaxSize Size   `key:"max_size"` // bytes at which it is rotated
	Keep    int    `key:"keep"`     // rotated files that stay
	Forward string `key:"forward"`  // the syslog collector that gets each line too; "off" for none
}

// Listen holds addresses as HOST:PORT, an empty host meaning all of them.
type Listen struct {
	Control string `key:"control"` // gRPC between daemons
	Data    string `key:"data"`    // sessions of other nodes
	Metrics string `key:"metrics"` // HTTP; "off" for none

	MetricsNames bool `key:"metrics_names"` // metrics, and a page without a token, say who uses what

	Page      string `key:"page"`       // HTTP for browsers; "off" for none
	PageToken string `key:"page_token"` // path of a file with the token that a request for the page has to have
}

// Munge is used with auth: munge.
type Munge struct {
	Socket string `key:"socket"` // "" munge's own
	UID    int    `key:"uid"`    // that the other daemon's credential must have
}

// TLS is used with auth: tls. Paths of PEM files.
type TLS struct {
	CA   string `key:"ca"`
	Cert string `key:"cert"`
	Key  string `key:"key"`
}

// Users says what users may do besides using what their jobs were granted.
type Users struct {
	Run    bool `key:"run" live:"yes"` // acquire leases by sluice run; unless it is set, false where slurm.controllers is
	UIDMin int  `key:"uid_min"`        // of users; lower uids, and root, are the system's

	MaxLife time.Duration `key:"max_life" live:"yes"` // longest life of a lease outside of Slurm's jobs; 0 as lease.max_life
}

// Owner is the role that lends this node's GPUs.
type Owner struct {
	Enabled    string        `key:"enabled" oneof:"auto|yes|no"`
	GPUs       []string      `key:"gpus"`     // indices in PCI order, or UUIDs; empty all
	KeepMem    Size          `key:"keep_mem"` // bytes of each GPU that are never granted
	LibNVML    string        `key:"libnvml"`
	LibCUDA    string        `key:"libcuda"`
	Poll       time.Duration `key:"poll"` // between two looks of NVML
	Warm       int           `key:"warm"` // workers kept ready for each GPU
	Store      string        `key:"store"`
	StoreLimit Size          `key:"store_limit"` // bytes of each user
	StoreTotal Size          `key:"store_total"` // bytes of all users

	StoreKeepFree Size `key:"store_keep_free"` // bytes of the file system that images leave free

	Content         string `key:"content"`
	ContentLimit    Size   `key:"content_limit"`     // bytes of each user; 0: nothing is kept
	ContentTotal    Size   `key:"content_total"`     // bytes of all users
	ContentKeepFree Size   `key:"content_keep_free"` // bytes of the file system that content leaves free
}

// Lease holds the times and limits of leases.
type Lease struct {
	Reserve   time.Duration `key:"reserve" live:"yes"`     // life of a reservation that nobody confirms
	Renew     time.Duration `key:"renew"`                  // between two renewals by the host
	Silence   time.Duration `key:"silence" live:"yes"`     // without renewal and session, an owner reclaims
	MaxLife   time.Duration `key:"max_life" live:"yes"`    // longest life that a request may ask; 0 any
	Tombstone time.Duration `key:"tombstone" live:"yes"`   // how long an ended key is remembered
	MaxPerGPU int           `key:"max_per_gpu" live:"yes"` // leases on one GPU
	Idle      Idle          `key:"idle"`
}

// Session limits sessions.
type Session struct {
	MaxPerLease int           `key:"max_per_lease" live:"yes"`
	Ticket      time.Duration `key:"ticket"`           // life of a data connection's ticket
	Grace       time.Duration `key:"grace"`            // how long a session waits for a client whose connection was lost; 0 not at all
	Compress    bool          `key:"compress"`         // programs may compress what they send over slow links
	Bulk        int           `key:"bulk_connections"` // of a session for each direction; 0 none
	RDMA        string        `key:"rdma"`             // programs may have their session go over RDMA: off, on, or the one device to use
	Keepalive   time.Duration `key:"keepalive"`        // silence after which a peer is asked, twice of it and the session ends
}

// Worker says how session processes run.
type Worker struct {
	Exe        string     `key:"exe"` // "" sluice-worker beside sluiced
	Cgroup     string     `key:"cgroup" oneof:"auto|required|off"`
	MemoryMax  HostMemory `key:"memory_max"` // of each session
	PidsMax    int        `key:"pids_max"`   // threads for each session
	CPUs       int        `key:"cpus"`       // processors for each session; 0 no limit
	RootUser   string     `key:"root_user"`  // as whom leases of root and the system's users run; "" refuses them
	Seccomp    bool       `key:"seccomp"`
	ConfineDev bool       `key:"confine_dev"` // only its own GPUs' device files
	Sandbox    string     `key:"sandbox" oneof:"auto|on|off|log"`
	Pageable   string     `key:"pageable" oneof:"auto|allow|refuse"` // GPUs whose kernels reach all host memory of their session; auto: lent where it is in a sandbox
}

// Shares says how the compute time of this node's GPUs is shared.
type Shares struct {
	Turns   bool          `key:"turns"`                                   // by turns, by policies and shares; otherwise the driver shares it evenly
	Quantum time.Duration `key:"quantum" live:"yes"`                      // length of a turn
	Equal   string        `key:"equal" oneof:"present|active" live:"yes"` // who counts for policy equal: leases, or those with work
	Lend    bool          `key:"lend" live:"yes"`                         // time of a lease without work is others', unless it says
	Overrun Overrun       `key:"overrun"`
}

// Overrun says what becomes of work that stays on a GPU after its turn.
type Overrun struct {
	Limit  time.Duration `key:"limit" live:"yes"`
	Action string        `key:"action" oneof:"auto|warn|end" live:"yes"` // beyond it: a line in the logs, or the session's end too; auto: that for the sake of fixed leases
}

// Slurm says where Slurm is, and what this node does for it.
type Slurm struct {
	Controllers []string      `key:"controllers" live:"yes"` // nodes of slurmctld, whose daemons owners let act for others
	Controller  string        `key:"controller" oneof:"auto|yes|no"`
	Bin         string        `key:"bin"`                               // directory of scontrol; "" looked for
	Conf        string        `key:"conf"`                              // slurm.conf; "" Slurm's own
	User        string        `key:"user"`                              // SlurmUser, by name or number
	Lib         string        `key:"lib"`                               // directory of the shim, for jobs
	Spool       string        `key:"spool"`                             // SlurmdSpoolDir, with %n and %h; "" asked from Slurm
	RoomWait    time.Duration `key:"room_wait" live:"yes"`              // for the jobs before to leave, then a job is requeued
	Reconcile   time.Duration `key:"reconcile"`                         // between two comparisons with Slurm's jobs
	Report      string        `key:"report" oneof:"auto|no" live:"yes"` // a line in AdminComment when a job ends
}

// Containers says what container engines find of a lease.
type Containers struct {
	Hook   string `key:"hook"`    // sluice-hook; where it is not installed, engines that run hooks are not told of leases
	Lib    string `key:"lib"`     // what sluice-hook prepare has made; lib of oci-hook.json
	CDIDir string `key:"cdi_dir"` // of CDI specifications; "off" for none
}

// Pool is a named list of owners that leases are placed on.
type Pool struct {
	Owners  []Peer
	Place   string            // best-fit or spread
	Licence string            // Slurm's licence; one unit is one percent of a GPU
	Types   map[string]string // type of GPU, in lower case: the licence it takes besides
	Idle    *Idle             // what becomes of its leases without work; nil: as lease.idle says
	Grace   *time.Duration    // how long sessions wait for a program whose connection was lost; nil: as each owner says
}

// Partition is what the jobs of one of Slurm's partitions get unless they say otherwise.
type Partition struct {
	Pool   string
	Policy string // fixed, equal or best-effort
	Lend   string // yes or no; "" as the GPU's owner says
	Place  string // best-fit or spread
	Mem    Size   // bytes of each fraction; 0 by its percentage
}

// Peer is another daemon: the name that it must prove, and where it listens.
type Peer struct {
	Name string
	Addr string // HOST:PORT of its control listener
}

// Default is what holds without a file. Node and the pools are filled in by Load.
func Default() Config {
	return Config{
		Cluster:  "cluster",
		StateDir: "/var/lib/sluice",
		RunDir:   "/run/sluice",
		Auth:     "munge",
		Log:      Log{Level: "info", Format: "text"},
		Audit:    Audit{File: "/var/log/sluice/audit.log", MaxSize: 64 << 20, Keep: 8, Forward: "off"},
		Listen:   Listen{Control: ":7071", Data: ":7072", Metrics: "127.0.0.1:7073", MetricsNames: true, Page: "off"},
		Users:    Users{Run: true, UIDMin: 1000},
		Owner: Owner{Enabled: "auto", KeepMem: 512 << 20, LibNVML: "libnvidia-ml.so.1", LibCUDA: "libcuda.so.1",
			Poll: 5 * time.Second, Warm: 1, StoreLimit: 20 << 30, StoreTotal: 100 << 30, StoreKeepFree: 2 << 30,
			ContentTotal: 200 << 30, ContentKeepFree: 20 << 30},
		Lease: Lease{Reserve: lease.DefaultReserve, Renew: lease.DefaultRenew, Silence: lease.DefaultSilence,
			Tombstone: lease.DefaultTombstone, MaxPerGPU: lease.DefaultMaxPerGPU, Idle: Idle{Action: "note"}},
		Session: Session{MaxPerLease: lease.DefaultMaxSessions, Ticket: lease.DefaultTicket, Grace: 5 * time.Minute, Compress: true, RDMA: "off", Bulk: 8,
			Keepalive: lease.DefaultKeepAlive},
		Worker: Worker{Cgroup: "auto", MemoryMax: ByLease, PidsMax: 512, RootUser: "nobody", Seccomp: true, ConfineDev: true, Sandbox: "auto", Pageable: "auto"},
		Shares: Shares{Turns: true, Quantum: turns.DefaultQuantum, Equal: "present", Overrun: Overrun{Limit: time.Second, Action: "auto"}},
		Slurm: Slurm{Controller: "auto", User: "slurm", Lib: "/usr/lib/sluice",
			RoomWait: 10 * time.Second, Reconcile: time.Minute, Report: "auto"},
		Containers: Containers{Hook: "/usr/bin/sluice-hook", Lib: "/usr/lib/sluice/container", CDIDir: "/run/cdi"},
	}
}

// TurnsDir is the directory of the GPUs' schedules of turns, "" where there are none.
func (c *Config) TurnsDir() string {
	if !c.Shares.Turns {
		return ""
	}
	return filepath.Join(c.RunDir, "turns")
}

// Socket is the local socket's path.
func (c *Config) Socket() string { return filepath.Join(c.RunDir, "sluiced.sock") }

// StoreDir keeps the module images.
func (c *Config) StoreDir() string {
	if c.Owner.Store != "" {
		return c.Owner.Store
	}
	return filepath.Join(c.StateDir, "store")
}

// ContentDir keeps what programs have copied to GPUs.
func (c *Config) ContentDir() string {
	if c.Owner.Content != "" {
		return c.Owner.Content
	}
	return filepath.Join(c.StateDir, "content")
}

// DataAddr is the data address that the owner offers: HOST:PORT, the host empty
// where the hosts' own name for the owner is to be used.
func (c *Config) DataAddr() string {
	_, port, _ := net.SplitHostPort(c.Listen.Data)
	return net.JoinHostPort(c.Advertise, port)
}

// IsController says whether this node's daemon acts for slurmctld.
func (c *Config) IsController() bool {
	return c.Slurm.Controller == "yes" || c.Slurm.Controller == "auto" && slices.Contains(c.Slurm.Controllers, c.Node)
}

// JobSocket is the path of the socket that Slurm's plug-in asks.
func (c *Config) JobSocket() string { return filepath.Join(c.RunDir, "job.sock") }

// Peers are the owners of all pools, each name once.
func (c *Config) Peers() []Peer {
	var out []Peer
	seen := map[string]bool{}
	for _, name := range c.PoolNames() {
		for _, p := range c.Pools[name].Owners {
			if !seen[p.Name] {
				seen[p.Name] = true
				out = append(out, p)
			}
		}
	}
	return out
}

// parsePeer reads NAME, NAME:PORT or NAME=HOST:PORT.
func parsePeer(s, port string) (Peer, string) {
	name, addr, found := strings.Cut(s, "=")
	if found {
		if h, p, err := net.SplitHostPort(addr); err != nil || h == "" || !isPort(p) {
			return Peer{}, "the address after = is HOST:PORT"
		}
	} else if n, p, ok := strings.Cut(s, ":"); ok {
		if !isPort(p) {
			return Peer{}, "the port is 1 to 65535; an IPv6 address is given as NAME=[ADDRESS]:PORT"
		}
		name, addr = n, s
	} else {
		addr = net.JoinHostPort(s, port)
	}
	if !form.IsPlainName(name) {
		return Peer{}, "a node name has letters, digits, '.', '-' and '_'"
	}
	return Peer{name, addr}, ""
}
