package probe

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// unsent is how many bytes may wait in a socket without having been sent. With less a fast link would stand still now and then; with the
// whole buffer full, a slow one would need many seconds after the last byte was written.
const unsent = 1 << 20

// Conn is a connection of a probe.
type Conn struct {
	net.Conn
	tcp *os.File // the connection of TCP, which an encrypted one is only carried by; nil: none
	in  *bufio.Reader
	sys string // where the kernel shows network interfaces

	known  *lease.ProbeEnd // once it has been asked for: the interface
	smalls int             // messages that were not DATA of full size; counted at an owner
}

// small counts a message.
func (c *Conn) small(kind uint32) error {
	if c.smalls++; c.smalls > maxSmall {
		return fmt.Errorf("%w: more than %d small ones, the last of kind %d", errGarbage, maxSmall, kind)
	}
	return nil
}

// NewConn takes an admitted connection and, for what its kernel says of it, the connection of TCP that carries it. Both files are its
// own from then on, also with an error.
func NewConn(conn, tcp *os.File) (*Conn, error) {
	defer conn.Close()
	c, err := net.FileConn(conn)
	if err != nil {
		_ = tcp.Close()
		return nil, fmt.Errorf("probe: connection: %w", err)
	}
	p := &Conn{Conn: c, tcp: tcp, in: reader(c), sys: "/sys/class/net"}
	if raw, err := tcp.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsent) })
	}
	return p, nil
}

// Close closes both. A relay that carries the connection, and may wait for the other side, ends with it.
func (c *Conn) Close() error {
	err := c.Conn.Close()
	if c.tcp != nil {
		if raw, err := c.tcp.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
		}
		_ = c.tcp.Close()
	}
	return err
}

// state is what this end says.
func (c *Conn) state() (s state) {
	l, send, receive := c.link()
	s.sent, s.resent = l.Sent, l.Resent
	s.end.Segment, s.end.PathMTU, s.end.SendBuffer, s.end.ReceiveBuffer = l.Segment, l.PathMTU, send, receive
	if c.known == nil { // listing interfaces is not cheap, and the other side asks as often as it likes
		c.known = new(lease.ProbeEnd)
		if ip, ok := c.local(); ok {
			c.known.Device, c.known.DeviceMTU = device(ip)
			c.known.DeviceSpeed = speed(c.sys, c.known.Device)
		}
	}
	s.end.Device, s.end.DeviceMTU, s.end.DeviceSpeed = c.known.Device, c.known.DeviceMTU, c.known.DeviceSpeed
	return s
}

// local is this end's address.
func (c *Conn) local() (netip.Addr, bool) {
	if c.tcp == nil {
		return netip.Addr{}, false
	}
	raw, err := c.tcp.SyscallConn()
	if err != nil {
		return netip.Addr{}, false
	}
	var sa unix.Sockaddr
	_ = raw.Control(func(fd uintptr) { sa, _ = unix.Getsockname(int(fd)) })
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(a.Addr), true
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(a.Addr).Unmap(), true
	}
	return netip.Addr{}, false
}

// device is the network interface that has the address, "" for none.
func device(ip netip.Addr) (name string, mtu uint32) {
	all, err := net.Interfaces()
	if err != nil {
		return "", 0
	}
	for _, i := range all {
		addrs, err := i.Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap().WithZone("") == ip {
				return i.Name, uint32(i.MTU)
			}
		}
	}
	return "", 0
}

// speed is an interface's, in bits a second. The kernel says -1 or an error where it knows none (sysfs-class-net in the kernel's ABI).
func speed(sys, device string) uint64 {
	if device == "" {
		return 0
	}
	b, err := os.ReadFile(filepath.Join(sys, device, "speed"))
	if err != nil {
		return 0
	}
	mbit, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 32)
	if err != nil || mbit <= 0 {
		return 0
	}
	return uint64(mbit) * 1e6
}

// arrived is how many bytes the kernel has received, read or not; 0 where there is no TCP.
func (c *Conn) arrived() uint64 {
	l, _, _ := c.link()
	return l.Received
}

// receive reads DATA frames up to their END, and returns samples of how much had come when, and how much came in all. now is a clock that does
// not jump. take is called with the number of bytes of each frame, heads included, and its error is what receive returns; first is the size of a DATA frame whose head has been read, or -1.
func (c *Conn) receive(now func() int64, first int, take func(n int) error) (list []sample, count uint64, err error) {
	s := sampler{every: int64(sampleTime)}
	before := c.arrived()
	note := func(t int64, last bool) {
		if n := c.arrived(); n > 0 {
			s.add(t, n-before, last)
		} else {
			s.add(t, count, last)
		}
	}
	for ; ; first = -1 {
		size := uint32(first)
		if first < 0 {
			kind, n, err := next(c.in)
			switch {
			case err != nil:
				return nil, count, err
			case kind == kindEnd:
				note(now(), true)
				return settled(s.list), count, nil
			case kind != kindData:
				return nil, count, fmt.Errorf("%w: kind %d within DATA", errGarbage, kind)
			}
			size = n
		}
		if err := take(headSize + int(size)); err != nil {
			return nil, count, err
		}
		if _, err := c.in.Discard(int(size)); err != nil {
			return nil, count, err
		}
		count += headSize + uint64(size)
		if t := now(); s.due(t) {
			note(t, false)
		}
	}
}

// send writes DATA for that long, at most limit bytes, and END. It returns how many bytes of DATA.
func (c *Conn) send(buf []byte, d time.Duration, limit int64) (sent uint64, err error) {
	const one = headSize + dataSize
	for end := time.Now().Add(d); limit > 0 && time.Now().Before(end); {
		n := min(len(buf), one*int(max(min(limit, bufferSize)/one, 1))) // whole messages
		m, err := c.Write(buf[:n])
		sent += uint64(m)
		if err != nil {
			return sent, err
		}
		limit -= int64(n)
	}
	_, err = c.Write(message(kindEnd, nil))
	return sent, err
}
