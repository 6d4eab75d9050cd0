package leasesock

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctlUint32 is an ioctl that fills in a number.
func ioctlUint32(fd int, req uintptr, v *uint32) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(unsafe.Pointer(v))); errno != 0 {
		return errno
	}
	return nil
}
