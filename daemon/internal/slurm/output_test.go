package slurm

import (
	"strings"
	"testing"
)

// As scontrol 22.05 prints them.
const (
	batchRecord = `JobId=4 ArrayJobId=4 ArrayTaskId=2 JobName=my StdOut=/forged job
   UserId=alice(2001) GroupId=alice(2001) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NodeList=n1
   BatchHost=n1
   Command=/home/alice/j.sh
   WorkDir=/home/alice
   StdErr=/tmp/x
   StdIn=/dev/null
   StdOut=/home/alice/a b/%x-%5A_%a.%N.out
   Power=

JobId=5 ArrayJobId=4 ArrayTaskId=1 JobName=j.sh
   UserId=alice(2001) GroupId=alice(2001) MCS_label=N/A
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   BatchHost=n2
   StdOut=/home/alice/slurm-4_1.out
   Power=

`
	srunRecord = `JobId=6 JobName=hostname
   UserId=alice(2001) GroupId=alice(2001) MCS_label=N/A
   Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0
   BatchHost=n1
   Command=hostname
   WorkDir=/home/alice
`
)

func TestParseOutput(t *testing.T) {
	for _, c := range []struct{ id, out, path, node string }{
		{"4", batchRecord, "/home/alice/a b/my StdOut=/forged job-00004_2.n1.out", "n1"},
		{"5", batchRecord, "/home/alice/slurm-4_1.out", "n2"},
		{"7", batchRecord, "", ""},
		{"6", srunRecord, "", ""},
		{"6", strings.Replace(srunRecord, "BatchFlag=0", "BatchFlag=1", 1), "", ""},
		{"6", "", "", ""},
	} {
		if path, node := parseOutput(c.id, c.out); path != c.path || node != c.node {
			t.Errorf("job %s: %q on %q, want %q on %q", c.id, path, node, c.path, c.node)
		}
	}
}

func TestExpandPath(t *testing.T) {
	of := map[byte]string{'j': "42", 'u': "bob", '%': "%"}
	for in, want := range map[string]string{"": "", "%": "%", "%%": "%", "%j": "42", "%4j-%u-%4u": "0042-bob-bob", "%q%9": "%q%9", "%12j%": "0000000042%", "%123j": "%123j", "%1j": "42"} {
		if got := expandPath(in, of); got != want {
			t.Errorf("%q is %q, want %q", in, got, want)
		}
	}
}

func FuzzOutput(f *testing.F) {
	f.Add("4", batchRecord)
	f.Add("6", srunRecord)
	f.Fuzz(func(_ *testing.T, id, out string) { parseOutput(id, out) })
}
