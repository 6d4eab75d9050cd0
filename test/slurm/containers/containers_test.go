package containers

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// podman and docker are what a user types who knows nothing of fractions.
const (
	podman = "podman run --rm --network none "
	docker = "docker run --rm --network none "
)

// TestPodman: a user's own podman in a batch script, without a flag: as root of the container, as the user himself, as
// a subordinate one, by exec; by a CDI device with another's podman.
func TestPodman(t *testing.T) {
	r := cluster(t)
	out := r.job(1, `set -x
`+podman+`box compute
`+podman+`box vecadd
`+podman+`--userns=keep-id --read-only --cap-drop ALL --security-opt no-new-privileges box compute
`+podman+`-u 1000 box compute
`+podman+fmt.Sprintf("box memcheck %d", gpuMiB/2)+`
podman run -d --name long --network none box sleep 1000
podman exec long compute
podman exec -u 1001 long sh -c 'env -i /usr/local/bin/compute'
podman rm -f -t 0 long
/usr/bin/podman run --rm --network none --device sluice.dev/gpu=$SLURM_JOB_ID box sh -c 'echo by a device; compute'`, "--gres=rgpu:50")
	want(t, out, computed(0, 50), computed(lab.Alice.UID, 50), computed(1000, 50), computed(1001, 50), "by a device")
	if n := strings.Count(out, "\nPASS\n"); n != 2 {
		t.Errorf("%d programs passed, of vecadd and memcheck", n)
	}
	if n := strings.Count(out, "\n"+computed(0, 50)+"\n"); n != 3 {
		t.Errorf("%d containers of root computed, of the first, that of exec and that of a device:\n%s", n, out)
	}
}

// TestDocker: the same with the node's docker, whose daemon knows nothing of jobs.
func TestDocker(t *testing.T) {
	r := cluster(t)
	out := r.job(1, `set -x
`+docker+`box compute
`+docker+`box vecadd
`+docker+`--read-only --cap-drop ALL -u $(id -u) box compute
`+docker+fmt.Sprintf("box memcheck %d", gpuMiB/4)+`
docker run -d --name long --network none box sleep 1000
docker exec long compute
docker exec -u $(id -u) long sh -c 'env -i /usr/local/bin/compute'
docker restart -t 0 long
docker exec long vecadd
docker rm -f long
`+docker+`-u 1000 box compute || echo refused`, "--gres=rgpu:25")
	want(t, out, computed(0, 25), computed(lab.Alice.UID, 25))
	if n := strings.Count(out, "\nPASS\n"); n != 3 {
		t.Errorf("%d programs passed, of vecadd, memcheck and vecadd", n)
	}
	if n := strings.Count(out, "\ncompute uid="); n != 4 || !strings.HasSuffix(out, "\nrefused\n") {
		t.Errorf("%d containers computed:\n%s", n, out)
	}
}

// TestCharliecloud: ch-run, which has no hooks, without a flag, in a batch script and in a step.
func TestCharliecloud(t *testing.T) {
	r := cluster(t)
	out := r.job(1, `set -x
ch-run `+r.bare+` -- compute
ch-run --uid=0 --gid=0 `+r.bare+` -- compute
srun ch-run `+r.bare+` -- vecadd
srun ch-run `+r.bare+` -- compute`, "--gres=rgpu:25")
	want(t, out, computed(lab.Alice.UID, 25), computed(0, 25), "PASS")
	if n := strings.Count(out, "\n"+computed(lab.Alice.UID, 25)+"\n"); n != 2 {
		t.Errorf("%d containers of the user computed:\n%s", n, out)
	}
}

// TestUnasked: in a job that asks for nothing a container is what it is where nothing of ours is installed.
func TestUnasked(t *testing.T) {
	r := cluster(t)
	// Names, sizes and times of all files, the environment, and what is mounted where.
	look := `find / -xdev -path /proc -prune -o -path /sys -prune -o -path /dev -prune -o -path /run -prune -o -printf "%p %s %T@ %l\n" | grep -v -e "^/ " -e "^/etc "  -e "^/etc/hosts " -e "^/etc/hostname " -e "^/etc/resolv.conf " -e "^/etc/mtab " -e "^/.dockerenv " | sort; env | sort; cut -d" " -f5,6 /proc/self/mountinfo | sort`
	if out := r.job(1, "/usr/bin/env | grep -e SLUICE -e LD_LIBRARY -e APPTAINER -e SINGULARITY -e CONTAINERS_CONF || echo nothing"); out != "nothing\n" {
		t.Errorf("the job has %s", out)
	}
	for name, c := range map[string]struct{ ours, theirs string }{
		"podman": {podman, "/usr/bin/podman --hooks-dir=/nowhere run --rm --network none "},
		"docker": {docker, dockerDir + "/usr/bin/docker run --rm --network none --runtime runc "},
	} {
		t.Run(name, func(t *testing.T) {
			r := cluster(t)
			const args = "--hostname box --env A=b box sh -c '"
			get := func(cmd string) string { return r.job(1, cmd+args+look+"' 2>/dev/null") }
			ours, theirs := get(c.ours), get(c.theirs)
			if len(theirs) < 10000 || !strings.Contains(theirs, "\nA=b\n") {
				t.Fatalf("not looked at:\n%s", theirs)
			}
			if ours != theirs {
				t.Errorf("differs:\n%s", difference(theirs, ours))
			}
			if strings.Contains(ours, "sluice") {
				t.Error("something of ours is in it")
			}
		})
	}
}

