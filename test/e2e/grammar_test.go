package e2e

// Sessions of a client that knows the protocol and means harm: well-formed frames of every operation, made
// at random from the tables (frames_test.go), many in flight. The driver is the simulated one, which is told
// to end the process when it is given a handle that does not exist: a real one would follow it.
//
// SLUICE_GRAMMAR=N sends N frames and N/10 images instead of a few thousand, SLUICE_GRAMMAR_SEED=N begins with
// that seed. A session whose process died is written to SLUICE_BUILD/grammar; testdata/grammar keeps those
// that once did, one frame a line, and each run begins with them.

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/api"
	"github.com/sluice-hpc/sluice/remoting/wire"
)

// errStalled is of a session that waits: for a stream that never gets on, as a rule.
var errStalled = errors.New("the session does not get on")

// grammarSession is a session, and what was sent in it.
type grammarSession struct {
	c      net.Conn
	id     uint32 // in the worker's log, as the client's process
	sent   []sent
	call   uint32
	got    map[uint32][]byte // good replies
	due    []uint32          // host functions that were called
	status map[int32]int

	patience time.Duration // of sync
}

func dialGrammar(w *worker, id uint32, token [16]byte) (*grammarSession, error) {
	c, err := w.dial()
	if err != nil {
		return nil, err
	}
	h := goodHello(wire.SessionCompute)
	h.PID, h.Token, h.Features = id, token, wire.FeatureCompress
	if _, err := c.Write(helloBytes(h)); err != nil {
		c.Close()
		return nil, err
	}
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := wire.ReadWelcome(c); err != nil {
		c.Close()
		return nil, err
	}
	return &grammarSession{c: c, id: id, got: make(map[uint32][]byte), status: make(map[int32]int)}, nil
}

// put adds a frame to those that go out together.
func (s *grammarSession) put(out []byte, ops map[string]uint16, f sent) []byte {
	s.sent = append(s.sent, f)
	var flags uint16
	var call uint32
	if f.wait {
		flags, call = wire.FlagWait, uint32(len(s.sent))
	}
	return append(out, frame(ops[f.name], flags, call, f.ctx, f.payload)...)
}

// sync sends what is given and an OBSERVE behind it, and reads until that is answered: the executor has been
// through all of it then. It gives the bytes that the session's lease has in use.
func (s *grammarSession) sync(out []byte) (used, total uint64, err error) {
	const observe = 1 << 30
	s.call++
	s.sent = append(s.sent, sent{name: "OBSERVE"})
	out = append(out, frame(wire.OpObserve, wire.FlagWait, observe+s.call, 0, u32s(0))...)
	wrote := make(chan error, 1)
	_ = s.c.SetDeadline(time.Now().Add(max(s.patience, 1500*time.Millisecond)))
	go func() {
		_, err := s.c.Write(out)
		wrote <- err
	}()
	for err == nil {
		var b [wire.ReplySize]byte
		var h wire.Reply
		if _, err = io.ReadFull(s.c, b[:]); err != nil {
			break
		}
		if err = h.Decode(&b); err != nil {
			break
		}
		p := make([]byte, h.Size)
		if _, err = io.ReadFull(s.c, p); err != nil {
			break
		}
		switch h.Kind {
		case wire.FrameBye:
			err = fmt.Errorf("bye: %s", p)
		case wire.FrameHostFn:
			if h.Result == 0 {
				s.due = append(s.due, h.Arg)
			}
		case wire.FrameReply:
			s.status[h.Result]++
			if h.Call == observe+s.call {
				if err = <-wrote; len(p) >= 16 {
					total, used = binary.LittleEndian.Uint64(p), binary.LittleEndian.Uint64(p[8:])
				}
				return used, total, err
			}
			if h.Result == 0 && h.Call < observe {
				s.got[h.Call] = p
			}
		}
	}
	s.c.Close()
	<-wrote
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		err = errStalled
	}
	return 0, 0, err
}

// save writes the session's frames, which load reads.
func (s *grammarSession) save(path string) error {
	var b strings.Builder
	for _, f := range s.sent {
		fmt.Fprintf(&b, "%s %v %d %s\n", f.name, f.wait, f.ctx, hex.EncodeToString(f.payload))
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(b.String()), 0o644)
}

func loadFrames(path string) (all []sent, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	l := bufio.NewScanner(bytes.NewReader(b))
	l.Buffer(nil, 64<<20)
	for l.Scan() {
		if strings.HasPrefix(l.Text(), "#") {
			continue
		}
		var f sent
		var text string
		if _, err := fmt.Sscan(l.Text(), &f.name, &f.wait, &f.ctx); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", path, l.Text(), err)
		}
		if w := strings.Fields(l.Text()); len(w) > 3 {
			text = w[3]
		}
		if f.payload, err = hex.DecodeString(text); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", path, f.name, err)
		}
		all = append(all, f)
	}
	return all, l.Err()
}

