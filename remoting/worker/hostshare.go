package worker

// Host memory that the client and this process share. The client passes the descriptor of a
// file in memory over the session's Unix socket; this process maps the file and registers it
// with the driver. The GPU's copy engines then read and write the client's own pages, and so do
// kernels: no CPU copies a byte, and nothing has to be made equal.
//
// The client may change the memory at any time, so this process decides nothing by what is in
// it. The client cannot shrink the file, which is sealed, and it has allocated every page, which
// is therefore accounted to it.
//
// The executor does all of this.

/*
#include "driver.h"
*/
import "C"

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// takeShared takes the descriptor that the client has sent, and checks what it is of.
func (s *session) takeShared(size uint64) (int, error) {
	if !s.shm {
		return -1, errors.New("the client shares no memory with this session") // the socket carries frames
	}
	var b [1]byte
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := unix.Recvmsg(s.stream.FD(), b[:], oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil || n != 1 {
		return -1, fmt.Errorf("no descriptor came: %d bytes: %w", n, err)
	}
	var fds []int
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	for i := range msgs {
		f, e := unix.ParseUnixRights(&msgs[i])
		fds, err = append(fds, f...), errors.Join(err, e)
	}
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("%d descriptors came", len(fds))
	}
	if err == nil {
		err = checkShared(fds[0], size)
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return -1, err
	}
	return fds[0], nil
}

// checkShared reports why a file cannot be memory of that size that client and worker share.
func checkShared(fd int, size uint64) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("not a file in memory: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("file in memory: %w", err)
	}
	switch {
	case seals&unix.F_SEAL_SHRINK == 0:
		return errors.New("file in memory is not sealed against shrinking")
	case uint64(st.Size) != size:
		return fmt.Errorf("file in memory has %d bytes, not %d", st.Size, size)
	case uint64(st.Blocks)*512 < size:
		return fmt.Errorf("file in memory has %d of %d bytes allocated", uint64(st.Blocks)*512, size)
	}
	return nil
}

// hostShare carries out a HOST_SHARE.
func (s *session) hostShare(p []byte) int32 {
	var m wire.HostShare
	s.dec.Reset(p)
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	fd, err := s.takeShared(m.Size)
	if err != nil {
		s.violation(err.Error())
		return C.CUDA_ERROR_INVALID_VALUE
	}
	defer unix.Close(fd)
	if rc := s.wantCtx(s.hdr.Ctx); rc != 0 {
		return rc
	}
	if !wholePages(m.Address, m.Size) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if has := s.host.shared.Load(); m.Size > wire.MaxHostShare-has {
		s.log.Warn("host memory is not shared", "bytes", m.Size, "has", has, "limit", uint64(wire.MaxHostShare))
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	base, rc := s.addHostMap(&wire.HostMap{Address: m.Address, Size: m.Size, Move: m.Move}, fd)
	(&wire.HostShareReply{Address: base}).Encode(&s.enc)
	return rc
}

// sharedAt gives n bytes of shared memory at p; false if not all of them are of one HOST_SHARE.
func (h *hostMaps) sharedAt(p, n uint64) ([]byte, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	i := h.find(p)
	if i == len(h.maps) || !h.maps[i].shared || p < h.maps[i].base {
		return nil, false
	}
	m := h.maps[i].mem[p-h.maps[i].base:]
	if n > uint64(len(m)) {
		return nil, false
	}
	return m[:n], true
}

// copyInShared copies shared memory to the device.
func (s *session) copyInShared(p []byte) int32 {
	var m wire.CopyInShared
	s.dec.Reset(p)
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	s.give(m.Stream)
	stream, ctx, rc := s.copyTarget(m.Stream)
	if rc != 0 {
		return rc
	}
	b, ok := s.host.sharedAt(m.Src, m.Size)
	if !ok {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	w := s.copyBegins(wire.SpanCopyIn, m.Stream, ctx, stream)
	rc = int32(C.sl_htod(C.uint64_t(m.Dst), at(b), C.uint64_t(m.Size), C.uint64_t(stream)))
	w.copied(m.Size, rc)
	if rc != 0 || s.hdr.Call == 0 {
		return rc
	}
	return s.answerAt(ctx, stream, s.tellStream(m.Stream))
}

// copyOutShared copies from the device to shared memory. When nobody waits for the copy, the end of
// its delivery, which has no bytes, tells the client that it is done.
func (s *session) copyOutShared(p []byte) int32 {
	var m wire.CopyOutShared
	s.dec.Reset(p)
	m.Decode(&s.dec)
	if s.dec.Done() != nil || (m.Delivery == 0) != (s.hdr.Call != 0) {
		return s.malformed()
	}
	s.give(m.Stream)
	stream, ctx, rc := s.copyTarget(m.Stream)
	b, ok := s.host.sharedAt(m.Dst, m.Size)
	if rc == 0 && !ok {
		rc = C.CUDA_ERROR_INVALID_VALUE
	}
	if rc == 0 {
		w := s.copyBegins(wire.SpanCopyOut, m.Stream, ctx, stream)
		rc = int32(C.sl_dtoh(at(b), C.uint64_t(m.Src), C.uint64_t(m.Size), C.uint64_t(stream)))
		w.copied(m.Size, rc)
	}
	if s.hdr.Call != 0 {
		if rc != 0 {
			return rc
		}
		return s.answerAt(ctx, stream, s.tellStream(m.Stream))
	}
	var ev uint64
	if rc == 0 {
		if ev, rc = s.events.get(ctx); rc == 0 {
			if rc = int32(C.sl_event_record(C.uint64_t(ev), C.uint64_t(stream))); rc != 0 {
				s.events.put(ctx, ev)
			}
		}
	}
	if rc != 0 {
		s.endDelivery(m.Delivery)
		return rc
	}
	s.out.add(chunk{id: m.Delivery, slot: -1, ev: ev, ctx: ctx, last: true}, true)
	return 0
}
