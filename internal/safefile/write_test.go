package safefile

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func content(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	es, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range es {
		all = append(all, e.Name())
	}
	return all
}

func perm(t *testing.T, path string) fs.FileMode {
	t.Helper()
	fi, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Mode()
}

func TestWrite(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	dir, staging := t.TempDir(), t.TempDir()
	path := filepath.Join(dir, "f")
	for i, how := range []How{{}, {Mode: 0o644}, {Mode: 0o755, Volatile: true}, {Mode: 0o640, Staging: staging}} {
		text := fmt.Sprint("text ", i)
		if err := Write(path, []byte(text), how); err != nil {
			t.Fatal(err)
		}
		want := how.Mode
		if want == 0 {
			want = 0o600
		}
		if got := content(t, path); got != text || perm(t, path) != want {
			t.Errorf("%+v: %q, mode %v", how, got, perm(t, path))
		}
	}
	// A reader that has the old file open goes on reading it.
	r, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := Write(path, []byte("new"), How{}); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, _ := r.Read(b); string(b[:n]) != "text 3" {
		t.Errorf("a reader sees %q", b[:n])
	}
	if err := WriteNew(path, []byte("newer"), How{}); !errors.Is(err, fs.ErrExist) || content(t, path) != "new" {
		t.Errorf("a name that is taken: %v, %q", err, content(t, path))
	}
	if err := WriteNew(filepath.Join(dir, "g"), []byte("newer"), How{Mode: 0o644}); err != nil || content(t, filepath.Join(dir, "g")) != "newer" {
		t.Error(err)
	}
	// A link is replaced and not followed.
	link := filepath.Join(dir, "link")
	for _, to := range []string{"nowhere", path} {
		if err := Symlink(to, link); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.Readlink(link); got != to {
			t.Errorf("link to %q", got)
		}
	}
	if err := Write(link, []byte("file"), How{}); err != nil || !perm(t, link).IsRegular() || content(t, path) != "new" {
		t.Errorf("%v, mode %v", err, perm(t, link))
	}
	if got := names(t, dir); !slices.Equal(got, []string{"f", "g", "link"}) || len(names(t, staging)) > 0 {
		t.Errorf("left: %v, %v", got, names(t, staging))
	}
	if err := Write(filepath.Join(dir, "none", "f"), nil, How{}); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if err := Write(filepath.Join(dir, ".."), nil, How{}); err == nil {
		t.Error("written to ..")
	}
}

// A directory that only a descriptor leads to, opened for its path alone.
func TestWriteAt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	const oPath = 0x200000
	d, err := os.OpenFile(dir, syscall.O_DIRECTORY|oPath, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := os.Rename(dir, dir+"2"); err != nil {
		t.Fatal(err)
	}
	if err := WriteAt(d, "f", []byte("text"), How{Volatile: true}); err != nil || content(t, dir+"2/f") != "text" {
		t.Error(err)
	}
	if err := WriteAt(d, "../f", []byte("text"), How{Volatile: true}); err == nil {
		t.Error("written outside of the directory")
	}
}

func TestPending(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	p, err := Create(path, How{})
	if err != nil {
		t.Fatal(err)
	}
	if name, ok := Unfinished(names(t, dir)[0]); name != "f" || !ok {
		t.Errorf("%v: of %q, %v", names(t, dir), name, ok)
	}
	if err := p.Close(); err != nil || len(names(t, dir)) > 0 {
		t.Errorf("%v, left: %v", err, names(t, dir))
	}
	if p, err = Create(path, How{Volatile: true}); err != nil {
		t.Fatal(err)
	}
	if err := p.CommitNew(); err != nil {
		t.Fatal(err)
	}
	f := p.Detach()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := f.WriteString("later"); err != nil || content(t, path) != "later" {
		t.Error(err)
	}
	_ = f.Close()

	for _, entry := range []string{"f", ".f.new", "f.0123456789abcdef.new", ".f.0123456789abcdeF.new", ".f.0123456789abcdef.new.json", "..0123456789abcdef.new"} {
		if _, ok := Unfinished(entry); ok {
			t.Errorf("%s is taken for unfinished", entry)
		}
	}
	left := filepath.Join(dir, tempName("g"))
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, old := range []bool{false, true} {
		if err := Sweep(dir, func(name string, fi fs.FileInfo) bool { return name == "g" && fi.Size() == 0 && old }); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(left); (err == nil) == old {
			t.Errorf("old %v: %v", old, err)
		}
	}
}

