package data

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/process"
)

// A relay is the process between a session and the network when data is
// encrypted: one at each end, so that a daemon that stops cuts no session. It is
// this program again, run as the lease's user and with nothing but two sockets:
//
//	shim --socket pair-- relay ==TLS 1.3== relay --socket pair-- worker
//
// Each end has a key made for this connection alone, whose hash the other end was
// told over gRPC. The relay pumps both directions until one ends, passes the end
// on, gives the other direction lingerTime to say its last, and exits.

// Descriptors of a relay. Its configuration comes by stdin, its one word (readyWord
// or an error) goes by stdout.
const (
	relayNetwork = 3
	relaySession = 4

	readyWord    = "ready"
	relayTime    = 10 * time.Second // for TLS
	lingerTime   = 5 * time.Second
	relayBuffer  = 256 << 10 // bytes, each direction
	maxRelayConf = 64 << 10
	nobody       = 65534
)

// Relay says how a relay is started. The zero value runs this program with the
// argument "relay".
type Relay struct {
	Command []string
}

type relayConfig struct {
	Server bool   `json:"server"`
	Peer   []byte `json:"peer"` // SHA-256 of the other end's certificate
	Cert   []byte `json:"cert"` // DER
	Key    []byte `json:"key"`  // PKCS 8
}

// newKey makes a certificate for one connection, and its hash.
func newKey() (tls.Certificate, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, fmt.Errorf("make a key: %w", err)
	}
	now := time.Now()
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "session"},
		NotBefore: now.Add(-24 * time.Hour), NotAfter: now.Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, nil, fmt.Errorf("make a certificate: %w", err)
	}
	sum := sha256.Sum256(der)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, sum[:], nil
}

// relayed is a relay that was started.
type relayed struct {
	ready <-chan error    // has one value: nil when both relays know each other, or why not
	over  <-chan struct{} // closed when the process is no more
}

// start runs a relay between network and session, which stay the caller's to
// close. A daemon that ends meanwhile leaves the relay to itself.
func (r Relay) start(cfg relayConfig, key tls.Certificate, uid uint32, network, session *os.File, log *slog.Logger) (*relayed, error) {
	cfg.Cert = key.Certificate[0]
	var err error
	if cfg.Key, err = x509.MarshalPKCS8PrivateKey(key.PrivateKey); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	conf, err := json.Marshal(cfg)
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	command := r.Command
	if len(command) == 0 {
		// This very program, even if a package has replaced its file meanwhile,
		// and wherever it lies: another version's relay may speak otherwise.
		command = []string{"/proc/self/exe", "relay"}
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = []string{"GOMAXPROCS=2", "GOMEMLIMIT=32MiB"}
	cmd.Dir = "/"
	cmd.Stdin = bytes.NewReader(conf)
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{network, session}
	// A session of its own: signals to the daemon's group are not for it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() == 0 {
		if uid == 0 {
			uid = nobody
		}
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: nobody}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("relay: %w", err)
	}
	ready, over := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(over)
		word, rerr := io.ReadAll(io.LimitReader(out, 512))
		switch {
		case string(word) == readyWord:
			ready <- nil
		case len(word) > 0:
			ready <- fmt.Errorf("%w: encryption: %s", ErrRefused, form.Printable(string(word)))
		default:
			ready <- fmt.Errorf("relay: it ended without a word: %w", errors.Join(rerr, io.ErrUnexpectedEOF))
		}
		if err := cmd.Wait(); err != nil {
			log.Debug("relay ended", "pid", cmd.Process.Pid, "error", err)
		}
	}()
	return &relayed{ready, over}, nil
}

// RelayMain is the program of a relay: configuration on stdin, the network on
// descriptor 3, the session on 4. It returns when the connection is over.
func RelayMain() error {
	_ = process.SetOOMScore(process.OOMSession) // it is of one session
	// Nothing here needs another program, or another's eyes. Threads made from
	// now on inherit the first; the second is the process's.
	_ = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	// The daemon that reads our stdout and stderr may end before we do.
	signal.Ignore(syscall.SIGPIPE, syscall.SIGHUP)
	err := relay(os.Stdin, os.Stdout, relayNetwork, relaySession)
	if err != nil && !errors.Is(err, errPump) {
		_, _ = io.WriteString(os.Stdout, err.Error()) // who started us may be gone
	}
	return err
}

