package page

import (
	"cmp"
	"fmt"
	"html/template"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/sluice-hpc/sluice/daemon/internal/jobreport"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
	"github.com/sluice-hpc/sluice/internal/form"
)

// head is what all pages begin with.
type head struct {
	Title, Node, Version string
	Time                 time.Time
	Error                string
}

// poolView is the first page.
type poolView struct {
	head
	GPUs  []gpuView
	Pools []poolPart
	Jobs  []jobLine
}

// gpuView is a GPU of this node.
type gpuView struct {
	rpc.GPUStats
	State                       string // "lends", or why not
	Lent                        int    // percent
	Busy, Mem                   string
	LentLine, MemLine, BusyLine template.HTML
	Holders                     []jobLine
}

// poolPart is one pool.
type poolPart struct {
	Name   string
	GPUs   int
	Lends  int
	Free   int // percent of a GPU, all together
	Silent int
	Owners []ownerView
}

type ownerView struct {
	Name, Error string
	GPUs        []poolGPU
}

type poolGPU struct {
	lease.GPU
	State string
	Lent  int
}

// jobLine is a lease in a list.
type jobLine struct {
	Who                 template.HTML // a link to the job's page, or why there is none
	User, Name, Account string
	Host                string
	Fractions           string
	Percent             int // of the GPU that it is listed under
	Used, Granted       uint64
	UsedPercent         int
	Sessions            int
}

// jobView is the page of a job.
type jobView struct {
	head
	Cluster, Job string
	Leases       []leaseView
}

type leaseView struct {
	jobLine
	ID, Policy, State  string
	Made               time.Time
	Shares             []shareView
	UsedLine, HeldLine template.HTML
	Sessions           []lease.Session
}

type shareView struct {
	Owner, GPU      string
	Percent         uint32
	Mem, Used, Peak uint64
	Due             string
	Held, Waited    time.Duration
	Timed           bool
	Turns, Overruns uint64
}

func (s *Server) head(st *state, title string) head {
	h := head{Title: title, Node: st.stats.Node, Version: st.stats.Version, Time: st.stats.Time}
	if st.err != nil {
		h.Error = st.err.Error()
	}
	if h.Node == "" {
		h.Node, h.Time = s.cfg.Node, st.at
	}
	return h
}

func (s *Server) poolView(st *state) *poolView {
	v := &poolView{head: s.head(st, "GPUs")}
	holders := map[string][]jobLine{}
	for i := range st.stats.Leases {
		l := &st.stats.Leases[i]
		if l.State == lease.Ended {
			continue
		}
		line := s.line(l)
		v.Jobs = append(v.Jobs, line)
		for j, g := range l.Grants {
			part := line
			part.Percent = int(g.Percent)
			part.Granted, part.Used = g.Mem, 0
			if j < len(l.Use) {
				part.Used = l.Use[j].Used
			}
			part.UsedPercent = int(percent(part.Used, part.Granted))
			holders[g.GPU] = append(holders[g.GPU], part)
		}
	}
	for _, g := range st.stats.GPUs {
		v.GPUs = append(v.GPUs, s.gpu(g, holders[g.GPU.UUID]))
	}
	slices.SortFunc(v.GPUs, func(a, b gpuView) int { return cmp.Compare(a.GPU.Index, b.GPU.Index) })
	for _, p := range st.pools {
		v.Pools = append(v.Pools, partOf(p))
	}
	return v
}

func (s *Server) gpu(g rpc.GPUStats, holders []jobLine) gpuView {
	v := gpuView{GPUStats: g, State: stateOf(&g.GPU), Lent: lentOf(&g.GPU), Holders: holders, Busy: "not known", Mem: "not known"}
	if g.Known {
		v.Busy = strconv.Itoa(int(g.Utilisation)) + " %"
		v.Mem = form.ShortBytes(g.MemUsed) + " of " + form.ShortBytes(g.MemTotal)
	}
	v.LentLine, v.MemLine, v.BusyLine = s.history.line("lent "+g.GPU.UUID), s.history.line("mem "+g.GPU.UUID), s.history.line("busy "+g.GPU.UUID)
	return v
}