// Of what writers left unfinished, only the old files of the given prefix go.
func TestSweepAbandoned(t *testing.T) {
	dir := t.TempDir()
	old, young, other, done := tempName("sluice-a"), tempName("sluice-a"), tempName("b"), "sluice-a"
	for _, name := range []string{old, young, other, done} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if age := time.Now().Add(-2 * abandoned); name != young {
			if err := os.Chtimes(path, age, age); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := SweepAbandoned(dir, "sluice-"); err != nil {
		t.Fatal(err)
	}
	want := []string{young, other, done}
	slices.Sort(want)
	if got := names(t, dir); !slices.Equal(got, want) {
		t.Errorf("%q stay, want %q", got, want)
	}
	if err := SweepAbandoned(filepath.Join(dir, "none"), ""); err == nil {
		t.Error("a directory that is not there")
	}
}

// An unnamed file is in no directory before it is committed, and whole afterwards.
func TestUnnamed(t *testing.T) {
	for _, fresh := range []bool{false, true} {
		dir := t.TempDir()
		path := filepath.Join(dir, "f")
		begin := func() *Pending {
			p, err := Create(path, How{Unnamed: true, Mode: 0o640})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := p.WriteString("text"); err != nil {
				t.Fatal(err)
			}
			if got := names(t, dir); len(got) > 0 {
				t.Errorf("fresh %v: %v before the commit", fresh, got)
			}
			return p
		}
		if err := begin().Close(); err != nil || len(names(t, dir)) > 0 {
			t.Errorf("fresh %v: %v, left: %v", fresh, err, names(t, dir))
		}
		p := begin()
		err := p.Commit
		if fresh {
			err = p.CommitNew
		}
		if err := errors.Join(err(), p.Close()); err != nil {
			t.Fatal(err)
		}
		if got := names(t, dir); !slices.Equal(got, []string{"f"}) || content(t, path) != "text" || perm(t, path) != 0o640 {
			t.Errorf("fresh %v: %v, %q, mode %v", fresh, got, content(t, path), perm(t, path))
		}
		q, err2 := Create(path, How{Unnamed: true})
		if err2 != nil {
			t.Fatal(err2)
		}
		if err := q.CommitNew(); !errors.Is(err, fs.ErrExist) {
			t.Errorf("fresh %v: a name that is taken: %v", fresh, err)
		}
		if err := errors.Join(q.Commit(), q.Close()); err != nil || content(t, path) != "" || len(names(t, dir)) != 1 {
			t.Errorf("fresh %v: replaced: %v, %q, %v", fresh, err, content(t, path), names(t, dir))
		}
	}
	for err, want := range map[error]bool{syscall.EOPNOTSUPP: true, syscall.EISDIR: true, syscall.EINVAL: true, syscall.ENOSPC: false, nil: false} {
		if noUnnamed(err) != want {
			t.Errorf("%v: a file system without unnamed files: %v", err, !want)
		}
	}
}

// Several writers of one file do not meet, and no reader sees part of a file.
func TestConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	text := func(i int) []byte { return bytes.Repeat([]byte{'a' + byte(i)}, 1<<16) }
	if err := Write(path, text(0), How{Volatile: true}); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 50 {
				if err := Write(path, text(i), How{Volatile: true}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 200 {
		if got := content(t, path); len(got) != 1<<16 || strings.Trim(got, got[:1]) != "" {
			t.Errorf("%d bytes that begin with %.8q", len(got), got)
			break
		}
	}
	wg.Wait()
}

// crashEnv has this test program run TestCrash's child: "PATH" and the step at which it
// kills itself.
const crashEnv = "SAFEFILE_CRASH"

// A process that is killed before any of the steps leaves the old file or the new one,
// whole, and at most an unfinished file, which Sweep removes.
func TestCrash(t *testing.T) {
	if at, path, ok := strings.Cut(os.Getenv(crashEnv), " "); ok {
		step = func(name string) {
			if name == strings.ReplaceAll(at, "_", " ") {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			}
		}
		if err := errors.Join(Write(path, []byte("new"), How{}), WriteNew(path+"2", []byte("new"), How{})); err != nil {
			t.Fatal(err)
		}
		return
	}
	run := func(at, path string) bool {
		c := exec.Command(os.Args[0], "-test.run=^TestCrash$")
		c.Env = append(os.Environ(), crashEnv+"="+strings.ReplaceAll(at, " ", "_")+" "+path)
		out, err := c.CombinedOutput()
		if err != nil && !strings.Contains(err.Error(), "killed") {
			t.Fatalf("%s: %v: %s", at, err, out)
		}
		return err == nil
	}
	for at, want := range map[string]string{
		"create": "old", "write": "old", "sync": "old", "rename": "old", "sync directory": "new", "link": "new", "unlink": "new", "none": "new",
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "f")
		if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		if ended := run(at, path); ended != (at == "none") {
			t.Errorf("%s: the process has ended by itself: %v", at, ended)
		}
		if got := content(t, path); got != want {
			t.Errorf("%s: %q, want %q", at, got, want)
		}
		if err := Sweep(dir, func(string, fs.FileInfo) bool { return true }); err != nil {
			t.Fatal(err)
		}
		wants := []string{"f"}
		if at == "unlink" || at == "none" {
			wants = append(wants, "f2")
			if got := content(t, path+"2"); got != "new" {
				t.Errorf("%s: the second has %q", at, got)
			}
		}
		if got := names(t, dir); !slices.Equal(got, wants) {
			t.Errorf("%s: %v", at, got)
		}
	}
}
