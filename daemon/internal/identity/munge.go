package identity

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// A credential of munge says: root of a node of this cluster wrote these bytes.
// The bytes say which end of which TLS connection, between which certificates,
// and by what node name, so that a credential is good for one connection and one
// direction only. munge and unmunge are run as programs: their library is not
// linked, and one that hangs costs a process and its deadline.

const (
	mungeTime    = 3 * time.Second
	mungeAtOnce  = 8
	payloadMagic = "sluice-auth-1"
	channelLabel = "EXPORTER-sluice-auth"
)

// Roles, so that a credential cannot be sent back to who made it.
const (
	roleClient = "client"
	roleServer = "server"
)

type munge struct {
	encode, decode string // programs
	socket         string
	uid            uint32
	places         chan struct{} // bounds the programs that run

	works  sync.Mutex // guards what follows
	asked  time.Time
	broken error // what came of it
}

func newMunge(socket string, uid uint32) (*munge, error) {
	m := &munge{socket: socket, uid: uid, places: make(chan struct{}, mungeAtOnce)}
	for name, p := range map[string]*string{"munge": &m.encode, "unmunge": &m.decode} {
		path, err := exec.LookPath(name)
		if err != nil {
			return nil, fmt.Errorf("%w: auth munge needs the program %s: %w; install munge or set auth: tls", ErrConfig, name, err)
		}
		*p = path
	}
	return m, nil
}

// mungeErrors are the exit statuses (munge.h) of which unmunge says nothing when it
// prints the payload.
var mungeErrors = map[int]string{
	15: "Expired credential; are the nodes' clocks right?",
	16: "Rewound credential; are the nodes' clocks right?",
	17: "Replayed credential",
	18: "Unauthorized credential",
}

// run runs one of the two programs. What it says on stderr is the error.
func (m *munge) run(ctx context.Context, stdin []byte, program string, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, mungeTime)
	defer cancel()
	select {
	case m.places <- struct{}{}:
		defer func() { <-m.places }()
	case <-ctx.Done():
		return nil, fmt.Errorf("munge: %d programs run already and none ended within %v", mungeAtOnce, mungeTime)
	}
	if m.socket != "" {
		args = append(args, "--socket="+m.socket)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin"}
	cmd.WaitDelay = time.Second
	cmd.Stdin = bytes.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("munge: no answer within %v; is munged running?", mungeTime)
	}
	if err != nil {
		why := strings.TrimSpace(errs.String())
		if said := mungeErrors[cmd.ProcessState.ExitCode()]; why == "" && said != "" {
			why = said
		} else if why == "" {
			why = err.Error()
		}
		return nil, fmt.Errorf("munge: %s", form.Printable(why))
	}
	return out.Bytes(), nil
}

// payload is what a credential says. Lines, since nothing in it has a newline.
func payload(role, node string, cert [sha256.Size]byte, channel []byte) []byte {
	return []byte(strings.Join([]string{payloadMagic, role, node, hex.EncodeToString(cert[:]), hex.EncodeToString(channel)}, "\n"))
}

func channelOf(st *tls.ConnectionState) ([]byte, error) {
	b, err := st.ExportKeyingMaterial(channelLabel, nil, 32)
	if err != nil {
		return nil, fmt.Errorf("identity: TLS exporter: %w", err)
	}
	return b, nil
}

// issue makes this side's credential for the connection.
func (m *munge) issue(ctx context.Context, st *tls.ConnectionState, self [sha256.Size]byte, role, node string) ([]byte, error) {
	channel, err := channelOf(st)
	if err != nil {
		return nil, err
	}
	out, err := m.run(ctx, payload(role, node, self, channel), m.encode, "--restrict-uid="+strconv.FormatUint(uint64(m.uid), 10))
	if err != nil {
		return nil, fmt.Errorf("own credential: %w", err)
	}
	return bytes.TrimSpace(out), nil
}

// look checks the other side's credential and answers its node name; with an
// error, the name it claimed if it got that far.
func (m *munge) look(ctx context.Context, cred []byte, st *tls.ConnectionState, role string) (string, error) {
	if err := plausible(cred); err != nil {
		return "", err
	}
	channel, err := channelOf(st)
	if err != nil {
		return "", err
	}
	if len(st.PeerCertificates) == 0 {
		return "", fmt.Errorf("%w: no certificate", ErrRefused)
	}
	out, err := m.run(ctx, cred, m.decode, "--numeric", "--keys=STATUS,UID,LENGTH")
	if err != nil {
		return "", fmt.Errorf("%w: credential: %w", ErrRefused, err)
	}
	uid, said, err := parseDecoded(out)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrRefused, err)
	}
	got, err := parsePayload(said)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrRefused, err)
	}
	switch {
	case uid != m.uid:
		return got.node, fmt.Errorf("%w: the credential is of uid %d, daemons run as uid %d", ErrRefused, uid, m.uid)
	case got.role != role:
		return got.node, fmt.Errorf("%w: a %s's credential from a %s", ErrRefused, got.role, role)
	case got.cert != sha256.Sum256(st.PeerCertificates[0].Raw):
		return got.node, fmt.Errorf("%w: the credential vouches for another certificate", ErrRefused)
	case subtle.ConstantTimeCompare(got.channel, channel) != 1:
		return got.node, fmt.Errorf("%w: the credential belongs to another connection", ErrRefused)
	}
	return got.node, nil
}

