package lease

import (
	"context"
	"time"
)

// Prober is an owner whose link can be measured.
type Prober interface {
	// Probe offers connections to host, which measures the link over them. One probe at a time is let in.
	Probe(ctx context.Context, host string, r ProbeRequest) ([]Offer, error)
}

// ProbeRequest asks an owner for connections to measure its link.
type ProbeRequest struct {
	UID         uint32 // who probes: root is bounded by time alone, others by bytes too
	Connections uint32
	Encrypt     bool
	CertHashes  [][]byte // SHA-256, one for each connection, if they are encrypted
}

// Probe is what was measured of the link from a node to an owner.
type Probe struct {
	Node      string `json:"node"`
	Owner     string `json:"owner"`
	Local     bool   `json:"local,omitempty"` // they are one node: there is no link, and nothing was measured
	Encrypted bool   `json:"encrypted"`
	Bounded   bool   `json:"bounded"` // a user's: shorter, and of fewer bytes

	Exchanges       uint32        `json:"exchanges"`         // small messages that were answered, one after the other
	RoundTrip       time.Duration `json:"round_trip"`        // the shortest of them
	RoundTripMedian time.Duration `json:"round_trip_median"` //
	RoundTrip99     time.Duration `json:"round_trip_99"`     // 99 of 100 took no longer
	Ahead           time.Duration `json:"ahead"`             // by how much the owner's clock is ahead of the node's, give or take half of RoundTrip
	Flows           []ProbeFlow   `json:"flows"`
	From            ProbeEnd      `json:"from"` // the node
	To              ProbeEnd      `json:"to"`   // the owner
}

// ProbeFlow is bytes sent in one direction, over one or several connections at a time.
type ProbeFlow struct {
	Up          bool          `json:"up"` // to the owner
	Connections uint32        `json:"connections"`
	Rate        uint64        `json:"rate"` // bytes a second, as all three; 0: over too soon to say
	Low         uint64        `json:"low"`  // the slowest and the fastest fifth of the time; 0: it was too short for that
	High        uint64        `json:"high"`
	Bytes       uint64        `json:"bytes"`
	Time        time.Duration `json:"time"`
	Segments    uint64        `json:"segments"`
	Resent      uint64        `json:"resent"` // of Segments, those that were sent again
}

// ProbeEnd is what one end's machine says of the link.
type ProbeEnd struct {
	Device        string `json:"device"`       // the network interface; "" is not known
	DeviceSpeed   uint64 `json:"device_speed"` // bits a second; 0 is not known, as of a virtual one
	DeviceMTU     uint32 `json:"device_mtu"`   // bytes, as all below
	PathMTU       uint32 `json:"path_mtu"`
	Segment       uint32 `json:"segment"` // data in one packet to the other end
	SendBuffer    uint64 `json:"send_buffer"`
	ReceiveBuffer uint64 `json:"receive_buffer"`
}
