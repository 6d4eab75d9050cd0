package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/identity/mungetest"
)

// outcome of a handshake, both sides.
type outcome struct {
	client, server error
	host, owner    string // as the other side saw them
}

// meet connects client to server and has it expect the name want.
func meet(t *testing.T, client, server *Identity, want string) outcome {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan outcome, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			done <- outcome{server: err}
			return
		}
		_ = c.SetDeadline(time.Now().Add(handshakeTime))
		conn, info, err := server.Server().ServerHandshake(c)
		o := outcome{server: err}
		if err == nil {
			o.host = info.(Info).NodeName()
			_, o.server = conn.Write([]byte("x"))
		}
		done <- o
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, info, err := client.Client(want).ClientHandshake(t.Context(), "", c)
	if err == nil {
		var b [1]byte
		if _, rerr := conn.Read(b[:]); rerr != nil {
			err = rerr
		}
		defer conn.Close()
	}
	o := <-done
	o.client = err
	if err == nil {
		o.owner = info.(Info).NodeName()
	}
	return o
}

func viaMunge(t *testing.T, node, socket string) *Identity {
	t.Helper()
	i, err := New(Config{Node: node, Auth: AuthMunge, MungeSocket: socket, MungeUID: uint32(os.Getuid())})
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func refused(t *testing.T, o outcome, who, what string) {
	t.Helper()
	err := o.client
	if who == "server" {
		err = o.server
	}
	if !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), what) {
		t.Errorf("%s: %v; want a refusal with %q", who, err, what)
	}
	if o.client == nil {
		t.Error("the client has a connection")
	}
}

func TestMunge(t *testing.T) {
	// Two daemons of munge with one key, as on two nodes.
	a, b, other := mungetest.Start(t, "one"), mungetest.Start(t, "one"), mungetest.Start(t, "two")
	host, owner := viaMunge(t, "node01", a), viaMunge(t, "gpu01", b)

	o := meet(t, host, owner, "gpu01")
	if o.client != nil || o.server != nil || o.host != "node01" || o.owner != "gpu01" {
		t.Fatalf("%+v", o)
	}

	refused(t, meet(t, host, owner, "gpu02"), "client", `is node "gpu01", not "gpu02"`)

	// Another cluster's key: the server cannot decode, and tells the client so.
	o = meet(t, viaMunge(t, "node01", other), owner, "gpu01")
	refused(t, o, "server", "Invalid credential")
	refused(t, o, "client", "munge credential refused by gpu01")

	// No munged at all.
	o = meet(t, viaMunge(t, "node01", filepath.Join(t.TempDir(), "none")), owner, "gpu01")
	if o.client == nil || !strings.Contains(o.client.Error(), "own credential") {
		t.Errorf("client: %v", o.client)
	}
	o = meet(t, host, viaMunge(t, "gpu01", filepath.Join(t.TempDir(), "none")), "gpu01")
	refused(t, o, "client", "refused by gpu01")

	// Daemons do not run as the user who made the credential.
	strict, err := New(Config{Node: "gpu01", Auth: AuthMunge, MungeSocket: b, MungeUID: 12345})
	if err != nil {
		t.Fatal(err)
	}
	o = meet(t, host, strict, "gpu01")
	refused(t, o, "server", "daemons run as uid 12345")
}

// rawClient handshakes by hand, so that the test can say what it likes.
func rawClient(t *testing.T, server *Identity, say func(st *tls.ConnectionState, self [32]byte) []byte) error {
	t.Helper()
	near, far := net.Pipe()
	defer near.Close()
	done := make(chan error, 1)
	go func() {
		_ = far.SetDeadline(time.Now().Add(handshakeTime))
		_, _, err := server.Server().ServerHandshake(far)
		done <- err
	}()
	me := viaMunge(t, "node01", "")
	m := me.now.Load()
	c := tls.Client(near, m.client)
	if err := c.Handshake(); err != nil {
		return <-done
	}
	st := c.ConnectionState()
	go func() {
		_ = writeFrame(c, frameCredential, say(&st, m.self))
		_, _, _ = readFrame(c) // lets the server write
	}()
	return <-done
}

