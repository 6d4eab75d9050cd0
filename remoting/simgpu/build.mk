# The simulated GPU. From the root of the repository:
#
#   make -f remoting/simgpu/build.mk            both libraries, into build/simgpu
#   make -f remoting/simgpu/build.mk check      and their tests
#
# Variables: CC, CFLAGS, SIM_OUT, SAN (asan, ubsan, tsan, or what -fsanitize
# takes, as address,undefined: all is then built with it, into build/simgpu-SAN).
#
# build/simgpu/driver-12020/libcuda.so.1 is the same simulator as a driver of
# CUDA 12.2: it does not export what came later, so dlsym tells the truth too.

SIM := remoting/simgpu
SIM_COMMA := ,
SIM_KIND := $(subst asan,address,$(subst ubsan,undefined,$(subst tsan,thread,$(SAN))))
SIM_OUT ?= build/simgpu$(if $(SIM_KIND),-$(subst $(SIM_COMMA),-,$(SIM_KIND)))
CFLAGS ?= -O2 -g
SIM_SAN := $(if $(SIM_KIND),-fsanitize=$(SIM_KIND) -fno-omit-frame-pointer $(if $(findstring undefined,$(SIM_KIND)),-fno-sanitize-recover=undefined))
SIM_CFLAGS := -std=gnu11 -Wall -Wextra -Werror -fvisibility=hidden -fPIC -pthread $(SIM_SAN)
SIM_LDFLAGS := -pthread $(SIM_SAN) -Wl,-z,relro,-z,now $(if $(SIM_KIND),,-Wl$(SIM_COMMA)-z$(SIM_COMMA)defs)

SIM_SRC := core engine clock idle context ctxprops device peer memory hostmem pool vmm ipc copy array texture tensormap green stream streamops event work image link module function launch capture graph graphnode userobj conditional graphmem exec names
SIM_OBJ := $(SIM_SRC:%=$(SIM_OUT)/o/%.o)
SIM_HDR := $(SIM)/sim.h $(SIM)/state.h $(SIM)/engine.h $(SIM)/clock.h $(SIM)/idle.h $(SIM)/busy.h $(SIM)/nvml.h $(SIM)/simkernel.h remoting/api/cuabi.h remoting/api/cuprotos.h
SIM_TESTS := $(patsubst $(SIM)/%.c,$(SIM_OUT)/%,$(wildcard $(SIM)/test_*.c))

.PHONY: simgpu simgpu-check
simgpu: $(SIM_OUT)/libcuda.so.1 $(SIM_OUT)/libnvidia-ml.so.1 $(SIM_OUT)/driver-12020/libcuda.so.1

$(SIM_OUT)/o/%.o: $(SIM)/%.c $(SIM_HDR)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SIM_CFLAGS) -DSIM_NO_TABLES -c -o $@ $<

# What is exported, under which name and since when: the API table's rows that have a definition here.
$(SIM_OUT)/o/exports.inc: remoting/api/cuda.tbl $(SIM_OBJ)
	nm $(SIM_OBJ) | awk '$$2 == "T" && $$3 ~ /^cu/ { print $$3 }' > $(SIM_OUT)/o/defined
	awk -F'|' 'FNR == NR { def[$$1] = 1; next } /^cu/ { gsub(/ /, "", $$1); gsub(/ /, "", $$3); split($$2, n, " "); \
		if (!($$1 in def)) next; pt = $$1 "_" $$3; \
		if ($$3 != "-" && pt in def) printf "P(\"%s\", %s, %s, %s)\n", n[1], n[2], $$1, pt; \
		else printf "X(\"%s\", %s, %s)\n", n[1], n[2], $$1 }' $(SIM_OUT)/o/defined remoting/api/cuda.tbl > $@.tmp
	mv $@.tmp $@

$(SIM_OUT)/o/procs.o: $(SIM)/procs.c $(SIM_OUT)/o/exports.inc $(SIM_HDR)
	$(CC) $(CFLAGS) $(SIM_CFLAGS) -I$(SIM_OUT)/o -DSIM_NO_TABLES -c -o $@ $<

# The symbols a driver of version % exports.
$(SIM_OUT)/o/%.map: $(SIM_OUT)/o/exports.inc
	awk -F'[(), ]+' -v v=$* 'BEGIN { print "{ global: cuGetProcAddress; cuGetProcAddress_v2; sluice_sim_clock; sluice_sim_wait;" } \
		$$3 <= v { print $$4 ";"; if ($$5 != "") print $$5 ";" } END { print "local: *; };" }' $< > $@

$(SIM_OUT)/o/state-%.o: $(SIM)/state.c $(SIM)/state.h $(SIM)/engine.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SIM_CFLAGS) -DSIM_DEFAULT_DRIVER=$* -c -o $@ $<

# Never unloaded: streams' threads run its code.
SIM_LINK = $(CC) $(CFLAGS) -shared -Wl,-soname,libcuda.so.1 -Wl,-z,nodelete -Wl,--version-script=$(filter %.map,$^) \
	-o $@ $(filter %.o,$^) $(SIM_LDFLAGS) -ldl -lrt

$(SIM_OUT)/libcuda.so.1: $(SIM_OBJ) $(SIM_OUT)/o/procs.o $(SIM_OUT)/o/state-13000.o $(SIM_OUT)/o/13000.map
	$(SIM_LINK)

$(SIM_OUT)/driver-12020/libcuda.so.1: $(SIM_OBJ) $(SIM_OUT)/o/procs.o $(SIM_OUT)/o/state-12020.o $(SIM_OUT)/o/12020.map
	@mkdir -p $(@D)
	$(SIM_LINK)

$(SIM_OUT)/libnvidia-ml.so.1: $(SIM_OUT)/o/nvml.o $(SIM_OUT)/o/nvml_board.o $(SIM_OUT)/o/nvml_errors.o $(SIM_OUT)/o/busy.o $(SIM_OUT)/o/engine.o $(SIM_OUT)/o/clock.o $(SIM_OUT)/o/idle.o $(SIM_OUT)/o/state-13000.o
	$(CC) $(CFLAGS) -shared -Wl,-soname,libnvidia-ml.so.1 -o $@ $^ $(SIM_LDFLAGS) -lrt

$(SIM_OUT)/twins.so: $(SIM)/testtwins.c $(SIM)/simkernel.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -std=gnu11 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -shared $(SIM_SAN) -o $@ $<

$(SIM_OUT)/test_%: $(SIM)/test_%.c $(SIM)/testing.h $(SIM)/testclock.h $(SIM_HDR) $(SIM_OUT)/twins.so $(SIM_OUT)/libcuda.so.1 $(SIM_OUT)/libnvidia-ml.so.1
	$(CC) $(CFLAGS) -std=gnu11 -Wall -Wextra -Werror -pthread $(SIM_SAN) -o $@ $< -L$(SIM_OUT) -l:libcuda.so.1 \
		-Wl,-rpath,'$$ORIGIN' -ldl -lm

simgpu-check: simgpu $(SIM_TESTS)
	@for t in $(SIM_TESTS); do $$t || exit 1; done

ifeq ($(firstword $(MAKEFILE_LIST)),$(SIM)/build.mk)
check: simgpu-check
endif
