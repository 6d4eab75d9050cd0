package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
)

// books is an accounting.
type books struct {
	jobs    []slurm.Past
	damaged int
	err     error
	rights  map[string]slurm.Rights
	denied  error // of the question for rights

	asked []slurm.PastQuery
	names []string
}

func (b *books) Past(_ context.Context, q slurm.PastQuery, each func(slurm.Past)) (int, error) {
	b.asked = append(b.asked, q)
	for _, j := range b.jobs {
		each(j)
	}
	return b.damaged, b.err
}

func (b *books) RightsOf(_ context.Context, user string) (slurm.Rights, error) {
	b.names = append(b.names, user)
	return b.rights[user], b.denied
}

// nobody is a uid that no test's machine has.
const nobody = 4242424

// past asks b as the user of that uid.
func past(t *testing.T, b *books, me uint32, h history) (stdout, stderr string, err error) {
	t.Helper()
	h.me = me
	if h.last == 0 {
		h.last = 100
	}
	if err := h.parse(time.Now()); err != nil {
		return "", "", err
	}
	var out, bad bytes.Buffer
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	cmd.SetErr(&bad)
	cmd.SetContext(t.Context())
	err = h.answer(cmd, b, "slurm-user-of-no-machine")
	return out.String(), bad.String(), err
}

// Of a job whose owner lost its counts it is not known what it used: it is not among those that used nothing.
func TestHistoryLost(t *testing.T) {
	b := pastBooks()
	b.jobs = b.jobs[:1]
	b.jobs[0].Comment = "sluice: asked 50% granted 50% 71680MiB peak 0MiB gpu 0s calls 0 lost 1"
	out, _, err := past(t, b, 0, history{all: true})
	if got := strings.Join(strings.Fields(out), " "); err != nil || !strings.Contains(got, " 50% 70G - - 0s 0 use not known ") || !strings.HasSuffix(got, " alice 1 0 0.50 0.00 0%") {
		t.Errorf("%v: %s", err, out)
	}
	out, _, err = past(t, b, 0, history{all: true, asJSON: true})
	var x pastJobs
	if e := json.Unmarshal([]byte(out), &x); err != nil || e != nil || len(x.Jobs) != 1 || !x.Jobs[0].Lost || x.Total.Unused != 0 {
		t.Errorf("%v, %v: %s", err, e, out)
	}
}

func pastBooks() *books {
	at := time.Now().Add(-time.Hour)
	job := func(id, user, state, comment string) slurm.Past {
		return slurm.Past{ID: id, Name: id, User: user, Account: "phys", State: slurm.State(state), Start: at.Add(-time.Hour), End: at, Elapsed: time.Hour, Comment: comment}
	}
	return &books{damaged: 2, jobs: []slurm.Past{
		job("7", "alice", "COMPLETED", "sluice: asked 100% granted 100% 143360MiB peak 4096MiB gpu 3m00s throttled 0s calls 9 waits 3 in 1B out 2B held 1m00s waited 3.2s cuts 2 cut-time 9s"),
		job("8", "bob", "FAILED", "sluice: asked 50% granted 50% 71680MiB peak 1MiB gpu 30m00s"),
		job("9", "al\x1b[2Jice", "TIMEOUT", "sluice: asked 50% granted 50% 71680MiB peak 61440MiB gpu 45m00s"),
		job("10", "alice", "COMPLETED", "sluice: asked 50% granted 50% 71680MiB peak 0MiB gpu 0s unused"),
		job("11", "alice", "COMPLETED", "sluice: asked 50% granted"),                      // damaged
		job("12", "alice", "COMPLETED", "sluice: idle: its GPU on gpu01 has had no work"), // no report
		job("13", "alice", "COMPLETED", ""), // no fraction
		job("14", "alice", "COMPLETED", "sluice: nodes 2 asked 60% granted 60% 2048MiB peak 1024MiB gpu 20m00s"),
	}}
}

