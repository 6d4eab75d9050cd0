// Package jobsock answers the SPANK plug-in in slurmstepd: what a job's tasks need in
// their environment, over run_dir/job.sock. Its protocol is lines of text, so that the
// plug-in has no library to bring into Slurm's processes.
package jobsock

// Flow: accept -> one line, within readTime -> Env, within envTime or ownTime -> the answer ->
// closed. Everybody may connect. The kernel says which user it is, and Env decides what that
// user may know.
//
// Each connection has a goroutine. Connections without a request make room for newer ones. A
// flood loses only its own, because the plug-in sends its request at once. Connections with a
// request are bounded for each user; beyond that they are closed without an answer. The
// plug-in takes that for an absent daemon, and asks again for a job that needs an answer.
// A user with many uids (a subordinate range is enough) can fill all places but those of root and those of users with
// a job here that asks for something.

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/unixsock"
	"github.com/sluice-hpc/sluice/spank/options"
)

// The protocol, see spank/answer.c.
const (
	magic      = "SLUICE-J 1 env "
	maxRequest = 256
	maxText    = options.TextMax // bytes of an error or a fault
	maxBody    = options.BodyMax // bytes of the changes
)

// The plug-in waits 2 s in all, and 6 s for a step that may have a gres of its own: slurmctld is asked for that one, and it may have to wait
// for another step's end.
const (
	readTime  = time.Second
	envTime   = 1500 * time.Millisecond
	ownTime   = 5 * time.Second
	writeTime = time.Second

	maxUser = 128 // that are being answered
)

// Step is a step that begins.
type Step struct {
	ID string // Slurm's number
	// Own says that srun may have been given a gres for the step.
	Own bool
	Mem string // --rgpu-mem of the step, "" for none
}

// Env is the changes of the environment that the tasks of a step of a job on this node need. An error of a
// job that must not run is a *lease.Error.
type Env func(ctx context.Context, peer rpc.Peer, job string, step Step) ([]rpc.EnvOp, error)

// Server answers on one socket.
type Server struct {
	l     *unixsock.Kept
	env   Env
	known func(uid uint32) bool
	log   *slog.Logger

	root, jobs, others *limit.Table
	reports            limit.Reports // what anybody can have written into the log
	wg                 sync.WaitGroup
}

