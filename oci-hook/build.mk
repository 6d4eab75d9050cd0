# The OCI hook, and its tests. From the root of the repository:
#
#   make hook         one static program, hook, runtime wrapper and writer of CDI files: build/bin/sluice-hook
#   make hook-check   its tests, with the runc and crun of this machine, as root
#
# Nothing is loaded into it at run time: in a container it would be the image's.

HOOK_OUT ?= $(or $(B),build)/bin
GO ?= go

.PHONY: hook hook-check
hook:
	@mkdir -p $(HOOK_OUT)
	CGO_ENABLED=0 $(GO) build -trimpath -tags netgo,osusergo -ldflags '-s -w' -o $(HOOK_OUT)/sluice-hook ./oci-hook/cmd/sluice-hook

hook-check: all cuda-programs hook
	@! readelf -lW $(HOOK_OUT)/sluice-hook | grep -q INTERP || { echo "sluice-hook is linked dynamically" >&2; exit 1; }
	SLUICE_BUILD=$(abspath $(or $(B),build)) $(GO) test -count=1 ./oci-hook/...
