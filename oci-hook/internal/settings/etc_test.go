package settings

import (
	"os"
	"reflect"
	"testing"
)

// The example that a site copies says what holds without it.
func TestExample(t *testing.T) {
	b, err := os.ReadFile("../../../etc/containers/oci-hook.json")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Load(write(t, string(b)))
	if err != nil || !reflect.DeepEqual(s, Default()) {
		t.Errorf("%+v, %v", s, err)
	}
}
