// Package mungetest runs a real munged for a test, with a key and a socket of its
// own.
package mungetest

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Start runs a munged whose key is made of seed, and answers its socket. Two with
// one seed believe each other. It ends with the test.
func Start(t testing.TB, seed string) string {
	t.Helper()
	munged, err := exec.LookPath("munged")
	if err != nil {
		if munged, err = exec.LookPath("/usr/sbin/munged"); err != nil {
			t.Fatalf("%v; install the package munge", err)
		}
	}
	// Not t.TempDir: the path of a Unix socket has 107 bytes.
	dir, err := os.MkdirTemp("", "munge")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// The directory of the socket must let everybody in, or munged refuses.
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(dir, "key")
	if err := os.WriteFile(key, bytes.Repeat([]byte(seed+"."), 128), 0o600); err != nil {
		t.Fatal(err)
	}
	socket, log := filepath.Join(dir, "socket"), filepath.Join(dir, "log")
	cmd := exec.Command(munged, "--foreground", "--force", "--num-threads=2", "--socket="+socket, "--key-file="+key,
		"--pid-file="+filepath.Join(dir, "pid"), "--log-file="+log, "--seed-file="+filepath.Join(dir, "seed"))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
		if err == nil {
			_ = c.Close()
			return socket
		}
		select {
		case <-ended:
			t.Fatalf("munged ended: %s", out.String())
		case <-ctx.Done():
			t.Fatalf("munged does not answer: %v: %s", err, out.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
