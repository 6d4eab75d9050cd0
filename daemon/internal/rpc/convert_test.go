package rpc

import (
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc/pb"
)

// fill sets every field of v, all different, so that a field which is not
// converted, or into the wrong place, is seen.
func fill(t *testing.T, v reflect.Value, n *int) {
	t.Helper()
	*n++
	switch v.Interface().(type) {
	case time.Time:
		v.Set(reflect.ValueOf(time.Unix(int64(1e9+*n), int64(*n)).UTC()))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprintf("text %d", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(*n))
	case reflect.Uint32, reflect.Uint64, reflect.Uint8:
		v.SetUint(uint64(*n))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fallthrough
	case reflect.Array:
		for i := range v.Len() {
			fill(t, v.Index(i), n)
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), n)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 2 {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(t, key, n)
			fill(t, value, n)
			v.SetMapIndex(key, value)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, v.Field(i), n)
		}
	default:
		t.Fatalf("%s: fill it", v.Type())
	}
}

// wired is m after a trip over the wire.
func wired[M proto.Message](t *testing.T, m, empty M) M {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	if err := proto.Unmarshal(b, empty); err != nil {
		t.Fatal(err)
	}
	return empty
}

func same[T any](t *testing.T, trip func(T) T) {
	t.Helper()
	var zero, full T
	n := 0
	fill(t, reflect.ValueOf(&full).Elem(), &n)
	for _, want := range []T{zero, full} {
		if got := trip(want); !reflect.DeepEqual(got, want) {
			t.Errorf("%T:\n%+v\nbecame\n%+v", want, want, got)
		}
	}
}

func TestConvert(t *testing.T) {
	same(t, func(l lease.Lease) lease.Lease { return fromLease(wired(t, toLease(l), &pb.Lease{})) })
	same(t, func(r lease.Request) lease.Request { return fromRequest(wired(t, toRequest(r), &pb.Request{})) })
	same(t, func(v lease.Inventory) lease.Inventory {
		return fromInventory(wired(t, toInventory(v), &pb.Inventory{}))
	})
	same(t, func(s lease.Status) lease.Status { return fromStatus(wired(t, toStatus(s), &pb.Status{})) })
	same(t, func(d lease.DrainOrder) lease.DrainOrder { return fromOrder(wired(t, toOrder(d), &pb.DrainRequest{})) })
	same(t, func(c lease.Change) lease.Change { return fromChange(wired(t, toChange(c), &pb.SetRequest{})) })
	same(t, func(o lease.Offer) lease.Offer {
		got, err := fromOffer(wired(t, toOffer(o), &pb.OfferReply{}))
		if err != nil {
			t.Error(err)
		}
		return got
	})
	same(t, func(r lease.ProbeRequest) lease.ProbeRequest {
		return fromProbeOrder(wired(t, toProbeOrder(r), &pb.ProbeOrder{}))
	})
	same(t, func(h lease.Holding) lease.Holding { return fromHolding(wired(t, toHolding(h), &pb.Holding{})) })
	same(t, func(h lease.Held) lease.Held { return fromHeld(wired(t, toHeld(h), &pb.Held{})) })
	same(t, func(q lease.HeldWatch) lease.HeldWatch {
		return fromHeldWatch(wired(t, toHeldWatch(q), &pb.WatchHeldRequest{}))
	})
	same(t, func(c lease.HeldChanges) lease.HeldChanges {
		return fromHeldChanges(wired(t, toHeldChanges(c), &pb.WatchHeldReply{}))
	})
	same(t, func(p lease.Probe) lease.Probe { return fromProbe(wired(t, toProbe(p), &pb.Probe{})) })
	same(t, func(p Pool) Pool { return fromPool(wired(t, toPool(p), &pb.Pool{})) })
	same(t, func(c Check) Check { return fromCheck(wired(t, toCheck(c), &pb.Check{})) })
	same(t, func(e Event) Event { return fromEvent(wired(t, toEvent(e), &pb.Event{})) })
	same(t, func(r lease.Report) lease.Report { return fromReport(wired(t, toReport(r), &pb.Report{})) })
	same(t, func(r JobRun) JobRun { return fromJobRun(wired(t, toJobRun(r), &pb.JobRun{})) })
	same(t, func(a JobAnswer) JobAnswer { return fromJobAnswer(wired(t, toJobAnswer(a), &pb.JobAnswerReply{})) })
	same(t, func(e EnvOp) EnvOp { return fromEnvOp(wired(t, toEnvOp(e), &pb.EnvOp{})) })
	empty := "" // not the same as not known
	if r := fromJobRun(wired(t, toJobRun(JobRun{Licences: &empty}), &pb.JobRun{})); r.Licences == nil || *r.Licences != "" {
		t.Errorf("no licences became %v", r.Licences)
	}
	same(t, func(s Stats) Stats { return fromStats(wired(t, toStats(s), &pb.StatsReply{})) })
}

