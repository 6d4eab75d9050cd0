package usernames

import (
	"os/user"
	"strconv"
	"testing"
	"time"
)

// A name is asked for once, a missing one too, and a slow answer holds nobody up who asks for another user.
func TestName(t *testing.T) {
	asked := map[string]int{}
	slow, answer := make(chan bool), make(chan bool)
	old := lookup
	defer func() { lookup = old }()
	lookup = func(uid string) (*user.User, error) {
		if uid == "3" {
			slow <- true
			<-answer
			return &user.User{Username: "carol"}, nil
		}
		asked[uid]++
		if uid == "1" {
			return &user.User{Username: "alice"}, nil
		}
		n, _ := strconv.Atoi(uid)
		return nil, user.UnknownUserIdError(n)
	}
	var n Names
	for range 3 {
		if a, b := n.Name(1), n.Name(2); a != "alice" || b != "2" {
			t.Errorf("%q, %q", a, b)
		}
	}
	if asked["1"] != 1 || asked["2"] != 1 {
		t.Errorf("asked %v", asked)
	}
	done := make(chan string)
	go func() { done <- n.Name(3) }()
	<-slow
	if a := n.Name(1); a != "alice" {
		t.Errorf("beside a slow answer: %q", a)
	}
	answer <- true
	if c := <-done; c != "carol" {
		t.Errorf("the slow answer: %q", c)
	}
	n.Age = time.Nanosecond
	time.Sleep(time.Microsecond)
	if n.Name(1); asked["1"] != 2 {
		t.Errorf("an old name was asked for %d times", asked["1"])
	}
}
