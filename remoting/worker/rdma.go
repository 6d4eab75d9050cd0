package worker

// Having a session's frames go over RDMA, by package verbs; docs/protocol.md, "RDMA", has the bytes.

import (
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/verbs"
	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
)

// agreeTime is the patience with a client that has been told how it reaches this side by RDMA. It tries for six seconds.
const agreeTime = 8 * time.Second

// offerRDMA has the snapshot offer RDMA to a client that asks for it over TCP, if there is a device for its connection.
func (c *client) offerRDMA(log *slog.Logger, st *control.Start) {
	if st.RDMA.Off() || st.Hello.Features&wire.FeatureRdma == 0 || !wire.SessionComputes(st.Hello.Kind) || isUnix(c.fd) {
		return
	}
	s, err := verbs.Open(c.fd, st.RDMA.Device())
	if err != nil {
		log.Warn("no RDMA for a client that asks for it: the session goes over TCP", "reason", err)
		return
	}
	c.rdma = s
	st.Snapshot.Features |= wire.FeatureRdma
}

// agreeRDMA exchanges cards with the client behind the welcome, and has the stream go by RDMA if that works. It returns false if
// the client has gone.
func (c *client) agreeRDMA(log *slog.Logger) bool {
	works, why, err := c.tryRDMA()
	switch {
	case err != nil:
		log.Info("client has gone while RDMA was agreed on", "reason", err)
		return false
	case works:
		wire.Carry(c.stream, c.rdma)
		log.Info("session goes over RDMA", "device", c.rdma.Name())
	default:
		log.Warn("session goes over TCP and not over RDMA", "reason", why)
		c.rdma.Close()
		c.rdma = nil
	}
	return true
}

// tryRDMA says whether RDMA works, or why not. An error means that the connection is lost.
func (c *client) tryRDMA() (works bool, why, err error) {
	if err := c.hello.Raw(c.rdma.Card()); err != nil {
		return false, nil, err
	}
	var card [wire.VerbsCardSize]byte
	until := time.Now().Add(agreeTime)
	if err := readWithin(c.fd, card[:], agreeTime); err != nil {
		return false, nil, err
	}
	if why = c.rdma.Join(card[:]); card == [wire.VerbsCardSize]byte{} {
		return false, why, nil // nothing more comes from the client
	}
	var answer [1]byte
	if err := readWithin(c.fd, answer[:], time.Until(until)); err != nil {
		return false, why, err
	}
	if why == nil && answer[0] != 1 {
		why = fmt.Errorf("the first messages did not get through")
	}
	if why != nil && answer[0] == 1 {
		return false, why, unix.EPROTO
	}
	return why == nil, why, nil
}
