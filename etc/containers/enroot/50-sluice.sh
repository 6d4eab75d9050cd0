#!/usr/bin/env bash
# Sluice for enroot and pyxis: a job's GPU fraction in its containers. Goes to /etc/enroot/hooks.d.
#
# enroot runs it as the user, in the container's namespaces and before it has its new root. A container of a job
# without a fraction gets the mounts and nothing else: with pyxis a step of another job of the user's may join it.
set -eu

lib=/usr/lib/sluice
# /run is a tmpfs in a container. A directory that enroot makes elsewhere stays in the user's tree, without any
# permission, and enroot export fails on it.
here=/run/sluice/lib

# mounts LEASES: the libraries, and the directory of all leases of the node. That of one lease would not do: a running
# container keeps its mounts, and a step of another job that joins it comes with the socket of its own lease. Who may use a
# lease the daemon decides. rbind: if something is mounted below them, a user may not leave it out.
mounts() {
	enroot-mount --root "$ENROOT_ROOTFS" - <<-MOUNTS
		$lib $here none x-create=dir,rbind,ro,nosuid,nodev,private
		$1 $1 none x-create=dir,rbind,ro,nosuid,nodev,private
	MOUNTS
}

socket=${SLUICE_SOCKET-}
if [ -z "$socket" ]; then
	# Whoever joins it later asks; this container does not, and starts without them, too.
	[ ! -d $lib ] || [ ! -d /run/sluice/leases ] || mounts /run/sluice/leases || true
	exit 0
fi

# LEASES/ID/sock, of which both parts are used below in lines that have blanks between their fields. What an id looks like the daemon knows.
if [[ ! $socket =~ ^(/[A-Za-z0-9/._-]+)/([A-Za-z0-9_-]+)/sock$ || ! -S $socket ]]; then
	echo "sluice: SLUICE_SOCKET=$socket is not the socket of a lease of this node" >&2
	exit 1
fi
leases=${BASH_REMATCH[1]} id=${BASH_REMATCH[2]}
mounts "$leases"

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
printf '%s\n' "$rest" "LD_LIBRARY_PATH=$path" "SLUICE_SOCKET=$socket" "SLUICE_LEASE_ID=$id" NVIDIA_VISIBLE_DEVICES=void >"$ENROOT_ENVIRON"
