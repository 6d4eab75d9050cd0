package worker

// Parts from the device, see copyout.go. push hands chunks of large deliveries to the queue; each bulk connection's goroutine takes from it,
// sends, and reads the answers. Until a part is answered its chunk keeps its slot: if the connection fails, or the client does not answer within
// the keep-alive time, the chunk is lost and sent again as a DATA frame (resend), by the next thread that sends, or by the deliverer.
//
// All parts without an answer belong to one delivery. Before a chunk of another delivery is sent, each of them has been answered or sent
// again, so the bytes of a later copy to the same memory are written last. The last DATA of a delivery waits for the same, and so
// do the bytes that the GPU has written to watched memory. A part may overtake frames, so it says how many frames that write to
// the program's memory were sent before it. A connection's goroutine holds no lock while it sends or reads.

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// maxUnanswered bounds the parts of a connection that the client has not answered.
const maxUnanswered = 2

// bulkOut is what outStaging has for bulk connections; its mu guards all of it.
type bulkOut struct {
	work       *sync.Cond // something was added to queue, or a connection has hung up
	up         int        // connections
	queue      []chunk    // for the next connection that may send
	lost       []chunk    // to be sent again
	unanswered []uint64   // numbers of the chunks that were handed out, until they are answered or sent again
	owner      uint32     // their delivery
}

// waiting reports whether answers are awaited, and nothing is to be sent again before. mu is held.
func (o *bulkOut) waiting() bool { return len(o.unanswered) > 0 && len(o.lost) == 0 }

// awaits reports whether one of the chunks up to a number has still to be answered or sent again. mu is held.
func (o *bulkOut) awaits(until uint64) bool {
	return slices.ContainsFunc(o.unanswered, func(seq uint64) bool { return seq <= until })
}

// settled notes that a chunk was answered or sent again. mu is held.
func (o *bulkOut) settled(seq uint64) {
	if i := slices.Index(o.unanswered, seq); i >= 0 {
		o.unanswered = slices.Delete(o.unanswered, i, i+1)
	}
}

// pass sends a chunk that is complete, or hands it to a connection. It may do so with a part of the chunk: it returns false if the rest, which c is
// then, has to wait for answers. sendMu is held.
func (o *outStaging) pass(c *chunk, failed bool) bool {
	o.mu.Lock()
	if len(o.unanswered) > 0 && o.owner != c.id {
		o.mu.Unlock()
		return false
	}
	part := c.big && !failed && len(c.buf) > 0 && o.up > 0
	if part {
		o.mu.Unlock()
		var err error
		if c.after, err = o.s.wr.Wrote(); err != nil {
			o.s.leave("data", err)
		}
		o.mu.Lock()
	}
	if part && o.up > 0 {
		o.s.events.put(c.ctx, c.ev)
		c.ev = 0
		o.owner, o.unanswered, o.queue = c.id, append(o.unanswered, c.seq), append(o.queue, *c)
		o.work.Signal()
		o.mu.Unlock()
		// The end of the delivery, without bytes, stays.
		c.off, c.buf, c.slot = c.off+uint64(len(c.buf)), nil, -1
		return !c.last
	}
	wait := c.last && len(o.unanswered) > 0
	o.mu.Unlock()
	if wait {
		return false
	}
	o.send(c, failed)
	return true
}

// tellWatched sends what the GPU has written to watched memory, once no part is out: a part may hold what that memory had before, and would
// come later.
func (o *outStaging) tellWatched() {
	if o.s.host.watch.n.Load() == 0 {
		return
	}
	for out := true; out; {
		o.sendMu.Lock()
		if out = o.partsOut(); !out {
			_, ok := o.report(wire.MaxHostWatch)
			out = !ok
		}
		o.sendMu.Unlock()
		if out {
			o.flush()
		}
	}
}

// reportSoon is report of small watches, unless parts are out or somebody is sending. It says whether the GPU has written to any.
func (o *outStaging) reportSoon() bool {
	if !o.sendMu.TryLock() {
		return false
	}
	defer o.sendMu.Unlock()
	if o.partsOut() {
		return false
	}
	some, ok := o.report(hostWatchPolled)
	if !ok { // bytes that the writer may hold go now
		if err := o.s.wr.Flush(); err != nil {
			o.s.leave("data", err)
		}
	}
	return some
}

