package slab

import (
	"math/rand"
	"testing"
)

// device is memory that hands out slabs up to a cap.
type device struct {
	t      *testing.T
	next   uint64
	slabs  map[uint64]bool
	cap    int
	fences int
}

func (d *device) take() (uint64, bool) {
	if len(d.slabs) == d.cap {
		return 0, false
	}
	d.next += SlabSize
	d.slabs[d.next] = true
	return d.next, true
}

func (d *device) give(addr uint64) {
	if !d.slabs[addr] {
		d.t.Fatalf("%#x given back, never taken", addr)
	}
	delete(d.slabs, addr)
}

func newArena(t *testing.T, slabs int) (*Arena, *device) {
	d := &device{t: t, slabs: map[uint64]bool{}, cap: slabs, next: 0x7f0000000000}
	return New(d.take, d.give, func() { d.fences++ }), d
}

func TestBlocksNeverOverlap(t *testing.T) {
	const slabs = 64
	a, d := newArena(t, slabs)
	r := rand.New(rand.NewSource(2))
	type span struct{ at, n uint64 }
	var live []span
	owner := map[uint64]int{} // by 512-byte unit
	n := 1_000_000
	if testing.Short() {
		n = 100_000
	}
	id := 0
	freed := map[uint64]int{} // address to the fence count when it was freed
	for i := range n {
		if r.Intn(2) == 0 || len(live) == 0 {
			size := uint64(1) << (9 + r.Intn(6)) >> r.Intn(9)
			if r.Intn(50) == 0 {
				size = uint64(1) << r.Intn(21)
			}
			size = max(size, 1)
			size = min(size+uint64(r.Intn(int(size))), MaxSize)
			at, ok := a.Alloc(size)
			if !ok {
				if len(d.slabs) < slabs {
					t.Fatalf("op %d: refused with %d of %d slabs taken", i, len(d.slabs), slabs)
				}
				continue
			}
			if at%512 != 0 {
				t.Fatalf("address %#x is not aligned", at)
			}
			if base := (at - 0x7f0000000000) % SlabSize; base+size > SlabSize {
				t.Fatalf("block of %d at %#x leaves its slab", size, at)
			}
			if f, ok := freed[at]; ok && f == d.fences {
				t.Fatalf("op %d: %#x given again without a fence", i, at)
			}
			delete(freed, at)
			id++
			for u := at / 512; u < (at+size+511)/512; u++ {
				if owner[u] != 0 {
					t.Fatalf("op %d: %#x overlaps", i, at)
				}
				owner[u] = id
			}
			if base, n, ok := a.Find(at + size - 1); i%100 == 0 && (!ok || base != at || n != size) {
				t.Fatalf("find: %#x %d %v", base, n, ok)
			}
			live = append(live, span{at, size})
		} else {
			k := r.Intn(len(live))
			s := live[k]
			live[k] = live[len(live)-1]
			live = live[:len(live)-1]
			for u := s.at / 512; u < (s.at+s.n+511)/512; u++ {
				delete(owner, u)
			}
			before := a.slabs
			if !a.Free(s.at) {
				t.Fatalf("free of %#x refused", s.at)
			}
			if a.slabs == before {
				freed[s.at] = d.fences
			}
			if a.Free(s.at) {
				t.Fatal("double free accepted")
			}
		}
		if a.slabs != len(d.slabs) || len(a.blocks) != len(live) {
			t.Fatalf("op %d: %d slabs of %d, %d blocks of %d", i, a.slabs, len(d.slabs), len(a.blocks), len(live))
		}
	}
	for _, s := range live {
		a.Free(s.at)
	}
	if len(d.slabs) != 0 || a.slabs != 0 {
		t.Fatalf("%d slabs of drift", len(d.slabs))
	}
}

func TestForeignAddresses(t *testing.T) {
	a, _ := newArena(t, 4)
	p, ok := a.Alloc(100)
	if !ok {
		t.Fatal("alloc")
	}
	for _, q := range []uint64{0, p + 1, p - 512, p + SlabSize} {
		if a.Free(q) || a.Owns(q) {
			t.Errorf("%#x is no block", q)
		}
	}
	if _, ok := a.Alloc(MaxSize + 1); ok {
		t.Error("too large")
	}
	if _, ok := a.Alloc(0); ok {
		t.Error("nothing")
	}
}
