package worker

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// contentSession is a session whose worker stores content in dir.
type contentSession struct {
	*conn
	dir string
}

func startContent(t testing.TB, bounds store.Bounds) *contentSession {
	t.Helper()
	k := &contentSession{dir: filepath.Join(t.TempDir(), "content")}
	_, addr := startWorker(t, func(c *Config) { c.Session.Content, c.Session.ContentBounds = k.dir, bounds })
	k.conn = dial(t, addr, [16]byte{})
	if r := k.wait(wire.OpCtxActivate, 0, u32(0)); r.result != 0 {
		t.Fatal(r.result)
	}
	return k
}

func pieceName(b []byte) []byte {
	sum := sha256.Sum256(b)
	return cat(sum[:], u32(uint32(len(b))), u32(0))
}

// find asks for pieces, and gives the answer's bits.
func (k *contentSession) find(pieces ...[]byte) uint32 {
	k.t.Helper()
	parts := [][]byte{u32(uint32(len(pieces))), u32(1)}
	for _, b := range pieces {
		parts = append(parts, pieceName(b))
	}
	r := k.wait(wire.OpContentFind, 1, parts...)
	var m wire.ContentFindReply
	d := wire.NewDecoder(r.payload)
	m.Decode(d)
	if r.result != 0 || d.Done() != nil {
		k.t.Fatalf("CONTENT_FIND: %d", r.result)
	}
	return m.Found
}

// keep copies b to dst as a piece, in frames of 1 MiB in the order given.
func (k *contentSession) keep(dst uint64, b []byte, order ...int) {
	k.oneway(wire.OpContentKeep, u64(dst), u32(uint32(len(b))), u32(0))
	k.copyParts(dst, b, order...)
}

func (k *contentSession) copyParts(dst uint64, b []byte, order ...int) {
	const part = 1 << 20
	if order == nil {
		for i := range (len(b) + part - 1) / part {
			order = append(order, i)
		}
	}
	for _, i := range order {
		k.oneway(wire.OpCopyIn, u64(dst+uint64(i)*part), u32(0), u32(0), b[i*part:min(len(b), (i+1)*part)])
	}
}

func (k *contentSession) stored(dst uint64, b []byte) {
	sum := sha256.Sum256(b)
	k.oneway(wire.OpCopyInStored, u64(dst), sum[:], u32(0), u32(0), u32(uint32(len(b))), u32(0))
}

func (k *contentSession) file(b []byte) string {
	return filepath.Join(k.dir, fmt.Sprintf("%x", sha256.Sum256(b)))
}

// await waits until a piece has its name in the store, and the mark that it has been hashed, which comes last.
func (k *contentSession) await(b []byte) {
	k.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := unix.Getxattr(k.file(b), "user.sluice.checked", make([]byte, 200)); err == nil || errors.Is(err, unix.ENOTSUP) {
			return
		}
		if time.Now().After(end) {
			k.t.Fatal("a piece is not stored")
		}
	}
}

func (k *contentSession) expect(dst uint64, b []byte, what string) {
	k.t.Helper()
	if got := k.copyOut(dst, len(b), 0, 1); !bytes.Equal(got, b) {
		k.t.Errorf("%s: other bytes have arrived", what)
	}
}

func (k *contentSession) mustAlloc(n int) uint64 {
	k.t.Helper()
	p, rc := k.alloc(uint64(n))
	if rc != 0 {
		k.t.Fatal(rc)
	}
	return p
}

// What has been copied once comes from the store, whatever the order and the sizes of its frames, and whatever becomes of the store meanwhile.
func TestContent(t *testing.T) {
	k := startContent(t, store.Bounds{Limit: 1 << 30})
	const size = wire.MaxContent
	dst := k.mustAlloc(4 * size)
	one, two, three := randomBytes(size, 1), randomBytes(size, 2), randomBytes(100_000, 3)
	if got := k.find(one, two, three); got != 0 {
		t.Errorf("an empty store has %b", got)
	}
	k.keep(dst, one)
	k.keep(dst+size, two, 3, 0, 2, 1)
	k.keep(dst+2*size, three)
	for _, b := range [][]byte{one, two, three} {
		k.await(b)
	}
	k.expect(dst, one, "a copy")
	if got := k.find(three, randomBytes(77, 4), one, two, two, randomBytes(size, 5)); got != 0b011101 {
		t.Fatalf("the store has %b", got)
	}
	for _, b := range [][]byte{one, two} { // what was found stays
		if err := os.Remove(k.file(b)); err != nil {
			t.Fatal(err)
		}
	}
	k.stored(dst+3*size, two)
	k.stored(dst, two)
	k.stored(dst+size+4, one[:])
	k.stored(dst+3*size+8, three)
	k.expect(dst, two, "from the store")
	k.expect(dst+size+4, one, "from the store, at an odd place")
	k.expect(dst+3*size, cat(two[:8], three, two[8+len(three):]), "from the store, in order")
	if got := k.find(one, two, three); got != 0b100 {
		t.Errorf("the store has %b", got)
	}
}

