package audit

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// The log is read file by file, the oldest first, and its three series are put into one order by their lines' numbers. It may be
// written and rotated meanwhile.

// Read calls f for every line of the log at path in the order of their numbers, until
// f returns false. Lines that are not whole are skipped.
func Read(path string, f func(*Event) bool) error {
	return Select(context.Background(), path, nil, f)
}

// LeaseOf is the lease of a line that has not been decoded, "" if it has none.
func LeaseOf(line []byte) string {
	_, rest, _ := bytes.Cut(line, []byte(`"lease":"`))
	id, _, _ := bytes.Cut(rest, []byte{'"'})
	return string(id)
}

// Select is Read for the lines for which want returns true, or for all if want is nil.
// want is given each line before it is decoded, and may return true for more lines than
// f is interested in. Select returns ctx's error once ctx ends.
func Select(ctx context.Context, path string, want func(line []byte) bool, f func(*Event) bool) error {
	return Query(ctx, path, want, f, func(Damage) {})
}

// Damage is a line that cannot be read. A crash leaves one where a line was being written, or a disk that fails.
type Damage struct {
	File string
	Line int // from 1
}

// Query is Select, and tells of lines that are damaged, which it skips.
func Query(ctx context.Context, path string, want func(line []byte) bool, f func(*Event) bool, damaged func(Damage)) error {
	if want == nil {
		want = every
	}
	var errs []error
	var heads []*head
	for _, c := range classes {
		h := &head{}
		h.next, h.stop = iter.Pull((&series{path: path + string(c)}).all(ctx, want, damaged, &h.err))
		defer h.stop()
		if h.step() {
			heads = append(heads, h)
		}
		errs = append(errs, h.err)
	}
	for len(heads) > 0 {
		first := slices.MinFunc(heads, func(a, b *head) int { return cmp.Compare(a.at.Seq, b.at.Seq) })
		if !f(first.at) {
			return nil
		}
		if !first.step() {
			errs = append(errs, first.err)
			heads = slices.DeleteFunc(heads, func(h *head) bool { return h == first })
		}
	}
	return errors.Join(errs...)
}

func every([]byte) bool { return true }

// head is a series that is being read, and its next line.
type head struct {
	at   *Event
	next func() (*Event, bool)
	stop func()
	err  error
}

func (h *head) step() (ok bool) {
	h.at, ok = h.next()
	return ok
}

// all are the lines of a series, the older files' first.
func (s *series) all(ctx context.Context, want func([]byte) bool, damaged func(Damage), err *error) iter.Seq[*Event] {
	return func(yield func(*Event) bool) {
		files, e := s.files()
		defer func() {
			for _, f := range files {
				_ = f.Close()
			}
		}()
		if e != nil {
			*err = e
			return
		}
		more := true
		for _, f := range slices.Backward(files) {
			bad := func(n int) { damaged(Damage{f.Name(), n}) }
			if *err = scanFile(ctx, f, 0, want, func(e *Event) bool { more = yield(e); return more }, bad); *err != nil || !more {
				return
			}
		}
	}
}

// files opens the files of a series, the newest first: a file that is rotated meanwhile is met again by its later
// name, and left out there. In the other order it would be missed.
func (s *series) files() (out []*os.File, err error) {
	entries, err := os.ReadDir(filepath.Dir(s.path))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	numbers := []int{0}
	for _, e := range entries { // a rotation that failed may have left out a number
		n, bad := strconv.Atoi(strings.TrimPrefix(e.Name(), filepath.Base(s.path)+"."))
		if bad == nil && n > 0 && e.Name() == filepath.Base(s.name(n)) {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	numbers = append(numbers, numbers[len(numbers)-1]+1) // the oldest of all, if it is renamed now
	var seen []os.FileInfo
	for _, n := range numbers {
		f, err := os.Open(s.name(n))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return out, fmt.Errorf("audit log: %w", err)
		}
		fi, err := f.Stat()
		if err != nil || !fi.Mode().IsRegular() || slices.ContainsFunc(seen, func(o os.FileInfo) bool { return os.SameFile(o, fi) }) {
			_ = f.Close()
			continue
		}
		seen, out = append(seen, fi), append(out, f)
	}
	return out, nil
}

// scan reads the lines of a file that are wanted, or those of its last part of the size
// last if that is not 0.
func scan(ctx context.Context, path string, last int64, want func(line []byte) bool, f func(*Event) bool) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	defer file.Close()
	return scanFile(ctx, file, last, want, f, func(int) {})
}

// whole says whether a line looks like one of the log's. It is asked of the lines that nobody wants: to decode all would take long.
func whole(b []byte) bool {
	return bytes.HasPrefix(b, []byte(`{"time":"`)) && bytes.HasSuffix(b, []byte("}")) && bytes.IndexByte(b, 0) < 0
}

// scanFile is scan of an open file. bad is called with the number of each line that is damaged.
func scanFile(ctx context.Context, file *os.File, last int64, want func(line []byte) bool, f func(*Event) bool, bad func(n int)) error {
	fi, err := file.Stat()
	if err != nil {
		return fmt.Errorf("audit log: %w", err)
	}
	skip := false
	if last > 0 && fi.Size() > last {
		if _, err := file.Seek(-last, io.SeekEnd); err != nil {
			return fmt.Errorf("audit log %s: %w", file.Name(), err)
		}
		skip = true // the first line is likely not whole
	}
	r := bufio.NewReaderSize(file, 2*maxLine)
	long := false
	for n := 1; ; n++ {
		if n%256 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		b, err := r.ReadSlice('\n')
		if err != nil && err != io.EOF && err != bufio.ErrBufferFull {
			return fmt.Errorf("audit log %s: %w", file.Name(), err)
		}
		end := err == io.EOF
		if err == bufio.ErrBufferFull { // longer than any line: what a crash of the machine has left
			skip, long = true, true
			n--
			continue
		}
		if b = bytes.TrimSpace(b); !skip && len(b) > 0 {
			if !want(b) {
				if !whole(b) && !end { // the last line may be under way
					bad(n)
				}
			} else {
				var e Event
				if json.Unmarshal(b, &e) != nil {
					if !end {
						bad(n)
					}
				} else if !f(&e) {
					return nil
				}
			}
		} else if long {
			bad(n)
		}
		if skip, long = false, false; end {
			return nil
		}
	}
}
