package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// sluice smi is for nodes without nvidia-smi: the GPUs of a lease as its programs number them, with what nvidia-smi would say of them as far as
// the daemons know it. It takes those of nvidia-smi's options that scripts use most.

// smiInterval is the time between the two looks of which the utilisation is made.
const smiInterval = 500 * time.Millisecond

// smiGPU is one GPU of a lease.
type smiGPU struct {
	index int
	name  string // "" unknown
	grant lease.Grant
	use   *lease.Use // nil unknown: its owner does not answer
	busy  float64    // percent of the time, -1 unknown
}

// memory is what v makes of the bytes in use.
func (g *smiGPU) memory(v func(used uint64) uint64) string {
	if g.use == nil {
		return unknown
	}
	return mib(v(g.use.Used))
}

func (g *smiGPU) called() string { return plain(cmp.Or(g.name, unknown)) }

// smiField is a field of --query-gpu.
type smiField struct {
	name, unit string
	value      func(g *smiGPU) string
}

// unknown is nvidia-smi's word.
const unknown = "[N/A]"

var smiFields = []smiField{
	{"index", "", func(g *smiGPU) string { return strconv.Itoa(g.index) }},
	{"name", "", func(g *smiGPU) string { return g.called() }},
	{"uuid", "", func(g *smiGPU) string { return plain(g.grant.GPU) }},
	{"memory.total", "MiB", func(g *smiGPU) string { return mib(g.grant.Mem) }},
	{"memory.used", "MiB", func(g *smiGPU) string { return g.memory(func(used uint64) uint64 { return used }) }},
	{"memory.free", "MiB", func(g *smiGPU) string {
		return g.memory(func(used uint64) uint64 { return g.grant.Mem - min(used, g.grant.Mem) })
	}},
	{"utilization.gpu", "%", func(g *smiGPU) string {
		if g.busy < 0 {
			return unknown
		}
		return strconv.FormatFloat(g.busy, 'f', 0, 64)
	}},
}

func mib(n uint64) string { return strconv.FormatUint(n>>20, 10) }

type smi struct {
	socket, query, format string
	list                  bool
}

func newSmi() *cobra.Command {
	var o smi
	names := make([]string, len(smiFields))
	for i, f := range smiFields {
		names[i] = f.name
	}
	cmd := &cobra.Command{
		Use:   "smi [LEASE|JOB]",
		Short: "Show a lease's GPUs as nvidia-smi would",
		Long: `Show the GPUs of a lease as its programs see and number them: memory granted and used, the part of
the time in which the lease computed, and its processes. It is for nodes without nvidia-smi.

The lease is that of LEASE or JOB, else the one of this shell's job (SLUICE_LEASE_ID), else the only
one of yours on this node.

-L and --query-gpu are those of nvidia-smi. The fields are ` + strings.Join(names, ", ") + `.`,
		Example:           "  sluice smi\n  sluice smi -L\n  sluice smi --query-gpu=memory.used,memory.total --format=csv,noheader,nounits",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: completeLeases(&o.socket),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd, args)
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&o.list, "list-gpus", "L", false, "list name and UUID of each GPU")
	f.StringVar(&o.query, "query-gpu", "", "print these `FIELDS`, separated by commas")
	f.StringVar(&o.format, "format", "csv", "of --query-gpu: csv, and then noheader, nounits")
	cmd.MarkFlagsMutuallyExclusive("list-gpus", "query-gpu")
	socketFlag(cmd, &o.socket)
	return cmd
}

