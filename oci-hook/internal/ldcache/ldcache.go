// Package ldcache refreshes the loader's cache of a container with the host's ldconfig.
//
// The hook starts itself anew in namespaces of its own (Update), where the container's
// root becomes the root and the host's tree is let go of; there the process gives up
// what it can do and becomes ldconfig (Child), from a sealed copy in memory. What an
// image makes ldconfig read costs bounded time and memory, and reaches nothing.
package ldcache

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/oci-hook/internal/rootfs"
	"github.com/sluice-hpc/sluice/oci-hook/internal/settings"
)

const (
	// Argument is the child's first one.
	Argument = "ldconfig-in-container"
	// maxTool bounds the host's ldconfig, in bytes.
	maxTool = 32 << 20
	// deadline ends an ldconfig that waits, for the other end of a FIFO as an example.
	deadline = 5 * time.Second
)

// ErrTime is wrapped where ldconfig did not end in time.
var ErrTime = errors.New("ldconfig did not end in time")

// The child's descriptors.
const (
	fdRoot = 3 + iota
	fdLib
	fdTool
)

// Update refreshes the cache of root, in which lib will be at target. The tool is the
// host's ldconfig.
func Update(ctx context.Context, root *rootfs.Root, lib *os.File, target, tool string) error {
	sealed, err := seal(tool)
	if err != nil {
		return err
	}
	defer sealed.Close()
	copied, err := root.Copy()
	if err != nil {
		return err
	}
	defer copied.Close()
	libs, err := rootfs.Clone(lib, true)
	if err != nil {
		return err
	}
	defer libs.Close()

	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	// Its parent's death kills the child; the parent is this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", Argument, target)
	cmd.Env = []string{"SLUICE_HOOK=ldconfig"}
	cmd.Dir = "/"
	cmd.ExtraFiles = []*os.File{copied.File(), libs.File(), sealed}
	said := &limited{left: 2048}
	cmd.Stdout, cmd.Stderr = said, said
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWUTS,
		Pdeathsig:  unix.SIGKILL,
	}
	err = cmd.Run()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%w (%v): the image's /etc/ld.so.conf names what cannot be read", ErrTime, deadline)
	case err != nil:
		return fmt.Errorf("ldconfig in the container: %w: %s", err, bytes.TrimSpace(said.b.Bytes()))
	}
	return nil
}

// seal copies the host's ldconfig into memory that nobody can change: a program that
// runs where an image's files are must not lead back to the host's own copy.
func seal(path string) (*os.File, error) {
	src, err := settings.OpenTrusted(path, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("ldconfig: %w", err)
	}
	defer src.Close()
	if err := static(src); err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("ldconfig", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("copy of ldconfig: %w", err)
	}
	f := os.NewFile(uintptr(fd), "ldconfig")
	n, err := io.Copy(f, io.LimitReader(src, maxTool+1))
	if err == nil && n > maxTool {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxTool)
	}
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("copy of ldconfig: %w", err)
	}
	return f, nil
}

// static refuses a program that would load libraries: they would be the image's.
func static(f *os.File) error {
	e, err := elf.NewFile(f)
	if err != nil {
		return fmt.Errorf("ldconfig %s: %w; name the program itself in the settings, not a script (Ubuntu: /sbin/ldconfig.real)", f.Name(), err)
	}
	for _, p := range e.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("ldconfig %s: is linked dynamically and would load the image's libraries", f.Name())
		}
	}
	_, err = f.Seek(0, io.SeekStart)
	return err
}

// limited keeps the first bytes of what a program says.
type limited struct {
	b    bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.b.WriteString(strings.ToValidUTF8(string(p[:n]), "?"))
	l.left -= n
	return len(p), nil
}
