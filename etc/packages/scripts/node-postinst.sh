#!/bin/sh
# After the files of sluice-node or sluice-owner are there. A daemon that runs is restarted, which ends no lease and no
# session; one that does not run is not started: it needs its sluice.yaml first. dpkg says "configure", rpm 1 or 2.
set -e
case ${1:-} in configure | 1 | 2) ;; *) exit 0 ;; esac
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
systemctl try-restart sluiced.service ||
	echo "sluice: sluiced did not start again; sluiced --check and journalctl -u sluiced say why" >&2