// Listen makes the socket at path, which everybody may connect to. A socket that an
// earlier daemon left there is replaced, and one that is removed is made again. known says whether a user has a job on this node that asks for something.
func Listen(path string, env Env, known func(uid uint32) bool, log *slog.Logger) (*Server, error) {
	l, err := unixsock.Keep(path, unixsock.How{Mode: 0o666}, rpc.SocketRemoved(path, log))
	if errors.Is(err, unixsock.ErrNoSocket) {
		return nil, fmt.Errorf("job socket %s: %w; move it away", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("job socket: %w", err)
	}
	return &Server{
		l: l, env: env, known: known, log: log, root: limit.New(limit.Bounds{TrustedKey: 1024}),
		jobs: limit.New(limit.Bounds{TrustedKey: maxUser}), others: limit.New(limit.Bounds{TrustedKey: maxUser}),
	}, nil
}

// table has the places that a user's connections take.
func (s *Server) table(uid uint32) *limit.Table {
	switch {
	case uid == 0:
		return s.root
	case s.known(uid):
		return s.jobs
	}
	return s.others
}

// Serve answers until ctx is done, and waits for those it is answering. The socket's
// file stays: until the next daemon is there, a client's connection fails at once.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = s.l.Close() })
	defer stop()
	defer s.wg.Wait()
	for {
		u, err := s.l.AcceptUnix()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = u.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("job socket: %w", err)
		case err != nil:
			s.log.Warn("job socket: accept", "error", err)
			select { // no descriptors left, most likely
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		who, err := unixsock.PeerOf(u)
		if err != nil {
			_ = u.Close()
			continue
		}
		peer := rpc.Peer{UID: who.UID, GID: who.GID, PID: who.PID}
		c := s.table(peer.UID).Add(u, strconv.FormatUint(uint64(peer.UID), 10))
		s.wg.Go(func() {
			defer c.Close()
			gone := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
			defer gone()
			s.answer(ctx, c, peer)
		})
	}
}

// answer serves one connection.
func (s *Server) answer(ctx context.Context, c *limit.Conn, peer rpc.Peer) {
	_ = c.SetReadDeadline(time.Now().Add(readTime))
	line, err := readLine(c)
	if err != nil {
		return // it has gone, or never said what it wants
	}
	if !c.Trust(strconv.FormatUint(uint64(peer.UID), 10)) {
		return
	}
	job, step, err := parse(line)
	if err != nil {
		s.report(slog.LevelInfo, "job socket: bad request", "uid", peer.UID, "pid", peer.PID, "error", err)
		reply(c, "fault "+plain(err.Error()))
		return
	}
	patience := envTime
	if step.Own {
		patience = ownTime
	}
	ectx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ops, err := s.env(ectx, peer, job, step)
	out, word := "", "none"
	if err == nil && len(ops) > 0 {
		out, err = encode(ops)
	}
	var refusal *lease.Error
	switch {
	case errors.As(err, &refusal) && refusal.Code != lease.Internal:
		word, out = "error", "error "+plain(form.WithoutJob(job, refusal.Reason)) // the plug-in names the job
	case err != nil:
		word, out = "fault", "fault "+plain(form.WithoutJob(job, err.Error()))
		s.report(slog.LevelWarn, "job socket", "job", job, "step", step.ID, "uid", peer.UID, "error", err)
	case out == "":
		out = "none"
	default:
		word = "ok"
	}
	s.log.Debug("job socket", "job", job, "step", step.ID, "uid", peer.UID, "answer", word)
	reply(c, out)
}

// report logs what anybody can cause, as long as it is not too much of it.
func (s *Server) report(level slog.Level, msg string, args ...any) {
	if skipped, ok := s.reports.Pass(); ok {
		s.log.Log(context.Background(), level, msg, append(args, "left out", skipped)...)
	}
}

// readLine reads up to the newline, which is not part of it.
func readLine(c net.Conn) (string, error) {
	b := make([]byte, 0, maxRequest)
	for {
		n, err := c.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if i := bytes.IndexByte(b, '\n'); i >= 0 {
			return string(b[:i]), nil
		}
		if err != nil {
			return "", err
		}
		if len(b) == cap(b) {
			return string(b), nil // too long, which parse says
		}
	}
}

// parse reads "SLUICE-J 1 env JOBID STEPID", behind which "gres" may stand, and "mem=SIZE" behind that.
func parse(line string) (job string, step Step, err error) {
	rest, ok := strings.CutPrefix(line, magic)
	if !ok {
		return "", step, fmt.Errorf("not a request of version 1 to the job socket; plug-in and sluiced have to be of one release")
	}
	words := strings.Split(rest, " ")
	if len(words) > 1 {
		job, step.ID = words[0], words[1]
	}
	if _, ok := form.Number(step.ID); !ok || !form.JobID(job).Valid() {
		return "", step, fmt.Errorf("%.64q is not a job and step of Slurm's", rest)
	}
	for i, w := range words[2:] {
		mem, isMem := strings.CutPrefix(w, "mem=")
		switch {
		case i == 0 && w == "gres":
			step.Own = true
		case i == 1 && isMem && mem != "":
			step.Mem = mem
		default:
			return "", step, fmt.Errorf("%.64q: a word that this daemon does not know; plug-in and sluiced have to be of one release", rest)
		}
	}
	return job, step, nil
}

// encode is an answer with changes.
func encode(ops []rpc.EnvOp) (string, error) {
	text, err := rpc.EnvText(ops)
	if err == nil && len(text) > maxBody {
		err = fmt.Errorf("environment of %d bytes, %d are the most", len(text), maxBody)
	}
	return fmt.Sprintf("ok %d\n%s", len(text), text), err
}

// plain is a text as an answer has it.
func plain(text string) string { return cmp.Or(form.Line(text, maxText), "no reason given") }

func reply(c net.Conn, text string) {
	if !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	_ = c.SetWriteDeadline(time.Now().Add(writeTime))
	_, _ = c.Write([]byte(text)) // a client that has gone needs no answer
}
