package workers

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// chunk sends part of an image.
func (c *client) chunk(sum [32]byte, off, total int, b []byte) error {
	p := binary.LittleEndian.AppendUint64(sum[:], uint64(off))
	p = append(binary.LittleEndian.AppendUint64(p, uint64(total)), b...)
	h := wire.Request{Size: uint32(len(p)), Op: wire.OpImageChunk}
	var head [wire.RequestSize]byte
	h.Encode(&head)
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	_, err := c.Write(append(head[:], p...))
	return err
}

// A user whose sessions begin uploads and are killed takes no more of the disk than its limit, and leaves
// nothing; what others left unfinished is removed when the daemon starts.
func TestUploads(t *testing.T) {
	dir := setup(t)
	images := filepath.Join(dir, "store")
	user := filepath.Join(images, strconv.Itoa(testUID))
	if err := os.Mkdir(images, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", images, "tmpfs", 0, "mode=700,size=256m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(images, unix.MNT_DETACH) })
	used := func() int64 {
		var st unix.Statfs_t
		if err := unix.Statfs(images, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Blocks-st.Bfree) * st.Bsize
	}
	if err := os.Mkdir(user, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(user, testUID, testUID); err != nil {
		t.Fatal(err)
	}
	left := fmt.Sprintf(".%064x.0123456789abcdef.new", 1)
	if err := os.WriteFile(filepath.Join(user, left), make([]byte, 32<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	p := newPool(t, dir, func(c *Config) { c.StoreLimit, c.StoreKeepFree = 64<<20, 16<<20 })
	waitFor(t, "the leftovers to go", func() bool { return used() < 1<<20 })

	const size = 24 << 20
	half := bytes.Repeat([]byte{1}, size/2)
	for i := range 4 { // two have room
		c, w := pair(t)
		s, err := p.Start(t.Context(), testLease("d", 0), request("d"), w, gpus(0))
		if err != nil {
			t.Fatal(err)
		}
		w.Close()
		if err := c.hello(); err != nil {
			t.Fatal(err)
		}
		if err := c.chunk([32]byte{byte(i)}, 0, size, half); err != nil {
			t.Fatal(err)
		}
		if err := c.activate(0); err != nil { // answered behind the chunk
			t.Fatal(err)
		}
		if n, want := used(), int64(min(i+1, 2)*size); n < want || n > want+1<<20 {
			t.Errorf("%d uploads take %d bytes", i+1, n)
		}
		defer func() {
			if err := unix.Kill(s.Worker.PID, unix.SIGKILL); err != nil {
				t.Error(err)
			}
			waitFor(t, "the end of a killed session", func() bool { return unix.Kill(s.Worker.PID, 0) != nil })
			if i == 0 && used() > 1<<20 {
				t.Errorf("%d bytes are left of killed sessions", used())
			}
		}()
		if i < 3 {
			continue
		}
		// A session without room goes on; one with room stores its image.
		text := bytes.Repeat([]byte{7}, 8<<20)
		sum := sha256.Sum256(text)
		if err := c.chunk(sum, 0, len(text), text); err != nil {
			t.Fatal(err)
		}
		if err := c.activate(0); err != nil {
			t.Fatal(err)
		}
		if all, err := filepath.Glob(filepath.Join(user, "[0-9a-f]*")); err != nil || len(all) != 1 {
			t.Errorf("stored: %v, %v", all, err)
		}
		if err := os.RemoveAll(user); err != nil {
			t.Fatal(err)
		}
	}
}

// A user's directory is given to it once, and nobody else's is.
func TestUserStore(t *testing.T) {
	dir := setup(t)
	p := newPool(t, dir, nil)
	images := p.images()
	owner := func(path string) uint32 {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		return st.Uid
	}
	for range 2 {
		f, err := images.open(testUID, testUID)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if got := owner(filepath.Join(p.cfg.Store, strconv.Itoa(testUID))); got != testUID {
		t.Errorf("the user's directory belongs to %d", got)
	}
	// Directories that something else has made there.
	for name, of := range map[string]int{"4242": 0, "4243": 5} {
		at := filepath.Join(p.cfg.Store, name)
		if err := os.MkdirAll(filepath.Join(at, "inside"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(at, of, of); err != nil {
			t.Fatal(err)
		}
		uid, _ := strconv.ParseUint(name, 10, 32)
		if f, err := images.open(uint32(uid), uint32(uid)); err == nil || !strings.Contains(err.Error(), "belongs to user") || owner(at) != uint32(of) {
			f.Close()
			t.Errorf("%s: %v; it belongs to %d", name, err, owner(at))
		}
	}
	// What a daemon left that died after it had made one.
	if err := os.Mkdir(filepath.Join(p.cfg.Store, "4244"), 0o700); err != nil {
		t.Fatal(err)
	}
	if f, err := images.open(4244, 4244); err != nil || owner(f.Name()) != 4244 {
		t.Error(err)
	}
}

// A session has its user's content, where the site keeps any.
func TestUserContent(t *testing.T) {
	dir := setup(t)
	for id, limit := range map[string]int64{"d": 0, "e": 64 << 20} {
		t.Run(strconv.FormatInt(limit, 10), func(t *testing.T) {
			content := filepath.Join(dir, "content-"+id)
			p := newPool(t, dir, func(c *Config) { c.Content, c.ContentLimit, c.ContentTotal = content, limit, 1<<30 })
			c, w := pair(t)
			if _, err := p.Start(t.Context(), testLease(id, 0), request(id), w, gpus(0)); err != nil {
				t.Fatal(err)
			}
			w.Close()
			if err := c.hello(); err != nil {
				t.Fatal(err)
			}
			find := make([]byte, wire.ContentFindSize+wire.ContentPieceSize)
			find[0], find[wire.ContentFindSize+32] = 1, 1 // one piece of one byte
			err := c.ask(wire.OpContentFind, find)
			st, _ := os.Stat(filepath.Join(content, strconv.Itoa(testUID)))
			if has := st != nil && st.Mode().Perm() == 0o700; has != (limit > 0) || (err == nil) != (limit > 0) {
				t.Errorf("%v; a directory: %v", err, has)
			}
		})
	}
}
