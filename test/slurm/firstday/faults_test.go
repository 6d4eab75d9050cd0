package firstday

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// faults of the machine's own files, which sluiced --check tells.
func fileFaults() []fault {
	edit := func(from, to string) func(*rig) { return func(r *rig) { r.edit(from, to) } }
	add := func(text string) func(*rig) { return func(r *rig) { r.add(text) } }
	return []fault{
		{wrong: "sluice.yaml can be written by everybody", tells: check, says: "mode 0666 lets others write it", cure: "chmod go-w",
			do: func(r *rig) { r.must(os.Chmod(r.file, 0o666)) }},
		{wrong: "sluice.yaml belongs to a user", tells: check, says: "belongs to uid 2001", cure: "chown root",
			do: func(r *rig) { r.must(os.Chown(r.file, lab.Alice.UID, lab.Alice.UID)) }},
		{wrong: "sluice.yaml is not there", tells: check, says: "no such file", cure: "give its path by --config",
			do: func(r *rig) { r.must(os.Remove(r.file)) }},
		{wrong: "a key is misspelt", tells: check, says: "unknown key lease.silense", cure: "is lease.silence meant?", do: edit("silence:", "silense:")},
		{wrong: "a variable of the environment is misspelt", tells: check, says: "SLUICE_LEASE_SILENC", cure: "SLUICE_LEASE_SILENCE", do: func(r *rig) { r.env = []string{"SLUICE_LEASE_SILENC=3m"} }},
		{wrong: "a key is in the wrong section", tells: check, says: "unknown key owner.silence", cure: "lease.silence", do: edit("  enabled: \"no\"", "  silence: 4m")},
		{wrong: "a time without its unit", tells: check, says: `lease.silence: "240" is not a time`, cure: "write it as 500ms, 15s, 5m or 1h", do: edit("4m", "240")},
		{wrong: "a time so short that one lost message exceeds it", tells: check, says: "less than three times lease.renew", cure: "one lost message would end a lease", do: edit("4m", "20s")},
		{wrong: "an address that is not valid", tells: check, says: "is not an address", cure: "write it as :7071", do: edit(":17071", ":70710")},
		{wrong: "the same port twice", tells: check, says: "has port 17071 as listen.control does", cure: "listen.data", do: edit("17072", "17071")},
		{wrong: "a host name to listen on", tells: check, says: "listen on an IP address", cure: "or on all by :17071", do: edit("127.0.0.1:17071", "gpu01:17071")},
		{wrong: "a pool without owners", tells: check, says: "pool default has no owners", cure: "owners: [gpu01]", do: func(r *rig) { r.edit("["+r.own.Name+"]", "[]") }},
		{wrong: "an owner's port misspelt", tells: check, says: "the port is 1 to 65535", cure: "NAME=[ADDRESS]:PORT", also: "has no owners", do: func(r *rig) { r.edit("["+r.own.Name+"]", `["gpu01:control"]`) }},
		{wrong: "a partition of a pool that is not there", tells: check, says: `there is no pool "h200"`, cure: "partitions.long.pool", do: add("partitions:\n  long: {pool: h200}\n")},
		{wrong: "two pools with one licence", tells: check, says: "licence rgpu is that of pool", cure: "licence: rgpu_NAME", do: add("  other: {owners: [gpu02], licence: rgpu}\n")},
		{wrong: "state_dir and run_dir are one directory", tells: check, says: "is the same as state_dir", cure: "must not be", do: func(r *rig) { r.edit("run_dir: "+r.dir+"/run", "run_dir: "+r.dir+"/state") }},
		{wrong: "run_dir is too long for sockets", tells: check, says: "is too long", cure: "107 is the most", do: func(r *rig) { r.edit("run_dir: "+r.dir, "run_dir: /run/"+strings.Repeat("x", 90)) }},
		{wrong: "a worker that is not installed", tells: check, says: "is not a program", cure: "install sluice-worker beside sluiced", do: edit("  enabled: \"no\"", "  enabled: \"yes\"\nworker: {exe: /usr/sbin/sluice-workr}")},
		{wrong: "a user for root's sessions that is not there", tells: check, says: "unknown user nobodi", cure: "name a user of this node", do: edit("  enabled: \"no\"", "  enabled: \"yes\"\nworker: {root_user: nobodi}")},
		{wrong: "state_dir can be written by everybody", tells: check, says: "has mode 0777", cure: "chmod go-w", do: func(r *rig) { r.chmod(filepath.Join(r.dir, "state"), 0o777) }},
		{wrong: "state_dir belongs to a user", tells: check, says: "belongs to uid 2001", cure: "remedy: chown", do: func(r *rig) { r.must(os.Chown(filepath.Join(r.dir, "state"), lab.Alice.UID, -1)) }},
		{wrong: "run_dir can be written by everybody", tells: check, says: "run_dir: directory", cure: "chmod go-w", do: func(r *rig) { r.chmod(filepath.Join(r.dir, "run"), 0o777) }},
		{wrong: "the audit log's directory belongs to a user", tells: check, says: "audit.file: directory", cure: "remedy: chown", do: func(r *rig) { r.must(os.Chown(filepath.Join(r.dir, "log"), lab.Alice.UID, -1)) }},
		{wrong: "the ledger can be read and written by all", tells: check, says: "host.db", cure: "chmod 0600", do: func(r *rig) { r.chmod(r.ledger(), 0o666) }},
		{wrong: "state_dir was copied from another node", tells: check, says: `it is node "gpu01"'s, and this is "node01"`, cure: "set node in sluice.yaml", do: func(r *rig) { r.ledger(); r.edit("node: "+r.own.Name, "node: "+r.job.Name) }},
		{wrong: "the ledger is corrupt", tells: check, says: "corrupt: invalid database", cure: "restore it from a backup", do: func(r *rig) { r.must(os.WriteFile(r.ledger(), []byte(strings.Repeat("x", 70000)), 0o600)) }},
		{wrong: "state_dir is not mounted", tells: check, says: "is in use with another host.db", cure: "is mounted and spelled right", do: func(r *rig) {
			r.must(os.WriteFile(filepath.Join(r.dir, "run/host.db.id"), []byte("0123456789abcdef0123456789abcdef\n"), 0o600))
		}},
	}
}

