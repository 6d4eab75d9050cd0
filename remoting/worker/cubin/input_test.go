package cubin

import (
	"bytes"
	"errors"
	"testing"
)

// What an input of the linker unpacks to is bounded wherever in it the code is, and code that ends beyond it is refused.
func TestCheckInput(t *testing.T) {
	e := testELF()
	good := container(fatEntry(kindELF, 80, flagLZ4, lz4Literals(e), len(e)))
	bomb := container(fatEntry(kindELF, 80, flagLZ4, make([]byte, 64), 1<<40))
	half := container(fatEntry(kindELF, 80, flagLZ4, make([]byte, 16<<20), 900<<20))
	damaged := bytes.Clone(good[:16])
	le.PutUint64(damaged[8:], 1<<60)
	for name, c := range map[string]struct {
		input []byte
		want  error
	}{
		"nothing":              {nil, nil},
		"text":                 {[]byte("no code"), nil},
		"a fat binary":         {good, nil},
		"a bomb":               {bomb, ErrTooLarge},
		"a bomb in an archive": {bytes.Join([][]byte{[]byte("!<arch>\n"), good, []byte("between."), bomb}, nil), ErrTooLarge},
		"behind a magic":       {append([]byte("!<arch>\n\x50\xed\x55\xba and no more of it"), bomb...), ErrTooLarge},
		"cut":                  {bomb[:len(bomb)-1], ErrFormat},
		"a magic at the end":   {append(bytes.Clone(good), containerMagicBytes...), nil},
		"damaged":              {bytes.Repeat(damaged, 3), ErrFormat},
		"a cut cubin":          {e[:len(e)-1], ErrFormat},
		"cut in an archive":    {append([]byte("!<arch>\n"), good[:len(good)-8]...), ErrFormat},
		"one large":            {half, nil},
		"two large ones":       {append(bytes.Clone(half), half...), ErrTooLarge},
	} {
		if err := CheckInput(c.input); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func FuzzCheckInput(f *testing.F) {
	e := testELF()
	c := container(fatEntry(kindELF, 80, flagLZ4, lz4Literals(e), len(e)))
	f.Add(append([]byte("!<arch>\n"), c...))
	f.Add(append(bytes.Clone(c), c...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := CheckInput(b); err != nil && !errors.Is(err, ErrTooLarge) && !errors.Is(err, ErrFormat) {
			t.Fatal(err)
		}
	})
}