func TestHistory(t *testing.T) {
	out, bad, err := past(t, pastBooks(), 0, history{all: true})
	if err != nil {
		t.Fatal(err)
	}
	if bad != "sluice: damaged records of Slurm's accounting that are skipped: 3\n" {
		t.Error(bad)
	}
	if strings.Contains(out, "\x1b") {
		t.Errorf("%q", out)
	}
	var got []string
	for line := range strings.Lines(out) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	for i, want := range []string{
		"jobs of all users that ended between ",
		"JOB USER STATE END TIME GRANTED MEMORY USED PEAK WAITED CUTS VERDICT",
		"7 alice COMPLETED 2",
		"8 bob FAILED ",
		"9 al",
		"10 alice COMPLETED ",
		"14 alice COMPLETED ",
		"",
		"USER JOBS UNUSED GPU_HOURS_GRANTED GPU_HOURS_USED USED",
		"alice 3 1 2.10 0.38 18%",
		"al", // the user with bytes for the terminal
		"bob 1 0 0.50 0.50 100%",
		"all 5 1 3.10 1.63 53%",
	} {
		if i >= len(got) || !strings.HasPrefix(got[i], want) {
			t.Errorf("line %d: want %q in\n%s", i, want, out)
		}
	}
	for _, want := range []string{
		" 1:00:00 100% 140G 5% 4G 3.2s 2 ask for --gres=rgpu:7 --rgpu-mem=5G", " 1:00:00 50% 70G 100% 1M 0s 0 -", " 50% 70G 150% 60G 0s 0 it fits",
		" 50% 70G 0% 0 0s 0 unused: leave --gres=rgpu out", " 1:00:00 60%/2 nodes 2G 56% 1G 0s 0 it fits",
	} {
		if !strings.Contains(strings.Join(got, "\n"), want+"\n") {
			t.Errorf("want %q in\n%s", want, out)
		}
	}
	// As JSON, and only the last ones: the sums are of all.
	if out, _, err = past(t, pastBooks(), 0, history{all: true, last: 2, asJSON: true}); err != nil {
		t.Fatal(err)
	}
	var x pastJobs
	if err := json.Unmarshal([]byte(out), &x); err != nil || len(x.Jobs) != 2 || x.Jobs[1].ID != "14" || x.LeftOut != 3 || x.Total.Jobs != 5 || x.Others != 2 || x.Damaged != 3 || len(x.Users) != 3 {
		t.Errorf("%v: %+v", err, x)
	}
	if out, _, err = past(t, pastBooks(), 0, history{all: true, last: 2}); err != nil || !strings.Contains(out, ": the last 2 of 5, see --last\n") {
		t.Error(out, err)
	}
}

// A list of users that is cut short says so.
func TestHistoryUsers(t *testing.T) {
	for users, want := range map[int]string{mostUsers: "", mostUsers + 1: "1 more user, ", mostUsers + 7: "7 more users, "} {
		b := &books{}
		for i := range users {
			j := pastBooks().jobs[1]
			j.User = fmt.Sprint("u", i)
			b.jobs = append(b.jobs, j)
		}
		out, _, err := past(t, b, 0, history{all: true, last: 1})
		lines := strings.Split(strings.TrimSpace(out), "\n")
		last := lines[len(lines)-1]
		if want == "" && !strings.HasPrefix(last, "all ") || !strings.HasPrefix(last, want) || err != nil || strings.Count(out, "\nu") != mostUsers {
			t.Errorf("%d users: %v, %q", users, err, last)
		}
	}
}

// A long history does not fill the memory.
func TestHistoryBounded(t *testing.T) {
	o := &pastJobs{}
	at := time.Unix(1_700_000_000, 0)
	for i := range 100_000 {
		o.keep(pastJob{ID: fmt.Sprint(i), End: at.Add(time.Duration(i) * time.Second)}, 10)
		if len(o.Jobs) > 100 {
			t.Fatalf("%d jobs kept", len(o.Jobs))
		}
	}
	o.trim(10)
	if len(o.Jobs) != 10 || o.Jobs[9].ID != "99999" || o.LeftOut != 99_990 {
		t.Errorf("%d jobs, %d left out", len(o.Jobs), o.LeftOut)
	}
}

// Users see their own jobs, whatever they ask for.
func TestHistoryPrivacy(t *testing.T) {
	const me = nobody
	name := fmt.Sprint(me)
	op, pi := map[string]slurm.Rights{name: {All: true}}, map[string]slurm.Rights{name: {Accounts: []string{"phys"}}}
	for _, c := range []struct {
		what   string
		me     uint32
		h      history
		rights map[string]slurm.Rights
		denied error
		uid    int64 // asked for; -1 all
		err    string
	}{
		{"own", me, history{}, nil, nil, me, ""},
		{"own by number", me, history{user: name}, nil, nil, me, ""},
		{"another's", me, history{user: "0"}, nil, nil, 0, "jobs of others are for root"},
		{"all", me, history{all: true}, nil, nil, 0, "jobs of others are for root"},
		{"an account is narrowed", me, history{account: "phys"}, nil, nil, me, ""},
		{"an account and another's", me, history{account: "phys", user: "0"}, nil, nil, 0, "jobs of others are for root"},
		{"all of an account of another coordinator", me, history{account: "chem", all: true}, pi, nil, 0, "jobs of others are for root"},
		{"a coordinator", me, history{account: "phys"}, pi, nil, -1, ""},
		{"a coordinator for a user of it", me, history{account: "phys", user: "0"}, pi, nil, 0, ""},
		{"a coordinator elsewhere", me, history{user: "0"}, pi, nil, 0, "jobs of others are for root"},
		{"an operator", me, history{all: true}, op, nil, -1, ""},
		{"an operator for a user", me, history{user: "0"}, op, nil, 0, ""},
		{"root", 0, history{all: true}, nil, errors.New("not to be asked"), -1, ""},
		{"root for a user", 0, history{user: name}, nil, errors.New("not to be asked"), me, ""},
		{"the accounting does not say", me, history{all: true}, nil, errors.New("away"), 0, "does not say whether you are one: away"},
		{"the accounting does not say, an account", me, history{account: "phys"}, nil, errors.New("away"), me, ""},
	} {
		b := pastBooks()
		b.rights, b.denied = c.rights, c.denied
		_, _, err := past(t, b, c.me, c.h)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) || len(b.asked) > 0 {
				t.Errorf("%s: %v, asked %v", c.what, err, b.asked)
			}
			continue
		}
		if err != nil || len(b.asked) != 1 {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		if got := b.asked[0].UID; (got == nil) != (c.uid < 0) || got != nil && int64(*got) != c.uid || b.asked[0].Account != c.h.account {
			t.Errorf("%s: %+v", c.what, b.asked[0])
		}
	}
}

