package store

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Facts of an image are there for whoever opens it later, of this image alone, and never damaged ones.
func TestFacts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "images")
	s, err := Open(dir, Bounds{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	text := []byte("an image")
	sum := put(t, s, text)
	want := func(name string, n uint64, known bool) {
		t.Helper()
		m, err := s.Get(sum, uint64(len(text)))
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if got, ok := m.Fact(name); got != n || ok != known {
			t.Errorf("%s: %d, %v; want %d, %v", name, got, ok, n, known)
		}
	}
	set := func(name string, n uint64) {
		t.Helper()
		m, err := s.Get(sum, uint64(len(text)))
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		s.SetFact(sum, m, name, n)
	}
	want("a", 0, false)
	set("a", 7)
	set("b", 1<<63)
	want("a", 7, true)
	want("b", 1<<63, true)
	want("c", 0, false)

	attribute := func() string {
		var b [maxFacts]byte
		n, err := unix.Getxattr(s.path(sum), factsName, b[:])
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	whole := attribute()
	for _, damaged := range []string{strings.Replace(whole, "a=7", "a=8", 1), whole[:len(whole)-1], "", "a=7", strings.Repeat("a", maxFacts+1)} {
		if err := unix.Setxattr(s.path(sum), factsName, []byte(damaged), 0); err != nil {
			t.Fatal(err)
		}
		want("a", 0, false)
	}
	// Another image's are not this one's.
	other := put(t, s, []byte("another"))
	if err := unix.Setxattr(s.path(other), factsName, []byte(whole), 0); err != nil {
		t.Fatal(err)
	}
	m, err := s.Get(other, 7)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if n, known := m.Fact("a"); known {
		t.Errorf("another image's fact: %d", n)
	}
	// After damage they are noted again, and they are bounded.
	set("a", 9)
	want("a", 9, true)
	for i := range 100 {
		set(strings.Repeat("x", 20)+string(rune('a'+i%26)), uint64(i))
	}
	want("a", 9, true)
	if n := len(attribute()); n > maxFacts {
		t.Errorf("%d bytes of facts", n)
	}
	// An image that the store does not have, and one that is gone.
	s.SetFact(sum, &Image{}, "d", 1)
	want("d", 0, false)
	if err := os.Remove(s.path(sum)); err != nil {
		t.Fatal(err)
	}
	s.SetFact(sum, &Image{stored: true}, "d", 1)
}
