package worker

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile/disktest"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// TestUnstoredIsTold: an image whose file the disk refuses, at whatever step, is loaded all the same, and the log says that it is not stored, with
// the file and the cause.
func TestUnstoredIsTold(t *testing.T) {
	image := bytes.Repeat([]byte("image"), 1000)
	sum := sha256.Sum256(image)
	chunk := binary.LittleEndian.AppendUint64(sum[:], 0)
	chunk = append(binary.LittleEndian.AppendUint64(chunk, uint64(len(image))), image...)
	for n := 0; ; n++ {
		dir := filepath.Join(t.TempDir(), "store")
		st, err := store.Open(dir, store.Bounds{Limit: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		s := &session{log: slog.New(slog.NewTextHandler(&log, nil)), store: st}
		disk := &disktest.One{Dir: dir, N: n, Fault: disktest.Fault{Err: unix.EIO}}
		var rc int32
		disktest.Run(t, disk.Judge, func() {
			rc = s.imageChunk(chunk)
			if up := s.images.late; up != nil {
				s.publish(up)
			}
		})
		if disk.Hit.Name == "" {
			if n < 5 || log.Len() > 0 {
				t.Errorf("%d calls; without a fault the log says %q", n, &log)
			}
			return
		}
		if m := s.images.sent; rc != 0 || m == nil || !bytes.Equal(m.Bytes(), image) {
			t.Errorf("%s: result %d", disk.Hit.Name, rc)
		}
		if got := log.String(); !strings.Contains(got, "not stored") || !strings.Contains(got, dir) || !strings.Contains(got, unix.EIO.Error()) {
			t.Errorf("%s: the log says %q", disk.Hit.Name, got)
		}
		s.images.dropSent()
	}
}
