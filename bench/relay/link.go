package main

// One direction of the link.
//
//	socket -> take -> line (a queue in time order) -> give -> socket
//
// take reads a piece, works out when its last byte has left the sender at the
// link's rate and when it has crossed the link, and appends it to the line. give
// waits for that moment and writes the piece. So the delay is exact however long
// the hand-over takes, as long as it takes less than the delay.
//
// take stops reading while the sending side of the link is more than queueTime
// behind, or when the line is full. Then the socket's buffer fills and the
// sender is held back, as a network would do it.
//
// All connections share the rate of a direction (sender), as those between two
// machines do; each has a line of its own, and so a buffer of its own.
//
// The line's lock guards its queue, the sender's its time; everything else belongs
// to one of the two goroutines. Both sit on threads of their own and wait by clock_nanosleep: the
// runtime's timers are a millisecond apart when nothing else happens, which is
// ten times the delay of a local network.

import (
	"errors"
	"io"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxPiece  = 64 << 10               // bytes read at once
	minPiece  = 1500                   // a packet
	pieceTime = 100 * time.Microsecond // a piece takes about this long to send
	queueTime = 2 * time.Millisecond   // what the sending side of the link buffers
	maxLine   = 1 << 30                // bytes under way, when only the delay is limited
	lateTime  = 50 * time.Millisecond  // how late we may be and still make it good
	spinTime  = 20 * time.Microsecond  // waited out awake: a sleep is that inexact
)

// link says what one direction is like. Rate is bytes a second, 0 for no limit.
type link struct {
	delay time.Duration
	rate  float64
}

func (l link) sendTime(n int) time.Duration {
	if l.rate == 0 {
		return 0
	}
	return time.Duration(float64(n) / l.rate * 1e9)
}

// piece is the largest read: small enough that the first byte of a bulk transfer
// is not held back noticeably until the piece is complete.
func (l link) piece() int {
	if l.rate == 0 {
		return maxPiece
	}
	return min(max(int(l.rate*pieceTime.Seconds()), minPiece), maxPiece)
}

// room is how many bytes may be under way: what the link holds, and its queue.
func (l link) room() int {
	if l.rate == 0 {
		return maxLine
	}
	return int(l.rate*(l.delay+queueTime).Seconds()) + 2*maxPiece
}

// sender is the sending side of a direction, which the connections share.
type sender struct {
	mu   sync.Mutex
	free time.Duration // when it is done with what it has, by now()
}

// send says when the sender is done with n bytes more that it has had since begin.
func (s *sender) send(l link, n int, begin time.Duration) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = max(s.free, begin) + l.sendTime(n)
	return s.free
}

type parcel struct {
	data []byte
	due  time.Duration // by now()
}

// line is the queue between the two ends of one direction.
type line struct {
	mu      sync.Mutex
	changed sync.Cond
	queue   []parcel
	bytes   int
	room    int
	ended   bool // no more will come: the reader is at the end
	broken  bool // no more can go: the writer failed
}

func newLine(room int) *line {
	q := &line{room: room}
	q.changed.L = &q.mu
	return q
}

// put appends p, when there is room. It reports false once the writer failed.
func (q *line) put(p parcel) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.bytes > 0 && q.bytes+len(p.data) > q.room && !q.broken {
		q.changed.Wait()
	}
	q.queue = append(q.queue, p)
	q.bytes += len(p.data)
	q.changed.Broadcast()
	return !q.broken
}

func (q *line) end() {
	q.mu.Lock()
	q.ended = true
	q.mu.Unlock()
	q.changed.Broadcast()
}

// next waits for a parcel. Its bytes count as under way until done.
func (q *line) next() (parcel, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.queue) == 0 {
		if q.ended {
			return parcel{}, false
		}
		q.changed.Wait()
	}
	p := q.queue[0]
	q.queue[0] = parcel{}
	q.queue = q.queue[1:]
	return p, true
}

func (q *line) done(p parcel, err error) {
	q.mu.Lock()
	q.bytes -= len(p.data)
	if err != nil {
		q.broken = true
	}
	q.mu.Unlock()
	q.changed.Broadcast()
}

// source is what take reads: idle says that it had nothing and we had to wait.
type source interface {
	readIdle(b []byte) (n int, idle bool, err error)
}

// take reads from r until its end and answers how many bytes came.
func (l link) take(r source, s *sender, q *line) (total int64, err error) {
	defer q.end()
	ownThread()
	s.send(l, 0, now()) // what comes first may be there before we look, and is not late through us
	for {
		buf := pieces.get(l.piece())
		n, idle, err := r.readIdle(buf)
		if n > 0 {
			// Bytes that were there already are late through us, not through
			// their sender: the link was busy with them in the meantime.
			begin := now()
			if !idle {
				begin -= lateTime
			}
			free := s.send(l, n, begin)
			total += int64(n)
			if !q.put(parcel{buf[:n], free + l.delay}) {
				return total, io.ErrClosedPipe
			}
			if ahead := free - now(); ahead > queueTime {
				sleepUntil(free-queueTime, 0)
			}
		}
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// give writes what take has read, each piece at its time.
func (l link) give(w io.Writer, q *line) error {
	ownThread()
	for {
		p, ok := q.next()
		if !ok {
			return nil
		}
		sleepUntil(p.due, spinTime)
		_, err := w.Write(p.data)
		q.done(p, err)
		pieces.put(p.data)
		if err != nil {
			return err
		}
	}
}

// pool keeps buffers of one size, the link's piece.
type pool struct{ p sync.Pool }

var pieces pool

func (o *pool) get(n int) []byte {
	if b, ok := o.p.Get().(*[]byte); ok && cap(*b) >= n {
		return (*b)[:n]
	}
	return make([]byte, n)
}

func (o *pool) put(b []byte) { o.p.Put(&b) }

// ownThread gives the goroutine a thread whose sleeps end on time. The thread
// ends with the goroutine.
func ownThread() {
	runtime.LockOSThread()
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
}

// now is CLOCK_MONOTONIC, which sleepUntil sleeps by.
func now() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// sleepUntil waits until t, the last part of it awake.
func sleepUntil(t, awake time.Duration) {
	if t-now() > awake {
		ts := unix.NsecToTimespec(int64(t - awake))
		for unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil) == unix.EINTR { //nolint:errorlint // an errno
		}
	}
	for now() < t {
	}
}
