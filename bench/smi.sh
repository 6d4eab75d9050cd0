#!/usr/bin/env bash
# What nvidia-smi says of GPU 0, one fact a line, for a native and a remote run to be compared.
# The exit status is non-zero when any form of it fails.
status=0
say() {
	local name=$1
	shift
	if out=$("$@" 2>&1); then
		printf '%s: %s\n' "$name" "$out"
	else
		printf '%s: exit status %s: %s\n' "$name" "$?" "$(head -n 3 <<<"$out")"
		status=1
	fi
}
for field in name uuid driver_version memory.total memory.used pci.bus_id compute_cap; do
	say "$field" nvidia-smi -i 0 --query-gpu="$field" --format=csv,noheader,nounits
done
say list nvidia-smi -L
say table nvidia-smi
say quiet nvidia-smi -q -i 0 -d MEMORY
exit $status
