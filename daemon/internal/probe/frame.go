package probe

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Messages begin with a kind and the size of what follows, both u32.
const (
	kindPing    = 1 // u64 number
	kindPong    = 2 // u64 the same number, i64 the owner's clock: nanoseconds since 1970
	kindStateOf = 3
	kindState   = 4 // see state
	kindSend    = 5 // u32 milliseconds, u32 KiB: DATA for as long, and of as many, as neither is exceeded
	kindData    = 6 // bytes that mean nothing
	kindEnd     = 7 // of DATA
	kindSamples = 8 // of each: i64 nanoseconds, u64 bytes
)

// Sizes in bytes.
const (
	headSize   = 8
	pingSize   = 8
	pongSize   = 16
	sendSize   = 8
	stateSize  = 72
	sampleSize = 16

	dataSize   = 16<<10 - headSize // of one DATA, which takes 16 KiB with its head
	bufferSize = 256 << 10         // what is written and read at a time
	maxSamples = 256
)

// errGarbage says that the other side does not follow the protocol.
var errGarbage = errors.New("not a message of a probe")

func head(kind, size uint32) (b [headSize]byte) {
	binary.LittleEndian.PutUint32(b[:], kind)
	binary.LittleEndian.PutUint32(b[4:], size)
	return b
}

func message(kind uint32, payload []byte) []byte {
	h := head(kind, uint32(len(payload)))
	return append(h[:], payload...)
}

// next reads the head of a message and checks its size.
func next(r io.Reader) (kind, size uint32, err error) {
	var b [headSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, 0, err
	}
	kind, size = binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint32(b[4:])
	good := false
	switch kind {
	case kindPing:
		good = size == pingSize
	case kindPong:
		good = size == pongSize
	case kindStateOf, kindEnd:
		good = size == 0
	case kindState:
		good = size == stateSize
	case kindSend:
		good = size == sendSize
	case kindData:
		good = size <= dataSize
	case kindSamples:
		good = size <= maxSamples*sampleSize && size%sampleSize == 0
	}
	if !good {
		return 0, 0, fmt.Errorf("%w: kind %d with %d bytes", errGarbage, kind, size)
	}
	return kind, size, nil
}

// expect reads a message of one kind, which is not DATA.
func expect(r io.Reader, kind uint32) ([]byte, error) {
	k, size, err := next(r)
	if err != nil {
		return nil, err
	}
	if k != kind {
		return nil, fmt.Errorf("%w: kind %d, and %d was due", errGarbage, k, kind)
	}
	b := make([]byte, size)
	_, err = io.ReadFull(r, b)
	return b, err
}

// state is what an end says of itself and of the connection.
type state struct {
	end    lease.ProbeEnd
	sent   uint64 // segments
	resent uint64
}

const nameSize = 16 // IFNAMSIZ in linux/if.h

func (s *state) encode() []byte {
	b := make([]byte, 0, stateSize)
	for _, v := range []uint64{s.sent, s.resent, s.end.DeviceSpeed, s.end.SendBuffer, s.end.ReceiveBuffer} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	for _, v := range []uint32{s.end.DeviceMTU, s.end.PathMTU, s.end.Segment, 0} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	var name [nameSize]byte
	copy(name[:], s.end.Device)
	return append(b, name[:]...)
}

// decodeState reads what expect has returned. The device's name is made fit to print.
func decodeState(b []byte) (s state) {
	if len(b) != stateSize {
		return s
	}
	for i, v := range []*uint64{&s.sent, &s.resent, &s.end.DeviceSpeed, &s.end.SendBuffer, &s.end.ReceiveBuffer} {
		*v = binary.LittleEndian.Uint64(b[8*i:])
	}
	for i, v := range []*uint32{&s.end.DeviceMTU, &s.end.PathMTU, &s.end.Segment} {
		*v = binary.LittleEndian.Uint32(b[40+4*i:])
	}
	name := b[stateSize-nameSize:]
	for i, c := range name {
		if c == 0 {
			name = name[:i]
			break
		}
	}
	s.end.Device = form.Printable(string(name))
	return s
}

func encodeSamples(list []sample) []byte {
	b := make([]byte, 0, len(list)*sampleSize)
	for _, s := range list {
		b = binary.LittleEndian.AppendUint64(b, uint64(s.at))
		b = binary.LittleEndian.AppendUint64(b, s.bytes)
	}
	return b
}

// decodeSamples refuses samples whose time or bytes go backwards, and numbers with which nobody could calculate.
func decodeSamples(b []byte) ([]sample, error) {
	list := make([]sample, len(b)/sampleSize)
	for i := range list {
		s := sample{int64(binary.LittleEndian.Uint64(b[i*sampleSize:])), binary.LittleEndian.Uint64(b[i*sampleSize+8:])}
		before := sample{}
		if i > 0 {
			before = list[i-1]
		}
		if s.at < before.at || s.bytes < before.bytes || s.at > 1<<62 || s.bytes > 1<<62 {
			return nil, fmt.Errorf("%w: samples that go backwards", errGarbage)
		}
		list[i] = s
	}
	return list, nil
}

// dataBuffer is bufferSize of DATA, ready to be written.
func dataBuffer() []byte {
	one := message(kindData, make([]byte, dataSize))
	b := make([]byte, 0, bufferSize)
	for len(b)+len(one) <= bufferSize {
		b = append(b, one...)
	}
	return b
}

// reader reads messages. It is as large as what is written at a time, so that a fast link costs few system calls.
func reader(r io.Reader) *bufio.Reader { return bufio.NewReaderSize(r, bufferSize) }

// link returns what the kernel says of the connection; of one that is none of TCP all is 0.
func (c *Conn) link() (l wire.Link, send, receive uint64) {
	if c.tcp == nil {
		return l, 0, 0
	}
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return l, 0, 0
	}
	_ = raw.Control(func(fd uintptr) {
		// Nothing but a figure is lost where one of them fails.
		l, _ = wire.LinkOf(int(fd))
		send, receive, _ = wire.Buffers(int(fd))
	})
	return l, send, receive
}
