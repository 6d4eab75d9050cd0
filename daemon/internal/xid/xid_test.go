package xid

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParse(t *testing.T) {
	const gpu = "00000000:3b:00.0"
	for _, c := range []struct {
		line string
		want record // none: no message of the driver
	}{
		{"3,1200,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n", record{at: 5 * time.Second, pci: gpu, code: 79}},
		{"3,1200,5000000,-,caller=T77;NVRM: Xid (PCI:0000:3B:00): 48, pid=7, An uncorrectable double bit error\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n", record{at: 5 * time.Second, pci: gpu, code: 48}},
		{"4,1,2,c;NVRM: Xid (0000:3b:00): 14, Channel 00000001", record{at: 2 * time.Microsecond, pci: gpu, code: 14}},
		{"4,1,2,-;NVRM: Xid (PCI:00010000:3b:00.0): 63", record{at: 2 * time.Microsecond, pci: "00010000:3b:00.0", code: 63}},
		{"6,1,2,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", record{at: 2 * time.Microsecond, loaded: true}},
		{"6,1,2,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06", record{at: 2 * time.Microsecond, loaded: true}},
		{"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)\n", record{at: 2 * time.Microsecond, pci: gpu, code: 154}},
		{"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)\n", record{at: 2 * time.Microsecond, pci: gpu, code: 154, recovered: true}},

		// The name of a program that a tenant has chosen, in the driver's message and at the beginning of the kernel's.
		{`3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=9, name=): 79, NVRM: X, Ch 00000008`, record{at: 2 * time.Microsecond, pci: gpu, code: 31}},
		{`3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 13, pid=9, name=x\x0aNVRM: Xid (PC`, record{at: 2 * time.Microsecond, pci: gpu, code: 13}},
		{`3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 13, name=GPU recovery action changed from 0x1 (a) to 0x0 (None)`, record{at: 2 * time.Microsecond, pci: gpu, code: 13}},
		{"6,1,2,-;NVRM: Xid (PCI:[4711]: segfault at 0 ip 0 sp 0 error 4", record{}},
		{"6,1,2,-;NVRM: loading N[4711]: segfault at 0 ip 0 sp 0 error 4", record{}},
		{"6,1,2,-;x\n NVRM: Xid (PCI:0000:3b:00): 79, y", record{}},
		{"6,1,2,-; NVRM: Xid (PCI:0000:3b:00): 79, y", record{}},
		// Written by a program, to /dev/kmsg: its facility is not 0.
		{"11,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", record{}},
		{"12,1,2,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module", record{}},

		{"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 790000, x", record{}},
		{"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): -79, x", record{}},
		{"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79 x", record{}},
		{"3,1,2,-;NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d", record{}},
		{"3,1,-2,-;NVRM: Xid (PCI:0000:3b:00): 79, x", record{}},
		{"3,1,99999999999999999999,-;NVRM: Xid (PCI:0000:3b:00): 79, x", record{}},
		{"x,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, x", record{}},
		{"3,1;NVRM: Xid (PCI:0000:3b:00): 79, x", record{}},
		{"", record{}},
		{";", record{}},
	} {
		if got, ok := parse(c.line); got != c.want || ok != (c.want != record{}) {
			t.Errorf("%q: %+v, %v; want %+v", c.line, got, ok, c.want)
		}
	}
}

// FuzzParse: whatever a message has after the part that is the driver's own, the GPU and the number stay the same, and what is
// read is well-formed.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"3,1200,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=9, name=x", "6,1,2,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
		"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", ";", "\xff,,;\n",
	} {
		f.Add(s, "): 48, NVRM: Xid (PCI:0000:41:00): 95,\n")
	}
	pci := regexp.MustCompile(`^[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`)
	f.Fuzz(func(t *testing.T, s, tail string) {
		r, ok := parse(s)
		switch {
		case !ok:
			if r != (record{}) {
				t.Errorf("%q: %+v of no message", s, r)
			}
			return
		case r.at < 0, r.code < 0 || r.code > 9999, r.loaded == pci.MatchString(r.pci), r.recovered && r.code != recoveryChanged:
			t.Errorf("%q: %+v", s, r)
		}
		if after, ok := parse(s + "," + tail); !ok || after.pci != r.pci || after.code != r.code || after.loaded != r.loaded || after.at != r.at {
			t.Errorf("%q and then %q: %+v, without it %+v", s, tail, after, r)
		}
	})
}

