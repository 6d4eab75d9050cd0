// Package control is how a session process is started: the command that starts it,
// and the one START message that later gives it a client. The stand-alone worker
// and the node daemon both do it this way.
package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// LogFD is where a session process logs: a pipe to its starter. Its standard error is a file that nobody else
// writes, see Spawn.
const LogFD = 4

// SharedDirFD is what /dev/shm of a session with a /dev of its own is: a directory of the lease, from when the session has its client.
// Nothing else in a new process has such a high number.
const SharedDirFD = 200

// FD is the session process's end of its control socket, a Unix socket of packets.
// Its closing ends a process that has no client yet.
const FD = 3

// ExitOverrun is the exit status of a session that ended itself because of its work on a GPU outside of
// turns (shares.overrun).
const ExitOverrun = 3

// OverrunReason says why a session ends that exceeds the site's limit. owes is what the lease's sessions took of the
// GPU's time together and have not paid for.
func OverrunReason(gpu string, overdue, owes, limit time.Duration) string {
	return fmt.Sprintf(overrunText+"%s for %v after its turn, and its lease owes %v of that GPU's time; shares.overrun.limit is %v",
		gpu, overdue.Round(time.Millisecond), owes.Round(time.Millisecond), limit)
}

// overrunText is what reasons of OverrunReason begin with.
const overrunText = "its work stayed on "

// IsOverrun says whether a session's reason is one of OverrunReason.
func IsOverrun(reason string) bool { return strings.HasPrefix(reason, overrunText) }

// Hold keeps a connection that a session has been given from ending before its starter releases it. A client that ends waits for the end
// of its connection, which then says that the process has ended and that what it had is free. Without Hold the kernel closes the
// connection at some point of the process's end. release does nothing if c cannot be held.
func Hold(c any) (release func()) {
	held := -1
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { held, _ = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
		}
	}
	return func() {
		if held >= 0 {
			_ = unix.Close(held)
		}
		held = -1
	}
}

// Facts is what the probe found; sizes in bytes, by device.
type Facts struct {
	Snapshot wire.Snapshot
	Overhead []uint64 // what one context takes
	Idle     []uint64 // what was in use before, as NVML says
	// Compiled is what the driver returned when it was given PTX to compile on each device.
	Compiled []int `json:",omitempty"`
	// HostReach says whether kernels on each device can use any address of their process (PAGEABLE_MEMORY_ACCESS), see Pageable.
	HostReach []bool `json:",omitempty"`
}

// ErrProbe says that the probe's answer makes no sense.
var ErrProbe = errors.New("probe failed")

// ReadFacts reads what the probe wrote about n devices.
func ReadFacts(b []byte, n int) (*Facts, error) {
	var f Facts
	if err := json.Unmarshal(b, &f); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProbe, err)
	}
	if err := f.Check(n); err != nil {
		return nil, err
	}
	return &f, nil
}

// Check says whether the facts are of n devices.
func (f *Facts) Check(n int) error {
	if len(f.Snapshot.Devices) != n || len(f.Overhead) != n || len(f.Idle) != n {
		return fmt.Errorf("%w: it describes %d devices of %d", ErrProbe, len(f.Snapshot.Devices), n)
	}
	return nil
}

// Choose has a probe ask the driver in the sandbox that sessions are to have, and gives the mode that they have then. In mode Auto they
// have none if the driver does worse in it; why is what is missing and goes into the log.
func Choose(mode sandbox.Mode, probe func(sandbox.Mode) (*Facts, error)) (f *Facts, _ sandbox.Mode, why, err error) {
	if !mode.Files() {
		f, err = probe(sandbox.Off)
		return f, mode, nil, err
	}
	if f, err = probe(mode); mode == sandbox.On {
		if err == nil && slices.ContainsFunc(f.Compiled, func(rc int) bool { return rc != 0 }) {
			why = fmt.Errorf("the driver returned %v when it compiled a kernel in the sandbox", f.Compiled)
		}
		return f, mode, why, err
	}
	if err == nil && !slices.ContainsFunc(f.Compiled, func(rc int) bool { return rc != 0 }) {
		if sandbox.Landlock() == 0 {
			why = sandbox.ErrNoLandlock
		}
		return f, mode, why, nil
	}
	inside, bad := f, err
	if f, err = probe(sandbox.Off); err != nil {
		return nil, sandbox.Off, nil, err
	}
	if bad == nil && slices.Equal(f.Compiled, inside.Compiled) {
		return f, mode, nil, nil // the driver compiles nothing in any case
	}
	if bad == nil {
		bad = fmt.Errorf("the driver returned %v when it compiled a kernel in the sandbox, and %v outside", inside.Compiled, f.Compiled)
	}
	return f, sandbox.Off, bad, nil
}

