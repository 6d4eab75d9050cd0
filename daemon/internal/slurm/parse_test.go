package slurm

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/form/formtest"
)

func TestGres(t *testing.T) {
	for _, c := range []struct {
		text string
		want []Gres // nil: refused, or nothing
		bad  bool
	}{
		{"gres:rgpu:50", []Gres{{"rgpu", "", 50, false}}, false}, // 22.05
		{"gres/rgpu:50", []Gres{{"rgpu", "", 50, false}}, false}, // 23.11
		{"gres:rgpu:h200:50", []Gres{{"rgpu", "h200", 50, false}}, false},
		{"gres/rgpu:h200:50", []Gres{{"rgpu", "h200", 50, false}}, false},
		{"gres/rgpu:h200=50", []Gres{{"rgpu", "h200", 50, false}}, false},
		{"rgpu=50", []Gres{{"rgpu", "", 50, false}}, false},
		{"gres:rgpu", []Gres{{"rgpu", "", 1, true}}, false},
		{"gres:rgpu:h200", []Gres{{"rgpu", "h200", 1, true}}, false},
		{"gres:rgpu:h200:1k", []Gres{{"rgpu", "h200", 1024, false}}, false},
		{"rgpu:2M", []Gres{{"rgpu", "", 2 << 20, false}}, false},
		{"gres:gpu:2,gres:rgpu:5(S:0-1)", []Gres{{"gpu", "", 2, false}, {"rgpu", "", 5, false}}, false},
		{"gres:rgpu:5,gres:rgpu:6", []Gres{{"rgpu", "", 5, false}, {"rgpu", "", 6, false}}, false},
		{"gres:rgpu:0", []Gres{{"rgpu", "", 0, false}}, false},
		{"N/A", nil, false},
		{"(null)", nil, false},
		{"", nil, false},
		{"gres:none", nil, false},
		{"rgpu:-5", nil, true},
		{"rgpu:5x", nil, true},
		{"rgpu:h200:big", nil, true},
		{"rgpu:99999999999999999999", nil, true},
		{"rgpu:a:b:5", nil, true},
		{"rg pu:5", nil, true},
		{strings.Repeat("a,", maxItems) + "a", nil, true},
	} {
		got, err := ParseGres(c.text)
		if (err != nil) != c.bad || !c.bad && !slices.Equal(got, c.want) {
			t.Errorf("%.40q: %v, %v; want %v", c.text, got, err, c.want)
		}
	}
}

func TestLicences(t *testing.T) {
	for _, c := range []struct {
		text string
		want Counts
	}{
		{"rgpu:100,matlab:1", Counts{"rgpu": 100, "matlab": 1}},
		{"rgpu", Counts{"rgpu": 1}},
		{"rgpu:5;rgpu:6", Counts{"rgpu": 11}},
		{"rgpu@db:5", Counts{"rgpu@db": 5}},
		{"(null)", Counts{}},
		{"", Counts{}},
		{"rgpu:5|matlab:1", nil},
		{"rgpu:-1", nil},
		{"rgpu:", nil},
		{":5", nil},
		{"rgpu:4294967296,rgpu:1", nil},
	} {
		got, err := ParseLicences(c.text)
		if (err != nil) != (c.want == nil) || c.want != nil && !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %v, %v; want %v", c.text, got, err, c.want)
		}
	}
}

func TestHosts(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"n1", "n1"},
		{"n[1-3]", "n1 n2 n3"},
		{"n[1,3-4],gpu[08-11]", "n1 n3 n4 gpu08 gpu09 gpu10 gpu11"},
		{"r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"},
		{"n[1-2]-ib", "n1-ib n2-ib"},
		{"(null)", ""},
		{"", ""},
		{"n[1-", "!"}, {"n1]", "!"}, {"n[2-1]", "!"}, {"n[a]", "!"}, {"n[1-99999999]", "!"}, {"n[1-60000],m[1-60000]", "!"},
		{"n[1-300]m[1-300]", "!"}, {"n 1", "!"}, {"../n", "!"}, {"n[]", "!"}, {"n[[1]]", "!"},
	} {
		got, err := ParseHosts(c.text)
		if (err != nil) != (c.want == "!") || err == nil && strings.Join(got, " ") != c.want {
			t.Errorf("%q: %.60q, %v; want %q", c.text, strings.Join(got, " "), err, c.want)
		}
	}
}