const hour = "3600000000" // microseconds

// kmsg is a /dev/kmsg with these records, of which an administrator has cleared the first.
type kmsg struct {
	records []string
	cleared int
	at      int
	fails   []error // of the next reads
	noSeek  bool
}

func (k *kmsg) Read(p []byte) (int, error) {
	if len(k.fails) > 0 {
		err := k.fails[0]
		k.fails = k.fails[1:]
		if err != nil {
			return -1, err
		}
	}
	if k.at == len(k.records) {
		return -1, unix.EAGAIN
	}
	k.at++
	return copy(p, k.records[k.at-1]+"\n"), nil
}

func (k *kmsg) Seek(whence int) error {
	if k.noSeek {
		return unix.ESPIPE
	}
	if k.at = 0; whence == unix.SEEK_DATA {
		k.at = k.cleared
	}
	return nil
}

func TestRead(t *testing.T) {
	const a, b = "00000000:3b:00.0", "00000000:41:00.0"
	const day = 24 * time.Hour
	const load = ",-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550"
	const recovery = ",-;NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)"
	first := []string{
		"3,0,0,-;NVRM: Xid (PCI:0000:3b:00): 79, x", "3,1,0,-;NVRM: Xid (PCI:0000:3b:00): 94, x", "3,2," + hour + ",-;NVRM: Xid (PCI:0000:41:00): 48, x", "6,3," + hour + ",-;usb 1-1: new device",
		"3,4," + hour + ",-;NVRM: Xid (PCI:0000:3b:00): 79, x", "3,5," + hour + ",-;NVRM: Xid (PCI:0000:3b:00): 31, x",
	}
	with := func(more ...string) []string { return append(append([]string{}, first...), more...) }
	repair := []Error{{a, 79, 2, time.Hour}, {b, 48, 1, time.Hour}}
	all := []Error{{a, 31, 1, time.Hour}, {a, 79, 2, time.Hour}, {a, 94, 1, 0}, {b, 48, 1, time.Hour}}
	for what, c := range map[string]struct {
		now    time.Duration
		log    kmsg
		want   []Error
		mended string // whether GPUs a and b are well if they have no error here
	}{
		"since the boot":                   {2 * time.Hour, kmsg{records: first}, all, "ab"},
		"a warning is too old":             {day, kmsg{records: first}, []Error{{a, 31, 1, time.Hour}, repair[0], repair[1]}, "ab"},
		"what needs a repair is never old": {1000 * day, kmsg{records: first}, repair, "ab"},
		"the driver was loaded":            {2 * time.Hour, kmsg{records: with("6,6," + hour + load)}, nil, "ab"},
		"and failed again":                 {2 * time.Hour, kmsg{records: with("6,6,"+hour+load, "3,7,"+hour+",-;NVRM: Xid (PCI:0000:41:00): 48, x")}, repair[1:], "ab"},
		"one GPU has recovered":            {2 * time.Hour, kmsg{records: with("3,6," + hour + recovery)}, repair[1:], "ab"},
		"nothing was written":              {day, kmsg{}, nil, "ab"},
		"all was cleared":                  {day, kmsg{records: first, cleared: 6}, nil, "ab"},
		"the first was cleared":            {2 * time.Hour, kmsg{records: first, cleared: 5}, all[:1], "ab"},

		"overwritten":                             {day, kmsg{records: first[3:4]}, nil, ""},
		"overwritten, and then cleared":           {day, kmsg{records: with("6,6,1,-;x")[3:], cleared: 3}, nil, "ab"},
		"cleared, and then overwritten":           {day, kmsg{records: first[3:4], cleared: 0}, nil, ""},
		"overwritten, and an error is left":       {1000 * day, kmsg{records: first[2:4]}, repair[1:], ""},
		"overwritten, then the driver was loaded": {day, kmsg{records: with("6,6," + hour + load)[3:]}, nil, "ab"},
		"overwritten, then one has recovered":     {1000 * day, kmsg{records: with("3,6," + hour + recovery)[3:]}, nil, "a"},
		"overwritten before it was read":          {2 * time.Hour, kmsg{records: first, fails: []error{unix.EPIPE, unix.EINTR}}, all, "ab"},
		"overwritten while it was read":           {2 * time.Hour, kmsg{records: first, fails: []error{nil, nil, unix.EPIPE}}, all, ""},
		"a record without a number":               {day, kmsg{records: []string{"x"}}, nil, ""},
		"no seek":                                 {2 * time.Hour, kmsg{records: first, noSeek: true}, all, "ab"},
		"no seek, overwritten":                    {2 * time.Hour, kmsg{records: first[3:4], noSeek: true}, nil, ""},
	} {
		got, err := read(&c.log, c.now)
		mended := ""
		for name, pci := range map[string]string{"a": a, "b": b} {
			if got.Mended(pci) {
				mended += name
			}
		}
		if mended == "ba" {
			mended = "ab"
		}
		if err != nil || mended != c.mended || len(got.Errors)+len(c.want) > 0 && !reflect.DeepEqual(got.Errors, c.want) {
			t.Errorf("%s: %+v, mended %q, %v; want %+v, %q", what, got, mended, err, c.want, c.mended)
		}
	}
	for _, fails := range [][]error{{unix.EIO}, {nil, nil, unix.EIO}} {
		if _, err := read(&kmsg{records: first, fails: fails}, 0); !errors.Is(err, unix.EIO) {
			t.Errorf("a log that fails: %v", err)
		}
	}
	if got, err := read(&endless{record: first[0]}, time.Hour); err != nil || len(got.Errors) != 1 || got.Errors[0].N != maxRecords || got.Whole {
		t.Errorf("a log without end: %+v, %v", got, err)
	}
}

