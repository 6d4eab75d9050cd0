// Package usernames finds the names of this machine's users. A directory server on the network may be
// slow to ask, so answers are remembered.
package usernames

import (
	"os/user"
	"strconv"
	"sync"
	"time"
)

// Names remembers the names of users. The zero value is ready, and may be used by several goroutines.
type Names struct {
	// Age is how long a name is remembered; 0 for ever.
	Age time.Duration

	mu    sync.Mutex
	known map[uint32]entry
}

type entry struct {
	name string
	at   time.Time
}

// lookup is replaced by tests.
var lookup = user.LookupId

// Name returns the name of a user, or the number where there is none. It waits for the directory
// server without holding up callers that ask for other users.
func (n *Names) Name(uid uint32) string {
	n.mu.Lock()
	e, ok := n.known[uid]
	n.mu.Unlock()
	if ok && (n.Age == 0 || time.Since(e.at) < n.Age) {
		return e.name
	}
	number := strconv.FormatUint(uint64(uid), 10)
	e = entry{number, time.Now()}
	if who, err := lookup(number); err == nil {
		e.name = who.Username
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.known == nil {
		n.known = make(map[uint32]entry)
	}
	n.known[uid] = e
	return e.name
}
