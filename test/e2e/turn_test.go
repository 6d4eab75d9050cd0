package e2e

import (
	"context"
	"encoding/binary"
	"io"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// TestTurnFrames: before each frame of the worker a program is told again that its turn begins,
// with numbers in it that no worker would say. It works as ever.
func TestTurnFrames(t *testing.T) {
	w := startWorker(t, workerOptions{})
	for _, us := range []uint32{0, 2000, 5001, math.MaxUint32} {
		for _, prog := range []string{"vecadd", "streams_events", "threads"} {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					go tellTurns(c, strings.TrimPrefix(w.addr, "tcp:"), us)
				}
			}()
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			cmd := w.direct(ctx, program(prog))
			cmd.Env = append(cmd.Env, "SLUICE_WORKER=tcp:"+l.Addr().String())
			if r := finish(t, ctx, cmd); r.status != 0 {
				t.Errorf("%s, %d us: status %d after %s: %s%s", prog, us, r.status, r.took, r.stdout, r.stderr)
			}
			cancel()
			_ = l.Close()
		}
	}
}

// tellTurns stands between a program and its worker, and puts a TURN before each frame.
func tellTurns(c net.Conn, worker string, us uint32) {
	defer c.Close()
	u, err := net.Dial("tcp", worker)
	if err != nil {
		return
	}
	defer u.Close()
	go func() {
		_, _ = io.Copy(u, c)
		_ = u.Close()
	}()
	var welcome [wire.WelcomeSize]byte
	if _, err := io.ReadFull(u, welcome[:]); err != nil {
		return
	}
	if _, err := c.Write(welcome[:]); err != nil {
		return
	}
	if _, err := io.CopyN(c, u, int64(binary.LittleEndian.Uint32(welcome[12:]))); err != nil {
		return
	}
	var turn, head [wire.ReplySize]byte
	told := wire.Reply{Kind: wire.FrameTurn, Arg: us}
	told.Encode(&turn)
	for {
		if _, err := io.ReadFull(u, head[:]); err != nil {
			return
		}
		var h wire.Reply
		if h.Decode(&head) != nil {
			return
		}
		if _, err := c.Write(append(turn[:], head[:]...)); err != nil {
			return
		}
		if _, err := io.CopyN(c, u, int64(h.Size)); err != nil {
			return
		}
	}
}
