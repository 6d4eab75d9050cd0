// Package pattern compiles regular expressions when they are first used. A command imports packages with dozens of them, uses few, and
// took longer to compile them than for most of its work.
package pattern

import (
	"regexp"
	"sync"
)

// New returns a function that compiles text when it is first called, and panics if it cannot be compiled.
func New(text string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(text) })
}
