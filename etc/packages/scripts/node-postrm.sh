#!/bin/sh
# After sluice-node has gone. Ledgers and the audit log stay until a purge (dpkg) or until they are deleted by hand (rpm):
# who had which GPU is the site's to keep. /run/sluice has the accounts of sessions that may still run.
set -e
case ${1:-} in remove | purge | 0) ;; *) exit 0 ;; esac
[ ! -d /run/systemd/system ] || systemctl daemon-reload

sessions() {
	for exe in /proc/[0-9]*/exe; do
		case $(readlink "$exe" 2>/dev/null) in /usr/sbin/sluice-worker*) return 0 ;; esac
	done
	return 1
}
if sessions; then
	echo "sluice: sessions of leases still run; /run/sluice stays until they have ended and the node is restarted" >&2
else
	rm -rf /run/sluice /run/cdi/sluice-*.json
fi
# Every container engine's, and the unit's where no other has made it.
rmdir /run/cdi 2>/dev/null || true
# With nothing in it, neither does dpkg nor rpm know of it: the unit made it.
rmdir /var/cache/sluice 2>/dev/null || true
if [ "$1" = purge ]; then
	rm -rf /var/lib/sluice /var/log/sluice /var/cache/sluice
	# Keys and certificates that the site has put there are the site's.
	rmdir /etc/sluice 2>/dev/null || true
fi
