package slurmconf

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/pattern"
)

// What is checked on this node besides slurm.conf: its name, and the files of the shim, the scripts and the plug-in.

// here looks whether this machine is a node of Slurm's by the name that sluice.yaml gives it, and at what its jobs load.
func (c *checker) here(nodes map[string]string) {
	name, _ := os.Hostname()
	name = host(name)
	gres, known := nodes[c.cfg.Node]
	if _, other := nodes[name]; !known && other {
		c.fail("node", "set node: "+name+" in sluice.yaml, or leave it out, then restart sluiced", "is %s in sluice.yaml, and Slurm's node here is %s: its jobs get no fraction", c.cfg.Node, name)
		return
	}
	if got, err := slurm.ParseGres(strings.ReplaceAll(gres, ":no_consume", "")); err == nil && slices.ContainsFunc(got, func(g slurm.Gres) bool { return g.Name == Gres }) {
		c.shim()
	}
}

// shim looks at the libraries that stand in for the driver's: every user has to be able to load them.
func (c *checker) shim() {
	const remedy = "install the package sluice-client, or copy both libraries of the build; slurm.lib says where they are"
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		path := filepath.Join(c.cfg.Slurm.Lib, name)
		fi, err := os.Stat(path)
		if err != nil {
			c.fail("shim", remedy, "%v: programs of jobs find no GPU", err)
			return
		}
		if at := closed(path, fi.Mode()); at != "" {
			c.fail("shim", "chmod o+rX "+at, "%s cannot be read by users: programs of jobs find no GPU", at)
			return
		}
		if text, err := os.ReadFile(path); err != nil || !bytes.Contains(text, []byte("SLUICE_SOCKET")) && name == "libcuda.so.1" {
			c.fail("shim", remedy, "%s is not Sluice's: programs of jobs look for a GPU of this node", path)
			return
		}
	}
	c.ok("shim", "%s", c.cfg.Slurm.Lib)
}

// closed is what of a path users cannot pass or read, "" if they can.
func closed(path string, mode os.FileMode) string {
	if mode.Perm()&0o004 == 0 {
		return path
	}
	for at := filepath.Dir(path); ; at = filepath.Dir(at) {
		if fi, err := os.Stat(at); err == nil && fi.Mode().Perm()&0o001 == 0 {
			return at
		}
		if at == filepath.Dir(at) {
			return ""
		}
	}
}

// partitions looks for partitions of sluice.yaml that Slurm does not have: a misspelt one is never used.
func (c *checker) partitions(have []string, err error) {
	if err != nil || len(c.cfg.Partitions) == 0 {
		return // the question before told why
	}
	var gone []string
	for _, p := range sorted(c.cfg.Partitions) {
		if !slices.Contains(have, p) {
			gone = append(gone, p)
		}
	}
	if len(gone) > 0 {
		c.warn("partitions", "correct the name in sluice.yaml, or take it out; Slurm has "+some(have), "%s is in sluice.yaml and Slurm has no such partition", some(gone))
		return
	}
	c.ok("partitions", "%d", len(c.cfg.Partitions))
}

// numbered is a user as scontrol prints one: slurm(64030).
var numbered = pattern.New(`^([^(]+)\((\d+)\)$`)

// slurmUser looks whether slurm.user is SlurmUser: the daemon lets nobody else run the two scripts of the controller.
func (c *checker) slurmUser() {
	m := numbered().FindStringSubmatch(c.conf["SlurmUser"])
	if m == nil || m[2] == "0" || m[1] == c.cfg.Slurm.User || m[2] == c.cfg.Slurm.User {
		return
	}
	if u, err := user.Lookup(c.cfg.Slurm.User); err == nil && u.Uid == m[2] {
		return
	}
	c.fail("slurm.user", "slurm: {user: "+m[1]+"} in sluice.yaml of slurmctld's machine, then restart sluiced", "is %s in sluice.yaml, and SlurmUser is %s: its scripts are refused", c.cfg.Slurm.User, m[0])
}

// luaFile is a file that job_submit.lua loads.
var luaFile = pattern.New(`dofile\s*\(?\s*["']([^"']+)["']`)

// loads looks whether what a job_submit.lua loads is there. A slurmctld that runs keeps what it has read; one that starts does not start.
func (c *checker) loads(text []byte) bool {
	for _, m := range luaFile().FindAllSubmatch(text, -1) {
		path := string(m[1])
		fi, err := os.Stat(path)
		if err == nil && fi.Mode().Perm()&0o004 != 0 {
			continue
		}
		if err == nil {
			err = fmt.Errorf("%s cannot be read by SlurmUser", path)
		}
		c.fail("job_submit", "install the package sluice-slurm on slurmctld's machine, files of mode 0644", "%v: slurmctld will not start again", err)
		return false
	}
	return true
}

// executable is the first of the scripts that cannot be executed, "" if all can.
func executable(files []string) string {
	for _, f := range files {
		if fi, err := os.Stat(f); err == nil && fi.Mode().Perm()&0o111 == 0 {
			return f
		}
	}
	return ""
}

// release is the release of Slurm that a plug-in was built for, "" for one that finds that out when it is loaded.
func release(path string) (string, error) {
	f, err := elf.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return "", err
	}
	for _, s := range symbols {
		if s.Name != "plugin_version" || int(s.Section) >= len(f.Sections) {
			continue
		}
		section := f.Sections[s.Section]
		if section.Type == elf.SHT_NOBITS {
			return "", nil
		}
		var b [4]byte
		if _, err := section.ReadAt(b[:], int64(s.Value-section.Addr)); err != nil {
			return "", err
		}
		v := f.ByteOrder.Uint32(b[:])
		return strconv.Itoa(int(v>>16)) + fmt.Sprintf(".%02d", v>>8&255), nil
	}
	return "", fmt.Errorf("it is no plug-in of Slurm's")
}
