package data

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Errors by which callers decide.
var (
	// ErrRefused says that the other side failed its proof, or that it refused this side.
	ErrRefused = errors.New("data connection refused")
	// errNoChallenge says that the connection ended before the owner sent anything: the ticket
	// is not used.
	errNoChallenge = errors.New("the owner does not know the ticket, or is not sluiced")
	// errStranger says that the connection did not get as far as a ticket.
	errStranger = errors.New("no ticket")
)

// Sizes of the messages, in bytes, and their parts.
const (
	helloSize     = 64 // magic 8, version 4, flags 4, ticket 16, nonce 32
	challengeSize = 64 // nonce 32, proof 32
	responseSize  = 32 // proof
	resultSize    = 8  // status 4, length of the reason 4

	magic         = "SLUICE-D"
	version       = 1
	flagEncrypted = 1
	maxReason     = 1024
)

// hello is the client's first message.
type hello struct {
	flags  uint32
	ticket [16]byte
	nonce  [32]byte
}

func (h *hello) encode() (b [helloSize]byte) {
	copy(b[:], magic)
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint32(b[12:], h.flags)
	copy(b[16:], h.ticket[:])
	copy(b[32:], h.nonce[:])
	return b
}

func parseHello(b *[helloSize]byte) (h hello, err error) {
	if string(b[:8]) != magic {
		return h, fmt.Errorf("%w: it does not begin with %s", errStranger, magic)
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != version {
		return h, fmt.Errorf("%w: version %d, this daemon speaks %d", errStranger, v, version)
	}
	h.flags = binary.LittleEndian.Uint32(b[12:])
	if h.flags&^flagEncrypted != 0 {
		return h, fmt.Errorf("%w: unknown flags %#x", errStranger, h.flags)
	}
	copy(h.ticket[:], b[16:])
	copy(h.nonce[:], b[32:])
	return h, nil
}

// proof is what a side sends to show that it has the secret and has seen all messages so far.
// role keeps one side's proof from being the other's.
func proof(secret *[32]byte, role string, hello *[helloSize]byte, nonce *[32]byte) [sha256.Size]byte {
	m := hmac.New(sha256.New, secret[:])
	m.Write([]byte(role))
	m.Write(hello[:])
	m.Write(nonce[:])
	return [sha256.Size]byte(m.Sum(nil))
}

const (
	roleServer = "server"
	roleClient = "client"
)

// respond is the client's side up to the result, which it reads. The caller sets the deadline.
func respond(rw io.ReadWriter, ticket [16]byte, secret [32]byte, encrypted bool) error {
	h := hello{ticket: ticket}
	if encrypted {
		h.flags = flagEncrypted
	}
	_, _ = rand.Read(h.nonce[:]) // never fails
	first := h.encode()
	if _, err := rw.Write(first[:]); err != nil {
		return fmt.Errorf("%w: %w: %w", ErrRefused, errNoChallenge, err)
	}
	var c [challengeSize]byte
	if _, err := io.ReadFull(rw, c[:]); err != nil {
		return fmt.Errorf("%w: no challenge: %w: %w", ErrRefused, errNoChallenge, err)
	}
	nonce := [32]byte(c[:32])
	want := proof(&secret, roleServer, &first, &nonce)
	if !hmac.Equal(want[:], c[32:]) {
		return fmt.Errorf("%w: the other side is not the owner that offered the session", ErrRefused)
	}
	mine := proof(&secret, roleClient, &first, &nonce)
	if _, err := rw.Write(mine[:]); err != nil {
		return fmt.Errorf("data connection: %w", err)
	}
	return readResult(rw)
}

func readResult(r io.Reader) error {
	var b [resultSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return fmt.Errorf("%w: no result: %w", ErrRefused, err)
	}
	status, n := binary.LittleEndian.Uint32(b[:]), binary.LittleEndian.Uint32(b[4:])
	if n > maxReason || status == 0 && n != 0 {
		return fmt.Errorf("%w: result with a reason of %d bytes", ErrRefused, n)
	}
	reason := make([]byte, n)
	if _, err := io.ReadFull(r, reason); err != nil {
		return fmt.Errorf("%w: no reason: %w", ErrRefused, err)
	}
	if status != 0 {
		return fmt.Errorf("%w: %s", ErrRefused, form.Printable(string(reason)))
	}
	return nil
}

func result(reason string) []byte {
	reason = reason[:min(len(reason), maxReason)]
	b := make([]byte, resultSize, resultSize+len(reason))
	if reason != "" {
		b[0] = 1
	}
	binary.LittleEndian.PutUint32(b[4:], uint32(len(reason)))
	return append(b, reason...)
}
