package account

// A part of a lease: what a step of its job may have, where the step has asked for less than the job has.
//
// The sessions of a part have slots of the lease's account as all others have, so the lease's cap bounds them too. The part has a
// file of one page beside the account, which its sessions map. It has the part's caps, what the part owes (package turns),
// and which slots are the part's: the word of a slot is the life of the session that is in it, so that the next session there
// does not belong to the part by mistake. The starter alone writes caps and slots; the caps are for workers of
// earlier releases. All others get them from their starter, since a session can write anything here. layout.go has the record.

import (
	"fmt"
	"os"
	"slices"
	"unsafe"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Part is a part of a lease that this process has mapped.
type Part struct {
	mapping
	caps []uint64
}

// CreatePart makes the file of a part, mode 0600, with so many bytes of each device of the lease. A file that is there already is an error.
func CreatePart(path string, caps []uint64) (*Part, error) {
	if len(caps) == 0 || len(caps) > MaxDevices {
		return nil, fmt.Errorf("part of %d devices: 1 to %d fit", len(caps), MaxDevices)
	}
	f, err := safefile.Create(path, safefile.How{Mode: 0o600, Volatile: true})
	if err != nil {
		return nil, fmt.Errorf("account: %w", err)
	}
	defer f.Close()
	p := &Part{caps: append([]uint64(nil), caps...)}
	if err := p.allocate(f.File, partSize); err != nil {
		return nil, err
	}
	for d, n := range caps {
		p.layout().cap[d].Store(min(n, maxBytes))
	}
	p.layout().devices.Store(uint64(len(caps)))
	p.layout().version.Store(partVersion)
	p.layout().magic.Store(partMagic)
	if err := f.CommitNew(); err != nil {
		p.Close()
		return nil, fmt.Errorf("account: %w", err)
	}
	f.Detach()
	return p, nil
}

// OpenPart opens the file of a part that has so many bytes of each device. It must belong to this process's user and nobody else may be able
// to write it.
func OpenPart(path string, caps []uint64) (*Part, error) {
	f, err := openOwn(path)
	if err != nil {
		return nil, err
	}
	return attachPart(f, caps)
}

// PartFromFD is OpenPart of the part behind a descriptor that another process has passed, which is the part's from then on.
func PartFromFD(fd int, caps []uint64) (*Part, error) {
	return attachPart(os.NewFile(uintptr(fd), "part"), caps)
}

func attachPart(f *os.File, caps []uint64) (*Part, error) {
	p := &Part{}
	if err := p.open(f, partSize); err != nil {
		return nil, err
	}
	n := p.layout().devices.Load()
	if p.layout().magic.Load() != partMagic || p.layout().version.Load() != partVersion || n == 0 || n > MaxDevices {
		p.Close()
		return nil, fmt.Errorf("account: %s: %w", f.Name(), ErrFile)
	}
	if len(caps) != int(n) {
		p.Close()
		return nil, fmt.Errorf("account: %s: it is for %d devices, and the part has %d", f.Name(), n, len(caps))
	}
	p.caps = slices.Clone(caps)
	return p, nil
}

// Cap is what the part has of a device, in bytes.
func (p *Part) Cap(dev int) uint64 { return p.caps[dev] }

// Add makes a claimed slot of the lease's account the part's, as long as the slot's session lives. It comes before the session begins.
func (p *Part) Add(a *File, slot int) error {
	var life uint64
	if err := a.guard(func() { life = a.rec(slot).opened.Load() }); err != nil {
		return err
	}
	return p.guard(func() { p.layout().slots[slot].Store(life) })
}

// in says whether the session that is in a slot, or was there last, is a part's.
func (a *File) in(p *Part, slot int) bool {
	life := a.rec(slot).opened.Load()
	return life != 0 && p.layout().slots[slot].Load() == life
}

// Debts is File.Debts of what the part owes, for the starter.
func (p *Part) Debts(dev int) (d Debts, kept bool) {
	return Debts{words: &p.mapping, debt: int(unsafe.Offsetof(partFile{}.debt)) + 8*dev, excused: int(unsafe.Offsetof(partFile{}.excused)) + 8*dev, dev: dev, slot: -1}, dev >= 0 && dev < len(p.caps)
}

// Join makes the session one of a part, which the starter has added its slot to. It comes before anything is reserved.
func (s *Session) Join(p *Part) error {
	if len(p.caps) != len(s.file.caps) {
		return fmt.Errorf("account: part of %d devices in a lease of %d", len(p.caps), len(s.file.caps))
	}
	if !s.file.in(p, s.slot) {
		return fmt.Errorf("account: slot %d is not of this part", s.slot)
	}
	s.part = p
	return nil
}

// fits says whether the lease's cap, and the part's, have room for more bytes than the less that are charged already. left is what of the
// less is charged to the part too. Byte 0 is held.
func (s *Session) fits(dev int, less, left, more uint64) bool {
	a := s.file
	if used, _, _ := a.used(dev, nil); used-less+more > a.caps[dev] {
		return false
	}
	if s.part == nil {
		return true
	}
	used, _, _ := a.used(dev, s.part)
	return used-left+more <= s.part.caps[dev]
}

// room is fits, and has the slots of dead sessions freed where there is none.
func (s *Session) room(dev int, less, more uint64) bool {
	return s.fits(dev, less, less, more) || s.bury() && s.fits(dev, less, less, more)
}
