package safefile

// Writing a file whole. A reader sees the file as it was before or as it is now, never half of
// it, even after a crash:
//
//	Create -> writes -> fsync -> chmod -> rename -> fsync of the directory
//
// The steps run on descriptors of the two directories, so a directory that somebody swaps
// for a link meanwhile changes nothing.

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

// How says how a file is written.
type How struct {
	// Mode is the file's mode, whatever the umask. Zero means 0600.
	Mode fs.FileMode
	// Staging is the directory in which the file is made before it is renamed, on the same
	// file system. Empty means the file's own directory. It is for files in a directory
	// that somebody else may write.
	Staging string
	// Volatile is for a file that need not outlive a crash of the machine, such as one on
	// a file system in memory. Nothing is synced then.
	Volatile bool
	// Unnamed has the file have no name at all until it is committed, so that a writer that
	// dies leaves nothing. On a file system that cannot do that (some network file systems)
	// it has a temporary name all the same, for Sweep.
	Unnamed bool
}

// step is called before each system call that matters, by its name. Tests set it.
var step = func(string) {}

// Write writes the file at path, or replaces it.
func Write(path string, b []byte, how How) error {
	p, err := Create(path, how)
	if err != nil {
		return err
	}
	return p.finish(b)
}

// WriteNew is Write for a file that must not exist yet. If it does, the error is
// fs.ErrExist.
func WriteNew(path string, b []byte, how How) error {
	p, err := Create(path, how)
	if err != nil {
		return err
	}
	p.fresh = true
	return p.finish(b)
}

// WriteAt is Write for a file of that name in an open directory. The directory may be one
// that no path leads to, for instance in a container.
func WriteAt(dir *os.File, name string, b []byte, how How) error {
	fd, err := unix.FcntlInt(dir.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return &fs.PathError{Op: "dup", Path: dir.Name(), Err: err}
	}
	d := os.NewFile(uintptr(fd), dir.Name())
	p, err := create(d, d, name, how)
	if err != nil {
		_ = d.Close()
		return err
	}
	return p.finish(b)
}

// Symlink makes a symbolic link at path, or replaces one.
func Symlink(target, path string) error {
	d, err := openDir(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer d.Close()
	name := filepath.Base(path)
	temp := tempName(name)
	if err := unix.Symlinkat(target, int(d.Fd()), temp); err != nil {
		return &os.LinkError{Op: "symlink", Old: target, New: path, Err: err}
	}
	if err := renameat(d, temp, d, name); err != nil {
		_ = unix.Unlinkat(int(d.Fd()), temp, 0)
		return &os.LinkError{Op: "symlink", Old: target, New: path, Err: err}
	}
	if err := syncDir(d); err != nil {
		return &os.LinkError{Op: "symlink", Old: target, New: path, Err: err}
	}
	return nil
}

// Move gives a whole file or a socket another name on the same file system, and replaces
// what has that name. It syncs nothing.
func Move(from, to string) error {
	a, err := openDir(filepath.Dir(from))
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := openDir(filepath.Dir(to))
	if err != nil {
		return err
	}
	defer b.Close()
	return rename(a, filepath.Base(from), b, filepath.Base(to))
}

// Pending is a file that is being written and has no name of its own yet. Its owner calls
// Commit, which gives it its name, or Close, which removes it.
type Pending struct {
	*os.File
	how       How
	from, to  *os.File // directories; the same one without a staging directory
	temp      string   // the name in from, "" for an unnamed file
	name      string   // the name in to
	committed bool
	fresh     bool // the name must be free
}

// Create begins to write the file at path.
func Create(path string, how How) (*Pending, error) {
	to, err := openDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	from := to
	if how.Staging != "" {
		if from, err = openDir(how.Staging); err != nil {
			_ = to.Close()
			return nil, err
		}
	}
	p, err := create(from, to, filepath.Base(path), how)
	if err != nil {
		closeDirs(from, to)
	}
	return p, err
}

// create takes over the directories unless it fails.
func create(from, to *os.File, name string, how How) (*Pending, error) {
	if how.Mode == 0 {
		how.Mode = 0o600
	}
	step("create")
	temp := ""
	fd, err := -1, error(unix.EOPNOTSUPP)
	if how.Unnamed {
		fd, err = unix.Openat(int(from.Fd()), ".", unix.O_RDWR|unix.O_TMPFILE|unix.O_CLOEXEC, uint32(how.Mode.Perm()))
	}
	if noUnnamed(err) {
		temp = tempName(name)
		fd, err = unix.Openat(int(from.Fd()), temp, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, uint32(how.Mode.Perm()))
	}
	if err != nil {
		if from != to {
			err = fmt.Errorf("in %s: %w", from.Name(), err)
		}
		return nil, &fs.PathError{Op: "create", Path: filepath.Join(to.Name(), name), Err: err}
	}
	f := os.NewFile(uintptr(fd), filepath.Join(to.Name(), name))
	return &Pending{File: f, how: how, from: from, to: to, temp: temp, name: name}, nil
}

// noUnnamed says whether an error of open is that of a file system, or of a kernel, without
// O_TMPFILE (open(2)).
func noUnnamed(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) || errors.Is(err, unix.EINVAL)
}

// finish writes the content, commits, and closes.
func (p *Pending) finish(b []byte) error {
	step("write")
	_, err := p.File.Write(b)
	if err == nil && p.fresh {
		err = p.CommitNew()
	} else if err == nil {
		err = p.Commit()
	}
	return errors.Join(err, p.Close())
}

