package node

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/inventory"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

func ptr[T any](v T) *T { return &v }

func TestGPUFaults(t *testing.T) {
	const reset = "sluice drain gpu01:3; once no job uses gpu01, systemctl stop sluiced, nvidia-smi --gpu-reset -i GPU-a, systemctl start sluiced, and sluice resume gpu01:3"
	type faults = inventory.Faults
	for what, c := range map[string]struct {
		d       inventory.Device
		drained bool
		want    string // level, whether it drains the node, name, text; remedy
	}{
		"nothing is known": {d: inventory.Device{}},
		"all is well": {d: inventory.Device{Temperature: ptr(uint32(60)), Faults: faults{Uncorrected: ptr(uint64(0)), UncorrectedEver: ptr(uint64(7)), Rows: &inventory.Rows{Remapped: 7},
			PagesPending: ptr(false), SlowdownAt: ptr(uint32(89)), ShutdownAt: ptr(uint32(92)), Slowdown: &inventory.Slowdown{}}}},
		"limits of zero": {d: inventory.Device{Temperature: ptr(uint32(60)), Faults: faults{SlowdownAt: ptr(uint32(0)), ShutdownAt: ptr(uint32(0))}}},
		"no temperature": {d: inventory.Device{Faults: faults{SlowdownAt: ptr(uint32(89))}}},
		"lost": {d: inventory.Device{Lost: true, Error: "NVML cannot tell its memory: the GPU is lost", Faults: faults{Uncorrected: ptr(uint64(3))}},
			want: "fail true gpu GPU-a (3): NVML cannot tell its memory: the GPU is lost; see dmesg; drain the node and reboot it, and have the GPU looked at if it stays away; restart sluiced if it was taken out\n"},
		"lost, and drained": {d: inventory.Device{Lost: true, Error: "NVML does not list it any more"}, drained: true,
			want: "fail false gpu GPU-a (3): NVML does not list it any more; see dmesg; drain the node and reboot it, and have the GPU looked at if it stays away; restart sluiced if it was taken out\n"},
		"ill in another way": {d: inventory.Device{Error: "it is in MIG mode"}},
		"unread": {d: inventory.Device{Unread: true, Error: "NVML cannot open it: no permission"},
			want: "fail unknown gpu GPU-a (3): NVML cannot open it: no permission; see dmesg and nvidia-smi; it is used again once it is healthy\n"},
		"unread, and drained": {d: inventory.Device{Unread: true, Error: "NVML cannot open it: no permission"}, drained: true,
			want: "fail false gpu GPU-a (3): NVML cannot open it: no permission; see dmesg and nvidia-smi; it is used again once it is healthy\n"},
		"ECC": {d: inventory.Device{Faults: faults{Uncorrected: ptr(uint64(3)), UncorrectedEver: ptr(uint64(12))}},
			want: "warn false ecc GPU-a (3): uncorrected ECC errors since the driver was loaded: 3, ever: 12; programs that used that memory have ended; if there are more of them, " + reset + "\n"},
		"ECC, without a sum": {d: inventory.Device{Faults: faults{Uncorrected: ptr(uint64(3))}},
			want: "warn false ecc GPU-a (3): uncorrected ECC errors since the driver was loaded: 3; programs that used that memory have ended; if there are more of them, " + reset + "\n"},
		"a row waits": {d: inventory.Device{Faults: faults{Rows: &inventory.Rows{Remapped: 2, Pending: true}}},
			want: "fail true remap GPU-a (3): a row of its memory is remapped at the next reset; remapped so far: 2; " + reset + "\n"},
		"a row waits, and the GPU is drained": {d: inventory.Device{Faults: faults{Rows: &inventory.Rows{Pending: true}}}, drained: true,
			want: "fail false remap GPU-a (3): a row of its memory is remapped at the next reset; remapped so far: 0; " + reset + "\n"},
		"a row is not remapped": {d: inventory.Device{Faults: faults{Rows: &inventory.Rows{Remapped: 512, Pending: true, Failed: true}}},
			want: "fail true remap GPU-a (3): a row of its memory could not be remapped; remapped so far: 512; sluice drain gpu01:3, and have it replaced\n"},
		"a page waits": {d: inventory.Device{Faults: faults{PagesPending: ptr(true)}},
			want: "fail true remap GPU-a (3): a page of its memory is retired at the next reset; " + reset + "\n"},
		"hot": {d: inventory.Device{Temperature: ptr(uint32(89)), Faults: faults{SlowdownAt: ptr(uint32(89)), ShutdownAt: ptr(uint32(92))}},
			want: "warn false thermal GPU-a (3): 89 degrees C, and it lowers its clocks at 89; see the fans and the air; sluice drain keeps new leases away\n"},
		"too hot": {d: inventory.Device{Temperature: ptr(uint32(95)), Faults: faults{SlowdownAt: ptr(uint32(89)), ShutdownAt: ptr(uint32(92))}},
			want: "fail false thermal GPU-a (3): 95 degrees C, and it switches itself off at 92; see the fans and the air; sluice drain keeps new leases away\n"},
		"slow for heat and power": {d: inventory.Device{Faults: faults{Slowdown: &inventory.Slowdown{Any: true, Thermal: true, Brake: true}}},
			want: "warn false clocks GPU-a (3): the hardware has lowered its clocks, because it is too hot and the power supply has its brake on; see the fans, the air and the power supplies, and nvidia-smi -q -d PERFORMANCE; programs are slower until then\n"},
		"slow for something": {d: inventory.Device{Faults: faults{Slowdown: &inventory.Slowdown{Any: true}}},
			want: "warn false clocks GPU-a (3): the hardware has lowered its clocks, because of heat or of current, it does not say which; see the fans, the air and the power supplies, and nvidia-smi -q -d PERFORMANCE; programs are slower until then\n"},
	} {
		c.d.UUID, c.d.Index = "GPU-a", 3
		if got := written(gpuFaults("gpu01", c.d, c.drained)); got != c.want {
			t.Errorf("%s:\n%swant:\n%s", what, got, c.want)
		}
	}
	want := "fail true gpu the GPU with index 3: it has no UUID: the GPU is lost; see dmesg; drain the node and reboot it, and have the GPU looked at if it stays away; restart sluiced if it was taken out\n"
	if got := written(gpuFaults("gpu01", inventory.Device{Index: 3, Lost: true, Error: "it has no UUID: the GPU is lost"}, false)); got != want {
		t.Errorf("without a UUID:\n%s", got)
	}
}

