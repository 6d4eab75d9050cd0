package workers

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/process"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/internal/unixsock"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
	"github.com/sluice-hpc/sluice/remoting/worker/exchange"
)

// leaseRecord is the file "lease".
type leaseRecord struct {
	Version int      `json:"version"`
	GPUs    []string `json:"gpus"` // in the order of the account
	// Caps is what the lease grants of each, in bytes: what reports say, since any session of the lease can write into the account. Releases
	// before this one wrote none, and then reports say what is in the account.
	Caps []uint64 `json:"caps,omitempty"`
}

const recordVersion = 1

// accountName is the name of the account's file.
const accountName = "account"

// Prefixes of the names of a session's files. The number of its slot follows.
const (
	sessionPrefix = "session-"
	linkPrefix    = "exchange-"
)

// openLease opens the account of a lease, and makes it if there is none. mu is held.
func (p *Pool) openLease(l lease.Lease) (*leased, error) {
	if _, err := form.ParseLeaseID(l.ID); err != nil {
		return nil, err
	}
	dir := filepath.Join(p.cfg.Dir, l.ID)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	a := &leased{id: l.ID, sessions: map[*session]bool{}, parts: map[uint32]*part{}, broker: exchange.NewBroker(p.log.With("lease", l.ID))}
	caps := capsOf(l)
	for _, g := range l.Grants {
		a.gpus = append(a.gpus, g.GPU)
	}
	if err := writeFile(filepath.Join(dir, "lease"), leaseRecord{recordVersion, a.gpus, caps}); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, accountName)
	var err error
	if a.file, err = account.Create(path, caps); errors.Is(err, os.ErrExist) {
		a.file, err = account.Open(path, caps)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

// capsOf is what a lease grants of each of its GPUs, in bytes.
func capsOf(l lease.Lease) (caps []uint64) {
	for _, g := range l.Grants {
		caps = append(caps, g.Mem)
	}
	return caps
}

// sessionRecord is a session's record: what the next daemon needs to find the session.
type sessionRecord struct {
	Slot int `json:"slot"`
	lease.Session
}

func (p *Pool) recordPath(s *session) string {
	return filepath.Join(p.cfg.Dir, s.Lease, sessionPrefix+strconv.Itoa(s.slot))
}

func (p *Pool) writeRecord(s *session) error {
	return writeFile(p.recordPath(s), sessionRecord{s.slot, s.Session})
}

func (p *Pool) removeRecord(s *session) {
	for _, path := range []string{p.recordPath(s), p.linkPath(s)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			p.log.Error("record of a session", "error", err)
		}
	}
}

func (p *Pool) linkPath(s *session) string {
	return filepath.Join(p.cfg.Dir, s.Lease, linkPrefix+strconv.Itoa(s.slot))
}

// link makes the socket at which a session listens for daemons, and connects this daemon to it.
func (p *Pool) link(s *session) (*os.File, error) {
	l, err := unixsock.ListenPackets(p.linkPath(s))
	if err != nil {
		return nil, fmt.Errorf("exchange: %w", err)
	}
	defer l.Close()
	f, err := l.File()
	if err != nil {
		return nil, fmt.Errorf("exchange: %w", err)
	}
	if err := p.joinExchange(s); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// joinExchange makes the lease's broker serve the session.
func (p *Pool) joinExchange(s *session) error {
	c, err := unixsock.DialPackets(p.linkPath(s))
	if err != nil {
		return fmt.Errorf("exchange: %w", err)
	}
	s.l.broker.Join(s.slot, c)
	return nil
}

// writeFile writes a record. The file system is in memory, since a record must outlive this
// process but not the machine.
func writeFile(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return safefile.Write(path, b, safefile.How{Mode: 0o600, Volatile: true})
}

// adopt finds the accounts and sessions of an earlier daemon.
func (p *Pool) adopt() error {
	dirs, err := os.ReadDir(p.cfg.Dir)
	if err != nil {
		return fmt.Errorf("workers: %w", err)
	}
	n, gone := 0, 0
	for _, d := range dirs {
		if !form.LeaseID(d.Name()).Valid() {
			continue
		}
		if err := safefile.SweepAbandoned(filepath.Join(p.cfg.Dir, d.Name()), ""); err != nil {
			p.log.Warn("unfinished records of a lease", "lease", d.Name(), "error", err)
		}
		l, err := p.adoptLease(d.Name())
		if err != nil {
			// Either the daemon died while it made the account, or a session has damaged it.
			p.log.Error("account of a lease cannot be used: its sessions are ended", "lease", d.Name(), "error", err)
			if err := p.abandon(d.Name()); err != nil {
				p.log.Error("a session without an account could not be ended; the daemon tries again when it starts next", "lease", d.Name(), "error", err)
			}
			continue
		}
		p.leases[l.id] = l
		if l.file == nil {
			continue
		}
		a, g := p.adoptSessions(l)
		n, gone = n+a, gone+g
	}
	if err := p.sweepShared(); err != nil {
		p.log.Warn("directories of ended leases", "error", err)
	}
	p.others()
	p.cg.sweep()
	if n+gone > 0 {
		p.log.Info("sessions found again", "live", n, "ended", gone)
	}
	return nil
}

func (p *Pool) adoptLease(id string) (*leased, error) {
	dir := filepath.Join(p.cfg.Dir, id)
	b, err := os.ReadFile(filepath.Join(dir, "lease"))
	if err != nil {
		return nil, err
	}
	var r leaseRecord
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, err
	}
	if r.Version != recordVersion {
		return nil, fmt.Errorf("the record has version %d, and this release reads version %d", r.Version, recordVersion)
	}
	l := &leased{id: id, gpus: r.GPUs, sessions: map[*session]bool{}, parts: map[uint32]*part{}, totals: p.readTotals(id), broker: exchange.NewBroker(p.log.With("lease", id))}
	if l.totals.Ended {
		l.ending = true
		return l, nil
	}
	if l.file, err = account.Open(filepath.Join(dir, accountName), r.Caps); err != nil {
		return nil, err
	}
	if l.file.Devices() != len(r.GPUs) {
		l.file.Close()
		return nil, fmt.Errorf("the account is for %d GPUs, and the record for %d", l.file.Devices(), len(r.GPUs))
	}
	return l, nil
}

