package worker

// What a session's gates (package gate) need of its driver, and what the session tells them.

/*
#include "driver.h"
*/
import "C"

import (
	"fmt"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/gate"
	"github.com/sluice-hpc/sluice/remoting/worker/turns"
)

// gateDriver is the process's driver as gates use it.
type gateDriver struct{}

func (gateDriver) SetContext(ctx uint64) bool { return C.sl_ctx_set(C.uint64_t(ctx)) == 0 }

func (gateDriver) NewEvent() uint64 {
	var ev C.uint64_t
	if C.sl_event_create(&ev, C.CU_EVENT_DEFAULT) != 0 {
		return 0
	}
	return uint64(ev)
}

func (gateDriver) Record(event, stream uint64) bool {
	return C.sl_event_record(C.uint64_t(event), C.uint64_t(stream)) == 0
}

func (gateDriver) Query(event uint64) gate.State {
	switch C.sl_event_query(C.uint64_t(event)) {
	case C.CUDA_SUCCESS:
		return gate.Reached
	case C.CUDA_ERROR_NOT_READY:
		return gate.Pending
	}
	return gate.Failed
}

func (gateDriver) Elapsed(from, to uint64) (ns int64, ok bool) {
	var ms C.float
	if C.call_cuEventElapsedTime_v2(&ms, C.uint64_t(from), C.uint64_t(to)) != 0 {
		return 0, false
	}
	return int64(float64(ms) * 1e6), true
}

func (gateDriver) RelaxCapture() { relaxCapture() }

// gateConfig is what the session's gates need to know of it.
func (s *session) gateConfig() gate.Config {
	return gate.Config{
		Driver: gateDriver{}, Log: s.log, HostCalls: &s.hostfns.calls,
		Prewake: s.announceTurn, ContextLost: s.forgetCtx, Overran: s.overran, Tell: s.traceTurn,
	}
}

// openGates makes the session a member of the schedules that START names. fds are the descriptors of
// those schedules. What the lease owes is in its account.
func (s *session) openGates(st *control.Start, acct *account.Session, fds []int) error {
	for dev, t := range st.Turns {
		if t.Tenant < 0 {
			continue
		}
		clock := deviceClock(dev)
		member, err := turns.OpenFDs(fds[0], fds[1], t.Tenant, clock)
		if err != nil {
			return fmt.Errorf("device %d: %w", dev, err)
		}
		fds = fds[2:]
		if debts, ok := acct.Debts(dev); ok {
			member.Keep(debts)
		}
		s.gates.Open(dev, member, clock, turnIdle(s.stream.FD()))
	}
	return nil
}

// overran ends the process at once: the driver ends its work then, which nothing else can. The
// client is not told, since writing to it might block.
func (s *session) overran(overdue, owes, limit time.Duration) {
	s.leaving.Do(func() {
		s.reason(control.OverrunReason("a GPU", overdue, owes, limit))
		s.gates.Quit()
		s.exit(control.ExitOverrun)
	})
}

// turnIdle returns how long a turn without work is kept for a client, which needs a round trip to
// answer a result.
func turnIdle(fd int) time.Duration {
	l, err := wire.LinkOf(fd)
	if err != nil {
		return gate.IdleTime
	}
	return min(max(2*l.RoundTrip, gate.IdleTime), gate.MaxIdle)
}

// announceTurn tells the client that a turn is about to begin, and for how long its threads should
// stay awake. They may wait for an answer behind the work that is at the gate; the GPU would stand
// idle until they are awake.
func (s *session) announceTurn(awake time.Duration) {
	f := wire.Reply{Kind: wire.FrameTurn, Arg: uint32(awake.Microseconds())}
	if err := s.wr.Send(&f, nil, nil); err != nil {
		s.log.Debug("turn not announced", "error", err) // the executor's next read finds out
	}
}

// useGate makes the gate of the current context's device the current one.
func (s *session) useGate() {
	dev := -1
	if s.gates.Kept() {
		if c := s.context(); c != nil {
			dev = c.dev
		}
	}
	s.gates.Use(dev, s.curReal)
}

// gateOf returns the gate that work in a stream has to pass. It is nil if the device has none, or if
// the stream is being captured, which starts nothing. The stream's context becomes current: that
// is where the work and its fence go.
func (s *session) gateOf(stream href) (*gate.Gate, int32) {
	if !s.gates.Kept() {
		return nil, 0
	}
	if stream.id != 0 {
		if _, rc := s.streamCtx(stream.id); rc != 0 {
			return nil, rc
		}
	}
	return s.gateHere(stream.real), 0
}

// gateHere is gateOf for a stream of the current context.
func (s *session) gateHere(stream uint64) *gate.Gate {
	g := s.gates.Here()
	if g == nil || len(s.captures) > 0 && s.capturing(stream) {
		return nil
	}
	return g
}

// passed comes after a call that a gate has let through.
func (s *session) passed(g *gate.Gate) {
	s.gates.StepOut()
	if len(s.captures) > 0 {
		g.Flush() // a fence recorded later might become part of a capture
	}
}

// noTurn ends the session, because there are no more turns for it.
func (s *session) noTurn() int32 {
	if s.ended == "" {
		s.ended = turns.ErrEnded.Error()
	}
	return C.CUDA_ERROR_DEVICE_UNAVAILABLE
}

// mayWait comes before an operation that may make a stream wait for the client, or for
// another stream that does.
func (s *session) mayWait(op uint16) {
	switch op {
	case opCuStreamWaitValue32, opCuStreamWaitValue32_v2, opCuStreamWaitValue64, opCuStreamWaitValue64_v2,
		opCuStreamBatchMemOp, opCuStreamBatchMemOp_v2:
		s.gates.WaitsForValue(len(s.captures) > 0)
	case wire.OpLaunchHost:
		s.gates.WaitsForClient(len(s.captures) > 0)
	case opCuStreamWaitEvent, opCuCtxWaitEvent, opCuGreenCtxWaitEvent:
		s.gates.WaitsForStream()
	case opCuGraphLaunch:
		s.gates.LaunchesGraph()
	}
}
