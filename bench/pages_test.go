package bench_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestPages: the pages have the figures of their raw logs, and no others.
func TestPages(t *testing.T) {
	if out, err := exec.Command("python3", "pages.py", "--check").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// book is a tree with one page, one raw log and one file of what is measured, in a repository of its own.
type book struct {
	*testing.T
	dir string
}

func newBook(t *testing.T) *book {
	b := &book{t, t.TempDir()}
	for _, name := range []string{"pages.py", "rawlog.py"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		b.write("bench/"+name, string(text))
	}
	b.write("bench/show.py", "import sys\nprint(open(sys.argv[1]).read().splitlines()[1])\n")
	b.write("bench/constants.txt", "# decided\nREADME.md: 5 ms\n")
	b.write("CHANGELOG.md", "# Changes\n")
	b.write("remoting/client/a.c", "int a; /* one */\n")
	b.write("remoting/worker/w.go", "package worker\n\n// f returns 1.\nfunc f() int { return 1 }\n")
	b.git("init", "-q")
	b.git("add", ".")
	b.git("commit", "-q", "-m", "measured")
	b.write("bench/logs/a/log.txt", b.header(b.git("rev-parse", "HEAD"))+"it took 7 us\n")
	b.page("it took 7 us\n")
	return b
}

func (b *book) write(name, text string) {
	b.Helper()
	path := filepath.Join(b.dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		b.Fatal(err)
	}
}

func (b *book) header(commit string) string {
	return `{"commit": "` + strings.TrimSpace(commit) + `", "date": "d", "processor": "p", "cores": 1, "kernel": "k", "gpu": "g", "driver": "v"}` + "\n"
}

func (b *book) page(shown string) {
	b.Helper()
	b.write("README.md", "A turn is 5 ms.\n\n<!-- made by bench/show.py bench/logs/a/log.txt -->\n"+shown+"<!-- end -->\n")
}

func (b *book) git(args ...string) string {
	b.Helper()
	cmd := exec.Command("git", append([]string{"-c", "user.name=t", "-c", "user.email=t@t"}, args...)...)
	cmd.Dir = b.dir
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("git %v: %v", args, err)
	}
	return string(out)
}

// pages runs pages.py, and answers what it said and whether it was content.
func (b *book) pages(args ...string) (string, bool) {
	out, err := exec.Command("python3", append([]string{filepath.Join(b.dir, "bench/pages.py")}, args...)...).CombinedOutput()
	b.Logf("%v: %v\n%s", args, err, out)
	return string(out), err == nil
}

// refuses checks that pages.py finds fault, and names it.
func (b *book) refuses(fault string) {
	b.Helper()
	if out, good := b.pages("--check"); good || !strings.Contains(out, fault) {
		b.Errorf("pages.py does not say %q", fault)
	}
}

func TestPagesJudged(t *testing.T) {
	b := newBook(t)
	if out, good := b.pages(); !good || out != "" {
		t.Errorf("nothing is wrong, and it says %q", out)
	}
	b.page("it took 6 us\n")
	b.refuses("README.md differs from its raw logs")
	if _, good := b.pages("--write"); !good {
		t.Error("--write failed")
	}
	if _, good := b.pages("--check"); !good {
		t.Error("--write did not mend the page")
	}
	b.write("CHANGELOG.md", "# Changes\n\nNow 20 us, 0.97 of native, `3 s` and\n\n    sleep 4 s\n")
	b.refuses("CHANGELOG.md:3: 20 us is in no block")
	b.refuses("CHANGELOG.md:3: 0.97 is in no block")
	if out, _ := b.pages("--check"); strings.Contains(out, "3 s") || strings.Contains(out, "4 s") {
		t.Error("code counts as a figure")
	}
	b.write("CHANGELOG.md", "# Changes\n")
	b.write("bench/constants.txt", "README.md: 5 ms, 9 s\n")
	b.refuses("README.md no longer has 9 s")
	b.write("bench/constants.txt", "README.md: 5 ms\n")
	b.write("bench/logs/a/other.txt", "it took 8 us\n")
	b.refuses("bench/logs/a/other.txt does not begin with the line")
	b.write("bench/logs/a/other.txt", b.header("unknown"))
	for _, name := range []string{"test/releases.log", "test/vm/units.log.bookworm"} {
		b.write(name, "\n"+b.header("unknown"))
		b.refuses(name + " does not begin with the line")
		b.write(name, b.header("unknown"))
	}
	if out, good := b.pages("--check"); !good {
		t.Errorf("every log has its line now, and it says %q", out)
	}
}

func TestPagesOld(t *testing.T) {
	b := newBook(t)
	b.write("remoting/client/a.c", "/* another */\nint a;\n")
	b.write("remoting/worker/w.go", "package worker\n\n// f returns one.\nfunc f() int {\n\treturn 1\n}\n")
	b.write("remoting/worker/w_test.go", "package worker\n")
	b.git("add", ".")
	b.git("commit", "-q", "-m", "comments")
	if out, good := b.pages(); !good || out != "" {
		t.Errorf("comments and tests changed, and it says %q", out)
	}
	b.write("remoting/client/a.c", "int a = 1;\n")
	b.write("remoting/worker/w.go", "package worker\n\nfunc f() int { return 1 /* as before */ }\n")
	b.write("remoting/wire/new.go", "package wire\n")
	b.git("add", ".")
	b.git("commit", "-q", "-m", "code")
	out, good := b.pages()
	if !good || !strings.Contains(out, "README.md: bench/logs/a/log.txt is of ") || !strings.Contains(out, "2 files of what it measured") ||
		!strings.Contains(out, "remoting/client: a.c\n") || !strings.Contains(out, "remoting/wire: new.go\n") || strings.Contains(out, "worker") {
		t.Errorf("content %v: it says %q", good, out)
	}
	// As in a shallow clone.
	b.write("bench/logs/a/log.txt", b.header(strings.Repeat("12", 20)+"-dirty")+"it took 7 us\n")
	if out, good := b.pages(); !good || !strings.Contains(out, "git does not have that commit here") {
		t.Errorf("content %v: it says %q", good, out)
	}
}
