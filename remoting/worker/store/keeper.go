package store

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Keeper looks after the directories of all users, which lie below one.
type Keeper struct {
	Dir      string
	Total    int64 // bytes of all images
	KeepFree int64 // space of the file system that images leave free, in bytes
	Shared   *Shared
}

// slack is the part of the total, and of the space that stays free, that a sweep leaves for new
// images: a tenth.
const slack = 10

// Usage is what a sweep saw, in bytes.
type Usage struct {
	Images int64 // of all users
	Free   int64 // of the file system
}

// user is a directory of one user, as a sweep sees it.
type user struct {
	name  string
	files []file
	sum   int64 // bytes of the files
}

// Sweep removes unfinished uploads older than a time, removes images until there is room
// for new ones, and counts the rest. It removes images of the users who have most first, and of each user
// those unused for longest. A directory whose name is not a uid, or that does not belong to that uid, is
// not the store's and stays as it is.
func (k *Keeper) Sweep(before time.Time) (Usage, error) {
	root, err := os.Open(k.Dir)
	if err != nil {
		return Usage{}, fmt.Errorf("store: %w", err)
	}
	defer root.Close()
	users, err := sweepUsers(root, before)
	if err != nil {
		return Usage{}, err
	}
	var sum int64
	for _, u := range users {
		sum += u.sum
	}
	has, err := free(k.Dir)
	if err != nil {
		return Usage{}, fmt.Errorf("store: %w", err)
	}
	// What is removed counts as free at once, though a file system may be late to say so.
	for (sum > k.Total-k.Total/slack || has < k.KeepFree+k.KeepFree/slack) && len(users) > 0 {
		u := slices.MaxFunc(users, func(a, b *user) int { return cmp.Compare(a.sum, b.sum) })
		i := slices.IndexFunc(u.files, file.image)
		if i < 0 {
			users = slices.DeleteFunc(users, func(o *user) bool { return o == u })
			continue
		}
		old := u.files[i]
		u.files = slices.Delete(u.files, i, i+1)
		if removeOf(root, u.name, old) {
			u.sum, sum, has = u.sum-old.size, sum-old.size, has+old.size
		}
	}
	k.Shared.set(sum)
	if has, err = free(k.Dir); err != nil {
		return Usage{}, fmt.Errorf("store: %w", err)
	}
	return Usage{Images: sum, Free: has}, nil
}

// sweepUsers removes old unfinished uploads of all users, and lists what each user has.
func sweepUsers(root *os.File, before time.Time) (all []*user, err error) {
	names, err := root.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	for _, name := range names {
		d := openUser(root, name)
		if d == nil {
			continue
		}
		files, err := list(d)
		if err == nil {
			files = clean(d, files, before)
		}
		_ = d.Close()
		if err != nil {
			return nil, err
		}
		all = append(all, &user{name: name, files: files, sum: size(files)})
	}
	return all, nil
}

// openUser opens a user's directory, whose name is the user's uid. It gives nil for anything else:
// a link, or a directory that belongs to somebody else.
func openUser(root *os.File, name string) *os.File {
	uid, err := strconv.ParseUint(name, 10, 32)
	if err != nil || strconv.FormatUint(uid, 10) != name {
		return nil
	}
	fd, err := unix.Openat(int(root.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	d := os.NewFile(uintptr(fd), filepath.Join(root.Name(), name))
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || uint64(st.Uid) != uid {
		_ = d.Close()
		return nil
	}
	return d
}

// removeOf removes a file of a user, and says whether it is gone. The directory is opened again, so
// that a sweep of many users holds few descriptors.
func removeOf(root *os.File, name string, f file) bool {
	d := openUser(root, name)
	if d == nil {
		return false
	}
	defer d.Close()
	return remove(d, f)
}
