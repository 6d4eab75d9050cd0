//go:build !faults

package fault

// Enabled says whether this program has fault points.
const Enabled = false

// Point is a step named name; in this build it does nothing.
func Point(string) {}
