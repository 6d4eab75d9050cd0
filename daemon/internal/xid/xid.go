// Package xid reads from the kernel's log the errors that NVIDIA's driver has written there, its Xids, and says which of
// them an administrator has to deal with.
package xid

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

// KernelLog has the kernel's messages since the boot, one for each read (Documentation/ABI/testing/dev-kmsg in Linux).
const KernelLog = "/dev/kmsg"

// Age is how long an error that is not of class Repair is reported after it happened, unless the driver was loaded, or said that the
// GPU has recovered, since. One of class Repair is reported until then.
const Age = 24 * time.Hour

// Error is an Xid of a GPU.
type Error struct {
	PCI  string        // of the GPU, as 00000000:41:00.0
	Code int           // its number in NVIDIA's catalogue
	N    int           // how often it happened
	Last time.Duration // when it last happened, since the boot
}

// Log is what the kernel's log says.
type Log struct {
	// Errors are those still of interest, by GPU and number.
	Errors []Error
	// Whole: the log has all messages since the boot, or an administrator has cleared it, and it has all since then. The kernel overwrites
	// the oldest messages, so a log that is not whole may have lost an error.
	Whole bool
	// loaded says that the log has the loading of the driver, recovered of which GPUs it has that they need nothing any more.
	loaded    bool
	recovered map[string]bool
}

// Mended says that a GPU that had an error of class Repair at any time is well if it has none in Errors: whatever the log has lost is
// older than the record that says so.
func (l *Log) Mended(pci string) bool { return l.Whole || l.loaded || l.recovered[pci] }

// Read returns what the log at path says. now is the time since the boot. What came before the last `dmesg --clear` is left out.
func Read(path string, now time.Duration) (Log, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return Log{}, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(fd)
	l, err := read(file(fd), now)
	if err != nil {
		return Log{}, fmt.Errorf("%s: %w", path, err)
	}
	return l, nil
}

// device is an open /dev/kmsg: each Read is a record. Seek goes to the oldest record (SEEK_SET), or to the first after the last clear
// that is still there (SEEK_DATA).
type device interface {
	Read(p []byte) (int, error)
	Seek(whence int) error
}

type file int

func (f file) Read(p []byte) (int, error) { return unix.Read(int(f), p) }
func (f file) Seek(whence int) error {
	_, err := unix.Seek(int(f), 0, whence)
	return err
}

// maxRecords bounds the messages that are read, for a kernel that writes them as fast as they are read.
const maxRecords = 1 << 20

// read takes the records one by one until there are no more.
//
// The kernel numbers its records from 0. A log whose oldest record has a later number has lost some, unless it was cleared after
// that record: then the first one after the clear is not the oldest.
func read(d device, now time.Duration) (Log, error) {
	buf := make([]byte, 16<<10) // the kernel's own limit is 8 KiB
	oldest, _, err := next(d, buf)
	if err != nil {
		return Log{}, err
	}
	clearable := d.Seek(unix.SEEK_DATA) == nil // what cannot seek is read from its beginning
	l := log{errors: map[[2]string]Error{}, recovered: map[string]bool{}}
	whole := oldest == "" || number(oldest) == 0
	if oldest != "" && !clearable {
		l.add(oldest, now)
	}
	for i := range maxRecords {
		s, lost, err := next(d, buf)
		if err != nil {
			return Log{}, err
		}
		if i == 0 && clearable && oldest != "" && (s == "" || number(s) > number(oldest)) {
			whole = true
		}
		if lost {
			whole = false
		}
		if s == "" {
			return l.log(whole), nil
		}
		l.add(s, now)
	}
	return l.log(false), nil
}

// next is the next record, "" for none. lost says that the oldest were overwritten meanwhile.
func next(d device, buf []byte) (record string, lost bool, err error) {
	for {
		n, err := d.Read(buf)
		switch {
		case errors.Is(err, unix.EPIPE):
			lost = true
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN), err == nil && n <= 0:
			return "", lost, nil
		case err != nil:
			return "", lost, err
		default:
			return string(buf[:n]), lost, nil
		}
	}
}

