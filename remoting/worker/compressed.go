package worker

// Copies to the device that the client has compressed, because the link is slow. A frame's blocks are
// decompressed into a buffer of the executor's, checked to the last byte, before anything is copied from there as
// the bytes of a COPY_IN are.

import (
	"errors"
	"sync/atomic"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

// compressed is what a session has for compressed copies.
type compressed struct {
	agreed bool              // client and owner both want them
	plain  []byte            // what a frame stands for; made when it is needed
	counts *account.Compress // of all frames
}

// copyInCompressedFrame copies what a frame stands for to the device. The reader is locked when it
// begins, and unlocked when it returns.
func (s *session) copyInCompressedFrame() (int32, error) {
	z := &s.compressed
	if !z.agreed {
		s.rd.Done()
		s.violation("not agreed at the beginning of the session")
		return 0, nil
	}
	if n := s.rd.Left(); n < wire.CopyInCompressedSize || n > wire.CopyInCompressedSize+wire.MaxCopyIn {
		s.rd.Done()
		return s.malformed(), nil
	}
	b, err := s.rd.Payload()
	s.rd.Done()
	if err != nil {
		return 0, err
	}
	var m wire.CopyInCompressed
	s.dec.Reset(b[:wire.CopyInCompressedSize])
	m.Decode(&s.dec)
	if s.dec.Done() != nil || m.Last > 1 || m.Size == 0 || m.Size > wire.MaxCompressed {
		return s.malformed(), nil
	}
	if z.plain == nil {
		z.plain = make([]byte, wire.MaxCompressed)
	}
	plain, blocks := z.plain[:m.Size], b[wire.CopyInCompressedSize:]
	if err := wire.Decompress(plain, blocks); err != nil {
		s.violation(err.Error())
		return 0, nil
	}
	atomic.AddUint64(&z.counts.Bytes, uint64(len(plain)))
	atomic.AddUint64(&z.counts.Sent, uint64(len(blocks)))
	s.given = m.Stream
	f := source{b: plain}
	rc, err := s.copyIn(&f, &wire.CopyIn{Dst: m.Dst, Stream: m.Stream, Last: m.Last})
	return rc, errors.Join(err, f.end())
}
