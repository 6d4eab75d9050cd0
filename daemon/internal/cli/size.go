package cli

import (
	"errors"

	"github.com/sluice-hpc/sluice/internal/form"
)

// size is a number of bytes given on the command line, more than 0. It implements
// pflag.Value.
type size uint64

func (z *size) Set(s string) error {
	n, err := form.ParseBytes(s)
	if err == nil && n == 0 {
		err = errors.New("give more than 0 bytes, as 20G")
	}
	*z = size(n)
	return err
}

func (z *size) Type() string { return "SIZE" }

func (z *size) String() string {
	if *z == 0 {
		return ""
	}
	return form.Bytes(*z).String()
}
