package form

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

// MaxDevices is how many fractions a lease has at most, each on a GPU of its own, and so
// how many devices a program sees. The table of the wire has the number.
const MaxDevices = wire.MaxDevices

// Granule is the unit of device memory that is granted, in bytes: the driver's.
const Granule = 2 << 20

// MaxGPUMem is more memory than any GPU has, in bytes: a request for more is a mistake.
const MaxGPUMem = 1 << 44

// MaxPercent is the most percent that one lease has.
const MaxPercent = 100 * MaxDevices

// Percent is a share of GPUs: of one GPU 1 to 100, of those of a lease at most MaxPercent.
type Percent uint32

// Valid says whether p is a share of one GPU.
func (p Percent) Valid() bool { return p >= 1 && p <= 100 }

// ParsePercent reads a share of GPUs: 1 to most percent, as 50 or 50%.
func ParsePercent(s string, most uint32) (Percent, error) {
	n, err := strconv.ParseUint(strings.TrimSuffix(s, "%"), 10, 32)
	if err != nil || n == 0 || n > uint64(most) {
		return 0, fmt.Errorf("%q is not a percent from 1 to %d", s, most)
	}
	return Percent(n), nil
}

// ParsePercents reads the fractions of one lease: percent of a GPU as 50, a list for
// several GPUs as 50,50, or over 100 for whole GPUs and a rest as 250.
func ParsePercents(s string) ([]uint32, error) {
	var out []uint32
	for part := range strings.SplitSeq(s, ",") {
		n, err := ParsePercent(part, MaxPercent)
		if err != nil {
			return nil, fmt.Errorf("fraction %q is none of: percent of a GPU as 50, a list for several GPUs as 50,50, or over 100 for whole GPUs and a rest as 250 (at most %d)", part, MaxPercent)
		}
		out = append(out, Fractions(uint64(n))...)
	}
	if len(out) > MaxDevices {
		return nil, TooMany(len(out))
	}
	return out, nil
}

// TooMany is the error for a lease of n fractions.
func TooMany(n int) error {
	return fmt.Errorf("%d fractions: a lease has 1 to %d, each on a GPU of its own; ask for fewer, or for larger ones", n, MaxDevices)
}

// FormatPercents is what ParsePercents reads.
func FormatPercents(list []uint32) string {
	s := make([]string, len(list))
	for i, n := range list {
		s[i] = strconv.FormatUint(uint64(n), 10)
	}
	return strings.Join(s, ",")
}

// Fractions are those of a request for so many percent on one node: whole GPUs and a rest.
func Fractions(percent uint64) []uint32 {
	out := slices.Repeat([]uint32{100}, int(percent/100))
	if rest := uint32(percent % 100); rest > 0 {
		out = append(out, rest)
	}
	return out
}

// Units is what fractions with so many bytes of memory each cost in licences on one node,
// where the smallest GPU that may serve them has gpu bytes. One licence is one percent of a
// GPU's time, or the same share of its memory: each fraction costs the larger of the two.
func Units(fractions []uint32, mem, gpu uint64) uint64 {
	// No GPU has 2^57 bytes, so this does not overflow.
	share := (100*mem + gpu - 1) / gpu
	var units uint64
	for _, percent := range fractions {
		units += max(uint64(percent), share)
	}
	return units
}
