#!/usr/bin/env bash
# Sluice for enroot and pyxis: a job's GPU fraction in its containers. Goes to /etc/enroot/hooks.d.
#
# enroot runs it as the user, in the container's namespaces and before it has its new root. A container of a job
# without a fraction is not changed.
set -eu

socket=${SLUICE_SOCKET-}
[ -n "$socket" ] || exit 0
lib=/usr/lib/sluice
# /run is a tmpfs in a container. A directory that enroot makes elsewhere stays in the user's tree, without any
# permission, and enroot export fails on it.
here=/run/sluice/lib
lease=${socket%/*}

# They stand in lines that have blanks between their fields.
if [[ $socket != /*/sock || $socket = *[!A-Za-z0-9/._-]* || ! -S $socket ]]; then
	echo "sluice: SLUICE_SOCKET=$socket is not the socket of a lease of this node" >&2
	exit 1
fi

# rbind: if something is mounted below them, a user may not leave it out.
enroot-mount --root "$ENROOT_ROOTFS" - <<-MOUNTS
	$lib $here none x-create=dir,rbind,ro,nosuid,nodev,private
	$lease $lease none x-create=dir,rbind,ro,nosuid,nodev,private
MOUNTS

# The site's nvidia-smi, unless the image has its own. An empty one was made for the mount by an earlier start.
smi=$lib/container/bin/nvidia-smi
if [ -x "$smi" ] && [ ! -s "$ENROOT_ROOTFS/usr/bin/nvidia-smi" ]; then
	enroot-mount --root "$ENROOT_ROOTFS" - <<<"$smi /usr/bin/nvidia-smi none x-create=file,bind,ro,nosuid,nodev,private"
fi

# Ours first; what the image says of the path stays behind it.
path=$(sed -n 's/^LD_LIBRARY_PATH=//p' "$ENROOT_ENVIRON" | tail -n 1)
case :$path: in
*:"$here":*) ;;
*) path=$here${path:+:$path} ;;
esac
rest=$(grep -v -e '^LD_LIBRARY_PATH=' -e '^SLUICE_SOCKET=' -e '^SLUICE_LEASE_ID=' -e '^NVIDIA_VISIBLE_DEVICES=' "$ENROOT_ENVIRON" || true)
# The images of CUDA ask for all GPUs. enroot's own 98-nvidia.sh would look for GPUs and a driver of this node, and fail where there are none.
printf '%s\n' "$rest" "LD_LIBRARY_PATH=$path" "SLUICE_SOCKET=$socket" "SLUICE_LEASE_ID=${lease##*/}" NVIDIA_VISIBLE_DEVICES=void >"$ENROOT_ENVIRON"
