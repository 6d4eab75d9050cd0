package identity

import (
	"encoding/binary"
	"fmt"
	"io"
	"time"

	"github.com/sluice-hpc/sluice/internal/form"
)

// handshakeTime is how long both sides have to show who they are.
const handshakeTime = 5 * time.Second

// Frames of the handshake: u32 kind, u32 length, bytes; little endian.
const (
	frameCredential = 1
	frameWelcome    = 2
	frameRefused    = 3

	maxFrame  = 8 << 10 // bytes
	maxReason = 512
)

func writeFrame(w io.Writer, kind uint32, b []byte) error {
	if len(b) > maxFrame {
		return fmt.Errorf("identity: frame of %d bytes: at most %d", len(b), maxFrame)
	}
	out := make([]byte, 8, 8+len(b))
	binary.LittleEndian.PutUint32(out, kind)
	binary.LittleEndian.PutUint32(out[4:], uint32(len(b)))
	_, err := w.Write(append(out, b...))
	return err
}

// readFrame reads no byte beyond the frame and keeps no more than maxFrame.
func readFrame(r io.Reader) (kind uint32, b []byte, err error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, fmt.Errorf("%w: the other side left during the handshake: %w", ErrRefused, err)
	}
	kind, n := binary.LittleEndian.Uint32(head[:]), binary.LittleEndian.Uint32(head[4:])
	switch {
	case kind < frameCredential || kind > frameRefused:
		return 0, nil, fmt.Errorf("%w: frame of kind %d", ErrRefused, kind)
	case n > maxFrame, kind == frameRefused && n > maxReason, kind == frameWelcome && n != 0:
		return 0, nil, fmt.Errorf("%w: frame of kind %d with %d bytes", ErrRefused, kind, n)
	}
	b = make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return 0, nil, fmt.Errorf("%w: the other side left during the handshake: %w", ErrRefused, err)
	}
	return kind, b, nil
}

func readCredential(r io.Reader) ([]byte, error) {
	kind, b, err := readFrame(r)
	if err != nil {
		return nil, err
	}
	if kind != frameCredential {
		return nil, fmt.Errorf("%w: frame of kind %d instead of a credential", ErrRefused, kind)
	}
	return b, nil
}

// readAnswer reads the server's frame; its refusal is an error.
func readAnswer(r io.Reader, node string) (uint32, []byte, error) {
	kind, b, err := readFrame(r)
	if err != nil {
		return 0, nil, fmt.Errorf("node %s: %w", node, err)
	}
	if kind == frameRefused {
		return 0, nil, fmt.Errorf("%w by node %s: %s", ErrRefused, node, form.Printable(string(b)))
	}
	return kind, b, nil
}
