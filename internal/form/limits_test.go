package form_test

import (
	"testing"

	"github.com/sluice-hpc/sluice/internal/form"
	"github.com/sluice-hpc/sluice/remoting/worker/account"
)

// What is granted can be used: a worker's account has room for every device of a lease.
func TestMaxDevices(t *testing.T) {
	if account.MaxDevices != form.MaxDevices {
		t.Errorf("a lease has up to %d fractions, and a worker's account %d devices", form.MaxDevices, account.MaxDevices)
	}
}
