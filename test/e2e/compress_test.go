package e2e

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// slowLink puts a relay of so many bits a second in front of a worker. End ends it and says how many bytes went to the worker.
func slowLink(t *testing.T, w *worker, rate string) (addr string, end func() int64) {
	t.Helper()
	cmd := exec.Command(built("bin/relay"), "--to", strings.TrimPrefix(w.addr, "tcp:"), "--rtt", "200us", "--rate", rate)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	if !lines.Scan() || !strings.HasPrefix(lines.Text(), "listening ") {
		t.Fatalf("the relay said %q", lines.Text())
	}
	addr = "tcp:" + strings.TrimPrefix(lines.Text(), "listening ")
	var to int64
	ended := false
	end = func() int64 {
		if ended {
			return to
		}
		ended = true
		_ = cmd.Process.Signal(syscall.SIGTERM)
		for lines.Scan() {
			var from int64
			_, _ = fmt.Sscanf(lines.Text(), "total to=%d from=%d", &to, &from)
		}
		_ = cmd.Wait()
		return to
	}
	t.Cleanup(func() { end() })
	return addr, end
}

// compressed is what a program has written to SLUICE_STATS of its uploads.
type compressed struct {
	BytesOut     int64 `json:"bytes_out"`
	Compressed   int64 `json:"compressed"`
	CompressedTo int64 `json:"compressed_to"`
}

// upload runs test/cuda/upload.c, which compares all bytes, through an address.
func upload(t *testing.T, w *worker, addr string, env []string, args ...string) (s compressed) {
	t.Helper()
	stats := filepath.Join(t.TempDir(), "stats")
	cmd := exec.Command(built("test/upload"), args...)
	cmd.Env = append(os.Environ(), marker+"="+w.mark, "SLUICE_WORKER="+addr, "LD_LIBRARY_PATH="+built("shim"), "SLUICE_STATS="+stats)
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasSuffix(string(out), "PASS\n") {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	readStats(t, stats, &s)
	return s
}

// readStats reads what one program has appended to its file of SLUICE_STATS.
func readStats(t testing.TB, file string, to any) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, to); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
}

// Over a slow link what can be compressed is, and arrives bit by bit; what cannot costs nothing. The bytes are counted by the link.
func TestCompress(t *testing.T) {
	const mib = 24
	for _, c := range []struct {
		kind   string
		rate   string
		copies int
		args   []string // of the worker
		env    []string // of the program
		most   float64  // bytes on the wire, as a part of those that were copied
		some   bool     // something is compressed
	}{
		{kind: "images", rate: "1G", copies: 12, most: 1 / 2.5, some: true}, // of which the first are sent as they are: the link is being measured
		{kind: "random", rate: "2G", copies: 2, most: 1.01},
		{kind: "images", rate: "2G", copies: 2, most: 1.01, args: []string{"--no-compress"}},
		{kind: "images", rate: "2G", copies: 2, most: 1.01, env: []string{"SLUICE_COMPRESS=0"}},
		{kind: "mixed", rate: "1G", copies: 3, most: 1, some: true},
		{kind: "changing", rate: "1G", copies: 3, most: 1, some: true},
		{kind: "images", rate: "1G", copies: 6, most: 0.6, some: true, args: []string{"--grace", "1m"}}, // through the ring of pieces
	} {
		t.Run(strings.Join(append(append([]string{c.kind}, c.args...), c.env...), " "), func(t *testing.T) {
			w := startWorker(t, workerOptions{args: c.args})
			addr, end := slowLink(t, w, c.rate)
			s := upload(t, w, addr, append([]string{"SLUICE_COMPRESS=1"}, c.env...), c.kind, strconv.Itoa(mib), strconv.Itoa(c.copies))
			total := float64(c.copies * mib << 20)
			sent := float64(end())
			t.Logf("%s: %.1f MB copied, %.1f MB sent: a factor of %.2f; %d bytes were compressed to %d", c.kind, total/1e6, sent/1e6, total/sent, s.Compressed, s.CompressedTo)
			if sent > c.most*total {
				t.Errorf("%.0f bytes were sent for %.0f", sent, total)
			}
			if got := s.Compressed > 0; got != c.some {
				t.Errorf("%d bytes were compressed to %d", s.Compressed, s.CompressedTo)
			}
			if sent < float64(s.BytesOut) || s.Compressed > 0 && s.CompressedTo >= s.Compressed {
				t.Errorf("the program says %+v, %.0f bytes were sent", s, sent)
			}
		})
	}
}

// Within one machine nothing is compressed, whatever it is; what makes a link fast is test_throughput.c's to show.
func TestCompressFastLink(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		w := startWorker(t, workerOptions{network: network})
		if s := upload(t, w, w.addr, nil, "images", "24", "6"); s.Compressed != 0 || s.CompressedTo != 0 {
			t.Errorf("%s: %d bytes were compressed to %d", network, s.Compressed, s.CompressedTo)
		}
	}
}

// A client that announces compression and sends something else ends its own session, by name.
func TestCompressHostile(t *testing.T) {
	w := startWorker(t, workerOptions{race: true})
	h := goodHello(wire.SessionCompute)
	h.Features = wire.FeatureCompress
	block := func(size uint32, codec, words uint16, rest ...byte) []byte {
		return append(binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(u32s(size), codec), words), rest...)
	}
	for _, c := range []struct {
		name    string
		hello   wire.Hello
		payload []byte
		why     string
	}{
		{"without agreement", goodHello(wire.SessionCompute), cat(u64s(1<<40), u32s(0, 0, 4, 0), block(4, 0, 0, 1, 2, 3, 4)), "COPY_IN_COMPRESSED: not agreed at the beginning of the session"},
		{"short", h, u64s(1 << 40), "COPY_IN_COMPRESSED: malformed payload of 8 bytes"},
		{"of nothing", h, cat(u64s(1<<40), u32s(0, 0, 0, 0)), "COPY_IN_COMPRESSED: malformed payload of 24 bytes"},
		{"too large", h, cat(u64s(1<<40), u32s(0, 0, wire.MaxCompressed+1, 0), block(4, 0, 0, 1, 2, 3, 4)), "COPY_IN_COMPRESSED: malformed payload of 36 bytes"},
		{"too much payload", h, cat(u64s(1<<40), u32s(0, 0, 4, 0), make([]byte, wire.MaxCopyIn+1)), "COPY_IN_COMPRESSED: malformed payload of 4194329 bytes"},
		{"a bomb", h, cat(u64s(1<<40), u32s(0, 0, 8, 0), block(1<<32-4, 1, 1, 1, 2, 3, 4)), "stands for 4294967292 bytes where 8 are left"},
		{"too few", h, cat(u64s(1<<40), u32s(0, 0, 8, 0), block(4, 1, 1, 1, 2, 3, 4)), "4 bytes too few"},
		{"an index", h, cat(u64s(1<<40), u32s(0, 0, 8, 0), block(8, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 0x21)), "index 2 in a table of 2 words"},
		{"a codec", h, cat(u64s(1<<40), u32s(0, 0, 8, 0), block(8, 77, 2)), "unknown codec 77"},
	} {
		r := connect(t, w, helloBytes(c.hello))
		_ = r.c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := wire.ReadWelcome(r.c); err != nil {
			t.Fatal(err)
		}
		r.send(frame(wire.OpCopyInCompressed, 0, 0, 0, c.payload))
		if bye := r.end(10 * time.Second); !strings.Contains(bye, c.why) {
			t.Errorf("%s: the session ended with %q, want %q", c.name, bye, c.why)
		}
	}
	w.healthy()
}
