// Package identity proves to daemons of other nodes who this one is, and the other
// way round: by munge, which every Slurm cluster has, or by certificates of a
// site's own CA. It makes the credentials of gRPC connections over TLS 1.3.
//
// A connection is made in this order, on both sides by the goroutine that
// handshakes; there is no shared state but the material, which is replaced whole:
//
//	client                               server
//	  1  TLS 1.3, certificates of both
//	  2  CREDENTIAL (munge only)  ->
//	                                     3  looks at it; REFUSED with the reason, and the end
//	  5  looks at it              <-     4  CREDENTIAL, or with a CA just WELCOME
//	  6  gRPC
//
// The client speaks first. So a stranger can make a server verify a credential, but
// never issue one.
package identity

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
)

// Sentinels for what a caller decides on.
var (
	// ErrRefused says that the other side is not who it should be, or thinks
	// so of us.
	ErrRefused = errors.New("identity refused")
	// ErrConfig says that this node has no identity to show.
	ErrConfig = errors.New("identity")
)

// Kinds of Config.Auth.
const (
	AuthMunge = "munge"
	AuthTLS   = "tls"
)

// Config says how this node shows who it is.
type Config struct {
	Node string // this node's name
	Auth string // AuthMunge or AuthTLS

	MungeSocket string // "" munge's own default
	MungeUID    uint32 // who daemons run as, on every node

	CA, Cert, Key string // files in PEM, for AuthTLS

	// Refused, if set, is told of connections that a server refused, of a
	// flood some in a second. It must not block.
	Refused func(remote net.Addr, node, reason string)
}

// Identity is this node's. Its methods may be used by many goroutines.
type Identity struct {
	cfg     Config
	now     atomic.Pointer[material]
	munge   *munge
	reports limit.Reports
}

// material is what changes when certificates are renewed.
type material struct {
	server, client *tls.Config
	self           [sha256.Size]byte // of the own certificate
	expires        time.Time         // the end of the site's certificate or its CA's, whichever is first; zero with munge
}

// New loads or makes what this node shows. A key that somebody else could have
// read or written is refused by name.
func New(cfg Config) (*Identity, error) {
	if err := CheckNode(cfg.Node); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	i := &Identity{cfg: cfg}
	switch cfg.Auth {
	case AuthMunge:
		m, err := newMunge(cfg.MungeSocket, cfg.MungeUID)
		if err != nil {
			return nil, err
		}
		i.munge = m
	case AuthTLS:
	default:
		return nil, fmt.Errorf("%w: auth %q: it is munge or tls", ErrConfig, cfg.Auth)
	}
	return i, i.Reload()
}

// Reload reads the certificates again; connections that are open stay. With munge
// the key is made anew: it lives in memory only, since the credential of each
// connection vouches for it.
func (i *Identity) Reload() error {
	m, err := i.load()
	if err != nil {
		return err
	}
	i.now.Store(m)
	return nil
}

// Expires is when the certificate that this node shows ends, or its CA's if that is earlier. With munge there is none.
func (i *Identity) Expires() (end time.Time, ok bool) {
	end = i.now.Load().expires
	return end, !end.IsZero()
}

func (i *Identity) load() (*material, error) {
	base := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		SessionTicketsDisabled: true, // each connection shows everything anew
		NextProtos:             []string{"h2"},
	}
	m := &material{}
	if i.cfg.Auth == AuthMunge {
		cert, err := selfSigned(i.cfg.Node, time.Now())
		if err != nil {
			return nil, err
		}
		base.Certificates = []tls.Certificate{cert}
		m.server, m.client = base, base.Clone()
		m.server.ClientAuth = tls.RequireAnyClientCert
		// Nobody has signed the certificate. The munge credential does, with
		// its hash and the channel's own secret inside.
		m.client.InsecureSkipVerify = true
	} else {
		cert, pool, end, err := loadFiles(i.cfg)
		if err != nil {
			return nil, err
		}
		m.expires = end
		base.Certificates = []tls.Certificate{cert}
		m.server, m.client = base, base.Clone()
		m.server.ClientAuth, m.server.ClientCAs = tls.RequireAndVerifyClientCert, pool
		m.client.RootCAs = pool
	}
	m.self = sha256.Sum256(base.Certificates[0].Certificate[0])
	return m, nil
}

// Info is the AuthInfo of a connection whose other side has shown who it is.
type Info struct {
	credentials.CommonAuthInfo
	Node string // of the other side
	Auth string
}

// AuthType implements credentials.AuthInfo.
func (i Info) AuthType() string { return "sluice-" + i.Auth }

// NodeName is the verified name of the other side.
func (i Info) NodeName() string { return i.Node }

// CheckNode refuses what is not a node name: letters, digits, dots, hyphens and
// underscores, at most 253 of them.
func CheckNode(s string) error {
	ok := len(s) > 0 && len(s) <= 253 && s[0] != '.' && s[0] != '-'
	for _, c := range []byte(s) {
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '-' || c == '_')
	}
	if !ok {
		return fmt.Errorf("%q is not a node name: letters, digits, dots, hyphens and underscores, at most 253", s)
	}
	return nil
}

// Server is what a server asks of those who connect.
func (i *Identity) Server() credentials.TransportCredentials { return &creds{i: i} }

// Client is what a client asks of the server it connects to: to be that node.
func (i *Identity) Client(node string) credentials.TransportCredentials {
	return &creds{i: i, want: node}
}

type creds struct {
	i    *Identity
	want string // of a client: the other side's name
}