func partOf(p rpc.Pool) poolPart {
	part := poolPart{Name: p.Name}
	for _, o := range p.Owners {
		ov := ownerView{Name: o.Name, Error: o.Error}
		if o.Error != "" {
			part.Silent++
		}
		for _, g := range o.Inventory.GPUs {
			part.GPUs++
			if g.Lends() {
				part.Lends++
				part.Free += int(min(g.FreePercent, 100))
			}
			ov.GPUs = append(ov.GPUs, poolGPU{GPU: g, State: stateOf(&g), Lent: lentOf(&g)})
		}
		slices.SortFunc(ov.GPUs, func(a, b poolGPU) int { return cmp.Compare(a.Index, b.Index) })
		part.Owners = append(part.Owners, ov)
	}
	return part
}

func stateOf(g *lease.GPU) string {
	if why := g.WhyNot(); why != "" {
		return why
	}
	return "lends"
}

func lentOf(g *lease.GPU) int { return 100 - int(min(g.FreePercent, 100)) }

// line is a lease in a list.
func (s *Server) line(l *lease.Status) jobLine {
	r := &l.Request
	line := jobLine{Host: l.Host, Sessions: len(l.Sessions), Who: "a lease"}
	for i, g := range l.Grants {
		if i > 0 {
			line.Fractions += ", "
		}
		line.Fractions += strconv.Itoa(int(g.Percent)) + " %"
	}
	line.Used, line.Granted = memory(l)
	line.UsedPercent = int(percent(line.Used, line.Granted))
	if !s.cfg.Nameless {
		line.Name, line.Account, line.User = r.JobName, r.Account, s.names.Name(r.UID)
		if r.Key.Job != "" {
			line.Who = jobLink(r.Key.Cluster, r.Key.Job)
		}
	}
	return line
}

func jobLink(cluster, job string) template.HTML {
	path := "/job/" + url.PathEscape(cluster) + "/" + url.PathEscape(job)
	return template.HTML(`<a href="` + template.HTMLEscapeString(path) + `">` + template.HTMLEscapeString(job) + `</a>`)
}

func (s *Server) jobView(st *state, cluster, job string) *jobView {
	v := &jobView{head: s.head(st, "Job "+job), Cluster: cluster, Job: job}
	if s.cfg.Nameless {
		return v
	}
	for i := range st.stats.Leases {
		l := &st.stats.Leases[i]
		if l.Request.Key.Cluster == cluster && l.Request.Key.Job == job {
			v.Leases = append(v.Leases, s.lease(l))
		}
	}
	return v
}

func (s *Server) lease(l *lease.Status) leaseView {
	v := leaseView{
		jobLine: s.line(l), ID: l.ID, Policy: l.Request.PolicyName(), State: string(l.State), Made: l.Made, Sessions: l.Sessions,
		UsedLine: s.history.line("used " + l.ID), HeldLine: s.history.line("held " + l.ID),
	}
	for i, g := range l.Grants {
		sh := shareView{Owner: g.Owner, GPU: g.GPU, Percent: g.Percent, Mem: g.Mem}
		if i < len(l.Use) {
			sh.Used, sh.Peak = l.Use[i].Used, l.Use[i].Peak
		}
		if i < len(l.Shares) {
			t := l.Shares[i]
			sh.Timed, sh.Due = true, fmt.Sprintf("%.1f %%", float64(t.Due)/100)
			sh.Held, sh.Waited, sh.Turns, sh.Overruns = t.Held.Round(time.Millisecond), t.Waited.Round(time.Millisecond), t.Turns, t.Overruns
		}
		v.Shares = append(v.Shares, sh)
	}
	return v
}

// ago is the time since t, in whole seconds.
func ago(t time.Time) string {
	if t.IsZero() {
		return "not known"
	}
	return jobreport.Duration(time.Since(t).Round(time.Second))
}

func millis(d time.Duration) string { return fmt.Sprintf("%.2f ms", d.Seconds()*1000) }

// bar draws percent. It is no template, because a page of 1,000 GPUs has thousands of bars.
func bar(percent int) template.HTML {
	n := strconv.Itoa(percent)
	return template.HTML(`<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="` + n + ` %">` +
		`<rect class="whole" width="100" height="8"/><rect class="part" width="` + n + `" height="8"/></svg>`)
}
