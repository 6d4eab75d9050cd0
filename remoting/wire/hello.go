package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// HelloSize is the fixed size of a HELLO, in bytes.
const HelloSize = 128

// WelcomeSize is the size of a WELCOME's header, in bytes.
const WelcomeSize = 16

var helloMagic = [8]byte{'S', 'L', 'U', 'I', 'C', 'E', '\r', '\n'}

const welcomeMagic = 0x4c43574c

// FeatureShm in HELLO: the client can use shared memory (Unix sockets only);
// in a snapshot: shared memory follows by SCM_RIGHTS.
const FeatureShm = 1

// Status of a WELCOME.
const (
	StatusOK          = 0
	StatusVersion     = 1
	StatusFingerprint = 2
	StatusLease       = 3
	StatusNoMemory    = 4
	StatusInternal    = 5
	StatusBusy        = 6
)

// ErrNotSluice says that the peer does not speak this protocol at all.
var ErrNotSluice = errors.New("wire: not a sluice client")

// Hello is what a client sends first.
type Hello struct {
	Version     uint32
	Kind        uint32
	Fingerprint [32]byte // of the API table; zero for a lease
	Token       [16]byte // zero: the worker's default lease
	PID, UID    uint32
	Features    uint32
	Mem         uint64 // bytes wished per device (lease), 0 for all there is
	Program     string
}

// Decode reads a HELLO. A wrong version is not an error here, so that the
// caller can refuse it by name; a wrong magic is ErrNotSluice.
func (h *Hello) Decode(b *[HelloSize]byte) error {
	if [8]byte(b[0:8]) != helloMagic {
		return ErrNotSluice
	}
	h.Version = binary.LittleEndian.Uint32(b[8:])
	h.Kind = binary.LittleEndian.Uint32(b[12:])
	copy(h.Fingerprint[:], b[16:48])
	copy(h.Token[:], b[48:64])
	h.PID = binary.LittleEndian.Uint32(b[64:])
	h.UID = binary.LittleEndian.Uint32(b[68:])
	h.Features = binary.LittleEndian.Uint32(b[72:])
	h.Mem = binary.LittleEndian.Uint64(b[80:])
	h.Program = fixedString(b[88:128])
	return nil
}

// Encode writes a HELLO.
func (h *Hello) Encode(b *[HelloSize]byte) {
	*b = [HelloSize]byte{}
	copy(b[0:], helloMagic[:])
	binary.LittleEndian.PutUint32(b[8:], h.Version)
	binary.LittleEndian.PutUint32(b[12:], h.Kind)
	copy(b[16:], h.Fingerprint[:])
	copy(b[48:], h.Token[:])
	binary.LittleEndian.PutUint32(b[64:], h.PID)
	binary.LittleEndian.PutUint32(b[68:], h.UID)
	binary.LittleEndian.PutUint32(b[72:], h.Features)
	binary.LittleEndian.PutUint64(b[80:], h.Mem)
	copy(b[88:127], h.Program)
}

// AppendWelcome appends a WELCOME with its payload to b.
func AppendWelcome(b []byte, status uint32, payload []byte) []byte {
	b = binary.LittleEndian.AppendUint32(b, welcomeMagic)
	b = binary.LittleEndian.AppendUint32(b, Version)
	b = binary.LittleEndian.AppendUint32(b, status)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// ReadWelcome reads a WELCOME. A status other than StatusOK comes back as a
// *Refusal.
func ReadWelcome(r io.Reader) ([]byte, error) {
	var h [WelcomeSize]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return nil, fmt.Errorf("wire: read welcome: %w", err)
	}
	if m := binary.LittleEndian.Uint32(h[0:]); m != welcomeMagic {
		return nil, fmt.Errorf("wire: welcome has magic %#x: the peer is no sluice worker", m)
	}
	version := binary.LittleEndian.Uint32(h[4:])
	status := binary.LittleEndian.Uint32(h[8:])
	n := binary.LittleEndian.Uint32(h[12:])
	if n > MaxWelcome {
		return nil, fmt.Errorf("wire: welcome of %d bytes: %w", n, ErrRange)
	}
	p := make([]byte, n)
	if _, err := io.ReadFull(r, p); err != nil {
		return nil, fmt.Errorf("wire: read welcome: %w", err)
	}
	if status != StatusOK {
		return nil, &Refusal{Status: status, Reason: string(p)}
	}
	if version != Version {
		return nil, &Refusal{Status: StatusVersion, Reason: fmt.Sprintf("worker speaks version %d, this side %d", version, Version)}
	}
	return p, nil
}

