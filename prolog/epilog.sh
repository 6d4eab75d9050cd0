#!/bin/sh
# Slurm's Epilog. Its status is 0 whatever happens, since any other drains the node. A
# site's own Epilog has this line at its start.
/usr/bin/sluice epilog || exit 0
