package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"syscall"

	"google.golang.org/grpc/credentials"

	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/internal/unixsock"
)

// ListenLocal makes the local socket. Every user may connect, because the kernel identifies the
// caller. The socket of an earlier daemon is replaced, one with a daemon that answers is not.
// One that is removed is made again, which log says. Each user has a bounded number of connections.
func ListenLocal(path string, log *slog.Logger) (net.Listener, error) {
	// The file stays when the daemon stops: the next daemon replaces it.
	l, err := unixsock.Keep(path, unixsock.How{Mode: 0o666, Alone: true}, SocketRemoved(path, log))
	switch {
	case errors.Is(err, unixsock.ErrNoSocket):
		return nil, fmt.Errorf("local socket %s: %w; remove it or set run_dir", path, err)
	case errors.Is(err, unixsock.ErrInUse):
		return nil, fmt.Errorf("local socket %s: another sluiced answers there; stop it first", path)
	case err != nil:
		return nil, fmt.Errorf("local socket: %w", err)
	}
	return &localListener{
		Listener: l,
		root:     limit.New(limit.Bounds{TrustedKey: 1024}),
		users:    limit.New(limit.Bounds{Trusted: 1024, TrustedKey: 64}),
	}, nil
}

// SocketRemoved logs for unixsock.Keep what became of a socket of the daemon's whose path was removed.
func SocketRemoved(path string, log *slog.Logger) func(error) {
	return func(err error) {
		if err != nil {
			log.Error("a socket was removed and cannot be made again: nobody can connect to it", "path", path, "error", err)
			return
		}
		log.Warn("a socket was removed by somebody, and is there again", "path", path)
	}
}

// localListener counts connections by user. Root has places of its own: a user with many uids,
// such as a subordinate range, fills only the others.
type localListener struct {
	net.Listener
	root, users *limit.Table
}

func (l *localListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	p, err := peerOf(c)
	switch {
	case err != nil:
		return l.users.Add(c, "?"), nil // LocalCreds refuses it
	case p.UID == 0:
		return l.root.Add(c, "0"), nil
	}
	return l.users.Add(c, strconv.FormatUint(uint64(p.UID), 10)), nil
}

// peerOf returns the process that made the connection.
func peerOf(c net.Conn) (Peer, error) {
	if l, ok := c.(*limit.Conn); ok {
		c = l.Conn
	}
	sc, ok := c.(syscall.Conn)
	if !ok {
		return Peer{}, errors.New("not a socket")
	}
	p, err := unixsock.PeerOf(sc)
	return Peer{UID: p.UID, GID: p.GID, PID: p.PID}, err
}

// LocalCreds are the credentials of a server on the local socket.
func LocalCreds() credentials.TransportCredentials { return unixCreds{} }

type unixCreds struct{}

type unixInfo struct {
	credentials.CommonAuthInfo
	peer Peer
}

func (unixInfo) AuthType() string { return "unix" }

func (unixCreds) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	p, err := peerOf(c)
	if err != nil {
		return nil, nil, fmt.Errorf("local socket: caller: %w", err)
	}
	if l, ok := c.(*limit.Conn); ok && !l.Trust(strconv.FormatUint(uint64(p.UID), 10)) {
		return nil, nil, fmt.Errorf("local socket: uid %d has too many connections", p.UID)
	}
	return c, unixInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, p}, nil
}

func (unixCreds) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("local socket: credentials of a server")
}

func (unixCreds) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}
func (c unixCreds) Clone() credentials.TransportCredentials { return c }
func (unixCreds) OverrideServerName(string) error           { return nil }
