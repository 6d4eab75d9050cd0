package slurm

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// TestForms takes every way of asking for a fraction: what each node is granted, what is charged, and that a
// CUDA program computes on it.
func TestForms(t *testing.T) {
	s := cluster(t)
	// Releases differ in what else they read.
	form := "--gres=rgpu=30"
	if s.version() == "22.05" {
		form = "--gres=gres:rgpu:30"
	}
	for _, c := range []struct {
		args    string
		nodes   int
		grants  string // of each node
		charged int
		typed   int // of rgpu_simulated
		mib     uint64
	}{
		{"--gres=rgpu:50", 1, "50", 50, 0, gpuMiB / 2},
		{"--gres=rgpu:1", 1, "1", 1, 0, 0},
		{"--gres=rgpu:100", 1, "100", 100, 0, gpuMiB},
		{"--gres=rgpu:200", 1, "100+100", 200, 0, gpuMiB},
		{"--gres=rgpu:150", 1, "100+50", 150, 0, gpuMiB},
		{"--gres=rgpu:simulated:50", 1, "50", 50, 50, gpuMiB / 2},
		{form, 1, "30", 30, 0, 0},
		{"--gres=rgpu:25 -N3", 3, "25", 75, 0, gpuMiB / 4},
		{"--gres=rgpu:simulated:40 -N2", 2, "40", 80, 80, 0},
		{"--gres=rgpu:20 -n2", 1, "20", 20, 0, 0},
		{"--gres=rgpu:50 --rgpu-mem=1G", 1, "50", 50, 0, 1024},
		{"--gres=rgpu:10 --rgpu-mem=4G", 1, "10", 50, 0, 4096},
		{"--gres=rgpu:40 --rgpu-policy=fixed --rgpu-pool=default --rgpu-spread", 1, "40", 40, 0, 0},
		{"--gres=rgpu:50 --partition=half", 1, "50", 50, 0, 1024},
		{"--gres=rgpu:50 --export=NONE", 1, "50", 50, 0, gpuMiB / 2},
		{"--gres=rgpu:50 --exclusive", 1, "50", 50, 0, gpuMiB / 2},
	} {
		t.Run(strings.ReplaceAll(c.args, " ", ","), func(t *testing.T) {
			s := &site{s.Lab, t, s.ctx}
			// The job waits until it has been looked at.
			job := s.sbatch(fmt.Sprintf("%s\nsrun --ntasks-per-node=1 %[1]s\n%s", s.program("vecadd"), s.stay()), strings.Fields(c.args)...)
			s.wait(job, "RUNNING")
			s.until(waitLong, "its lease is there", func() error {
				if n := len(s.leases(job)); n != c.nodes {
					return fmt.Errorf("%d leases", n)
				}
				return nil
			})
			for node, l := range s.leases(job) {
				if percents(l) != c.grants || l.Request.UID != uint32(lab.Alice.UID) || l.Request.Key.Cluster != s.Options.Name {
					t.Errorf("%s: granted %s, want %s: %+v", node, percents(l), c.grants, l)
				}
				if c.mib != 0 && l.Grants[0].Mem>>20 != c.mib {
					t.Errorf("%s: granted %d MiB, want %d", node, l.Grants[0].Mem>>20, c.mib)
				}
			}
			if got := s.used("rgpu"); got != c.charged {
				t.Errorf("charged %d units, want %d", got, c.charged)
			}
			if got := s.used("rgpu_simulated"); got != c.typed {
				t.Errorf("charged %d units of the type, want %d", got, c.typed)
			}
			s.release(job)
			out := s.done(job)
			if got := matches(out, "(?m)^PASS$"); got < 1+c.nodes {
				t.Errorf("%d programs passed:\n%s", got, out)
			}
			s.clean()
		})
	}
}

// TestDoors asks in #SBATCH lines, by srun and by salloc.
func TestDoors(t *testing.T) {
	s := cluster(t)
	job := s.sbatch("#!/bin/bash\n#SBATCH --gres=rgpu:50\n#SBATCH --rgpu-mem=2G\n" + s.program("memcheck") + " 2048\n")
	contains(t, s.done(job), "PASS")

	out, err := s.alice("srun", "--gres=rgpu:50", "--rgpu-mem=2G", s.program("memcheck"), "2048")
	s.must(err)
	contains(t, out, "PASS")

	out, err = s.alice("salloc", "--gres=rgpu:25", "-N2", "sh", "-c", "srun "+s.program("memcheck")+" 2048; srun -N1 -n1 "+s.program("vecadd"))
	s.must(err)
	if matches(out, "(?m)^PASS$") != 3 {
		t.Errorf("salloc: %s", out)
	}
	for _, tool := range []string{"srun", "sbatch", "salloc"} {
		out, err := s.alice(tool, "--help")
		s.must(err)
		contains(t, out, "--rgpu-mem=", "--rgpu-policy=", "--rgpu-pool=", "--rgpu-spread")
	}
}

// TestNVML: what nvidia-smi would say inside of a job is the job's fraction.
func TestNVML(t *testing.T) {
	s := cluster(t)
	job := s.sbatch("NVML_TOTAL_MIB=4096 "+s.Built("test/nvml"), "--gres=rgpu:50")
	contains(t, s.done(job), "NVML and CUDA agree")
}

