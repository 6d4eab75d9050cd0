package worker

// What the user's sessions have copied to the device before, and need not be sent again: pieces of content in a store of their own,
// by their SHA-256.
//
//	contentFind    the executor's; a goroutine opens the pieces, checks them, and answers
//	copyInStored   the executor's: copies a piece that was found to the device, by way of pinned slots
//	contentKeep    the executor's: what is copied to this memory is a piece
//	tee            the executor's: copies bytes on their way to the device into the piece
//	store          goroutines: hash a piece that is whole, and store it
//
// Nothing waits for the store. There are so many buffers for pieces; where none is free a piece is not stored. A name is computed here, of
// the bytes that came, so a client cannot store anything under a wrong one.
//
// Locking: mu guards found, nfound and asking. The rest is the executor's, but for the channels.

/*
#include "driver.h"
*/
import "C"

import (
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

const (
	keptBuffers = 16 // pieces that are being filled or stored
	keptOpen    = 8  // of these, such as are being filled
	storers     = 2  // pieces that are stored at the same time, each of which waits for the disk
	openers     = 4  // pieces of a question that are opened at the same time
	questions   = 2  // questions that are being answered; a client has one
)

// contentName names a piece.
type contentName struct {
	sum  store.Sum
	size uint32
}

// A keptPiece is a piece that copies to the device fill.
type keptPiece struct {
	dst  uint64
	buf  []byte // of the piece's size
	have int
}

type contents struct {
	store *store.Store // nil: nothing is stored

	mu     sync.Mutex
	found  map[contentName][]*os.File
	nfound int // files in found, and those that are being opened
	asking int

	// The executor's own.
	open []*keptPiece // the oldest first
	left int64        // bytes that the session may still store
	made int          // buffers

	free     chan []byte
	whole    chan *keptPiece
	storing  atomic.Int32 // pieces that are whole and have not been stored
	unstored sync.Once    // the log says that pieces are not stored
}

// init has a session use a store, nil for none.
func (c *contents) init(st *store.Store) {
	c.store = st
	if st == nil {
		return
	}
	c.found = make(map[contentName][]*os.File)
	// What a session stores never takes the place of what it has stored before.
	c.left = st.Limit
	c.free, c.whole = make(chan []byte, keptBuffers), make(chan *keptPiece, keptBuffers)
}

// --- finding ---

func (s *session) contentFind() int32 {
	c := &s.contents
	var m wire.ContentFind
	m.Decode(&s.dec)
	if m.NPieces == 0 || m.NPieces > wire.MaxContentFind || m.Hold > 1 {
		return s.malformed()
	}
	asked := make([]contentName, m.NPieces)
	for i := range asked {
		var p wire.ContentPiece
		p.Decode(&s.dec)
		asked[i] = contentName{p.Sum, p.Size}
		if p.Size == 0 || p.Size > wire.MaxContent {
			return s.malformed()
		}
	}
	if s.dec.Done() != nil || s.hdr.Call == 0 {
		return s.malformed()
	}
	if c.store == nil {
		return C.CUDA_ERROR_NOT_SUPPORTED
	}
	if !c.ask(len(asked)) {
		(&wire.ContentFindReply{}).Encode(&s.enc)
		return 0
	}
	s.pending = true
	op, call := s.hdr.Op, s.hdr.Call
	go func() {
		var e wire.Encoder
		(&wire.ContentFindReply{Found: c.find(asked, m.Hold == 1)}).Encode(&e)
		if err := s.reply(op, call, 0, e.Buf()); err != nil {
			s.leave("reply", err)
		}
	}()
	return 0
}

// ask reserves room for what a question may find; false if there is none.
func (c *contents) ask(n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asking == questions || c.nfound+n > wire.MaxContentFound {
		return false
	}
	c.asking++
	c.nfound += n
	return true
}

// find opens the pieces that the store has, and gives a bit for each. ask has reserved their room. Unless they are to be held it closes them again.
func (c *contents) find(asked []contentName, hold bool) (found uint32) {
	files := make([]*os.File, len(asked))
	var next atomic.Int32
	var all sync.WaitGroup
	for range min(openers, len(asked)) {
		all.Go(func() {
			for i := next.Add(1) - 1; int(i) < len(asked); i = next.Add(1) - 1 {
				files[i], _ = c.store.Hold(asked[i].sum, uint64(asked[i].size)) // one that cannot be opened is sent
			}
		})
	}
	all.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asking--
	for i, f := range files {
		if f == nil {
			c.nfound--
			continue
		}
		found |= 1 << i
		if !hold {
			f.Close()
			c.nfound--
			continue
		}
		c.found[asked[i]] = append(c.found[asked[i]], f)
	}
	return found
}

// take gives a piece that was found, nil if it was not.
func (c *contents) take(name contentName) *os.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.found[name]
	if len(all) == 0 {
		return nil
	}
	f := all[len(all)-1]
	if c.nfound--; len(all) == 1 {
		delete(c.found, name)
	} else {
		c.found[name] = all[:len(all)-1]
	}
	return f
}

