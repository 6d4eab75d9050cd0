# The simulated libibverbs. From the root of the repository:
#
#   make -f remoting/simverbs/build.mk            build/simverbs/libibverbs.so.1
#   make -f remoting/simverbs/build.mk check      and its tests
#
# Variables: CC, CFLAGS, SIMV_OUT, SAN (what -fsanitize takes, as address,undefined
# or thread: all is then built with it, into build/simverbs-SAN).

SIMV := remoting/simverbs
SIMV_COMMA := ,
SIMV_OUT ?= build/simverbs$(if $(SAN),-$(subst $(SIMV_COMMA),-,$(SAN)))
CFLAGS ?= -O2 -g
SIMV_SAN := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer $(if $(findstring undefined,$(SAN)),-fno-sanitize-recover=undefined))
SIMV_CFLAGS := -std=gnu11 -Wall -Wextra -Werror -fvisibility=hidden -fPIC -pthread $(SIMV_SAN)
SIMV_LDFLAGS := -pthread $(SIMV_SAN) -Wl,-z,relro,-z,now $(if $(SAN),,-Wl$(SIMV_COMMA)-z$(SIMV_COMMA)defs)

SIMV_OBJ := $(patsubst %,$(SIMV_OUT)/o/%.o,device memory cq qp link)
SIMV_HDR := $(SIMV)/simverbs.h remoting/verbs/verbs.h
SIMV_TESTS := $(patsubst $(SIMV)/%.c,$(SIMV_OUT)/%,$(wildcard $(SIMV)/test_*.c))

.PHONY: simverbs simverbs-check
simverbs: $(SIMV_OUT)/libibverbs.so.1

$(SIMV_OUT)/o/%.o: $(SIMV)/%.c $(SIMV_HDR)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SIMV_CFLAGS) -c -o $@ $<

# The version that the real one's symbols have.
$(SIMV_OUT)/o/exports.map:
	@mkdir -p $(@D)
	echo 'IBVERBS_1.1 { global: ibv_*; local: *; };' >$@

# Never unloaded, as it has handlers for fork.
$(SIMV_OUT)/libibverbs.so.1: $(SIMV_OBJ) $(SIMV_OUT)/o/exports.map
	$(CC) $(CFLAGS) -shared -Wl,-soname,libibverbs.so.1 -Wl,-z,nodelete -Wl,--version-script=$(filter %.map,$^) \
		-o $@ $(filter %.o,$^) $(SIMV_LDFLAGS)

# The tests find the library as programs do, by dlopen, which a sanitizer calls for them: the path is in the environment.
$(SIMV_OUT)/test_%: $(SIMV)/test_%.c $(SIMV)/testing.h remoting/verbs/library.c $(SIMV_HDR) $(SIMV_OUT)/libibverbs.so.1
	$(CC) $(CFLAGS) -std=gnu11 -Wall -Wextra -Werror -pthread $(SIMV_SAN) -o $@ $< remoting/verbs/library.c -ldl

simverbs-check: simverbs $(SIMV_TESTS)
	@for t in $(SIMV_TESTS); do LD_LIBRARY_PATH=$(SIMV_OUT) $$t || exit 1; done

ifeq ($(firstword $(MAKEFILE_LIST)),$(SIMV)/build.mk)
check: simverbs-check
endif
