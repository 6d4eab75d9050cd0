#!/bin/sh
# Before sluice-hook goes.
set -e
case ${1:-} in remove | deconfigure | 0) rm -rf /usr/lib/sluice/container ;; esac