// The text is squeue's of 22.05, field by field as jobFormat asks.
func TestJob(t *testing.T) {
	text := "4|0|PENDING||0|0|1|1|main|(null)|gres:rgpu:5|N/A|N/A|N/A|\n" +
		"12|3|RUNNING|h2n[1-2]|1000|1001|1|0|main|rgpu:100,matlab:1|gres:rgpu:50|N/A|N/A|gres/rgpu:5|\n"
	j, err := parseJob("12", text)
	want := Job{
		ID: "12", JobState: JobState{"RUNNING", 3, []string{"h2n1", "h2n2"}}, UID: 1000, GID: 1001, Batch: true,
		Partition: "main", Licences: Counts{"rgpu": 100, "matlab": 1}, Gres: []Gres{{"rgpu", "", 50, false}}, Others: []string{"gres/rgpu:5"},
	}
	if err != nil || !reflect.DeepEqual(j, want) {
		t.Errorf("%+v, %v", j, err)
	}
	if _, err := parseJob("13", text); !errors.Is(err, ErrGone) {
		t.Errorf("a job that is not there: %v", err)
	}
	if _, err := parseJob("1", "1|0|RUNNING|n1|0|0|1|1|main|x\n"); err == nil || errors.Is(err, ErrGone) {
		t.Errorf("fields missing: %v", err)
	}
	if n := strings.Count(jobFormat, ":|"); n != fCount {
		t.Errorf("%d fields asked, %d read", n, fCount)
	}
	jobs, err := parseJobs("1|0|RUNNING|n1|\n7|2|COMPLETING|n[1-2]|\n8|0|PENDING||\n")
	if err != nil || len(jobs) != 3 || !jobs["7"].On("n2") || jobs["7"].Restarts != 2 || jobs["8"].On("n1") || !jobs["1"].State.Starting() {
		t.Errorf("%+v, %v", jobs, err)
	}
	for _, bad := range []string{"1|0|RUNNING|n1", "x|0|RUNNING|n1|", "1|x|RUNNING|n1|", "1|0||n1|", "1|0|RUNNING|n[1|"} {
		if jobs, err := parseJobs(bad + "\n"); err == nil {
			t.Errorf("%q: %v", bad, jobs)
		}
	}
}

// An answer that is cut short, or is no text, does not say that a job is gone.
func TestDamagedAnswer(t *testing.T) {
	const others = "4|0|PENDING||0|0|1|1|main|(null)|gres:rgpu:5|N/A|N/A|N/A|\n"
	text := others + "12|3|RUNNING|n1|1000|1001|1|0|main|rgpu:100|gres:rgpu:50|N/A|N/A|N/A|\n"
	for n := range len(text) {
		if n == len(others) {
			continue // which is whole, of the tasks of an array whose job 12 is gone
		}
		if j, err := parseJob("12", text[:n]); err == nil || errors.Is(err, ErrGone) {
			t.Errorf("cut to %q: %+v, %v", text[:n], j, err)
		}
	}
	const task = "6|5|1|\n12|5|2|\n"
	for n := range len(task) {
		if n == len("6|5|1|\n") {
			continue
		}
		if name, err := parseTask("12", task[:n]); err == nil || errors.Is(err, ErrGone) {
			t.Errorf("cut to %q: task %s, %v", task[:n], name, err)
		}
	}
	for _, bad := range []string{strings.Repeat("\x00", 1<<20), "\x00\n", "\x7fELF\x02\n12|\n", others + "\xff\n", "slurmctld is busy\n"} {
		_, errJob := parseJob("12", bad)
		_, errTask := parseTask("12", bad)
		_, errJobs := parseJobs(bad)
		for _, err := range []error{errJob, errTask, errJobs} {
			if err == nil || errors.Is(err, ErrGone) || len(err.Error()) > 500 {
				t.Errorf("%.20q: %.600v", bad, err)
			}
		}
	}
}

func TestLists(t *testing.T) {
	l, err := parseLicenceList("LicenseName=rgpu Total=800 Used=100 Free=700 Reserved=50 Remote=no\nLicenseName=m Total=3 Used=1 Free=2 Remote=no\n")
	if err != nil || l["rgpu"] != (Licence{800, 100, 700, 50}) || l["m"].Total != 3 {
		t.Errorf("%v, %v", l, err)
	}
	if l, err := parseLicenceList("No licenses configured in Slurm.\n"); err != nil || len(l) != 0 {
		t.Errorf("%v, %v", l, err)
	}
	if _, err := parseLicenceList("LicenseName=rgpu Total=many\n"); err == nil {
		t.Error("a total that is no number")
	}
	c := parseConfig("Configuration data as of 2026\nClusterName             = lab\nProlog                  = (null)\nSlurmdSpoolDir = /var/%n=x\n\n")
	if c["ClusterName"] != "lab" || c["Prolog"] != "" || c["SlurmdSpoolDir"] != "/var/%n=x" {
		t.Errorf("%v", c)
	}
}

