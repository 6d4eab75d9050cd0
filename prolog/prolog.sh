#!/bin/sh
# Slurm's Prolog. Its status is 0 whatever happens, since any other drains the node: also
# when sluice itself is missing or killed. A site's own Prolog has this line at its end.
/usr/bin/sluice prolog || exit 0
