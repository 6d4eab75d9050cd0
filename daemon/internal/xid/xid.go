// Package xid reads from the kernel's log the errors that NVIDIA's driver has written there, its Xids, and says which of
// them an administrator has to deal with.
package xid

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// KernelLog has the kernel's messages since the boot, one for each read (Documentation/ABI/testing/dev-kmsg in Linux).
const KernelLog = "/dev/kmsg"

// Age is how long an error is reported after it happened, unless the driver was loaded, or said that the GPU has recovered, since.
const Age = 24 * time.Hour

// Error is an Xid of a GPU.
type Error struct {
	PCI  string        // of the GPU, as 00000000:41:00.0
	Code int           // its number in NVIDIA's catalogue
	N    int           // how often it happened
	Last time.Duration // when it last happened, since the boot
}

// Read returns the errors in the log at path that are still of interest, by GPU and number. now is the time since the boot. What
// came before the last `dmesg --clear` is left out.
func Read(path string, now time.Duration) ([]Error, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(fd)
	_, _ = unix.Seek(fd, 0, unix.SEEK_DATA) // after the last clear; what cannot seek is read from its beginning
	found, err := read(func(p []byte) (int, error) { return unix.Read(fd, p) }, now)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return found, nil
}

// maxRecords bounds the messages that are read, for a kernel that writes them as fast as they are read.
const maxRecords = 1 << 20

// read takes the records one by one until there are no more.
func read(next func([]byte) (int, error), now time.Duration) ([]Error, error) {
	l := log{}
	buf := make([]byte, 16<<10) // the kernel's own limit is 8 KiB
	for range maxRecords {
		n, err := next(buf)
		switch {
		case errors.Is(err, unix.EPIPE), errors.Is(err, unix.EINTR): // the oldest records were overwritten meanwhile
			continue
		case errors.Is(err, unix.EAGAIN), err == nil && n <= 0:
			return l.errors(), nil
		case err != nil:
			return nil, err
		}
		if r, ok := parse(string(buf[:n])); ok {
			l.add(r, now)
		}
	}
	return l.errors(), nil
}

// log has the errors so far, by GPU and number.
type log map[[2]string]Error

func (l log) add(r record, now time.Duration) {
	switch {
	case r.loaded:
		clear(l)
	case r.recovered:
		maps.DeleteFunc(l, func(_ [2]string, e Error) bool { return e.PCI == r.pci })
	case now-r.at < Age:
		k := [2]string{r.pci, strconv.Itoa(r.code)}
		l[k] = Error{PCI: r.pci, Code: r.code, N: l[k].N + 1, Last: r.at}
	}
}

func (l log) errors() []Error {
	return slices.SortedFunc(maps.Values(l), func(a, b Error) int { return cmp.Or(strings.Compare(a.PCI, b.PCI), a.Code-b.Code) })
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
	xid = regexp.MustCompile(`^NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?\): ([0-9]{1,4})(?:,|$)`)
	// loaded is printed by the proprietary and the open module.
	loaded    = regexp.MustCompile(`^NVRM: loading NVIDIA UNIX `)
	recovered = regexp.MustCompile(`GPU recovery action changed from 0x[0-9a-f]+ \([A-Za-z0-9 ]*\) to 0x0 \([A-Za-z0-9 ]*\)$`)
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
	if loaded.MatchString(text) {
		r.loaded = true
		return r, true
	}
	m := xid.FindStringSubmatch(text)
	if m == nil {
		return record{}, false
	}
	r.pci = strings.ToLower(fmt.Sprintf("%08s:%s:%s.0", m[1], m[2], m[3]))
	r.code, _ = strconv.Atoi(m[4])
	r.recovered = r.code == recoveryChanged && recovered.MatchString(text)
	return r, true
}
