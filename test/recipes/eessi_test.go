package recipes

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// eessi is a place of EESSI's shape in a temporary directory.
type eessi struct {
	t                         *testing.T
	dir, repo, host, override string
}

func newEESSI(t *testing.T) *eessi {
	t.Helper()
	dir := t.TempDir()
	e := &eessi{t, dir, dir + "/cvmfs", dir + "/opt/eessi/nvidia/x86_64/host", dir + "/override"}
	e.mkdir(e.repo + "/versions/2025.06/compat/linux/x86_64/lib")
	e.link(dir+"/opt/eessi", e.repo+"/host_injections") // leads nowhere yet
	e.link(e.override, e.repo+"/versions/2025.06/compat/linux/x86_64/lib/nvidia")
	return e
}

func (e *eessi) mkdir(path string) {
	e.t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		e.t.Fatal(err)
	}
}

// libraries makes a driver's or Sluice's libraries in a directory, and returns it.
func (e *eessi) libraries(name string) string {
	e.t.Helper()
	lib := filepath.Join(e.dir, name)
	e.mkdir(lib)
	for _, f := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if err := os.WriteFile(lib+"/"+f, []byte(name), 0o755); err != nil {
			e.t.Fatal(err)
		}
	}
	return lib
}

func (e *eessi) link(to, name string) {
	e.t.Helper()
	e.mkdir(filepath.Dir(name))
	_ = os.Remove(name)
	if err := os.Symlink(to, name); err != nil {
		e.t.Fatal(err)
	}
}

func (e *eessi) script(args ...string) (string, bool) {
	e.t.Helper()
	return run(e.t, append(os.Environ(), "EESSI_CVMFS_REPO="+e.repo), etc+"/eessi/link-driver.sh", args...)
}

// links makes the links, and sees that EESSI finds these libraries by all ways.
func (e *eessi) links(version, cuda, lib string) {
	e.t.Helper()
	if out, ok := e.script(version, cuda, lib); !ok {
		e.t.Fatal(out)
	}
	ways := []string{e.override, e.repo + "/versions/2025.06/compat/linux/x86_64/lib/nvidia"}
	if version == "2023.06" {
		ways = []string{e.host, e.dir + "/opt/eessi/nvidia/x86_64/latest", e.repo + "/host_injections/2023.06/compat/linux/x86_64/lib"}
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		for _, d := range ways {
			for _, from := range []string{d + "/" + name, d + "/" + strings.TrimSuffix(name, ".1")} {
				if got, err := filepath.EvalSymlinks(from); err != nil || got != lib+"/"+name {
					e.t.Errorf("%s leads to %s, %v; want %s/%s", from, got, err, lib, name)
				}
			}
		}
	}
	if got := read(e.t, ways[0]+"/cuda_version.txt"); got != cuda+"\n" {
		e.t.Errorf("cuda_version.txt is %q", got)
	}
}

// state is every file and link below the place.
func (e *eessi) state() map[string]string {
	e.t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(e.dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || d.IsDir():
			all[path] = "directory"
		case d.Type() == fs.ModeSymlink:
			all[path], err = os.Readlink(path)
		default:
			all[path] = read(e.t, path)
		}
		return err
	})
	if err != nil {
		e.t.Fatal(err)
	}
	return all
}

// refuses: the script says why, and changes nothing.
func (e *eessi) refuses(why string, args ...string) {
	e.t.Helper()
	before := e.state()
	if out, ok := e.script(args...); ok || !strings.Contains(out, why) {
		e.t.Errorf("%v was taken, or refused without %q: %s", args, why, out)
	}
	if after := e.state(); !maps.Equal(before, after) {
		e.t.Errorf("%v was refused, and has changed\n%v to\n%v", args, before, after)
	}
}

// TestEESSI: the links in a fresh place, once more after an update of the driver, and where the script makes none.
func TestEESSI(t *testing.T) {
	e := newEESSI(t)
	lib := e.libraries("usr/lib/sluice")
	for _, version := range []string{"2023.06", "2025.06"} {
		e.links(version, "12.8", lib)
		e.links(version, "12.9", lib)
	}
	e.refuses("link-driver.sh VERSION CUDA", "2023.06")
	e.refuses("want a version of EESSI", "2023", "12.8", lib)
	e.refuses("want a version of CUDA", "2023.06", "new", lib)
	e.refuses("has no libcuda.so.1", "2023.06", "12.8", e.dir)
	e.refuses("want a full path", "2023.06", "12.8", "usr/lib/sluice")
	if err := os.Remove(lib + "/libnvidia-ml.so.1"); err != nil {
		t.Fatal(err)
	}
	e.refuses("has no libnvidia-ml.so.1", "2023.06", "12.8", lib)

	e.link("/dev/null", e.repo+"/versions/2025.06/compat/linux/x86_64/lib/nvidia")
	e.refuses("EESSI_NVIDIA_OVERRIDE_DEFAULT", "2025.06", "12.8", lib)
}

// TestEESSIMoved: the libraries in another prefix, while those of the old one are there and when they are gone. Whose a link to a directory
// of another name is the script cannot know.
func TestEESSIMoved(t *testing.T) {
	e := newEESSI(t)
	for _, version := range []string{"2023.06", "2025.06"} {
		old := e.libraries("apps/sluice/0.1.0/lib/sluice")
		e.links(version, "12.8", old)
		e.links(version, "12.8", e.libraries("apps/sluice/0.2.0/lib/sluice"))
		e.links(version, "12.8", old)
		if err := os.RemoveAll(old); err != nil {
			t.Fatal(err)
		}
		e.links(version, "12.8", e.libraries("usr/lib/sluice"))
		e.links(version, "12.8", e.libraries("copied"))
		e.refuses("has another libcuda.so.1", version, "12.8", e.dir+"/usr/lib/sluice")
	}
}

// TestEESSIDriver: links and files that are another driver's, alive or not.
func TestEESSIDriver(t *testing.T) {
	for _, version := range []string{"2023.06", "2025.06"} {
		for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1", "libcuda.so", "libnvidia-ml.so"} {
			e := newEESSI(t)
			lib, driver := e.libraries("usr/lib/sluice"), e.libraries("driver")
			entry := map[string]string{"2023.06": e.host, "2025.06": e.override}[version] + "/" + name
			e.link(driver+"/"+strings.TrimSuffix(name, ".1")+".1", entry)
			e.refuses("has another "+name+":", version, "12.8", lib)
			if err := os.RemoveAll(driver); err != nil {
				t.Fatal(err)
			}
			e.refuses("remove "+entry, version, "12.8", lib)
			if err := os.Remove(entry); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(entry, []byte("a driver"), 0o755); err != nil {
				t.Fatal(err)
			}
			e.refuses("has another "+name+":", version, "12.8", lib)
			if err := os.Remove(entry); err != nil {
				t.Fatal(err)
			}
			e.links(version, "12.8", lib)
		}
	}
	e := newEESSI(t)
	lib := e.libraries("usr/lib/sluice")
	latest := e.dir + "/opt/eessi/nvidia/x86_64/latest"
	e.link("535.104", latest)
	e.refuses(latest+" leads to another driver", "2023.06", "12.8", lib)
	e.link("host", latest)
	e.mkdir(e.dir + "/opt/eessi/2023.06/compat/linux/x86_64/lib")
	e.refuses("is no link to", "2023.06", "12.8", lib)
}