func TestNVMLCheck(t *testing.T) {
	for _, c := range []struct {
		age   time.Duration
		known bool
		why   string
		want  string
	}{
		{0, false, "NVML has not answered yet", "fail unknown nvml NVML has not answered yet; see dmesg\n"},
		{time.Minute, true, "it hangs", "fail unknown nvml it hangs; last answer 1m0s ago; see dmesg\n"},
		{21 * time.Second, true, "", "warn unknown nvml last answer 21s ago; see dmesg\n"},
		{20 * time.Second, true, "", "ok false nvml answered 20s ago; \n"},
	} {
		if got := written([]rpc.Check{nvmlCheck(c.age, c.known, c.why, 5*time.Second, "see dmesg")}); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// A look that hangs is not begun again, and those who ask hear since when. Once it returns, its findings are there, and the next one begins.
func TestLooks(t *testing.T) {
	var l singleLook
	began, goOn := 0, make(chan struct{})
	look := func(ctx context.Context) []rpc.Check {
		began++ // one at a time
		<-goOn
		return []rpc.Check{{Name: "disk", Text: fmt.Sprint(began, ctx.Err())}}
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	at := time.Unix(1e9, 0)
	for _, after := range []time.Duration{0, lookHangs - 1, lookHangs, time.Hour} {
		c := l.get(gone, at.Add(after), look)
		if len(c) != 1 || c[0].Name != "health" || c[0].Level != rpc.Fail || !c[0].Unknown || c[0].Node != (after >= lookHangs) || !strings.Contains(c[0].Text, "since 2001-09-09T01:46:40Z") {
			t.Errorf("after %v: %+v", after, c)
		}
	}
	l.mu.Lock()
	first := l.now
	l.mu.Unlock()
	close(goOn)
	<-first.done
	if len(first.found) != 1 || first.found[0].Text != "1 <nil>" {
		t.Errorf("%+v", first.found)
	}
	if c := l.get(t.Context(), at, look); len(c) != 1 || c[0].Text != "2 <nil>" {
		t.Errorf("%+v", c)
	}
}

func written(cs []rpc.Check) (s string) {
	for _, c := range cs {
		node := fmt.Sprint(c.Node)
		if c.Unknown {
			node = "unknown"
		}
		s += fmt.Sprintf("%s %s %s %s; %s\n", c.Level, node, c.Name, c.Text, c.Remedy)
	}
	return s
}
