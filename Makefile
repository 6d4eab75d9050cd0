# Sluice: build, test, demo. `make help` lists what there is.
#
# Everything built lands under build/. Parts in C bring a build.mk of their own, with a target for what
# they build (shim, simgpu) and one for its tests (shim-check, simgpu-check), the latter also under sanitizers.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

B := build
GO ?= go
CC := gcc
CXX := g++
FUZZTIME ?= 60s
CUDA ?= 11.8
# The commit that everything is built from, with -dirty if the tree differs from it. All programs and both shims say it.
# build/version carries it to a machine that has this tree without its history.
VERSION := $(shell git describe --always --dirty --abbrev=12 2>/dev/null || cat $(B)/version 2>/dev/null || echo unknown)
VERSION_FILE := $(B)/version
VERSION_FLAG := -X github.com/sluice-hpc/sluice/remoting/version.Commit=$(VERSION)
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.1
# The race detector keeps a process that ends while it has other threads for a second, in which they may still race. The tests
# make thousands of processes that are done: a twentieth of it.
export GORACE ?= atexit_sleep_ms=50
export SLUICE_CACHE ?= $(CURDIR)/$(B)/cache
# Programs and tests are compiled alike, so that each package is compiled once for both. `make lint` vets everything; go test
# would vet it all again.
export GOFLAGS := $(strip $(filter-out -trimpath -vet=%,$(shell $(GO) env GOFLAGS 2>/dev/null)) -trimpath -vet=off)

# Neither where the tree lies nor the machine is to be seen in what is built.
CFLAGS_BASE := -ffile-prefix-map=$(CURDIR)=. -std=gnu11 -Wall -Wextra -Werror -fvisibility=hidden -fPIC -pthread
CFLAGS ?= -O2 -g

.PHONY: all
all: shim simgpu simverbs spank go-bins hook

