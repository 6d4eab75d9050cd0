package wire

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Link is what this end's kernel knows of a TCP connection (tcp(7), TCP_INFO).
type Link struct {
	// RoundTrip is the smoothed one. It has the time for which an idle peer puts its acknowledgements off.
	RoundTrip time.Duration
	// MinRoundTrip is the shortest of the last minutes (tcp_min_rtt_wlen in the kernel's ip-sysctl.rst); 0: none yet.
	MinRoundTrip time.Duration
	Sent         uint64 // segments with data, those sent again included
	Resent       uint64 // segments that were lost on the way to the peer, or seemed to be
	Received     uint64 // bytes, in order, whether they have been read or not
	Segment      uint32 // bytes of data that a segment to the peer holds
	PathMTU      uint32 // bytes
}

// LinkOf asks the kernel. A Unix socket has no link, which is an error.
func LinkOf(fd int) (Link, error) {
	i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return Link{}, fmt.Errorf("wire: state of the connection: %w", err)
	}
	l := Link{
		RoundTrip: time.Duration(i.Rtt) * time.Microsecond,
		Sent:      uint64(i.Data_segs_out), Resent: uint64(i.Total_retrans), Received: i.Bytes_received,
		Segment: i.Snd_mss, PathMTU: i.Pmtu,
	}
	if i.Min_rtt != ^uint32(0) { // that is "none yet"
		l.MinRoundTrip = time.Duration(i.Min_rtt) * time.Microsecond
	}
	return l, nil
}

// Buffers returns how many bytes of data a socket's buffers hold in each direction. The kernel counts twice as much, since
// it needs room of its own there (socket(7)).
func Buffers(fd int) (send, receive uint64, err error) {
	for opt, n := range map[int]*uint64{unix.SO_SNDBUF: &send, unix.SO_RCVBUF: &receive} {
		v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, opt)
		if err != nil {
			return 0, 0, fmt.Errorf("wire: buffers of the connection: %w", err)
		}
		*n = uint64(max(v, 0)) / 2
	}
	return send, receive, nil
}
