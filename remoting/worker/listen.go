package worker

// What a sandbox would refuse, logged.

// #include "listen.h"
import "C"

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/sys/unix"
)

// listener allows the system calls that a sandbox of mode Log holds up. There is one in a process.
type listener struct {
	ready int      // is sent the filter's descriptor
	seen  *os.File // gives the numbers of calls, each once
}

// newListener starts a listener, which must be there before the first call is held up.
func newListener() (*listener, error) {
	var ready, seen [2]int // the thread has one end of each for good
	err := unix.Pipe2(ready[:], unix.O_CLOEXEC)
	if err == nil {
		err = unix.Pipe2(seen[:], unix.O_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("log of refused calls: %w", err)
	}
	if rc := C.sl_listen(C.int(ready[0]), C.int(seen[1])); rc != 0 {
		return nil, fmt.Errorf("log of refused calls: %w", unix.Errno(rc))
	}
	return &listener{ready[1], os.NewFile(uintptr(seen[0]), "refused calls")}, nil
}

// listen takes over the filter's descriptor.
func (l *listener) listen(filter int) {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], uint32(filter))
	_, _ = unix.Write(l.ready, b[:])
}

// each calls refused with the name of each call that the sandbox would have refused, once. It does not return.
func (l *listener) each(refused func(call string)) {
	table, err := arch.GetInfo("")
	for err == nil {
		var b [4]byte
		if _, err = l.seen.Read(b[:]); err != nil {
			return
		}
		nr := int(binary.NativeEndian.Uint32(b[:]))
		name := table.SyscallNumbers[nr]
		if name == "" {
			name = strconv.Itoa(nr)
		}
		refused(name)
	}
}