// ledger copies the node's ledger into the fault's state_dir.
func (r *rig) ledger() string {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(r.own.Dir, "lib/host.db"))
	r.must(err)
	path := filepath.Join(r.dir, "state/host.db")
	r.must(os.WriteFile(path, text, 0o600))
	return path
}

// certificateFaults are told by sluiced --check too.
func certificateFaults() []fault {
	return []fault{
		{wrong: "a certificate's key that everybody can read", tells: check, says: "mode 0644", cure: "chmod 0600", do: func(r *rig) { r.tls(r.own.Name); r.chmod(filepath.Join(r.dir, "tls/"+r.own.Name+".key"), 0o644) }},
		{wrong: "another node's certificate", tells: check, says: `is the certificate of "node01", this node is "gpu01"`, cure: "key node of sluice.yaml", do: func(r *rig) { r.tls(r.job.Name) }},
		{wrong: "a certificate of another CA", tells: check, says: "is not by", cure: "every node has the ca.pem of the CA", do: func(r *rig) {
			r.tls(r.own.Name)
			r.on(r.own, "sluice", "ca", "init", "--dir", filepath.Join(r.dir, "other"))
			r.edit(filepath.Join(r.dir, "tls/ca.pem"), filepath.Join(r.dir, "other/ca.pem"))
		}},
		{wrong: "the key of another certificate", tells: check, says: "private key does not match", cure: "tls.key has to be that of tls.cert", do: func(r *rig) {
			r.tls(r.own.Name)
			r.on(r.own, "sluice", "ca", "issue", r.job.Name, "--dir", filepath.Join(r.dir, "tls"))
			r.edit(r.own.Name+".key", r.job.Name+".key")
		}},
		{wrong: "a certificate that has ended", tells: check, says: "certificate has expired", cure: "sluice ca issue", do: func(r *rig) { r.tls(r.own.Name); r.expire() }},
		{wrong: "auth: tls without certificates", tells: check, says: "tls.ca: is empty", cure: "sluice ca makes it", also: "is empty; auth: tls needs it", do: func(r *rig) { r.add("auth: tls\n") }},
	}
}

