package worker

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// BenchmarkLaunch measures the worker's part of launches that nothing holds up, frame by frame as the executor takes them, on a
// driver that does nothing.
func BenchmarkLaunch(b *testing.B) {
	loadFakeDriver(b)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, acct := fakeSession(b, nil, nil)
	defer func() { s.rd.Close(); acct.Close() }()
	if rc := s.ctxActivate(u32(0)); rc != 0 {
		b.Fatal(rc)
	}
	testKernel(s)
	p := frame(wire.OpLaunch, 0, u32(1), u32(0), u32(1), u32(1), u32(1), u32(1), u32(1), u32(1), u32(0), []byte{0, 0, 0, 0}, u32(8), u64(5))[wire.RequestSize:]
	s.hdr.Op = wire.OpLaunch
	cpu := func() int64 { // of this thread alone: what else the machine does is not in it
		var u unix.Rusage
		_ = unix.Getrusage(unix.RUSAGE_THREAD, &u)
		return u.Utime.Nano() + u.Stime.Nano()
	}
	begun := cpu()
	for b.Loop() {
		s.launch(p)
	}
	b.ReportMetric(float64(cpu()-begun)/float64(b.N), "cpu-ns/op")
}
