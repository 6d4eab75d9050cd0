package slurmconf

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
)

// Change is a file of Slurm's configuration that setup writes or removes.
type Change struct {
	Path     string
	Was, Now []byte // nil for no file
}

// Setup is what this machine's Slurm needs for the pools, as changes of files: nothing is written. conf is the path of slurm.conf, or
// "" on a machine that has none of its own, as in Slurm's configless mode; nodes are as in Add.
func (t Table) Setup(cfg *config.Config, conf string, nodes []string) ([]Change, error) {
	var p plan
	if conf != "" {
		p.edit(conf, func(text []byte) ([]byte, error) {
			if text == nil {
				return nil, fmt.Errorf("%s is not there; slurm.conf in sluice.yaml says where it is", conf)
			}
			return t.Add(conf, text, nodes)
		})
	}
	if cfg.IsController() {
		ours, err := os.ReadFile(filepath.Join(Scripts, "job_submit.lua"))
		if err != nil {
			return nil, fmt.Errorf("%w; install the package sluice-slurm on slurmctld's machine", err)
		}
		script := filepath.Join(dir(conf), "job_submit.lua")
		p.edit(script, func(text []byte) ([]byte, error) {
			switch {
			case text == nil:
				return ours, nil
			case !callsOurs(text):
				return nil, fmt.Errorf("%s is the site's own: load %s/sluice.lua in it, and call apply and modify, as %[2]s/job_submit.lua does; then run this again", script, Scripts)
			}
			return text, nil
		})
		p.edit(filepath.Join("/etc/slurm", TableName), func([]byte) ([]byte, error) { return t.Lua(), nil })
	}
	stack := filepath.Join(dir(conf), "plugstack.conf")
	if _, err := os.Stat(filepath.Join(Scripts, "spank_sluice.so")); err == nil {
		p.edit(stack, func(text []byte) ([]byte, error) {
			if so, _ := findPlugin(stack, 0); so != "" {
				return text, nil
			}
			return AddInclude(stack, text), nil
		})
	}
	return p.changes, errors.Join(p.errs...)
}

// Unset is what takes Setup's changes away again, as changes of files.
func Unset(cfg *config.Config, conf string) ([]Change, error) {
	var p plan
	without := func(path string) {
		p.edit(path, func(text []byte) ([]byte, error) {
			now, err := Remove(path, text)
			if err == nil && len(now) == 0 && len(text) > 0 {
				now = nil
			}
			return now, err
		})
	}
	if conf != "" {
		without(conf)
	}
	without(filepath.Join(dir(conf), "plugstack.conf"))
	if cfg.IsController() {
		ours, _ := os.ReadFile(filepath.Join(Scripts, "job_submit.lua"))
		p.edit(filepath.Join(dir(conf), "job_submit.lua"), func(text []byte) ([]byte, error) {
			if bytes.Equal(text, ours) {
				return nil, nil
			}
			return text, nil
		})
		p.edit(filepath.Join("/etc/slurm", TableName), func([]byte) ([]byte, error) { return nil, nil })
	}
	return p.changes, errors.Join(p.errs...)
}

// dir is the directory of Slurm's files on a machine.
func dir(conf string) string {
	if conf == "" {
		return "/etc/slurm"
	}
	return filepath.Dir(conf)
}

type plan struct {
	changes []Change
	errs    []error
}

// edit adds a change if there is one. f is given nil if there is no file, and returns nil for none.
func (p *plan) edit(path string, f func([]byte) ([]byte, error)) {
	was, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		was, err = nil, nil
	} else if err == nil && was == nil {
		was = []byte{}
	}
	var now []byte
	if err == nil {
		now, err = f(was)
	}
	if err != nil {
		p.errs = append(p.errs, err)
		return
	}
	if (was == nil) != (now == nil) || !bytes.Equal(was, now) {
		p.changes = append(p.changes, Change{path, was, now})
	}
}
