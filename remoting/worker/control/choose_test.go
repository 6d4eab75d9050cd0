package control

import (
	"errors"
	"strings"
	"testing"

	"github.com/sluice-hpc/sluice/remoting/worker/sandbox"
)

// A driver that does not work in the sandbox costs a site its sandbox, and nothing else, unless the site demands one.
func TestChoose(t *testing.T) {
	refused := errors.New("cuInit returned 999")
	good, bad := &Facts{Compiled: []int{0, 0}}, &Facts{Compiled: []int{0, 221}}
	answer := func(f *Facts, err error) func() (*Facts, error) { return func() (*Facts, error) { return f, err } }
	for _, c := range []struct {
		name            string
		mode            sandbox.Mode
		inside, outside func() (*Facts, error)
		want            sandbox.Mode
		why, err        string
	}{
		{"off", sandbox.Off, nil, answer(good, nil), sandbox.Off, "", ""},
		{"log", sandbox.Log, nil, answer(good, nil), sandbox.Log, "", ""},
		{"works", sandbox.Auto, answer(good, nil), nil, sandbox.Auto, "", ""},
		{"works and is demanded", sandbox.On, answer(good, nil), nil, sandbox.On, "", ""},
		{"fails", sandbox.Auto, answer(nil, refused), answer(good, nil), sandbox.Off, "999", ""},
		{"fails and is demanded", sandbox.On, answer(nil, refused), nil, sandbox.On, "", "999"},
		{"fails anyway", sandbox.Auto, answer(nil, refused), answer(nil, refused), sandbox.Off, "", "999"},
		{"does not compile", sandbox.Auto, answer(bad, nil), answer(good, nil), sandbox.Off, "221", ""},
		{"does not compile and is demanded", sandbox.On, answer(bad, nil), nil, sandbox.On, "221", ""},
		{"compiles nothing anyway", sandbox.Auto, answer(bad, nil), answer(bad, nil), sandbox.Auto, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, mode, why, err := Choose(c.mode, func(m sandbox.Mode) (*Facts, error) {
				if m.Files() {
					return c.inside()
				}
				return c.outside()
			})
			if why != nil && errors.Is(why, sandbox.ErrNoLandlock) && c.why == "" {
				why = nil // of a kernel without it
			}
			if mode != c.want || !is(why, c.why) || !is(err, c.err) {
				t.Errorf("%s, why %v, error %v", mode, why, err)
			}
		})
	}
}

// is says whether an error has a text; "" is none.
func is(err error, text string) bool {
	return (err == nil) == (text == "") && (err == nil || strings.Contains(err.Error(), text))
}