// A piece that is not what its name says is not found, and is taken from the store; it can be stored again.
func TestContentDamaged(t *testing.T) {
	k := startContent(t, store.Bounds{Limit: 1 << 30})
	b := randomBytes(1<<20, 1)
	dst := k.mustAlloc(len(b))
	for name, damage := range map[string]func(*os.File) error{
		"flipped":   func(f *os.File) error { _, err := f.WriteAt([]byte{^b[70_000]}, 70_000); return err },
		"cut short": func(f *os.File) error { return f.Truncate(5000) },
		"emptied":   func(f *os.File) error { return f.Truncate(0) },
		"longer":    func(f *os.File) error { return f.Truncate(int64(len(b)) + 1) },
	} {
		k.keep(dst, b)
		k.await(b)
		f, err := os.OpenFile(k.file(b), os.O_RDWR, 0)
		if err == nil {
			err = damage(f)
			f.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := k.find(b); got != 0 {
			t.Errorf("%s: found", name)
		}
		if _, err := os.Stat(k.file(b)); !os.IsNotExist(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Cut short after it was found: the copy fails, and the session goes on.
	k.keep(dst, b)
	k.await(b)
	if k.find(b) != 1 || os.Truncate(k.file(b), 5000) != nil {
		t.Fatal("not found")
	}
	k.stored(dst, b)
	if r := k.wait(opCuCtxSynchronize, 1); r.result == 0 {
		t.Error("a copy of a file that is cut short did not fail")
	}
	k.copyParts(dst, b)
	k.expect(dst, b, "the session goes on")
}

// A session holds so many pieces. With more nothing is found until some are copied.
func TestContentFound(t *testing.T) {
	k := startContent(t, store.Bounds{Limit: 1 << 30})
	b := randomBytes(4096, 1)
	dst := k.mustAlloc(len(b))
	k.keep(dst, b)
	k.await(b)
	all := make([][]byte, wire.MaxContentFind)
	for i := range all {
		all[i] = b
	}
	for range wire.MaxContentFound / len(all) {
		if got := k.find(all...); got != 1<<32-1 {
			t.Fatalf("found %b", got)
		}
	}
	if got := k.find(b); got != 0 {
		t.Errorf("found %b beyond the limit", got)
	}
	k.stored(dst, b)
	if got := k.find(b); got != 1 {
		t.Errorf("found %b", got)
	}
	for range wire.MaxContentFound {
		k.stored(dst, b)
	}
	for range 3 * wire.MaxContentFound { // which are not held
		if r := k.wait(wire.OpContentFind, 1, u32(1), u32(0), pieceName(b)); !bytes.Equal(r.payload[:4], u32(1)) {
			t.Fatalf("found %v", r.payload)
		}
	}
	if got := k.find(all...); got != 1<<32-1 {
		t.Errorf("found %b once all are copied", got)
	}
}

// A store without room, one that cannot be written and none at all cost a program nothing but the next upload.
func TestContentFull(t *testing.T) {
	b, c := randomBytes(1<<20, 1), randomBytes(1<<20, 2)
	for name, full := range map[string]struct {
		bounds store.Bounds
		spoil  func(dir string) error
		one    bool // has room
	}{
		"limit":   {store.Bounds{Limit: 1<<20 + 5}, nil, true},
		"no disk": {store.Bounds{Limit: 1 << 30, KeepFree: 1 << 60}, nil, false},
		"gone":    {store.Bounds{Limit: 1 << 30}, os.RemoveAll, false},
		"none":    {store.Bounds{}, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := startContent(t, full.bounds)
			dst := k.mustAlloc(2 << 20)
			if full.spoil != nil {
				if err := full.spoil(k.dir); err != nil {
					t.Fatal(err)
				}
			}
			k.keep(dst, b)
			k.keep(dst+1<<20, c)
			k.expect(dst, cat(b, c), "a copy")
			if full.one {
				k.await(b)
			}
			if _, err := os.Stat(k.file(c)); !os.IsNotExist(err) {
				t.Errorf("beyond the bounds: %v", err)
			}
			if full.bounds.Limit == 0 {
				if r := k.wait(wire.OpContentFind, 1, u32(1), u32(0), pieceName(b)); r.result != 801 {
					t.Errorf("CONTENT_FIND without a store: %d", r.result)
				}
				return
			}
			if got := k.find(b, c); got != 0 && !full.one || full.one && got != 1 {
				t.Errorf("found %b", got)
			}
		})
	}
}

// Pieces that are begun and not filled, and frames that fit none, are forgotten, and do not count for what the session may store.
func TestContentUnfilled(t *testing.T) {
	k := startContent(t, store.Bounds{Limit: 40 << 20})
	b := randomBytes(2<<20, 1)
	dst := k.mustAlloc(4 << 20)
	for i := range 100 {
		k.oneway(wire.OpContentKeep, u64(dst+uint64(i)), u32(4<<20), u32(0))
		k.oneway(wire.OpCopyIn, u64(dst), u32(0), u32(0), b[:1<<20])
	}
	k.keep(dst, b)
	k.await(b)
	k.expect(dst, b, "a copy")
}

// What a client may not say ends its session.
func TestContentHostile(t *testing.T) {
	b := randomBytes(100, 1)
	sum := sha256.Sum256(b)
	copied := func(size, last uint32) []byte { return cat(u64(1<<40), sum[:], u32(0), u32(last), u32(size), u32(0)) }
	for _, c := range []struct {
		name    string
		op      uint16
		call    uint32
		payload []byte
		why     string
	}{
		{"not asked for", wire.OpCopyInStored, 0, copied(100, 0), "was not found before"},
		{"copied twice", wire.OpCopyInStored, 0, copied(100, 1), "was not found before"},
		{"of another size", wire.OpCopyInStored, 0, copied(99, 0), "was not found before"},
		{"last", wire.OpCopyInStored, 0, copied(100, 2), "malformed"},
		{"short", wire.OpCopyInStored, 0, u64(1), "malformed"},
		{"no pieces", wire.OpContentFind, 9, cat(u32(0), u32(0)), "malformed"},
		{"too many", wire.OpContentFind, 9, cat(u32(wire.MaxContentFind+1), u32(0), bytes.Repeat(pieceName(b), wire.MaxContentFind+1)), "malformed"},
		{"fewer than said", wire.OpContentFind, 9, cat(u32(2), u32(0), pieceName(b)), "malformed"},
		{"an empty piece", wire.OpContentFind, 9, cat(u32(1), u32(0), pieceName(nil)), "malformed"},
		{"a large piece", wire.OpContentFind, 9, cat(u32(1), u32(0), sum[:], u32(wire.MaxContent+1), u32(0)), "malformed"},
		{"held otherwise", wire.OpContentFind, 9, cat(u32(1), u32(2), pieceName(b)), "malformed"},
		{"not held", wire.OpCopyInStored, 0, copied(100, 0), "was not found before"},
		{"no call", wire.OpContentFind, 0, cat(u32(1), u32(0), pieceName(b)), "malformed"},
		{"of nothing", wire.OpContentKeep, 0, cat(u64(1), u32(0), u32(0)), "malformed"},
		{"too large", wire.OpContentKeep, 0, cat(u64(1), u32(wire.MaxContent+1), u32(0)), "malformed"},
		{"around the end", wire.OpContentKeep, 0, cat(u64(1<<64-1), u32(2), u32(0)), "malformed"},
	} {
		k := startContent(t, store.Bounds{Limit: 1 << 30})
		dst := k.mustAlloc(100)
		k.keep(dst, b)
		k.await(b)
		switch c.name {
		case "not asked for":
		case "not held":
			k.wait(wire.OpContentFind, 1, u32(1), u32(0), pieceName(b))
		default:
			if k.find(b) != 1 {
				t.Fatal("not found")
			}
		}
		if c.name == "copied twice" {
			k.stored(dst, b)
		}
		h := wire.Request{Op: c.op, Ctx: 1, Call: c.call}
		if c.call != 0 {
			h.Flags = wire.FlagWait
		}
		k.write(h, c.payload)
		k.until("the session ends", func() bool { return k.bye != "" })
		if !strings.Contains(k.bye, c.why) {
			t.Errorf("%s: bye %q", c.name, k.bye)
		}
	}
}
