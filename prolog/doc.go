// Package prolog holds what Slurm runs of Sluice: the four scripts around a job, each one
// line that calls the command line, and the job_submit script that charges a request to
// the pool's licences. The package is their tests.
package prolog
