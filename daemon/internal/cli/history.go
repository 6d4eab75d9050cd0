package cli

// sluice report without a job: those that ended lately, one a line.
//
//	1  whose jobs are wanted, and whether the caller may see them
//	2  sacct -> jobs that ended -> their AdminComments, which are their reports
//	3  the last lines are kept, and sums of all
//
// Owners forget a job's report after lease.tombstone; Slurm's accounting keeps it as long as the job, and every login
// node can ask it.

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/config"
	"github.com/sluice-hpc/sluice/daemon/internal/jobreport"
	"github.com/sluice-hpc/sluice/daemon/internal/slurm"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/usernames"
)

const (
	lastWeek = "7d" // --since, if it is not given
	// mostJobs is the most that --last gives, so that a site's year does not fill the memory.
	mostJobs = 10_000
)

// accounting is the part of *slurm.Commands that knows ended jobs.
type accounting interface {
	Past(ctx context.Context, q slurm.PastQuery, each func(slurm.Past)) (damaged int, err error)
	RightsOf(ctx context.Context, user string) (slurm.Rights, error)
}

// history is what of the accounting is wanted.
type history struct {
	user, account string
	all, asJSON   bool
	since, until  string
	last          int
	config        string

	me uint32
	q  slurm.PastQuery
}

// listed are the options that only the list of jobs has.
var listed = []string{"user", "account", "all", "since", "until", "last"}

func (h *history) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVarP(&h.user, "user", "u", "", "list this user's jobs, by name or number (default: your own)")
	f.StringVarP(&h.account, "account", "A", "", "list the jobs of this account; without --user all that you may see")
	f.BoolVarP(&h.all, "all", "a", false, "list the jobs of all users")
	f.StringVarP(&h.since, "since", "S", "", "list jobs that ended from this time on (default: 7d ago)")
	f.StringVarP(&h.until, "until", "E", "", "list jobs that ended before this time")
	f.IntVarP(&h.last, "last", "n", 100, "list at most this many jobs, the last ones; the sums count all jobs")
	f.StringVarP(&h.config, "config", "c", config.DefaultPath, "configuration of sluiced, for slurm.bin, slurm.conf and slurm.user")
	cmd.MarkFlagsMutuallyExclusive("all", "user")
	_ = cmd.RegisterFlagCompletionFunc("since", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return []string{"today", "yesterday", "1d", "7d", "30d"}, cobra.ShellCompDirectiveNoFileComp
	})
}

// parse reads the options.
func (h *history) parse(now time.Time) error {
	var err error
	if h.q.Since, err = pointInTime("--since", cmp.Or(h.since, lastWeek), now); err != nil {
		return err
	}
	if h.q.Until, err = pointInTime("--until", cmp.Or(h.until, "now"), now); err != nil {
		return err
	}
	switch {
	case h.q.Since.After(now):
		return fmt.Errorf("--since %s is in the future: it is now %s", h.since, now.Format("2006-01-02T15:04"))
	case !h.q.Since.Before(h.q.Until):
		return fmt.Errorf("--since %s is not before --until %s", cmp.Or(h.since, lastWeek), cmp.Or(h.until, "now"))
	case h.last < 1 || h.last > mostJobs:
		return fmt.Errorf("--last %d: give 1 to %d", h.last, mostJobs)
	case strings.Contains(h.account, ","):
		return fmt.Errorf("account %q: give one account, not a list", h.account)
	case h.account != plain(h.account) && h.account != "" || strings.ContainsAny(h.account, "|= \t"):
		return fmt.Errorf("account %q: not a name", h.account)
	}
	h.q.Account = h.account
	if h.user != "" {
		uid, err := userNumber(h.user)
		if err != nil {
			return err
		}
		h.q.UID = &uid
	} else if !h.all && h.account == "" {
		h.q.UID = &h.me
	}
	return nil
}