// tls makes a CA and the certificate of that node, and names them in the configuration.
func (r *rig) tls(name string) {
	r.t.Helper()
	d := filepath.Join(r.dir, "tls")
	r.on(r.own, "sluice", "ca", "init", "--dir", d)
	r.on(r.own, "sluice", "ca", "issue", name, "--dir", d)
	r.add("auth: tls\ntls: {ca: " + d + "/ca.pem, cert: " + d + "/" + name + ".pem, key: " + d + "/" + name + ".key}\n")
}

// startFaults are told by sluiced when it is started.
func startFaults() []fault {
	return []fault{
		{wrong: "two daemons on one node", tells: start, says: "another sluiced uses it", cure: "stop that one first", do: func(r *rig) {
			r.edit("run_dir: "+r.dir+"/run", "run_dir: /run/sluice")
		}},
		{wrong: "another program has the port", tells: start, says: "address already in use", cure: "ss -ltnp", do: func(r *rig) {
			r.edit(`"off"`, `"127.0.0.1:`+strconv.Itoa(r.Port)+`"`) // slurmctld's
		}},
		{wrong: "munge is not installed", tells: start, says: "auth munge needs the program", cure: "install munge or set auth: tls", do: func(r *rig) {
			r.bind(r.own, "/dev/null", "/usr/bin/munge")
		}},
	}
}