// plausible refuses what cannot be a credential before a program is run for it.
func plausible(cred []byte) error {
	body, ok := bytes.CutPrefix(cred, []byte("MUNGE:"))
	if ok {
		body, ok = bytes.CutSuffix(body, []byte(":"))
	}
	if !ok || len(body) == 0 || bytes.ContainsFunc(body, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '+' && r != '/' && r != '='
	}) {
		return fmt.Errorf("%w: %d bytes that are no munge credential", ErrRefused, len(cred))
	}
	return nil
}

// parseDecoded takes unmunge's output apart: lines "KEY: value", an empty line,
// the payload.
func parseDecoded(out []byte) (uid uint32, said []byte, err error) {
	head, said, ok := bytes.Cut(out, []byte("\n\n"))
	if !ok {
		return 0, nil, errors.New("unmunge: output without a payload")
	}
	have := map[string]string{}
	for line := range strings.Lines(string(head)) {
		k, v, ok := strings.Cut(line, ":")
		if !ok {
			return 0, nil, fmt.Errorf("unmunge: line %q", line)
		}
		have[k] = strings.TrimSpace(v)
	}
	if s := have["STATUS"]; s != "0" {
		return 0, nil, fmt.Errorf("unmunge: status %q", s)
	}
	n, err := strconv.ParseUint(have["UID"], 10, 32)
	if err != nil {
		return 0, nil, fmt.Errorf("unmunge: uid: %w", err)
	}
	if l, err := strconv.Atoi(have["LENGTH"]); err != nil || l != len(said) {
		return 0, nil, fmt.Errorf("unmunge: payload of %d bytes, length %q", len(said), have["LENGTH"])
	}
	return uint32(n), said, nil
}

type claim struct {
	role, node string
	cert       [sha256.Size]byte
	channel    []byte
}

func parsePayload(b []byte) (claim, error) {
	lines := strings.Split(string(b), "\n")
	if len(lines) != 5 || lines[0] != payloadMagic {
		return claim{}, fmt.Errorf("a munge credential for something else (%d bytes)", len(b))
	}
	c := claim{role: lines[1], node: lines[2]}
	if c.role != roleClient && c.role != roleServer {
		return claim{}, errors.New("a munge credential of an unknown role")
	}
	if err := CheckNode(c.node); err != nil {
		return claim{}, err
	}
	cert, err := hex.DecodeString(lines[3])
	if err != nil || len(cert) != len(c.cert) {
		return claim{}, errors.New("a munge credential without a certificate's hash")
	}
	copy(c.cert[:], cert)
	if c.channel, err = hex.DecodeString(lines[4]); err != nil || len(c.channel) != 32 {
		return claim{}, errors.New("a munge credential without a channel")
	}
	return c, nil
}

// try makes a credential that nobody gets.
func (m *munge) try(ctx context.Context) error {
	_, err := m.run(ctx, []byte(payloadMagic), m.encode, "--restrict-uid="+strconv.FormatUint(uint64(m.uid), 10))
	return err
}

// MungeWorks says why munge makes no credentials here, by its own default socket, which Slurm's commands use. nil means that it
// does, or that this machine has no munge.
func MungeWorks(ctx context.Context) error {
	m, err := newMunge("", 0)
	if err != nil {
		return nil
	}
	return m.try(ctx)
}

// workFor is for how long an answer of Works is good, since any user of the node may ask for the daemon's health.
const workFor = 10 * time.Second

// Works says why this node cannot show who it is, nil if it can. It is asked again after workFor.
func (i *Identity) Works(ctx context.Context) error {
	if i.munge == nil {
		return nil // Expires has what can be wrong with a certificate that was good when it was read
	}
	m := i.munge
	m.works.Lock()
	defer m.works.Unlock()
	if now := time.Now(); m.asked.IsZero() || now.Sub(m.asked) > workFor {
		m.broken = m.try(ctx)
		m.asked = now
	}
	return m.broken
}
