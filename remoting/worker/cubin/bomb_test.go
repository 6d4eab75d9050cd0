package cubin

import (
	"bytes"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// allocated is what f has allocated, in bytes, whether it was freed since or not.
func allocated(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// An image that is small and says that it is large is refused before it is unpacked. One within the bounds
// is read without a copy of what is unpacked.
func TestBombs(t *testing.T) {
	w, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest))
	if err != nil {
		t.Fatal(err)
	}
	head := ".version 8.0\n.target sm_52\n.global .b8 x"
	text := func(part string, n int) []byte {
		return append([]byte(head), bytes.Repeat([]byte(part), n/len(part))...)
	}
	const most, over = 16 << 20, 65 << 20
	for _, c := range []struct {
		name  string
		kind  uint16
		plain func(n int) []byte
	}{
		{"PTX of dots", kindPTX, func(n int) []byte { return text(" .", n) }},
		{"PTX of words", kindPTX, func(n int) []byte { return text(" a", n) }},
		{"PTX of declarations", kindPTX, func(n int) []byte { return text(";.global .b8 y", n) }},
		{"PTX of dimensions", kindPTX, func(n int) []byte { return text("[1]", n) }},
		{"PTX of comments", kindPTX, func(n int) []byte { return text("/**/", n) }},
		{"cubin of zeroes", kindELF, func(n int) []byte { return make([]byte, n) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain := c.plain(most)
			image := container(fatEntry(c.kind, 52, flagZstd, w.EncodeAll(plain, nil), len(plain)))
			began := time.Now()
			took := allocated(func() {
				if _, err := Variables(image, 52); err != nil {
					t.Error(err)
				}
			})
			if took > most+most/4 {
				t.Errorf("%d bytes are allocated for %d", took, most)
			}
			t.Logf("%d MiB from %d bytes in %v, %d MiB allocated", most>>20, len(image), time.Since(began), took>>20)
			// The header lies, or it does not: what counts is what it says.
			for _, plain := range []int{over, 1 << 40} {
				image := container(fatEntry(c.kind, 52, flagZstd, w.EncodeAll(make([]byte, 1<<20), nil), plain))
				if took := allocated(func() {
					if _, err := Variables(image, 52); !errors.Is(err, ErrTooLarge) {
						t.Errorf("%d bytes from %d: %v", plain, len(image), err)
					}
				}); took > 1<<20 {
					t.Errorf("%d bytes are allocated to refuse %d", took, plain)
				}
			}
			// Less than what comes out.
			liar := container(fatEntry(c.kind, 52, flagZstd, w.EncodeAll(plain, nil), 1<<20))
			if took := allocated(func() { _, _ = Variables(liar, 52) }); took > 16<<20 {
				t.Errorf("%d bytes are allocated for 1 MiB", took)
			}
		})
	}
}

// Thousands of sections that share one name as long as the file cost no more than their table.
func TestLongNames(t *testing.T) {
	const sections, names = 2000, 4 << 20
	b := make([]byte, 64+64*sections, 64+64*sections+names)
	copy(b, "\x7fELF\x02\x01\x01")
	le.PutUint64(b[40:], 64)
	le.PutUint16(b[58:], 64)
	le.PutUint16(b[60:], sections)
	le.PutUint16(b[62:], 1)
	le.PutUint64(b[64+64+24:], uint64(len(b)))
	le.PutUint64(b[64+64+32:], names)
	b = append(b, bytes.Repeat([]byte{'A'}, names-1)...)
	b = append(b, 0)
	if took := allocated(func() {
		if n := variablesOf(t, b, 90); n != 0 {
			t.Errorf("%d bytes of variables", n)
		}
	}); took > 1<<20 {
		t.Errorf("%d bytes are allocated", took)
	}
}
