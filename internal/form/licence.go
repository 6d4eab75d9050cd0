package form

import "strings"

// Gres is our generic resource in Slurm, and how the names of all our licences begin.
const Gres = "rgpu"

// Policies are what a user may write for what becomes of a lease's share of time.
var Policies = []string{"best-effort", "equal", "equal-lend", "fixed", "fixed-lend"}

// IsLicence says whether a licence of Slurm's is one of ours.
func IsLicence(name string) bool { return strings.HasPrefix(name, Gres) }

// HasLicence says whether one of ours is in a list as Slurm writes it, whatever its count:
// "matlab:2,rgpu:50", with alternatives "matlab|(rgpu:50)".
func HasLicence(list string) bool {
	for name := range strings.FieldsFuncSeq(list, func(r rune) bool { return strings.ContainsRune(",;|()[] \t", r) }) {
		if IsLicence(name) {
			return true
		}
	}
	return false
}