func difference(a, b string) string {
	in := map[string]bool{}
	for l := range strings.Lines(a) {
		in[l] = true
	}
	var out strings.Builder
	for l := range strings.Lines(b) {
		if !in[l] {
			out.WriteString("now " + l)
		}
		delete(in, l)
	}
	for l := range in {
		out.WriteString("was " + l)
	}
	return out.String()
}

// held runs a job that keeps its lease until free is called, and answers its lease's directory on the node.
func (r *run) held(node int, script string) (job, dir string, free func()) {
	r.t.Helper()
	go1 := r.Path("home", "alice", "go")
	job = r.submit(node, `rm -f `+go1+`
echo lease $SLUICE_LEASE_ID
`+script+`
echo ready
while [ ! -e `+go1+` ]; do sleep 0.05; done
wait`, "--gres=rgpu:50")
	err := lab.Until(r.ctx, 60*time.Second, "the job holds", func() error {
		if out := r.Output(lab.Alice, job); !strings.Contains(out, "\nready\n") {
			return fmt.Errorf("it printed %s", out)
		}
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	_, id, _ := strings.Cut(r.Output(lab.Alice, job), "lease ")
	return job, filepath.Join("/run/sluice/leases", id[:32]), func() {
		if _, err := r.Ctl.Run(r.ctx, lab.Alice, "touch", go1); err != nil {
			r.t.Error(err)
		}
	}
}

// TestOthers: a user's containers get nothing of another's lease, and nobody but root changes what engines read of it.
func TestOthers(t *testing.T) {
	r := cluster(t)
	node := r.Nodes[1]
	job, dir, free := r.held(1, "")
	sh := func(u lab.User, script string) (string, error) {
		out, err := node.Run(r.ctx, u, "bash", "-c", r.profile()+script)
		if err != nil {
			out += err.Error()
		}
		return out, err
	}
	for _, script := range []string{
		"SLUICE_SOCKET=" + dir + "/sock podman run --rm --network none box compute",
		"podman run --rm --network none --annotation dev.sluice.lease=" + filepath.Base(dir) + " box compute",
		"podman run --rm --network none --device sluice.dev/gpu=" + job + " box compute",
		// Without any hook: whoever may write to the socket is not yet let in.
		"/usr/bin/podman run --rm --network none -v /usr/lib/sluice:/x -v " + dir + ":/lease -e LD_LIBRARY_PATH=/x -e SLUICE_SOCKET=/lease/sock box compute",
		"LD_LIBRARY_PATH=/usr/lib/sluice SLUICE_SOCKET=" + dir + "/sock " + r.bare + "/usr/local/bin/compute",
	} {
		if out, err := sh(lab.Bob, script); err == nil || strings.Contains(out, "compute uid=") {
			t.Errorf("bob, %s: %s", script, out)
		}
	}
	// As himself, in the same ways, alice does.
	for _, script := range []string{
		"podman run --rm --network none --annotation dev.sluice.lease=" + filepath.Base(dir) + " box compute",
		"/usr/bin/podman run --rm --network none -u 1000 -v /usr/lib/sluice:/x -v " + dir + ":/lease -e LD_LIBRARY_PATH=/x -e SLUICE_SOCKET=/lease/sock box compute",
	} {
		if out, err := sh(lab.Alice, script); err != nil || !strings.Contains(out, "compute uid=") {
			t.Errorf("alice, %s: %s", script, out)
		}
	}
	for _, u := range []lab.User{lab.Alice, lab.Bob} {
		for _, f := range []string{dir + "/containers.conf", dir + "/apptainer.sh", "/run/cdi/sluice-" + filepath.Base(dir) + ".json"} {
			if out, err := sh(u, "cat "+f); err != nil || !strings.Contains(out, filepath.Base(dir)) {
				t.Errorf("%s cannot read %s: %s", u.Name, f, out)
			}
			for _, change := range []string{"echo x >>" + f, "rm -f " + f, "mv " + f + " ~", "ln -sf ~ " + f, "chmod 777 " + f} {
				if out, err := sh(u, change); err == nil {
					t.Errorf("%s: %s: %s", u.Name, change, out)
				}
			}
		}
	}
	for _, u := range []lab.User{lab.Alice, lab.Bob} {
		if out, err := sh(u, leave); err != nil {
			t.Errorf("%s: %s", u.Name, out)
		}
	}
	free()
}

// TestRestart: the daemon is killed and started again: a container computes on, another one starts in the same job.
func TestRestart(t *testing.T) {
	r := cluster(t)
	node := r.Nodes[1]
	job, dir, free := r.held(1, `podman run -d --name long --network none box sleep 1000
docker run -d --name dlong --network none box sleep 1000
again() { podman exec long compute && `+podman+`box compute && docker exec dlong compute && `+docker+`box compute; }
again
(while [ ! -e $HOME/killed ]; do sleep 0.05; done; rm $HOME/killed; again; echo again; podman rm -f -t 0 long; docker rm -f dlong) &`)
	if err := node.Kill("sluiced"); err != nil {
		t.Fatal(err)
	}
	// As a crash leaves it that came while the files were made.
	for _, f := range []string{"leases.new/" + filepath.Base(dir) + ".containers.conf", "cdi/.sluice-" + filepath.Base(dir) + ".json.0123456789abcdef.new"} {
		if _, err := node.Run(r.ctx, lab.Root, "touch", "/run/"+strings.Replace(f, "leases.new", "sluice/leases.new", 1)); err != nil {
			t.Fatal(err)
		}
	}
	if err := node.StartSluiced(r.ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := node.Run(r.ctx, lab.Alice, "touch", "killed"); err != nil {
		t.Fatal(err)
	}
	err := lab.Until(r.ctx, 60*time.Second, "the containers compute again", func() error {
		if out := r.Output(lab.Alice, job); !strings.Contains(out, "\nagain\n") {
			return fmt.Errorf("they printed %s", out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(r.Output(lab.Alice, job), computed(0, 50)); n != 8 {
		t.Errorf("%d containers computed:\n%s", n, r.Output(lab.Alice, job))
	}
	free()
	if _, err := r.WaitJob(r.ctx, job, 30*time.Second, "COMPLETED"); err != nil {
		t.Error(err)
	}
}

// TestEnd: a job that is cancelled takes its containers' sessions with it, those of docker, whose programs are not in
// the job, too; and nothing of its lease is left.
func TestEnd(t *testing.T) {
	r := cluster(t)
	job, dir, _ := r.held(1, `podman run -d --name long --network none box sleep 1000
docker run -d --name dlong --network none box sleep 1000
docker exec dlong compute`)
	if _, err := r.Ctl.Run(r.ctx, lab.Alice, "scancel", job); err != nil {
		t.Fatal(err)
	}
	node := r.Nodes[1]
	err := lab.Until(r.ctx, 30*time.Second, "the lease is gone", func() error {
		out, err := node.Run(r.ctx, lab.Root, "sh", "-c", "ls -d "+dir+" /run/cdi/* /run/sluice/leases.new/* 2>/dev/null || true")
		if err == nil && out != "" {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	client := filepath.Join(dockerDir, "usr/bin/docker")
	if out, err := node.Run(r.ctx, lab.Alice, client, "exec", "dlong", "compute"); err == nil {
		t.Errorf("a container of an ended job computes: %s", out)
	}
	if out, err := node.Run(r.ctx, lab.Alice, client, "rm", "-f", "dlong"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	// Of a container whose processes were all killed podman wants to know nothing until it thinks of a reboot.
	script := "rm -rf /run/user/" + strconv.Itoa(lab.Alice.UID) + "/*"
	if _, err := node.Run(r.ctx, lab.Root, "sh", "-c", script); err != nil {
		t.Error(err)
	}
	if out, err := node.Run(r.ctx, lab.Alice, "bash", "-c", r.profile()+"/usr/bin/podman rm -f -t 0 long\n"+leave); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestInherited: a job that is submitted within another has nothing of the other's for its containers.
func TestInherited(t *testing.T) {
	r := cluster(t)
	out := r.job(1, `sbatch --wait -o inner -w `+r.Nodes[0].Name+` --wrap 'env | grep -e SLUICE -e APPTAINER -e SINGULARITY -e CONTAINERS_CONF || echo nothing; `+podman+`box ls /usr/lib/sluice'
cat inner; rm inner
`+podman+`box compute`, "--gres=rgpu:25")
	want(t, out, "nothing", "ls: cannot access '/usr/lib/sluice': No such file or directory", computed(0, 25))
}

// TestRun: a lease of sluice run in a job takes the place of the job's in its containers.
func TestRun(t *testing.T) {
	r := cluster(t)
	out := r.job(1, `sluice run --fraction 50 -- `+podman+`box compute
sluice run --fraction 50 -- ch-run `+r.bare+` -- compute
sluice run --fraction 50 -- `+docker+`box compute
`+podman+`box compute`, "--gres=rgpu:25")
	want(t, out, computed(0, 25), computed(0, 50), computed(lab.Alice.UID, 50))
	if n := strings.Count("\n"+out, "\n"+computed(0, 50)+"\n"); n != 2 {
		t.Errorf("%d containers computed, of podman and of docker:\n%s", n, out)
	}
}

// TestOwner: on the node that owns the GPU a container reaches it without the network.
func TestOwner(t *testing.T) {
	r := cluster(t)
	out := r.job(0, podman+"box compute\n"+podman+"box vecadd", "--gres=rgpu:75")
	want(t, out, computed(0, 75), "PASS")
}
