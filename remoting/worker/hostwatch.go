package worker

// Memory whose changes are reported to the client.
//
// Small blocks, which programs use for status words, are watched: the worker keeps what the
// client has of them, compares, and sends a HOST frame with what differs. It does so before
// any frame that says that work is complete (report in copyout.go), so that the client knows what the GPU
// has written by the time it learns that the GPU is done. Of blocks of at most
// hostWatchPolled bytes it does so while work runs, too (poll), because a program may wait
// for a kernel by looking at a word that the kernel writes. Copies to the host that the GPU has made before
// it wrote such a word are sent before it.
//
// What the client sends is noted as what it has, so that nothing is sent back to it. The
// lock is held until a frame is in the writer: frames that are about the same bytes go out
// in the order in which the bytes were read.

/*
#include "driver.h"
*/
import "C"

import (
	"bytes"
	"encoding/binary"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

const (
	// hostWatchPolled is the most bytes of a watch that is looked at while work runs.
	hostWatchPolled = 64 << 10
	// hostWatchPart is the most bytes that one HOST frame is about, in whole words.
	hostWatchPart = hostWatchPolled + 8
	// hostReadings is how often memory that changes is read until two readings are the same.
	hostReadings = 8
	// A poll follows on the last after pollOften, or after pollSeldom if the client has sent
	// nothing and nothing has changed for pollRecent.
	pollOften  = time.Millisecond
	pollSeldom = 10 * time.Millisecond
	pollRecent = 2 * time.Second
)

// hostWatch is one HOST_WATCH's memory.
type hostWatch struct {
	base uint64
	mem  []byte // of a map
	seen []byte // what the client has of it

	last             []bool // the words that the client's last change was about
	lastFrom, lastTo uint64 // all of them are between these
}

type hostWatches struct {
	n     atomic.Int32 // len(list)
	mu    sync.Mutex   // guards what follows; before hostMaps.mu
	list  []*hostWatch
	bytes uint64
	polls bool // a goroutine runs poll
}

func (s *session) hostWatch(p []byte) int32 {
	var m wire.HostWatch
	s.dec.Reset(p)
	m.Decode(&s.dec)
	if s.dec.Done() != nil {
		return s.malformed()
	}
	w := &s.host.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	if m.Size == 0 {
		return w.end(func(h *hostWatch) bool { return h.base == m.Address })
	}
	if (m.Address|m.Size)%8 != 0 {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	if m.Size > wire.MaxHostWatch-w.bytes {
		return C.CUDA_ERROR_OUT_OF_MEMORY
	}
	h := &hostWatch{base: m.Address, last: make([]bool, m.Size/8)}
	if !s.host.at(m.Address, m.Size, func(mem []byte) { h.mem, h.seen = mem, bytes.Clone(mem) }) {
		return C.CUDA_ERROR_INVALID_VALUE
	}
	w.list = append(w.list, h)
	w.bytes += m.Size
	w.n.Store(int32(len(w.list)))
	if !w.polls {
		w.polls = true
		go w.poll(s)
	}
	return 0
}

// end forgets the watches for which gone says so. The lock is held.
func (w *hostWatches) end(gone func(*hostWatch) bool) int32 {
	rc := int32(C.CUDA_ERROR_INVALID_VALUE)
	w.list = slices.DeleteFunc(w.list, func(h *hostWatch) bool {
		if !gone(h) {
			return false
		}
		rc = 0
		w.bytes -= uint64(len(h.mem))
		return true
	})
	w.n.Store(int32(len(w.list)))
	return rc
}

// dropWatches forgets the watches of a map that is about to go.
func (h *hostMaps) dropWatches(base uint64) {
	if h.watch.n.Load() == 0 {
		return
	}
	h.watch.mu.Lock()
	defer h.watch.mu.Unlock()
	h.mu.Lock()
	i := h.find(base)
	end := base
	if i < len(h.maps) && h.maps[i].base == base {
		end += uint64(len(h.maps[i].mem))
	}
	h.mu.Unlock()
	h.watch.end(func(w *hostWatch) bool { return w.base < end && w.base+uint64(len(w.mem)) > base })
}

// has says whether p is watched.
func (w *hostWatches) has(p uint64) bool {
	if w.n.Load() == 0 {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(w.list, func(h *hostWatch) bool { return p-h.base < uint64(len(h.mem)) })
}

// merged carries out a merge of the client's by f, and notes that the client has these bytes. f may call changedLast.
func (w *hostWatches) merged(p uint64, b, mask []byte, f func() bool) bool {
	if w.n.Load() == 0 {
		return f()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !f() {
		return false
	}
	for _, h := range w.list {
		from, to := max(p, h.base), min(p+uint64(len(b)), h.base+uint64(len(h.seen)))
		if from >= to {
			continue
		}
		for at := from; at < to; at++ {
			if k := at - p; mask[k/8]>>(k%8)&1 != 0 {
				h.seen[at-h.base] = b[k]
			}
		}
		h.noteLast(from, to, mask[(from-p)/8:])
	}
	return true
}

// noteLast keeps which words from from to to the client has changed.
func (h *hostWatch) noteLast(from, to uint64, mask []byte) {
	clear(h.last[h.lastFrom:h.lastTo])
	h.lastFrom, h.lastTo = (from-h.base)/8, (to-h.base)/8
	for k := range h.lastTo - h.lastFrom {
		h.last[h.lastFrom+k] = mask[k] != 0
	}
}

// changedLast reports whether the client's last change was about the word at p. The lock is held.
func (w *hostWatches) changedLast(p uint64) bool {
	return slices.ContainsFunc(w.list, func(h *hostWatch) bool { return p-h.base < uint64(len(h.mem)) && h.last[(p-h.base)/8] })
}

// A hostReading is what a watch's memory had from at on, which the client does not have.
type hostReading struct {
	h   *hostWatch
	at  int
	now []byte
}

// read is what the client does not have of watches of at most that many bytes. The lock is held.
func (w *hostWatches) read(most int) (found []hostReading) {
	for _, h := range w.list {
		if len(h.mem) > most {
			continue
		}
		for at := 0; at < len(h.mem); at += hostWatchPart {
			mem := h.mem[at:min(at+hostWatchPart, len(h.mem))]
			if bytes.Equal(mem, h.seen[at:at+len(mem)]) {
				continue
			}
			// Two equal readings are a state that the memory had at one moment: if it has a flag, it also has what was written
			// before the flag.
			now := bytes.Clone(mem)
			for i := 1; i < hostReadings && !bytes.Equal(now, mem); i++ {
				copy(now, mem)
			}
			found = append(found, hostReading{h, at, now})
		}
	}
	return found
}

// send sends the client what was found. The lock has been held since. The caller holds outStaging.sendMu, and no part is out.
func (w *hostWatches) send(s *session, found []hostReading) {
	for _, r := range found {
		if s.wr.Send(&wire.Reply{Kind: wire.FrameHost}, r.h.changes(r.at, r.now), nil) != nil {
			return // the threads that read and answer meet the error too
		}
	}
}

// changes is a HOST frame's payload for what the watched bytes from at on were, which the client has then.
func (h *hostWatch) changes(at int, now []byte) []byte {
	end := at + len(now)
	mask := make([]byte, len(now)/8)
	first, last := len(mask), 0
	for k := range mask {
		for i := range 8 {
			if now[8*k+i] != h.seen[at+8*k+i] {
				mask[k] |= 1 << i
			}
		}
		if mask[k] != 0 {
			first, last = min(first, k), k+1
		}
	}
	copy(h.seen[at:end], now)
	if first > last { // it is again what it was
		first, last = 0, 1
	}
	var e wire.Encoder
	(&wire.HostMerge{Dst: h.base + uint64(at+8*first), Size: uint32(8 * (last - first))}).Encode(&e)
	return slices.Concat(e.Buf(), mask[first:last], now[8*first:8*last])
}

// poll looks for changes while there is anything to watch.
func (w *hostWatches) poll(s *session) {
	begun, active := s.begun.Load(), time.Now()
	for every := pollOften; ; time.Sleep(every) {
		w.mu.Lock()
		if len(w.list) == 0 {
			w.polls = false
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		if n := s.begun.Load(); s.out.reportSoon() || n != begun {
			begun, active = n, time.Now()
		}
		every = pollOften
		if time.Since(active) > pollRecent {
			every = pollSeldom
		}
	}
}

// mergeTurns copies the bytes of b whose bits are set in mask, for a kernel that may be looking. First come the
// words that have a neighbour on both sides that was changed, too, then those that have one before, then those that
// have one behind, at last those that have none: the later its turn, the more likely a word is a flag that says that
// others have been written. But if the change before included a neighbour of such a word, the word more likely completes
// data that was half written then, and comes before the flags. last reports whether the change before included word k.
// A word's bytes are written at once.
func mergeTurns(mem, b, mask []byte, last func(k int) bool) {
	for turn := range 5 {
		for k, bits := range mask {
			its := 0
			if k == 0 || mask[k-1] == 0 {
				its += 2
			}
			if k+1 == len(mask) || mask[k+1] == 0 {
				its++
			}
			if bits != 0 && its == 3 && !last(k-1) && !last(k+1) {
				its = 4
			}
			if bits != 0 && its == turn {
				mergeWord(mem[8*k:8*k+8], b[8*k:8*k+8], bits)
			}
		}
	}
}

// mergeWord copies those of 8 bytes whose bits are set. mem is at a multiple of 8.
func mergeWord(mem, b []byte, bits byte) {
	var mask uint64
	for i := range 8 {
		if bits>>i&1 != 0 {
			mask |= 0xff << (8 * i)
		}
	}
	word, v := (*uint64)(at(mem)), binary.LittleEndian.Uint64(b)
	for {
		was := atomic.LoadUint64(word)
		if atomic.CompareAndSwapUint64(word, was, was&^mask|v&mask) {
			return
		}
	}
}