// copyInStored copies a piece that was found to the device.
func (s *session) copyInStored() int32 {
	var m wire.CopyInStored
	m.Decode(&s.dec)
	if s.dec.Done() != nil || m.Last > 1 {
		return s.malformed()
	}
	f := s.contents.take(contentName{m.Sum, m.Size})
	if f == nil {
		s.violation(fmt.Sprintf("piece %s of %d bytes was not found before", store.Sum(m.Sum), m.Size))
		return C.CUDA_ERROR_INVALID_VALUE
	}
	defer f.Close()
	s.given = m.Stream
	var stream, ctx uint64
	rc := s.wantCtx(s.hdr.Ctx)
	if rc == 0 {
		stream, ctx, rc = s.copyTarget(m.Stream)
	}
	if rc != 0 {
		return rc
	}
	s.give(m.Stream)
	if m.Last != 0 {
		defer s.noteArrived(m.Stream, stream, ctx, true)
	}
	atomic.AddUint64(&s.compressed.counts.Bytes, uint64(m.Size))
	atomic.AddUint64(&s.compressed.counts.Sent, wire.CopyInStoredSize)
	return s.copyFile(f, &m, stream, ctx)
}

// storedParts is how many slots a piece takes.
const storedParts = (wire.MaxContent + slotSize - 1) / slotSize

// copyFile copies a file to the device. Its parts are read at the same time: a processor copies less from memory to memory in a second than the
// device takes.
func (s *session) copyFile(f *os.File, m *wire.CopyInStored, stream, ctx uint64) int32 {
	var slots [storedParts]*inSlot
	var errs [storedParts]error
	var all sync.WaitGroup
	n := 0
	size := func(i int) int { return min(slotSize, int(m.Size)-i*slotSize) }
	for ; n*slotSize < int(m.Size); n++ {
		q, i := s.in.acquire(s), n
		slots[i] = q
		all.Go(func() { _, errs[i] = io.ReadFull(io.NewSectionReader(f, int64(i)*slotSize, slotSize), q.buf[:size(i)]) })
	}
	all.Wait()
	for i := range n {
		if errs[i] != nil {
			s.log.Error("a piece of stored content cannot be read", "piece", store.Sum(m.Sum), "bytes", m.Size, "error", errs[i])
			return C.CUDA_ERROR_UNKNOWN
		}
		b := slots[i].buf[:size(i)]
		w := s.copyBegins(wire.SpanCopyIn, m.Stream, ctx, stream)
		rc := int32(C.sl_htod(C.uint64_t(m.Dst+uint64(i)*slotSize), at(b), C.uint64_t(len(b)), C.uint64_t(stream)))
		w.copied(uint64(len(b)), rc)
		if rc == 0 {
			rc = s.in.mark(s, slots[i], ctx, stream)
		}
		if rc != 0 {
			return rc
		}
	}
	return 0
}

// --- storing ---

// contentKeep begins a piece.
func (s *session) contentKeep() int32 {
	c := &s.contents
	var m wire.ContentKeep
	m.Decode(&s.dec)
	if s.dec.Done() != nil || m.Size == 0 || m.Size > wire.MaxContent || m.Dst > math.MaxUint64-wire.MaxContent {
		return s.malformed()
	}
	if c.store == nil || int64(m.Size) > c.left {
		return 0
	}
	if len(c.open) == keptOpen {
		c.left += int64(len(c.open[0].buf)) // it is not stored
		c.free <- c.open[0].buf
		c.open = slices.Delete(c.open, 0, 1)
	}
	b := c.buffer(s)
	if b == nil {
		c.tellUnstored(s, "pieces come faster than they can be stored")
		return 0
	}
	c.left -= int64(m.Size)
	c.open = append(c.open, &keptPiece{dst: m.Dst, buf: b[:m.Size]})
	return 0
}

// buffer gives one for a piece, nil if all are in use.
func (c *contents) buffer(s *session) []byte {
	select {
	case b := <-c.free:
		return b[:wire.MaxContent]
	default:
	}
	if c.made == keptBuffers {
		return nil
	}
	if c.made == 0 {
		for range storers {
			go c.storer(s)
		}
	}
	c.made++
	return make([]byte, wire.MaxContent)
}

// tee copies the bytes of a copy to the device into the piece that they belong to: if there are several, the one begun last.
func (c *contents) tee(dst uint64, b []byte) {
	for i, k := range slices.Backward(c.open) {
		if dst < k.dst || dst-k.dst > uint64(len(k.buf)) || len(b) > len(k.buf)-int(dst-k.dst) {
			continue
		}
		copy(k.buf[dst-k.dst:], b)
		if k.have += len(b); k.have >= len(k.buf) {
			c.open = slices.Delete(c.open, i, i+1)
			c.storing.Add(1)
			c.whole <- k
		}
		return
	}
}

// storer stores pieces that are whole.
func (c *contents) storer(s *session) {
	for k := range c.whole {
		if err := c.store.Put(k.buf); err != nil {
			c.tellUnstored(s, err.Error())
		}
		c.free <- k.buf
		c.storing.Add(-1)
	}
}

func (c *contents) tellUnstored(s *session, why string) {
	c.unstored.Do(func() {
		s.log.Warn("content of copies to the GPU is not stored, or not all of it: programs send it again", "reason", why)
	})
}

// stop lets go of everything, as the end of the process does.
func (c *contents) stop() {
	for busy := true; busy; time.Sleep(100 * time.Microsecond) {
		c.mu.Lock()
		busy = c.asking > 0
		c.mu.Unlock()
	}
	for _, all := range c.found {
		for _, f := range all {
			f.Close()
		}
	}
	close(c.whole)
}

// settle waits until what is whole has been stored, but no longer than for the time given.
func (c *contents) settle(most time.Duration) {
	for until := time.Now().Add(most); c.storing.Load() > 0 && time.Now().Before(until); {
		time.Sleep(time.Millisecond)
	}
}