// Commit gives the file its name and replaces what had it. The file stays open. After an
// error the file may have its name and not be on the disk yet. Errors name the file as it is
// to be called.
func (p *Pending) Commit() error {
	return p.commit(func() error {
		if p.temp == "" {
			temp := tempName(p.name)
			if err := p.link(p.from, temp); err != nil {
				return err
			}
			p.temp = temp
		}
		if err := renameat(p.from, p.temp, p.to, p.name); err != nil {
			return &fs.PathError{Op: "rename", Path: p.Name(), Err: err}
		}
		return nil
	})
}

// CommitNew is Commit for a name that must be free. If it is not, the error is fs.ErrExist. After an error the file has no name.
func (p *Pending) CommitNew() error {
	err := p.commit(func() error {
		step("link")
		if err := p.link(p.to, p.name); err != nil {
			return err
		}
		step("unlink")
		p.removeTemp()
		return nil
	})
	if err != nil && p.committed {
		// The caller sees the error and may try again; the name must be free then.
		p.committed = false
		_ = unix.Unlinkat(int(p.to.Fd()), p.name, 0)
	}
	return err
}

// link gives the file a name that must be free, besides the one that it may have.
func (p *Pending) link(dir *os.File, name string) error {
	var err error
	if p.temp == "" {
		// By descriptor alone (AT_EMPTY_PATH) it would take a capability, see linkat(2).
		err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", p.Fd()), int(dir.Fd()), name, unix.AT_SYMLINK_FOLLOW)
	} else {
		err = unix.Linkat(int(p.from.Fd()), p.temp, int(dir.Fd()), name, 0)
	}
	if err != nil {
		return &fs.PathError{Op: "create", Path: p.Name(), Err: err}
	}
	return nil
}

func (p *Pending) removeTemp() {
	if p.temp != "" {
		_ = unix.Unlinkat(int(p.from.Fd()), p.temp, 0)
	}
}

func (p *Pending) commit(publish func() error) error {
	if err := p.Chmod(p.how.Mode.Perm()); err != nil {
		return err
	}
	if !p.how.Volatile {
		step("sync")
		if err := p.Sync(); err != nil {
			return err
		}
	}
	if err := publish(); err != nil {
		return err
	}
	p.committed = true
	if p.how.Volatile {
		return nil
	}
	if err := syncDir(p.to); err != nil {
		return &fs.PathError{Op: "write", Path: p.Name(), Err: err}
	}
	return nil
}

// Close closes the file, and removes it unless it was committed.
func (p *Pending) Close() error {
	if p.from == nil {
		return nil
	}
	err := p.File.Close()
	if !p.committed {
		p.removeTemp()
	}
	closeDirs(p.from, p.to)
	p.from, p.to = nil, nil
	return err
}

// Detach is Close for a committed file that its owner goes on using.
func (p *Pending) Detach() *os.File {
	closeDirs(p.from, p.to)
	p.from, p.to = nil, nil
	return p.File
}

func closeDirs(from, to *os.File) {
	_ = from.Close()
	if to != from {
		_ = to.Close()
	}
}

// unfinished matches tempName's names.
var unfinished = pattern.New(`^\.(.+)\.[0-9a-f]{16}\.new$`)

// tempName is hidden, has no ending that a reader of the directory looks for, and is
// random, so that several writers of one file do not meet.
func tempName(name string) string {
	return "." + name + "." + random() + ".new"
}

// Unfinished says whether a name in a directory is that of a file that was being written
// when its writer died, or is still being written, and what it was to be called.
func Unfinished(entry string) (name string, ok bool) {
	if m := unfinished().FindStringSubmatch(entry); m != nil {
		return m[1], true
	}
	return "", false
}

// Sweep removes the unfinished files in a directory for which old says yes. A file that
// cannot be removed stays.
func Sweep(dir string, old func(name string, fi fs.FileInfo) bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name, ok := Unfinished(e.Name())
		if !ok {
			continue
		}
		if fi, err := e.Info(); err == nil && old(name, fi) {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
	return nil
}

// abandoned is the age at which SweepAbandoned takes an unfinished file's writer for dead. None
// of the files that are written whole takes minutes.
const abandoned = time.Hour

// SweepAbandoned removes the unfinished files in a directory that were to have a name with this
// prefix, and that writers left behind when they died. It leaves alone those of the last hour:
// their writers may still be at work.
func SweepAbandoned(dir, prefix string) error {
	return Sweep(dir, func(name string, fi fs.FileInfo) bool {
		return strings.HasPrefix(name, prefix) && time.Since(fi.ModTime()) > abandoned
	})
}

func openDir(path string) (*os.File, error) {
	return os.OpenFile(path, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
}

// renameat gives a file in one directory a name in another. Its error is for the caller to say what of.
func renameat(from *os.File, old string, to *os.File, name string) error {
	if strings.ContainsRune(name, '/') || name == "." || name == ".." || name == "" {
		return fs.ErrInvalid
	}
	step("rename")
	return unix.Renameat(int(from.Fd()), old, int(to.Fd()), name)
}

func rename(from *os.File, old string, to *os.File, name string) error {
	if err := renameat(from, old, to, name); err != nil {
		return &os.LinkError{Op: "rename", Old: filepath.Join(from.Name(), old), New: filepath.Join(to.Name(), name), Err: err}
	}
	return nil
}

// SyncDir has the files that were made in a directory so far outlive a crash of the machine.
func SyncDir(path string) error {
	d, err := openDir(path)
	if err != nil {
		return err
	}
	defer d.Close()
	return syncDir(d)
}

// syncDir has a directory's names on the disk. Some file systems cannot sync directories
// and say EINVAL (fsync(2)).
func syncDir(d *os.File) error {
	step("sync directory")
	if err := d.Sync(); err != nil && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("sync directory: %w", err)
	}
	return nil
}
