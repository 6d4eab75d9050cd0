package workers

// Directories that sessions are given as descriptors: the user's part of the image store, and a directory for each lease, which is
// /dev/shm for its sessions. The driver shares events between processes by files in /dev/shm.

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/remoting/worker/control"
	"github.com/sluice-hpc/sluice/remoting/worker/store"
)

// sessionFiles opens the files that START passes to a session, in its order: the directory of the user's images and the file that counts
// all images, the same for content if it is stored, and, for a session with a /dev of its own, the directory for /dev/shm. The caller closes them, also after an error.
func (p *Pool) sessionFiles(s *session, st *control.Start) (files []*os.File, err error) {
	open := func(f *os.File, e error) {
		if err = errors.Join(err, e); e == nil {
			files = append(files, f)
		}
	}
	u := p.images()
	open(u.open(st.Bind.UID, st.Bind.GID))
	open(store.CreateShared(u.count))
	if st.ContentLimit > 0 {
		files = append(files, p.contentFiles(st)...)
	}
	if p.cfg.ConfineDev {
		open(p.sharedDir(s.Lease, st.Bind.UID, st.Bind.GID))
		st.SharedDir = true
	}
	return files, err
}

// contentFiles opens the files of the store of content. A session for which that fails goes without: its START says so.
func (p *Pool) contentFiles(st *control.Start) []*os.File {
	u := p.content()
	dir, err := u.open(st.Bind.UID, st.Bind.GID)
	if err == nil {
		var count *os.File
		if count, err = store.CreateShared(u.count); err == nil {
			return []*os.File{dir, count}
		}
		dir.Close()
	}
	p.log.Error("nothing that a program copies to the GPU is stored", "lease", st.Lease, "error", err)
	st.ContentLimit = 0
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// sharedDir opens the directory that is /dev/shm for the sessions of a lease. The lease's first session makes it.
func (p *Pool) sharedDir(id string, uid, gid uint32) (*os.File, error) {
	f, err := dirOf(filepath.Join(p.cfg.Shared, id), uid, gid)
	if errors.Is(err, errNotTheirs) {
		return nil, fmt.Errorf("directory for /dev/shm: %w: remove it", err)
	} else if err != nil {
		return nil, fmt.Errorf("directory for /dev/shm: %w", err)
	}
	return f, nil
}

// warnOfDisk logs that events cannot be shared if the directories are on a disk. The driver (580, measured on an H200) has the GPU
// write to its files, and the kernel does not pin pages of a disk's files for long.
func (p *Pool) warnOfDisk() {
	if p.cfg.ConfineDev && !inMemory(p.cfg.Shared) {
		p.log.Warn("run_dir is not on a file system in memory: events cannot be shared between processes of a program, as torch.multiprocessing does. Set run_dir to a directory below /run", "directory", p.cfg.Shared)
	}
}

// inMemory reports whether a directory is on a file system in memory.
func inMemory(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && (st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC)
}

// removeShared removes a lease's directory. It does not wait: a session may have made any number of files there, at any depth.
func (p *Pool) removeShared(id string) {
	rest, err := safefile.Discard(filepath.Join(p.cfg.Shared, id))
	if err != nil {
		p.log.Warn("directory of an ended lease", "lease", id, "error", err)
		return
	}
	go func() {
		if err := rest(); err != nil {
			p.log.Warn("directory of an ended lease", "lease", id, "error", err)
		}
	}()
}

// sweepShared removes the directories that an earlier daemon made for leases that have ended since.
func (p *Pool) sweepShared() error {
	dirs, err := os.ReadDir(p.cfg.Shared)
	for _, d := range dirs {
		if l := p.leases[d.Name()]; safefile.Discarded(d.Name()) || form.LeaseID(d.Name()).Valid() && (l == nil || l.file == nil) {
			p.removeShared(d.Name())
		}
	}
	return err
}

// dirOf opens a user's directory. If there is none, dirOf makes it.
func dirOf(path string, uid, gid uint32) (*os.File, error) {
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := giveDir(f, uid, gid); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// errNotTheirs says that a directory is another user's.
var errNotTheirs = errors.New("is another user's")

// giveDir makes the user the owner of a directory that was just made, or that an earlier daemon made before it died. Such a directory
// belongs to root and is empty. A directory of another user is refused.
func giveDir(f *os.File, uid, gid uint32) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Uid == uid {
		return nil
	}
	if _, err := f.Readdirnames(1); st.Uid != uint32(os.Geteuid()) || !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s %w: it belongs to user %d, not to %d", f.Name(), errNotTheirs, st.Uid, uid)
	}
	return f.Chown(int(uid), int(gid))
}
