#!/bin/sh
# Before sluice-slurm goes. A Prolog that slurm.conf names and that is missing drains every node, and slurmctld does not
# start without what job_submit.lua reads: then nothing is removed.
set -e
case ${1:-} in remove | deconfigure | 0) ;; *) exit 0 ;; esac
for f in /etc/slurm/slurm.conf /etc/slurm/job_submit.lua; do
	if grep -qs '^[^#-]*/usr/lib/sluice/slurm/' "$f"; then
		echo "sluice-slurm: $f still names /usr/lib/sluice/slurm; take those lines out, restart slurmctld and the slurmds, and remove it then" >&2
		exit 1
	fi
done
