package options

import (
	"bytes"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/internal/form/formtest"
)

// What is generated is what the table says.
func TestGenerated(t *testing.T) {
	read := func(name string) ([]byte, error) { return os.ReadFile("../../" + name) }
	all, err := Generated(read)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range all {
		if have, err := read(name); err != nil || !bytes.Equal(have, want) {
			t.Errorf("%s is out of date: run go run ./spank/cmd/spankgen; %v", name, err)
		}
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
	formtest.Each(t, "sizes.txt", func(value, want string) {
		n, ok := MiB(value)
		if got := fmt.Sprint(n); ok && got != want || ok == (want == "-") || (Check("rgpu-mem", value) == nil) != ok {
			t.Errorf("--rgpu-mem=%s: %d MiB, %v; want %s", value, n, ok, want)
		}
	})
	formtest.Each(t, "times.txt", func(value, want string) {
		d, ok := Duration(value)
		if got := fmt.Sprint(int(d.Seconds())); ok && got != want || ok == (want == "-") || (Check("rgpu-grace", value) == nil) != ok {
			t.Errorf("--rgpu-grace=%s: %v, %v; want %s s", value, d, ok, want)
		}
	})
	if err := Check("rgpu-policy", "x"); err == nil || err.Error() != "--rgpu-policy=x: want one of best-effort, equal, equal-lend, fixed, fixed-lend" {
		t.Error(err)
	}
}

// What the scripts read is what the plug-in sends; what anybody may have set is cut.
func TestPassed(t *testing.T) {
	env := map[string]string{"SPANK_RGPU_MEM": "20G", "SPANK_RGPU_POOL": strings.Repeat("x", 1000), "SPANK_RGPU_SPREAD": "", "SPANK_OTHER": "1", "RGPU_POLICY": "fixed"}
	got := Passed(func(k string) (string, bool) { v, ok := env[k]; return v, ok })
	if len(got) != 2 || got["mem"] != "20G" || len(got["pool"]) > 256 {
		t.Errorf("%v", got)
	}
	if err := CheckPassed(got); err == nil || !strings.HasPrefix(err.Error(), "--rgpu-pool=") {
		t.Error(err)
	}
	delete(got, "pool")
	if err := CheckPassed(got); err != nil {
		t.Error(err)
	}
}

func TestInto(t *testing.T) {
	for have, want := range map[string]string{
		"a\n<!-- " + begin + " -->\nold\n<!-- " + end + " -->\nb\n": "a\n<!-- " + begin + " -->\nnew\n<!-- " + end + " -->\nb\n",
		"-- " + begin + "\n-- " + end + "\nb":                       "-- " + begin + "\nnew\n-- " + end + "\nb",
	} {
		if got, err := into([]byte(have), "new\n"); string(got) != want || err != nil {
			t.Errorf("%q is %q, %v", have, got, err)
		}
	}
	for _, bad := range []string{"", "no marks\n", begin, begin + "\n", end + "\n" + begin + "\n"} {
		if got, err := into([]byte(bad), "new\n"); err == nil {
			t.Errorf("%q is %q", bad, got)
		}
	}
}