// grammarRig is a worker with the tables, and a lease that nobody may harm.
type grammarRig struct {
	t       *testing.T
	w       *worker
	ops     map[string]uint16
	rows    []*api.Row
	layouts layouts
	frames  atomic.Int64
	stalls  atomic.Int64
	byes    sync.Map // reason: number
	mu      sync.Mutex
	kept    map[uint32]*grammarSession // by id, until the worker's log says how they ended
	worked  map[string]bool            // operations that succeeded
}

func newGrammarRig(t *testing.T) *grammarRig {
	g := &grammarRig{t: t, ops: make(map[string]uint16), kept: make(map[uint32]*grammarSession), worked: make(map[string]bool)}
	all, err := api.Rows()
	if err != nil {
		t.Fatal(err)
	}
	for i := range all {
		g.ops[all[i].Symbol] = uint16(all[i].Op)
		if all[i].Forwarded() {
			g.rows = append(g.rows, &all[i])
		}
	}
	for op := uint16(wire.OpControl); !strings.HasPrefix(wire.ControlName(op), "operation"); op++ {
		name := wire.ControlName(op)
		g.ops[name] = op
		if _, ok := controls[name]; !ok {
			t.Errorf("controls does not know %s: say in frames_test.go what its payload is", name)
		}
	}
	g.layouts = readLayouts(t, g.rows)
	g.w = startWorker(t, workerOptions{devices: 2, gpuMem: "4G", mem: "512M", keepalive: 5 * time.Second, args: []string{"--turns", "best-effort", "--content", filepath.Join(t.TempDir(), "content"), "--content-limit", "64M", "--content-keep-free", "0"},
		env: []string{"SLUICE_SIM_STRICT=1", "SLUICE_SIM_CTX_MEM=4M"}})
	return g
}

// lease is one of its own for a session. On a busy machine those of the sessions before have not all ended, and there is no room yet.
func (g *grammarRig) lease() (token [16]byte, c net.Conn) {
	var err error
	waitFor(g.t, 20*time.Second, "a lease has room", func() bool {
		if c, err = g.w.dial(); err != nil {
			return true
		}
		h := goodHello(wire.SessionLease)
		h.Mem, h.Fingerprint = 64<<20, [32]byte{}
		if _, err = c.Write(helloBytes(h)); err != nil {
			return true
		}
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		var p []byte
		if p, err = wire.ReadWelcome(c); err == nil && len(p) < len(token) {
			err = fmt.Errorf("a token of %d bytes", len(p))
		}
		if err == nil {
			copy(token[:], p)
			return true
		}
		c.Close()
		var no *wire.Refusal
		return !errors.As(err, &no) || no.Status != wire.StatusNoMemory
	})
	if err != nil {
		g.t.Fatalf("no lease: %v", err)
	}
	return token, c
}

// died are the lines of the worker's log that speak of a death, by the session's id.
var (
	over   = regexp.MustCompile(`msg="session over".* pid=(\d+) .*status="([^"]*)"`)
	speaks = regexp.MustCompile(`wrote to its standard error`)
)

func (g *grammarRig) deaths() (ids []uint32, lines []string) {
	for line := range strings.Lines(g.w.log.String()) {
		// The end of a lease kills what is left of its sessions.
		if m := over.FindStringSubmatch(line); m != nil && m[2] != "exit status 0" && m[2] != "signal: killed" {
			id, _ := strconv.ParseUint(m[1], 10, 32)
			ids, lines = append(ids, uint32(id)), append(lines, line)
		} else if speaks.MatchString(line) {
			lines = append(lines, line)
		}
	}
	return ids, lines
}

