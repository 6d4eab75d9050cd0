package faults

import "github.com/sluice-hpc/sluice/test/slurm/lab"

// installed adds what a site installs of Sluice for Slurm.
func installed(o lab.Options) lab.Options {
	o.NoSluice = true
	return o
}
