package form

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

var units = []struct {
	letter string
	shift  uint
}{{"T", 40}, {"G", 30}, {"M", 20}, {"K", 10}}

// ShortBytes is a number of bytes to three digits, with a unit of powers of 1024: 3.4G. From 1000 to 1023 of a unit it has four digits.
func ShortBytes(n uint64) string { return short(n, 1024, "KMGTPE") }

// ShortCount is n to three digits, with a unit of powers of 1000: 1.2k.
func ShortCount(n uint64) string { return short(n, 1000, "kMGTPE") }

func short(n, base uint64, units string) string {
	if n < base {
		return strconv.FormatUint(n, 10)
	}
	b := float64(base)
	v, u := float64(n)/b, 0
	for ; v >= b-0.5 && u < len(units)-1; u++ {
		v /= b
	}
	if v >= 99.95 {
		return fmt.Sprintf("%.0f%c", v, units[u])
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") + units[u:u+1]
}

// MiB is a number of bytes in MiB, rounded up: what is used or asked is never said, nor charged, to be less.
func MiB(n uint64) uint64 {
	m := n >> 20
	if n&(1<<20-1) != 0 {
		m++
	}
	return m
}

// Bytes is a number of bytes that is written as 512M or 20G.
type Bytes uint64

var size = pattern.New(`^([0-9]+)(?:([KMGTkmgt])(?:[iI]?[bB])?|[bB])?$`)

// ParseBytes reads a size: a whole number, with K, M, G or T behind it for powers of 1024,
// also as KB or KiB, in upper or lower case. The greatest is 2^63-1.
func ParseBytes(text string) (Bytes, error) {
	m := size().FindStringSubmatch(text)
	if m == nil {
		return 0, fmt.Errorf("%q is not a size: give bytes as 21474836480, or a whole number with K, M, G or T (powers of 1024) as 512M or 20G", text)
	}
	shift := uint(0)
	for _, u := range units {
		if strings.ToUpper(m[2]) == u.letter {
			shift = u.shift
		}
	}
	n, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil || n > math.MaxInt64>>shift {
		return 0, fmt.Errorf("size %q is larger than 8388607T, the greatest there is", text)
	}
	return Bytes(n << shift), nil
}

// String is n exactly, with the largest unit that leaves a whole number.
func (n Bytes) String() string {
	for _, u := range units {
		if n != 0 && n&(1<<u.shift-1) == 0 {
			return strconv.FormatUint(uint64(n)>>u.shift, 10) + u.letter
		}
	}
	return strconv.FormatUint(uint64(n), 10)
}