// Start is the START message. With it come the client's socket, the account, and
// for a detached session the directory of the image store and the count of all images.
type Start struct {
	Facts            // TotalMem is what the lease grants
	Lease string     `json:",omitempty"` // for the log
	Slot  int        // of the account
	Hello wire.Hello // already read by the sender; of a detached session only the kind is known
	// Detached sessions answer with one byte, read the HELLO themselves, and do
	// not end with their starter.
	Detached   bool
	StoreLimit int64 // bytes of the directory
	// StoreTotal is the limit of all directories together, in bytes. Unless it is 0, the file
	// that counts them comes behind the directory.
	StoreTotal    int64 `json:",omitempty"`
	StoreKeepFree int64 `json:",omitempty"` // bytes that images leave free
	// ContentLimit bounds the directory of content, ContentTotal all such directories, in bytes. Unless ContentLimit is 0 the directory, and the file
	// that counts all of them, come behind those of the images. ContentKeepFree is what they leave free.
	ContentLimit    int64 `json:",omitempty"`
	ContentTotal    int64 `json:",omitempty"`
	ContentKeepFree int64 `json:",omitempty"`
	// Part says that the session is of a part of the lease. The part's file comes behind the account. TotalMem is what the part has,
	// and Grants what the lease grants of each device, in bytes; a daemon of an earlier release does not say the latter.
	Part   bool     `json:",omitempty"`
	Grants []uint64 `json:",omitempty"`
	// SharedDir says that the lease's directory for /dev/shm comes next.
	SharedDir bool `json:",omitempty"`
	// HostMemory is the host memory in bytes that the session must end beyond, 0 where a
	// control group sees to that, or nobody.
	HostMemory uint64 `json:",omitempty"`
	Bind       *Bind  `json:",omitempty"`
	// GraceMS is how long the session waits in milliseconds for a client whose connection was lost.
	GraceMS uint32 `json:",omitempty"`
	// Compress allows copies to the device that the client has compressed.
	Compress bool `json:",omitempty"`
	// RDMA says whether the client is offered RDMA.
	RDMA RDMA `json:",omitempty"`
	// Bulk is how many bulk connections the client may have for each direction, 0 for none.
	Bulk uint32 `json:",omitempty"`
	// Exchange says that a descriptor comes for the session's link to the others of its lease, see package exchange.
	// It comes before those of the schedules.
	Exchange bool `json:",omitempty"`
	// Turns says how the session may work on each device: in turns, or at any time. On a
	// device without an entry it may not work at all. The descriptors of the schedules come
	// last: policy and state of each device that has one.
	Turns []Turn `json:",omitempty"`
}

// Turn is a lease's place on a device's schedule.
type Turn struct {
	// Tenant is the lease's number there, or NoSchedule. Its name in the message is older:
	// daemon and worker may be of two builds during an upgrade.
	Tenant int `json:"Seat"`
}

// NoSchedule stands for the tenant of a device that has no schedule: the session may work
// at any time.
const NoSchedule = -1

// NoTurns are the turns of a session that may work on its devices at any time.
func NoTurns(devices int) []Turn {
	t := make([]Turn, devices)
	for i := range t {
		t[i].Tenant = NoSchedule
	}
	return t
}

// Schedules counts the devices that have a schedule.
func (s *Start) Schedules() int {
	n := 0
	for _, t := range s.Turns {
		if t.Tenant >= 0 {
			n++
		}
	}
	return n
}

// Bind says as whom the session goes on.
type Bind struct {
	UID, GID uint32
	Groups   []int
	Seccomp  bool
}

// MaxStart is the largest START message, in bytes.
const MaxStart = 128 << 10

// NoDevices, as Command.Confine, leaves /dev as it is.
const NoDevices = "none"

// RDMA says which sessions are offered RDMA: none if it is "off" or empty, or all that ask for it: "on", or the name of the one device to
// use, as in /sys/class/infiniband.
type RDMA string

