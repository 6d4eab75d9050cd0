package test

import (
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// inNamespace puts the container into a user namespace where 0 is the given user of the host.
func (b *box) inNamespace(host, size uint32) {
	b.spec.Linux.Namespaces = append(b.spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	m := []specs.LinuxIDMapping{{ContainerID: 0, HostID: host, Size: size}}
	b.spec.Linux.UIDMappings, b.spec.Linux.GIDMappings = m, m
}

// An unprivileged user's container, of a lease of that user's.
func TestRootless(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		mine := strings.Repeat("ab", 16)
		b.user = 1000
		b.lease(mine, 1000)
		b.spec.Annotations["dev.sluice.lease"] = mine
		b.inNamespace(1000, 1)
		b.wants(b.must(), "uid=0 "+served)
	})
}

// Neither another user's lease nor root's is brought into it, whatever it asks.
func TestRootlessOfOthers(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		b.user = 1000
		b.inNamespace(1000, 1)
		out, err := b.run()
		if err == nil {
			t.Fatalf("it started: %s", out)
		}
		b.wants(out, "belongs to a user who is not in this container's user namespace")
	})
}

// Root's engine with a user namespace (docker userns-remap): the daemon would not serve it, and so it is said.
func TestRemapped(t *testing.T) {
	each(t, func(t *testing.T, b *box) {
		sh(t, `chown -hR 100000:100000 "$1"`, b.root)
		b.inNamespace(100000, 65536)
		out, err := b.run()
		if err == nil {
			t.Fatalf("it started: %s", out)
		}
		b.wants(out, "belongs to a user who is not in this container's user namespace")
	})
}
