package identity

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Files of a CA's directory.
const (
	caCert = "ca.pem"
	caKey  = "ca.key"
)

// Life times of what InitCA and Issue make.
const (
	CALife   = 10 * 365 * 24 * time.Hour
	NodeLife = 2 * 365 * 24 * time.Hour
)

// clockSkew is how far a node's clock may be behind when it sees a new certificate.
const clockSkew = 10 * time.Minute

func newKey() (*ecdsa.PrivateKey, *big.Int, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("identity: make a key: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, nil, fmt.Errorf("identity: make a serial number: %w", err)
	}
	return key, serial, nil
}

func nodeTemplate(node string, serial *big.Int, now time.Time, life time.Duration) *x509.Certificate {
	var ips []net.IP
	if ip := net.ParseIP(node); ip != nil {
		ips = []net.IP{ip} // where a name looks like an address, only these are compared
	}
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: node},
		DNSNames:     []string{node},
		IPAddresses:  ips,
		NotBefore:    now.Add(-clockSkew),
		NotAfter:     now.Add(life),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
}

// selfSigned makes a key and a certificate that live in memory only.
func selfSigned(node string, now time.Time) (tls.Certificate, error) {
	key, serial, err := newKey()
	if err != nil {
		return tls.Certificate{}, err
	}
	t := nodeTemplate(node, serial, now, NodeLife)
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("identity: make a certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// nodeOf is the node that a verified certificate names: its first DNS name.
func nodeOf(chain []*x509.Certificate) (string, error) {
	if len(chain) == 0 || len(chain[0].DNSNames) == 0 {
		return "", errors.New("the certificate has no DNS name; make it with sluice ca issue NODE")
	}
	node := chain[0].DNSNames[0]
	return node, CheckNode(node)
}

// loadFiles reads the certificate, key and CA of auth: tls, and refuses what will
// not work before another node does. It returns the earliest end of what the node shows, too.
func loadFiles(cfg Config) (_ tls.Certificate, _ *x509.CertPool, end time.Time, _ error) {
	fail := func(err error) (tls.Certificate, *x509.CertPool, time.Time, error) {
		return tls.Certificate{}, nil, time.Time{}, fmt.Errorf("%w: auth tls: %w", ErrConfig, err)
	}
	for _, f := range []struct {
		key, path string
		mask      os.FileMode
	}{{"tls.ca", cfg.CA, 0o022}, {"tls.cert", cfg.Cert, 0o022}, {"tls.key", cfg.Key, 0o077}} {
		if f.path == "" {
			return fail(fmt.Errorf("%s is not set", f.key))
		}
		if err := safefile.Dir(filepath.Dir(f.path)); err != nil {
			return fail(fmt.Errorf("%s: %w", f.key, err))
		}
		if err := safefile.File(f.path, f.mask); err != nil {
			return fail(fmt.Errorf("%s: %w", f.key, err))
		}
	}
	ca, err := os.ReadFile(cfg.CA)
	if err != nil {
		return fail(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return fail(fmt.Errorf("tls.ca: %s has no certificate in PEM", cfg.CA))
	}
	cert, err := tls.LoadX509KeyPair(cfg.Cert, cfg.Key)
	if err != nil {
		return fail(fmt.Errorf("%s and %s: %w; tls.key has to be that of tls.cert", cfg.Cert, cfg.Key, err))
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		return fail(err)
	}
	node, err := nodeOf([]*x509.Certificate{leaf})
	if err != nil {
		return fail(err)
	}
	if node != cfg.Node {
		return fail(fmt.Errorf("%s is the certificate of %q, this node is %q (key node of sluice.yaml)", cfg.Cert, node, cfg.Node))
	}
	if err := leaf.VerifyHostname(node); err != nil {
		return fail(fmt.Errorf("%s: %w; make it with sluice ca issue %s", cfg.Cert, err, node))
	}
	mid := x509.NewCertPool()
	for _, der := range cert.Certificate[1:] {
		if c, err := x509.ParseCertificate(der); err == nil {
			mid.AddCert(c)
		}
	}
	for _, use := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		chains, err := leaf.Verify(x509.VerifyOptions{Roots: pool, Intermediates: mid, KeyUsages: []x509.ExtKeyUsage{use}})
		var invalid x509.CertificateInvalidError
		var stranger x509.UnknownAuthorityError
		switch {
		case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
			return fail(fmt.Errorf("%s by %s: %w; make a new one with sluice ca issue %s, and see that this machine's clock is right", cfg.Cert, cfg.CA, err, node))
		case errors.As(err, &stranger):
			return fail(fmt.Errorf("%s is not by %s: %w; every node has the ca.pem of the CA that issued its certificate", cfg.Cert, cfg.CA, err))
		case err != nil:
			return fail(fmt.Errorf("%s by %s: %w; a daemon is client and server", cfg.Cert, cfg.CA, err))
		}
		for _, c := range chains[0] {
			if end.IsZero() || c.NotAfter.Before(end) {
				end = c.NotAfter
			}
		}
	}
	return cert, pool, end, nil
}

// InitCA makes a CA in dir (made with mode 0700 if it is not there): ca.pem, which
// every node gets, and ca.key, which stays. One that is there is not replaced.
func InitCA(dir, name string, now time.Time) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("ca: %w", err)
	}
	if err := safefile.Dir(dir); err != nil {
		return fmt.Errorf("ca: %w", err)
	}
	key, serial, err := newKey()
	if err != nil {
		return err
	}
	t := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             now.Add(-clockSkew),
		NotAfter:              now.Add(CALife),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return fmt.Errorf("ca: %w", err)
	}
	// The key first: without it the certificate is of no use to anybody.
	if err := writeKey(filepath.Join(dir, caKey), key); err != nil {
		return err
	}
	return writeNew(filepath.Join(dir, caCert), 0o644, "CERTIFICATE", der)
}