// Off says that no session is offered RDMA.
func (r RDMA) Off() bool { return r == "" || r == "off" }

// Device is the one device to use, "" for the one that fits.
func (r RDMA) Device() string {
	if r == "on" {
		return ""
	}
	return string(r)
}

// VerbsDir has the device files of RDMA.
const VerbsDir = "/dev/infiniband"

// PlainDevices, as Command.Confine, is a /dev with no GPU in it: simulated ones have no device files.
const PlainDevices = "plain"

// Command is what starts a session process or the probe.
type Command struct {
	Exe     string
	Args    []string // before the subcommand
	LibCUDA string
	LibNVML string
	Store   string
	// Limit bounds the store, and KeepFree is the space that it leaves free, in bytes.
	Limit, KeepFree int64
	// Content is the directory of content, and ContentLimit and ContentKeepFree are its bounds in bytes; without a limit there is none.
	Content                       string
	ContentLimit, ContentKeepFree int64
	Devices                       []string // numbers in PCI order, or UUIDs
	Confine                       string   // device files a session may see, comma between, or PlainDevices; NoDevices leaves /dev alone, "" confines nothing
	// Sandbox is the sandbox of the session, or of the probe. Accounts is the directory of the accounts that sessions
	// are given, "" if those have no names.
	Sandbox  sandbox.Mode
	Accounts string
	Shared   string // where the directories of leases for /dev/shm lie, "" if there are none
}

// Cmd makes the command of a subcommand: "session" or "probe".
func (c *Command) Cmd(sub string) *exec.Cmd {
	args := append(append([]string(nil), c.Args...), sub,
		"--libcuda", c.LibCUDA, "--libnvml", c.LibNVML, "--store", c.Store,
		"--store-limit", strconv.FormatInt(c.Limit, 10), "--store-keep-free", strconv.FormatInt(c.KeepFree, 10), "--devices", strconv.Itoa(len(c.Devices)))
	if c.ContentLimit > 0 {
		args = append(args, "--content", c.Content, "--content-limit", strconv.FormatInt(c.ContentLimit, 10), "--content-keep-free", strconv.FormatInt(c.ContentKeepFree, 10))
	}
	confine := c.Confine
	if sub == "probe" {
		confine = ""
	}
	if c.Sandbox != "" && c.Sandbox != sandbox.Off {
		args = append(args, "--sandbox", string(c.Sandbox), "--accounts", c.Accounts, "--shared", c.Shared)
		if confine == "" {
			confine = NoDevices
		}
	}
	if confine != "" {
		args = append(args, "--confine", confine)
	}
	cmd := exec.Command(c.Exe, args...)
	cmd.Env = append(os.Environ(), "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES="+strings.Join(c.Devices, ","))
	cmd.Stderr = os.Stderr
	return cmd
}

// Process is a session process.
type Process struct {
	Cmd  *exec.Cmd
	Ctl  *net.UnixConn
	Done chan struct{} // closed once reaped
}

// Spawn starts a session process that waits for its client; start is cmd.Start, or
// calls it. What the process logs goes to this process's standard error, see log.go. What it writes on its own, from the
// driver's words to a crash's, is logged when it ends, at most maxWords bytes of it.
func Spawn(log *slog.Logger, cmd *exec.Cmd, start func() error) (*Process, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	child := os.NewFile(uintptr(fds[1]), "control")
	defer child.Close()
	own := os.NewFile(uintptr(fds[0]), "control")
	conn, err := net.FileConn(own)
	own.Close()
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	words, err := newWords()
	if err != nil {
		conn.Close()
		return nil, err
	}
	lines, logTo, err := newLog()
	if err != nil {
		conn.Close()
		words.Close()
		return nil, err
	}
	defer logTo.Close()
	p := &Process{Cmd: cmd, Ctl: conn.(*net.UnixConn), Done: make(chan struct{})}
	cmd.ExtraFiles = []*os.File{child, logTo} // FD and LogFD
	cmd.Stderr = words
	if err := start(); err != nil {
		p.Ctl.Close()
		words.Close()
		lines.Close()
		return nil, fmt.Errorf("session process: %w", err)
	}
	logged, to := make(chan struct{}), os.Stderr
	go func() {
		copyLog(to, lines, cmd.Process.Pid)
		lines.Close()
		close(logged)
	}()
	go func() {
		_ = cmd.Wait()
		select {
		case <-logged:
		case <-time.After(time.Second): // something else has the pipe
		}
		if text := readWords(words); text != "" {
			log.Warn("session process wrote to its standard error", "pid", cmd.Process.Pid, "text", text)
		}
		words.Close()
		close(p.Done)
	}()
	return p, nil
}

