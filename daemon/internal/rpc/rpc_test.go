package rpc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/sluice-hpc/sluice/daemon/internal/identity"
	"github.com/sluice-hpc/sluice/daemon/internal/identity/mungetest"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/limit"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// book is an owner that writes down what it is asked.
type book struct {
	mu   sync.Mutex
	name string
	got  []any
	err  error

	short int // so many answers are missing
}

func (b *book) note(a ...any) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.got = a
	return b.err
}

func (b *book) Inventory(context.Context) (lease.Inventory, error) {
	return lease.Inventory{Owner: b.name, GPUs: []lease.GPU{{UUID: "GPU-1", Mem: 1 << 30}}}, b.note("inventory")
}
func (b *book) Reserve(_ context.Context, host string, l lease.Lease, ttl time.Duration) (lease.Lease, error) {
	err := b.note("reserve", host, l.ID, ttl)
	l.State = lease.Reserved
	return l, err
}
func (b *book) Confirm(_ context.Context, host, id string) error {
	return b.note("confirm", host, id)
}
func (b *book) Set(_ context.Context, host string, c lease.Change) (lease.Lease, error) {
	return lease.Lease{ID: c.Lease}, b.note("set", host, c)
}
func (b *book) Drain(_ context.Context, host string, d lease.DrainOrder) ([]lease.GPU, error) {
	return []lease.GPU{{UUID: d.GPU, Drain: lease.Drain{By: host, Since: time.Unix(1, 0), Reason: d.Reason}}}, b.note("drain", host, d)
}
func (b *book) Probe(_ context.Context, host string, r lease.ProbeRequest) ([]lease.Offer, error) {
	return []lease.Offer{{Addr: ":7072", Ticket: [16]byte{1}}, {Addr: ":7072", Ticket: [16]byte{2}}}, b.note("probe", host, r)
}
func (b *book) Held(_ context.Context, host string, of []lease.Holding) ([]lease.Held, error) {
	return make([]lease.Held, len(of)-b.short), b.note("held", host, of)
}
func (b *book) WatchHeld(_ context.Context, host string, q lease.HeldWatch) (lease.HeldChanges, error) {
	return lease.HeldChanges{Promise: q.Wait, Parts: []lease.HeldPart{{ID: "l", UID: 7, Held: lease.Held{Percent: 50}}}}, b.note("watchheld", host, q)
}
func (b *book) HeldEverywhere(_ context.Context, host string, q lease.HeldQuestion) (lease.HeldSum, error) {
	return lease.HeldSum{Known: true, Held: make([]lease.Held, len(q.Holdings)), Unsure: []string{"gpu07"}}, b.note("everywhere", host, q)
}
func (b *book) Renew(_ context.Context, host string, ids []string) ([]string, error) {
	return ids, b.note("renew", host, len(ids))
}
func (b *book) Claim(_ context.Context, host, id string) error {
	if id == "over" {
		return lease.Errorf(lease.Over, "lease over has ended")
	}
	return b.note("claim", host, id)
}
func (b *book) Release(_ context.Context, host, id string, key lease.Key, reason string) error {
	return b.note("release", host, id, key, reason)
}
func (b *book) List(_ context.Context, host string) ([]lease.Status, error) {
	return []lease.Status{{Lease: lease.Lease{ID: "l", Host: host}}}, b.note("list", host)
}
func (b *book) Reports(_ context.Context, host, cluster, job string) ([]lease.Report, error) {
	return []lease.Report{{Lease: "l", Key: lease.Key{Cluster: cluster, Job: job}}}, b.note("reports", host, cluster, job)
}
func (b *book) Controller(node string) bool { return node == "ctl" }
func (b *book) Offer(_ context.Context, host string, r lease.SessionRequest) (lease.Offer, error) {
	return lease.Offer{Addr: ":7072", Ticket: [16]byte{1}, Secret: [32]byte{2}}, b.note("offer", host, r)
}

