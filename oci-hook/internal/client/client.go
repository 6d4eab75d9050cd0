// Package client stands before docker, podman and ch-run as users call them: in a job it
// adds what the engine needs to see of the job's lease, and becomes the real client.
// Engines scrub the environment, so without it the user would have to say it. Out of a
// job, and for other commands than run and create, nothing is changed.
package client

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/oci-hook/internal/request"
)

// ErrNoClient is wrapped where no client but this program is in PATH.
var ErrNoClient = errors.New("no such client")

// engines are the clients that we know, with their options before the command that take a value.
var engines = map[string][]string{
	"docker": {"config", "c", "context", "H", "host", "l", "log-level", "tlscacert", "tlscert", "tlskey"},
	"podman": {"cgroup-manager", "conmon", "c", "connection", "db-backend", "events-backend", "hooks-dir", "identity", "imagestore", "log-level", "module",
		"namespace", "network-backend", "network-cmd-path", "network-config-dir", "out", "registries-conf", "root", "runroot", "runtime", "runtime-flag", "ssh",
		"storage-driver", "storage-opt", "tmpdir", "url", "volumepath"},
	"ch-run": nil, // all of its options come before the image
}

// spare is a directory that images have and do not use: ch-run makes none in them.
const spare = "/media"

// Engine says which client this program stands for when it is called by the given name:
// sluice-docker and docker are docker's, and so it is with podman.
func Engine(name string) (string, bool) {
	name = strings.TrimPrefix(filepath.Base(name), "sluice-")
	_, ok := engines[name]
	return name, ok
}

// Run becomes the real client; lib is the host's directory that containers get. It
// returns only if it fails.
func Run(name string, args, env []string, lib string) error {
	path, err := find(name, env)
	if err != nil {
		return err
	}
	err = unix.Exec(path, append([]string{name}, Edit(name, args, env, lib)...), env)
	return fmt.Errorf("%s: %w", path, err)
}

// Edit adds the request for the lease whose socket env names. What the user says comes
// later, and so has the last word.
func Edit(name string, args, env []string, lib string) []string {
	socket, _ := request.Getenv(env, request.Variable)
	dir := filepath.Dir(socket)
	if filepath.Base(socket) != "sock" || !filepath.IsAbs(socket) || !request.ValidID(filepath.Base(dir)) {
		return args // not of a lease: the user's own business
	}
	var add []string
	at := 0
	switch name {
	case "docker": // its daemon hands on the environment alone
		add = []string{"--env", request.Variable + "=" + socket}
	case "podman": // of an annotation neither an image nor a program of exec hears
		add = []string{"--annotation", request.Annotation + "=" + filepath.Base(dir)}
	case "ch-run": // it runs no hooks, and hands on the whole environment
		if len(args) == 0 {
			return args
		}
		add = []string{"--bind=" + lib + ":" + spare, "--bind=" + dir + ":" + spare + "/lease", "--set-env=" + request.Variable + "=" + spare + "/lease/sock",
			"--set-env=LD_LIBRARY_PATH=" + list(spare, env, "LD_LIBRARY_PATH", ""), "--set-env=PATH=" + list("", env, "PATH", spare+"/bin")}
	}
	if name != "ch-run" {
		if at = after(args, engines[name]); at < 0 {
			return args
		}
	}
	return slices.Insert(slices.Clone(args), at, add...)
}

// list is the value of a variable with a directory before or after it; nothing in it is empty,
// which would be the directory at hand.
func list(before string, env []string, name, after string) string {
	value, _ := request.Getenv(env, name)
	return strings.Join(strings.FieldsFunc(before+":"+value+":"+after, func(c rune) bool { return c == ':' }), ":")
}

// after is the place behind run or create, which may follow container; -1 without them.
func after(args, withValue []string) int {
	command := false // container was seen
	for i := 0; i < len(args); i++ {
		a := args[i]
		switch {
		case a == "--":
			return -1
		case strings.HasPrefix(a, "-"):
			name, _, has := strings.Cut(strings.TrimLeft(a, "-"), "=")
			if !has && slices.Contains(withValue, name) {
				i++
			}
		case a == "run" || a == "create":
			return i + 1
		case a == "container" && !command:
			command = true
		default:
			return -1
		}
	}
	return -1
}

// find looks for the client in PATH, and passes by what is this program.
func find(name string, env []string) (string, error) {
	self, err := os.Stat("/proc/self/exe")
	if err != nil {
		return "", fmt.Errorf("this program: %w", err)
	}
	path, ok := request.Getenv(env, "PATH")
	if !ok {
		path = "/usr/local/bin:/usr/bin:/bin"
	}
	for dir := range strings.SplitSeq(path, ":") {
		if !filepath.IsAbs(dir) {
			continue // a client out of the directory at hand is nobody's intention
		}
		p := filepath.Join(dir, name)
		fi, err := os.Stat(p)
		if err != nil || !fi.Mode().IsRegular() || os.SameFile(fi, self) || unix.Access(p, unix.X_OK) != nil {
			continue
		}
		return p, nil
	}
	return "", fmt.Errorf("%w: no %s in PATH but sluice-hook under its name; is it installed on this node?", ErrNoClient, name)
}
