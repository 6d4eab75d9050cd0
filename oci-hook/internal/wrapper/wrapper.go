// Package wrapper stands before an OCI runtime where an engine has no directory of hooks:
// it adds ours to the specification of a container that asks for a lease, on create and
// run, and becomes the runtime. All other calls pass as they are.
package wrapper

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/sluice-hpc/sluice/internal/safefile"
	"github.com/sluice-hpc/sluice/oci-hook/internal/request"
	"github.com/sluice-hpc/sluice/oci-hook/internal/settings"
)

// maxConfig bounds a specification, in bytes.
const maxConfig = 16 << 20

// ErrSpec is wrapped where a container that asks has a specification that cannot be edited.
var ErrSpec = errors.New("config.json")

// HostPath is the argument of the hook for a container that was asked for by the socket's
// path on the host.
const HostPath = "host-path"

// crunStderr tells crun where the words of hooks go, which it throws away otherwise: with
// runc they are in the engine's error anyway.
const crunStderr = "run.oci.hooks.stderr"

// withValue are the options of runc and crun, before the command, that take a value.
var withValue = map[string]bool{
	"log": true, "log-format": true, "log-level": true, "root": true, "criu": true, "rootless": true, "cgroup-manager": true,
}

// call is what the wrapper has to know of a runtime's arguments.
type call struct{ command, bundle, log string }

// parse reads the arguments of runc and crun.
func parse(args []string) call {
	var c call
	for i := 0; i < len(args); i++ {
		a := args[i]
		if !strings.HasPrefix(a, "-") || a == "-" {
			if c.command != "" {
				continue // the container's name
			}
			c.command = a
			continue
		}
		name, value, has := strings.Cut(strings.TrimLeft(a, "-"), "=")
		next := func() string {
			if has {
				return value
			}
			if i+1 < len(args) {
				i++
				return args[i]
			}
			return ""
		}
		switch {
		case c.command == "" && withValue[name]:
			if v := next(); name == "log" {
				c.log = v
			}
		case c.command != "" && (name == "b" || name == "bundle"):
			c.bundle = next()
		case c.command != "" && (name == "console-socket" || name == "pid-file" || name == "preserve-fds"):
			next()
		}
	}
	return c
}

// Run edits the specification if args create a container that asks, and becomes the
// first of the settings' runtimes. With settings that are broken, which set then is not, only a
// container that asks is not started. It returns only if it fails.
func Run(args []string, set settings.Settings, broken error, hook specs.Hook) error {
	c := parse(args)
	if c.command == "create" || c.command == "run" {
		bundle := c.bundle
		if bundle == "" {
			bundle = "."
		}
		if err := Edit(bundle, set, broken, hook); err != nil {
			tell(c.log, err)
			return err
		}
	}
	for _, path := range set.Runtimes {
		err := unix.Exec(path, append([]string{path}, args...), os.Environ())
		if !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("runtime %s: %w", path, err)
		}
	}
	return fmt.Errorf("no runtime: none of %s is there; name it in %s", strings.Join(set.Runtimes, ", "), settings.Path)
}

// Edit adds the hook to the specification in a bundle, if the container asks and has it not.
func Edit(bundle string, set settings.Settings, broken error, hook specs.Hook) error {
	dir, err := os.OpenFile(bundle, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil // the runtime says it better
	}
	defer dir.Close()
	b, mode, err := read(int(dir.Fd()))
	if err != nil {
		return nil // likewise
	}
	var seen struct {
		Annotations map[string]string `json:"annotations"`
		Process     struct {
			Env []string `json:"env"`
		} `json:"process"`
	}
	if json.Unmarshal(b, &seen) != nil {
		return nil
	}
	r, err := request.Find("", seen.Annotations, seen.Process.Env, set.Leases)
	if r == nil || err != nil {
		return err
	}
	if broken != nil {
		return broken
	}
	if b, err = edit(b, set, hook, r); err != nil {
		return fmt.Errorf("%w: %w", ErrSpec, err)
	}
	if err := safefile.WriteAt(dir, "config.json", b, safefile.How{Mode: mode, Volatile: true}); err != nil {
		return fmt.Errorf("%w: %w", ErrSpec, err)
	}
	return nil
}

