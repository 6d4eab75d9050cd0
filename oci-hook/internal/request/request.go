// Package request finds out whether a container asks for a lease, and for which.
// Everything here comes from outside and is judged by its form alone; whether the
// lease may be had is for the hook to see and for the daemon to decide.
package request

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Annotation names a lease in a container's specification.
const Annotation = "dev.sluice.lease"

// Variable is the environment's: the shim's own, with the lease socket's path on the host.
const Variable = "SLUICE_SOCKET"

// ErrInvalid is wrapped by every refusal of a request for its form.
var ErrInvalid = errors.New("invalid request")

// Request is what a container asks for.
type Request struct {
	Lease string // as form.ParseLeaseID takes it
	From  string // where it was asked: for messages
	// HostPath: the environment has the socket's path on the host, which the shim
	// prefers to sluice.conf, so the lease has to be at that path as well.
	HostPath bool
}

// Find looks at an argument, the annotations and the environment of a specification.
// It returns nil if none of them asks; an error if one asks for what cannot be. A
// lease's id is random and made for one job, so an image cannot have one in it.
func Find(arg string, annotations map[string]string, env []string, leases string) (*Request, error) {
	var r *Request
	add := func(id, from string) error {
		if _, err := form.ParseLeaseID(id); err != nil {
			return fmt.Errorf("%w: %s: %v", ErrInvalid, from, err)
		}
		if r != nil && r.Lease != id {
			return fmt.Errorf("%w: %s names lease %s, %s names %s; one container has one lease", ErrInvalid, r.From, r.Lease, from, id)
		}
		if r == nil {
			r = &Request{Lease: id, From: from}
		}
		return nil
	}
	if arg != "" {
		if err := add(arg, "--lease"); err != nil {
			return nil, err
		}
	}
	if id, ok := annotations[Annotation]; ok {
		if err := add(id, "annotation "+Annotation); err != nil {
			return nil, err
		}
	}
	path, ok := Getenv(env, Variable)
	rest, ours := strings.CutPrefix(path, leases+"/")
	if !ok || !ours {
		return r, nil // a socket of elsewhere is the user's own business
	}
	id, isSock := strings.CutSuffix(rest, "/sock")
	if !isSock {
		return nil, fmt.Errorf("%w: environment %s=%s; a lease's socket is %s/ID/sock", ErrInvalid, Variable, clip(path), leases)
	}
	if err := add(id, "environment "+Variable); err != nil {
		return nil, err
	}
	r.HostPath = true
	return r, nil
}

// Getenv gives the value that a program in the container sees: runc and crun set the
// variables one after the other, so it is the last one.
func Getenv(env []string, name string) (value string, ok bool) {
	for _, kv := range env {
		if k, v, cut := strings.Cut(kv, "="); cut && k == name {
			value, ok = v, true
		}
	}
	return value, ok
}

// maxDirs bounds what an image can have us look at.
const maxDirs = 64

// LibraryDirs are the directories of the container in which the loader or a program
// would look for a library before or beside ours, by its environment and by habit.
func LibraryDirs(env []string, cwd string) []string {
	var out []string
	seen := map[string]bool{}
	add := func(dir string) {
		if !strings.HasPrefix(dir, "/") {
			dir = cwd + "/" + dir
		}
		dir = filepath.Clean("/" + dir)
		if len(dir) < 4096 && len(out) < maxDirs && !seen[dir] {
			seen[dir] = true
			out = append(out, dir)
		}
	}
	for _, dir := range []string{
		"/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
		"/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/lib",
	} {
		add(dir)
	}
	path, _ := Getenv(env, "LD_LIBRARY_PATH")
	for dir := range strings.FieldsFuncSeq(path, func(c rune) bool { return c == ':' || c == ';' }) {
		add(dir)
	}
	return out
}

func clip(s string) string { return form.Line(s, 80) }
