#!/bin/sh
# Slurm's HealthCheckProgram: drains this node for what an administrator has to mend here before jobs can have
# fractions, and resumes it once that is known to be mended. Slurm takes no notice of its status. A site's own program has this line
# in it; one that drains by itself, as NHC does, asks `sluice health --node` instead, whose status is 2, or 3 if something is not known.
/usr/bin/sluice health --drain || exit 0
