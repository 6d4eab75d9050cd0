package account

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestOtherVersion: the files of a release whose layout is another one are refused, by a daemon and by a session, and stay as they are for that release.
func TestOtherVersion(t *testing.T) {
	dir, caps := t.TempDir(), []uint64{1 << 30}
	a, err := Create(filepath.Join(dir, "account"), caps)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	p, err := CreatePart(filepath.Join(dir, "part"), caps)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, v := range []uint64{0, fileVersion + 1, 1 << 63} {
		a.layout().version.Store(v)
		p.layout().version.Store(v)
		var before [2][]byte
		for i, name := range []string{"account", "part"} {
			if before[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := Open(filepath.Join(dir, "account"), caps); !errors.Is(err, ErrFile) {
			t.Errorf("an account of version %d: %v", v, err)
		}
		if _, err := OpenPart(filepath.Join(dir, "part"), caps); !errors.Is(err, ErrFile) {
			t.Errorf("a part of version %d: %v", v, err)
		}
		for i, name := range []string{"account", "part"} {
			if now, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(now, before[i]) {
				t.Errorf("the %s of version %d was changed, %v", name, v, err)
			}
		}
	}
	a.layout().version.Store(fileVersion)
	p.layout().version.Store(partVersion)
	b, err := Open(filepath.Join(dir, "account"), caps)
	if err != nil {
		t.Fatalf("the account of this version: %v", err)
	}
	b.Close()
}
