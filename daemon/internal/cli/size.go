package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// size is a number of bytes given on the command line. It implements pflag.Value.
type size uint64

var units = []struct {
	suffix string
	shift  uint
}{{"T", 40}, {"G", 30}, {"M", 20}, {"K", 10}}

// parseSize reads a positive number of bytes: digits, with K, M, G or T behind
// them for powers of 1024, as Slurm's --mem does.
func parseSize(s string) (uint64, error) {
	digits, shift := s, uint(0)
	for _, u := range units {
		if d, ok := strings.CutSuffix(strings.ToUpper(s), u.suffix); ok {
			digits, shift = d, u.shift
			break
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("size %q is none of: bytes as 21474836480, or a whole number with K, M, G or T (powers of 1024) as 512M or 20G", s)
	}
	if n > math.MaxUint64>>shift {
		return 0, fmt.Errorf("size %q is larger than 64 bits hold; give at most 16777215T", s)
	}
	return n << shift, nil
}

func (z *size) Set(s string) error {
	n, err := parseSize(s)
	if err != nil {
		return err
	}
	*z = size(n)
	return nil
}

func (z *size) Type() string { return "SIZE" }

func (z *size) String() string {
	n := uint64(*z)
	if n == 0 {
		return ""
	}
	for _, u := range units {
		if n&(1<<u.shift-1) == 0 {
			return strconv.FormatUint(n>>u.shift, 10) + u.suffix
		}
	}
	return strconv.FormatUint(n, 10)
}
