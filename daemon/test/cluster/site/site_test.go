package site

import "testing"

func TestYAML(t *testing.T) {
	got := YAML(map[string]string{"node": "a", "owner.warm": "2", "pools.default.owners": `["b=c:1"]`, "pools.other.owners": "[]", "owner.poll": "1s", "pools.default.place": "spread"})
	want := `node: a
owner:
  poll: 1s
  warm: 2
pools:
  default:
    owners: ["b=c:1"]
    place: spread
  other:
    owners: []
`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
