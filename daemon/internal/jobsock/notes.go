package jobsock

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-hpc/sluice/internal/form"
)

// Notes are empty files, DIR/JOBID, of the jobs that have something of ours on this node,
// a lease or a refusal. The plug-in looks there when the daemon does not answer, and so
// lets a job fail that needs it, and no other. They are a hint: nothing else reads them.
type Notes struct{ dir string }

// NewNotes makes the directory beside the job socket at path.
func NewNotes(path string) (*Notes, error) {
	dir := filepath.Join(filepath.Dir(path), "jobs")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("notes of jobs: %w", err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { // whatever the umask
		return nil, fmt.Errorf("notes of jobs: %w", err)
	}
	return &Notes{dir}, nil
}

// Put notes a job.
func (n *Notes) Put(job string) error {
	if !form.JobID(job).Valid() {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(n.dir, job), os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("note of job %s: %w", job, err)
	}
	return f.Close()
}

// Remove forgets a job.
func (n *Notes) Remove(job string) {
	if form.JobID(job).Valid() {
		_ = os.Remove(filepath.Join(n.dir, job))
	}
}

// Keep forgets all jobs but these.
func (n *Notes) Keep(jobs map[string]bool) {
	entries, _ := os.ReadDir(n.dir)
	for _, e := range entries {
		if !jobs[e.Name()] {
			n.Remove(e.Name())
		}
	}
}