// serve runs an owner with the given identity, and answers its address.
func serve(t *testing.T, o lease.Owner, id *identity.Identity, table *limit.Table) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(id.Server(), "test")
	ServeOwner(s, o)
	go func() { _ = s.Serve(Limit(l, table)) }()
	t.Cleanup(s.Stop)
	return l.Addr().String()
}

func dial(t *testing.T, addr, name string, id *identity.Identity) *OwnerClient {
	t.Helper()
	c, err := DialOwner(addr, name, id, "test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func known(t *testing.T, node, socket string) *identity.Identity {
	t.Helper()
	i, err := identity.New(identity.Config{Node: node, Auth: identity.AuthMunge, MungeSocket: socket, MungeUID: uint32(os.Getuid())})
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func code(err error) lease.Code {
	var e *lease.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

func TestOwner(t *testing.T) {
	socket := mungetest.Start(t, "k")
	b := &book{name: "gpu01"}
	addr := serve(t, b, known(t, "gpu01", socket), limit.New(limit.Bounds{}))
	c := dial(t, addr, "gpu01", known(t, "node01", socket))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	expect := func(err error, want ...any) {
		t.Helper()
		if err != nil || !reflect.DeepEqual(b.got, want) {
			t.Errorf("%v; got %v, want %v", err, b.got, want)
		}
	}
	v, err := c.Inventory(ctx)
	expect(err, "inventory")
	if len(v.GPUs) != 1 || v.GPUs[0].UUID != "GPU-1" {
		t.Errorf("%+v", v)
	}
	l, err := c.Reserve(ctx, "node01", lease.Lease{ID: "l1"}, 15*time.Second)
	expect(err, "reserve", "node01", "l1", 15*time.Second)
	if l.State != lease.Reserved || l.Host != "node01" {
		t.Errorf("%+v", l)
	}
	expect(c.Confirm(ctx, "node01", "l1"), "confirm", "node01", "l1")
	ids, err := c.Renew(ctx, "node01", []string{"l1", "l2"})
	expect(err, "renew", "node01", 2)
	if !reflect.DeepEqual(ids, []string{"l1", "l2"}) {
		t.Errorf("%v", ids)
	}
	if err := c.Claim(ctx, "node01", "l1"); err != nil {
		t.Error(err)
	}
	if err := c.Claim(ctx, "node01", "over"); code(err) != lease.Over {
		t.Errorf("a claim of what has ended: %v", err)
	}
	if ids, err = c.Renew(ctx, "node01", make([]string, batch+1)); err != nil || len(ids) != batch+1 {
		t.Errorf("%d, %v", len(ids), err)
	}
	key := lease.Key{Cluster: "c", Job: "7", Node: "node01", Incarnation: 2}
	expect(c.Release(ctx, "node01", "", key, "job over"), "release", "node01", "", key, "job over")
	if _, err := c.List(ctx, ""); code(err) != lease.Denied || b.got[0] == "list" {
		t.Errorf("the leases of all hosts: %v, %v", b.got, err)
	}
	list, err := c.List(ctx, "node01")
	expect(err, "list", "node01")
	if len(list) != 1 || list[0].Host != "node01" {
		t.Errorf("%+v", list)
	}
	change := lease.Change{Lease: "l1", Shares: []uint32{40, 0}, Policy: lease.Fixed, Beyond: true, By: 7}
	request := lease.ProbeRequest{UID: 7, Connections: 2, Encrypt: true, CertHashes: [][]byte{{1}, {2}}}
	offers, err := c.Probe(ctx, "node02", request)
	expect(err, "probe", "node01", request)
	if len(offers) != 2 || offers[1].Ticket != [16]byte{2} {
		t.Errorf("%+v", offers)
	}
	of := []lease.Holding{{UID: 7, Pool: "big", Jobs: true, Except: "l1"}, {Account: "phys", Cluster: "c"}}
	held, err := c.Held(ctx, "node02", of)
	expect(err, "held", "node01", of)
	if len(held) != 2 {
		t.Errorf("%+v", held)
	}
	b.short = 1
	if _, err := c.Held(ctx, "node02", of); code(err) != lease.Internal || !strings.Contains(err.Error(), "owner gpu01: 1 answers to 2 questions") {
		t.Error(err)
	}
	if _, err := c.Held(ctx, "node02", make([]lease.Holding, lease.MaxHoldings+1)); code(err) != lease.Invalid {
		t.Error(err)
	}
	watch := lease.HeldWatch{Since: lease.Mark{Epoch: 1 << 63, Seq: 9}, Wait: time.Second, Answers: []lease.HeldAnswer{{ID: 3, Sum: lease.HeldSum{Known: true, At: []string{"gpu02"}}}}}
	changes, err := c.WatchHeld(ctx, "node02", watch)
	expect(err, "watchheld", "node01", watch)
	if changes.Promise != time.Second || len(changes.Parts) != 1 || changes.Parts[0].Held.Percent != 50 {
		t.Errorf("%+v", changes)
	}
	question := lease.HeldQuestion{Holdings: of, Owners: 1<<64 - 1}
	sum, err := c.HeldEverywhere(ctx, "node02", question)
	expect(err, "everywhere", "node01", question)
	if !sum.Known || len(sum.Held) != 2 || len(sum.Unsure) != 1 {
		t.Errorf("%+v", sum)
	}
	order := lease.DrainOrder{Owner: "gpu01", GPU: "1", Reason: "fans", By: 7}
	gpus, err := c.Drain(ctx, "node02", order)
	expect(err, "drain", "node01", order)
	if len(gpus) != 1 || gpus[0].UUID != "1" || gpus[0].Drain.Reason != "fans" || gpus[0].Drain.By != "node01" {
		t.Errorf("%+v", gpus)
	}
	l, err = c.Set(ctx, "node02", change)
	expect(err, "set", "node01", change)
	if l.ID != "l1" {
		t.Errorf("%+v", l)
	}
	reports, err := c.Reports(ctx, "node02", "c", "7")
	expect(err, "reports", "node01", "c", "7")
	if len(reports) != 1 || reports[0].Key.Job != "7" {
		t.Errorf("%+v", reports)
	}
	for _, l := range []lease.Lease{{ID: "l2", Host: "node02", Sponsor: "node01"}, {ID: "l2", Host: "node02", Sponsor: "ctl"}} {
		if _, err := c.Reserve(ctx, "node01", l, 0); code(err) != lease.Denied || b.got[0] == "reserve" {
			t.Errorf("sponsored by %s: %v, %v", l.Sponsor, b.got, err)
		}
	}
	ctl := dial(t, addr, "gpu01", known(t, "ctl", socket))
	list, err = ctl.List(ctx, "")
	expect(err, "list", "")
	if len(list) != 1 {
		t.Errorf("%+v", list)
	}
	l, err = ctl.Reserve(ctx, "ctl", lease.Lease{ID: "l2", Host: "node02", Sponsor: "ctl"}, 0)
	expect(err, "reserve", "ctl", "l2", time.Duration(0))
	if l.Host != "node02" || l.Sponsor != "ctl" {
		t.Errorf("%+v", l)
	}
	if _, err := ctl.Reserve(ctx, "ctl", lease.Lease{ID: "l2", Host: "node02", Sponsor: "node02"}, 0); code(err) != lease.Denied {
		t.Errorf("in another's name: %v", err)
	}
	q := lease.SessionRequest{Lease: "l1", Kind: 1, PID: 5, UID: 1000, Program: "py\xffthon"}
	o, err := c.Offer(ctx, "node01", q)
	expect(err, "offer", "node01", q)
	if o.Addr != ":7072" || o.Ticket[0] != 1 || o.Secret[0] != 2 {
		t.Errorf("%+v", o)
	}
	q.Program = strings.Repeat("p", maxProgram+1)
	if _, err := c.Offer(ctx, "node01", q); code(err) != lease.Invalid {
		t.Errorf("a program's name of %d bytes: %v", len(q.Program), err)
	}
	// The connection says who asks, not the caller.
	if _, err := c.Reserve(ctx, "node02", lease.Lease{ID: "l1"}, 0); code(err) != lease.Denied {
		t.Errorf("a lease for another host: %v", err)
	}
	_, _ = c.List(ctx, "node02")
	if b.got[1] != "node01" {
		t.Errorf("list for %v", b.got)
	}
	b.err = lease.Errorf(lease.Conflict, "the key has lease l1")
	if l, err = c.Reserve(ctx, "node01", lease.Lease{ID: "l9"}, 0); code(err) != lease.Conflict || l.ID != "l9" {
		t.Errorf("conflict: %+v, %v", l, err)
	}
	b.err = lease.Errorf(lease.NoRoom, "full")
	if _, err = c.Inventory(ctx); code(err) != lease.NoRoom || err.Error() != "full" {
		t.Errorf("%v", err)
	}
	b.err = nil

	// Another name, another version, and an owner that calls itself otherwise.
	if _, err := dial(t, addr, "gpu02", known(t, "node01", socket)).Inventory(ctx); code(err) != lease.Down || !strings.Contains(err.Error(), `is node "gpu01", not "gpu02"`) {
		t.Errorf("wrong name: %v", err)
	}
	old := metadata.AppendToOutgoingContext(ctx, headerProtocol, "99", headerVersion, "9.9")
	_, err = c.c.Inventory(old, &pb.InventoryRequest{})
	if err := c.fail(err); code(err) != lease.WrongPeer || !strings.Contains(err.Error(), "9.9") || !strings.Contains(err.Error(), "protocol 1") {
		t.Errorf("other protocol: %v", err)
	}
	b.name = "liar"
	if _, err := c.Inventory(ctx); code(err) != lease.Down || !strings.Contains(err.Error(), "liar") {
		t.Errorf("other name: %v", err)
	}
	// A stranger to the cluster's munge.
	_, err = dial(t, addr, "gpu01", known(t, "node01", mungetest.Start(t, "other"))).Inventory(ctx)
	if code(err) != lease.Down || !strings.Contains(err.Error(), "refused") {
		t.Errorf("wrong key: %v", err)
	}
	// A message too large.
	if _, err := c.Reserve(ctx, "node01", lease.Lease{ID: strings.Repeat("x", 2*maxMessage)}, 0); err == nil {
		t.Error("2 MiB pass")
	}
}

// A dead owner is said to be so at once, and found again when it is back.
func TestDown(t *testing.T) {
	socket := mungetest.Start(t, "k")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	c := dial(t, addr, "gpu01", known(t, "node01", socket))
	if _, err := c.Inventory(t.Context()); code(err) != lease.Down || !strings.Contains(err.Error(), "gpu01") {
		t.Fatalf("%v", err)
	}
	if l, err = net.Listen("tcp", addr); err != nil {
		t.Fatal(err)
	}
	s := NewServer(known(t, "gpu01", socket).Server(), "test")
	ServeOwner(s, &book{name: "gpu01"})
	go func() { _ = s.Serve(l) }()
	defer s.Stop()
	for end := time.Now().Add(10 * time.Second); ; {
		if _, err = c.Inventory(t.Context()); err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// A flood, half-open connections and rubbish: the honest host gets through.
func TestFlood(t *testing.T) {
	socket := mungetest.Start(t, "k")
	table := limit.New(limit.Bounds{Pending: 200, PendingKey: 100})
	addr := serve(t, &book{name: "gpu01"}, known(t, "gpu01", socket), table)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var open []net.Conn
			defer func() {
				for _, c := range open {
					_ = c.Close()
				}
			}()
			for range 500 {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					continue
				}
				if w%2 == 0 {
					_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n")) // it may be closed already
				}
				open = append(open, c)
			}
			<-stop
		}()
	}
	c := dial(t, addr, "gpu01", known(t, "node01", socket))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for n := 0; n < 5; {
		if _, err := c.Inventory(ctx); err == nil {
			n++
		} else if ctx.Err() != nil {
			t.Fatal(err)
		} else {
			time.Sleep(50 * time.Millisecond)
		}
	}
	close(stop)
	wg.Wait()
	if table.Dropped() == 0 {
		t.Error("nothing was dropped: that was no flood")
	}
}

// A connection on which nothing comes, or half of a message, is closed in time.
func TestHalfOpen(t *testing.T) {
	t.Parallel()
	addr := serve(t, &book{name: "gpu01"}, known(t, "gpu01", mungetest.Start(t, "k")), limit.New(limit.Bounds{}))
	var wg sync.WaitGroup
	for _, said := range []string{"", "\x16\x03\x01\x02\x00\x01"} { // half a ClientHello
		wg.Add(1)
		go func() {
			defer wg.Done()
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_, _ = c.Write([]byte(said))
			_ = c.SetReadDeadline(time.Now().Add(2 * handshakeTime))
			if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("still open after %v", 2*handshakeTime)
			}
		}()
	}
	wg.Wait()
}

// older is an owner of a release that has no probe.
type older struct{ lease.Owner }

// An owner that has no probe is named, with what to do. One that does not say what users hold is known by its code.
func TestProbeOfOlder(t *testing.T) {
	socket := mungetest.Start(t, "k")
	addr := serve(t, older{&book{name: "gpu01"}}, known(t, "gpu01", socket), limit.New(limit.Bounds{}))
	c := dial(t, addr, "gpu01", known(t, "node01", socket))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := c.Probe(ctx, "node01", lease.ProbeRequest{Connections: 4}); code(err) != lease.WrongPeer || !strings.Contains(err.Error(), "owner gpu01 runs a release that has no probe; install") {
		t.Error(err)
	}
	if _, err := c.Held(ctx, "node01", make([]lease.Holding, 1)); code(err) != lease.WrongPeer {
		t.Error(err)
	}
	if _, err := c.WatchHeld(ctx, "node01", lease.HeldWatch{}); code(err) != lease.WrongPeer {
		t.Error(err)
	}
	if _, err := c.HeldEverywhere(ctx, "node01", lease.HeldQuestion{}); code(err) != lease.WrongPeer {
		t.Error(err)
	}
	if _, err := c.Inventory(ctx); err != nil {
		t.Errorf("what it has: %v", err)
	}
	// A call that is refused for another reason returns that reason.
	other := *c
	other.version = "9.9"
	other.c = refusing{c.c}
	if _, err := other.Probe(ctx, "node01", lease.ProbeRequest{Connections: 4}); code(err) != lease.WrongPeer || !strings.Contains(err.Error(), "speaks protocol 99") {
		t.Error(err)
	}
}

// ill is an owner that tells its health to one node.
type ill struct {
	lease.Owner
	checks []Check
}

func (o *ill) Health(_ context.Context, host string) ([]Check, error) {
	if host != "ctl" {
		return nil, lease.Errorf(lease.Denied, "%s asks", host)
	}
	return o.checks, nil
}

// A node's health goes to the node that has proven its name. An answer that is too long is refused, not held.
func TestHealthOfOwner(t *testing.T) {
	socket := mungetest.Start(t, "k")
	o := &ill{Owner: &book{name: "gpu01"}, checks: []Check{{Name: "disk", Level: Fail, Text: "full \xff", Remedy: "make room", Node: true}}}
	addr := serve(t, o, known(t, "gpu01", socket), limit.New(limit.Bounds{}))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	ctl := dial(t, addr, "gpu01", known(t, "ctl", socket))
	want := []Check{{Name: "disk", Level: Fail, Text: "full \uFFFD", Remedy: "make room", Node: true}}
	if got, err := ctl.Health(ctx, "whatever"); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := dial(t, addr, "gpu01", known(t, "node01", socket)).Health(ctx, "ctl"); code(err) != lease.Denied || len(got) > 0 || !strings.Contains(err.Error(), "node01 asks") {
		t.Errorf("%+v, %v", got, err)
	}
	o.checks = []Check{{Text: strings.Repeat("x", maxHealth)}}
	if got, err := ctl.Health(ctx, ""); code(err) != lease.Down || len(got) > 0 {
		t.Errorf("%d findings, %v", len(got), err)
	}
	o.checks = make([]Check, maxChecks)
	if got, err := ctl.Health(ctx, ""); err != nil || len(got) != maxChecks {
		t.Errorf("%d findings, %v", len(got), err)
	}
	o.checks = make([]Check, maxHealth/2-8)
	if got, err := ctl.Health(ctx, ""); code(err) != lease.Internal || len(got) > 0 || !strings.Contains(err.Error(), "more than 512 findings") {
		t.Errorf("%d findings, %v", len(got), err)
	}
	old := serve(t, older{&book{name: "gpu02"}}, known(t, "gpu02", socket), limit.New(limit.Bounds{}))
	if _, err := dial(t, old, "gpu02", known(t, "ctl", socket)).Health(ctx, ""); code(err) != lease.WrongPeer || !strings.Contains(err.Error(), "owner gpu02 runs a release that has no health") {
		t.Error(err)
	}
}

// refusing is an owner of another protocol.
type refusing struct{ pb.OwnerClient }

func (refusing) Probe(context.Context, *pb.ProbeOrder, ...grpc.CallOption) (*pb.ProbeOffer, error) {
	return nil, toGRPC(lease.Errorf(lease.WrongPeer, "gpu01 speaks protocol 99"))
}

// desk is a LocalService.
type desk struct {
	LocalService
	peer Peer
	req  lease.Request
}

func (d *desk) Acquire(_ context.Context, p Peer, r lease.Request) (lease.Lease, string, error) {
	d.peer, d.req = p, r
	if r.Pool == "none" {
		return lease.Lease{}, "", lease.Errorf(lease.NotFound, "no pool none")
	}
	return lease.Lease{ID: "l1", Request: r}, "/run/sluice/leases/l1/sock", nil
}
func (d *desk) Release(_ context.Context, p Peer, id string, k lease.Key, reason string) error {
	return lease.Errorf(lease.Denied, "%d %s %s %s", p.UID, id, k.Job, reason)
}
func (d *desk) List(context.Context, Peer) ([]lease.Status, error) {
	return []lease.Status{{Lease: lease.Lease{ID: "l1"}}}, nil
}
func (d *desk) Pool(_ context.Context, _ Peer, name string) ([]Pool, error) {
	return []Pool{{Name: name, Owners: []PoolOwner{{Name: "gpu01", Error: "down"}}}}, nil
}
func (d *desk) Health(context.Context, Peer) ([]Check, error) {
	return []Check{{Name: "nvml", Level: Warn, Text: "old", Remedy: "wait"}}, nil
}
func (d *desk) Explain(_ context.Context, _ Peer, job string) ([]Event, error) {
	return []Event{{Event: "grant", Key: lease.Key{Job: job}}}, nil
}
func (d *desk) Set(_ context.Context, p Peer, c lease.Change) (lease.Lease, error) {
	if c.By != p.UID || c.Beyond != (p.UID == 0) {
		return lease.Lease{}, lease.Errorf(lease.Internal, "the caller's word is believed: %+v", c)
	}
	return lease.Lease{ID: c.Lease, Grants: []lease.Grant{{Percent: c.Share(0), First: 50}}}, nil
}
func (d *desk) Drain(_ context.Context, p Peer, o lease.DrainOrder) ([]lease.GPU, error) {
	if o.By != p.UID {
		return nil, lease.Errorf(lease.Internal, "the caller's word is believed: %+v", o)
	}
	return []lease.GPU{{Owner: o.Owner, UUID: o.GPU}}, nil
}
func (d *desk) Probe(_ context.Context, p Peer, owner string) (lease.Probe, error) {
	if owner == "none" {
		return lease.Probe{}, lease.Errorf(lease.NotFound, "no owner none for %d", p.UID)
	}
	return lease.Probe{Owner: owner, Flows: []lease.ProbeFlow{{Up: true, Rate: 1e9}}}, nil
}
func (d *desk) Stats(context.Context, Peer) (Stats, error) {
	return Stats{Node: "node01", GPUs: []GPUStats{{Known: true, Utilisation: 7}}}, nil
}

func TestLocal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	d := &desk{}
	start := func() *grpc.Server {
		l, err := ListenLocal(path, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		s := NewServer(LocalCreds(), "test")
		ServeLocal(s, d)
		go func() { _ = s.Serve(l) }()
		return s
	}
	s := start()
	if _, err := ListenLocal(path, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "another sluiced") {
		t.Errorf("two daemons at one socket: %v", err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o666 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	c, err := DialLocal(path, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := t.Context()
	want := lease.Request{Key: lease.Key{Job: "run-1"}, Fractions: []lease.Fraction{{Percent: 50}}, Holder: lease.Process{PID: 4, Start: 5}}
	l, socket, err := c.Acquire(ctx, want)
	if err != nil || l.ID != "l1" || socket != "/run/sluice/leases/l1/sock" || !reflect.DeepEqual(d.req, want) {
		t.Errorf("%+v %q %v", l, socket, err)
	}
	if me := (Peer{UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), PID: os.Getpid()}); d.peer != me {
		t.Errorf("peer %+v, not %+v", d.peer, me)
	}
	if _, _, err := c.Acquire(ctx, lease.Request{Pool: "none"}); code(err) != lease.NotFound {
		t.Error(err)
	}
	if err := c.Release(ctx, "l1", lease.Key{Job: "j"}, "why"); code(err) != lease.Denied || !strings.HasSuffix(err.Error(), " l1 j why") {
		t.Error(err)
	}
	if v, err := c.List(ctx); err != nil || len(v) != 1 || v[0].ID != "l1" {
		t.Error(v, err)
	}
	if v, err := c.Pool(ctx, "p"); err != nil || len(v) != 1 || v[0].Name != "p" || v[0].Owners[0].Error != "down" {
		t.Error(v, err)
	}
	if v, err := c.Health(ctx); err != nil || len(v) != 1 || v[0].Level != Warn {
		t.Error(v, err)
	}
	if v, err := c.Explain(ctx, "7"); err != nil || len(v) != 1 || v[0].Key.Job != "7" {
		t.Error(v, err)
	}
	if v, err := c.Stats(ctx); err != nil || v.Node != "node01" || v.GPUs[0].Utilisation != 7 {
		t.Error(v, err)
	}
	if v, err := c.Set(ctx, lease.Change{Lease: "l1", Shares: []uint32{40}, By: 77, Beyond: os.Getuid() != 0}); err != nil || v.ID != "l1" || v.Grants[0].Percent != 40 || v.Grants[0].Paid() != 50 {
		t.Error(v, err)
	}
	if v, err := c.Probe(ctx, "gpu01"); err != nil || v.Owner != "gpu01" || len(v.Flows) != 1 || v.Flows[0].Rate != 1e9 {
		t.Error(v, err)
	}
	if _, err := c.Probe(ctx, "none"); code(err) != lease.NotFound {
		t.Error(err)
	}
	// The socket stays, and the next daemon takes its place; the client finds it.
	s.Stop()
	if _, err := c.List(ctx); code(err) != lease.Down || !strings.Contains(err.Error(), "is the service running?") {
		t.Error(err)
	}
	s = start()
	defer s.Stop()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err = c.List(ctx); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(path+".file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenLocal(path+".file", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Error(err)
	}
}