// TestNoRequest: a job that does not ask sees nothing of Sluice.
func TestNoRequest(t *testing.T) {
	s := cluster(t)
	for _, args := range [][]string{{}, {"-N3"}, {"--gres=none"}} {
		job := s.sbatch("env; srun env", args...)
		out := s.done(job)
		for _, bad := range []string{"SLUICE", "LD_LIBRARY_PATH", "APPTAINER", "RGPU"} {
			if strings.Contains(out, bad) {
				t.Errorf("sbatch %v: %s in the environment:\n%s", args, bad, out)
			}
		}
	}
}

// TestBadForms: bad requests are refused when they are made, by all three programs, with the valid range.
func TestBadForms(t *testing.T) {
	s := cluster(t)
	for _, c := range []struct{ args, says string }{
		{"--gres=rgpu:0", "1 to"},
		{"--gres=rgpu:301", "1 to 300"},
		{"--gres=rgpu:1700", "1 to 300"},
		{"--gres=rgpu:6400", "1 to 300"},
		{"--gres=rgpu:1k", "1 to 300"},
		{"--gres=rgpu:-5", ""},
		{"--gres=rgpu:1.5", ""},
		{"--gres=rgpu:50%", ""},
		{"--gres=rgpu:18446744073709551616", ""},
		{"--gres=rgpu:4294967346", ""},
		{"--gres=rgpu:99999999999999999999999", ""},
		{"--gres=rgpu:h100:50", "it has: simulated"},
		{"--gres=rgpu:30,rgpu:40", "once"},
		{"--gres=rgpu:simulated:30,rgpu:40", ""},
		{"--gres=rgpu:200 -N2", "fewer nodes"},
		{"--gres=rgpu:50 -N1-2", "one number"},
		{"-L rgpu:5", "leave it out"},
		{"-L rgpu_simulated:5", "leave it out"},
		{"--gres=rgpu:50 -L rgpu:1", "leave it out"},
		{"--gres=rgpu:50 -L rgpu", "leave it out"},
		{"--gpus-per-task=rgpu:1 --gres=rgpu:10 -n1 --tres-per-task=gres:rgpu:1", ""},
		{"--gres=rgpu:50 --rgpu-mem=0", "2M"},
		{"--gres=rgpu:50 --rgpu-mem=20", "20G"},
		{"--gres=rgpu:50 --rgpu-mem=-1G", "2M"},
		{"--gres=rgpu:50 --rgpu-mem=9G", "18M to 8192M"},
		{"--gres=rgpu:50 --rgpu-mem=16M", "18M or more"},
		{"--gres=rgpu:50 --rgpu-policy=greedy", "fixed"},
		{"--gres=rgpu:50 --rgpu-pool=nope", "there are: default"},
		{"--gres=rgpu:50 --rgpu-pool=../x", "--rgpu-pool"},
	} {
		for _, tool := range []string{"sbatch --wrap=true", "srun true", "salloc true"} {
			f := strings.Fields(tool)
			argv := append([]string{f[0]}, strings.Fields(c.args)...)
			out, err := s.Ctl.Run(s.ctx, lab.Alice, append(argv, f[1:]...)...)
			if err == nil {
				t.Errorf("%s %s: accepted: %s", f[0], c.args, out)
				continue
			}
			if c.says != "" && !strings.Contains(err.Error(), c.says) {
				t.Errorf("%s %s: no %q in: %v", f[0], c.args, c.says, err)
			}
		}
	}
}

// TestModify: what was charged cannot be changed by the user, everything else can.
func TestModify(t *testing.T) {
	s := cluster(t)
	job := s.sbatch("true", "--gres=rgpu:50", "--hold")
	for _, c := range []struct {
		change string
		user   lab.User
		ok     bool
	}{
		{"licenses=rgpu:1", lab.Alice, false},
		{"licenses=", lab.Alice, false},
		{"gres=rgpu:200", lab.Alice, false},
		{"gres=", lab.Alice, false},
		{"numnodes=2", lab.Alice, false},
		{"numnodes=1-2", lab.Alice, false},
		{"timelimit=5", lab.Alice, true},
		{"jobname=other", lab.Alice, true},
		{"comment=text", lab.Alice, true},
		{"timelimit=7", lab.Root, true},
	} {
		out, err := s.Ctl.Run(s.ctx, c.user, "scontrol", "update", "jobid="+job, c.change)
		if (err == nil) != c.ok {
			t.Errorf("%s: scontrol update %s: %v %s", c.user.Name, c.change, err, out)
		}
	}
	// A job that asked for nothing cannot be made one that asks.
	plain := s.sbatch("true", "--hold")
	for _, change := range []string{"gres=rgpu:50", "licenses=rgpu:50", "licenses=rgpu_simulated:1"} {
		if out, err := s.alice("scontrol", "update", "jobid="+plain, change); err == nil {
			t.Errorf("scontrol update %s: accepted: %s", change, out)
		}
	}
	j := s.wait(job, "PENDING")
	if j["Licenses"] != "rgpu:50" || !strings.HasSuffix(j["TresPerNode"], "rgpu:50") {
		t.Errorf("licences %s, %s", j["Licenses"], j["TresPerNode"])
	}
	_, err := s.alice("scancel", job, plain)
	s.must(err)
}
