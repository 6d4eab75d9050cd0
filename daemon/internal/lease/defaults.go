package lease

import "time"

// Defaults of sluice.yaml that owner, host and data also use where their caller, a test, sets nothing.
const (
	DefaultReserve     = 15 * time.Second // lease.reserve
	DefaultRenew       = 10 * time.Second // lease.renew
	DefaultSilence     = 4 * time.Minute  // lease.silence
	DefaultTombstone   = time.Hour        // lease.tombstone
	DefaultMaxPerGPU   = 64               // lease.max_per_gpu
	DefaultMaxSessions = 64               // session.max_per_lease
	DefaultTicket      = 10 * time.Second // session.ticket
	DefaultKeepAlive   = 10 * time.Second // session.keepalive
)