// abandon ends the live sessions of a lease without an account, and removes its files. So
// no session outlives its lease unnoticed, and the next lease finds nothing of this one.
func (p *Pool) abandon(id string) error {
	files, _ := filepath.Glob(filepath.Join(p.cfg.Dir, id, sessionPrefix+"*"))
	for _, path := range files {
		r, err := readRecord(path)
		if err != nil {
			p.log.Error("record of a session cannot be read", "file", path, "error", err)
			continue
		}
		f := openProcess(r.Worker)
		if f == nil {
			continue
		}
		err = unix.PidfdSendSignal(int(f.Fd()), unix.SIGKILL, nil, 0)
		end := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLIN}}
		n := 0
		if err == nil {
			n, _ = unix.Poll(end, int(abandonTime.Milliseconds()))
		}
		f.Close()
		if n == 0 {
			return fmt.Errorf("process %d has not ended in %v: %v", r.Worker.PID, abandonTime, err)
		}
		p.cg.remove(r.ID)
	}
	p.removeShared(id)
	return os.RemoveAll(filepath.Join(p.cfg.Dir, id))
}

// abandonTime is how long a killed process may take to end.
const abandonTime = 2 * time.Second

// readRecord reads the record of a session.
func readRecord(path string) (r sessionRecord, err error) {
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	return r, err
}

func (p *Pool) adoptSessions(l *leased) (live, gone int) {
	files, _ := filepath.Glob(filepath.Join(p.cfg.Dir, l.id, sessionPrefix+"*"))
	known := map[int]bool{}
	for _, path := range files {
		r, err := readRecord(path)
		slot, errSlot := strconv.Atoi(strings.TrimPrefix(filepath.Base(path), sessionPrefix))
		if err != nil || errSlot != nil || slot != r.Slot || slot < 0 || slot >= account.MaxSlots || r.Lease != l.id {
			p.log.Error("record of a session makes no sense", "file", path, "error", err)
			continue
		}
		known[slot] = true
		s := &session{Session: r.Session, l: l, slot: slot, open: true, done: make(chan struct{})}
		l.sessions[s] = true
		p.adoptPart(l, s)
		if s.pidfd = openProcess(s.Worker); s.pidfd != nil {
			live++
			// A session that does not compute, or is of a release without exchange, has no socket.
			if err := p.joinExchange(s); err != nil && !errors.Is(err, os.ErrNotExist) {
				p.log.Warn("a session shares no memory with others of its lease", "lease", l.id, "session", s.ID, "error", err)
			}
			go p.watch(s)
			continue
		}
		gone++
		p.finish(s, true)
	}
	// Free the slots that a daemon claimed before it died without writing their records.
	all, err := l.file.Sessions()
	if err != nil {
		p.log.Error("account", "lease", l.id, "error", err)
	}
	for _, s := range all {
		if !known[s.N] {
			_ = l.file.Free(s.N)
		}
	}
	return live, gone
}

// openProcess returns a pidfd of a process, or nil if the process has ended.
func openProcess(q lease.Process) *os.File {
	fd, err := unix.PidfdOpen(q.PID, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil
	}
	// The id may be another process's by now. Once the pidfd is open it cannot change any more, so it is compared now.
	start, err := process.Start(q.PID)
	if err != nil || start != q.Start || exited(fd) {
		unix.Close(fd)
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}

func exited(fd int) bool {
	f := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, _ := unix.Poll(f, 0)
	return n > 0
}

// waitPidfd waits until a process has ended. It occupies no thread meanwhile.
func waitPidfd(f *os.File) {
	c, err := f.SyscallConn()
	if err == nil {
		err = c.Read(func(fd uintptr) bool { return exited(int(fd)) })
	}
	if err == nil {
		return
	}
	for {
		p := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLIN}}
		if n, err := unix.Poll(p, -1); n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
