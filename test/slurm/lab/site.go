package lab

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
)

// What a site installs for jobs with fractions, beside the daemons: the four scripts, the SPANK plug-in, and
// job_submit.lua with the table of its pools.

const (
	slurmLib  = "/usr/lib/sluice/slurm"
	poolTable = "sluice_pools.lua"
)

// SluiceHooks are scripts that call those of prolog/, which Options.Jobs installs.
func SluiceHooks() map[string]string {
	h := map[string]string{}
	for name, sub := range map[string]string{"Prolog": "prolog", "Epilog": "epilog", "PrologSlurmctld": "prolog-ctld", "EpilogSlurmctld": "epilog-ctld"} {
		h[name] = "#!/bin/sh\nexec " + slurmLib + "/" + sub + ".sh\n"
	}
	return h
}

// jobs puts all of it into the options, behind what they say already.
func (o *Options) jobs() error {
	if o.Hooks == nil {
		o.Hooks = SluiceHooks()
	}
	etc := map[string]string{
		"plugstack.conf":               "include /etc/slurm/plugstack.conf.d/*.conf\n",
		"plugstack.conf.d/sluice.conf": "optional " + slurmLib + "/spank_sluice.so\n",
	}
	b, err := os.ReadFile(filepath.Join(o.Repository, "prolog/job_submit.lua"))
	if err != nil {
		return err
	}
	etc["job_submit.lua"] = string(b)
	install := map[string]string{
		slurmLib + "/sluice.lua":      filepath.Join(o.Repository, "prolog/sluice.lua"),
		slurmLib + "/spank_sluice.so": filepath.Join(o.Build, "spank/spank_sluice.so"),
	}
	for _, sub := range []string{"prolog", "epilog", "prolog-ctld", "epilog-ctld", "healthcheck"} {
		install[slurmLib+"/"+sub+".sh"] = filepath.Join(o.Repository, "prolog", sub+".sh")
	}
	// Tests get leases by sluice run besides.
	keys := map[string]string{"slurm.controllers": "[" + o.Name + "ctl]", "users.run": "true"}
	for _, x := range []struct {
		to   *map[string]string
		from map[string]string
	}{{&o.Etc, etc}, {&o.Install, install}, {&o.Sluice, keys}} {
		maps.Copy(x.from, *x.to)
		*x.to = x.from
	}
	return nil
}

// WritePools has the controller's daemon write the table that job_submit.lua reads. The owners must answer.
func (l *Lab) WritePools(ctx context.Context) error {
	if _, ok := l.Options.Etc[poolTable]; ok || !l.Options.Jobs {
		return nil
	}
	return Until(ctx, poolWait, "sluice slurm lua knows the pools", func() error {
		out, err := l.Ctl.Run(ctx, Root, "sluice", "slurm", "lua", "--out", "/etc/slurm/"+poolTable)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}
