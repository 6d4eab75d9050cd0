package worker

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const sharedSize = 64 << 10

// memoryFile makes a file in memory of sharedSize bytes, and allocates the first of them.
func memoryFile(t *testing.T, allocated int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, sharedSize)
	}
	if err == nil && allocated > 0 {
		err = unix.Fallocate(fd, 0, 0, allocated)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// Only whole memory that nobody can shrink is taken, one file at a time.
func TestSharedMemoryTaken(t *testing.T) {
	good := memoryFile(t, sharedSize, unix.F_SEAL_SHRINK)
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	for _, c := range []struct {
		name string
		fds  []int
		size uint64
		want string // part of the error; empty: it is taken
	}{
		{"memory", []int{good}, sharedSize, ""},
		{"nothing", nil, sharedSize, "0 descriptors"},
		{"two files", []int{good, good}, sharedSize, "2 descriptors"},
		{"more than there is", []int{good}, 2 * sharedSize, "65536 bytes, not 131072"},
		{"no seal", []int{memoryFile(t, sharedSize, unix.F_SEAL_GROW)}, sharedSize, "not sealed"},
		{"holes", []int{memoryFile(t, sharedSize/2, unix.F_SEAL_SHRINK)}, sharedSize, "32768 of 65536"},
		{"no memory", []int{null}, sharedSize, "not a file in memory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(pair[1])
			stream, err := wire.NewSocketStream(pair[0], time.Second)
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Close()
			s := &session{stream: stream, shm: true}
			if _, err := s.takeShared(c.size); err == nil || !strings.Contains(err.Error(), "no descriptor came") {
				t.Errorf("before anything was sent: %v", err)
			}
			if err := unix.Sendmsg(pair[1], []byte{0}, unix.UnixRights(c.fds...), nil, 0); err != nil {
				t.Fatal(err)
			}
			fd, err := s.takeShared(c.size)
			if err == nil {
				unix.Close(fd)
			}
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}
