package e2e

import (
	"os"
	"path/filepath"
	"testing"
)

// TestOffload: programs that GCC compiles for the GPU by OpenMP and OpenACC. libgomp's plug-in links their code at run
// time, frees memory in callbacks if it may, and ends the program if the GPU cannot be used.
func TestOffload(t *testing.T) {
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		cache = built("cache")
	}
	plugin, err := filepath.Glob(filepath.Join(cache, "gcc-offload/usr/lib/x86_64-linux-gnu/libgomp-plugin-nvptx.so.1"))
	if err != nil || len(plugin) != 1 {
		t.Fatalf("no libgomp plug-in in %s; run test/gcc-offload.sh", cache)
	}
	for _, network := range []string{"tcp", "unix"} {
		w := startWorker(t, workerOptions{network: network, gpuMem: "8G", mem: "6G"}) // OpenMP has a stack for each thread
		for _, kind := range []string{"omp", "acc"} {
			t.Run(network+"-"+kind, func(t *testing.T) {
				r := w.run(runOptions{env: []string{
					"LD_LIBRARY_PATH=" + filepath.Dir(plugin[0]), "OMP_TARGET_OFFLOAD=MANDATORY", "ACC_DEVICE_TYPE=nvidia",
				}}, built("test/offload-"+kind))
				check(t, r, "offload: "+kind+", on the host 0, sum 4499500\nPASS\n")
			})
		}
	}
}
