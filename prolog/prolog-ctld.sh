#!/bin/sh
# Slurm's PrologSlurmctld. Status 1 requeues the job, so it is told on only where sluice means
# it, and not when it is missing or killed. A site's own PrologSlurmctld ends in this line.
/usr/bin/sluice prolog-ctld || [ $? -ne 1 ]