func TestMungeBinding(t *testing.T) {
	socket := mungetest.Start(t, "one")
	owner := viaMunge(t, "gpu01", socket)
	m := owner.munge
	issue := func(st *tls.ConnectionState, self [32]byte, role string) []byte {
		b, err := m.issue(context.Background(), st, self, role, "node01")
		if err != nil {
			t.Error(err)
		}
		return b
	}
	var kept []byte
	good := func(st *tls.ConnectionState, self [32]byte) []byte {
		kept = issue(st, self, roleClient)
		return kept
	}
	if err := rawClient(t, owner, good); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, want string
		say        func(st *tls.ConnectionState, self [32]byte) []byte
	}{
		{"replayed", "Replayed credential", func(*tls.ConnectionState, [32]byte) []byte { return kept }},
		{"reflected role", "a server's credential", func(st *tls.ConnectionState, self [32]byte) []byte { return issue(st, self, roleServer) }},
		{"another certificate", "another certificate", func(st *tls.ConnectionState, self [32]byte) []byte {
			self[0]++
			return issue(st, self, roleClient)
		}},
		{"another connection", "another connection", func(_ *tls.ConnectionState, self [32]byte) []byte {
			b, err := m.run(context.Background(), payload(roleClient, "node01", self, make([]byte, 32)), m.encode)
			if err != nil {
				t.Error(err)
			}
			return []byte(strings.TrimSpace(string(b)))
		}},
		{"something else's", "for something else", func(*tls.ConnectionState, [32]byte) []byte {
			b, _ := m.run(context.Background(), []byte("slurm"), m.encode)
			return []byte(strings.TrimSpace(string(b)))
		}},
		{"rubbish", "no munge credential", func(*tls.ConnectionState, [32]byte) []byte { return []byte("hello; rm -rf /") }},
		{"empty", "no munge credential", func(*tls.ConnectionState, [32]byte) []byte { return nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := rawClient(t, owner, c.say); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v; want a refusal with %q", err, c.want)
			}
		})
	}
	// The one who got through before can do so again with a credential of now.
	if err := rawClient(t, owner, good); err != nil {
		t.Error(err)
	}
}

// site is a CA with a node's files.
type site struct{ dir string }

func newSite(t *testing.T) site {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := InitCA(filepath.Join(dir, "ca"), "test", time.Now()); err != nil {
		t.Fatal(err)
	}
	return site{dir}
}

func (s site) config(t *testing.T, node string, now time.Time) Config {
	t.Helper()
	cert, key, err := Issue(filepath.Join(s.dir, "ca"), node, filepath.Join(s.dir, "out"), now)
	if err != nil {
		t.Fatal(err)
	}
	return Config{Node: node, Auth: AuthTLS, CA: filepath.Join(s.dir, "ca", caCert), Cert: cert, Key: key}
}

