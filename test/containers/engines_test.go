package containers

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// Docker 28, through the runtime wrapper as its default runtime. The user is in docker's group.
func TestDocker(t *testing.T) {
	s := newSite(t)
	const (
		run  = "docker run --pull never --rm --network none "
		cdi  = "--device sluice.dev/gpu=$SLURM_JOB_ID "
		link = "PATH=/usr/lib/sluice/bin:$PATH "
	)
	s.job(lab.Alice, true, "", []step{
		{"client", link + run + "image " + both, computes(0)},
		{"environment", run + "--env SLUICE_SOCKET image " + both, computes(0)},
		{"annotation", run + "--annotation dev.sluice.lease=$SLUICE_LEASE_ID image " + both, computes(0)},
		{"CDI", run + cdi + "image " + both, computes(0)},
		{"unprivileged", link + run + "--user 2001 image " + both, computes(2001)},
		{"unprivileged by CDI", run + cdi + "--user 2001 image " + both, computes(2001)},
		{"read-only", link + run + "--read-only --cap-drop ALL --security-opt no-new-privileges image " + both, computes(0)},
		{"nvidia-smi", link + run + "image " + smi, smiSays},
		{"another user", run + cdi + "--user 1000 image " + both, "!the container's program runs as uid 1000"},
		{"start", link + "docker run --pull never --detach --name box --network none image sleep 300", ""},
		{"exec", "docker exec box " + both, computes(0)},
		{"exec unprivileged", "docker exec --user 2001 box " + both, computes(2001)},
		{"restart", "docker restart --time 0 box && docker exec box " + both, computes(0)},
		{"end", "docker rm --force box", "box"},
		{"start by CDI", "docker run --pull never --detach --name box " + cdi + "--network none image sleep 300", ""},
		{"exec by CDI", "docker exec box " + both, computes(0)},
		{"end by CDI", "docker rm --force box", "box"},
		{"not asked", run + "image compute", none},
	})
	s.job(lab.Root, true, "", []step{{"root", link + run + "image " + both, computes(0)}})
	s.job(lab.Alice, false, "", []step{{"job without a fraction", link + run + "image compute", none}})
}

// Podman 5 by hooks.d and the containers.conf of the job: nothing is added to the command. The same storage is root's
// or the user's own.
func TestPodman(t *testing.T) {
	const run = "podman run --rm --network none "
	s := newSite(t)
	begin := "podman import -q " + s.Path("image.tar") + " image >/dev/null"
	steps := func() []step {
		return []step{
			{"crun", run + "image " + both, computes(0)},
			{"runc", run + "--runtime runc --cgroups enabled image " + both, computes(0)},
			{"read-only", run + "--read-only --cap-drop ALL --security-opt no-new-privileges image " + both, computes(0)},
			{"own settings", run + "--env A=b --annotation a=b --volume /usr/share:/data:ro image " + both, computes(0)},
			{"nvidia-smi", run + "image " + smi, smiSays},
			{"CDI", run + "--device sluice.dev/gpu=$SLURM_JOB_ID image " + both, computes(0)},
			{"start", "podman run --detach --name box --network none image sleep 300", ""},
			{"exec", "podman exec box " + both, computes(0)},
			{"restart", "podman restart --time 0 box && podman exec box " + both, computes(0)},
			{"end", "podman rm --force --time 0 box", "box"},
			{"not asked", "unset CONTAINERS_CONF_OVERRIDE; " + run + "image compute", none},
		}
	}
	s.job(lab.Alice, true, begin, append(steps(),
		step{"keep-id", run + "--userns keep-id image " + both, computes(2001)},
		step{"unprivileged", run + "--user 1000 image " + both, computes(1000)},
		step{"keep-id and runc", run + "--runtime runc --cgroups enabled --userns keep-id --read-only image " + both, computes(2001)},
		step{"start unprivileged", "podman run --detach --name box --network none --userns keep-id image sleep 300", ""},
		step{"exec unprivileged", "podman exec box " + both + " && podman exec --user 1000 box compute", computes(2001)},
		step{"end again", "podman rm --force --time 0 box", "box"},
	))
	s.job(lab.Root, true, fmt.Sprintf(`podman() {
	if [ "$1" = run ]; then
		shift
		set -- run --cgroups enabled --cgroup-parent %s "$@"
	fi
	command podman --root %s "$@"
}
`, groups(s.Lab), s.Path("podman"))+begin, steps())
	s.job(lab.Alice, false, "", []step{{"job without a fraction", run + "image compute", none}})
}

