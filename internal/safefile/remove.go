package safefile

// Removing a directory that a stranger has filled. It may be as deep as the stranger liked: a removal that goes down into it
// holds a descriptor for each level, and so takes those of its whole process. And the stranger may
// have descriptors of directories in it, and go on filling them.
//
//	Discard -> rename, so that the name is free at once
//	rest    -> of each directory: take it from its owner, remove its files, move its directories up to the top
//
// So two descriptors do, and a directory that has been looked at is filled no more.

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

// discarded matches the names of directories that Discard has given a new name.
var discarded = pattern.New(`^\.[0-9a-f]{16}\.gone$`)

// Discarded says whether a name in a directory is that of one that was discarded, and whose removal has not ended.
func Discarded(entry string) bool { return discarded().MatchString(entry) }

// Discard frees the name of a directory, and returns what removes it, with all that is in it. Where there is none, both do nothing.
// The directory that it is in must be nobody else's.
func Discard(path string) (rest func() error, err error) {
	d, err := openDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	gone := filepath.Base(path)
	if !Discarded(gone) {
		gone = "." + random() + ".gone"
		err = rename(d, filepath.Base(path), d, gone)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return func() error { return nil }, nil
	}
	at := filepath.Join(d.Name(), gone)
	return func() error { return removeTree(at) }, err
}

func random() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// namesAtOnce bounds the names of a directory that are kept in memory.
const namesAtOnce = 1024

// removeTree removes what is at path, of which only the parent is trusted.
func removeTree(path string) error {
	d, err := openDir(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer d.Close()
	name := filepath.Base(path)
	sub, err := removeOrOpen(d, name)
	if err != nil || sub == nil {
		return err
	}
	defer sub.Close()
	err = eachName(sub, func(n string) error { return emptyInto(sub, n, sub) })
	if err != nil {
		return err
	}
	return unlinkDir(d, name)
}

// removeOrOpen removes what has a name in a directory, if that takes one step. Otherwise it is a directory with something in it,
// which removeOrOpen opens and takes from its owner.
func removeOrOpen(dir *os.File, name string) (*os.File, error) {
	err := unix.Unlinkat(int(dir.Fd()), name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return nil, &fs.PathError{Op: "unlink", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	if err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err == nil || errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		f := os.NewFile(uintptr(fd), filepath.Join(dir.Name(), name))
		if err = errors.Join(f.Chown(os.Geteuid(), os.Getegid()), f.Chmod(0o700)); err == nil {
			return f, nil
		}
		f.Close()
	}
	return nil, &fs.PathError{Op: "open", Path: filepath.Join(dir.Name(), name), Err: err}
}

// emptyInto removes what has a name in from; directories that are in it, and not empty, move to top first.
func emptyInto(from *os.File, name string, top *os.File) error {
	sub, err := removeOrOpen(from, name)
	if err != nil || sub == nil {
		return err
	}
	defer sub.Close()
	err = eachName(sub, func(n string) error {
		err := unix.Unlinkat(int(sub.Fd()), n, 0)
		if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EPERM) {
			if err = unix.Unlinkat(int(sub.Fd()), n, unix.AT_REMOVEDIR); err != nil {
				return rename(sub, n, top, random())
			}
		}
		if err != nil {
			return &fs.PathError{Op: "unlink", Path: filepath.Join(sub.Name(), n), Err: err}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return unlinkDir(from, name)
}

func unlinkDir(dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err != nil {
		return &fs.PathError{Op: "rmdir", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	return nil
}

// eachName calls f, which removes it, with each name in a directory, until there is none.
func eachName(dir *os.File, f func(string) error) error {
	for {
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
		names, err := dir.Readdirnames(namesAtOnce)
		if len(names) == 0 {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("%s: %w", dir.Name(), err)
		}
		for _, n := range names {
			if err := f(n); err != nil {
				return err
			}
		}
	}
}
