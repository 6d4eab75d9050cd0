package rpc

import (
	"bytes"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// Conversions of what concerns probes, as in convert.go.

func toProbeOrder(r lease.ProbeRequest) *pb.ProbeOrder {
	return &pb.ProbeOrder{Uid: r.UID, Connections: r.Connections, Encrypt: r.Encrypt, CertHashes: r.CertHashes}
}

func fromProbeOrder(r *pb.ProbeOrder) lease.ProbeRequest {
	return lease.ProbeRequest{UID: r.GetUid(), Connections: r.GetConnections(), Encrypt: r.GetEncrypt(), CertHashes: each(r.GetCertHashes(), bytes.Clone)}
}

func fromProbeOffer(r *pb.ProbeOffer) ([]lease.Offer, error) {
	var out []lease.Offer
	for _, o := range r.GetOffers() {
		one, err := fromOffer(o)
		if err != nil {
			return nil, err
		}
		out = append(out, one)
	}
	return out, nil
}

func toProbe(p lease.Probe) *pb.Probe {
	return &pb.Probe{
		Node: text(p.Node), Owner: text(p.Owner), Local: p.Local, Encrypted: p.Encrypted, Bounded: p.Bounded, Exchanges: p.Exchanges,
		RoundTrip: toDuration(p.RoundTrip), RoundTripMedian: toDuration(p.RoundTripMedian), RoundTrip_99: toDuration(p.RoundTrip99),
		Ahead: toDuration(p.Ahead), Flows: each(p.Flows, toProbeFlow), From: toProbeEnd(p.From), To: toProbeEnd(p.To),
	}
}

func fromProbe(p *pb.Probe) lease.Probe {
	return lease.Probe{
		Node: p.GetNode(), Owner: p.GetOwner(), Local: p.GetLocal(), Encrypted: p.GetEncrypted(), Bounded: p.GetBounded(), Exchanges: p.GetExchanges(),
		RoundTrip: fromDuration(p.GetRoundTrip()), RoundTripMedian: fromDuration(p.GetRoundTripMedian()), RoundTrip99: fromDuration(p.GetRoundTrip_99()),
		Ahead: fromDuration(p.GetAhead()), Flows: each(p.GetFlows(), fromProbeFlow), From: fromProbeEnd(p.GetFrom()), To: fromProbeEnd(p.GetTo()),
	}
}

func toProbeFlow(f lease.ProbeFlow) *pb.ProbeFlow {
	return &pb.ProbeFlow{Up: f.Up, Connections: f.Connections, Rate: f.Rate, Low: f.Low, High: f.High, Bytes: f.Bytes, Time: toDuration(f.Time), Segments: f.Segments, Resent: f.Resent}
}

func fromProbeFlow(f *pb.ProbeFlow) lease.ProbeFlow {
	return lease.ProbeFlow{Up: f.GetUp(), Connections: f.GetConnections(), Rate: f.GetRate(), Low: f.GetLow(), High: f.GetHigh(), Bytes: f.GetBytes(), Time: fromDuration(f.GetTime()), Segments: f.GetSegments(), Resent: f.GetResent()}
}

func toProbeEnd(e lease.ProbeEnd) *pb.ProbeEnd {
	return &pb.ProbeEnd{Device: text(e.Device), DeviceSpeed: e.DeviceSpeed, DeviceMtu: e.DeviceMTU, PathMtu: e.PathMTU, Segment: e.Segment, SendBuffer: e.SendBuffer, ReceiveBuffer: e.ReceiveBuffer}
}

func fromProbeEnd(e *pb.ProbeEnd) lease.ProbeEnd {
	return lease.ProbeEnd{Device: e.GetDevice(), DeviceSpeed: e.GetDeviceSpeed(), DeviceMTU: e.GetDeviceMtu(), PathMTU: e.GetPathMtu(), Segment: e.GetSegment(), SendBuffer: e.GetSendBuffer(), ReceiveBuffer: e.GetReceiveBuffer()}
}