// Refusal is a worker's "no" to a HELLO, with the reason in its own words.
type Refusal struct {
	Status uint32
	Reason string
}

func (r *Refusal) Error() string { return r.Reason }

// NumLimits is the number of CUlimit values in a snapshot.
const NumLimits = 8

// MaxAttrs is the most device attributes a snapshot carries per device.
const MaxAttrs = 512

// MaxDevices is the most devices a snapshot carries.
const MaxDevices = 64

// Unsupported is the value of a limit that the device does not have.
const Unsupported = ^uint64(0)

// Snapshot is everything a client must know of the devices to answer locally.
type Snapshot struct {
	DriverVersion uint32 // as cuDriverGetVersion gives it
	KeepaliveMS   uint32
	Features      uint32
	DriverString  string // as nvidia-smi prints it
	Devices       []Device
}

// Device is one device of a snapshot. TotalMem and PhysicalMem are bytes.
type Device struct {
	Name                      string
	UUID                      [16]byte
	TotalMem                  uint64 // what is granted
	PhysicalMem               uint64 // what the hardware has
	PCIDomain, PCIBus, PCIDev int32
	PCIBusID                  string
	GranMin, GranRec          uint64
	PrioLeast, PrioGreatest   int32
	Tex1DMaxWidth             uint64
	Limits                    [NumLimits]uint64
	CCMajor, CCMinor          int32
	Attr                      []int32 // by CUdevice_attribute
	AttrOK                    []bool
}

// Encode appends the snapshot to e.
func (s *Snapshot) Encode(e *Encoder) {
	e.U32(s.DriverVersion)
	e.U32(uint32(len(s.Devices)))
	e.U32(s.KeepaliveMS)
	e.U32(s.Features)
	e.Fixed(s.DriverString, 32)
	for i := range s.Devices {
		s.Devices[i].Encode(e)
	}
}

// Encode appends the device block to e.
func (d *Device) Encode(e *Encoder) {
	e.Fixed(d.Name, 96)
	e.Bytes(d.UUID[:])
	e.U64(d.TotalMem)
	e.U64(d.PhysicalMem)
	e.I32(d.PCIDomain)
	e.I32(d.PCIBus)
	e.I32(d.PCIDev)
	e.I32(0)
	e.Fixed(d.PCIBusID, 24)
	e.U64(d.GranMin)
	e.U64(d.GranRec)
	e.I32(d.PrioLeast)
	e.I32(d.PrioGreatest)
	e.U64(d.Tex1DMaxWidth)
	for _, v := range d.Limits {
		e.U64(v)
	}
	e.I32(d.CCMajor)
	e.I32(d.CCMinor)
	e.U32(uint32(len(d.Attr)))
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
	// snapshot's own header has 48 bytes, so the two are the same.
	e.Align(8)
}

// Decode reads a snapshot from b.
func (s *Snapshot) Decode(b []byte) error {
	d := NewDecoder(b)
	s.DriverVersion = d.U32()
	n := d.U32()
	s.KeepaliveMS = d.U32()
	s.Features = d.U32()
	s.DriverString = fixedString(d.Bytes(32))
	if n > MaxDevices {
		return fmt.Errorf("wire: snapshot of %d devices: %w", n, ErrRange)
	}
	s.Devices = nil
	for i := uint32(0); i < n && d.Err() == nil; i++ {
		var v Device
		v.decode(d)
		s.Devices = append(s.Devices, v)
	}
	return d.Done()
}

func (v *Device) decode(d *Decoder) {
	v.Name = fixedString(d.Bytes(96))
	copy(v.UUID[:], d.Bytes(16))
	v.TotalMem = d.U64()
	v.PhysicalMem = d.U64()
	v.PCIDomain = d.I32()
	v.PCIBus = d.I32()
	v.PCIDev = d.I32()
	d.I32()
	v.PCIBusID = fixedString(d.Bytes(24))
	v.GranMin = d.U64()
	v.GranRec = d.U64()
	v.PrioLeast = d.I32()
	v.PrioGreatest = d.I32()
	v.Tex1DMaxWidth = d.U64()
	for i := range v.Limits {
		v.Limits[i] = d.U64()
	}
	v.CCMajor = d.I32()
	v.CCMinor = d.I32()
	n := d.Count(5, MaxAttrs)
	v.Attr = make([]int32, n)
	v.AttrOK = make([]bool, n)
	for i := range v.Attr {
		v.Attr[i] = d.I32()
	}
	for i := range v.AttrOK {
		v.AttrOK[i] = d.U8() != 0
	}
	if pad := d.off % 8; pad != 0 {
		d.Bytes(8 - pad)
	}
}
