package ledger

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// damages is how many damaged ledgers a test opens: SLUICE_DAMAGE says how many more than usual.
func damages(t *testing.T, usual int) int {
	t.Helper()
	v := os.Getenv("SLUICE_DAMAGE")
	if v == "" {
		return usual
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("SLUICE_DAMAGE=%s: give a number of ledgers", v)
	}
	return n
}

// damageSeed makes other damages of the same number: SLUICE_DAMAGE_SEED, 0 unless given.
func damageSeed(t *testing.T) uint64 {
	t.Helper()
	v := os.Getenv("SLUICE_DAMAGE_SEED")
	if v == "" {
		return 0
	}
	n, err := strconv.ParseUint(v, 10, 32)
	if err != nil {
		t.Fatalf("SLUICE_DAMAGE_SEED=%s: give a number", v)
	}
	return n
}

// sector is what a disk writes whole, in bytes.
const sector = 512

// sectors are the places at which two images of a ledger differ.
func sectors(a, b []byte) (at []int) {
	for i := 0; i < len(b); i += sector {
		if i >= len(a) || !bytes.Equal(a[i:min(i+sector, len(a))], b[i:i+sector]) {
			at = append(at, i)
		}
	}
	return at
}

// over gives the image a with the sectors of b at some places.
func over(a, b []byte, at []int) []byte {
	c := slices.Clone(a)
	if len(b) > len(c) {
		c = append(c, make([]byte, len(b)-len(c))...)
	}
	for _, i := range at {
		copy(c[i:i+sector], b[i:])
	}
	return c
}

// TestPowerLoss: the power fails while a change is written. A change has its data pages synced, then its meta page, so
// that the disk has any part of the first with nothing of the second, or all of the first: the ledger opens, and is what it was
// before the change or after it. A disk that lies about a sync may have any part of both: then it may be refused as well.
func TestPowerLoss(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "l.db")
	l, err := Open(path, "n", Options{})
	must(t, err)
	var images [][]byte
	for round := range 14 {
		must(t, l.Update(func(tx *Tx) error {
			for i := range 40 {
				if err := tx.Put(Leases, fmt.Sprintf("lease-%04d", (round*23+i)%200), strings.Repeat("x", (round*i)%700)); err != nil {
					return err
				}
			}
			if round%3 == 2 {
				return tx.Delete(Leases, fmt.Sprintf("lease-%04d", round*23%200))
			}
			return nil
		}))
		b, err := os.ReadFile(path)
		must(t, err)
		images = append(images, b)
	}
	must(t, l.Close())
	read := func(n int, b []byte) (string, error) {
		p := filepath.Join(dir, fmt.Sprintf("p%d.db", n)) // bbolt keeps the lock of a file that makes it panic
		must(t, os.WriteFile(p, b, 0o600))
		defer os.Remove(p)
		var got string
		var err error
		within(t, fmt.Sprintf("image %d", n), func() { got, err = contents(p) })
		return got, err
	}
	is := make([]string, len(images))
	for i, b := range images {
		if is[i], err = read(-1-i, b); err != nil {
			t.Fatalf("after change %d: %v", i, err)
		}
	}
	rng := rand.New(rand.NewPCG(14, 8+damageSeed(t)))
	metas := 2 * os.Getpagesize()
	old, whole, refused := 0, 0, 0
	rounds := damages(t, 250)
	for n := range rounds {
		i := rng.IntN(len(images) - 1)
		a, b := images[i], images[i+1]
		var data, meta []int
		for _, at := range sectors(a, b) {
			if at < metas {
				meta = append(meta, at)
			} else {
				data = append(data, at)
			}
		}
		if len(data) == 0 || len(meta) == 0 {
			t.Fatalf("change %d wrote %d sectors of data and %d of meta pages", i+1, len(data), len(meta))
		}
		part := func(of []int) []int {
			keep := rng.Float64()
			return slices.DeleteFunc(slices.Clone(of), func(int) bool { return rng.Float64() > keep })
		}
		var image []byte
		var what string
		lies := false
		switch n % 4 {
		case 0, 1:
			image, what = over(a, b, part(data)), "some data, no meta page"
		case 2:
			image, what = over(a, b, append(slices.Clone(data), part(meta)...)), "all data, perhaps the meta page"
		case 3:
			image, what, lies = over(a, b, append(part(data), part(meta)...)), "some of both", true
		}
		switch got, err := read(n, image); {
		case err != nil && !lies:
			t.Errorf("change %d, %s: refused: %v", i+1, what, err)
		case err != nil:
			refused++
		case got == is[i]:
			old++
		case got == is[i+1]:
			whole++
		default:
			t.Errorf("change %d, %s: the ledger is neither the old one nor the new one", i+1, what)
		}
	}
	t.Logf("%d images: %d are as before the change, %d as after it, %d refused", rounds, old, whole, refused)
	if old == 0 || whole == 0 {
		t.Error("the images are all of one kind")
	}
}
