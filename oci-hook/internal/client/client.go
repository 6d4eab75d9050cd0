// Package client stands before docker, podman and ch-run as users call them: in a job it
// adds what the engine needs to see of the job's lease, and becomes the real client.
// Engines scrub the environment, so without it the user would have to say it. Out of a
// job, and for other commands than run and create, nothing is changed.
package client

import (
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/form"
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

// program is what Go calls this one in all of its files.
const program = "github.com/sluice-hpc/sluice/oci-hook/cmd/sluice-hook"

// spare is a directory that images have and do not use: ch-run makes none in them.
const spare = "/media"

// Engine says which client this program stands for when it is called by the given name:
// sluice-docker and docker are docker's, and so it is with podman.
func Engine(name string) (string, bool) {
	name = strings.TrimPrefix(filepath.Base(name), "sluice-")
	_, ok := engines[name]
	return name, ok
}

// Run becomes the real client; lib tells the host's directory that containers get, and is
// asked in a job alone: elsewhere nothing of ours may keep a client from its work. It
// returns only if it fails.
func Run(name string, args, env []string, lib func() (string, error)) error {
	path, err := find(name, env)
	if err != nil {
		return err
	}
	if dir := leaseDir(env); dir != "" {
		ours, err := lib()
		if err != nil {
			return err
		}
		args = edit(name, args, env, dir, ours)
	}
	err = unix.Exec(path, append([]string{name}, args...), env)
	return fmt.Errorf("%s: %w", path, err)
}

// leaseDir is the directory of the lease whose socket env names. Another socket is the user's own
// business.
func leaseDir(env []string) string {
	socket, _ := request.Getenv(env, request.Variable)
	dir := filepath.Dir(socket)
	if filepath.Base(socket) != "sock" || !filepath.IsAbs(socket) || !form.LeaseID(filepath.Base(dir)).Valid() {
		return ""
	}
	return dir
}

// edit adds the request for the lease in dir. What the user says comes later, and so has
// the last word.
func edit(name string, args, env []string, dir, lib string) []string {
	var add []string
	at := 0
	switch name {
	case "docker": // its daemon hands on the environment alone
		add = []string{"--env", request.Variable + "=" + dir + "/sock"}
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
		if err != nil || !fi.Mode().IsRegular() || os.SameFile(fi, self) || copied(p) || unix.Access(p, unix.X_OK) != nil {
			continue
		}
		return p, nil
	}
	return "", fmt.Errorf("%w: no %s in PATH but sluice-hook under its name; is it installed on this node?", ErrNoClient, name)
}

// copied says whether a file is this program all the same, of any release: two that are not links to one
// would become each other without end.
func copied(path string) bool {
	info, err := buildinfo.ReadFile(path)
	return err == nil && info.Path == program
}