// boxes are steps that Apptainer and SingularityCE take alike, having been one program: with a tree, which they change, and an image.
func boxes(program, tree, image, mine string) []step {
	exec := program + " exec "
	steps := []step{
		{"image", exec + image + " " + both, mine},
		{"tree", exec + tree + " " + both, mine},
		{"run", program + " run " + tree + " " + both, mine},
		{"nvidia-smi", exec + tree + " " + smi, smiSays},
	}
	for _, f := range strings.Split("--contain,--containall,--cleanenv,--compat,--userns,--writable-tmpfs,--nv,--no-mount bind-paths,--pid --ipc,--userns --containall", ",") {
		steps = append(steps, step{f, exec + f + " " + tree + " " + both, mine})
	}
	return append(steps,
		step{"--fakeroot", exec + "--fakeroot " + tree + " " + both, computes(0)},
		step{"own bind", strings.ToUpper(program) + "_BIND=/opt:/mnt " + exec + "--bind /srv " + tree + " " + both, mine},
		step{"library path of the image", "mkdir -p " + tree + "/opt/theirs && echo 'export LD_LIBRARY_PATH=/opt/theirs' >" + tree + "/.singularity.d/env/90-environment.sh && " +
			exec + tree + ` sh -c 'echo "$LD_LIBRARY_PATH"; vecadd && compute'`, "/usr/lib/sluice:/opt/theirs"},
		step{"instance", program + " instance start " + tree + " one && " + exec + "instance://one " + both, mine},
		step{"instance's end", program + " instance stop one", "Stopping one"},
	)
}

// Apptainer 1.4, without privileges, by the variables of the job. Singularity's are the same by another name.
func TestApptainer(t *testing.T) {
	s := newSite(t)
	begin := "export APPTAINER_CACHEDIR=$PWD/cache\n" +
		"[ -e image.sif ] || apptainer -s build --sandbox box docker-archive:" + s.Path("docker.tar") + " && apptainer -s build --mksquashfs-args '-noI -noD -noF -noX' image.sif box"
	mine := computes(2001)
	const exec = "apptainer exec "
	steps := append(boxes("apptainer", "box", "image.sif", mine),
		step{"only Singularity's", "unset APPTAINER_BINDPATH APPTAINERENV_SLUICE_SOCKET APPTAINERENV_SLUICE_LEASE_ID; " + exec + "box " + both, mine},
		step{"variables taken away", "unset APPTAINER_BINDPATH SINGULARITY_BINDPATH; " + exec + "box compute", none},
	)
	s.job(lab.Alice, true, begin, steps)
	// Root's container asks for every capability, and the root of a machine that is itself a container lacks some.
	s.job(lab.Root, true, "", []step{{"root", exec + "--no-privs box " + both, computes(0)}})
	s.job(lab.Alice, false, "", []step{{"job without a fraction", exec + "box compute", none}})
}

// Apptainer where users may bind nothing: with the lines of etc/containers/apptainer/sluice.conf.
func TestApptainerOfTheSite(t *testing.T) {
	s := newSite(t)
	lines, err := os.ReadFile("../../etc/containers/apptainer/sluice.conf")
	if err != nil {
		t.Fatal(err)
	}
	root := func(script string) {
		t.Helper()
		if _, err := s.Nodes[0].RunIn(s.ctx, lab.Root, script, "sh", "-e"); err != nil {
			t.Fatal(err)
		}
	}
	root("cd /etc/apptainer; cp apptainer.conf before; sed -i 's/^user bind control.*/user bind control = no/' apptainer.conf; cat >>apptainer.conf <<-'CONF'\n" + string(lines) + "CONF\n")
	defer root("cd /etc/apptainer; mv before apptainer.conf")
	begin := "export APPTAINERENV_LD_LIBRARY_PATH=/usr/lib/sluice:/.singularity.d/libs\n[ -e site ] || apptainer -s build --sandbox site docker-archive:" + s.Path("docker.tar")
	s.job(lab.Alice, true, begin, []step{
		{"tree", "apptainer exec site " + both, computes(2001)},
		{"--cleanenv", "apptainer exec --cleanenv site " + both, computes(2001)},
		{"users bind nothing", "apptainer exec --bind /srv:/mnt/srv site ls /mnt/srv", "!cannot access"},
	})
	s.job(lab.Alice, false, "", []step{{"job without a fraction", "apptainer exec site compute", none}})
}

