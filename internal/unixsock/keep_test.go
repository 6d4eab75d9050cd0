package unixsock

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"
)

// TestKeep: a removed socket is made again with its mode; what somebody else has put there is left alone; an error is told once.
func TestKeep(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "sock")
	told := make(chan error, 100)
	k, err := keep(path, How{Mode: 0o666, Alone: true}, func(err error) { told <- err }, 5*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = k.Close() })
	var served atomic.Int64
	ended := make(chan error, 1)
	go func() {
		for {
			c, err := k.Accept()
			if err != nil {
				ended <- err
				return
			}
			served.Add(1)
			_ = c.Close()
		}
	}()
	connects := func() {
		t.Helper()
		before := served.Load()
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Read(make([]byte, 1)); err == nil || served.Load() != before+1 {
			t.Fatalf("read: %v, %d connections served", err, served.Load()-before)
		}
	}
	next := func() error {
		t.Helper()
		select {
		case err := <-told:
			return err
		case <-time.After(10 * time.Second):
			t.Fatal("nothing was told")
			return nil
		}
	}
	connects()
	for range 3 {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := next(); err != nil {
			t.Fatal(err)
		}
		if m, _, _ := mode(t, path); m != os.ModeSocket|0o666 {
			t.Errorf("mode %v", m)
		}
		connects()
	}
	// Without the directory there is an error, once, and then the socket again.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := next(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the directory: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := next(); err != nil {
		t.Errorf("told again: %v", err)
	}
	connects()
	// Another listener has taken the path: it stays.
	other := listen(t, path, How{Mode: 0o600})
	if err := k.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := k.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed twice: %v", err)
	}
	if m, _, _ := mode(t, path); m != os.ModeSocket|0o600 {
		t.Errorf("the other's socket has mode %v", m)
	}
	_ = other.Close()
}
