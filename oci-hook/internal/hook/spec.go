package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	// maxState and maxConfig bound what is read, in bytes.
	maxState  = 1 << 20
	maxConfig = 16 << 20
)

// ErrTooLarge is wrapped where an input is larger than any honest one.
var ErrTooLarge = errors.New("too large")

// state is what a runtime writes to a hook's standard input.
type state struct {
	specs.State
	Root string `json:"root"` // crun's
}

// config is what the hook needs of a bundle's config.json.
type config struct {
	Annotations map[string]string `json:"annotations"`
	Process     struct {
		Env  []string   `json:"env"`
		Cwd  string     `json:"cwd"`
		User specs.User `json:"user"`
	} `json:"process"`
	Root struct {
		Path string `json:"path"`
	} `json:"root"`
}

func readState(r io.Reader) (state, error) {
	var s state
	b, err := readAll(r, maxState)
	if err == nil {
		err = json.Unmarshal(b, &s)
	}
	if err != nil {
		return s, fmt.Errorf("container's state on standard input: %w", err)
	}
	return s, nil
}

// readConfig reads the bundle's specification. It belongs to the engine; even so, nothing
// but a file of a bounded size is read.
func readConfig(bundle string) (config, error) {
	var c config
	path := filepath.Join(bundle, "config.json")
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if fi, err := f.Stat(); err != nil {
		return c, err
	} else if !fi.Mode().IsRegular() {
		return c, fmt.Errorf("%s: not a file", path)
	}
	b, err := readAll(f, maxConfig)
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func readAll(r io.Reader, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%w: more than %d bytes", ErrTooLarge, limit)
	}
	return b, err
}

// rootPath is the container's root as the runtime has it. crun's state repeats what
// config.json says, be it relative or not.
func rootPath(s state, c config) (string, error) {
	path := s.Root
	if path == "" {
		path = c.Root.Path
	}
	switch {
	case path == "":
		return "", errors.New("the container's root is not known: neither the state nor config.json names it")
	case filepath.IsAbs(path):
		return path, nil
	}
	return filepath.Join(s.Bundle, path), nil
}
