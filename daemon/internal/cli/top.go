package cli

// sluice top: ask the daemon for its live state, paint, wait, repeat. Rates are the differences
// between two answers, by the daemon's clock. ^C ends it; the cursor comes back however it
// ends. One goroutine does all of it.

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/internal/usernames"
)

func newTop() *cobra.Command {
	var socket string
	var once, asJSON bool
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch the GPUs and leases of this node",
		Long: `Show the state of this node's GPUs and leases, and refresh it until ^C.

GRANTED is the memory of a GPU that leases hold, USED what their sessions use of it, NVML
what the driver reports as used by all processes, and BUSY the percentage of time in which a
kernel ran. NVML and BUSY are "-" while NVML has not answered; AGE says how old they are.
GRANTED% is the percentage of the GPU that leases hold.
DUE is the part of its GPUs' time that a lease's policy gives it now, GOT the part that it
held since the last refresh, and WAITED the part for which its sessions wanted a turn and
had none. Values of several GPUs are added up. All three are "-" where time is not shared by
turns. THROTTLED is the time for which a lease's own share held it back. OVERRUNS counts turns
whose work went on beyond their end. CALLS/s, WAITS/s, IN/s and OUT/s are rates between two
refreshes.

If the output is not a terminal, or with --once, the state is shown once. With sessions that
takes one interval, since rates need two measurements.`,
		Example: "  sluice top\n  sluice top --once\n  sluice top --json --interval 5s",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return fmt.Errorf("--interval %v: give 100ms at least", every)
			}
			w := cmd.OutOrStdout()
			live := !once && (asJSON || terminal(w))
			if !live {
				s, err := stats(cmd.Context(), socket)
				if err != nil {
					return err
				}
				if asJSON || !busy(s) {
					return showTop(w, s, nil, asJSON)
				}
				// Rates need a second look.
				time.Sleep(every)
				again, err := stats(cmd.Context(), socket)
				if err != nil {
					return err
				}
				return showTop(w, again, &s, false)
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
			defer stop()
			if asJSON {
				return stream(ctx, w, socket, every)
			}
			return watchTop(ctx, w, socket, every)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&once, "once", false, "show the state once")
	f.BoolVar(&asJSON, "json", false, "print a line of JSON for each refresh")
	f.DurationVar(&every, "interval", time.Second, "time between two refreshes")
	socketFlag(cmd, &socket)
	return cmd
}

func stats(ctx context.Context, socket string) (rpc.Stats, error) {
	return question(ctx, socket, func(ctx context.Context, d local) (rpc.Stats, error) { return d.Stats(ctx) })
}

// busy says whether there are sessions, which have rates.
func busy(s rpc.Stats) bool {
	return slices.ContainsFunc(s.Leases, func(l lease.Status) bool { return len(l.Sessions) > 0 })
}

func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func stream(ctx context.Context, w io.Writer, socket string, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		s, err := stats(ctx, socket)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		if err := showTop(w, s, nil, true); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Control sequences of a terminal (ECMA-48).
const (
	hideCursor = "\x1b[?25l"
	showCursor = "\x1b[?25h"
	home       = "\x1b[H"
	clearRest  = "\x1b[K"
	clearBelow = "\x1b[J"
	clearAll   = "\x1b[2J"
)

func watchTop(ctx context.Context, w io.Writer, socket string, every time.Duration) error {
	last, err := stats(ctx, socket)
	if err != nil {
		return err // before anything is painted
	}
	if _, err := io.WriteString(w, hideCursor+clearAll); err != nil {
		return err
	}
	defer func() { _, _ = io.WriteString(w, showCursor) }()
	tick := time.NewTicker(every)
	defer tick.Stop()
	now, before := last, (*rpc.Stats)(nil)
	for {
		var page bytes.Buffer
		if err != nil {
			// A daemon that restarts does not end sluice top.
			fmt.Fprintf(&page, "%s\nthe values below are of %s\n\n", plain(err.Error()), now.Time.Local().Format(time.TimeOnly))
		}
		if err := showTop(&page, now, before, false); err != nil {
			return err
		}
		if _, err := w.Write(paint(page.Bytes(), w)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		var s rpc.Stats
		s, err = stats(ctx, socket)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			old := now
			now, before = s, &old
		}
	}
}

// paint prepares a page for a terminal: it replaces the old page without a flicker, and is cut
// to the window so that it does not scroll.
func paint(page []byte, w io.Writer) []byte {
	rows, cols := 0, 0
	if f, ok := w.(*os.File); ok {
		if ws, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			rows, cols = int(ws.Row), int(ws.Col)
		}
	}
	out := []byte(home)
	for i, line := range bytes.Split(bytes.TrimSuffix(page, []byte("\n")), []byte("\n")) {
		if rows > 0 && i == rows {
			break
		}
		if i > 0 {
			out = append(out, "\r\n"...)
		}
		if r := []rune(string(line)); cols > 0 && len(r) > cols {
			line = []byte(string(r[:cols]))
		}
		out = append(append(out, line...), clearRest...)
	}
	return append(out, clearBelow...)
}