// number is the sequence number of a record, that of the last there can be if it has none.
func number(s string) uint64 {
	fields := strings.SplitN(s, ",", 3)
	if len(fields) == 3 {
		if n, err := strconv.ParseUint(fields[1], 10, 64); err == nil {
			return n
		}
	}
	return math.MaxUint64
}

// log has what was read so far, its errors by GPU and number.
type log struct {
	errors    map[[2]string]Error
	loaded    bool
	recovered map[string]bool
}

func (l *log) add(s string, now time.Duration) {
	r, ok := parse(s)
	switch _, class := Describe(r.code); {
	case !ok:
	case r.loaded:
		l.loaded = true
		clear(l.errors)
	case r.recovered:
		l.recovered[r.pci] = true
		maps.DeleteFunc(l.errors, func(_ [2]string, e Error) bool { return e.PCI == r.pci })
	case class == Repair, now-r.at < Age:
		k := [2]string{r.pci, strconv.Itoa(r.code)}
		l.errors[k] = Error{PCI: r.pci, Code: r.code, N: l.errors[k].N + 1, Last: r.at}
	}
}

func (l *log) log(whole bool) Log {
	found := slices.SortedFunc(maps.Values(l.errors), func(a, b Error) int { return cmp.Or(strings.Compare(a.PCI, b.PCI), a.Code-b.Code) })
	return Log{Errors: found, Whole: whole, loaded: l.loaded, recovered: l.recovered}
}

// record is a message of the driver: that it was loaded, that a GPU has recovered, or an error.
type record struct {
	at                time.Duration // since the boot
	loaded, recovered bool
	pci               string
	code              int
}

// recoveryChanged is the Xid with which the driver, from release 560 on, says what a GPU needs after an error: nothing, a reset, a reboot.
const recoveryChanged = 154

var (
	// Only the beginning of the message is the driver's own. Later it may have the name of a program, which its user chooses; and the
	// messages of the kernel that begin with the name of a program have no more than 15 bytes of it.
	xid = pattern.New(`^NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?\): ([0-9]{1,4})(?:,|$)`)
	// loaded is printed by the proprietary and the open module.
	loaded    = pattern.New(`^NVRM: loading NVIDIA UNIX `)
	recovered = pattern.New(`GPU recovery action changed from 0x[0-9a-f]+ \([A-Za-z0-9 ]*\) to 0x0 \([A-Za-z0-9 ]*\)$`)
)

// parse reads a record of the kernel's log: "priority,sequence,microseconds,flags;message", then lines that begin with a space.
// The kernel escapes control characters in the message, and the priority says that the message is the kernel's: a program
// that writes to the log cannot have facility 0.
func parse(s string) (record, bool) {
	head, text, ok := strings.Cut(s, ";")
	fields := strings.Split(head, ",")
	if !ok || len(fields) < 4 {
		return record{}, false
	}
	priority, err := strconv.ParseUint(fields[0], 10, 32)
	if err != nil || priority>>3 != 0 {
		return record{}, false
	}
	us, err := strconv.ParseUint(fields[2], 10, 53)
	if err != nil {
		return record{}, false
	}
	r := record{at: time.Duration(us) * time.Microsecond}
	text, _, _ = strings.Cut(text, "\n")
	if loaded().MatchString(text) {
		r.loaded = true
		return r, true
	}
	m := xid().FindStringSubmatch(text)
	if m == nil {
		return record{}, false
	}
	r.pci = strings.ToLower(fmt.Sprintf("%08s:%s:%s.0", m[1], m[2], m[3]))
	r.code, _ = strconv.Atoi(m[4])
	r.recovered = r.code == recoveryChanged && recovered().MatchString(text)
	return r, true
}
