package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A lease of sluice run within a job takes the place of the job's, for containers too.
func TestContainersOfRun(t *testing.T) {
	dir := t.TempDir()
	id := strings.Repeat("ab", 16)
	lease := filepath.Join(dir, id)
	if err := os.Mkdir(lease, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"containers.conf", "apptainer.sh"} {
		if err := os.WriteFile(filepath.Join(lease, f), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	job := []string{
		"HOME=/home/alice", "LD_LIBRARY_PATH=/usr/lib/sluice:/opt/lib", "SLUICE_SOCKET=/run/1/sock", "SLUICE_LEASE_ID=1", "CONTAINERS_CONF_OVERRIDE=/run/1/containers.conf",
		"APPTAINER_BINDPATH=/run/1:/run/1:ro,/scratch", "SINGULARITY_BINDPATH=/run/1:/run/1:ro", "APPTAINERENV_SLUICE_SOCKET=/changed",
		"SLUICE_ENV=prepend LD_LIBRARY_PATH=/usr/lib/sluice|set SLUICE_SOCKET=/run/1/sock|set SLUICE_LEASE_ID=1|set CONTAINERS_CONF_OVERRIDE=/run/1/containers.conf|" +
			"bind APPTAINER_BINDPATH=/run/1:/run/1:ro|bind SINGULARITY_BINDPATH=/run/1:/run/1:ro|set APPTAINERENV_SLUICE_SOCKET=/run/1/sock|nonsense||",
	}
	bare := withoutJob(job)
	if want := []string{"APPTAINERENV_SLUICE_SOCKET=/changed", "APPTAINER_BINDPATH=/scratch", "HOME=/home/alice", "LD_LIBRARY_PATH=/opt/lib"}; !slices.Equal(sorted(bare), want) {
		t.Errorf("%q", bare)
	}
	o := &runOptions{}
	env := o.environ(job, "/lib/sluice", &heldLease{id: id, path: lease + "/sock"})
	for name, want := range map[string]string{
		"HOME": "/home/alice", "LD_LIBRARY_PATH": "/lib/sluice:/opt/lib", "SLUICE_SOCKET": lease + "/sock", "SLUICE_LEASE_ID": id,
		"CONTAINERS_CONF_OVERRIDE": lease + "/containers.conf", "APPTAINERENV_SLUICE_SOCKET": lease + "/sock",
		"APPTAINER_BINDPATH":   "/lib/sluice:/lib/sluice:ro," + lease + ":" + lease + ":ro," + lease + "/apptainer.sh:/.singularity.d/env/95-sluice.sh:ro,/scratch",
		"SINGULARITY_BINDPATH": "/lib/sluice:/lib/sluice:ro," + lease + ":" + lease + ":ro," + lease + "/apptainer.sh:/.singularity.d/env/95-sluice.sh:ro",
	} {
		if got, _ := getenv(env, name); got != want {
			t.Errorf("%s=%s, want %s", name, got, want)
		}
	}
	// And what it set is undone by the next.
	if again := withoutJob(env); !slices.Equal(sorted(again), []string{"APPTAINER_BINDPATH=/scratch", "HOME=/home/alice", "LD_LIBRARY_PATH=/opt/lib"}) {
		t.Errorf("%q", again)
	}
}

func sorted(env []string) []string {
	env = slices.Clone(env)
	slices.Sort(env)
	return env
}
