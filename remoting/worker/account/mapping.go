package account

import (
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapping is a file of words that several processes have mapped.
type mapping struct {
	f    *os.File
	gone sync.RWMutex // held to unmap, and shared by the starter's methods
	mem  []byte
}

// allocate gives a new file its size and maps it. It closes the file if that fails.
func (m *mapping) allocate(f *os.File, size int64) error {
	// Blocks now, not later: a full file system must refuse here and not kill by SIGBUS.
	if err := unix.Fallocate(int(f.Fd()), 0, 0, size); err != nil {
		f.Close()
		return fmt.Errorf("account: %d bytes for %s: %w", size, f.Name(), err)
	}
	return m.open(f, size)
}

// open maps a file that must have this size. It closes the file if that fails.
func (m *mapping) open(f *os.File, size int64) error {
	st, err := f.Stat()
	if err != nil || st.Size() != size {
		f.Close()
		return fmt.Errorf("account: %s: %w", f.Name(), ErrFile)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		f.Close()
		return fmt.Errorf("account: map: %w", err)
	}
	m.f, m.mem = f, mem
	return nil
}

// openOwn opens a file that must belong to this process's user and that nobody else may be able to write.
func openOwn(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("account: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("account: %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o077 != 0 || int(st.Uid) != os.Geteuid() {
		f.Close()
		return nil, fmt.Errorf("account: %s: mode %#o, owner %d: it must be a file of mode 0600 owned by %d", path, st.Mode&0o7777, st.Uid, os.Geteuid())
	}
	return f, nil
}

// Close unmaps the file. What reads it later gets an error; a Session of it must
// not be used any more.
func (m *mapping) Close() error {
	m.gone.Lock()
	defer m.gone.Unlock()
	if m.mem == nil {
		return nil
	}
	_ = unix.Munmap(m.mem)
	m.mem = nil
	return m.f.Close()
}

// FD is the descriptor to pass to a session process.
func (m *mapping) FD() int { return int(m.f.Fd()) }

func (m *mapping) word(at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&m.mem[at]))
}

// guard lets a reader survive a file that a session has cut short: the fault is
// an error of this account and not the end of the process.
func (m *mapping) guard(f func()) (err error) {
	m.gone.RLock()
	defer m.gone.RUnlock()
	if m.mem == nil {
		return fmt.Errorf("account: %w", os.ErrClosed)
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			if _, fault := r.(interface{ Addr() uintptr }); !fault {
				panic(r)
			}
			err = fmt.Errorf("account: the file has been damaged: %w", ErrFile)
		}
	}()
	f()
	return nil
}
