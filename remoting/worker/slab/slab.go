// Package slab divides slabs of device memory into small blocks. It never
// touches the memory; it only knows addresses. Sizes are bytes.
package slab

// The driver hands out device memory in granules of 2 MiB, so many small
// allocations taken from it one by one would each cost a granule. An Arena
// takes whole slabs and cuts each into blocks of one size class.
//
// A freed block may still be in use by work that the GPU has not finished, so
// it rests until a fence (everything submitted so far is done), or until its
// whole slab is given back, which in CUDA is a fence of its own.

// Sizes.
const (
	SlabSize = 2 << 20
	// MaxSize is the largest block an Arena serves.
	MaxSize = 1 << 20
	// unit is the smallest block and every block's alignment: what CUDA
	// promises for textures.
	unit = 512
	// restLimit is how many resting bytes of one class are worth a fence.
	restLimit = SlabSize / 2
)

// Arena serves small blocks of one context.
type Arena struct {
	take    func() (uint64, bool) // a new slab
	give    func(addr uint64)     // a slab back, once all work on it is done
	fence   func()
	classes []class
	blocks  map[uint64]block // by address
	held    map[uint64]*slab // by address
	slabs   int
}

type class struct {
	size    uint64
	partial []*slab // with free blocks
	resting []block
}

type slab struct {
	addr  uint64
	class int
	free  []uint16
	live  int // blocks in use
	rest  int
	at    int // position in partial, -1 when not there
}

type block struct {
	s *slab
	n uint64 // bytes asked for
	i uint16
}

// New returns an arena. take gets a slab of SlabSize bytes, give returns one,
// fence waits until the device has done all that was submitted.
func New(take func() (uint64, bool), give func(uint64), fence func()) *Arena {
	a := &Arena{take: take, give: give, fence: fence, blocks: make(map[uint64]block), held: make(map[uint64]*slab)}
	for size := uint64(unit); size <= MaxSize; {
		a.classes = append(a.classes, class{size: size})
		step := uint64(unit)
		for step*8 <= size {
			step *= 2
		}
		size += step
	}
	return a
}

func (a *Arena) classOf(n uint64) int {
	lo, hi := 0, len(a.classes)-1
	for lo < hi {
		m := (lo + hi) / 2
		if a.classes[m].size < n {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}

// Owns says whether addr is a block in use.
func (a *Arena) Owns(addr uint64) bool { _, ok := a.blocks[addr]; return ok }

// Holds says whether addr is that of a slab.
func (a *Arena) Holds(addr uint64) bool { _, ok := a.held[addr]; return ok }

// Find gives the block in use that an address lies in, and the bytes asked for.
func (a *Arena) Find(addr uint64) (base, n uint64, ok bool) {
	for at, s := range a.held {
		if addr < at || addr-at >= SlabSize {
			continue
		}
		size := a.classes[s.class].size
		base = at + (addr-at)/size*size
		b, ok := a.blocks[base]
		return base, b.n, ok && addr-base < b.n
	}
	return 0, 0, false
}

// Alloc gives a block of at least n bytes, 0 < n <= MaxSize, or false when
// there is no memory.
func (a *Arena) Alloc(n uint64) (uint64, bool) {
	if n == 0 || n > MaxSize {
		return 0, false
	}
	k := a.classOf(n)
	c := &a.classes[k]
	if len(c.partial) == 0 && uint64(len(c.resting))*c.size >= restLimit {
		a.wake()
	}
	if len(c.partial) == 0 {
		addr, ok := a.take()
		if !ok {
			// Memory may be resting, in this class or as whole slabs.
			a.wake()
			if len(c.partial) == 0 {
				if addr, ok = a.take(); !ok {
					return 0, false
				}
			}
		}
		if ok {
			a.add(k, addr)
		}
	}
	s := c.partial[len(c.partial)-1]
	i := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.live++
	if len(s.free) == 0 {
		a.unlist(s)
	}
	addr := s.addr + uint64(i)*c.size
	a.blocks[addr] = block{s, n, i}
	return addr, true
}

func (a *Arena) add(k int, addr uint64) {
	n := SlabSize / a.classes[k].size
	s := &slab{addr: addr, class: k, free: make([]uint16, n), at: -1}
	for i := range s.free {
		s.free[i] = uint16(len(s.free) - 1 - i)
	}
	a.slabs++
	a.held[addr] = s
	a.list(s)
}

func (a *Arena) list(s *slab) {
	c := &a.classes[s.class]
	if s.at < 0 && len(s.free) > 0 {
		s.at = len(c.partial)
		c.partial = append(c.partial, s)
	}
}

func (a *Arena) unlist(s *slab) {
	c := &a.classes[s.class]
	if s.at < 0 {
		return
	}
	last := c.partial[len(c.partial)-1]
	c.partial[s.at] = last
	last.at = s.at
	c.partial = c.partial[:len(c.partial)-1]
	s.at = -1
}

// Free takes a block back; false when addr is none.
func (a *Arena) Free(addr uint64) bool {
	b, ok := a.blocks[addr]
	if !ok {
		return false
	}
	delete(a.blocks, addr)
	b.s.live--
	b.s.rest++
	c := &a.classes[b.s.class]
	if b.s.live > 0 {
		c.resting = append(c.resting, b)
		return true
	}
	// The whole slab is unused: back with it.
	kept := c.resting[:0]
	for _, r := range c.resting {
		if r.s != b.s {
			kept = append(kept, r)
		}
	}
	c.resting = kept
	a.unlist(b.s)
	a.slabs--
	delete(a.held, b.s.addr)
	a.give(b.s.addr)
	return true
}

// wake makes resting blocks free.
func (a *Arena) wake() {
	any := false
	for i := range a.classes {
		any = any || len(a.classes[i].resting) > 0
	}
	if !any {
		return
	}
	a.fence()
	for i := range a.classes {
		c := &a.classes[i]
		for _, b := range c.resting {
			b.s.rest--
			b.s.free = append(b.s.free, b.i)
			a.list(b.s)
		}
		c.resting = c.resting[:0]
	}
}

// Drop forgets everything without giving it back: the context is gone. It
// returns how many slabs it held.
func (a *Arena) Drop() int {
	n := a.slabs
	a.slabs = 0
	clear(a.blocks)
	clear(a.held)
	for i := range a.classes {
		a.classes[i].partial, a.classes[i].resting = nil, nil
	}
	return n
}
