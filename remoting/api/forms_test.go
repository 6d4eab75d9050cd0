package api

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// formsOf are the forms of tables after some text was put for another.
func formsOf(t *testing.T, table, from, to string) map[string]Form {
	t.Helper()
	functions, numbers, messages := string(source), string(numbersSource), string(wireSource)
	for name, text := range map[string]*string{"cuda.tbl": &functions, "numbers.tbl": &numbers, "wire.tbl": &messages} {
		if name != table {
			continue
		}
		changed := strings.Replace(*text, from, to, 1)
		if changed == *text {
			t.Fatalf("%q is not in %s", from, table)
		}
		*text = changed
	}
	rows, err := Parse([]byte(functions))
	if err == nil {
		_, err = number(rows, []byte(numbers))
	}
	if err != nil {
		t.Fatal(err)
	}
	w, err := parseWire([]byte(messages))
	if err != nil {
		t.Fatal(err)
	}
	all, err := Forms(rows, w)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]Form{}
	for _, f := range all {
		out[f.Name] = f
	}
	return out
}

// TestForms: what changes in the tables changes the forms of what it belongs to, and no others.
func TestForms(t *testing.T) {
	was := formsOf(t, "", "", "")
	for name, c := range map[string]struct {
		table, from, to string
		differ          []string
	}{
		"words":               {"wire.tbl", "copies to a box", "copies to a corner", nil},
		"request":             {"wire.tbl", "	> u32 | delivery |", "	> u64 | delivery |", []string{"copy_out"}},
		"record":              {"wire.tbl", "record | KERNEL_ATTR | | a `CUfunction_attribute`, by its number\n", "record | KERNEL_ATTR | | a `CUfunction_attribute`, by its number\n	u32 | more |\n", []string{"kernel_info"}},
		"limit":               {"wire.tbl", "limit | IMAGE | 2 GiB", "limit | IMAGE | 1 GiB", []string{"limit IMAGE"}},
		"numbering":           {"wire.tbl", "const | TEXT_COUNT | 9 |", "const | TEXT_SERIAL | 9 | a serial number\nconst | TEXT_COUNT | 10 |", []string{"observe_text"}},
		"new number":          {"wire.tbl", "status | BUSY | 6 |", "status | DREAMING | 99 | it sleeps\nstatus | BUSY | 6 |", []string{"status DREAMING"}},
		"parameter":           {"cuda.tbl", "unsigned int planeIdx", "size_t planeIdx", []string{"cuArrayGetPlane"}},
		"rows in other order": {"cuda.tbl", "cuArray3DCreate | ", "cuProfilerDream | cuProfilerDream 13000 | - | refuse=later | - | void\ncuArray3DCreate | ", nil},
		"number":              {"numbers.tbl", "\ncuMemGetInfo_v2\n", "\n- cuMemGetInfo_v2\ncuMemGetInfo_v2\n", nil},
	} {
		if name == "rows in other order" {
			numbersSource = append(numbersSource, "cuProfilerDream\n"...)
		}
		now := formsOf(t, c.table, c.from, c.to)
		numbersSource = []byte(strings.TrimSuffix(string(numbersSource), "cuProfilerDream\n"))
		var differ []string
		for n, f := range now {
			if was[n] != f {
				differ = append(differ, n)
			}
		}
		for n := range was {
			if _, ok := now[n]; !ok {
				differ = append(differ, n)
			}
		}
		slices.Sort(differ)
		if name == "number" { // it and all behind it
			if !slices.Contains(differ, "cuMemGetInfo_v2") || slices.Contains(differ, "cuArrayGetPlane") {
				t.Errorf("%s: %v", name, differ)
			}
			continue
		}
		if !slices.Equal(differ, c.differ) {
			t.Errorf("%s: forms of %v differ, not of %v", name, differ, c.differ)
		}
	}
	if f := typeForm("CUDA_MEMCPY3D", map[string]bool{}); !strings.Contains(f, "srcPitch") || !strings.Contains(f, "CUmemorytype") {
		t.Errorf("CUDA_MEMCPY3D: %q", f)
	}
}

func TestNumbers(t *testing.T) {
	rows := func() []Row { return []Row{{Symbol: "a"}, {Symbol: "b"}} }
	r := rows()
	if n, err := number(r, []byte("# words\n\nb\n- a\na\n")); n != 3 || err != nil || r[0].Op != 2 || r[1].Op != 0 {
		t.Errorf("%d numbers, %v, %+v", n, err, r)
	}
	for name, c := range map[string][2]string{
		"missing": {"a\n", `b has no number: add a line "b"`},
		"twice":   {"a\nb\na\n", "a has a number already"},
		"gone":    {"a\nb\nc\n", `c is not in cuda.tbl: put "- "`},
		"garbage": {"a b\n", "is no function"},
	} {
		if _, err := number(rows(), []byte(c[0])); !errors.Is(err, ErrTable) || !strings.Contains(err.Error(), c[1]) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
