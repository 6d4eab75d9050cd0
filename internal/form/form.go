// Package form has the written form of the nouns that pass between programs, users and
// languages: lease ids, job ids, sizes, percent, and texts that are fit for a log. What the
// plug-in in C and the job_submit script in Lua write themselves is held to the same cases,
// in testdata.
package form

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sluice-hpc/sluice/internal/pattern"
)

// MaxName is the most bytes that a name has in a request: a job's, a node's, an account's.
const MaxName = 256

var leaseID = pattern.New(`^[0-9a-f]{32}$`)

// LeaseID is a lease's id: 32 hexadecimal digits, in lower case. It is safe as the name of a file.
type LeaseID string

// NewLeaseID makes a lease's id, which is random.
func NewLeaseID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// Valid says whether id has the form of a lease's id.
func (id LeaseID) Valid() bool { return leaseID().MatchString(string(id)) }

// ParseLeaseID reads a lease's id.
func ParseLeaseID(s string) (LeaseID, error) {
	if !LeaseID(s).Valid() {
		return "", fmt.Errorf("lease %.40q: want a lease's id, 32 hexadecimal digits in lower case; see sluice list", s)
	}
	return LeaseID(s), nil
}

// maxJob is the greatest job id: the two above it are Slurm's NO_VAL and INFINITE.
const maxJob = math.MaxUint32 - 2

// JobID is a job id of Slurm's as its hooks are given it: a number from 1, without zeros
// before it, since job ids are compared as texts.
type JobID string

// Valid says whether id has the form of a job id of Slurm's.
func (id JobID) Valid() bool {
	n, ok := Number(string(id))
	return ok && n > 0 && n <= maxJob
}

// ParseJobID reads a job id of Slurm's.
func ParseJobID(s string) (JobID, error) {
	if !JobID(s).Valid() {
		return "", fmt.Errorf("job %.64q: want a job id of Slurm's, a number as 42", s)
	}
	return JobID(s), nil
}

// Number reads a number of 32 bits in its one decimal form.
func Number(s string) (n uint32, ok bool) {
	v, err := strconv.ParseUint(s, 10, 32)
	return uint32(v), err == nil && strconv.FormatUint(v, 10) == s
}

// MaxPlainName is the most characters that a plain name has.
const MaxPlainName = 63

var plainName = pattern.New(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// PlainNameWant says in a refusal what a plain name is.
var PlainNameWant = fmt.Sprintf("letters, digits, '.', '-' and '_', at most %d, the first a letter or a digit", MaxPlainName)

// IsPlainName says whether s is a name that an administrator gives to a pool, a cluster or a node, see PlainNameWant.
func IsPlainName(s string) bool { return len(s) <= MaxPlainName && plainName().MatchString(s) }

const run = "run-"

// NewRunJob makes the name that stands for the job of a lease outside of Slurm.
func NewRunJob() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return run + hex.EncodeToString(b[:])
}

// IsRunJob says whether a job is one of no Slurm's: "run-" and a name.
func IsRunJob(job string) bool { return strings.HasPrefix(job, run) }

// Printable is s with a space for each newline and tab, and "?" for what else cannot be
// printed, bytes that are no UTF-8 included. It is one line, and moves no terminal's
// cursor.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t' || r == '\r':
			return ' '
		case r == utf8.RuneError || !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
}

// IsLine says whether s is a line of at most n bytes that Line leaves as it is.
func IsLine(s string, n int) bool { return len(s) <= n && Printable(s) == s }

// Line is Printable cut to at most n bytes, with "..." at the end where it was cut. It ends
// with a whole character.
func Line(s string, n int) string {
	const dots = "..."
	if len(s) > 4*n { // Printable replaces at most four bytes by one
		s = s[:4*n]
	}
	s = Printable(s)
	if len(s) <= n {
		return s
	}
	s = s[:max(0, n-len(dots))]
	for len(s) > 0 && !utf8.ValidString(s) {
		s = s[:len(s)-1]
	}
	return s + dots[:min(n, len(dots))]
}

// OfJob returns err with the job's name before its text, and nowhere else in it as the name that an error begins with: an error may
// come from code that named the job, too, and that may be in another process.
func OfJob(job string, err error) error { return &ofJob{job, err} }

type ofJob struct {
	job string
	err error
}

func (e *ofJob) Error() string { return "job " + e.job + ": " + WithoutJob(e.job, e.err.Error()) }
func (e *ofJob) Unwrap() error { return e.err }

// WithoutJob returns the text of an error without the job's name, for a caller that says the name itself. Daemons
// name a job CLUSTER/JOB@NODE as well.
func WithoutJob(job, text string) string {
	name := pattern.New(`(^|[:;] )(?:job (?:[^\s/]*/)?` + regexp.QuoteMeta(job) + `(?:@[^\s:]*)?: )+`)()
	return name.ReplaceAllString(text, "$1")
}

// Name is Line with as many bytes as a name may have in a request.
func Name(s string) string { return Line(s, MaxName) }
