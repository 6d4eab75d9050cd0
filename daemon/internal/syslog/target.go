package syslog

import (
	"fmt"
	"time"
)

// Target is where a collector listens.
type Target struct {
	Network string // tcp, udp, or unixgram for a socket of this machine
	Addr    string // HOST:PORT or a path
}

// String is the target as the configuration names it.
func (t Target) String() string {
	if t.Network == "unixgram" {
		return t.Addr
	}
	return t.Network + "://" + t.Addr
}

// Severity of a message, RFC 5424, section 6.2.1.
type Severity int

// Severities.
const (
	Notice Severity = 5
	Info   Severity = 6
)

// authpriv is the facility: distributions write it to a file that only root reads.
const authpriv = 10

// app is the name under which messages are sent.
const app = "sluiced"

// Message is one message for the collector.
type Message struct {
	Time     time.Time
	ID       string // what kind of message it is: printable ASCII without spaces, at most 32 bytes
	Severity Severity
	Text     []byte // UTF-8, one line without its end
	// Fill is the percentage of the queue up to which messages of this kind may fill it.
	Fill int
}

// frame returns m as it is sent: RFC 5424 over the network, with a byte count over TCP (RFC 6587, section 3.4.1). A local socket gets
// the format of syslog(3), because journald does not read RFC 5424 there, and rsyslog does only if it is configured to.
func (t Target) frame(m *Message, host string, pid int) []byte {
	pri := authpriv<<3 | int(m.Severity)
	if t.Network == "unixgram" {
		return fmt.Appendf(nil, "<%d>%s %s[%d]: %s", pri, m.Time.Local().Format(time.Stamp), app, pid, m.Text)
	}
	b := fmt.Appendf(nil, "<%d>1 %s %s %s %d %s - %s", pri, m.Time.UTC().Format("2006-01-02T15:04:05.000000Z"), host, app, pid, m.ID, m.Text)
	if t.Network == "tcp" {
		b = fmt.Appendf(nil, "%d %s", len(b), b)
	}
	return b
}
