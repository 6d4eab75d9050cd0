package options

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
)

// What is generated is what the table says.
func TestGenerated(t *testing.T) {
	have, err := os.ReadFile("../../" + Header)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, C()) {
		t.Errorf("%s is out of date: run go run ./spank/cmd/spankgen", Header)
	}
	guide, err := os.ReadFile("../../" + Guide)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(guide, Into(guide)) {
		t.Errorf("the table of options in %s is out of date: run go run ./spank/cmd/spankgen", Guide)
	}
}

func TestTable(t *testing.T) {
	for i := range Table {
		o := &Table[i]
		if !regexp.MustCompile(`^rgpu-[a-z]+$`).MatchString(o.Name) || o.Env != strings.ToUpper(strings.ReplaceAll(o.Name, "-", "_")) {
			t.Errorf("%s is passed on as %s", o.Name, o.Env)
		}
		if (o.Kind == Flag) != (o.Arg == "") || (o.Kind == Choice) != (len(o.Choices) > 0) || len(o.Choices) > 7 {
			t.Errorf("%s: %+v", o.Name, o)
		}
		if len(o.Help) > 52 { // srun --help is 80 wide
			t.Errorf("--%s: its help is %d characters long", o.Name, len(o.Help))
		}
	}
}

func TestCheck(t *testing.T) {
	for value, good := range map[string]bool{
		"rgpu-mem=20G": true, "rgpu-mem=20g": true, "rgpu-mem=2M": true, "rgpu-mem=16T": true, "rgpu-mem=16384G": true,
		"rgpu-mem=1M": false, "rgpu-mem=16385G": false, "rgpu-mem=17T": false, "rgpu-mem=20": false, "rgpu-mem=": false, "rgpu-mem=G": false, "rgpu-mem=20GG": false,
		"rgpu-mem=-1G": false, "rgpu-mem=1.5G": false, "rgpu-mem= 1G": false, "rgpu-mem=0x10G": false, "rgpu-mem=18446744073709551617M": false, "rgpu-mem=20K": false,
		"rgpu-policy=fixed": true, "rgpu-policy=equal-lend": true, "rgpu-policy=best-effort-lend": false, "rgpu-policy=Fixed": false, "rgpu-policy=": false,
		"rgpu-pool=a100": true, "rgpu-pool=a.b-c_d": true, "rgpu-pool=": false, "rgpu-pool=../x": false, "rgpu-pool=a/b": false, "rgpu-pool=ä": false,
		"rgpu-pool=" + strings.Repeat("x", 63): true, "rgpu-pool=" + strings.Repeat("x", 64): false,
		"rgpu-spread=1": true, "rgpu-spread=": false, "rgpu-spread=0": false, "rgpu-report=1": true, "rgpu-x=1": false,
	} {
		name, v, _ := strings.Cut(value, "=")
		if err := Check(name, v); (err == nil) != good {
			t.Errorf("%s: %v", value, err)
		}
	}
	if n, ok := MiB("3T"); !ok || n != 3<<20 {
		t.Errorf("3T is %d MiB, %v", n, ok)
	}
	if err := Check("rgpu-policy", "x"); err == nil || err.Error() != "--rgpu-policy=x: want one of fixed, fixed-lend, equal, equal-lend, best-effort" {
		t.Error(err)
	}
}

func TestInto(t *testing.T) {
	guide := "a\n" + guideBegin + "old\n" + guideEnd + "b\n"
	want := "a\n" + guideBegin + Markdown() + guideEnd + "b\n"
	if have := string(Into([]byte(guide))); have != want {
		t.Errorf("%s", have)
	}
	if have := string(Into([]byte("no marks\n"))); have != "no marks\n" {
		t.Errorf("%s", have)
	}
}