// Slurm's own --container, with our etc/slurm/oci.conf and a bundle of the user's.
func TestSlurmContainer(t *testing.T) {
	s := newSite(t)
	if _, err := s.Nodes[0].RunIn(s.ctx, lab.Alice, "set -e; mkdir -p bundle/rootfs; cd bundle; tar -C rootfs --exclude './dev/*' --no-same-owner -xf "+s.Path("image.tar")+"; runc spec --rootless", "sh"); err != nil {
		t.Fatal(err)
	}
	bundle := s.Path("home/alice/bundle")
	out, err := s.Ctl.Run(s.ctx, lab.Alice, "srun", "--gres=rgpu:50", "--container", bundle, "sh", "-c", "vecadd && compute")
	if err != nil || !strings.Contains(out, computes(0)) {
		t.Errorf("srun: %v: %s", err, out)
	}
	s.job(lab.Alice, true, "", []step{
		{"step", "srun --container " + bundle + " " + both, computes(0)},
		{"nvidia-smi", "srun --container " + bundle + " " + smi, smiSays},
		{"outside", "LD_LIBRARY_PATH=/usr/lib/sluice " + s.Path("add/usr/local/bin/compute"), "compute uid=2001"},
	})
	s.job(lab.Alice, true, "", []step{{"batch script", both, computes(0)}}, "--container", bundle)
	out, err = s.Ctl.Run(s.ctx, lab.Alice, "srun", "--container", bundle, "compute")
	if err == nil || strings.Contains(out, "compute uid") {
		t.Errorf("without a fraction: %v: %s", err, out)
	}
}

// The drop-in for enroot and pyxis. Debian has no enroot: enroot.sh says what is tested in its stead.
func TestEnroot(t *testing.T) {
	s := newSite(t)
	enroot, err := os.ReadFile("enroot.sh")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.Path("enroot.sh"), enroot, 0o755); err != nil {
		t.Fatal(err)
	}
	begin := "mkdir -p enroot && tar -C enroot --exclude './dev/*' --no-same-owner -xf " + s.Path("image.tar") + "\n" +
		"enroot() { " + s.Path("enroot.sh") + ` "$PWD/enroot" "$@"; }`
	s.job(lab.Alice, true, begin, []step{
		{"start", "enroot " + both, computes(0)},
		{"library path of the image", "echo LD_LIBRARY_PATH=/opt/theirs >enroot/etc/environment; enroot sh -c 'echo $LD_LIBRARY_PATH; vecadd && compute'", "/run/sluice/lib:/opt/theirs\nvecadd: n=1048576 sum=1337185854\n" + computes(0)},
		{"again", "enroot " + both, computes(0)},
		{"nvidia-smi", "enroot " + smi, smiSays},
		{"no socket", "SLUICE_SOCKET=/run/nowhere/sock enroot compute", "!is not the socket of a lease"},
		{"no path", "SLUICE_SOCKET='/run/a /etc none rbind/sock' enroot compute", "!is not the socket of a lease"},
		{"not asked", "unset SLUICE_SOCKET; rm enroot/etc/environment; enroot compute", none},
	})
	s.job(lab.Alice, false, begin, []step{{"job without a fraction", "enroot compute", none}})
}

// Charliecloud 0.45 by the job's directory of CDI files. It can only -d, and its images have a directory /ch.
func TestCharliecloud(t *testing.T) {
	s := newSite(t)
	begin := "[ -e charlie ] || { mkdir charlie && tar -C charlie --exclude './dev/*' --no-same-owner -xf " + s.Path("image.tar") + " && mkdir -p charlie/ch; }"
	const run = "ch-run -d "
	s.job(lab.Alice, true, begin, []step{
		{"tree", run + "charlie -- " + both, computes(2001)},
		{"user 0", run + "--uid 0 --gid 0 charlie -- " + both, computes(0)},
		{"another library path", run + "--set-env=LD_LIBRARY_PATH=/opt/theirs charlie -- " + both, computes(2001)},
		{"nvidia-smi", run + "charlie -- " + smi, smiSays},
		{"by kind", "ch-run --cdi=sluice.dev/gpu charlie -- " + both, computes(2001)},
		{"own binds", run + "--bind " + s.Path("out") + ":/mnt charlie -- " + both, computes(2001)},
		{"exec", run + `charlie -- sleep 300 & until [ "$(cat /proc/$!/comm)" = sleep ]; do sleep 0.1; done
ch-run --join-pid=$! charlie -- ` + both + "; rc=$?; kill $!; exit $rc", computes(2001)},
		{"client", "PATH=/usr/lib/sluice/bin:$PATH ch-run charlie -- " + both, computes(2001)},
		{"client and -d", "PATH=/usr/lib/sluice/bin:$PATH " + run + "charlie -- " + both, computes(2001)},
		{"not asked", "ch-run charlie -- compute", none},
	})
	s.job(lab.Alice, false, begin, []step{
		{"job without a fraction", "ch-run charlie -- compute", none},
		{"nothing to add", run + "charlie -- compute", "!no resource files found"},
	})
}
