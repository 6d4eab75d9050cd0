# The OCI hook, and its tests. From the root of the repository:
#
#   make hook         one static program, hook, runtime wrapper and writer of CDI files: build/bin/sluice-hook
#   make hook-check   its tests, with runc, crun, podman, charliecloud and docker of Debian 12, as root: a minute
#
# Nothing is loaded into it at run time: in a container it would be the image's.

HOOK_OUT ?= $(or $(B),build)/bin
GO ?= go

.PHONY: hook hook-check hook-tests hook-cost
hook:
	@mkdir -p $(HOOK_OUT)
	CGO_ENABLED=0 $(GO) build -trimpath -tags netgo,osusergo -ldflags '-s -w' -o $(HOOK_OUT)/sluice-hook ./oci-hook/cmd/sluice-hook

hook-check:
	$(MAKE) hook-tests
	$(MAKE) hook-cost

# Many at once: those with FIFOs wait for most of their time.
hook-tests: all cuda-programs hook
	@! readelf -lW $(HOOK_OUT)/sluice-hook | grep -q INTERP || { echo "sluice-hook is linked dynamically" >&2; exit 1; }
	test/cuda-toolkit.sh smi
	SLUICE_BUILD=$(abspath $(or $(B),build)) $(GO) test -count=1 -timeout 20m -parallel 8 -skip '^TestCost$$' ./oci-hook/...

# Alone: it measures times. With its numbers.
hook-cost: hook
	$(GO) test -count=1 -v -run '^TestCost$$' ./oci-hook/test