// maxWords bounds what a session process can write on its standard error, in bytes. A crash
// of Go's alone would be ten times as much.
const maxWords = 2 << 10

// newWords makes a file in memory that cannot grow.
func newWords() (*os.File, error) {
	fd, err := unix.MemfdCreate("stderr", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("session's standard error: %w", err)
	}
	f := os.NewFile(uintptr(fd), "stderr")
	err = f.Truncate(maxWords)
	if err == nil {
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("session's standard error: %w", err)
	}
	return f, nil
}

func readWords(f *os.File) string {
	b := make([]byte, maxWords)
	n, _ := f.ReadAt(b, 0)
	return strings.TrimSpace(strings.TrimRight(string(b[:n]), "\x00"))
}

// Ended says whether the process is gone.
func (p *Process) Ended() bool {
	select {
	case <-p.Done:
		return true
	default:
		return false
	}
}

// End kills the process and waits until it has been reaped.
func (p *Process) End() {
	_ = p.Cmd.Process.Kill()
	<-p.Done
	p.Ctl.Close()
}

// Give sends START with its descriptors.
func (p *Process) Give(st *Start, fds ...int) error {
	b, err := json.Marshal(st)
	if err != nil {
		return fmt.Errorf("start message: %w", err)
	}
	if len(b) > MaxStart {
		return fmt.Errorf("start message of %d bytes: at most %d", len(b), MaxStart)
	}
	if _, _, err := p.Ctl.WriteMsgUnix(b, unix.UnixRights(fds...), nil); err != nil {
		return fmt.Errorf("session process: %w", err)
	}
	return nil
}

// Await waits until a detached session has said that it is bound.
func (p *Process) Await(until time.Time) error {
	_ = p.Ctl.SetReadDeadline(until)
	var b [256]byte
	n, err := p.Ctl.Read(b[:])
	switch {
	case err != nil:
		return fmt.Errorf("session process: %w", err)
	case n == 0:
		return errors.New("session process: it ended before it had begun, see its log")
	case b[0] != 0:
		return fmt.Errorf("session process: %s", b[:n])
	}
	return nil
}

// Receive waits for START; nil when the starter is gone, or needs no session.
func Receive() (*Start, []int, error) {
	buf := make([]byte, MaxStart)
	oob := make([]byte, unix.CmsgSpace(4*(9+2*wire.MaxDevices)))
	var n, on int
	var err error
	for {
		n, on, _, _, err = unix.Recvmsg(FD, buf, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil && !errors.Is(err, unix.ECONNRESET) {
		return nil, nil, fmt.Errorf("control socket: %w", err)
	}
	if n <= 0 {
		return nil, nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil || len(msgs) != 1 {
		return nil, nil, errors.New("start message: no socket came with it")
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) < 2 {
		return nil, nil, errors.New("start message: client's socket or account is missing")
	}
	st := &Start{}
	if err := json.Unmarshal(buf[:n], st); err != nil {
		return nil, nil, fmt.Errorf("start message: %w", err)
	}
	want := 2 + 2*st.Schedules()
	if st.Exchange {
		want++
	}
	if st.SharedDir {
		want++
	}
	if st.Part {
		want++
	}
	if st.Detached {
		want++
		if st.StoreTotal > 0 {
			want++
		}
		if st.ContentLimit > 0 {
			want += 2
		}
	}
	if d := len(st.Snapshot.Devices); d == 0 || len(st.Overhead) != d || len(st.Idle) != d || len(fds) != want || len(st.Turns) > d {
		return nil, nil, errors.New("start message: its parts do not fit each other")
	}
	return st, fds, nil
}

// Answer tells the starter of a detached session that it is bound, or why not, and
// parts from it.
func Answer(err error) {
	b := []byte{0}
	if err != nil {
		b = []byte(err.Error())[:min(256, len(err.Error()))]
	}
	_ = unix.Send(FD, b, unix.MSG_NOSIGNAL)
	unix.Close(FD)
}