// run is one session of random frames, up to so many.
func (g *grammarRig) run(seed uint64, id uint32, most int) {
	t := g.t
	token, lease := g.lease()
	defer lease.Close()
	s, err := dialGrammar(g.w, id, token)
	if err != nil {
		t.Errorf("seed %d: no session: %v", seed, err)
		return
	}
	defer s.c.Close()
	g.mu.Lock()
	g.kept[id] = s
	g.mu.Unlock()
	m := newGrammar(seed, g.rows, g.layouts)
	for n := 0; n < most && err == nil; {
		var out []byte
		batch := []sent(nil)
		if n%200 == 0 {
			batch = m.begin()
		}
		for len(batch) < 25 {
			batch = append(batch, m.frame())
		}
		from := len(s.sent)
		for _, f := range batch {
			out = s.put(out, g.ops, f)
		}
		for _, fn := range s.due { // most are called, a few never
			if m.r.IntN(10) > 0 {
				out = s.put(out, g.ops, sent{"HOSTFN_DONE", false, 0, u32s(fn)})
			}
		}
		s.due = nil
		var used, total uint64
		if used, total, err = s.sync(out); err != nil {
			break
		}
		if used > total {
			t.Errorf("seed %d: %d bytes in use of %d", seed, used, total)
		}
		n += len(batch)
		g.frames.Add(int64(len(s.sent) - from))
		g.mu.Lock()
		for i, f := range s.sent[from:] {
			p, ok := s.got[uint32(from+i+1)]
			if !ok {
				continue
			}
			g.worked[f.name] = true
			if r := m.byName[f.name]; r != nil {
				m.learn(r, f.payload, p)
			}
		}
		g.mu.Unlock()
		clear(s.got)
	}
	switch {
	case err == errStalled:
		g.stalls.Add(1)
	case err != nil:
		reason := err.Error()
		n, _ := g.byes.LoadOrStore(reason[:min(90, len(reason))], new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
	}
}

// neighbour computes beside the others until stop, in a separate lease: its memory belongs to it alone.
func (g *grammarRig) neighbour(stop chan struct{}) {
	t := g.t
	token, lease := g.lease()
	defer lease.Close()
	s, err := dialGrammar(g.w, 1, token)
	if err != nil {
		t.Errorf("the neighbour has no session: %v", err)
		return
	}
	defer s.c.Close()
	r := &rawClient{t, s.c, g.w}
	_ = s.c.SetDeadline(time.Time{})
	ctx := r.activate()
	const n = 1 << 20
	d := r.alloc(ctx, n)
	for round := byte(1); ; round++ {
		r.send(frame(wire.OpCopyIn, 0, 0, ctx, cat(u64s(d), u32s(0, 0), bytes.Repeat([]byte{round}, n))))
		select {
		case <-stop:
			return
		case <-time.After(20 * time.Millisecond):
		}
		r.send(frame(wire.OpCopyOut, wire.FlagWait, 7, ctx, cat(u64s(d, n), u32s(0, 1))))
		got := 0
		for done := false; !done; {
			h, p, err := r.next(20 * time.Second)
			if err != nil {
				t.Errorf("the neighbour's session: %v", err)
				return
			}
			switch h.Kind {
			case wire.FrameData:
				if got += len(p) - 8; !bytes.Equal(p[8:], bytes.Repeat([]byte{round}, len(p)-8)) {
					t.Errorf("round %d: the neighbour's memory was changed", round)
					return
				}
			case wire.FrameReply:
				done = h.Call == 7
			}
		}
		if got != n {
			t.Errorf("the neighbour read %d bytes of %d", got, n)
			return
		}
	}
}

// judge fails the test for each session process that died, and writes down what was sent to it.
func (g *grammarRig) judge() {
	t := g.t
	waitFor(t, 20*time.Second, "the sessions have ended", func() bool {
		if len(g.w.sessions()) > 0 {
			return false
		}
		ended := over.FindAllStringSubmatch(g.w.log.String(), -1)
		for id := range g.kept {
			if !slices.ContainsFunc(ended, func(m []string) bool { return m[1] == fmt.Sprint(id) }) {
				return false
			}
		}
		return true
	})
	ids, lines := g.deaths()
	for _, line := range lines[:min(len(lines), 20)] {
		t.Errorf("a session process died: %s", line)
	}
	for _, id := range slices.Compact(ids) {
		if s := g.kept[id]; s != nil {
			path := built(filepath.Join("grammar", fmt.Sprintf("%d.txt", id)))
			if err := s.save(path); err != nil {
				t.Error(err)
			}
			t.Errorf("session %d: its %d frames are in %s", id, len(s.sent), path)
		}
	}
}

// replay sends the frames of a session that once did harm.
func (g *grammarRig) replay(id uint32, frames []sent) {
	token, lease := g.lease()
	defer lease.Close()
	s, err := dialGrammar(g.w, id, token)
	if err != nil {
		g.t.Errorf("no session: %v", err)
		return
	}
	defer s.c.Close()
	var out []byte
	for _, f := range append(frames, sent{name: "OBSERVE"}) {
		switch _, known := g.ops[f.name]; {
		case f.name == "OBSERVE": // where the client waited
			if _, _, err := s.sync(out); err != nil {
				return
			}
			out = nil
		case known:
			out = s.put(out, g.ops, f)
		}
	}
}

// dies reports whether the session of some frames dies of them.
func (g *grammarRig) dies(id uint32, frames []sent) bool {
	g.replay(id, frames)
	mine := fmt.Sprintf(" pid=%d ", id)
	waitFor(g.t, 20*time.Second, "the session has ended", func() bool {
		return slices.ContainsFunc(strings.Split(g.w.log.String(), "\n"), func(l string) bool { return strings.Contains(l, mine) && over.MatchString(l) })
	})
	ids, _ := g.deaths()
	return slices.Contains(ids, id)
}

// TestGrammarMinimise makes a session that does harm shorter: SLUICE_GRAMMAR_MINIMISE names its file. What is left is
// for testdata/grammar once the cause is known.
func TestGrammarMinimise(t *testing.T) {
	path := os.Getenv("SLUICE_GRAMMAR_MINIMISE")
	if path == "" {
		return
	}
	frames, err := loadFrames(path)
	if err != nil {
		t.Fatal(err)
	}
	g := newGrammarRig(t)
	id := uint32(5000)
	if !g.dies(id, frames) {
		t.Fatal("the session does not die")
	}
	for n := max(1, len(frames)/2); ; n = max(1, n/2) {
		for at := 0; at < len(frames); {
			id++
			if less := slices.Delete(slices.Clone(frames), at, min(at+n, len(frames))); g.dies(id, less) {
				frames = less
			} else {
				at += n
			}
		}
		if n == 1 {
			break
		}
	}
	s := grammarSession{sent: frames}
	if err := s.save(path + ".less"); err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		t.Logf("%s wait %v ctx %#x %x", f.name, f.wait, f.ctx, f.payload)
	}
}

