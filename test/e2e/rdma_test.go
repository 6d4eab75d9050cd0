package e2e

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// rdma has all workers of these tests offer RDMA, and all programs ask for it, by the environment:
//
//	SLUICE_E2E_RDMA=sim    by the simulated library, remoting/simverbs
//	SLUICE_E2E_RDMA=real   by this machine's
//
// SLUICE_E2E_ADDRESS is the address of the device's port, which is not 127.0.0.1: what goes by a relay of the tests goes over TCP.
var (
	rdma        = os.Getenv("SLUICE_E2E_RDMA")
	rdmaAddress = os.Getenv("SLUICE_E2E_ADDRESS")
)

func useRDMA() error {
	set := map[string]string{"SLUICE_RDMA": "1", "SLUICE_LOG": "error"} // a program behind a relay warns that it goes over TCP
	switch rdma {
	case "":
		return nil
	case "sim":
		set["LD_LIBRARY_PATH"], set["SLUICE_SIMVERBS_ADDR"] = built("simverbs"), rdmaAddress
	case "real":
	default:
		return fmt.Errorf("SLUICE_E2E_RDMA=%s: give sim or real", rdma)
	}
	if ip := net.ParseIP(rdmaAddress); ip == nil || ip.IsLoopback() {
		return fmt.Errorf("SLUICE_E2E_ADDRESS=%s: give the address of the device's port", rdmaAddress)
	}
	for k, v := range set {
		if err := os.Setenv(k, v); err != nil {
			return err
		}
	}
	return nil
}

// workerAddress is a free address for a worker.
func workerAddress(t testing.TB, o *workerOptions) string {
	t.Helper()
	host, port, err := net.SplitHostPort(freeAddress(t))
	if err != nil {
		t.Fatal(err)
	}
	if rdma != "" {
		host = rdmaAddress
	}
	return net.JoinHostPort(cmp.Or(o.host, host), port)
}

func rdmaArgs() []string {
	if rdma == "" {
		return nil
	}
	return []string{"--rdma", "on"}
}

// rdmaPath is a library path of a program.
func rdmaPath(dir string) string {
	if rdma == "sim" {
		return dir + ":" + built("simverbs")
	}
	return dir
}

// startRDMA starts a worker that offers RDMA by the simulated library, and gives a command that asks it for that.
func startRDMA(t *testing.T, o workerOptions) (*worker, func(ctx context.Context, prog string, args ...string) *exec.Cmd) {
	t.Helper()
	sim := []string{"LD_LIBRARY_PATH=" + built("simverbs"), "SLUICE_SIMVERBS_ADDR=127.0.0.1"}
	o.host, o.sandbox, o.args, o.env = "127.0.0.1", "off", append(o.args, "--rdma", "on"), append(sim, o.env...)
	w := startWorker(t, o)
	return w, func(ctx context.Context, prog string, args ...string) *exec.Cmd {
		return w.command(ctx, runOptions{mem: "512M", env: append(sim, "SLUICE_RDMA=1", "SLUICE_LOG=info")}, prog, args...)
	}
}

// overRDMA are the programs of TestRDMA; with SLUICE_E2E_RDMA there are all.
var overRDMA = map[string]bool{"vecadd": true, "pipeline": true, "memcheck": true, "hostpool": true, "arrive": true, "managed": true, "multi_process": true, "fork": true, "printf": true, "exit_live": true}

// Programs over RDMA, by the simulated library.
func TestRDMA(t *testing.T) {
	for _, o := range []workerOptions{{}, {race: true, args: []string{"--grace", "500ms"}}} {
		name := strings.Join(o.args, " ")
		if o.race {
			name += " race"
		}
		t.Run(name, func(t *testing.T) {
			w, command := startRDMA(t, o)
			for _, p := range programs {
				if !overRDMA[p.name] {
					continue
				}
				t.Run(strings.Join(append([]string{p.name}, p.args...), "-"), func(t *testing.T) {
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					defer cancel()
					r := finish(t, ctx, command(ctx, program(p.name), p.args...))
					if r.status != 0 || r.stdout != p.want+"PASS\n" || !strings.Contains(r.stderr, "over RDMA, by sim0 port 1") {
						t.Errorf("status %d after %v\nstdout: %s\nstderr: %s", r.status, r.took, r.stdout, tail(r.stderr, 20))
					}
				})
			}
			waitFor(t, 20*time.Second, "all sessions have ended", func() bool { return len(w.sessions()) == 0 })
		})
	}
}

