package node

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/data"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/probe"
)

// The test's own program is the relay of encrypted connections, as sluiced is.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "relay" {
		if err := data.RelayMain(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// probed is an owner as a node calls it.
type probed struct {
	*probe.Admission
	server *data.Server
	short  uint32 // so many connections are taken for one too many
}

func (p *probed) Probe(ctx context.Context, host string, r lease.ProbeRequest) ([]lease.Offer, error) {
	p.Admission = probe.NewAdmission("gpu01", slog.New(slog.DiscardHandler)) // no pause after the last one
	request := r
	request.Connections -= p.short
	if r.Encrypt {
		request.CertHashes = r.CertHashes[:request.Connections]
	}
	slot, err := p.Begin(context.WithoutCancel(ctx), host, request)
	if err != nil {
		return nil, err
	}
	return p.server.OfferProbe(r, slot.Take)
}

// A probe's connections are encrypted if the configuration says so, which a reload may change. Where one of them does not come, none is left.
func TestDialProbe(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := &probed{server: data.NewServer(data.Config{Addr: l.Addr().String()})}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	served := make(chan error, 1)
	go func() { served <- o.server.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-served)
	})
	n := &Node{log: slog.New(slog.DiscardHandler)}
	for _, encrypt := range []bool{false, true} {
		c := testConfig(t.TempDir())
		c.Encrypt = encrypt
		n.cfg.Store(c)
		o.short = 0
		r := lease.ProbeRequest{Connections: probe.Connections}
		conns, encrypted, err := n.dialProbe(ctx, o, l.Addr().String(), "node01", r)
		if err != nil || encrypted != encrypt || len(conns) != probe.Connections {
			t.Fatalf("encrypt %v: %d connections, encrypted %v, %v", encrypt, len(conns), encrypted, err)
		}
		for _, c := range conns {
			_ = c.Close()
		}
		o.short = 1
		if conns, _, err = n.dialProbe(ctx, o, l.Addr().String(), "node01", r); !errors.Is(err, data.ErrRefused) || !strings.Contains(err.Error(), "the probe is over") || conns != nil {
			t.Errorf("encrypt %v: %d connections, %v", encrypt, len(conns), err)
		}
	}
}