// edit keeps what it does not know, byte for byte.
func edit(b []byte, set settings.Settings, hook specs.Hook, r *request.Request) ([]byte, error) {
	spec := map[string]json.RawMessage{}
	if err := json.Unmarshal(b, &spec); err != nil {
		return nil, err
	}
	hooks := map[string]json.RawMessage{}
	if err := object(spec["hooks"], &hooks); err != nil {
		return nil, fmt.Errorf("hooks: %w", err)
	}
	var list []json.RawMessage
	if err := object(hooks["createContainer"], &list); err != nil {
		return nil, fmt.Errorf("hooks: %w", err)
	}
	have := false
	for _, raw := range list {
		var h specs.Hook
		have = have || json.Unmarshal(raw, &h) == nil && h.Path == hook.Path
	}
	if r.HostPath {
		hook.Args = append(append([]string{}, hook.Args...), "--"+HostPath)
	}
	if !have {
		raw, err := json.Marshal(hook)
		if err != nil {
			return nil, err
		}
		list = append(list, raw)
	}
	notes := map[string]json.RawMessage{}
	if err := object(spec["annotations"], &notes); err != nil {
		return nil, fmt.Errorf("annotations: %w", err)
	}
	if err := put(notes, request.Annotation, r.Lease); err != nil {
		return nil, err
	}
	if _, set := notes[crunStderr]; !set && openable("/dev/stderr") {
		if err := put(notes, crunStderr, "/dev/stderr"); err != nil {
			return nil, err
		}
	}
	if r.HostPath {
		// The path on the host may not be there: /run is a tmpfs with some engines.
		process := map[string]json.RawMessage{}
		var env []string
		if err := object(spec["process"], &process); err != nil {
			return nil, fmt.Errorf("process: %w", err)
		}
		if err := object(process["env"], &env); err != nil {
			return nil, fmt.Errorf("process.env: %w", err)
		}
		for i, kv := range env {
			if strings.HasPrefix(kv, request.Variable+"=") {
				env[i] = request.Variable + "=" + set.Socket()
			}
		}
		if err := errors.Join(put(process, "env", env), put(spec, "process", process)); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(put(hooks, "createContainer", list), put(spec, "hooks", hooks), put(spec, "annotations", notes)); err != nil {
		return nil, err
	}
	return json.Marshal(spec)
}

// openable says whether crun could open path; it would not start the container otherwise.
func openable(path string) bool {
	fd, err := unix.Open(path, unix.O_WRONLY|unix.O_APPEND|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err == nil {
		unix.Close(fd)
	}
	return err == nil
}

func object(raw json.RawMessage, v any) error {
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	return json.Unmarshal(raw, v)
}

func put(m map[string]json.RawMessage, key string, v any) error {
	raw, err := json.Marshal(v)
	m[key] = raw
	return err
}

func read(dir int) ([]byte, os.FileMode, error) {
	fd, err := unix.Openat(dir, "config.json", unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, err
	}
	f := os.NewFile(uintptr(fd), "config.json")
	defer f.Close()
	fi, err := f.Stat()
	if err != nil || !fi.Mode().IsRegular() || fi.Size() > maxConfig {
		return nil, 0, fmt.Errorf("%w: not a file of at most %d bytes", ErrSpec, maxConfig)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxConfig))
	return b, fi.Mode().Perm(), err
}

// tell writes the reason where engines look for it: into the runtime's log.
func tell(log string, reason error) {
	if !filepath.IsAbs(log) {
		return
	}
	fd, err := unix.Open(log, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o644)
	if err != nil {
		return
	}
	f := os.NewFile(uintptr(fd), filepath.Base(log))
	defer f.Close()
	line, err := json.Marshal(map[string]string{"level": "error", "msg": reason.Error(), "time": time.Now().UTC().Format(time.RFC3339)})
	if err == nil {
		_, _ = f.Write(append(line, '\n'))
	}
}
