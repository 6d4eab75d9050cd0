package disktest

import (
	"math/rand/v2"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// sector is what a disk writes whole, in bytes.
const sector = 512

// A Disk knows what of one file has reached the disk. A sync that fails has written any part of what it was to write, and takes the rest
// for written, as Linux does.
type Disk struct {
	path string
	fail func(Call) Fault

	mu    sync.Mutex
	r     *rand.Rand
	data  []byte
	dirty map[int]bool // sectors, by offset
	again unix.Errno   // what the write fails with that follows one which was made by half
}

// NewDisk is the disk that has all of the file at path so far. fail gives faults to its calls; Short with an error has the next write fail.
func NewDisk(t testing.TB, path string, r *rand.Rand, fail func(Call) Fault) *Disk {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return &Disk{path: path, fail: fail, r: r, data: b, dirty: make(map[int]bool)}
}

// Judge is for Run and Here. It may be used by several goroutines.
func (d *Disk) Judge(c Call) Fault {
	if c.Path != d.path || c.FD < 0 {
		return Fault{}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	sync := c.Name == "fdatasync" || c.Name == "fsync"
	if c.Name == "pwrite64" && d.again != 0 {
		f := Fault{Err: d.again}
		d.again = 0
		return f
	}
	f, n := d.fail(c), c.Len
	switch {
	case c.Name == "pwrite64" && f.Short:
		n /= 2
		d.again, f.Err = f.Err, 0
	case f.Err != 0 || f.Short:
		if sync {
			d.sync(c.FD, func() bool { return d.r.IntN(2) == 0 })
		}
		return f
	}
	if c.Name == "pwrite64" {
		for at := int(c.At) / sector * sector; at < int(c.At)+n; at += sector {
			d.dirty[at] = true
		}
	} else if sync {
		d.sync(c.FD, func() bool { return true })
	}
	return f
}

// sync has those dirty sectors of a file reach the disk that some allows.
func (d *Disk) sync(fd int, some func() bool) {
	b := make([]byte, 1<<20)
	n, err := unix.Pread(fd, b, 0)
	if err != nil || n == len(b) {
		panic("disktest: the file cannot be read, or has more than a megabyte")
	}
	d.data = d.put(b[:n], some)
	clear(d.dirty)
}

func (d *Disk) put(b []byte, some func() bool) []byte {
	data := append([]byte(nil), d.data...)
	if n := len(b) - len(data); n > 0 {
		data = append(data, make([]byte, n)...)
	}
	for at := 0; at < len(b); at += sector { // in order, so that a seed gives one result
		if d.dirty[at] && some() {
			copy(data[at:min(at+sector, len(data))], b[at:])
		}
	}
	return data
}

// PowerLoss is what the disk has of the file if the power goes now: what was synced, and of the rest any part.
func (d *Disk) PowerLoss(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile(d.path)
	if err != nil {
		t.Error(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.put(b, func() bool { return d.r.IntN(2) == 0 })
}
