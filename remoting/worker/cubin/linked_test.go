package cubin

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/wire"
)

func linkedSet(containers ...[]byte) []byte {
	b := le.AppendUint32(nil, wire.LinkedMagic)
	b = le.AppendUint32(b, uint32(len(containers)))
	for _, c := range containers {
		b = le.AppendUint64(b, uint64(len(c)))
	}
	return append(b, bytes.Join(containers, nil)...)
}

func TestLinked(t *testing.T) {
	vars := func(n int) []byte {
		return container(fatEntry(kindELF, 80, 0, elf(map[string][]byte{".nv.global": make([]byte, n), ".nv.info.other": info(nil), ".pad": make([]byte, 8)}), 0))
	}
	whole := container(fatEntry(kindELF, 90, 0, testELF(), 0))
	last := vars(16) // once: the order of its sections differs from time to time
	b := linkedSet(whole, vars(8), last)
	set, err := Linked(b)
	if err != nil || len(set) != 3 || !bytes.Equal(set[0], whole) || !bytes.Equal(set[2], last) {
		t.Fatalf("%d containers, %v", len(set), err)
	}
	for _, k := range []string{"kern", "other"} {
		want := map[string][]Param{"kern": wantParams}[k]
		if ps, err := Params(b, k, 90); err != nil || !reflect.DeepEqual(ps, want) {
			t.Errorf("%s: %v %v", k, ps, err)
		}
	}
	if _, err := Params(b, "none", 90); !errors.Is(err, ErrNotFound) {
		t.Errorf("a kernel that is not there: %v", err)
	}
	if n := variablesOf(t, b, 80); n != 24 {
		t.Errorf("the objects' variables: %d", n)
	}
	if n := variablesOf(t, linkedSet(vars(8), vars(16)), 80); n != 8 {
		t.Errorf("the linked image's variables: %d", n)
	}
}

// TestWrongLinked: what the driver is given has no length of its own, so every header must say the truth.
func TestWrongLinked(t *testing.T) {
	c := container(fatEntry(kindELF, 80, 0, testELF(), 0))
	good := linkedSet(c, c)
	change := func(at int, v uint64) []byte {
		b := bytes.Clone(good)
		le.PutUint64(b[at:], v)
		return b
	}
	for name, b := range map[string][]byte{
		"no containers":     linkedSet(),
		"one container":     linkedSet(c),
		"a count beyond it": append(le.AppendUint32(le.AppendUint32(nil, wire.LinkedMagic), 4000), good[8:]...),
		"a size beyond it":  change(16, uint64(len(c))+8),
		"a size too small":  change(8, 8),
		"odd size":          change(8, uint64(len(c))-1),
		"a huge size":       change(8, 1<<63),
		"no container":      change(24, 0),
		"a header's length": change(24+8, uint64(len(c))),
		"cut":               good[:len(good)-8],
		"bytes behind":      append(bytes.Clone(good), make([]byte, 8)...),
	} {
		if set, err := Linked(b); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: %d containers, %v", name, len(set), err)
		}
		if _, err := Params(b, "kern", 80); err == nil {
			t.Errorf("%s: a kernel was found", name)
		}
		_, _ = Variables(b, 80)
	}
}
