package data

import (
	"context"
	"crypto/tls"
	"os"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
)

// Connections of a probe, which measures the link. They are opened, authenticated and encrypted as those of sessions are, and then given to
// package probe instead of to a worker.

// taker is given the connections of a probe at the owner, as Connection has them. Both files are its own. It returns at once, and free is
// called when no relay carries the connection any more.
type taker = func(conn, tcp *os.File) (free func(), err error)

type filer interface{ File() (*os.File, error) }

// taken passes conn to a probe with the connection of TCP that carries it.
func taken(t taker, conn *os.File, socket filer) (free func(), err error) {
	tcp, err := socket.File()
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return t(conn, tcp)
}

// OfferProbe makes the tickets of a probe. The caller has decided that host may probe, and has checked the request.
func (s *Server) OfferProbe(r lease.ProbeRequest, take func(conn, tcp *os.File) (free func(), err error)) ([]lease.Offer, error) {
	offers := make([]lease.Offer, r.Connections)
	for i := range offers {
		q := lease.SessionRequest{UID: r.UID, Encrypt: r.Encrypt}
		if r.Encrypt {
			q.CertHash = r.CertHashes[i]
		}
		var err error
		if offers[i], err = s.offer(q, take); err != nil {
			return nil, err
		}
	}
	return offers, nil
}

// Probe asks owner for a probe and opens its connections, as Open does one of a session.
func (d *Dialer) Probe(ctx context.Context, owner lease.Prober, addr, host string, r lease.ProbeRequest) (conns []Connection, err error) {
	defer func() {
		if err != nil {
			for _, c := range conns {
				_, _ = c.Conn.Close(), c.TCP.Close()
			}
			conns = nil
		}
	}()
	keys := make([]tls.Certificate, r.Connections)
	r.Encrypt, r.CertHashes = d.Encrypt, nil
	for i := range keys {
		if !d.Encrypt {
			break
		}
		var hash []byte
		if keys[i], hash, err = newKey(); err != nil {
			return nil, err
		}
		r.CertHashes = append(r.CertHashes, hash)
	}
	offers, err := owner.Probe(ctx, host, r)
	if err != nil {
		return nil, err
	}
	if len(offers) != len(keys) {
		return nil, lease.Errorf(lease.Internal, "a probe of %d connections was offered %d", len(keys), len(offers))
	}
	for i, o := range offers {
		c, err := d.dial(ctx, addr, o, keys[i], r.UID)
		if err != nil {
			return conns, err
		}
		conns = append(conns, c)
	}
	return conns, nil
}