// slurmFaults are told by sluice slurm check.
func slurmFaults() []fault {
	conf := func(keys map[string]string) func(*rig) {
		return func(r *rig) { r.at = r.Ctl; r.slurm("restart", keys) }
	}
	soft := func(keys map[string]string) func(*rig) {
		return func(r *rig) { r.at = r.Ctl; r.slurm("reconfigure", keys) }
	}
	etc := func(r *rig, name, text string) { r.at = r.Ctl; r.put(r.Path("etc", name), text) }
	gone := func(n func(*rig) *lab.Node, path string) func(*rig) {
		return func(r *rig) { r.at = n(r); r.bind(r.at, "/dev/null", path) }
	}
	job := func(r *rig) *lab.Node { return r.job }
	return []fault{
		{wrong: "GresTypes does not name rgpu", tells: slurmCheck, says: "--gres=rgpu is refused", cure: "GresTypes=rgpu in slurm.conf", do: conf(map[string]string{"GresTypes": "", "Gres": ""})},
		{wrong: "no node has the gres", tells: slurmCheck, says: "no node has rgpu", cure: "Gres=rgpu:no_consume:1600", do: func(r *rig) { r.at = r.Ctl; r.slurm("anew", map[string]string{"Gres": ""}) }},
		{wrong: "the gres of the nodes has a type that the pools lack", tells: slurmCheck, says: "no rgpu as the pools have it", cure: "restart slurmctld and the slurmds", do: conf(map[string]string{"Gres": "rgpu:h200:no_consume:1600"})},
		{wrong: "the licence is missing", tells: slurmCheck, says: "rgpu is missing", cure: "Licenses=rgpu:100 in slurm.conf", do: soft(map[string]string{"Licenses": "other:1"})},
		{wrong: "more licences than GPUs", tells: slurmCheck, says: "Slurm would start jobs that have no room", cure: "Licenses=rgpu:100", do: soft(map[string]string{"Licenses": "rgpu:800"})},
		{wrong: "fewer licences than GPUs", tells: slurmCheck, says: "a part is never used", cure: "Licenses=rgpu:100", do: soft(map[string]string{"Licenses": "rgpu:50"})},
		{wrong: "JobSubmitPlugins lacks lua", tells: slurmCheck, says: "no job is charged", cure: "JobSubmitPlugins=lua", do: conf(map[string]string{"JobSubmitPlugins": ""})},
		{wrong: "job_submit.lua was not copied", tells: slurmCheck, says: "no such file", cure: "copy it from", do: func(r *rig) { r.hide("job_submit.lua") }},
		{wrong: "the site's job_submit.lua does not call Sluice's", tells: slurmCheck, says: "does not call Sluice's", cure: "call apply and modify", do: func(r *rig) {
			etc(r, "job_submit.lua", "function slurm_job_submit() return slurm.SUCCESS end\nfunction slurm_job_modify() return slurm.SUCCESS end\n")
		}},
		{wrong: "sluice.lua is not installed", tells: slurmCheck, says: "slurmctld will not start again", cure: "sluice-slurm", do: func(r *rig) {
			etc(r, "job_submit.lua", "local s = dofile(\"/usr/lib/sluice/slurm/sluice_.lua\")\n-- sluice.lua\ns.apply(x)\ns.modify(x)\n")
		}},
		{wrong: "the table of the pools was not made", tells: slurmCheck, says: "jobs that ask are refused", cure: "sluice slurm lua --out", do: func(r *rig) { r.hide("sluice_pools.lua") }},
		{wrong: "the table of the pools is old", tells: slurmCheck, says: "is not that of the pools as they are", cure: "sluice slurm lua --out", do: func(r *rig) { etc(r, "sluice_pools.lua", "return {}\n") }},
		{wrong: "Prolog is not set", tells: slurmCheck, says: "Prolog: is not set", cure: "Prolog=/usr/lib/sluice/slurm/prolog.sh", do: func(r *rig) { r.hook("Prolog", "") }},
		{wrong: "Epilog is not set", tells: slurmCheck, says: "Epilog: is not set", cure: "Epilog=/usr/lib/sluice/slurm/epilog.sh", do: func(r *rig) { r.hook("Epilog", "") }},
		{wrong: "PrologSlurmctld is not set", tells: slurmCheck, says: "PrologSlurmctld: is not set", cure: "PrologSlurmctld=", do: func(r *rig) { r.hook("PrologSlurmctld", "") }},
		{wrong: "EpilogSlurmctld is not set", tells: slurmCheck, says: "EpilogSlurmctld: is not set", cure: "EpilogSlurmctld=", do: func(r *rig) { r.hook("EpilogSlurmctld", "") }},
		{wrong: "the site's Prolog lacks our line", tells: slurmCheck, says: "does not run sluice prolog", cure: "or its line in the site's own", do: func(r *rig) {
			r.at = r.job
			r.put(r.Path("etc/prolog"), "#!/bin/sh\ntrue\n")
			r.must(os.Chmod(r.Path("etc/prolog"), 0o755))
		}},
		{wrong: "the Prolog cannot be executed", tells: slurmCheck, says: "cannot be executed", cure: "chmod 0755", do: func(r *rig) { r.at = r.job; r.chmod(r.Path("etc/prolog"), 0o644) }},
		{wrong: "PrologFlags lacks Contain", tells: slurmCheck, says: "without Contain", cure: "PrologFlags=Contain", do: conf(map[string]string{"PrologFlags": ""})},
		{wrong: "SlurmdTimeout is shorter than lease.silence", tells: slurmCheck, says: "the licences of a dead node's job go to the next before its GPUs do", cure: "a longer SlurmdTimeout", do: soft(map[string]string{"SlurmdTimeout": "30"})},
		{wrong: "PrologEpilogTimeout is too short", tells: slurmCheck, says: "would drain the node of a job whose pool answers slowly", cure: "PrologEpilogTimeout=30 or more", do: soft(map[string]string{"PrologEpilogTimeout": "5"})},
		{wrong: "cluster in sluice.yaml is not ClusterName", tells: slurmCheck, says: "leases would be compared with another cluster's jobs", cure: "set cluster: prod", do: func(r *rig) { r.variant(r.Ctl, "cluster: ", "cluster: other #") }},
		{wrong: "slurm.controllers does not name slurmctld's machine", tells: slurmCheck, says: "slurm.controllers does not name it", cure: "slurm: {controllers: [...]}", do: func(r *rig) { r.variant(r.job, "["+r.Ctl.Name+"]", "[head2]") }},
		{wrong: "slurm.controllers is empty", tells: slurmCheck, says: "no daemon may reserve for jobs before they start", cure: "slurm: {controllers: [...]}", do: func(r *rig) { r.variant(r.job, "["+r.Ctl.Name+"]", "[]") }},
		{wrong: "slurm.user is not SlurmUser", tells: slurmCheck, says: "its scripts are refused", cure: "slurm: {user: slurm}", do: func(r *rig) { r.variant(r.Ctl, "slurm:\n", "slurm:\n  user: nobody\n") }},
		{wrong: "slurm.bin is not where Slurm is", tells: slurmCheck, says: "scontrol is not in /opt/slurm/bin", cure: "slurm.bin", do: func(r *rig) { r.variant(r.Ctl, "slurm:\n", "slurm:\n  bin: /opt/slurm/bin\n") }},
		{wrong: "slurmctld does not run", tells: slurmCheck, says: "slurmctld does not answer", cure: "see that slurmctld runs", do: func(r *rig) {
			r.must(r.Ctl.Stop("slurmctld"))
			r.undo(func() { r.must(r.StartSlurmctld(r.ctx)) })
		}},
		{wrong: "node in sluice.yaml is not Slurm's NodeName", tells: slurmCheck, says: "its jobs get no fraction", cure: "set node: node01", do: func(r *rig) { r.variant(r.job, "node: "+r.job.Name, "node: cn17") }},
		{wrong: "a partition of sluice.yaml that Slurm lacks", tells: slurmCheck, says: "Slurm has no such partition", cure: "Slurm has main", do: func(r *rig) { r.variant(r.job, "  main:", "  mian:") }},
		{wrong: "a job's node lacks the line in plugstack.conf", tells: slurmCheck, says: "does not name spank_sluice.so", cure: "include plugstack.conf.d", do: func(r *rig) { r.at = r.job; r.put(r.Path("etc/plugstack.conf"), "") }},
		{wrong: "the plug-in is required", tells: slurmCheck, says: "keeps slurmd from starting", cure: "write optional", do: func(r *rig) {
			r.at = r.job
			r.put(r.Path("etc/plugstack.conf.d/sluice.conf"), "required /usr/lib/sluice/slurm/spank_sluice.so\n")
		}},
		{wrong: "the plug-in is not installed on a node", tells: slurmCheck, says: "no such file", cure: "install the package sluice-spank", do: func(r *rig) {
			r.at = r.job
			r.put(r.Path("etc/plugstack.conf.d/sluice.conf"), "optional /usr/lib/sluice/slurm/missing/spank_sluice.so\n")
		}},
		{wrong: "the plug-in is of another release of Slurm", tells: slurmCheck, says: "it is left out, and jobs with a fraction have no GPU", cure: "install sluice-spank, which is for all releases", do: func(r *rig) { r.at = r.job; r.oldPlugin() }},
		{wrong: "a job's node lacks the shim", tells: slurmCheck, says: "find no GPU", cure: "sluice-client", do: func(r *rig) { r.variant(r.job, "slurm:\n", "slurm:\n  lib: /usr/lib/sluice/missing\n") }},
		{wrong: "the shim is another driver's library", tells: slurmCheck, says: "is not Sluice's", cure: "sluice-client", do: gone(job, "/usr/lib/sluice/libcuda.so.1")},
		{wrong: "an owner of a pool does not answer", tells: slurmCheck, says: "does not answer", cure: "start it, or take it out of the pool", do: func(r *rig) {
			r.at = r.Ctl
			r.must(r.own.Stop("sluiced"))
			r.undo(func() { r.must(r.own.StartSluiced(r.ctx)); r.must(r.Ready(r.ctx)) })
		}},
	}
}

