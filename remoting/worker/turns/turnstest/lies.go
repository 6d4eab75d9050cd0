package turnstest

import (
	"fmt"
	"time"
)

// A Board is a schedule on which a session of one lease lies, while another lease steals from a third.
type Board struct {
	*Liar
	own, thief, victim int // tenants
}

// NewBoard finds the tenants of the three leases.
func NewBoard(l *Liar, own, thief, victim string) (*Board, error) {
	b := &Board{l, l.TenantOf(own), l.TenantOf(thief), l.TenantOf(victim)}
	if b.own < 0 || b.thief < 0 || b.victim < 0 {
		return nil, fmt.Errorf("the liar %s is tenant %d, the thief %s is %d and the victim %s is %d", own, b.own, thief, b.thief, victim, b.victim)
	}
	return b, nil
}

// late says that work of a tenant's members is late since a time.
func (b *Board) late(tenant int, since int64) {
	for _, i := range b.MembersOf(tenant) {
		b.Member(i, MemberOverdue).Store(uint64(since))
		b.Member(i, MemberSeen).Store(uint64(b.Now()))
	}
}

// A Lie is what a session that was taken over writes into the schedule.
type Lie struct {
	Name  string
	again bool // every 200 us; otherwise once a second of the sessions' clock
	tell  func(b *Board)
}

// Lies are all that are known. The first is none.
var Lies = []Lie{
	{"nothing", false, func(*Board) {}},
	{"its own work is late, for ever", true, func(b *Board) { b.late(b.own, 1) }},
	{"its own work is late, for a while", true, func(b *Board) { b.late(b.own, b.Now()-int64(1500*time.Millisecond)) }},
	{"the victim's work is late, for ever", true, func(b *Board) { b.late(b.victim, 1) }},
	{"the victim's work is late, for a while", true, func(b *Board) { b.late(b.victim, b.Now()-int64(1500*time.Millisecond)) }},
	{"the thief's work is not late", true, func(b *Board) { b.late(b.thief, 0) }},
	{"the thief owes nothing", true, func(b *Board) {
		b.Tenant(b.thief, TenantDebt).Store(0)
		b.Tenant(b.thief, TenantDebited).Store(uint64(b.Now()))
	}},
	{"the victim owes a day", false, func(b *Board) {
		b.Tenant(b.victim, TenantDebt).Store(b.Debt(b.victim, b.Now()+int64(24*time.Hour)))
	}},
	{"it owes a day itself", true, func(b *Board) {
		b.Tenant(b.own, TenantDebt).Store(b.Debt(b.own, b.Now()+int64(24*time.Hour)))
	}},
	{"the victim's session is nobody's", false, func(b *Board) {
		for _, i := range b.MembersOf(b.victim) {
			b.Member(i, MemberOwner).Store(0)
		}
	}},
	{"the victim's session is another process", false, func(b *Board) {
		for _, i := range b.MembersOf(b.victim) {
			b.Member(i, MemberOwner).Store(1)
		}
	}},
	{"the victim's session is another lease's", false, func(b *Board) {
		for _, i := range b.MembersOf(b.victim) {
			b.Member(i, MemberTenant).Store(b.Belongs(b.own))
		}
	}},
	{"there are no sessions", false, func(b *Board) { b.Head(StateHigh).Store(0) }},
	{"this is no schedule", false, func(b *Board) {
		b.Head(StateMagic).Store(0)
		b.Head(StateVersion).Store(0)
	}},
	{"the victim has a session that does not exist", false, func(b *Board) {
		i := b.Free()
		b.Member(i, MemberTenant).Store(b.Belongs(b.victim))
		b.Member(i, MemberWant).Store(1)
		b.Member(i, MemberOwner).Store(1)
		b.Head(StateHigh).Store(uint64(max(i+1, int(b.Head(StateHigh).Load()))))
	}},
}

// Told tells a lie until the function that it returns is called.
func (l *Lie) Told(b *Board) (stop func()) {
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for last := int64(0); ; {
			if now := b.Now(); l.again || now-last >= int64(time.Second) {
				l.tell(b)
				last = now
			}
			select {
			case <-over:
				return
			case <-time.After(200 * time.Microsecond):
			}
		}
	}()
	return func() { close(over); <-done }
}
