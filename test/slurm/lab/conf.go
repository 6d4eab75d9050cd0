package lab

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/test/cluster/site"
)

// hookNames are the keys of Options.Hooks, and of slurm.conf.
var hookNames = []string{"Prolog", "Epilog", "PrologSlurmctld", "EpilogSlurmctld"}

// noted is a hook that only writes down that it ran.
func (l *Lab) noted(name string) string {
	return "#!/bin/sh\necho \"" + name + " $(/bin/date +%s.%N) node=${SLURMD_NODENAME:-} job=$SLURM_JOB_ID restart=${SLURM_JOB_RESTART_COUNT:-}\" >>" + l.Path("hooks.log") + "\n"
}

// installed is what stands where on every node.
func (l *Lab) installed() map[string]string {
	b := l.Options.Build
	m := map[string]string{}
	if !l.Options.NoSluice {
		m = map[string]string{
			"/usr/bin/sluice": filepath.Join(b, "bin/sluice"), "/usr/sbin/sluiced": filepath.Join(b, "bin/sluiced"),
			"/usr/sbin/sluice-worker":           filepath.Join(b, "bin/sluice-worker"),
			"/usr/lib/sluice/libcuda.so.1":      filepath.Join(b, "shim/libcuda.so.1"),
			"/usr/lib/sluice/libnvidia-ml.so.1": filepath.Join(b, "shim/libnvidia-ml.so.1"),
		}
		if l.Options.Daemon != "" {
			m["/usr/sbin/sluiced"] = l.Options.Daemon
		}
	}
	for to, from := range l.Options.Install {
		m[to] = from
	}
	return m
}

