// Package figures writes the raw logs of measurements that are programs in Go: the header that bench/rawlog.py
// prints, then one line of JSON for each figure.
package figures

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Figure is every sample of one measurement, and what was asked of it.
type Figure struct {
	Name    string    `json:"name"`
	Unit    string    `json:"unit"`
	Wanted  string    `json:"wanted"` // as "median < 20", or "-"
	How     string    `json:"how"`
	Samples []float64 `json:"samples"`
}

// Log is a raw log that is being written.
type Log struct {
	file   *os.File
	header []byte
}

// Create makes the log and writes its header. root is the repository's; about are fields that rawlog.py cannot know,
// as "gpu=simulated".
func Create(root, path string, about ...string) (*Log, error) {
	header, err := exec.Command("python3", append([]string{filepath.Join(root, "bench", "rawlog.py")}, about...)...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		return nil, fmt.Errorf("bench/rawlog.py: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	l := &Log{file: f, header: header}
	if _, err := f.Write(header); err != nil {
		_ = f.Close()
		return nil, err
	}
	return l, nil
}

// Header is the log's first line, for other files of the same measurement.
func (l *Log) Header() []byte { return l.header }

// Write adds a figure.
func (l *Log) Write(f Figure) error {
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	_, err = l.file.Write(append(text, '\n'))
	return err
}

// Close ends the log.
func (l *Log) Close() error { return l.file.Close() }
