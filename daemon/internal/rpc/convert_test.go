package rpc

import (
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

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
func wired[M proto.Message](t *testing.T, m M) M {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	empty := m.ProtoReflect().New().Interface().(M)
	if err := proto.Unmarshal(b, empty); err != nil {
		t.Fatal(err)
	}
	return empty
}

// whole reports the fields of a message that are not set, and of the messages in it, and notes which messages those are.
func whole(t *testing.T, m protoreflect.Message, seen map[protoreflect.FullName]bool) {
	t.Helper()
	d := m.Descriptor()
	if d.ParentFile() != pb.File_daemon_internal_rpc_sluice_proto {
		return
	}
	seen[d.FullName()] = true
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		switch v := m.Get(f); {
		case !m.Has(f):
			t.Errorf("%s: nothing is converted to it; if it is out of use, reserve its number in sluice.proto", f.FullName())
		case f.IsList() && f.Message() != nil:
			for j := range v.List().Len() {
				whole(t, v.List().Get(j).Message(), seen)
			}
		case f.Message() != nil:
			whole(t, v.Message(), seen)
		}
	}
}

// conversions checks pairs of functions. What a type of Go has and its message lacks, or is not converted, is lost on the way there
// and back; what the message alone has is not set on the way there.
type conversions struct {
	t    *testing.T
	seen map[protoreflect.FullName]bool // messages that are converted
}

func same[T any, M proto.Message](c conversions, to func(T) M, from func(M) T) {
	c.t.Helper()
	var zero, full T
	n := 0
	fill(c.t, reflect.ValueOf(&full).Elem(), &n)
	for _, want := range []T{zero, full} {
		if got := from(wired(c.t, to(want))); !reflect.DeepEqual(got, want) {
			c.t.Errorf("%T:\n%+v\nbecame\n%+v", want, want, got)
		}
	}
	whole(c.t, to(full).ProtoReflect(), c.seen)
}

// convertAll tries every conversion there is, and returns the messages that they are of.
func convertAll(t *testing.T) map[protoreflect.FullName]bool {
	t.Helper()
	c := conversions{t, map[protoreflect.FullName]bool{}}
	same(c, toLease, fromLease)
	same(c, toRequest, fromRequest)
	same(c, toInventory, fromInventory)
	same(c, toStatus, fromStatus)
	same(c, toOrder, fromOrder)
	same(c, toChange, fromChange)
	var step string // it does not leave the host
	same(c, func(r lease.SessionRequest) *pb.OfferRequest {
		step = r.Step
		return toSessionRequest(r)
	}, func(m *pb.OfferRequest) lease.SessionRequest {
		r := fromSessionRequest(m)
		r.Step = step
		return r
	})
	same(c, toOffer, func(m *pb.OfferReply) lease.Offer {
		o, err := fromOffer(m)
		if err != nil {
			t.Error(err)
		}
		return o
	})
	same(c, toProbeOrder, fromProbeOrder)
	same(c, toHolding, fromHolding)
	same(c, toHeld, fromHeld)
	same(c, toHeldWatch, fromHeldWatch)
	same(c, toHeldChanges, fromHeldChanges)
	same(c, toProbe, fromProbe)
	same(c, toMark, fromMark)
	same(c, toChanges, fromChanges)
	same(c, toWhereabouts, fromWhereabouts)
	same(c, toPool, fromPool)
	same(c, toCheck, fromCheck)
	same(c, toHealthAll, fromHealthAll)
	same(c, toEvent, fromEvent)
	same(c, toReport, fromReport)
	same(c, toJobRun, fromJobRun)
	same(c, toJobAnswer, fromJobAnswer)
	same(c, toEnvOp, fromEnvOp)
	same(c, toStats, fromStats)
	return c.seen
}

// TestConvert: no field of either side is lost. What it does not reach is in TestCalls.
func TestConvert(t *testing.T) {
	convertAll(t)
	empty := "" // not the same as not known
	if r := fromJobRun(wired(t, toJobRun(JobRun{Licences: &empty}))); r.Licences == nil || *r.Licences != "" {
		t.Errorf("no licences became %v", r.Licences)
	}
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
