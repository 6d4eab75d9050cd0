#!/bin/sh
# Slurm's PrologSlurmctld. Status 1 requeues the job. So this script returns it only if sluice does, and not
# if sluice is missing or was killed. A site's own PrologSlurmctld ends with this line.
/usr/bin/sluice prolog-ctld || [ $? -ne 1 ]
