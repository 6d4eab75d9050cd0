#!/bin/sh
# Slurm's EpilogSlurmctld. A site's own has this line anywhere.
/usr/bin/sluice epilog-ctld || exit 0