// Where RDMA does not work the session goes over TCP, and both sides say why.
func TestRDMANot(t *testing.T) {
	for _, c := range []struct {
		name, worker, client string // environments
		why, says            string // on the worker's and on the client's side
	}{
		{"no device at the worker", "SLUICE_SIMVERBS_FAULT=none", "", "there is no device", ""},
		{"no device at the client", "", "SLUICE_SIMVERBS_FAULT=none", "the other side has no device", "there is no device"},
		{"none for this address", "", "SLUICE_SIMVERBS_ADDR=127.0.0.9", "the other side has no device", "no device has an active port with the connection's local address"},
		{"another device is asked for", "", "SLUICE_RDMA=mlx5_0", "the other side has no device", "no device mlx5_0 has an active port"},
		{"no queue pair at the worker", "SLUICE_SIMVERBS_FAULT=create_qp", "", "queue pair", ""},
		{"no memory at the client", "", "SLUICE_SIMVERBS_FAULT=reg_mr", "the other side has no device", "memory for RDMA"},
		{"what is sent does not arrive", "", "SLUICE_SIMVERBS_FAULT=cut=0", "did not get through", "did not get through"},
		{"what the worker sends does not arrive", "SLUICE_SIMVERBS_FAULT=cut=0", "", "did not get through", "did not get through"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, command := startRDMA(t, workerOptions{env: strings.Fields(c.worker)})
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			cmd := command(ctx, program("vecadd"))
			cmd.Env = append(cmd.Env, strings.Fields(c.client)...)
			r := finish(t, ctx, cmd)
			if r.status != 0 || !strings.HasSuffix(r.stdout, "PASS\n") || strings.Contains(r.stderr, "the session goes over RDMA") {
				t.Errorf("status %d\nstdout: %s\nstderr: %s", r.status, r.stdout, r.stderr)
			}
			if !strings.Contains(r.stderr, c.says) || !strings.Contains(w.log.String(), c.why) {
				t.Errorf("the client says: %s\nthe worker says: %s\nwant %q and %q", r.stderr, w.log, c.says, c.why)
			}
		})
	}
}

// RDMA that is lost in mid-session: with a grace the session goes on over TCP, without one it ends at once with an error.
func TestRDMALost(t *testing.T) {
	for _, side := range []string{"client", "worker"} {
		for _, grace := range []string{"0s", "30s"} {
			for _, after := range []string{"3", "40", "200", "1000"} {
				t.Run(strings.Join([]string{side, grace, after}, " "), func(t *testing.T) {
					t.Parallel()
					fault := []string{"SLUICE_SIMVERBS_FAULT=cut=" + after}
					o := workerOptions{args: []string{"--grace", grace}}
					if side == "worker" {
						o.env = fault
					}
					w, command := startRDMA(t, o)
					ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
					defer cancel()
					stats := filepath.Join(t.TempDir(), "stats")
					cmd := command(ctx, built("test/background"), "12", "8")
					if cmd.Env = append(cmd.Env, "SLUICE_STATS="+stats); side == "client" {
						cmd.Env = append(cmd.Env, fault...)
					}
					r := finish(t, ctx, cmd)
					// The program may end with its error before the shim has said why.
					ended := r.status != 0 && strings.Contains(r.stderr, ": error 46")
					lost := ended || strings.Contains(r.stderr, "is back after")
					switch {
					case !strings.Contains(r.stderr, "over RDMA, by"):
						t.Errorf("not over RDMA: %s", r.stderr)
					case r.took > 30*time.Second:
						t.Errorf("took %v", r.took)
					case lost && grace == "0s" && !ended:
						t.Errorf("status %d: %s", r.status, r.stderr)
					case r.status != 0 && !ended, grace != "0s" && ended:
						t.Errorf("status %d: %s", r.status, r.stderr)
					case !lost && after != "1000" && side == "client":
						t.Errorf("it was not lost: %s", r.stderr)
					}
					waitFor(t, 20*time.Second, "all sessions have ended", func() bool { return len(w.sessions()) == 0 })
				})
			}
		}
	}
}
