// Package sandbox confines a session process to computing: the files that it can open by Landlock, the
// system calls that it can make by seccomp.
package sandbox

// A session process goes through it in two steps, because Landlock holds for a thread and what
// it becomes, and the driver must be loaded before its system calls can be refused.
//
//	Files.Enforce   before the driver is loaded, in a process of one thread that matters, which then becomes
//	                the session by exec
//	Load            when the session has its client's socket and before it reads a byte from it, for all
//	                threads
//
// Landlock covers the opening of files. What is handed over as a descriptor, such as the client's socket, the account
// and the schedules, is not affected.

import "fmt"

// Mode says whether a session process is confined.
type Mode string

// Modes of a sandbox.
const (
	Off  Mode = "off"
	Auto Mode = "auto" // where kernel and driver allow it
	On   Mode = "on"   // or no session starts
	Log  Mode = "log"  // only log the system calls that On would refuse
)

// ParseMode reads a mode; the empty text is Off.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case "":
		return Off, nil
	case Off, Auto, On, Log:
		return m, nil
	}
	return Off, fmt.Errorf("sandbox %q: give off, auto, on or log", s)
}

// Files says whether a session of this mode can open only listed files.
func (m Mode) Files() bool { return m == Auto || m == On }
