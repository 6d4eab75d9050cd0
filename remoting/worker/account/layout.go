package account

// The records of an account's file and of a part's. Numbers are little-endian 64-bit words.

import (
	"sync/atomic"
	"unsafe"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// Sizes of an account.
const (
	MaxDevices = wire.MaxDevices
	MaxSlots   = 256
	maxReason  = 256
	nameSize   = 40
)

const (
	fileMagic   = 0x544e434143554c53 // "SLUCACNT"
	fileVersion = 1
	headerSize  = 4096
	slotSize    = 1024
	fileSize    = headerSize + MaxSlots*slotSize

	partMagic   = 0x545241504c434c53 // "SLCLPART"
	partVersion = 1
	partSize    = 4096
)

// words are a word for each device.
type words [MaxDevices]atomic.Uint64

// accountFile is a lease's account.
type accountFile struct {
	magic, version atomic.Uint64
	devices        atomic.Uint64
	high           atomic.Uint64           // slots used so far
	cap            words                   // bytes that the lease grants
	peak           words                   // of what all sessions held together, bytes
	others         words                   // sessions of other leases
	keepsDebts     atomic.Uint64           // 1: the words of debts are used, as package turns says
	debt, debited  words                   // pairSize apart
	overdue        [MaxSlots]atomic.Uint64 // a bit for each device on which the work of the slot's session is overdue
	excused, span  words                   // pairSize apart
	_              [headerSize - 2984]byte
	slots          [MaxSlots]slotRecord
}

// slotRecord is a session. The session alone writes it, but for what its starter does.
type slotRecord struct {
	state      atomic.Uint64 // a state
	pid, start atomic.Uint64 // the process, and its start time as in proc(5)
	kind       atomic.Uint64
	client     atomic.Uint64 // pid
	opened     atomic.Uint64 // ns since 1970
	counts     Counts
	cut        atomic.Uint64 // since when it has no connection: boottime.Now, ns; 0 with one, and from a release that does not say
	devices    [MaxDevices]deviceRecord
	compress   Compress
	name       [nameSize]byte // of the client's program
	_          [8]byte
	reasonSize atomic.Uint64
	reason     [maxReason]byte // of the session's end
	_          [24]byte        // an earlier build kept the name of the session's exchange here
	lent       words           // bytes
	ended      atomic.Uint64   // when the session was found to have ended: boottime.Now, ns
	borrowed   atomic.Uint64   // how many things of other sessions it has open and is not charged for
	cuts       Cuts
	link       Link
}

// deviceRecord is what a session holds of a device, in bytes.
type deviceRecord struct{ reserved, overhead, peak atomic.Uint64 }

// partFile is a part of a lease.
type partFile struct {
	magic, version atomic.Uint64
	devices        atomic.Uint64
	_              [8]byte
	cap            words // bytes
	debt, debited  words // pairSize apart
	excused, span  words // pairSize apart
	_              [1024 - 672]byte
	slots          [MaxSlots]atomic.Uint64 // slotRecord.opened of the part's session that is in the slot
	_              [1024]byte
}

// pairSize is how far apart the two words of a device's debt are, and those of what was excused.
const pairSize = 8 * MaxDevices

// Processes of different builds share these files, so nothing may move while the version stays.
var (
	_ [24]byte              = [unsafe.Offsetof(accountFile{}.high)]byte{}
	_ [32]byte              = [unsafe.Offsetof(accountFile{}.cap)]byte{}
	_ [160]byte             = [unsafe.Offsetof(accountFile{}.peak)]byte{}
	_ [288]byte             = [unsafe.Offsetof(accountFile{}.others)]byte{}
	_ [416]byte             = [unsafe.Offsetof(accountFile{}.keepsDebts)]byte{}
	_ [424]byte             = [unsafe.Offsetof(accountFile{}.debt)]byte{}
	_ [424 + pairSize]byte  = [unsafe.Offsetof(accountFile{}.debited)]byte{}
	_ [680]byte             = [unsafe.Offsetof(accountFile{}.overdue)]byte{}
	_ [2728]byte            = [unsafe.Offsetof(accountFile{}.excused)]byte{}
	_ [2728 + pairSize]byte = [unsafe.Offsetof(accountFile{}.span)]byte{}
	_ [headerSize]byte      = [unsafe.Offsetof(accountFile{}.slots)]byte{}
	_ [fileSize]byte        = [unsafe.Sizeof(accountFile{})]byte{}
	_ [slotSize]byte        = [unsafe.Sizeof(slotRecord{})]byte{}
	_ [0]byte               = [unsafe.Offsetof(slotRecord{}.state)]byte{}
	_ [8]byte               = [unsafe.Offsetof(slotRecord{}.pid)]byte{}
	_ [24]byte              = [unsafe.Offsetof(slotRecord{}.kind)]byte{}
	_ [32]byte              = [unsafe.Offsetof(slotRecord{}.client)]byte{}
	_ [40]byte              = [unsafe.Offsetof(slotRecord{}.opened)]byte{}
	_ [48]byte              = [unsafe.Offsetof(slotRecord{}.counts)]byte{}
	_ [104]byte             = [unsafe.Offsetof(slotRecord{}.cut)]byte{}
	_ [112]byte             = [unsafe.Offsetof(slotRecord{}.devices)]byte{}
	_ [24]byte              = [unsafe.Sizeof(deviceRecord{})]byte{}
	_ [8]byte               = [unsafe.Offsetof(deviceRecord{}.overhead)]byte{}
	_ [496]byte             = [unsafe.Offsetof(slotRecord{}.compress)]byte{}
	_ [512]byte             = [unsafe.Offsetof(slotRecord{}.name)]byte{}
	_ [560]byte             = [unsafe.Offsetof(slotRecord{}.reasonSize)]byte{}
	_ [568]byte             = [unsafe.Offsetof(slotRecord{}.reason)]byte{}
	_ [848]byte             = [unsafe.Offsetof(slotRecord{}.lent)]byte{}
	_ [976]byte             = [unsafe.Offsetof(slotRecord{}.ended)]byte{}
	_ [984]byte             = [unsafe.Offsetof(slotRecord{}.borrowed)]byte{}
	_ [992]byte             = [unsafe.Offsetof(slotRecord{}.cuts)]byte{}
	_ [1008]byte            = [unsafe.Offsetof(slotRecord{}.link)]byte{}
	_ [32]byte              = [unsafe.Offsetof(partFile{}.cap)]byte{}
	_ [160]byte             = [unsafe.Offsetof(partFile{}.debt)]byte{}
	_ [160 + pairSize]byte  = [unsafe.Offsetof(partFile{}.debited)]byte{}
	_ [416]byte             = [unsafe.Offsetof(partFile{}.excused)]byte{}
	_ [416 + pairSize]byte  = [unsafe.Offsetof(partFile{}.span)]byte{}
	_ [1024]byte            = [unsafe.Offsetof(partFile{}.slots)]byte{}
	_ [partSize]byte        = [unsafe.Sizeof(partFile{})]byte{}
)

// layout is the whole account. What it points to is gone when the account is closed.
func (a *File) layout() *accountFile { return (*accountFile)(unsafe.Pointer(&a.mem[0])) }

func (a *File) rec(slot int) *slotRecord { return &a.layout().slots[slot] }

func (p *Part) layout() *partFile { return (*partFile)(unsafe.Pointer(&p.mem[0])) }