func showTop(w io.Writer, s rpc.Stats, before *rpc.Stats, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(s)
	}
	sessions := 0
	for _, l := range s.Leases {
		sessions += len(l.Sessions)
	}
	_, err := fmt.Fprintf(w, "sluice %s on %s, %s: %d GPUs, %d leases, %d sessions\n\n", plain(s.Version), plain(s.Node),
		s.Time.Local().Format(time.DateTime), len(s.GPUs), len(s.Leases), sessions)
	if len(s.GPUs) > 0 {
		rows := make([][]string, 0, len(s.GPUs))
		for _, g := range slices.SortedFunc(slices.Values(s.GPUs), func(a, b rpc.GPUStats) int { return cmp.Compare(a.GPU.Index, b.GPU.Index) }) {
			busy, nvml, age := "-", "-", "-"
			if g.Known {
				busy, nvml, age = strconv.FormatUint(uint64(g.Utilisation), 10)+"%", form.ShortBytes(g.MemUsed), g.Age.Round(100*time.Millisecond).String()
			}
			state := "ok"
			if why := g.GPU.WhyNot(); why != "" {
				state = why
			}
			rows = append(rows, []string{strconv.Itoa(g.GPU.Index), g.GPU.Name, form.ShortBytes(g.GPU.Mem), form.ShortBytes(g.GrantedMem), form.ShortBytes(g.UsedMem),
				nvml, strconv.Itoa(100-int(min(g.GPU.FreePercent, 100))) + "%", busy, strconv.Itoa(g.GPU.Leases), age, state})
		}
		err = errors.Join(err, table(w, "GPU NAME MEMORY GRANTED USED NVML GRANTED% BUSY LEASES AGE STATE", rows))
		_, nl := fmt.Fprintln(w)
		err = errors.Join(err, nl)
	}
	return errors.Join(err, table(w, "LEASE JOB USER FRACTIONS POLICY DUE GOT WAITED OVERRUNS USED PEAK SESSIONS CALLS/s WAITS/s IN/s OUT/s ERRORS THROTTLED PROGRAMS", topRows(s, before)))
}

func topRows(s rpc.Stats, before *rpc.Stats) [][]string {
	old, dt := map[string]lease.Counts{}, 0.0
	had := map[string]lease.Share{}
	if before != nil {
		dt = s.Time.Sub(before.Time).Seconds()
		for _, l := range before.Leases {
			had[l.ID] = lease.SumShares(l.Shares)
			for _, x := range l.Sessions {
				old[x.ID] = x.Counts
			}
		}
	}
	users := &usernames.Names{}
	var rows [][]string
	for _, l := range s.Leases {
		var d, all lease.Counts
		var programs []string
		for _, x := range l.Sessions {
			was := old[x.ID] // zero for a new session
			d.Calls += grown(was.Calls, x.Counts.Calls)
			d.Waits += grown(was.Waits, x.Counts.Waits)
			d.BytesIn += grown(was.BytesIn, x.Counts.BytesIn)
			d.BytesOut += grown(was.BytesOut, x.Counts.BytesOut)
			all.Errors += x.Counts.Errors
			if !slices.Contains(programs, x.Program) {
				programs = append(programs, x.Program)
			}
		}
		rate := func(n uint64, text func(uint64) string) string {
			if dt <= 0 {
				return "-" // the first look, or a clock that was set back
			}
			return text(uint64(float64(n) / dt))
		}
		num := func(n uint64) string { return strconv.FormatUint(n, 10) }
		used, peak := total(l.Use)
		due, got, waited, overruns, throttled := "-", "-", "-", "-", "-"
		if len(l.Shares) > 0 {
			was, is := had[l.ID], lease.SumShares(l.Shares)
			part := func(was, is time.Duration) string {
				if dt <= 0 {
					return "-"
				}
				return strconv.FormatFloat(max((is-was).Seconds(), 0)/dt*100, 'f', 1, 64) + "%"
			}
			due = strconv.FormatFloat(float64(is.Due)/100, 'f', 1, 64) + "%"
			got, waited = part(was.Held, is.Held), part(was.Waited, is.Waited)
			overruns, throttled = num(is.Overruns), is.Throttled.Round(10*time.Millisecond).String()
		}
		rows = append(rows, []string{short(l.ID), l.Request.Key.Job, users.Name(l.Request.UID), join(l.Grants, fractionText),
			l.Request.PolicyName(), due, got, waited, overruns, form.ShortBytes(used), form.ShortBytes(peak),
			strconv.Itoa(len(l.Sessions)), rate(d.Calls, num), rate(d.Waits, num), rate(d.BytesIn, form.ShortBytes), rate(d.BytesOut, form.ShortBytes),
			num(all.Errors), throttled, join(programs, func(p string) string { return p })})
	}
	return rows
}

// grown is how much a counter has grown. A counter that was reset has grown by its value.
func grown(was, is uint64) uint64 {
	if is < was {
		return is
	}
	return is - was
}