include $(sort $(wildcard remoting/*/build.mk)) spank/build.mk oci-hook/build.mk

# Its time stamp changes only if the commit does.
.PHONY: version force
version: $(VERSION_FILE)
$(VERSION_FILE): force
	@mkdir -p $(@D)
	@[ "$$(cat $@ 2>/dev/null)" = '$(VERSION)' ] || echo '$(VERSION)' >$@

# --- programs in Go ---

.PHONY: go-bins
go-bins: $(VERSION_FILE) | $(B)/bin
	$(GO) build -trimpath -buildvcs=false -ldflags '$(VERSION_FLAG)' -o $(B)/bin/ ./daemon/cmd/... ./remoting/worker/cmd/sluice-worker ./bench/relay ./test/slurm/cmd/slurmlab

# The client alone, which needs gcc and Go, and its installation: make install-client PREFIX=/opt/sluice. Recipes in etc/spack and
# etc/easybuild call it. Without PREFIX nothing is built.
.PHONY: client install-client
client: shim $(VERSION_FILE) | $(B)/bin
	$(GO) build -trimpath -buildvcs=false -ldflags '$(VERSION_FLAG)' -o $(B)/bin/ ./daemon/cmd/sluice

install-client: $(if $(PREFIX),client)
	BUILD=$(B) etc/packages/client.sh "$(or $(PREFIX),$(error say PREFIX=DIR))"

# For bench/prebuild.sh: a relay that needs no C library, the worker with a switch for its turns, and what steals in gpu-shares.sh.
.PHONY: prebuilt
prebuilt: go-bins $(B)/test/tenant-kind2.so
	mkdir -p $(B)/shares
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(B)/shares/liar ./bench/liar
	strip --strip-unneeded -o $(B)/shares/kind2.so $(B)/test/tenant-kind2.so
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(B)/bin/relay ./bench/relay
	$(GO) build -trimpath -ldflags '-s -w $(VERSION_FLAG)' -tags gateswitch -o $(B)/switch/ ./remoting/worker/cmd/sluice-worker

$(B)/bin $(B)/test:
	mkdir -p $@

# --- code generated from the API table and the wire table ---

# Man pages and shell completions, made from the command line's own source.
.PHONY: man completions
man: go-bins
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(B)/bin/sluice man $(B)/man
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) etc/packages/man.sh $(B)/bin $(B)/man

completions: go-bins
	mkdir -p $(B)/completion
	for s in bash zsh fish; do $(B)/bin/sluice completion $$s >$(B)/completion/sluice.$$s; done

# Packages for each role, deb and rpm, and for each release of Slurm whose headers SLURM_PREFIXES has. What writes them is built once.
NFPM_MODULE := github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.4
NFPM := $(SLUICE_CACHE)/nfpm-v2.43.4/nfpm
SLURM_PREFIXES ?= $(if $(wildcard /usr/include/slurm/spank.h),/usr)
.PHONY: packages test-packages
packages: all $(NFPM)
	for p in $(SLURM_PREFIXES); do $(MAKE) spank-release SLURM_PREFIX=$$p; done
	NFPM=$(NFPM) BUILD=$(B) etc/packages/pack.sh $(B)/packages

$(NFPM):
	GOBIN=$(@D) $(GO) install -trimpath $(NFPM_MODULE)

# Installed, upgraded and removed in a Debian 12 of their own; as root.
test-packages: all $(NFPM)
	NFPM=$(NFPM) BUILD=$(B) etc/packages/test.sh

.PHONY: generate check-generated
generate:
	$(GO) run ./remoting/api/cmd/apigen

check-generated:
	$(GO) run ./remoting/api/cmd/apigen -check

# --- CUDA test programs: the compiler comes from test/cuda-toolkit.sh ---

CUDA_SRC := $(filter-out twolibs separate nested nocode,$(basename $(notdir $(wildcard test/cuda/*.cu))))
CUDA_OUT := $(B)/test/cuda-$(CUDA)
CUDA_HOME := $(SLUICE_CACHE)/cuda-$(CUDA)
NVCC := $(CUDA_HOME)/bin/nvcc
# From the oldest architecture of the compiler to the H200, and PTX of the newest for what comes after.
CUDA_OLDEST := $(if $(filter 13.%,$(CUDA)),75,70)
NVCC_FLAGS := -O2 -std=c++14 -cudart static -Xcompiler -Wall,-Wno-unused-function \
	-gencode arch=compute_$(CUDA_OLDEST),code=sm_$(CUDA_OLDEST) -gencode arch=compute_80,code=sm_80 \
	-gencode arch=compute_90,code=[sm_90,compute_90]
ifneq ($(filter 13.%,$(CUDA)),)
NVCC_FLAGS := $(subst c++14,c++17,$(NVCC_FLAGS))
endif

.PHONY: cuda-toolkit cuda-programs
cuda-toolkit: $(NVCC)
$(NVCC):
	test/cuda-toolkit.sh $(CUDA)

cuda-programs: $(addprefix $(CUDA_OUT)/,$(CUDA_SRC) twolibs separate separate-ptx separate-part nested nocode) $(addprefix $(B)/test/,nvml agent randomcalls rarecalls copies upload bulk background content locked twins.so)

$(CUDA_OUT):
	mkdir -p $@

# Link only what is used of the runtime: its symbols stay inside each object.
$(CUDA_OUT)/%: test/cuda/%.cu test/cuda/check.h test/cuda/driver.h test/cuda/graphs.h $(NVCC) | $(CUDA_OUT)
	$(NVCC) $(NVCC_FLAGS) -o $@ $<

$(CUDA_OUT)/libtwo%.so: test/cuda/twolibs.cu test/cuda/check.h $(NVCC) | $(CUDA_OUT)
	$(NVCC) $(NVCC_FLAGS) -DLIB=$* -shared -Xcompiler -fPIC,-fvisibility=hidden -Xlinker --exclude-libs,ALL -o $@ $<

$(CUDA_OUT)/twolibs: test/cuda/twolibs.cu test/cuda/check.h $(CUDA_OUT)/libtwo1.so $(CUDA_OUT)/libtwo2.so
	$(NVCC) $(NVCC_FLAGS) -Xlinker --exclude-libs,ALL -Xlinker -rpath,'$$ORIGIN' -o $@ $< -L$(CUDA_OUT) -ltwo1 -ltwo2

# Separately compiled, with code for each GPU; with PTX alone, which the driver links; and with linked code for the
# oldest alone beside the objects' PTX.
CUDA_SEPARATE := $(filter-out -gencode% arch=%,$(NVCC_FLAGS)) -rdc=true
CUDA_FOR_separate := $(filter -gencode% arch=%,$(NVCC_FLAGS))
CUDA_FOR_separate-ptx := -gencode arch=compute_80,code=compute_80
CUDA_FOR_separate-part := -gencode arch=compute_$(CUDA_OLDEST),code=[sm_$(CUDA_OLDEST),compute_$(CUDA_OLDEST)]

$(CUDA_OUT)/separate $(CUDA_OUT)/separate-ptx $(CUDA_OUT)/separate-part: test/cuda/separate.cu test/cuda/check.h $(NVCC) | $(CUDA_OUT)
	for part in 0 1 2; do $(NVCC) $(CUDA_SEPARATE) $(CUDA_FOR_$(@F)) -DPART=$$part -c -o $@.$$part.o $<; done
	$(NVCC) $(CUDA_SEPARATE) $(CUDA_FOR_$(@F)) -o $@ $@.0.o $@.1.o $@.2.o
	rm -f $@.[012].o

# With kernels that launch kernels, by the device's own runtime.
$(CUDA_OUT)/nested: test/cuda/nested.cu test/cuda/check.h $(NVCC) | $(CUDA_OUT)
	$(NVCC) $(CUDA_SEPARATE) $(CUDA_FOR_separate) -o $@ $< -lcudadevrt

# Code that runs on nothing but GPUs of that architecture.
$(CUDA_OUT)/nocode: test/cuda/nocode.cu test/cuda/check.h $(NVCC) | $(CUDA_OUT)
	$(NVCC) $(CUDA_SEPARATE:-rdc=true=) -gencode arch=compute_$(CUDA_OLDEST),code=sm_$(CUDA_OLDEST) -o $@ $<

# By GCC for the GPU: OpenMP and OpenACC. Its parts for NVIDIA come from test/gcc-offload.sh.
OFFLOAD := $(SLUICE_CACHE)/gcc-offload
$(OFFLOAD):
	test/gcc-offload.sh

$(B)/test/offload-omp $(B)/test/offload-acc: $(B)/test/offload-%: test/cuda/offload.c | $(B)/test $(OFFLOAD)
	PATH=$(OFFLOAD)/usr/bin:$$PATH gcc-12 -O2 -no-pie -fopen$(if $(filter omp,$*),mp,acc) -foffload=nvptx-none \
		-B$(OFFLOAD)/usr/lib/gcc/x86_64-linux-gnu/12/ -o $@ $<

# Plain C, for the driver's interface alone.
$(B)/test/copies $(B)/test/upload $(B)/test/bulk $(B)/test/background $(B)/test/content $(B)/test/locked: test/cuda/plain.h
$(B)/test/nvml $(B)/test/agent $(B)/test/copies $(B)/test/upload $(B)/test/bulk $(B)/test/background $(B)/test/content $(B)/test/locked: $(B)/test/%: test/cuda/%.c | $(B)/test
	$(CC) $(CFLAGS_BASE) $(CFLAGS) -o $@ $< -ldl

$(B)/test/randomcalls $(B)/test/rarecalls: $(B)/test/%: test/cuda/%.c remoting/api/cuabi.h remoting/api/cuprotos.h | $(B)/test
	$(CC) $(CFLAGS_BASE) $(CFLAGS) -Iremoting/api -o $@ $< -ldl

$(B)/test/twins.so: test/cuda/twins.c remoting/simgpu/simkernel.h | $(B)/test
	$(CC) $(CFLAGS_BASE) $(CFLAGS) -shared -Iremoting/simgpu -o $@ $<

# --- tests ---

# What CI runs. Nothing in it is skipped; what is missing is fetched first.
.PHONY: test test-c test-go test-e2e fuzz lint
test: deps
	$(MAKE) -j3 -Otarget lint figures check-generated all cuda-programs
	$(MAKE) test-c
	$(MAKE) -j2 -Otarget test-smi test-packages test-recipes
	$(MAKE) test-aside
	$(MAKE) hook-cost
	$(MAKE) test-go

# The tests of the hook and on Slurm wait for most of their time, which fuzzing uses. The chaos is a short
# one; `make test-slurm` has the whole. Two at a time, 12 s a target are about what they take.
.PHONY: test-aside
test-aside: all cuda-programs
	nice -n 19 $(MAKE) fuzz FUZZTIME=12s >$(B)/fuzz.out 2>&1 & fuzz=$$!; \
	$(MAKE) hook-tests >$(B)/hook.out 2>&1 & hook=$$!; rc=0; \
	SLUICE_CHAOS=$${SLUICE_CHAOS:-60} $(MAKE) test-slurm SLURM=installed || rc=1; \
	wait $$hook || rc=1; cat $(B)/hook.out; \
	wait $$fuzz || rc=1; cat $(B)/fuzz.out; exit $$rc

# C unit tests: plain, then under ASan and UBSan.
test-c: cuda-programs
	$(MAKE) -j2 shim-check
	$(MAKE) -j2 simgpu-check
	$(MAKE) -j2 simgpu-check SAN=address,undefined
	$(MAKE) -j2 simverbs-check verbs-check
	$(MAKE) -j2 simverbs-check verbs-check SAN=thread
	$(MAKE) spank-check

# What takes longest begins, lest it be the last one running; owners' long history, for which the race detector is too slow, has one
# thread and runs beside. The end-to-end package comes last and alone: it measures times, and should have the machine.
LONGEST := ./remoting/worker ./bench ./daemon/internal/owner ./daemon/internal/workers ./daemon/internal/cli
test-go: all cuda-programs
	$(GO) test -run '^(TestHistory|TestController.*)$$' -timeout 10m -p 1 ./daemon/internal/owner ./daemon/internal/host >$(B)/history.out 2>&1 & history=$$!; rc=0; \
	SLUICE_REQUIRE_CUDA_H=1 $(GO) test -race -parallel 4 -timeout 10m $$($(GO) list $(LONGEST) ./... | grep -v -e /test/e2e -e /test/slurm -e /test/containers -e /test/shares -e /daemon/test -e /oci-hook/test) || rc=1; \
	wait $$history || rc=1; cat $(B)/history.out; exit $$rc
	$(MAKE) test-e2e
	$(MAKE) test-cluster
	$(MAKE) test-shares

# nvidia-smi of other drivers than the worker's, on the NVML shim.
.PHONY: test-smi
test-smi: all $(B)/test/test_nvml
	test/cuda-toolkit.sh smi
	test/nvidia-smi.sh $(SLUICE_CACHE)/cuda-smi/bin/nvidia-smi-*

test-e2e: all cuda-programs $(B)/test/offload-omp $(B)/test/offload-acc
	$(GO) build -race -o $(B)/test/race/ ./remoting/worker/cmd/sluice-worker
	SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_CUDA=$(CUDA) $(GO) test -race -count=1 -parallel 4 -timeout 20m ./test/e2e

# Daemons of several nodes in network namespaces, with simulated GPUs; as root.
.PHONY: test-cluster
test-cluster: all cuda-programs
	SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_CUDA=$(CUDA) $(GO) test -count=1 -timeout 20m ./daemon/test/...

# The shipped units under systemd 252 and 257, in emulated machines: some minutes, and no part of `make test`.
.PHONY: test-units
test-units: all cuda-programs
	test/vm.sh units test/vm/units.log

# Sessions on a machine that is suspended, and whose clock is set: some minutes, and no part of `make test`.
.PHONY: test-clocks
test-clocks: all cuda-programs
	test/vm.sh clocks test/vm/clocks.log

# The packages and programs under SELinux in force, without and with etc/selinux: some minutes, and no part of `make test`.
.PHONY: test-selinux
test-selinux: all cuda-programs $(NFPM)
	NFPM=$(abspath $(NFPM)) BUILD=$(B) test/vm.sh selinux test/vm/selinux.log

# RDMA on the kernel's software device, in one emulated machine and in two: half an hour, and no part of `make test`.
.PHONY: test-rdma
test-rdma: all cuda-programs $(B)/test/verbs/test_stream
	test/vm.sh rdma test/vm/rdma.log
	test/vm.sh rdma2 test/vm/rdma2.log

# From packages to the first job, an upgrade and removal, as docs/admin.md has it, in three emulated machines: some minutes, and no part of `make test`.
.PHONY: test-install
test-install: all cuda-programs $(NFPM)
	NFPM=$(abspath $(NFPM)) BUILD=$(B) test/vm.sh packages test/vm/packages.log

# The daemon's pages in Chromium, which is installed if it is missing, and how long the largest takes; pictures in build/pictures. No part of `make test`.
.PHONY: test-page
test-page:
	command -v chromium >/dev/null || { apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends chromium fonts-liberation; }
	mkdir -p $(B)/pictures
	SLUICE_BROWSER=chromium SLUICE_PICTURES=$(CURDIR)/$(B)/pictures $(GO) test -tags browser -count=1 -v -run 'TestBrowser|TestManyGPUs' ./daemon/internal/page

# Shares of a simulated GPU, by counts; as root.
.PHONY: test-shares
test-shares: all cuda-programs $(B)/test/tenant $(B)/test/tenant-twins.so $(B)/test/tenant-kind2.so
	SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_CUDA=$(CUDA) $(GO) test -count=1 -timeout 10m ./test/shares

$(B)/test/tenant: test/shares/tenant/tenant.c | $(B)/test
	$(CC) $(CFLAGS_BASE) $(CFLAGS) -o $@ $< -ldl

$(B)/test/tenant-twins.so: test/shares/tenant/twins.c remoting/simgpu/simkernel.h | $(B)/test
	$(CC) $(CFLAGS_BASE) $(CFLAGS) -shared -Iremoting/simgpu -o $@ $<

$(B)/test/tenant-kind2.so: test/shares/tenant/kind2.c | $(B)/test
	$(CC) $(CFLAGS_BASE) $(CFLAGS) -shared -o $@ $< -ldl

# Jobs on real Slurm clusters, each in a folder of its own; as root. The release that is installed, and those of other
# Debian releases in roots that are fetched once: SLURM=24.11 is one alone.
# Three packages at a time, since they mostly wait; the one that takes longest begins.
# test/slurm/containers is of the installed release alone: the other roots have no engines; test-containers has one that has.
SLURM ?= installed 24.11 26.05
.PHONY: test-slurm
test-slurm: all cuda-programs
	set -- $(SLURM); for v; do \
		root=; packages=$$($(GO) list ./test/slurm/faults ./test/slurm/...); \
		[ $$v = installed ] || { root=$$(test/slurm/root.sh $$v); packages=$$(grep -v /containers$$ <<<"$$packages"); }; \
		echo "test-slurm: Slurm $$v"; \
		SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_CUDA=$(CUDA) SLUICE_SLURM_ROOT=$$root $(GO) test -count=1 -p 3 -timeout 40m $$packages; \
	done

# Today's container engines, in a root of Debian's sid that is fetched once, and the hook's tests with its runtimes; as root.
.PHONY: test-containers
test-containers: all cuda-programs
	test/cuda-toolkit.sh smi
	SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_CUDA=$(CUDA) $(GO) test -count=1 -p 1 -timeout 40m ./test/containers/...
	SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_OCI_RUNTIMES=$$(oci-hook/test/newest.sh "$$(test/containers/root.sh)") \
		$(GO) test -count=1 -parallel 8 -skip 'TestEngines|TestDocker|TestPodman|TestLibcs' ./oci-hook/test
	SLUICE_RACE_ROUNDS=20000 $(GO) test -count=1 -v -timeout 20m -run '^TestRace$$' ./oci-hook/internal/rootfs # five names: 100,000 rounds

# Engines that Debian does not have, compiled from their sources: enroot, pyxis, SingularityCE; as root. Some minutes for the first time,
# and no part of `make test`. With SLUICE_LOGS=DIR their logs go there; those of test/containers are from it.
.PHONY: test-sources
test-sources: all cuda-programs
	test/cuda-toolkit.sh smi
	SLUICE_LOGS=$(abspath $(SLUICE_LOGS)) SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_CUDA=$(CUDA) $(GO) test -tags sources -count=1 -timeout 40m -run 'TestPyxis|TestEnrootItself|TestSingularity' ./test/containers

# CRI-O, compiled from its sources, and containerd: pods by crictl, ctr, nerdctl; as root. Some minutes for the first time, and no part of
# `make test`. With SLUICE_LOGS=DIR their logs go there; those of test/containers are from it.
.PHONY: test-cri
test-cri: all cuda-programs
	test/cuda-toolkit.sh smi
	SLUICE_LOGS=$(abspath $(SLUICE_LOGS)) SLUICE_BUILD=$(CURDIR)/$(B) SLUICE_CUDA=$(CUDA) $(GO) test -tags cri -count=1 -timeout 40m -run 'TestCRIO|TestContainerd' ./test/containers

# The files for Environment Modules, Lmod and Open OnDemand with the real Modules, Lmod and Ruby of Debian 12, which are unpacked in
# the cache; 10 MB are downloaded once.
.PHONY: test-recipes
test-recipes:
	tree=$$(test/recipes/tools.sh) && SLUICE_RECIPES=$$tree $(GO) test -tags recipes -count=1 ./test/recipes

fuzz:
	test/fuzz.sh $(FUZZTIME)

# Pages against their raw logs; and which logs are older than what they measured, which is no error.
.PHONY: figures
figures:
	bench/pages.py

lint:
	test/lint.sh $(STATICCHECK)

# --- demonstration ---

.PHONY: demo demo-down
demo: deps
	$(MAKE) -j2 all cuda-programs
	test/demo.sh

demo-down:
	test/demo.sh down

# --- on a machine with a GPU ---

# A GPU's machine may have no Go: then build/ is brought along, see bench/prebuild.sh.
HAVE_GO := $(shell command -v $(GO) 2>/dev/null)

.PHONY: gpu-test gpu-compat gpu-bench gpu-calls gpu-copies daemon-bench
gpu-test: $(if $(HAVE_GO),all)
	bench/gpu-test.sh

# SOURCES: where the suites of others lie; docs/compatibility.md.
gpu-compat: $(if $(and $(HAVE_GO),$(SOURCES)),all)
	bench/gpu-compat.sh --sources "$(or $(SOURCES),$(error say SOURCES=DIR))"

# A million random driver calls natively and remotely: no form of call may be answered otherwise.
gpu-calls: $(if $(HAVE_GO),all)
	bench/gpu-calls.sh

gpu-copies: $(if $(HAVE_GO),all)
	bench/gpu-copies.sh

gpu-bench: $(if $(HAVE_GO),all)
	bench/gpu-bench.sh

# The daemons' figures, with simulated GPUs; as root, on a quiet machine.
daemon-bench: all
	$(GO) run ./daemon/test/bench -build $(CURDIR)/$(B)

# --- the rest ---

.PHONY: deps clean distclean help
deps:
	@test/deps.sh

clean:
	find $(B) -mindepth 1 -maxdepth 1 ! -name cache -exec rm -rf {} + 2>/dev/null || true

distclean:
	rm -rf $(B)

help:
	@echo 'make             build everything into $(B)/'
	@echo 'make test        every test, as CI runs them; fetches what is missing'
	@echo 'make packages    deb and rpm for each role into $(B)/packages; make test-packages: installed, upgraded, removed (as root)'
	@echo 'make install-client PREFIX=DIR  the command line and the shim into a folder that nodes share'
	@echo 'make test-c      C unit tests, plain and under ASan and UBSan'
	@echo 'make test-go     Go tests under the race detector, then test-e2e, test-cluster and test-shares'
	@echo 'make test-smi    nvidia-smi of other drivers on the NVML shim'
	@echo 'make test-e2e    CUDA programs through shim, worker and simulated GPU'
	@echo 'make test-cluster daemons of several nodes in network namespaces (as root)'
	@echo 'make test-page   the pages for browsers in Chromium, with pictures (as root)'
	@echo 'make test-units  the shipped systemd units under systemd 252 and 257, in emulated machines (as root)'
	@echo 'make test-install docs/admin.md from the packages to the first job, upgrade, removal, in three emulated machines (as root)'
	@echo 'make test-rdma    RDMA on the kernel'"'"'s software device, in emulated machines (as root)'
	@echo 'make test-selinux packages and programs under SELinux in force, in an emulated machine (as root)'
	@echo 'make test-shares shares of a simulated GPU under every policy, counted (as root)'
	@echo 'make test-slurm  jobs on real Slurm clusters: the installed release, 24.11, 26.05 (as root)'
	@echo 'make hook        the OCI hook; make hook-check: its tests with the engines of Debian 12 (as root)'
	@echo 'make test-containers docker, podman, apptainer and charliecloud of today, and in Slurm jobs (as root)'
	@echo 'make test-sources enroot, pyxis and SingularityCE, compiled from their sources, in Slurm jobs (as root)'
	@echo 'make test-cri    pods of CRI-O and containerd by crictl, and ctr and nerdctl, compiled from their sources (as root)'
	@echo 'make test-recipes the module file and the Open OnDemand app with real Modules, Lmod and Ruby'
	@echo 'make fuzz        every fuzz target for FUZZTIME (60s), two at a time'
	@echo 'make lint        gofmt, vet, staticcheck, shellcheck'
	@echo 'make figures     pages against their raw logs; lists logs older than the code'
	@echo 'make generate    write the files generated from remoting/api/cuda.tbl and wire.tbl'
	@echo 'make man         man pages into build/man; make completions: for bash, zsh and fish'
	@echo 'make demo        jobs for fractions of simulated GPUs on a Slurm cluster in a folder, /tmp/sluice-demo or SLUICE_DEMO=DIR (as root)'
	@echo 'make demo-down   end that cluster; nothing is left of it'
	@echo 'make gpu-test    the tests that need a GPU: native and remote'
	@echo "make gpu-compat  other people's tests and programs, natively and remotely: SOURCES=DIR"
	@echo 'make gpu-calls   random driver calls on a GPU, natively and remotely: no difference'
	@echo 'make gpu-copies  rates of copies on a GPU, natively and remotely'
	@echo 'make gpu-bench   measurements on a GPU'
	@echo 'make daemon-bench measurements of the daemons, with simulated GPUs (as root)'
	@echo 'make deps        install what the build needs (Debian 12, as root)'
	@echo 'make clean       remove build/ but for the fetched compilers; distclean: all of it'