type endless struct{ record string }

func (e *endless) Read(p []byte) (int, error) { return copy(p, e.record), nil }
func (e *endless) Seek(int) error             { return nil }

func TestReadFile(t *testing.T) {
	log := filepath.Join(t.TempDir(), "kmsg")
	if _, err := Read(log, time.Hour); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), log) {
		t.Errorf("a log that is not there: %v", err)
	}
	if err := os.WriteFile(log, []byte("3,0,0,-;NVRM: Xid (PCI:0000:3b:00): 79, x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(log, time.Hour); err != nil || len(got.Errors) != 1 || got.Errors[0].Code != 79 || !got.Whole {
		t.Errorf("%+v, %v", got, err)
	}
	// The kernel's own log, if we may read it: whatever it has, and whether or not it can be read, it ends.
	_, _ = Read(KernelLog, time.Hour)
}

// No Xid drains a node that NVIDIA's catalogue has as one of programs.
func TestCatalogue(t *testing.T) {
	classes := map[Class][]int{
		Program: {1, 8, 11, 12, 13, 31, 32, 43, 45, 60, 66, 67, 68, 69, 70, 80, 9999},
		Watch:   {46, 54, 63, 92, 94, 109, 154},
		Repair:  {48, 62, 64, 74, 79, 95, 119, 120, 140, 143},
	}
	for class, codes := range classes {
		for _, code := range codes {
			if what, got := Describe(code); got != class || (what == "") != (class == Program) {
				t.Errorf("Xid %d: %q, class %d, want %d", code, what, got, class)
			}
		}
	}
}

// The page of findings lists the Xids that drain a node: those of class Repair, each once.
func TestCataloguePage(t *testing.T) {
	page, err := os.ReadFile("../../../docs/health.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| Xid | meaning |")
	listed := map[string]int{}
	for _, row := range regexp.MustCompile(`(?m)^\| ([0-9, ]+) \|`).FindAllStringSubmatch(table, -1) {
		for _, code := range strings.Split(row[1], ", ") {
			listed[code]++
		}
	}
	want := map[string]int{}
	for code, c := range catalogue {
		if c.class == Repair {
			want[strconv.Itoa(code)] = 1
		}
	}
	if !reflect.DeepEqual(listed, want) {
		t.Errorf("docs/health.md lists %v, the catalogue has %v", listed, want)
	}
}
