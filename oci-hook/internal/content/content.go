// Package content makes the directory of the host's that containers get: our libraries
// under all their names, the settings that they find beside themselves, and the place
// where a lease is mounted.
package content

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Prepare makes dir from the libraries in from. socket is the lease socket's path in a
// container. Running containers keep what they have: each file is made aside and renamed.
func Prepare(dir, from, socket string) error {
	if err := os.MkdirAll(filepath.Join(dir, "lease"), 0o755); err != nil {
		return fmt.Errorf("prepare %s: %w", dir, err)
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		src, err := os.Open(filepath.Join(from, name))
		if err != nil {
			return fmt.Errorf("prepare %s: %w; --from names the directory of the shim", dir, err)
		}
		err = place(filepath.Join(dir, name), src)
		src.Close()
		if err != nil {
			return fmt.Errorf("prepare %s: %w", dir, err)
		}
	}
	for link, to := range map[string]string{"libcuda.so": "libcuda.so.1", "libnvidia-ml.so": "libnvidia-ml.so.1"} {
		temp := filepath.Join(dir, "."+link)
		if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("prepare %s: %w", dir, err)
		}
		if err := os.Symlink(to, temp); err != nil {
			return fmt.Errorf("prepare %s: %w", dir, err)
		}
		if err := os.Rename(temp, filepath.Join(dir, link)); err != nil {
			return fmt.Errorf("prepare %s: %w", dir, err)
		}
	}
	if err := place(filepath.Join(dir, "sluice.conf"), strings.NewReader("SLUICE_SOCKET="+socket+"\n")); err != nil {
		return fmt.Errorf("prepare %s: %w", dir, err)
	}
	return nil
}

func place(path string, src io.Reader) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // gone once renamed
	_, err = io.Copy(f, src)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	return err
}
