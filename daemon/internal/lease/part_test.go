package lease

import (
	"strings"
	"testing"
)

// grants are those of a lease: an owner and a percent each.
func grants(list ...any) (all []Grant) {
	for i := 0; i < len(list); i += 2 {
		all = append(all, Grant{Owner: list[i].(string), Percent: uint32(list[i+1].(int)), Order: i / 2})
	}
	return all
}

func TestChooseGPUs(t *testing.T) {
	four := grants("a", 100, "a", 100, "a", 100, "a", 100)
	two := grants("a", 100, "b", 100, "a", 100, "b", 100, "a", 100) // a program sees a, a, a, b, b
	for name, c := range map[string]struct {
		grants  []Grant
		percent uint32
		had     uint32
		others  []uint32 // masks, the step's number is the place
		want    uint32
		text    string
	}{
		"the first":                         {four, 100, 0, nil, 1, ""},
		"two of them":                       {four, 200, 0, nil, 3, ""},
		"all of them":                       {four, 400, 0, nil, 15, ""},
		"beside another":                    {four, 100, 0, []uint32{1}, 2, ""},
		"between others":                    {four, 200, 0, []uint32{1, 4}, 10, ""},
		"beside parts without GPUs":         {four, 100, 0, []uint32{0, 0}, 1, ""},
		"it has them":                       {four, 100, 8, []uint32{2}, 8, ""},
		"it has less than it asks for":      {four, 200, 8, []uint32{2}, 5, ""},
		"another has what it had":           {four, 100, 2, []uint32{2}, 1, ""},
		"too many":                          {four, 300, 0, []uint32{1, 4}, 0, "--gres=rgpu:300 of step 9: its job has 4 whole GPUs on this node, and other steps leave GPU 1,3 (step 0: GPU 0; step 1: GPU 2); start it with --gres=rgpu:200, or when another step has ended"},
		"none left":                         {four, 100, 0, []uint32{7, 8}, 0, "leave none (step 0: GPU 0,1,2; step 1: GPU 3); start it when another step has ended"},
		"the owner with the fewest":         {two, 100, 0, nil, 8, ""},
		"of one owner":                      {two, 200, 0, []uint32{8}, 3, ""},
		"the only owner with enough":        {two, 300, 0, nil, 7, ""},
		"of two owners":                     {two, 400, 0, nil, 15, ""},
		"of two owners, as none has enough": {two, 200, 0, []uint32{19}, 12, ""},
		"a whole one and a half":            {grants("a", 100, "a", 50), 100, 0, nil, 1, ""},
		"the half is numbered first":        {grants("a", 100, "b", 100, "a", 50), 200, 0, nil, 5, ""},
		"no other whole one":                {grants("a", 100, "a", 50), 100, 0, []uint32{1}, 0, "leave none"},
		"sluice set has changed its share":  {[]Grant{{Owner: "a", Percent: 30, First: 100}, {Owner: "a", Percent: 100, First: 50}}, 100, 0, nil, 1, ""},
	} {
		var parts []Part
		for i, gpus := range c.others {
			parts = append(parts, Part{Step: uint32(i), GPUs: gpus})
		}
		if c.had != 0 {
			parts = append(parts, Part{Step: 9, GPUs: c.had})
		}
		l := Lease{Grants: c.grants}
		got, err := l.ChooseGPUs(Part{Step: 9, Percent: c.percent}, parts)
		switch {
		case c.text != "":
			if CodeOf(err) != NoRoom || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%s: %v, %v", name, got, err)
			}
		case err != nil || got != Part{Step: 9, Percent: c.percent, GPUs: c.want}:
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestPartText(t *testing.T) {
	for want, p := range map[string]Part{
		"step 3: 10%, 80 MiB": {Step: 3, Percent: 10, Mem: 80 << 20},
		"step 0: GPU 0,2,15":  {Percent: 300, GPUs: 1<<15 | 5},
	} {
		if p.String() != want {
			t.Errorf("%s, want %s", p, want)
		}
	}
}