func (o *smi) run(cmd *cobra.Command, args []string) error {
	fields, err := o.fields()
	if err != nil {
		return err
	}
	if cmd.Flags().Changed("format") && o.query == "" {
		return errors.New("--format is for --query-gpu")
	}
	ctx, w := cmd.Context(), cmd.OutOrStdout()
	ls, err := leases(ctx, o.socket)
	if err != nil {
		return err
	}
	if len(args) == 1 {
		if args[0], err = jobNumber(ctx, args[0]); err != nil {
			return err
		}
	}
	id, err := smiLease(ls, args)
	if err != nil {
		return err
	}
	wants := func(field string) bool {
		return len(fields) == 0 || slices.ContainsFunc(fields, func(i int) bool { return smiFields[i].name == field })
	}
	l, gpus, err := o.look(ctx, id, wants("name"), !o.list && wants("utilization.gpu"))
	if err != nil {
		return err
	}
	switch {
	case o.list:
		for _, g := range gpus {
			if _, err := fmt.Fprintf(w, "GPU %d: %s (UUID: %s)\n", g.index, g.called(), plain(g.grant.GPU)); err != nil {
				return err
			}
		}
		return nil
	case len(fields) > 0:
		return o.csv(w, gpus, fields)
	}
	return smiTables(w, &l, gpus)
}

// fields are the places in smiFields of what --query-gpu names.
func (o *smi) fields() ([]int, error) {
	format := strings.Split(o.format, ",")
	for i, f := range format {
		format[i] = strings.TrimSpace(f)
		if f = format[i]; f != "csv" && f != "noheader" && f != "nounits" {
			return nil, fmt.Errorf("--format %q: want csv, and then noheader and nounits as csv,noheader,nounits", f)
		}
	}
	if !slices.Contains(format, "csv") {
		return nil, fmt.Errorf("--format %q: csv is missing, as in csv,%s", o.format, o.format)
	}
	if o.query == "" {
		return nil, nil
	}
	var out []int
	for _, name := range strings.Split(o.query, ",") {
		name = strings.TrimSpace(name)
		// nvidia-smi has two names for some.
		i := slices.IndexFunc(smiFields, func(f smiField) bool { return f.name == strings.TrimPrefix(name, "gpu_") })
		if i < 0 {
			return nil, fmt.Errorf("--query-gpu: no field %q; see sluice smi --help for those that there are", name)
		}
		out = append(out, i)
	}
	return out, nil
}

// smiLease is the lease that is meant.
func smiLease(ls []lease.Status, args []string) (string, error) {
	name := os.Getenv("SLUICE_LEASE_ID")
	if len(args) == 1 {
		name = args[0]
	}
	if name != "" {
		return named(ls, name)
	}
	ls = slices.DeleteFunc(slices.Clone(ls), func(l lease.Status) bool { return l.State != lease.Granted })
	switch {
	case len(ls) == 0:
		return "", errors.New("no lease of yours on this node; get one with srun --gres=rgpu:PERCENT or sluice run --fraction PERCENT")
	case len(ls) > 1:
		return "", fmt.Errorf("%d leases on this node: %s; name one of them or its job", len(ls), join(ls, func(l lease.Status) string { return short(l.ID) }))
	}
	return ls[0].ID, nil
}

// look asks the daemon, twice for the utilisation. The owners are asked for the names of their GPUs; of one that does not answer they are unknown.
func (o *smi) look(ctx context.Context, id string, names, busy bool) (lease.Status, []smiGPU, error) {
	find := func() (lease.Status, time.Time, error) {
		s, err := stats(ctx, o.socket)
		if err != nil {
			return lease.Status{}, time.Time{}, err
		}
		if i := slices.IndexFunc(s.Leases, func(l lease.Status) bool { return l.ID == id }); i >= 0 {
			return s.Leases[i], s.Time, nil
		}
		return lease.Status{}, s.Time, fmt.Errorf("lease %s is not on this node; see sluice list", short(id))
	}
	before, begun, err := find()
	if err != nil {
		return before, nil, err
	}
	now, at := before, begun
	if busy && len(before.Shares) > 0 && len(before.Sessions) > 0 {
		select {
		case <-time.After(smiInterval):
		case <-ctx.Done():
			return now, nil, ctx.Err()
		}
		if now, at, err = find(); err != nil {
			return now, nil, err
		}
	}
	var pools []rpc.Pool
	if names {
		pools, _ = question(ctx, o.socket, func(ctx context.Context, d local) ([]rpc.Pool, error) { return d.Pool(ctx, "") })
	}
	return now, smiGPUs(&now, &before, at.Sub(begun), pools), nil
}