// hide takes a file of /etc/slurm away for a time.
func (r *rig) hide(name string) {
	r.t.Helper()
	path := r.Path("etc", name)
	r.at = r.Ctl
	r.must(os.Rename(path, path+".away"))
	r.undo(func() { _ = os.Rename(path+".away", path) })
}

// hook sets one of Slurm's scripts.
func (r *rig) hook(name, value string) {
	r.t.Helper()
	r.at = r.Ctl
	r.slurm("restart", map[string]string{name: value})
}

// variant has the command use another sluice.yaml of the node.
func (r *rig) variant(n *lab.Node, from, to string) {
	r.t.Helper()
	text, err := os.ReadFile(filepath.Join(n.Dir, "etc/sluice.yaml"))
	r.must(err)
	if !strings.Contains(string(text), from) {
		r.t.Fatalf("sluice.yaml has no %q:\n%s", from, text)
	}
	path := filepath.Join(r.dir, "v.yaml")
	r.must(os.WriteFile(path, []byte(strings.Replace(string(text), from, to, 1)), 0o644))
	r.at, r.args = n, []string{"--config", path}
}

// healthFaults are told by sluice health of the same site.
func healthFaults() []fault {
	return []fault{
		{wrong: "sluiced was never started", tells: health, says: "no sluiced at socket", cure: "start the service sluiced on this node", do: func(r *rig) { r.at = r.job; r.args = []string{"--socket", "/run/sluice/none.sock"} }},
		{wrong: "a socket of a daemon that is dead", tells: health, says: "has stopped: connection refused", cure: "start the service sluiced", do: func(r *rig) {
			r.at = r.job
			r.must(r.job.Kill("sluiced"))
			r.undo(func() { r.must(r.job.StartSluiced(r.ctx)); r.must(r.Ready(r.ctx)) })
		}},
		{wrong: "a reload with a misspelt key", tells: health, says: "unknown key shares.quantumm", cure: "sluiced --check", do: func(r *rig) {
			r.at = r.job
			path := filepath.Join(r.job.Dir, "etc/sluice.yaml")
			text, err := os.ReadFile(path)
			r.must(err)
			r.undo(func() { r.job.Signal("sluiced", syscall.SIGHUP) })
			r.put(path, string(text)+"shares: {quantumm: 20ms}\n")
			r.job.Signal("sluiced", syscall.SIGHUP)
		}},
		{wrong: "owner.gpus names a GPU that is not there", tells: health, says: "owner.gpus names 7, which is not here", cure: "correct owner.gpus", also: "", do: func(r *rig) {
			r.restart(r.own, func(s string) string { return strings.Replace(s, "owner:\n", "owner:\n  gpus: [0, 7]\n", 1) }, "")
		}},
		{wrong: "state_dir is on a tmpfs", tells: health, says: "is in memory", cure: "put state_dir on a disk", do: func(r *rig) { r.onDisk("size=400m", "") }},
		{wrong: "the disk of state_dir is full", tells: health, says: "nothing is granted once a lease cannot be written down", cure: "make room there", also: "disk", do: func(r *rig) { r.onDisk("size=64m", "52M") }},
		{wrong: "the disk of the module store is nearly full", tells: health, says: "programs send their images each time", cure: "owner.store_keep_free", do: func(r *rig) {
			r.restart(r.own, func(s string) string {
				return strings.Replace(s, "store_keep_free: 1M", "store_keep_free: 1000000G", 1)
			}, "")
		}},
		{wrong: "a certificate ends within a month", tells: health, says: "in 9 days", cure: "sluice ca issue", also: "auth must be the same", do: (*rig).endsSoon},
		{wrong: "sluice-hook is installed and was never prepared", tells: health, says: "containers get no fraction", cure: "sluice-hook prepare", do: func(r *rig) {
			r.restart(r.job, func(s string) string {
				return s + "containers: {hook: /usr/bin/true, lib: " + r.dir + "/content}\n"
			}, "")
		}},
	}
}