// allow refuses what the caller may not see, and narrows an account to the caller's own jobs.
// It keeps users from each other's lines as the other commands do; what Slurm's own commands show them is PrivateData's.
func (h *history) allow(ctx context.Context, a accounting, slurmUser string) error {
	if h.q.UID != nil && *h.q.UID == h.me {
		return nil
	}
	if su, err := userNumber(slurmUser); h.me == 0 || err == nil && su == h.me {
		return nil
	}
	name := strconv.FormatUint(uint64(h.me), 10)
	if u, err := user.LookupId(name); err == nil {
		name = u.Username
	}
	r, err := a.RightsOf(ctx, name)
	switch {
	case err == nil && (r.All || h.account != "" && slices.Contains(r.Accounts, h.account)):
		return nil
	case h.q.UID == nil && h.account != "" && !h.all:
		h.q.UID = &h.me
		return nil
	case err != nil:
		return fmt.Errorf("jobs of others are for root, SlurmUser and Slurm's operators, and Slurm's accounting does not say whether you are one: %w", err)
	}
	return errors.New("jobs of others are for root, SlurmUser, Slurm's operators, and coordinators of the account that --account names; without --user and --all you see your own")
}

// pastJob is one line.
type pastJob struct {
	Job         string        `json:"job"`
	ID          string        `json:"id"` // Slurm's number, of an array's task its own
	User        string        `json:"user"`
	Account     string        `json:"account"`
	State       string        `json:"state"`
	Start       time.Time     `json:"start"`
	End         time.Time     `json:"end"`
	Elapsed     time.Duration `json:"elapsed"`
	Nodes       int           `json:"nodes"`
	Asked       uint32        `json:"asked"` // percent, all nodes together
	AskedMem    uint64        `json:"asked_mem"`
	Granted     uint32        `json:"granted"`
	Mem         uint64        `json:"mem"`
	Peak        uint64        `json:"peak"`
	GPUTime     time.Duration `json:"gpu_time"`
	Used        uint64        `json:"used"` // percent of what was granted for the job's time
	Waited      time.Duration `json:"waited"`
	Throttled   time.Duration `json:"throttled"`
	Calls       uint64        `json:"calls"`
	Waits       uint64        `json:"waits"`
	Cuts        uint64        `json:"cuts"`
	CutTime     time.Duration `json:"cut_time"`
	Lost        bool          `json:"lost"` // an owner does not know all that was used: Peak and such may be too small
	EarlierRuns int           `json:"earlier_runs"`
	EarlierGPU  time.Duration `json:"earlier_gpu"`
	Advice      string        `json:"advice"`
}

// pastSum is the sum of a user's jobs.
type pastSum struct {
	User    string  `json:"user"`
	Jobs    int     `json:"jobs"`
	Granted float64 `json:"granted_gpu_hours"`
	Used    float64 `json:"used_gpu_hours"`
	Unused  int     `json:"unused_jobs"` // jobs whose programs did not use the GPU
}

// pastJobs is the answer.
type pastJobs struct {
	Since   time.Time `json:"since"`
	Until   time.Time `json:"until"`
	Jobs    []pastJob `json:"jobs"`
	LeftOut int       `json:"left_out"` // earlier jobs beyond --last; the sums have them
	Users   []pastSum `json:"users"`    // the user with the most granted hours first
	Total   pastSum   `json:"total"`
	Damaged int       `json:"damaged"` // records that cannot be read
	Others  int       `json:"others"`  // jobs without a report, mostly without a fraction
}

// adviseOn are the states in which a job's use says what the next one needs.
var adviseOn = []slurm.State{"COMPLETED", "TIMEOUT"}

