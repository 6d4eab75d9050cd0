package cli

import (
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-hpc/sluice/daemon/internal/containers"
	"github.com/sluice-hpc/sluice/daemon/internal/lease"
	"github.com/sluice-hpc/sluice/daemon/internal/rpc"
)

// Variables that lead containers to the lease of sluice run, as the plug-in sets them in a job.

// record is the variable by which the plug-in and sluice run undo what was set around them.
const record = "SLUICE_ENV"

func getenv(env []string, name string) (string, bool) {
	for _, kv := range env {
		if k, v, ok := strings.Cut(kv, "="); ok && k == name {
			return v, true
		}
	}
	return "", false
}

func setenv(env []string, name, value string) []string {
	return append(unsetenv(env, name), name+"="+value)
}

func unsetenv(env []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
}

// withoutJob removes from env what a surrounding job, or another sluice run, has set:
// containers would get two leases.
func withoutJob(env []string) []string {
	r, _ := getenv(env, record)
	for line := range strings.SplitSeq(r, "|") {
		verb, rest, _ := strings.Cut(line, " ")
		name, value, ok := strings.Cut(rest, "=")
		old, has := getenv(env, name)
		if !ok || !has {
			continue
		}
		separator := map[string]string{"prepend": ":", "bind": ","}[verb]
		left := ""
		switch {
		case separator != "":
			left = strings.Join(slices.DeleteFunc(strings.Split(old, separator), func(item string) bool { return item == value }), separator)
		case verb != "set" || old != value:
			continue
		}
		if env = unsetenv(env, name); left != "" {
			env = setenv(env, name, left)
		}
	}
	return unsetenv(env, record)
}

// withContainers adds the variables that lead containers to the lease. The daemon has written
// the files that they name.
func withContainers(env []string, lib string, l granted) []string {
	h, ok := l.(*heldLease)
	if !ok {
		return env // the lease of a worker started by hand, for which there are no such files
	}
	dir := filepath.Dir(h.path)
	f := containers.New(containers.Config{Leases: filepath.Dir(dir), Lib: lib})
	ops := append([]rpc.EnvOp{{Name: "SLUICE_LEASE_ID", Value: h.id}}, f.Env(lease.Lease{ID: h.id})...)
	for _, o := range ops {
		old, _ := getenv(env, o.Name)
		env = setenv(env, o.Name, o.Apply(old))
	}
	all := append([]rpc.EnvOp{{Prepend: true, Name: "LD_LIBRARY_PATH", Value: lib}, {Name: "SLUICE_SOCKET", Value: h.path}}, ops...)
	if text, err := rpc.EnvText(all); err == nil && !strings.Contains(text, "|") {
		env = setenv(env, record, strings.ReplaceAll(text, "\n", "|"))
	}
	return env
}