// partsOut reports whether the client has not answered all parts. If sendMu is held, no others are handed out.
func (o *outStaging) partsOut() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.unanswered) > 0
}

// resend sends what was lost. sendMu is held.
func (o *outStaging) resend() {
	for {
		o.mu.Lock()
		lost := o.lost
		o.lost = nil
		o.mu.Unlock()
		if len(lost) == 0 {
			return
		}
		for i := range lost {
			c := lost[i]
			c.last = false // that comes behind
			o.send(&c, false)
			o.mu.Lock()
			o.settled(c.seq)
			o.mu.Unlock()
		}
		o.mu.Lock()
		o.cond.Broadcast()
		o.mu.Unlock()
	}
}

// join counts a connection: from now on parts are handed out.
func (o *outStaging) join() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.up++
}

// writeParts sends parts until the connection, which has joined, ends.
func (o *outStaging) writeParts(c *bulkConn) error {
	hung := make(chan struct{})
	go func() {
		defer close(hung)
		o.watchBulk(c)
	}()
	var sent []chunk
	err := error(nil)
	for err == nil {
		q, ok := o.nextPart(c, len(sent))
		switch {
		case ok:
			sent = append(sent, q)
			err = o.sendPart(c, &q)
		case len(sent) == 0:
			err = io.EOF
		default:
			if err = c.readTaken(&sent[0]); err == nil {
				o.answered(&sent[0])
				sent = sent[1:]
			}
		}
	}
	o.lose(sent)
	_ = unix.Shutdown(c.fd, unix.SHUT_RDWR)
	<-hung // it uses the descriptor
	return err
}

// watchBulk waits until the client has closed a connection, which it may do at any moment between parts.
func (o *outStaging) watchBulk(c *bulkConn) {
	p := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLRDHUP}}
	for {
		if n, err := unix.Poll(p, -1); n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	c.gone = true
	o.work.Broadcast()
}

// nextPart takes a chunk from the queue; have is how many of the connection's have not been answered. There is none if an answer has to be read
// first, or nothing comes any more.
func (o *outStaging) nextPart(c *bulkConn, have int) (chunk, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		switch {
		case c.gone || have >= maxUnanswered:
			return chunk{}, false
		case len(o.queue) > 0:
			q := o.queue[0]
			o.queue = o.queue[1:]
			return q, true
		case have > 0:
			return chunk{}, false
		}
		o.work.Wait()
	}
}

func (o *outStaging) sendPart(c *bulkConn, q *chunk) error {
	var e wire.Encoder
	(&wire.BulkPart{Number: uint64(q.id), Offset: q.off, Size: uint32(len(q.buf)), After: q.after}).Encode(&e)
	if err := c.out.Write([][]byte{e.Buf(), q.buf}); err != nil {
		return err
	}
	o.s.bulk.sent.Add(wire.BulkPartSize + uint64(len(q.buf)))
	return nil
}

// readTaken reads the answer to a part.
func (c *bulkConn) readTaken(q *chunk) error {
	var b [wire.BulkTakenSize]byte
	if err := c.read(b[:]); err != nil {
		return err
	}
	var m wire.BulkTaken
	if m.Decode(wire.NewDecoder(b[:])); m.Number != uint64(q.id) || m.Offset != q.off {
		return fmt.Errorf("an answer for %d, %d to part %d, %d", m.Number, m.Offset, q.id, q.off)
	}
	return nil
}

// answered frees the slot of a part that the client has taken.
func (o *outStaging) answered(q *chunk) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.settled(q.seq)
	o.free = append(o.free, q.slot)
	o.cond.Broadcast()
}

// lose has what a connection's client has not answered sent again, and, where it was the last connection, all that waits for one.
func (o *outStaging) lose(sent []chunk) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lost = append(o.lost, sent...)
	if o.up--; o.up == 0 {
		o.lost = append(o.lost, o.queue...)
		o.queue = nil
	}
	if len(o.lost) > 0 {
		o.wake()
	} else {
		o.work.Signal() // the one that was meant for this connection
	}
}
