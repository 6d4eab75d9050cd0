# Tests of RDMA, on the simulated library. From the root of the repository:
#
#   make -f remoting/verbs/build.mk check         also with SAN=address,undefined or SAN=thread
#
# The shim's build and cgo compile the rest of this folder.

VERBS := remoting/verbs
VERBS_T = build/test/verbs$(if $(SAN),-$(subst $(SIMV_COMMA),-,$(SAN)))

ifeq ($(firstword $(MAKEFILE_LIST)),$(VERBS)/build.mk)
include remoting/simverbs/build.mk
check: verbs-check
endif

$(VERBS_T)/test_stream: $(wildcard $(VERBS)/*.c $(VERBS)/*.h) remoting/client/futex.h remoting/client/deadline.h remoting/api/wire.h
	@mkdir -p $(@D)
	$(CC) -O2 -g -std=gnu11 -Wall -Wextra -Werror -pthread $(SIMV_SAN) -Iremoting/api -o $@ $(VERBS)/test_stream.c $(VERBS)/device.c $(VERBS)/library.c -ldl

# The layouts are compared where the distribution's header is (libibverbs-dev).
.PHONY: verbs-check
verbs-check: simverbs $(VERBS_T)/test_stream
	LD_LIBRARY_PATH=$(SIMV_OUT) $(VERBS_T)/test_stream
	! test -e /usr/include/infiniband/verbs.h || $(CC) -fsyntax-only -Wall -Wextra -Werror $(VERBS)/test_layout.c
