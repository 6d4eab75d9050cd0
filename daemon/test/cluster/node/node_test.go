package node

import (
	"context"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

func init() {
	Role("hostname", func(args []string) error {
		h, err := os.Hostname()
		if err != nil {
			return err
		}
		_, err = os.Stdout.WriteString(h + " " + strings.Join(args, ","))
		return err
	})
}

func TestNodes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root for namespaces")
	}
	n, err := NewNetwork(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	a, err := n.Add("a", "/run", "/var/lib/sluice")
	if err != nil {
		t.Fatal(err)
	}
	b, err := n.Add("b", "/run")
	if err != nil {
		t.Fatal(err)
	}
	out, err := a.Run(ctx, a.Role("hostname", "x", "y"))
	if err != nil || out != "a x,y" {
		t.Fatalf("%q, %v", out, err)
	}
	if _, err := a.Run(ctx, Command{Argv: []string{"bash", "-c", "touch /run/here; </dev/tcp/" + b.Addr + "/1"}}); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a port of b where nobody listens: %v", err)
	}
	if _, err := os.Stat(a.Path("/run/here")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(b.Path("/run/here")); err == nil {
		t.Error("the nodes share /run")
	}
	p, err := b.Start(Command{Argv: []string{"sleep", "100"}, UID: 1234, GID: 1234})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(ctx); err == nil || p.Status() != 137 {
		t.Errorf("%v, status %d", err, p.Status())
	}
}