func pastOf(p slurm.Past, r jobreport.Past) pastJob {
	j := pastJob{
		Job: p.Name, ID: p.ID, User: p.User, Account: p.Account, State: string(p.State), Start: p.Start, End: p.End, Elapsed: p.Elapsed,
		Nodes: r.Nodes, Asked: r.Asked, AskedMem: r.AskedMem, Granted: r.Granted, Mem: r.Mem, Peak: r.Peak, GPUTime: r.GPUTime,
		Waited: r.Share.Waited, Throttled: r.Share.Throttled, Calls: r.Counts.Calls, Waits: r.Counts.Waits, Cuts: r.Counts.Cuts, CutTime: r.Counts.CutTime,
		Lost: r.Lost > 0, EarlierRuns: r.EarlierRuns, EarlierGPU: r.EarlierGPU,
	}
	if had := j.hours(); had > 0 {
		j.Used = uint64(r.GPUTime.Hours()/had*100 + 0.5)
	}
	if slices.Contains(adviseOn, p.State) {
		j.Advice = r.Advice(p.Elapsed)
	}
	return j
}

// hours are those of whole GPUs that the job was granted.
func (j *pastJob) hours() float64 { return j.Elapsed.Hours() * float64(j.Granted) / 100 }

// collect asks the accounting.
func (h *history) collect(ctx context.Context, a accounting) (*pastJobs, error) {
	out := &pastJobs{Since: h.q.Since, Until: h.q.Until, Jobs: []pastJob{}, Users: []pastSum{}}
	sums := map[string]*pastSum{}
	unread := 0
	var err error
	out.Damaged, err = a.Past(ctx, h.q, func(p slurm.Past) {
		if !jobreport.IsReport(p.Comment) {
			out.Others++
			return
		}
		r, err := jobreport.Parse(p.Comment)
		if err != nil {
			unread++
			return
		}
		j := pastOf(p, r)
		s := sums[j.User]
		if s == nil {
			s = &pastSum{User: j.User}
			sums[j.User] = s
		}
		s.add(1, j.hours(), j.GPUTime.Hours(), r.Sessions == 0)
		out.keep(j, h.last)
	})
	if err != nil {
		return nil, fmt.Errorf("jobs that ended are in Slurm's accounting: %w; sluice report JOB needs none", err)
	}
	out.Damaged += unread
	out.trim(h.last)
	out.Total.User = "all"
	byUse := func(a, b *pastSum) int {
		return cmp.Or(cmp.Compare(b.Granted, a.Granted), cmp.Compare(a.User, b.User))
	}
	for _, s := range slices.SortedFunc(maps.Values(sums), byUse) {
		out.Users = append(out.Users, *s)
		out.Total.add(s.Jobs, s.Granted, s.Used, false)
		out.Total.Unused += s.Unused
	}
	return out, nil
}

func (s *pastSum) add(jobs int, granted, used float64, unused bool) {
	s.Jobs += jobs
	s.Granted += granted
	s.Used += used
	if unused {
		s.Unused++
	}
}

// keep adds a job, and drops the oldest beyond last now and then. sacct's order is that of ids.
func (o *pastJobs) keep(j pastJob, last int) {
	if o.Jobs = append(o.Jobs, j); len(o.Jobs) >= 2*last+64 {
		o.trim(last)
	}
}

func (o *pastJobs) trim(last int) {
	slices.SortStableFunc(o.Jobs, func(a, b pastJob) int { return a.End.Compare(b.End) })
	if n := len(o.Jobs) - last; n > 0 {
		o.Jobs, o.LeftOut = slices.Delete(o.Jobs, 0, n), o.LeftOut+n
	}
}

func (h *history) run(cmd *cobra.Command) error {
	h.me = uint32(os.Getuid())
	if err := h.parse(time.Now()); err != nil {
		return err
	}
	at := config.Default().Slurm
	if c, err := config.Load(h.config); err == nil {
		at = c.Slurm
	} else if cmd.Flags().Changed("config") {
		return err
	}
	return h.answer(cmd, slurm.New(at.Bin, at.Conf), at.User)
}

