package audit

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// disk is one that fails: calls give errors or do half of what they shall, and when the power goes it has what was synced, and
// of the rest any sectors. A sync that fails takes what it did not write for written, as Linux does.
type disk struct {
	r      *rand.Rand
	faulty bool
	lied   bool
	states map[uint64]*onDisk // by inode
	faults map[string]int
}

// onDisk is what of a file has reached the disk.
type onDisk struct {
	data  []byte
	dirty [][2]int64 // from, to: what the next sync writes
}

type diskFile struct {
	*os.File
	d *disk
	s *onDisk
}

// fault says whether a call goes wrong now.
func (d *disk) fault(name string) bool {
	if !d.faulty || d.r.IntN(8) > 0 {
		return false
	}
	d.faults[name]++
	return true
}

func (d *disk) open(path string, flag int) (file, error) {
	if d.fault("open") {
		return nil, unix.EIO
	}
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	if d.states[st.Ino] == nil {
		d.states[st.Ino] = &onDisk{}
	}
	return &diskFile{f, d, d.states[st.Ino]}, nil
}

func (f *diskFile) Write(b []byte) (n int, err error) {
	at, err := f.Seek(0, 2)
	if err != nil {
		return 0, err
	}
	switch {
	case f.d.fault("no space"):
		return 0, unix.ENOSPC
	case f.d.fault("short write"):
		n, err = f.File.Write(b[:f.d.r.IntN(len(b))])
		if err == nil {
			err = unix.ENOSPC
		}
	case f.d.fault("i/o error"):
		return 0, unix.EIO
	default:
		n, err = f.File.Write(b)
	}
	f.s.dirty = append(f.s.dirty, [2]int64{at, at + int64(n)})
	return n, err
}

func (f *diskFile) WriteAt(b []byte, at int64) (n int, err error) {
	if f.d.fault("i/o error") {
		b, err = b[:f.d.r.IntN(len(b)+1)], unix.EIO
	}
	n, own := f.File.WriteAt(b, at)
	if own != nil {
		err = own
	}
	f.s.dirty = append(f.s.dirty, [2]int64{at, at + int64(n)})
	return n, err
}

func (f *diskFile) Truncate(size int64) error {
	if f.d.fault("truncate") {
		return unix.EIO
	}
	return f.File.Truncate(size)
}

func (f *diskFile) Sync() error {
	if f.d.fault("sync") {
		f.s.dirty = nil
		return unix.EIO
	}
	if f.d.lied && f.d.fault("lost sync") {
		f.s.dirty = nil
		return nil
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return err
	}
	f.s.write(b, f.s.dirty, nil)
	f.s.data, f.s.dirty = f.s.data[:min(len(b), len(f.s.data))], nil
	return nil
}

// write puts parts of a file's content on the disk: all of them, or those sectors that some allows.
func (s *onDisk) write(b []byte, parts [][2]int64, some func() bool) {
	const sector = 512
	for _, p := range parts {
		for at := p[0]; at < min(p[1], int64(len(b))); {
			to := min((at/sector+1)*sector, p[1], int64(len(b)))
			if some == nil || some() {
				if n := int(to) - len(s.data); n > 0 {
					s.data = append(s.data, make([]byte, n)...)
				}
				copy(s.data[at:to], b[at:to])
			}
			at = to
		}
	}
}

// powerLoss leaves in the files of a directory what is on the disk.
func (d *disk) powerLoss(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		b, err := os.ReadFile(path)
		must(t, err)
		var st unix.Stat_t
		must(t, unix.Stat(path, &st))
		s := d.states[st.Ino]
		s.write(b, s.dirty, func() bool { return d.r.IntN(2) == 0 })
		// The length may be there without the content.
		if n := len(b) - len(s.data); n > 0 && d.r.IntN(2) == 0 {
			s.data = append(s.data, make([]byte, n)...)
		}
		s.dirty = nil
		must(t, os.WriteFile(path, s.data, 0o600))
	}
}

