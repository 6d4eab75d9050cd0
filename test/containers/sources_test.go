//go:build sources

package containers

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/test/slurm/lab"
)

// Engines that Debian does not have, compiled from their sources by sources.sh: `make test-sources`.

// plugin is how a site installs pyxis beside ours. Slurm reads the folder's files by their names: pyxis comes first.
const plugin = "required /usr/lib/slurm/spank_pyxis.so\n"

// plugstack is for the head of a log.
const plugstack = "cat /etc/slurm/plugstack.conf.d/*.conf"

func init() {
	rootScript = "./sources.sh"
	adapt = func(o *lab.Options) { o.Etc["plugstack.conf.d/pyxis.conf"] = plugin }
}

// images makes two squashfs images of the tree, the second one with what the images of CUDA set. enroot gets folders of the
// node's own, as a site gives it: it knows a running container by its path in its file system, which a bound folder hides.
func (s *site) images() (plain, cuda string) {
	s.t.Helper()
	plain, cuda = s.Path("work/image.sqsh"), s.Path("work/cuda.sqsh")
	if _, err := os.Stat(cuda); err == nil {
		return plain, cuda
	}
	if _, err := s.Nodes[0].RunIn(s.ctx, lab.Root, fmt.Sprintf(`set -eu
mkdir -p /etc/enroot/enroot.conf.d
printf 'ENROOT_RUNTIME_PATH %[1]s/enroot\nENROOT_DATA_PATH /dev/shm/enroot-$(id -u)\n' >/etc/enroot/enroot.conf.d/site.conf
mkdir %[2]s
tar -C %[2]s --exclude './dev/*' -xf %[3]s
pack() { mksquashfs %[2]s "$1" -noI -noD -noF -noX -quiet -no-progress; }
pack %[4]s
cat >%[2]s/etc/environment <<-ENV
	NVIDIA_VISIBLE_DEVICES=all
	NVIDIA_DRIVER_CAPABILITIES=compute,utility
	NVIDIA_REQUIRE_CUDA=cuda>=11.8
	LD_LIBRARY_PATH=/opt/theirs
ENV
pack %[5]s
chmod 644 %[4]s %[5]s
`, runtimeDir, s.Path("squash"), s.Path("image.tar"), plain, cuda), "sh"); err != nil {
		s.t.Fatal(err)
	}
	return plain, cuda
}

// TestPyxis: srun --container-image of a user's, by pyxis and enroot, without a flag of ours.
func TestPyxis(t *testing.T) {
	s := newSite(t)
	image, cuda := s.images()
	s.record("pyxis.log", plugstack)
	mine := computes(2001)
	const ask = "srun --gres=rgpu:50 --container-image="
	theirs := `sh -c 'echo "$LD_LIBRARY_PATH"; vecadd && compute'`
	s.typed(s.Ctl, lab.Alice, "", []step{
		{"image", ask + image + " " + both, mine},
		{"nvidia-smi", ask + image + " " + smi, smiSays},
		{"root of the container", ask + image + " --container-remap-root " + both, computes(0)},
		{"read-only", ask + image + " --container-readonly " + both, mine},
		{"writable", ask + image + " --container-writable sh -c 'touch /opt/x && vecadd && compute'", mine},
		{"home", ask + image + " --container-mount-home sh -c 'ls -d $HOME && vecadd && compute'", s.Path("home/alice") + "\nvecadd"},
		{"own mounts", ask + image + " --container-mounts=/srv:/mnt " + both, mine},
		{"two tasks", ask + image + " -n 2 sh -c 'compute && compute'", "compute uid=2001"},
		{"image of CUDA", ask + cuda + " " + theirs, "/run/sluice/lib:/opt/theirs\n"},
		{"named", ask + image + " --container-name=kept --container-writable " + both, mine},
		{"named again", "srun --gres=rgpu:50 --container-name=kept " + both, mine},
		{"saved", "srun --gres=rgpu:50 --container-name=kept --container-save=" + s.Path("work/saved.sqsh") + " " + both, mine},
		{"saved image", ask + s.Path("work/saved.sqsh") + " " + both, mine},
		{"library path of the host", ask + image + " --container-env=LD_LIBRARY_PATH compute", none},
		{"job without a fraction", "srun --container-image=" + image + " compute", none},
	})
	s.job(lab.Alice, true, "", []step{
		{"step", "srun --container-image=" + image + " " + both, mine},
		{"named step", "srun --container-image=" + image + " --container-name=step " + both, mine},
		{"joined step", "srun --overlap --container-image=" + image + " --container-name=long sleep 300 & until enroot list -f | grep -q '^pyxis_long *[0-9]'; do sleep 0.2; done\n" +
			"srun --overlap --container-name=long " + both + "; rc=$?; kill $!; exit $rc", mine},
		{"outside", "LD_LIBRARY_PATH=/usr/lib/sluice " + s.Path("add/usr/local/bin/compute"), "compute uid=2001"},
	}, "--time=3")
	s.job(lab.Alice, true, "", []step{{"batch script", both, mine}}, "--container-image="+image)
	s.join(image, mine)

	// After our plug-in, and without unpacking the image.
	folder := s.Path("etc", "plugstack.conf.d")
	if err := os.Rename(folder+"/pyxis.conf", folder+"/unused"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(os.Remove(folder+"/zz-pyxis.conf"), os.Rename(folder+"/unused", folder+"/pyxis.conf")); err != nil {
			t.Error(err)
		}
	}()
	line := strings.TrimSpace(plugin) + " use_squashfuse=1\n"
	if err := os.WriteFile(folder+"/zz-pyxis.conf", []byte(line), 0o644); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(s.log, "\nbehind spank_sluice.so: %s", line)
	s.typed(s.Ctl, lab.Alice, "", []step{
		{"squashfuse", ask + image + " " + both, mine},
		{"squashfuse and an image of CUDA", ask + cuda + " " + theirs, "/run/sluice/lib:/opt/theirs\n"},
	})
}