func TestOfferLength(t *testing.T) {
	for _, o := range []*pb.OfferReply{nil, {Ticket: make([]byte, 15), Secret: make([]byte, 32)}, {Ticket: make([]byte, 16), Secret: make([]byte, 33)}} {
		if _, err := fromOffer(o); err == nil {
			t.Errorf("%v passes", o)
		}
	}
}

// Every code survives the wire with its reason, and has a status of its own.
func TestCodes(t *testing.T) {
	seen := map[any]bool{}
	for code, st := range statusOf {
		if seen[st] {
			t.Errorf("status %v twice", st)
		}
		seen[st] = true
		err := fromGRPC("owner x", toGRPC(fmt.Errorf("at reserve: %w", lease.Errorf(code, "no: %s", code))))
		var e *lease.Error
		if !errors.As(err, &e) || e.Code != code || e.Reason != "no: "+string(code) {
			t.Errorf("%s became %v", code, err)
		}
	}
	var e *lease.Error
	if err := fromGRPC("owner x", toGRPC(errors.New("disk on fire \xff"))); !errors.As(err, &e) || e.Code != lease.Internal || !utf8.ValidString(e.Reason) {
		t.Errorf("%v", err)
	}
	if fromGRPC("x", toGRPC(nil)) != nil {
		t.Error("no error became one")
	}
}

// A peer that is trusted may still send anything.
func FuzzConvert(f *testing.F) {
	full := lease.Lease{ID: "a", Request: lease.Request{Fractions: []lease.Fraction{{Percent: 50}}}, Grants: []lease.Grant{{Owner: "gpu01"}}}
	b, err := proto.Marshal(&pb.ReserveRequest{Lease: toLease(full)})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{0x0a, 0xff})
	f.Fuzz(func(t *testing.T, in []byte) {
		var r pb.ReserveRequest
		if proto.Unmarshal(in, &r) == nil {
			once := fromLease(r.GetLease())
			if twice := fromLease(toLease(once)); !reflect.DeepEqual(once, twice) {
				t.Fatalf("%+v\nbecame\n%+v", once, twice)
			}
			_ = fromDuration(r.GetTtl())
		}
		var s pb.StatsReply
		if proto.Unmarshal(in, &s) == nil {
			_ = fromStats(&s)
		}
		var run pb.JobRunRequest
		if proto.Unmarshal(in, &run) == nil {
			once := fromJobRun(run.GetRun())
			if twice := fromJobRun(toJobRun(once)); !reflect.DeepEqual(once, twice) {
				t.Fatalf("%+v\nbecame\n%+v", once, twice)
			}
		}
		var o pb.OfferReply
		if proto.Unmarshal(in, &o) == nil {
			_, _ = fromOffer(&o)
		}
		var po pb.ProbeOffer
		if proto.Unmarshal(in, &po) == nil {
			_, _ = fromProbeOffer(&po)
		}
		var pr pb.ProbeReply
		if proto.Unmarshal(in, &pr) == nil {
			_ = fromProbe(pr.GetProbe())
		}
	})
}

// What all nodes have found arrives as it was.
func TestConvertHealthAll(t *testing.T) {
	for _, want := range []HealthAll{{}, {
		Findings: []NodesCheck{{Check{Name: "disk", Level: Warn, Text: "is full", Remedy: "make room", Node: true}, []string{"gpu01", "gpu02"}}, {Check: Check{Name: "x", Level: Fail}}},
		Asked:    10, Well: 1, Warned: 2, Failed: 3, Unheard: 4, LeftOut: 5,
	}} {
		if got := fromHealthAll(toHealthAll(want)); !reflect.DeepEqual(got, want) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}
