package store

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Keeper looks after the directories of all users, which lie below one.
type Keeper struct {
	Dir    string
	Total  int64 // bytes of all images
	Shared *Shared
}

// slack is the part of the total that a sweep leaves for new images: a tenth.
const slack = 10

// Usage is what a sweep saw, in bytes.
type Usage struct {
	Images int64 // of all users
	Free   int64 // of the file system
}

// Sweep removes what is no image and older than a time, removes images until there is room
// for new ones, and counts the rest. Those who have most give theirs first, which they have not
// used for longest.
func (k *Keeper) Sweep(before time.Time) (Usage, error) {
	type user struct {
		dir    string
		images []os.FileInfo
		sum    int64
	}
	es, err := os.ReadDir(k.Dir)
	if err != nil {
		return Usage{}, fmt.Errorf("store: %w", err)
	}
	var users []*user
	var sum int64
	for _, e := range es {
		if !e.IsDir() {
			continue
		}
		u := &user{dir: filepath.Join(k.Dir, e.Name())}
		if err := clean(u.dir, before); err != nil {
			return Usage{}, err
		}
		if u.images, u.sum, err = images(u.dir); err != nil {
			return Usage{}, err
		}
		sum += u.sum
		users = append(users, u)
	}
	for sum > k.Total-k.Total/slack && len(users) > 0 {
		u := slices.MaxFunc(users, func(a, b *user) int { return cmp.Compare(a.sum, b.sum) })
		if len(u.images) == 0 {
			users = slices.DeleteFunc(users, func(o *user) bool { return o == u })
			continue
		}
		old := u.images[0]
		u.images = u.images[1:]
		if err := os.Remove(filepath.Join(u.dir, old.Name())); err == nil || os.IsNotExist(err) {
			u.sum, sum = u.sum-old.Size(), sum-old.Size()
		}
	}
	k.Shared.set(sum)
	has, err := free(k.Dir)
	if err != nil {
		return Usage{}, fmt.Errorf("store: %w", err)
	}
	return Usage{Images: sum, Free: has}, nil
}