func (h *history) answer(cmd *cobra.Command, a accounting, slurmUser string) error {
	if err := h.allow(cmd.Context(), a, slurmUser); err != nil {
		return err
	}
	out, err := h.collect(cmd.Context(), a)
	if err != nil {
		return err
	}
	if out.Damaged > 0 {
		fmt.Fprintf(cmd.ErrOrStderr(), "sluice: damaged records of Slurm's accounting that are skipped: %d\n", out.Damaged)
	}
	if h.asJSON {
		return printJSON(cmd.OutOrStdout(), out)
	}
	if out.Total.Jobs == 0 {
		without := ""
		if out.Others > 0 {
			without = fmt.Sprintf("; %d other jobs ended then, without a fraction, or without a report: see slurm.report in sluice.yaml", out.Others)
		}
		return fmt.Errorf("no job with a fraction of %s ended between %s and %s%s", h.who(), h.q.Since.Format(time.DateTime), h.q.Until.Format(time.DateTime), without)
	}
	return out.print(cmd.OutOrStdout(), h.who())
}

// who says whose jobs are listed.
func (h *history) who() string {
	text := "all users"
	if h.q.UID != nil {
		text = plain((&usernames.Names{}).Name(*h.q.UID))
	}
	if h.account != "" {
		text += " in account " + plain(h.account)
	}
	return text
}

// mostUsers have a line of their own in the sums.
const mostUsers = 100

func (o *pastJobs) print(w io.Writer, who string) error {
	head := fmt.Sprintf("jobs of %s that ended between %s and %s", who, o.Since.Format(time.DateTime), o.Until.Format(time.DateTime))
	if o.LeftOut > 0 {
		head += fmt.Sprintf(": the last %d of %d, see --last", len(o.Jobs), o.Total.Jobs)
	}
	if _, err := fmt.Fprintln(w, head); err != nil {
		return err
	}
	rows := make([][]string, 0, len(o.Jobs))
	for i := range o.Jobs {
		j := &o.Jobs[i]
		granted := strconv.FormatUint(uint64(j.Granted), 10) + "%"
		if j.Nodes > 1 {
			granted += fmt.Sprintf("/%d nodes", j.Nodes)
		}
		used, peak := "-", "-" // a job without time, or one of which it is not known
		if j.hours() > 0 && !j.Lost {
			used = strconv.FormatUint(j.Used, 10) + "%"
		}
		if !j.Lost {
			peak = form.ShortBytes(j.Peak)
		}
		rows = append(rows, []string{j.Job, j.User, j.State, j.End.Local().Format("2006-01-02T15:04"), elapsed(j.Elapsed), granted, form.ShortBytes(j.Mem),
			used, peak, jobreport.Duration(j.Waited), strconv.FormatUint(j.Cuts, 10), j.Advice})
	}
	if err := table(w, "JOB USER STATE END TIME GRANTED MEMORY USED PEAK WAITED CUTS VERDICT", rows); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	sums := slices.Clone(o.Users[:min(len(o.Users), mostUsers)])
	if len(o.Users) > 1 {
		sums = append(sums, o.Total)
	}
	rows = rows[:0]
	for _, s := range sums {
		share := "-"
		if s.Granted > 0 {
			share = fmt.Sprintf("%.0f%%", s.Used/s.Granted*100)
		}
		rows = append(rows, []string{s.User, strconv.Itoa(s.Jobs), strconv.Itoa(s.Unused), fmt.Sprintf("%.2f", s.Granted), fmt.Sprintf("%.2f", s.Used), share})
	}
	if err := table(w, "USER JOBS UNUSED GPU_HOURS_GRANTED GPU_HOURS_USED USED", rows); err != nil {
		return err
	}
	if n := len(o.Users) - mostUsers; n > 0 {
		more := fmt.Sprintf("%d more users", n)
		if n == 1 {
			more = "1 more user"
		}
		_, err := fmt.Fprintln(w, more+", whose jobs are in the last line too; --json has all")
		return err
	}
	return nil
}