// join has steps join running containers of other jobs of the user's: one with a smaller fraction, and one without any. Each step
// has its own job's fraction, or none.
func (s *site) join(image, mine string) {
	s.t.Helper()
	begins := func(name, ask string) step {
		up := s.Path("work", name+".up")
		return step{"job of container " + name, fmt.Sprintf("sbatch -o /dev/null %s --container-image=%s --container-name=%s --container-mounts=%s:/mnt --wrap 'touch /mnt/%[3]s.up; exec sleep 300' && until [ -e %[5]s ]; do sleep 0.2; done",
			ask, image, name, s.Path("work"), up), "Submitted batch job"}
	}
	const joins = "srun --gres=rgpu:50 --container-name="
	s.typed(s.Ctl, lab.Alice, "", []step{
		begins("fraction", "--gres=rgpu:25"),
		{"joined, with a fraction", joins + "fraction " + both, mine},
		{"joined, without a fraction", "srun --container-name=fraction compute", none},
		begins("bare", ""),
		{"joined, and the container's job has none", joins + "bare " + both, mine},
	})
	s.job(lab.Alice, true, "", []step{
		{"enroot exec into another job's", "pid=$(enroot list -f | awk '$1 == \"pyxis_fraction\" {print $2}')\n" +
			"enroot exec -e SLUICE_SOCKET -e SLUICE_LEASE_ID $pid " + both, mine},
		{"enroot exec without our variables", "pid=$(enroot list -f | awk '$1 == \"pyxis_fraction\" {print $2}')\nSLUICE_LOG=error enroot exec -e SLUICE_LOG $pid compute", "!of job"},
	}, "--time=3")
	s.typed(s.Ctl, lab.Alice, "", []step{{"end", "scancel --user=alice && echo done", "done"}})
}

// TestEnrootItself: the user's own enroot in a batch script.
func TestEnrootItself(t *testing.T) {
	s := newSite(t)
	image, cuda := s.images()
	s.record("enroot.log", plugstack)
	mine := computes(2001)
	steps := []step{
		{"tree", "enroot start box " + both, mine},
		{"again", "enroot start box " + both, mine},
		{"image", "enroot start " + image + " " + both, mine},
		{"root", "enroot start --root --rw box " + both, computes(0)},
		{"nvidia-smi", "enroot start box " + smi, smiSays},
		{"image of CUDA", "enroot start cuda sh -c 'echo $LD_LIBRARY_PATH; vecadd && compute'", "/run/sluice/lib:/opt/theirs\nvecadd: n=1048576 sum=1337185854\n" + mine},
		{"exec", `enroot start box sleep 300 & until [ "$(cat /proc/$!/comm)" = sleep ]; do sleep 0.1; done
enroot exec $! ` + both + "; rc=$?; kill $!; exit $rc", mine},
		{"export", "enroot export --force --output exported.sqsh box && enroot start exported.sqsh " + both, mine},
		{"not asked", "unset SLUICE_SOCKET; enroot start box compute", none},
	}
	begin := "[ -d /dev/shm/enroot-2001/box ] || { enroot create --name box " + image + " && enroot create --name cuda " + cuda + "; } >create.log 2>&1 || cat create.log"
	s.job(lab.Alice, true, begin, steps, "--time=3")
	s.job(lab.Alice, false, begin, []step{{"job without a fraction", "enroot start box compute", none}})
}