// restart has a node's daemon run with another configuration.
func (r *rig) restart(n *lab.Node, change func(string) string, before string) {
	r.t.Helper()
	r.at = n
	path := filepath.Join(n.Dir, "etc/sluice.yaml")
	text, err := os.ReadFile(path)
	r.must(err)
	again := func() {
		r.must(n.Stop("sluiced"))
		if before != "" {
			r.on(n, "sh", "-c", before)
		}
		r.must(n.StartSluiced(r.ctx))
	}
	r.undo(func() { before = "rm -f /run/sluice/*.id"; again(); r.must(r.Ready(r.ctx)) })
	r.put(path, change(string(text)))
	again()
	if n == r.own {
		r.must(r.Ready(r.ctx))
	}
}

// onDisk gives the node of jobs a state_dir in memory, with options of mount, and a file of that size in it.
func (r *rig) onDisk(options, file string) {
	r.t.Helper()
	d := filepath.Join(r.dir, "tmpfs")
	before := "mkdir -p " + d + " && mount -t tmpfs -o mode=0700," + options + " day " + d
	if file != "" {
		before += " && fallocate -l " + file + " " + d + "/big"
	}
	before += " && rm -f /run/sluice/*.id"
	r.undo(func() { r.on(r.job, "umount", "-l", d) })
	r.restart(r.job, func(s string) string { return s + "state_dir: " + d + "\n" }, before)
}
