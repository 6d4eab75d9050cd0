package config

import (
	"net"
	"path/filepath"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/syslog"
	"github.com/sluice-hpc/sluice/internal/form"
)

// Collector is what audit.forward names; there is none if it is off.
func (a *Audit) Collector() (t syslog.Target, ok bool) {
	if a.Forward == "off" {
		return t, false
	}
	return parseCollector(a.Forward)
}

// parseCollector reads tcp://HOST:PORT, udp://HOST:PORT or a socket's path.
func parseCollector(s string) (syslog.Target, bool) {
	network, addr, found := strings.Cut(s, "://")
	if !found {
		return syslog.Target{Network: "unixgram", Addr: s}, filepath.IsAbs(s) && filepath.Clean(s) == s && s != "/" && len(s) <= sunPath
	}
	host, port, err := net.SplitHostPort(addr)
	return syslog.Target{Network: network, Addr: addr},
		(network == "tcp" || network == "udp") && err == nil && isPort(port) && (form.IsPlainName(host) || net.ParseIP(host) != nil)
}

// audit checks where the audit log's lines go.
func (p *parser) audit() {
	f := p.cfg.Audit.Forward
	if _, ok := parseCollector(f); !ok && f != "off" {
		p.fail("audit.forward", "%q is no collector; give one of tcp://HOST:PORT, udp://HOST:PORT, the path of a syslog socket such as /dev/log, or off", f)
	}
}