// TestSingularity: SingularityCE, with its program that is root's and in namespaces of the user's alone.
func TestSingularity(t *testing.T) {
	s := newSite(t)
	s.record("singularity.log", plugstack)
	begin := "export SINGULARITY_CACHEDIR=$PWD/cache PATH=/usr/local/bin:$PATH\n" +
		"[ -e oci.sif ] || { for a in '--sandbox sce' sce.sif; do singularity -s build $a docker-archive:" + s.Path("docker.tar") + "; done; singularity -s pull --oci oci.sif docker-archive:" + s.Path("docker.tar") + "; }"
	mine := computes(2001)
	const exec = "singularity exec "
	steps := append(boxes("singularity", "sce", "sce.sif", mine),
		step{"image in a namespace", exec + "--userns sce.sif " + both, mine},
		step{"root's program", "singularity -d exec sce.sif true 2>&1 | grep -o 'starter-suid' | head -n 1", "starter-suid"},
		step{"--oci", exec + "--oci --device sluice.dev/gpu=$SLURM_JOB_ID oci.sif " + both, mine},
		step{"--oci and nvidia-smi", exec + "--oci --device sluice.dev/gpu=$SLURM_JOB_ID oci.sif " + smi, smiSays},
		step{"--oci without the device", exec + "--oci oci.sif compute", none},
		step{"variables taken away", "unset SINGULARITY_BINDPATH; " + exec + "sce compute", none},
	)
	s.job(lab.Alice, true, begin, steps, "--time=4")
	s.job(lab.Alice, false, begin, []step{{"job without a fraction", exec + "sce compute", none}})
	out, err := s.Nodes[0].Run(s.ctx, lab.Alice, "/usr/local/bin/singularity", "exec", s.Path("work/sce.sif"), "sh", "-c", "echo no job; compute")
	if err == nil || !strings.Contains(out, "no job") || !strings.Contains(err.Error(), none[1:]) {
		t.Errorf("without a job: %v: %s", err, out)
	}
}

// TestSingularityOfTheSite: where users may bind nothing, with the lines of etc/containers/apptainer/sluice.conf.
func TestSingularityOfTheSite(t *testing.T) {
	s := newSite(t)
	lines, err := os.ReadFile("../../etc/containers/apptainer/sluice.conf")
	if err != nil {
		t.Fatal(err)
	}
	root := func(script string) {
		t.Helper()
		if _, err := s.Nodes[0].RunIn(s.ctx, lab.Root, "cd /usr/local/etc/singularity\n"+script, "sh", "-e"); err != nil {
			t.Fatal(err)
		}
	}
	root("cp singularity.conf before; sed -i 's/^user bind control.*/user bind control = no/' singularity.conf; cat >>singularity.conf <<-'CONF'\n" + string(lines) + "CONF\n")
	defer root("mv before singularity.conf")
	// As the TaskProlog has it.
	begin := `export SINGULARITY_CACHEDIR=$PWD/cache PATH=/usr/local/bin:$PATH
[ -z "${SLUICE_SOCKET-}" ] || export SINGULARITYENV_LD_LIBRARY_PATH=/usr/lib/sluice:/.singularity.d/libs
` +
		"[ -e theirs ] || singularity -s build --sandbox theirs docker-archive:" + s.Path("docker.tar")
	s.job(lab.Alice, true, begin, []step{
		{"tree", "singularity exec theirs " + both, computes(2001)},
		{"--cleanenv", "singularity exec --cleanenv theirs " + both, computes(2001)},
		{"users bind nothing", "singularity exec --bind /srv:/mnt/srv theirs ls /mnt/srv", "!cannot access"},
	}, "--time=4")
	s.job(lab.Alice, false, begin, []step{{"job without a fraction", "singularity exec theirs compute", none}})
}
