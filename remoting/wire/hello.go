package wire

import (
	"errors"
	"fmt"
	"io"
)

// ErrNotSluice says that the peer does not speak this protocol at all.
var ErrNotSluice = errors.New("wire: not a sluice client")

// Decode reads a request to a lease's socket. As with a HELLO, only a wrong
// magic is an error here.
func (m *LeaseRequest) Decode(b *[LeaseRequestSize]byte) error {
	if !m.get(b) {
		return ErrNotSluice
	}
	return nil
}

// Decode reads the answer of a lease's socket. Only a wrong magic is an error here.
func (m *LeaseAnswer) Decode(b *[LeaseAnswerSize]byte) error {
	if !m.get(b) {
		return errors.New("wire: not the answer of a lease's socket")
	}
	return nil
}

// Decode reads a HELLO. A wrong version is not an error here, so that the
// caller can refuse it by name; a wrong magic is ErrNotSluice.
func (m *Hello) Decode(b *[HelloSize]byte) error {
	if !m.get(b) {
		return ErrNotSluice
	}
	return nil
}

// AppendWelcome appends a WELCOME with its payload to b.
func AppendWelcome(b []byte, status uint32, payload []byte) []byte {
	var h [WelcomeSize]byte
	(&Welcome{Version: Version, Status: status, Size: uint32(len(payload))}).Encode(&h)
	return append(append(b, h[:]...), payload...)
}

// ReadWelcome reads a WELCOME. A status other than StatusOK comes back as a
// *Refusal.
func ReadWelcome(r io.Reader) ([]byte, error) {
	var h [WelcomeSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return nil, fmt.Errorf("wire: read welcome: %w", err)
	}
	var w Welcome
	if !w.get(&h) {
		return nil, errors.New("wire: what answers is no sluice worker")
	}
	if w.Size > MaxWelcome {
		return nil, fmt.Errorf("wire: welcome of %d bytes: %w", w.Size, ErrRange)
	}
	p := make([]byte, w.Size)
	if _, err := io.ReadFull(r, p); err != nil {
		return nil, fmt.Errorf("wire: read welcome: %w", err)
	}
	if w.Status != StatusOK {
		return nil, &Refusal{Status: w.Status, Reason: string(p)}
	}
	if w.Version != Version {
		return nil, &Refusal{Status: StatusVersion, Reason: fmt.Sprintf("worker speaks version %d, this side %d", w.Version, Version)}
	}
	return p, nil
}

// Refusal is a worker's "no" to a HELLO, with the reason in its own words.
type Refusal struct {
	Status uint32
	Reason string
}

func (r *Refusal) Error() string { return r.Reason }

// Snapshot is everything a client must know of the devices to answer locally.
type Snapshot struct {
	DriverVersion uint32 // as cuDriverGetVersion gives it
	KeepaliveMS   uint32
	Features      uint32
	DriverString  string // as nvidia-smi prints it
	DriverBranch  string // empty if NVML does not know
	Devices       []Device
}

// Device is one device of a snapshot. NAttr is set by Decode; Encode writes the
// length of Attr.
type Device struct {
	DeviceHead
	Attr   []int32 // by CUdevice_attribute
	AttrOK []bool
}

// Encode appends the snapshot to e.
func (s *Snapshot) Encode(e *Encoder) {
	(&SnapshotHead{
		DriverVersion: s.DriverVersion, NDev: uint32(len(s.Devices)), KeepaliveMS: s.KeepaliveMS, Features: s.Features,
		DriverString: s.DriverString, DriverBranch: s.DriverBranch,
	}).Encode(e)
	for i := range s.Devices {
		s.Devices[i].Encode(e)
	}
}

// Encode appends the device block to e.
func (d *Device) Encode(e *Encoder) {
	h := d.DeviceHead
	h.NAttr = uint32(len(d.Attr))
	h.Encode(e)
	for _, v := range d.Attr {
		e.I32(v)
	}
	for i := range d.Attr {
		ok := uint8(0)
		if i < len(d.AttrOK) && d.AttrOK[i] {
			ok = 1
		}
		e.U8(ok)
	}
	// The pad makes the whole snapshot, not the block, a multiple of 8: the
	// snapshot's own header has 128 bytes, so the two are the same.
	e.Align(8)
}

// Decode reads a snapshot from b.
func (s *Snapshot) Decode(b []byte) error {
	d := NewDecoder(b)
	var h SnapshotHead
	h.Decode(d)
	if h.NDev > MaxDevices {
		return fmt.Errorf("wire: snapshot of %d devices: %w", h.NDev, ErrRange)
	}
	*s = Snapshot{DriverVersion: h.DriverVersion, KeepaliveMS: h.KeepaliveMS, Features: h.Features, DriverString: h.DriverString, DriverBranch: h.DriverBranch}
	for i := uint32(0); i < h.NDev && d.Err() == nil; i++ {
		var v Device
		v.decode(d)
		s.Devices = append(s.Devices, v)
	}
	return d.Done()
}

func (d *Device) decode(from *Decoder) {
	d.DeviceHead.Decode(from)
	n := from.Elements(d.NAttr, 5, MaxAttrs)
	d.Attr = make([]int32, n)
	d.AttrOK = make([]bool, n)
	for i := range d.Attr {
		d.Attr[i] = from.I32()
	}
	for i := range d.AttrOK {
		d.AttrOK[i] = from.U8() != 0
	}
	if pad := from.off % 8; pad != 0 {
		from.Bytes(8 - pad)
	}
}