func (l *Lab) configure() error {
	for d, mode := range map[string]os.FileMode{"munge": 0o755, "etc": 0o755, "home": 0o755, "log": 0o755, "state": 0o700, "n": 0o755} {
		if err := os.MkdirAll(l.Path(d), mode); err != nil {
			return err
		}
	}
	for _, u := range []User{Alice, Bob} {
		if err := os.Mkdir(l.Path("home", u.Name), 0o755); err != nil {
			return err
		}
		if err := os.Chown(l.Path("home", u.Name), u.UID, u.UID); err != nil {
			return err
		}
	}
	if err := os.Chown(l.Path("state"), Slurm.UID, Slurm.UID); err != nil {
		return err
	}
	if err := os.WriteFile(l.Path("munge.key"), bytes.Repeat([]byte(uuid()), 8), 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(l.Path("hooks.log"), nil, 0o666); err != nil {
		return err
	}
	if err := os.Chmod(l.Path("hooks.log"), 0o666); err != nil {
		return err
	}
	for _, n := range l.all() {
		for _, d := range []string{"log", "etc"} {
			if err := os.MkdirAll(filepath.Join(n.Dir, d), 0o755); err != nil {
				return err
			}
		}
		if err := l.WriteSluice(n); err != nil {
			return err
		}
	}
	// slurmctld runs as its own user, and keeps its log beside sluiced's, whose folder only root may write.
	ctldLog := filepath.Join(l.Ctl.Dir, "log", "slurmctld.log")
	if err := os.WriteFile(ctldLog, nil, 0o644); err != nil {
		return err
	}
	if err := os.Chown(ctldLog, Slurm.UID, Slurm.UID); err != nil {
		return err
	}
	return l.WriteSlurm()
}

// WriteSlurm writes /etc/slurm of all nodes from the options.
func (l *Lab) WriteSlurm() error {
	o := &l.Options
	keys := map[string]string{
		"ClusterName": o.Name, "SlurmctldHost": l.Ctl.Name + "(127.0.0.1)", "SlurmctldPort": strconv.Itoa(l.Port + portCtld),
		"CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
		"SlurmUser":               Slurm.Name, "AuthType": "auth/munge", "CryptoType": "",
		// How long a job that was requeued waits, among others; two minutes by default.
		"AuthInfo":          "cred_expire=15",
		"StateSaveLocation": "/var/spool/slurmctld", "SlurmdSpoolDir": "/var/spool/slurmd",
		"SlurmctldPidFile": "/var/spool/slurmctld/slurmctld.pid", "SlurmdPidFile": "/run/slurm/slurmd.pid",
		"SlurmctldLogFile": "/var/log/slurm/slurmctld.log", "SlurmdLogFile": "/var/log/slurm/slurmd.log",
		"ProctrackType": "proctrack/cgroup", "TaskPlugin": "task/cgroup,task/affinity",
		"SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core", "SchedulerType": "sched/backfill",
		"SchedulerParameters": "bf_interval=1,sched_interval=1,batch_sched_delay=0,bf_min_age_reserve=0",
		"ReturnToService":     "2", "MpiDefault": "none", "KillWait": "5", "SlurmdTimeout": "60", "MinJobAge": "600", "JobRequeue": "1",
		"MaxArraySize": "1001", "GresTypes": "rgpu", "Licenses": o.Licences, "PrologFlags": o.PrologFlags,
		"JobAcctGatherType": "jobacct_gather/none", "SlurmctldDebug": "info", "SlurmdDebug": "info",
	}
	if o.PrologFlags == "none" {
		keys["PrologFlags"] = ""
	}
	if o.Accounting {
		for k, v := range map[string]string{
			"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": "127.0.0.1", "AccountingStoragePort": strconv.Itoa(l.Port + portDBD),
			"AccountingStorageEnforce": "associations,limits,qos", "AccountingStorageTRES": "gres/rgpu,license/rgpu",
			"AccountingStoreFlags": "job_comment", "JobAcctGatherType": "jobacct_gather/linux",
		} {
			keys[k] = v
		}
	}
	for _, h := range hookNames {
		body, ok := o.Hooks[h]
		if o.Hooks == nil {
			body, ok = l.noted(h), true
		}
		if !ok {
			continue
		}
		path := l.Path("etc", strings.ToLower(h))
		if err := os.WriteFile(path, []byte(body), 0o755); err != nil {
			return err
		}
		keys[h] = "/etc/slurm/" + strings.ToLower(h)
	}
	if _, ok := o.Etc["job_submit.lua"]; ok {
		keys["JobSubmitPlugins"] = "lua"
	}
	for k, v := range o.Slurm {
		keys[k] = v
	}
	names := make([]string, 0, len(keys))
	for k, v := range keys {
		if v != "" {
			names = append(names, k)
		}
	}
	slices.Sort(names)
	var b strings.Builder
	for _, k := range names {
		fmt.Fprintf(&b, "%s=%s\n", k, keys[k])
	}
	for _, n := range l.Nodes {
		fmt.Fprintf(&b, "NodeName=%s NodeAddr=127.0.0.1 Port=%d CPUs=%d RealMemory=1000 Gres=%s State=UNKNOWN\n", n.Name, n.port, n.spec.CPUs, o.Gres)
	}
	if !slices.ContainsFunc(o.SlurmLines, func(s string) bool { return strings.HasPrefix(s, "PartitionName=") }) {
		b.WriteString("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:64\n")
	}
	for _, s := range o.SlurmLines {
		b.WriteString(s + "\n")
	}
	etc := map[string]string{
		"slurm.conf":     b.String(),
		"cgroup.conf":    "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainCores=yes\nConstrainRAMSpace=no\nConstrainDevices=no\n",
		"plugstack.conf": "",
	}
	if o.Accounting {
		etc["slurmdbd.conf"] = fmt.Sprintf("AuthType=auth/munge\nCommunicationParameters=NoInAddrAny\nDbdHost=%s\nDbdAddr=127.0.0.1\nDbdPort=%d\nSlurmUser=%s\n"+
			"PidFile=/var/spool/slurmctld/slurmdbd.pid\nLogFile=/var/spool/slurmctld/slurmdbd.log\nStorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStoragePort=%d\nStorageUser=slurm\nStoragePass=lab\nStorageLoc=slurm_acct_db\n",
			l.Ctl.Name, l.Port+portDBD, Slurm.Name, l.Port+portSQL)
	}
	for name, text := range o.Etc {
		etc[name] = text
	}
	for name, text := range etc {
		path := l.Path("etc", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		mode := os.FileMode(0o644)
		if name == "slurmdbd.conf" {
			mode = 0o600
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			return err
		}
		if name == "slurmdbd.conf" {
			if err := os.Chown(path, Slurm.UID, Slurm.UID); err != nil {
				return err
			}
		}
	}
	return nil
}

// WriteSluice writes a node's sluice.yaml from the options.
func (l *Lab) WriteSluice(n *Node) error {
	if n == l.base || l.Options.NoSluice {
		return nil
	}
	var owners []string
	for _, x := range l.Nodes {
		if x.spec.GPUs > 0 {
			owners = append(owners, x.Owner())
		}
	}
	keys := map[string]string{
		"node": n.Name, "cluster": l.Options.Name, "advertise": "127.0.0.1", "log.level": "debug",
		"listen.control": addr(n.port + 1), "listen.data": addr(n.port + 2), "listen.metrics": addr(n.port + 3),
		"owner.enabled": map[bool]string{true: `"yes"`, false: `"no"`}[n.spec.GPUs > 0], "owner.keep_mem": "0", "worker.cgroup": `"off"`,
		"owner.libcuda":        l.Built("simgpu/libcuda.so.1"),
		"owner.libnvml":        l.Built("simgpu/libnvidia-ml.so.1"),
		"pools.default.owners": "[" + strings.Join(owners, ", ") + "]",
	}
	for k, v := range l.Options.Sluice {
		keys[k] = v
	}
	for k, v := range n.spec.Sluice {
		keys[k] = v
	}
	for k, v := range keys {
		if v == "" {
			delete(keys, k)
		}
	}
	return os.WriteFile(filepath.Join(n.Dir, "etc", "sluice.yaml"), []byte(site.YAML(keys)), 0o644)
}

// Owner is how sluice.yaml names the node as an owner.
func (n *Node) Owner() string { return fmt.Sprintf("%q", n.Name+"=127.0.0.1:"+strconv.Itoa(n.port+1)) }

func addr(port int) string { return fmt.Sprintf("%q", "127.0.0.1:"+strconv.Itoa(port)) }