func mustNew(t *testing.T, c Config) *Identity {
	t.Helper()
	i, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func TestCA(t *testing.T) {
	s := newSite(t)
	hostCfg := s.config(t, "node01", time.Now())
	host, owner := mustNew(t, hostCfg), mustNew(t, s.config(t, "gpu01", time.Now()))
	o := meet(t, host, owner, "gpu01")
	if o.client != nil || o.server != nil || o.host != "node01" || o.owner != "gpu01" {
		t.Fatalf("%+v", o)
	}
	refused(t, meet(t, host, owner, "gpu02"), "client", "gpu02")

	stranger := mustNew(t, newSite(t).config(t, "node01", time.Now()))
	refused(t, meet(t, stranger, owner, "gpu01"), "client", "unknown authority")
	// A client that trusts anybody is refused by the server itself.
	stranger.now.Load().client.InsecureSkipVerify = true
	o = meet(t, stranger, owner, "gpu01")
	refused(t, o, "server", "unknown authority")

	// munge on one side, a CA on the other.
	o = meet(t, viaMunge(t, "node01", ""), owner, "gpu01")
	refused(t, o, "server", "TLS")
	o = meet(t, host, viaMunge(t, "gpu01", ""), "gpu01")
	refused(t, o, "client", "auth must be the same")

	// Renewed: the files are replaced and read again.
	for _, f := range []string{hostCfg.Cert, hostCfg.Key} {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	s.config(t, "node01", time.Now())
	if err := host.Reload(); err != nil {
		t.Fatal(err)
	}
	if o = meet(t, host, owner, "gpu01"); o.client != nil {
		t.Error(o.client)
	}
}

func TestExpired(t *testing.T) {
	s := newSite(t)
	old := time.Now().Add(-3 * NodeLife)
	cfg := s.config(t, "node01", old)
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("an expired certificate is loaded: %v", err)
	}
	// Loaded when it was good: the other side must notice.
	host := mustNew(t, s.config(t, "node02", time.Now()))
	pair, err := tls.LoadX509KeyPair(cfg.Cert, cfg.Key)
	if err != nil {
		t.Fatal(err)
	}
	m := host.now.Load()
	m.client.Certificates, m.server.Certificates = []tls.Certificate{pair}, []tls.Certificate{pair}
	owner := mustNew(t, s.config(t, "gpu01", time.Now()))
	refused(t, meet(t, host, owner, "gpu01"), "server", "expired")
	refused(t, meet(t, owner, host, "node01"), "client", "expired")
}

func TestTLS12(t *testing.T) {
	s := newSite(t)
	for _, server := range []*Identity{mustNew(t, s.config(t, "gpu01", time.Now())), viaMunge(t, "gpu01", "")} {
		near, far := net.Pipe()
		done := make(chan error, 1)
		go func() {
			_ = far.SetDeadline(time.Now().Add(handshakeTime))
			_, _, err := server.Server().ServerHandshake(far)
			done <- err
		}()
		cfg := viaMunge(t, "node01", "").now.Load().client.Clone()
		cfg.MinVersion, cfg.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
		if err := tls.Client(near, cfg).Handshake(); err == nil {
			t.Error("TLS 1.2 is taken")
		}
		if err := <-done; !errors.Is(err, ErrRefused) {
			t.Error(err)
		}
		_ = near.Close()
	}
}

func TestUnsafeFiles(t *testing.T) {
	s := newSite(t)
	cfg := s.config(t, "node01", time.Now())
	for _, c := range []struct {
		path string
		mode os.FileMode
		key  string
	}{{cfg.Key, 0o640, "tls.key"}, {cfg.Cert, 0o666, "tls.cert"}, {cfg.CA, 0o622, "tls.ca"}} {
		fi, err := os.Stat(c.path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(c.path, c.mode); err != nil {
			t.Fatal(err)
		}
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), c.key) || !strings.Contains(err.Error(), "chmod") {
			t.Errorf("%s with mode %o: %v", c.key, c.mode, err)
		}
		if err := os.Chmod(c.path, fi.Mode()); err != nil {
			t.Fatal(err)
		}
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(cfg.Key, 1234, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "belongs to uid 1234") {
			t.Errorf("a key of another user: %v", err)
		}
		_ = os.Chown(cfg.Key, 0, 0)
	}
	other := cfg
	other.Node = "node02"
	if _, err := New(other); err == nil || !strings.Contains(err.Error(), `certificate of "node01"`) {
		t.Errorf("another node's certificate: %v", err)
	}
	// Neither the CA nor a node's files are replaced.
	if err := InitCA(filepath.Join(s.dir, "ca"), "again", time.Now()); !errors.Is(err, os.ErrExist) {
		t.Error(err)
	}
	if _, _, err := Issue(filepath.Join(s.dir, "ca"), "node01", filepath.Join(s.dir, "out"), time.Now()); !errors.Is(err, os.ErrExist) {
		t.Error(err)
	}
	if err := os.Chmod(filepath.Join(s.dir, "ca", caKey), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, _, err := Issue(filepath.Join(s.dir, "ca"), "node09", filepath.Join(s.dir, "out"), time.Now()); err == nil {
		t.Error("a CA whose key everybody can read signs")
	}
}

// A certificate that names no node, or one with an odd name, is nobody's.
func TestNodeName(t *testing.T) {
	for _, s := range []string{"", ".", "-a", "a/b", "a b", "a\nb", "ä", strings.Repeat("a", 254)} {
		if CheckNode(s) == nil {
			t.Errorf("%q passes", s)
		}
	}
	for _, s := range []string{"gpu01", "gpu01.cluster.example", "GPU_1-2"} {
		if err := CheckNode(s); err != nil {
			t.Error(err)
		}
	}
	s := newSite(t)
	ca, signer, err := loadCA(filepath.Join(s.dir, "ca"))
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := newKey()
	if err != nil {
		t.Fatal(err)
	}
	tpl := nodeTemplate("node01", big.NewInt(7), time.Now(), time.Hour)
	tpl.DNSNames = nil
	der, err := x509.CreateCertificate(rand.Reader, tpl, ca, key.Public(), signer.(*ecdsa.PrivateKey))
	if err != nil {
		t.Fatal(err)
	}
	host := mustNew(t, s.config(t, "node01", time.Now()))
	host.now.Load().client.Certificates = []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}
	owner := mustNew(t, s.config(t, "gpu01", time.Now()))
	o := meet(t, host, owner, "gpu01")
	refused(t, o, "server", "no DNS name")
	refused(t, o, "client", "no DNS name")
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{}, {Node: "a", Auth: "none"}, {Node: "a b", Auth: AuthMunge}, {Node: "a", Auth: AuthTLS}} {
		if _, err := New(c); !errors.Is(err, ErrConfig) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
