package worker

// What a session keeps in its own memory because its client said so: names of kernels, and
// lists of them. It has a budget in bytes. What is beyond it is refused at the call. The memory of
// the handle tables is bounded by itself, see maxPages.

import (
	"hash/maphash"
	"slices"
)

// maxKept is the budget of a session, in bytes: room for the names of hundreds of thousands of kernels.
const maxKept = 128 << 20

// kernelCost is what a kernel takes besides its name, in bytes.
const kernelCost = 256

// keep reports whether so many bytes more may be kept, and counts them if so.
func (s *session) keep(what string, n int) bool {
	if s.kept+n > maxKept {
		s.log.Warn("refused: the session keeps too much in the worker's memory", "what", what, "bytes", n, "kept_mib", s.kept>>20, "limit_mib", maxKept>>20)
		return false
	}
	s.kept += n
	return true
}

// unkeep is for what is kept no longer.
func (s *session) unkeep(n int) { s.kept -= n }

// names is a set of names, as sorted hashes.
type names []uint64

var nameSeed = maphash.MakeSeed()

func hashName(b []byte) uint64 { return maphash.Bytes(nameSeed, b) }

func (l names) has(name []byte) bool {
	_, ok := slices.BinarySearch(l, hashName(name))
	return ok
}
