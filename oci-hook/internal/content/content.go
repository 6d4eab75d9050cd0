// Package content makes the directory of the host's that containers get: our libraries
// under all their names, the settings that they find beside themselves, the site's
// nvidia-smi if it has one, and the place where a lease is mounted.
package content

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-hpc/sluice/internal/safefile"
)

// Smi is where nvidia-smi is in the directory.
const Smi = "bin/nvidia-smi"

// Prepare makes dir from the libraries in from. socket is the lease socket's path in a
// container. smi names the host's nvidia-smi; if it is empty, the directory keeps the one that
// it has. Running containers keep their files: each file is written whole under a new inode.
// What an earlier call left unfinished is removed.
func Prepare(dir, from, socket, smi string) error {
	for _, d := range []string{"lease", filepath.Dir(Smi)} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return fmt.Errorf("prepare %s: %w", dir, err)
		}
	}
	for _, d := range []string{dir, filepath.Join(dir, filepath.Dir(Smi))} {
		if err := safefile.SweepAbandoned(d, ""); err != nil {
			return fmt.Errorf("prepare %s: %w", dir, err)
		}
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if err := copyTo(filepath.Join(dir, name), filepath.Join(from, name), 0o644); err != nil {
			return fmt.Errorf("prepare %s: %w; --from names the directory of the shim", dir, err)
		}
	}
	if smi != "" {
		if err := copyTo(filepath.Join(dir, Smi), smi, 0o755); err != nil {
			return fmt.Errorf("prepare %s: %w; --nvidia-smi names the program", dir, err)
		}
	}
	for link, to := range map[string]string{"libcuda.so": "libcuda.so.1", "libnvidia-ml.so": "libnvidia-ml.so.1"} {
		if err := safefile.Symlink(to, filepath.Join(dir, link)); err != nil {
			return fmt.Errorf("prepare %s: %w", dir, err)
		}
	}
	if err := place(filepath.Join(dir, "sluice.conf"), strings.NewReader("SLUICE_SOCKET="+socket+"\n"), 0o644); err != nil {
		return fmt.Errorf("prepare %s: %w", dir, err)
	}
	return nil
}

func copyTo(path, from string, mode fs.FileMode) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	return place(path, src, mode)
}

func place(path string, src io.Reader, mode fs.FileMode) error {
	p, err := safefile.Create(path, safefile.How{Mode: mode})
	if err != nil {
		return err
	}
	if _, err = io.Copy(p, src); err == nil {
		err = p.Commit()
	}
	return errors.Join(err, p.Close())
}
