package ledger

// The walk over a file's pages that comes before anything else reads them. bbolt trusts
// its pages: it follows a page that refers to one above it for ever, and a length that
// lies out of its mapping. The file is read here instead, with every length checked and
// every page visited once. What passes is a finite tree of whole pages, which bbolt can
// then walk and check itself.
//
// The format of pages, little endian (bbolt's internal/common/page.go and bucket.go):
//
//	page     id u64, flags u16, count u16, overflow u32, then count elements
//	branch   pos u32, ksize u32, page u64; the key is at the element's start + pos
//	leaf     flags u32, pos u32, ksize u32, vsize u32; key and value as above
//	bucket   a leaf's value: root page u64, sequence u64; root 0: a page follows inline

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	bolt "go.etcd.io/bbolt"
)

const (
	pageHeader    = 16
	elementSize   = 16
	bucketHeader  = 16
	branchPage    = 0x01
	leafPage      = 0x02
	bucketElement = 0x01
	maxDepth      = 64 // of pages below each other; three hold a million records
)

// pageWalk is one walk.
type pageWalk struct {
	file *os.File
	size uint64 // of a page
	end  uint64 // the first page that is not the tree's, or not in the file
	seen map[uint64]bool
}

// checkPages returns an error unless the pages of the transaction are a tree.
func checkPages(tx *bolt.Tx, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return fmt.Errorf("ledger: %w", err)
	}
	size := uint64(tx.DB().Info().PageSize)
	end := uint64(min(tx.Size(), fi.Size())) / size // a file that was cut short has less than it says
	w := &pageWalk{file: f, size: size, end: end, seen: make(map[uint64]bool)}
	if err := w.page(uint64(tx.Cursor().Bucket().Root()), 0); err != nil {
		return fmt.Errorf("ledger %s: %w: %w; %s", path, ErrCorrupt, err, remedy)
	}
	return nil
}

// page visits a page of the file and all below it.
func (w *pageWalk) page(id uint64, depth int) error {
	if id < 2 || id >= w.end { // 0 and 1 are the meta pages
		return fmt.Errorf("page %d of %d", id, w.end)
	}
	var head [pageHeader]byte
	if _, err := w.file.ReadAt(head[:], int64(id*w.size)); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	more := uint64(binary.LittleEndian.Uint32(head[12:]))
	if have := binary.LittleEndian.Uint64(head[:]); have != id || more >= w.end-id {
		return fmt.Errorf("page %d says that it is page %d with %d more of %d", id, have, more, w.end)
	}
	for i := id; i <= id+more; i++ {
		if w.seen[i] {
			return fmt.Errorf("page %d is referred to twice", i)
		}
		w.seen[i] = true
	}
	b := make([]byte, (1+more)*w.size)
	if _, err := w.file.ReadAt(b, int64(id*w.size)); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	if err := w.elements(b, depth); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

// elements visits what a page in memory refers to.
func (w *pageWalk) elements(b []byte, depth int) error {
	if depth > maxDepth {
		return errors.New("too deep")
	}
	flags, count := binary.LittleEndian.Uint16(b[8:]), int(binary.LittleEndian.Uint16(b[10:]))
	if flags != branchPage && flags != leafPage || flags == branchPage && count == 0 {
		return fmt.Errorf("%d elements of kind %#x", count, flags)
	}
	if pageHeader+count*elementSize > len(b) {
		return fmt.Errorf("%d elements in %d bytes", count, len(b))
	}
	for i := range count {
		e := b[pageHeader+i*elementSize:]
		u := func(at int) uint64 { return uint64(binary.LittleEndian.Uint32(e[at:])) }
		if flags == branchPage {
			if u(0)+u(4) > uint64(len(e)) {
				return fmt.Errorf("element %d is longer than the page", i)
			}
			if err := w.page(binary.LittleEndian.Uint64(e[8:]), depth+1); err != nil {
				return err
			}
			continue
		}
		at, end := u(4)+u(8), u(4)+u(8)+u(12)
		if end > uint64(len(e)) {
			return fmt.Errorf("element %d is longer than the page", i)
		}
		if u(0)&bucketElement != 0 {
			if err := w.bucket(e[at:end], depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// bucket visits the pages of a bucket, whose description is v.
func (w *pageWalk) bucket(v []byte, depth int) error {
	if len(v) < bucketHeader {
		return fmt.Errorf("bucket of %d bytes", len(v))
	}
	if root := binary.LittleEndian.Uint64(v); root != 0 {
		return w.page(root, depth)
	}
	if v = v[bucketHeader:]; len(v) < pageHeader {
		return fmt.Errorf("bucket with a page of %d bytes", len(v))
	}
	return w.elements(v, depth)
}
