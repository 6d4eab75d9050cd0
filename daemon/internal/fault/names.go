// Generated from the daemon's sources by go generate; do not edit.

package fault

var names = []string{
	"confirm-1-checked",
	"grant-1-written",
	"grant-2-audited",
	"open-1-offered",
	"open-2-started",
	"open-3-audited",
	"reclaim-1-found",
	"release-0-checked",
	"release-1-marked",
	"release-2-killed",
	"release-3-freed",
	"release-4-audited",
	"release-5-answer",
	"renew-1-noted",
	"reserve-1-checked",
	"reserve-2-written",
	"reserve-3-answer",
}