// TestDiskFaults: calls fail in the middle, then the power does. A line that Write took is read until then; one that was there when
// Sync returned is read after it, unless the disk lied. No line is there that was not written, or twice, and the log goes on.
func TestDiskFaults(t *testing.T) {
	rounds := 100
	if v := os.Getenv("SLUICE_DAMAGE"); v != "" {
		n, err := strconv.Atoi(v)
		must(t, err)
		rounds = n
	}
	faults := map[string]int{}
	was := openFile
	defer func() { openFile = was }()
	kept, gone := 0, 0
	for round := range rounds {
		d := &disk{r: rand.New(rand.NewPCG(14, uint64(round))), lied: round%4 == 3, states: map[uint64]*onDisk{}, faults: faults}
		openFile = d.open
		dir := filepath.Join(t.TempDir())
		p := filepath.Join(dir, "audit.log")
		o := Options{MaxSize: 3 << 10, Keep: 100, Log: slog.New(slog.DiscardHandler)}
		l, err := Open(p, o)
		must(t, err)
		taken, safe := []string{}, 0 // names of the lines, and how many of them must be on the disk
		write := func(i int) error {
			name := fmt.Sprintf("%d-%d", round, i)
			err := l.Write(Event{Event: []string{Grant, SessionEnd, Release}[d.r.IntN(3)], Lease: name, Reason: strings.Repeat("x", d.r.IntN(700))})
			if err == nil {
				taken = append(taken, name)
			}
			return err
		}
		d.faulty = true
		for i := range 60 {
			_ = write(i)
			if d.r.IntN(5) == 0 && l.Sync() == nil {
				safe = len(taken)
			}
		}
		got := names(t, p)
		if !slices.Equal(got, taken) {
			t.Fatalf("round %d: before the power loss %d lines are read, %d were taken", round, len(got), len(taken))
		}
		d.powerLoss(t, dir)
		d.faulty = false
		if l, err = Open(p, o); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		after := names(t, p)
		kept, gone = kept+len(after), gone+len(taken)-len(after)
		for i, name := range taken {
			if i < safe && !d.lied && !slices.Contains(after, name) {
				t.Errorf("round %d: line %d of %d that were synced is lost", round, i, safe)
			}
		}
		for _, name := range after {
			if !slices.Contains(taken, name) {
				t.Errorf("round %d: line %q was not taken", round, name)
			}
		}
		must(t, write(1000))
		must(t, l.Sync())
		if now := names(t, p); !slices.Equal(now, append(after, fmt.Sprintf("%d-1000", round))) {
			t.Errorf("round %d: afterwards %d lines and a new one are %d", round, len(after), len(now))
		}
		must(t, l.Close())
	}
	t.Logf("%d disks: %d lines read after the power loss, %d not; faults %v", rounds, kept, gone, faults)
	if len(faults) != 7 || kept == 0 || gone == 0 {
		t.Error("the disks are all alike")
	}
}

// names are the lines' leases. Their numbers grow.
func names(t *testing.T, path string) (all []string) {
	t.Helper()
	last := uint64(0)
	for _, e := range lines(t, path) {
		if e.Seq <= last {
			t.Errorf("line %d after line %d", e.Seq, last)
		}
		last, all = e.Seq, append(all, e.Lease)
	}
	return all
}

// TestZeros: a power loss may leave any length of zeros where lines were.
func TestZeros(t *testing.T) {
	p := filepath.Join(t.TempDir(), "audit.log")
	for i, n := range []int{1, 100, 1000, 2*maxLine - 2, 2 * maxLine, 1 << 20, 3 << 20} {
		l, err := Open(p, Options{})
		must(t, err)
		must(t, l.Write(Event{Event: Grant, Lease: fmt.Sprint(i), Owner: "o"}))
		if got := names(t, p); len(got) != i+1 {
			t.Fatalf("%d lines of %d", len(got), i+1)
		}
		if has, err := l.Has(Grant, fmt.Sprint(i), "o", 0); !has || err != nil {
			t.Error(has, err)
		}
		must(t, l.Close())
		f, err := os.OpenFile(p, os.O_APPEND|os.O_WRONLY, 0)
		must(t, err)
		_, err = f.Write(make([]byte, n))
		must(t, err)
		must(t, f.Close())
	}
}