// grammarSize is how many frames a run shall send.
func grammarSize(t *testing.T, short int) int {
	if v := os.Getenv("SLUICE_GRAMMAR"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil {
			t.Fatalf("SLUICE_GRAMMAR=%s: give a number of frames", v)
		}
		return n
	}
	return short
}

func grammarSeed() uint64 {
	if n, err := strconv.ParseUint(os.Getenv("SLUICE_GRAMMAR_SEED"), 10, 64); err == nil {
		return n
	}
	return 1
}

// TestGrammar: whatever well-formed frames a client sends, its session's process ends by no fault of ours, the
// driver is given no handle that does not exist, the memory cap holds, and a neighbour computes on.
func TestGrammar(t *testing.T) {
	g := newGrammarRig(t)
	stop := make(chan struct{})
	var wg, beside sync.WaitGroup
	beside.Go(func() { g.neighbour(stop) })
	corpus, err := filepath.Glob("testdata/grammar/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for i, path := range corpus {
		frames, err := loadFrames(path)
		if err != nil {
			t.Fatal(err)
		}
		g.replay(uint32(1000+i), frames)
	}
	size, seed := grammarSize(t, 8000), grammarSeed()
	var next atomic.Int64
	for range 3 {
		wg.Go(func() {
			for g.frames.Load() < int64(size) && !t.Failed() {
				n := next.Add(1)
				g.run(seed+uint64(n), uint32(1_000_000+seed+uint64(n)), 800)
				g.mu.Lock()
				if len(g.kept) > 40 { // the log has told of those by now
					ids, _ := g.deaths()
					for id := range g.kept {
						if !slices.Contains(ids, id) && id+20 < uint32(1_000_000+seed+uint64(n)) {
							delete(g.kept, id)
						}
					}
					if len(ids) > 20 {
						t.Errorf("%d deaths: enough", len(ids))
					}
				}
				g.mu.Unlock()
			}
		})
	}
	wg.Wait()
	close(stop)
	beside.Wait()
	g.judge()
	g.w.healthy()
	t.Logf("seeds from %d: %d sessions, %d frames, %d sessions stalled, %d of %d operations succeeded", seed+1, next.Load(), g.frames.Load(), g.stalls.Load(), len(g.worked), len(g.rows)+len(controls))
	g.byes.Range(func(k, v any) bool {
		t.Logf("%6d %s", v.(*atomic.Int64).Load(), k)
		return true
	})
	if os.Getenv("SLUICE_GRAMMAR_NEVER") != "" {
		for name := range g.ops {
			if r := slices.IndexFunc(g.rows, func(r *api.Row) bool { return r.Symbol == name && r.Kind == api.Wait }); r >= 0 && !g.worked[name] {
				t.Logf("never: %s", name)
			}
		}
	}
	if len(g.worked) < 60 {
		t.Errorf("only %d operations succeeded", len(g.worked))
	}
}