// smiGPUs puts together what is known of a lease's GPUs.
func smiGPUs(now, before *lease.Status, took time.Duration, pools []rpc.Pool) []smiGPU {
	names := map[string]string{}
	for _, p := range pools {
		for _, o := range p.Owners {
			for _, g := range o.Inventory.GPUs {
				names[o.Name+" "+g.UUID] = g.Name
			}
		}
	}
	var out []smiGPU
	for i, gr := range now.Grants {
		g := smiGPU{index: i, name: names[gr.Owner+" "+gr.GPU], grant: gr, busy: -1}
		if i < len(now.Use) && now.Use[i].Granted > 0 {
			g.use = &now.Use[i]
		}
		switch shared := func(l *lease.Status) bool { return i < len(l.Shares) && l.Shares[i] != (lease.Share{}) }; {
		case g.use == nil:
		case len(now.Sessions) == 0:
			g.busy = 0
		case took > 0 && shared(now) && shared(before):
			g.busy = min(max(100*(now.Shares[i].Busy-before.Shares[i].Busy).Seconds()/took.Seconds(), 0), 100)
		}
		out = append(out, g)
	}
	return out
}

func (o *smi) csv(w io.Writer, gpus []smiGPU, fields []int) error {
	header, units := !strings.Contains(o.format, "noheader"), !strings.Contains(o.format, "nounits")
	var b strings.Builder
	line := func(value func(f *smiField) string) {
		values := make([]string, len(fields))
		for i, f := range fields {
			values[i] = value(&smiFields[f])
		}
		b.WriteString(strings.Join(values, ", ") + "\n")
	}
	if header {
		line(func(f *smiField) string {
			if f.unit == "" {
				return f.name
			}
			return f.name + " [" + f.unit + "]"
		})
	}
	for i := range gpus {
		line(func(f *smiField) string {
			v := f.value(&gpus[i])
			if units && f.unit != "" && v != unknown {
				v += " " + f.unit
			}
			return v
		})
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func smiTables(w io.Writer, l *lease.Status, gpus []smiGPU) error {
	var rows [][]string
	for i := range gpus {
		g := &gpus[i]
		busy, used := "-", "-"
		if g.use != nil {
			used = mib(g.use.Used) + "MiB"
		}
		if g.busy >= 0 {
			busy = strconv.FormatFloat(g.busy, 'f', 0, 64) + "%"
		}
		rows = append(rows, []string{strconv.Itoa(g.index), g.name, g.grant.Owner, strconv.FormatUint(uint64(g.grant.Percent), 10) + "%",
			used + " / " + mib(g.grant.Mem) + "MiB", busy, g.grant.GPU})
	}
	if _, err := fmt.Fprintf(w, "lease %s of job %s\n", short(l.ID), plain(l.Request.Key.Job)); err != nil {
		return err
	}
	if err := table(w, "GPU NAME OWNER SHARE MEMORY BUSY UUID", rows); err != nil || len(l.Sessions) == 0 {
		return err
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	var processes [][]string
	for _, s := range l.Sessions {
		pid := strconv.FormatUint(uint64(s.Client), 10)
		if len(s.Use) != len(gpus) { // of one of several owners: which is not known here
			used, _ := total(s.Use)
			processes = append(processes, []string{"-", pid, s.Program, mib(used) + "MiB"})
			continue
		}
		for i, u := range s.Use {
			processes = append(processes, []string{strconv.Itoa(i), pid, s.Program, mib(u.Used) + "MiB"})
		}
	}
	return table(w, "GPU PID PROGRAM MEMORY", processes)
}