// Issue makes NODE.pem and NODE.key in out, signed by the CA in dir, and answers
// their paths. Files that are there are not replaced.
func Issue(dir, node, out string, now time.Time) (cert, key string, err error) {
	if err := CheckNode(node); err != nil {
		return "", "", fmt.Errorf("ca: %w", err)
	}
	ca, signer, err := loadCA(dir)
	if err != nil {
		return "", "", err
	}
	k, serial, err := newKey()
	if err != nil {
		return "", "", err
	}
	t := nodeTemplate(node, serial, now, NodeLife)
	if t.NotAfter.After(ca.NotAfter) {
		t.NotAfter = ca.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, t, ca, k.Public(), signer)
	if err != nil {
		return "", "", fmt.Errorf("ca: %w", err)
	}
	if err := os.MkdirAll(out, 0o700); err != nil {
		return "", "", fmt.Errorf("ca: %w", err)
	}
	cert, key = filepath.Join(out, node+".pem"), filepath.Join(out, node+".key")
	if err := writeKey(key, k); err != nil {
		return "", "", err
	}
	return cert, key, writeNew(cert, 0o644, "CERTIFICATE", der)
}

func loadCA(dir string) (*x509.Certificate, any, error) {
	if err := safefile.Dir(dir); err != nil {
		return nil, nil, fmt.Errorf("ca: %w", err)
	}
	path := filepath.Join(dir, caKey)
	if err := safefile.File(path, 0o077); err != nil {
		return nil, nil, fmt.Errorf("ca: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, caCert), path)
	if err != nil {
		return nil, nil, fmt.Errorf("ca: %w; make one with sluice ca init", err)
	}
	c, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return nil, nil, fmt.Errorf("ca: %w", err)
	}
	if !c.IsCA {
		return nil, nil, fmt.Errorf("ca: %s is no CA's certificate", filepath.Join(dir, caCert))
	}
	return c, pair.PrivateKey, nil
}

func writeKey(path string, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("ca: %w", err)
	}
	return writeNew(path, 0o600, "PRIVATE KEY", der)
}

// writeNew writes a file that must not exist yet.
func writeNew(path string, mode os.FileMode, kind string, der []byte) error {
	err := safefile.WriteNew(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), safefile.How{Mode: mode})
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("ca: %s exists; remove it first if it shall be replaced: %w", path, err)
	}
	if err != nil {
		return fmt.Errorf("ca: %w", err)
	}
	return nil
}
