#!/bin/bash
# enroot.sh TREE COMMAND...: what enroot 4 does around a hook of /etc/enroot/hooks.d, since Debian has no enroot: it starts
# the command in the tree, as a user without privileges and in namespaces of his own, after the hook has run with
# ENROOT_ROOTFS and ENROOT_ENVIRON and with enroot-mount at hand. `make test-sources` has enroot itself.
set -euo pipefail

tree=$1
shift
if [ "${ENROOT_STAGE-}" = '' ]; then
	export ENROOT_STAGE=mount
	exec unshare --user --map-root-user --mount -- "$0" "$tree" "$@"
fi

run=$(mktemp -d)
mount -t tmpfs tmpfs "$run"
mkdir "$run/bin" "$run/old"
# Lines of SOURCE TARGET TYPE OPTIONS on standard input, with the tree before each target.
cat >"$run/bin/enroot-mount" <<'MOUNT'
#!/bin/bash
set -euo pipefail
[ "$1" = --root ] && [ "$3" = - ] || { echo "enroot-mount: $*" >&2; exit 1; }
while read -r source target type options rest; do
	[ "$type" = none ] && [ -z "$rest" ]
	case $options in
	x-create=dir,rbind,ro,nosuid,nodev,private) mkdir -p "$2$target" ;;
	x-create=file,bind,ro,nosuid,nodev,private) touch "$2$target" ;;
	*) echo "enroot-mount: $options" >&2; exit 1 ;;
	esac
	mount --rbind "$source" "$2$target"
	mount -o remount,bind,ro,nosuid,nodev "$2$target"
done
MOUNT
chmod 755 "$run/bin/enroot-mount"
mount --rbind "$tree" "$tree"
for d in /proc /dev /sys; do
	mkdir -p "$tree$d"
	mount --rbind "$d" "$tree$d"
done
mount -t tmpfs tmpfs "$tree/run"
cp "$tree/etc/environment" "$run/environ" 2>/dev/null || : >"$run/environ"
for hook in /etc/enroot/hooks.d/*.sh; do
	PATH=$run/bin:$PATH ENROOT_PID=$$ ENROOT_ROOTFS=$tree ENROOT_ENVIRON=$run/environ ENROOT_MOUNTS=/dev/null "$hook" >/dev/null
done
mapfile -t environ < <(grep '=' "$run/environ" || true)
# The environment of the host stays outside.
exec env -i PATH=/usr/local/bin:/usr/bin:/bin "${environ[@]}" /usr/sbin/chroot "$tree" "$@"
