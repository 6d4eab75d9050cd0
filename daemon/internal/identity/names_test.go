package identity

import (
	"testing"
	"time"
)

// Every name that is a node's works with a CA, those that look like an address too.
func TestNames(t *testing.T) {
	s := newSite(t)
	owner := mustNew(t, s.config(t, "gpu01", time.Now()))
	for _, node := range []string{"10.0.0.1", "GPU_1-2", "node-", "a..b", "node01.", "1", "0x7f.1"} {
		i, err := New(s.config(t, node, time.Now()))
		if err != nil {
			t.Errorf("%s: %v", node, err)
			continue
		}
		if o := meet(t, owner, i, node); o.client != nil || o.server != nil {
			t.Errorf("%s as owner: %v, %v", node, o.client, o.server)
		}
		if o := meet(t, i, owner, "gpu01"); o.client != nil || o.host != node {
			t.Errorf("%s as host: %+v", node, o)
		}
	}
}
