#!/bin/sh
# Before sluice-node goes. dpkg says "remove", rpm 0; an upgrade stops nothing.
set -e
case ${1:-} in remove | deconfigure | 0) ;; *) exit 0 ;; esac
if [ -d /run/systemd/system ]; then
	systemctl disable --now sluiced.service
	systemctl stop sluice-sessions.service
else
	rm -f /etc/systemd/system/multi-user.target.wants/sluiced.service
fi
