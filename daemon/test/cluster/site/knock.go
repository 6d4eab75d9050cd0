package site

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Refused is a lease socket's refusal.
type Refused struct {
	Status uint32
	Reason string
}

func (r *Refused) Error() string { return fmt.Sprintf("status %d: %s", r.Status, r.Reason) }

// Knock asks a lease's socket for a session as the shim does, see docs/protocol.md: kind is
// wire.SessionCompute or wire.SessionObserve, index counts the lease's owners. The file is the socket that
// was handed over. A refusal is a *Refused.
func Knock(path string, kind, index uint32) (*os.File, error) {
	conn, err := net.DialTimeout("unix", path, 10*time.Second)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	c := conn.(*net.UnixConn)
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	b := make([]byte, 64)
	copy(b, "SLUICE-L")
	binary.LittleEndian.PutUint32(b[8:], 1)
	binary.LittleEndian.PutUint32(b[12:], kind)
	binary.LittleEndian.PutUint32(b[16:], index)
	copy(b[24:], "knock")
	if _, err := c.Write(b); err != nil {
		return nil, err
	}
	head, oob := make([]byte, 16), make([]byte, 64)
	n, oobn, _, _, err := c.ReadMsgUnix(head, oob)
	if err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(c, head[n:]); err != nil {
		return nil, err
	}
	var f *os.File
	if ms, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil {
		for _, m := range ms {
			if fds, err := unix.ParseUnixRights(&m); err == nil && len(fds) > 0 {
				f = os.NewFile(uintptr(fds[0]), "session")
			}
		}
	}
	magic, status := binary.LittleEndian.Uint32(head), binary.LittleEndian.Uint32(head[4:])
	reason := make([]byte, min(4096, binary.LittleEndian.Uint32(head[12:])))
	_, err = io.ReadFull(c, reason)
	switch {
	case err != nil:
	case magic != 0x4c4c4c53:
		err = fmt.Errorf("the answer's magic is %#x", magic)
	case status != 0:
		err = &Refused{status, string(reason)}
	case f == nil:
		err = fmt.Errorf("no socket came with the answer")
	default:
		return f, nil
	}
	if f != nil {
		_ = f.Close()
	}
	return nil, err
}
