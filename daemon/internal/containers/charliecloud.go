package containers

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/oci-hook/cdi"
)

// Charliecloud reads CDI files in a way of its own: of a file only the edits that are the file's, not a device's; no
// hooks; and all files of a kind. So the job has a directory with one file, which CH_RUN_CDI_DIRS names, and `ch-run -d`
// is enough. Where single libraries are mounted it makes the loader find them, whatever LD_LIBRARY_PATH the image sets.

const (
	charlieDir  = "cdi"
	charlieFile = "sluice.json"
)

type charlieMount struct {
	Host      string   `json:"hostPath"`
	Container string   `json:"containerPath"`
	Options   []string `json:"options"`
}

type charlieEdits struct {
	Env    []string       `json:"env"`
	Mounts []charlieMount `json:"mounts,omitempty"`
}

type charlieDevice struct {
	Name  string       `json:"name"`
	Edits charlieEdits `json:"containerEdits"`
}

type charlieSpec struct {
	Version string          `json:"cdiVersion"`
	Kind    string          `json:"kind"`
	Devices []charlieDevice `json:"devices"`
	Edits   charlieEdits    `json:"containerEdits"`
}

// charliecloud writes the job's file.
func (f *Files) charliecloud(l lease.Lease) error {
	if _, err := form.ParseLeaseID(l.ID); err != nil {
		return err
	}
	dir := filepath.Join(f.cfg.Leases, l.ID)
	bind := func(from, to string) charlieMount { return charlieMount{from, to, []string{"bind", "ro"}} }
	same := func(path string) charlieMount { return bind(path, path) }
	mounts := []charlieMount{same(filepath.Join(f.cfg.Lib, "libcuda.so.1")), same(filepath.Join(f.cfg.Lib, "libnvidia-ml.so.1")), same(dir)}
	if smi := filepath.Join(f.cfg.Content, "bin/nvidia-smi"); there(smi) {
		mounts = append(mounts, bind(smi, "/usr/bin/nvidia-smi"))
	}
	b, err := json.MarshalIndent(charlieSpec{
		Version: cdi.Version, Kind: cdi.Kind,
		// The standard wants a device, and Charliecloud looks at none.
		Devices: []charlieDevice{{Name: "lease", Edits: charlieEdits{Env: []string{"SLUICE_LEASE_ID=" + l.ID}}}},
		Edits: charlieEdits{
			Env:    []string{"SLUICE_SOCKET=" + filepath.Join(dir, "sock"), "SLUICE_LEASE_ID=" + l.ID},
			Mounts: mounts,
		},
	}, "", "  ")
	if err != nil {
		return err
	}
	sub := filepath.Join(dir, charlieDir)
	if err := f.own(sub); err != nil {
		return err
	}
	return safefile.Write(filepath.Join(sub, charlieFile), append(b, '\n'), f.staged())
}

// own makes a directory that is this daemon's and that everybody may read. One of an earlier daemon stays, since
// containers may be starting; anything else that the lease's user was once able to put there goes.
func (f *Files) own(path string) error {
	fi, err := os.Lstat(path)
	if err == nil {
		if st, ok := fi.Sys().(*syscall.Stat_t); ok && fi.IsDir() && int(st.Uid) == os.Geteuid() {
			return os.Chmod(path, 0o755)
		}
		err = os.RemoveAll(path)
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil {
		err = os.Mkdir(path, 0o755)
	}
	if err == nil {
		err = os.Chmod(path, 0o755) // whatever the umask
	}
	return err
}

// charlieEnv leads ch-run to the file; the site's own directory stays. Prepended items come to stand in the opposite order.
func (f *Files) charlieEnv(l lease.Lease) []rpc.EnvOp {
	dir := filepath.Join(f.cfg.Leases, l.ID, charlieDir)
	if !there(filepath.Join(dir, charlieFile)) {
		return nil
	}
	return []rpc.EnvOp{
		{Prepend: true, Name: "CH_RUN_CDI_DIRS", Value: "/etc/cdi"},
		{Prepend: true, Name: "CH_RUN_CDI_DIRS", Value: dir},
	}
}