func TestHistoryErrors(t *testing.T) {
	for _, c := range []struct {
		h    history
		want string
	}{
		{history{user: "no-such-user"}, `user "no-such-user" is not known on this node; give the number`},
		{history{since: "lately"}, `--since "lately" is not a time`},
		{history{until: "soon"}, `--until "soon" is not a time`},
		{history{since: "2999-01-01"}, "--since 2999-01-01 is in the future"},
		{history{since: "2h", until: "3h"}, "--since 2h is not before --until 3h"},
		{history{last: -1}, "--last -1: give 1 to 10000"},
		{history{last: mostJobs + 1}, "give 1 to 10000"},
		{history{account: "a\x1bb"}, "not a name"},
		{history{account: "a|b"}, "not a name"},
		{history{account: "a,b"}, "give one account"},
	} {
		if _, _, err := past(t, pastBooks(), 0, c.h); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.h, err, c.want)
		}
	}
	// An accounting that is not there, and one that has nothing.
	if _, _, err := past(t, &books{err: errors.New("Slurm accounting storage is disabled")}, 0, history{}); err == nil || !strings.Contains(err.Error(), "storage is disabled; sluice report JOB needs none") {
		t.Error(err)
	}
	none := &books{jobs: pastBooks().jobs[5:7]}
	if _, _, err := past(t, none, nobody, history{account: "phys"}); err == nil || !strings.HasPrefix(err.Error(), "no job with a fraction of 4242424 in account phys ended between ") || !strings.Contains(err.Error(), "; 2 other jobs ended then") {
		t.Error(err)
	}
	if out, _, err := past(t, &books{}, 0, history{asJSON: true}); err != nil || !strings.Contains(out, `"jobs": []`) || !strings.Contains(out, `"users": []`) {
		t.Error(out, err)
	}
}

// The command itself, with a sacct that is a script.
func TestHistoryCommand(t *testing.T) {
	dir := t.TempDir()
	end := time.Now().Unix() - 60
	sacct := fmt.Sprintf("#!/bin/sh\necho '7|7|alice|phys|COMPLETED|%d|%d|60|sluice: asked 50%% granted 50%% 100MiB peak 90MiB gpu 20s'\n", end-60, end)
	for name, text := range map[string]string{"sacct": sacct, "scontrol": "#!/bin/sh\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	conf := filepath.Join(dir, "sluice.yaml")
	if err := os.WriteFile(conf, []byte("node: n1\nslurm:\n  bin: "+dir+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	call := func(args ...string) (int, string, string) {
		var out, bad bytes.Buffer
		status := Main(append([]string{"report"}, args...), &out, &bad)
		return status, out.String(), bad.String()
	}
	if status, out, bad := call("--config", conf, "--since", "1h"); status != 0 || !strings.Contains(out, "\n7    alice  COMPLETED") || !strings.Contains(out, "it fits") {
		t.Error(status, out, bad)
	}
	for args, want := range map[string]string{
		"7 --user root":        "--user is for the list of jobs; leave job 7 or the option out",
		"7 --since 2h":         "--since is for the list",
		"7 8":                  "2 jobs given",
		"--all --user root":    "none of the others can be",
		"--config /none/x":     "/none/x",
		"--since 3000-01-01":   "is in the future",
		"--user no-such-user1": "not known on this node",
	} {
		if status, out, bad := call(strings.Fields(args)...); status != 1 || !strings.Contains(bad, want) || out != "" {
			t.Errorf("%s: %d %q %q", args, status, out, bad)
		}
	}
}
