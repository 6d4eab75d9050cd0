// Package safefile writes files whole, and refuses files and directories that somebody
// else could have written: state that decides who gets a GPU is worth no more than its
// path.
package safefile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// ErrUnsafe is wrapped by every refusal.
var ErrUnsafe = errors.New("unsafe owner or mode")

// Dir refuses path unless it is a directory, it and every directory above it
// belong to root or to this process's user, and none of them can be written by
// others. A directory with the sticky bit (/tmp) passes above path, since nobody
// can rename what another owns in it.
func Dir(path string) error {
	abs, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("directory %s: %w", path, err)
	}
	// Links are followed once, here: what they point to is what is judged.
	real, err := filepath.EvalSymlinks(abs)
	if err != nil {
		return fmt.Errorf("directory %s: %w", path, err)
	}
	for at := real; ; at = filepath.Dir(at) {
		fi, err := os.Lstat(at)
		if err != nil {
			return fmt.Errorf("directory %s: %w", path, err)
		}
		if !fi.IsDir() {
			return fmt.Errorf("directory %s: %w: %s is not a directory", path, ErrUnsafe, at)
		}
		if err := owned(fi, at); err != nil {
			return fmt.Errorf("directory %s: %w", path, err)
		}
		sticky := fi.Mode()&fs.ModeSticky != 0 && at != real
		if fi.Mode().Perm()&0o022 != 0 && !sticky {
			return fmt.Errorf("directory %s: %w: %s has mode %04o; remedy: chmod go-w %s", path, ErrUnsafe, at, fi.Mode().Perm(), at)
		}
		if at == filepath.Dir(at) {
			return nil
		}
	}
}

// File refuses path unless it is a regular file, no link, of root or of this
// process's user, and has no permission bit of mask (0o077: nobody else may do
// anything, 0o022: nobody else may write). A file that is not there passes.
func File(path string, mask fs.FileMode) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("file %s: %w", path, err)
	}
	if !fi.Mode().IsRegular() {
		return fmt.Errorf("file %s: %w: it is no regular file", path, ErrUnsafe)
	}
	if err := owned(fi, path); err != nil {
		return fmt.Errorf("file %s: %w", path, err)
	}
	if fi.Mode().Perm()&mask != 0 {
		return fmt.Errorf("file %s: %w: mode %04o; remedy: chmod %04o %s", path, ErrUnsafe, fi.Mode().Perm(), fi.Mode().Perm()&^mask, path)
	}
	return nil
}

func owned(fi fs.FileInfo, path string) error {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: owner cannot be read", path)
	}
	if st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%w: %s belongs to uid %d, not to root or uid %d; remedy: chown it", ErrUnsafe, path, st.Uid, os.Geteuid())
	}
	return nil
}