// errPump is of a connection that was ready and broke later.
var errPump = errors.New("relay")

func relay(in io.Reader, out io.WriteCloser, network, session int) error {
	raw, err := connOf(network)
	if err != nil {
		return err
	}
	defer raw.Close()
	pair, err := connOf(session)
	if err != nil {
		return err
	}
	defer pair.Close()
	var cfg relayConfig
	if err := json.NewDecoder(io.LimitReader(in, maxRelayConf)).Decode(&cfg); err != nil {
		return fmt.Errorf("relay: configuration: %w", err)
	}
	c, err := secure(raw, cfg)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(out, readyWord); err != nil && !errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("%w: %w", errPump, err)
	}
	_ = out.Close() // the reader waits for the end of it
	return pump(c, pair)
}

func connOf(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "socket")
	if f == nil {
		return nil, fmt.Errorf("relay: no descriptor %d; sluiced starts relays by itself", fd)
	}
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("relay: descriptor %d: %w; sluiced starts relays by itself", fd, err)
	}
	return c, nil
}

// secure is TLS 1.3 with exactly the certificate that was announced.
func secure(raw net.Conn, cfg relayConfig) (*tls.Conn, error) {
	key, err := x509.ParsePKCS8PrivateKey(cfg.Key)
	if err != nil {
		return nil, fmt.Errorf("relay: key: %w", err)
	}
	t := &tls.Config{
		MinVersion:             tls.VersionTLS13,
		Certificates:           []tls.Certificate{{Certificate: [][]byte{cfg.Cert}, PrivateKey: key}},
		ClientAuth:             tls.RequireAnyClientCert,
		InsecureSkipVerify:     true, // VerifyConnection is stricter
		SessionTicketsDisabled: true,
		// The first bytes of a session are as urgent as any.
		DynamicRecordSizingDisabled: true,
		VerifyConnection: func(st tls.ConnectionState) error {
			if len(st.PeerCertificates) > 0 {
				got := sha256.Sum256(st.PeerCertificates[0].Raw)
				if subtle.ConstantTimeCompare(got[:], cfg.Peer) == 1 {
					return nil
				}
			}
			return errors.New("the other end has another certificate than was announced")
		},
	}
	c := tls.Client(raw, t)
	if cfg.Server {
		c = tls.Server(raw, t)
	}
	ctx, cancel := context.WithTimeout(context.Background(), relayTime)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, fmt.Errorf("TLS: %w", err)
	}
	return c, nil
}

type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// pump moves bytes both ways until one direction ends, then lets the other finish
// for lingerTime.
func pump(a, b net.Conn) error {
	over, ends := make(chan error, 2), make(chan struct{}, 2)
	move := func(dst, src net.Conn) {
		_, err := io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, relayBuffer))
		if h, ok := dst.(halfCloser); ok {
			_ = h.CloseWrite() // the other side may have left altogether
		}
		over <- err
		if err != nil {
			// A side that reads no more may have said why. What still comes for it is
			// dropped: a socket closed over unread bytes loses those it sent.
			_, _ = io.Copy(io.Discard, src)
		}
		ends <- struct{}{}
	}
	end := func() { _, _ = a.Close(), b.Close() }
	defer end()
	go move(a, b)
	go move(b, a)
	err := <-over
	if err == nil || gone(err) {
		t := time.AfterFunc(lingerTime, end)
		defer t.Stop()
		if other := <-over; err == nil || !gone(other) {
			err = other
		}
		<-ends
		<-ends
	}
	if err != nil && !gone(err) {
		return fmt.Errorf("%w: %w", errPump, err)
	}
	return nil
}

// gone says that err is only the other side's leaving.
func gone(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF)
}
