// Package verbs carries the bytes of a session over RDMA: InfiniBand, RoCE and para-virtual devices, by libibverbs, which is opened
// when it is first asked for. The C of this folder is both sides': the shim's build has it too. docs/protocol.md, "RDMA", has the bytes.
package verbs

// #cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -I${SRCDIR}/../api
// #cgo LDFLAGS: -ldl -lpthread
// #include <errno.h>
// #include <stdlib.h>
// #include "rdma.h"
//
// static ssize_t write_part(struct sl_rdma *r, void *p, size_t n, int ms)
// {
// 	return sl_rdma_write(r, &(struct iovec){ p, n }, 1, ms);
// }
import "C"

import (
	"errors"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Stream is a side of a connection. One goroutine at a time reads, and one at a time writes.
type Stream struct {
	r   *C.struct_sl_rdma
	few []byte // the writer's
}

const (
	whyMost = 256
	fewMost = 16 << 10 // bytes that are copied rather than sent in a message of their own
)

// Open opens the device whose port has the local address of a TCP socket, or the one called only, if that is not empty. The socket
// stays the caller's; its end is the stream's.
func Open(sock int, only string) (*Stream, error) {
	var name *C.char
	if only != "" {
		name = C.CString(only)
		defer C.free(unsafe.Pointer(name))
	}
	why := (*C.char)(C.calloc(1, whyMost))
	defer C.free(unsafe.Pointer(why))
	r := C.sl_rdma_open(C.int(sock), name, why, whyMost)
	if r == nil {
		return nil, errors.New(C.GoString(why))
	}
	return &Stream{r, make([]byte, 0, fewMost)}, nil
}

// Close destroys the connection. Nobody may read or write any more.
func (s *Stream) Close() { C.sl_rdma_free(s.r) }

// Name is the device and its port, for messages.
func (s *Stream) Name() string { return C.GoString(C.sl_rdma_name(s.r)) }

// Card is what the other side has to know.
func (s *Stream) Card() []byte {
	var c C.struct_wire_verbs_card
	C.sl_rdma_card(s.r, &c)
	return C.GoBytes(unsafe.Pointer(&c), C.int(unsafe.Sizeof(c)))
}

// Join connects to the side with that card, of wire.VerbsCardSize bytes, and sends it a first message.
func (s *Stream) Join(card []byte) error {
	var c C.struct_wire_verbs_card
	if len(card) != int(unsafe.Sizeof(c)) {
		return wire.ErrRange
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&c)), len(card)), card)
	why := (*C.char)(C.calloc(1, whyMost))
	defer C.free(unsafe.Pointer(why))
	if !C.sl_rdma_join(s.r, &c, why, whyMost) {
		return errors.New(C.GoString(why))
	}
	if !C.sl_rdma_greet(s.r) {
		return errors.New("the first message cannot be sent")
	}
	return nil
}

// Read reads at least one byte; 0 without an error is the end. The error is EAGAIN if nothing has come within wait.
func (s *Stream) Read(p []byte, wait time.Duration) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := C.sl_rdma_read(s.r, unsafe.Pointer(&p[0]), C.size_t(len(p)), millis(wait))
	if n < 0 {
		return 0, orIO(err)
	}
	return int(n), nil
}

// Write writes all of the parts. The error is ETIMEDOUT if the other side has taken nothing for the time wait.
func (s *Stream) Write(parts [][]byte, wait time.Duration) error {
	few := s.few[:0] // small parts, which go in one message
	for _, p := range parts {
		if len(few)+len(p) > cap(few) {
			if err := s.write(few, wait); err != nil {
				return err
			}
			few = few[:0]
		}
		if len(p) > cap(few) {
			if err := s.write(p, wait); err != nil {
				return err
			}
			continue
		}
		few = append(few, p...)
	}
	return s.write(few, wait)
}

func (s *Stream) write(p []byte, wait time.Duration) error {
	for len(p) > 0 {
		n, err := C.write_part(s.r, unsafe.Pointer(&p[0]), C.size_t(len(p)), millis(wait))
		if n < 0 {
			return orIO(err)
		}
		p = p[n:]
	}
	return nil
}

// Readable waits until Read would not wait, or for the time given.
func (s *Stream) Readable(wait time.Duration) bool {
	return bool(C.sl_rdma_readable(s.r, millis(wait)))
}

// Flush waits until everything written has arrived at the other side, for a time at most.
func (s *Stream) Flush(wait time.Duration) bool { return bool(C.sl_rdma_flush(s.r, millis(wait))) }

func millis(d time.Duration) C.int { return C.int(min(d.Milliseconds(), 1<<30)) }

func orIO(err error) error {
	if err == nil {
		err = unix.EIO
	}
	return os.NewSyscallError("RDMA", err)
}