func (c *creds) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}
func (c *creds) Clone() credentials.TransportCredentials { d := *c; return &d }
func (c *creds) OverrideServerName(string) error         { return nil }

// ServerHandshake implements credentials.TransportCredentials. The caller sets
// the connection's deadline.
func (c *creds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTime)
	defer cancel()
	in := &listening{Conn: raw}
	node, conn, err := c.i.serve(ctx, in)
	if err == nil {
		// Where connections are counted, this one is no stranger's from now on.
		if t, ok := raw.(interface{ Trust(name string) bool }); ok && !t.Trust(node) {
			err = fmt.Errorf("%w: too many connections of that node", ErrRefused)
		}
	}
	if err != nil {
		if f := c.i.cfg.Refused; f != nil && !in.spare(err) {
			if skipped, ok := c.i.reports.Pass(); ok {
				reason := err.Error()
				if skipped > 0 {
					reason = fmt.Sprintf("%s (and %d others before, not reported)", reason, skipped)
				}
				f(raw.RemoteAddr(), node, reason)
			}
		}
		_ = raw.Close()
		return nil, nil, err
	}
	return conn, c.i.info(node), nil
}

// listening is a connection that knows whether the other side has sent anything.
type listening struct {
	net.Conn
	heard bool
}

func (l *listening) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	l.heard = l.heard || n > 0
	return n, err
}

// spare reports whether the other side has closed the connection without a word. A daemon does so with the attempts that it
// makes beside the first after a cut (package rpc): nobody was refused.
func (l *listening) spare(err error) bool {
	return !l.heard && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET))
}

func (i *Identity) info(node string) Info {
	return Info{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, node, i.cfg.Auth}
}

// serve answers the name that the other side has shown, or, with an error, the
// one it claimed.
func (i *Identity) serve(ctx context.Context, raw net.Conn) (string, net.Conn, error) {
	m := i.now.Load()
	conn := tls.Server(raw, m.server)
	if err := conn.HandshakeContext(ctx); err != nil {
		return "", nil, fmt.Errorf("%w: TLS: %w", ErrRefused, err)
	}
	st := conn.ConnectionState()
	if i.cfg.Auth == AuthTLS {
		node, err := nodeOf(st.PeerCertificates)
		if err != nil {
			_ = writeFrame(conn, frameRefused, []byte(err.Error())) // it is refused either way
			return node, nil, fmt.Errorf("%w: %w", ErrRefused, err)
		}
		if err := writeFrame(conn, frameWelcome, nil); err != nil {
			return node, nil, err
		}
		return node, conn, nil
	}
	cred, err := readCredential(conn)
	if err != nil {
		return "", nil, err
	}
	node, err := i.munge.look(ctx, cred, &st, roleClient)
	if err != nil {
		// The log here has the details; a stranger learns that it was heard.
		_ = writeFrame(conn, frameRefused, []byte("munge credential refused by "+i.cfg.Node+"; see the log of its sluiced"))
		return node, nil, err
	}
	own, err := i.munge.issue(ctx, &st, m.self, roleServer, i.cfg.Node)
	if err != nil {
		_ = writeFrame(conn, frameRefused, []byte("munge does not work on "+i.cfg.Node+"; see the log of its sluiced"))
		return node, nil, err
	}
	return node, conn, writeFrame(conn, frameCredential, own)
}

// ClientHandshake implements credentials.TransportCredentials.
func (c *creds) ClientHandshake(ctx context.Context, _ string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	if t, ok := ctx.Deadline(); ok {
		_ = raw.SetDeadline(t)
	}
	stop := context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })
	conn, err := c.i.dial(ctx, raw, c.want)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = raw.Close()
		return nil, nil, err
	}
	_ = raw.SetDeadline(time.Time{})
	return conn, c.i.info(c.want), nil
}

func (i *Identity) dial(ctx context.Context, raw net.Conn, want string) (net.Conn, error) {
	m := i.now.Load()
	cfg := m.client
	if i.cfg.Auth == AuthTLS {
		cfg = cfg.Clone()
		cfg.ServerName = want
	}
	conn := tls.Client(raw, cfg)
	if err := conn.HandshakeContext(ctx); err != nil {
		if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("identity: %s: %w: its daemon has just ended, or is starting", want, err)
		}
		return nil, fmt.Errorf("%w: TLS with %s: %w; auth must be the same on both nodes", ErrRefused, want, err)
	}
	st := conn.ConnectionState()
	if i.cfg.Auth == AuthTLS {
		kind, _, err := readAnswer(conn, want)
		if err == nil && kind != frameWelcome {
			err = fmt.Errorf("%w: %s answers with frame %d; auth must be the same on both nodes", ErrRefused, want, kind)
		}
		return conn, err
	}
	own, err := i.munge.issue(ctx, &st, m.self, roleClient, i.cfg.Node)
	if err != nil {
		return nil, err
	}
	if err := writeFrame(conn, frameCredential, own); err != nil {
		return nil, fmt.Errorf("identity: %s: %w", want, err)
	}
	kind, cred, err := readAnswer(conn, want)
	if err != nil {
		return nil, err
	}
	if kind != frameCredential {
		return nil, fmt.Errorf("%w: %s answers with frame %d; auth must be the same on both nodes", ErrRefused, want, kind)
	}
	node, err := i.munge.look(ctx, cred, &st, roleServer)
	if err != nil {
		return nil, err
	}
	if node != want {
		return nil, fmt.Errorf("%w: %s is node %q, not %q; see pools in sluice.yaml", ErrRefused, raw.RemoteAddr(), node, want)
	}
	return conn, nil
}