func FuzzGres(f *testing.F) {
	for _, s := range []string{"gres:rgpu:50", "gres/rgpu:h200:50,gpu:2(IDX:0-1)", "rgpu=5k", "rgpu:-1", "[,", "N/A"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		list, err := ParseGres(s)
		for _, g := range list {
			if err == nil && (g.Name == "" || strings.ContainsAny(g.Name+g.Type, ":=, ")) {
				t.Errorf("%q: %+v", s, g)
			}
		}
	})
}

func FuzzLicences(f *testing.F) {
	for _, s := range []string{"rgpu:100,matlab:1", "a@b:1;c", "rgpu:5|x", ":", "a=4294967296"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		l, err := ParseLicences(s)
		for name, n := range l {
			if err == nil && (name == "" || n > maxCount) {
				t.Errorf("%q: %v", s, l)
			}
		}
	})
}

func FuzzHosts(f *testing.F) {
	for _, s := range []string{"n1", "n[1-3,07],m[1]x[2-3]", "n[1-99999999999]", "][", "(,"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		list, err := ParseHosts(s)
		if err == nil && len(list) > maxNodes || slices.ContainsFunc(list, func(n string) bool { return n == "" || strings.ContainsAny(n, "[],/ \n") }) {
			t.Errorf("%q: %d, %.80q", s, len(list), list)
		}
	})
}

func FuzzJob(f *testing.F) {
	f.Add("12|3|RUNNING|h2n[1-2]|1000|1001|1|0|main|rgpu:100|gres:rgpu:50|N/A|N/A|N/A|\n", "12")
	f.Add("1|0|RUNNING|n1|\n", "1")
	f.Fuzz(func(t *testing.T, text, id string) {
		if j, err := parseJob(id, text); err == nil && (j.ID != id || j.State == "" || !form.JobID(id).Valid()) {
			t.Errorf("%+v", j)
		}
		if jobs, err := parseJobs(text); err == nil {
			for id, j := range jobs {
				if !form.JobID(id).Valid() || j.State == "" {
					t.Errorf("%q: %+v", id, j)
				}
			}
		}
		_, _ = parseLicenceList(text)
		parseConfig(text)
	})
}

func TestCounts(t *testing.T) {
	formtest.Each(t, "counts.txt", func(value, want string) {
		got := "-"
		g, err := ParseGres("rgpu:" + value)
		if err == nil && len(g) == 1 && g[0].Type == "" {
			got = fmt.Sprint(g[0].Count)
		}
		if got != want {
			t.Errorf("rgpu:%s: %+v, %v; want %s", value, g, err, want)
		}
	})
}

// The lines are scontrol's of 22.05 and 26.05.
func TestParseStep(t *testing.T) {
	const begin = "StepId=1.0 UserId=2001 StartTime=2026-11-27T00:47:21 TimeLimit=UNLIMITED State=RUNNING Partition=main NodeList=n1 Nodes=1 CPUs=1 Tasks=1 Name=a TresPerNode=gres:rgpu:99 Network=(null) " +
		"TRES=cpu=1,mem=0,node=1 ResvPorts=(null) CPUFreqReq=Default Dist=Cyclic SrunHost:Pid=n1:76 "
	for text, want := range map[string]Step{
		begin + "TresPerStep=cpu:1 TresPerNode=gres:rgpu:40 \n":                                                                      {Gres: []Gres{{Name: "rgpu", Count: 40}}, Others: []string{"cpu:1"}},
		begin + "TresPerNode=gres/rgpu:h200:40,gres/nic:1\n":                                                                         {Gres: []Gres{{Name: "rgpu", Type: "h200", Count: 40}, {Name: "nic", Count: 1}}},
		begin + "TresPerNode=(null) TresPerTask=gres/rgpu:5\n":                                                                       {Others: []string{"gres/rgpu:5"}},
		"StepId=1.extern Network=(null)\n" + begin + "TresPerNode=gres:rgpu:7\nStepId=1.10 Network=(null) TresPerNode=gres:rgpu:8\n": {Gres: []Gres{{Name: "rgpu", Count: 7}}},
		begin + "TresPerStep=cpu:1\n":                                                                                                {Others: []string{"cpu:1"}},
	} {
		if got, err := parseStep("1.0", text); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v; want %+v", text, got, err, want)
		}
	}
	for _, bad := range []string{"", "slurm_load", begin + "\n" + begin, begin + "TresPerNode=gres:rgpu:1x"} {
		if got, err := parseStep("1.0", bad); err == nil {
			t.Errorf("%q: %+v", bad, got)
		}
	}
}
