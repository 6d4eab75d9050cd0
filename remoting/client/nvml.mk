# The NVML shim, build/shim/libnvidia-ml.so.1, and its tests. Included by build.mk, or from the root:
#   make -f remoting/client/nvml.mk nvml                      the library
#   make -f remoting/client/nvml.mk nvml-check                its tests, plain and under ASan and UBSan
#   make -f remoting/client/nvml.mk nvml-abi NVML_H=DIR       our layouts against DIR/nvml.h, any version
#   make -f remoting/client/nvml.mk nvml-names NVML_H=DIR     no function of DIR/nvml.h is missing
#
# The library must load on any glibc since 2.17 and on musl. So it is linked not with this machine's
# libc but with empty libraries that have the names it imports, at the oldest version there is.

NVML := remoting/client
NVML_LIB ?= build/shim/libnvidia-ml.so.1
NVML_SAN_LIB ?= build/test/nvml-san/libnvidia-ml.so.1
NVML_O := build/shim/nvml
CFLAGS ?= -O2 -g
NVML_CFLAGS := -std=gnu11 -Wall -Wextra -Werror -fvisibility=hidden -fPIC -Iremoting/api -DSLUICE_VERSION='"$(or $(VERSION),unknown)"'
NVML_OLD := -fno-stack-protector -U_FORTIFY_SOURCE
NVML_SANITIZE := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
NVML_SRC := nvml.c nvml_answer.c nvml_find.c nvml_device.c nvml_readings.c nvml_more.c nvml_links.c nvml_texts.c nvml_processes.c nvml_conn.c nvml_names.c connect.c dial.c forms.c gen_forms.c conf.c exchange.c lease.c log.c version.c gen_fingerprint.c
NVML_HDR := $(addprefix $(NVML)/,nvml.h nvml_answer.h nvml_conn.h conf.h connect.h deadline.h exchange.h forms.h lease.h log.h reader.h snapshot.h version.h) remoting/api/wire.h
NVML_OBJ := $(NVML_SRC:%.c=$(NVML_O)/%.o)

ALL += $(NVML_LIB)
C_TESTS += build/test/test_nvml
C_TESTS_SAN += build/test/test_nvml-san

.PHONY: nvml nvml-check nvml-abi nvml-names
nvml: $(NVML_LIB)

$(NVML_O)/%.o: $(NVML)/%.c $(NVML_HDR)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(NVML_CFLAGS) $(NVML_OLD) -c -o $@ $<

$(NVML_O)/version.o: $(VERSION_FILE)

# What the objects import, each name in the library that had it before glibc 2.34 put all into one.
$(NVML_O)/stubs: $(NVML_OBJ)
	@rm -rf $@ && mkdir -p $@
	nm $^ | awk '$$1 == "U" { want[$$2] } $$2 ~ /^[A-TV-Z]$$/ { have[$$3] } \
		END { for (s in want) if (!(s in have) && s != "_GLOBAL_OFFSET_TABLE_") print s }' | sort >$@/imports
	@! grep -E '^(sl|fw|nv)_' $@/imports || { echo 'the shim uses these functions of its own, and nothing defines them'; exit 1; }
	awk '/^pthread_/' $@/imports >$@/libpthread.so.0.names
	awk '/^dl/' $@/imports >$@/libdl.so.2.names
	awk '/^clock_/' $@/imports >$@/librt.so.1.names
	awk '!/^(pthread_|dl|clock_)/' $@/imports >$@/libc.so.6.names
	echo 'GLIBC_2.2.5 { global: *; };' >$@/version.map
	for lib in libpthread.so.0 libdl.so.2 librt.so.1 libc.so.6; do \
		sed 's/.*/void &(void);void &(void){}/' $@/$$lib.names >$@/stub.c; \
		$(CC) -shared -nostdlib -fPIC -fno-builtin -w -Wl,-soname,$$lib -Wl,--version-script=$@/version.map -o $@/$$lib $@/stub.c; \
	done
	@touch $@

$(NVML_LIB): $(NVML_OBJ) $(NVML_O)/stubs
	@mkdir -p $(@D)
	@echo '{ global: nvml*; local: *; };' >$(NVML_O)/exports.map
	$(CC) -shared -nostdlib -o $@ $(NVML_OBJ) -Wl,-soname,libnvidia-ml.so.1 -Wl,--version-script=$(NVML_O)/exports.map \
		-Wl,--hash-style=both -Wl,-z,now,-z,relro,-z,noexecstack -Wl,--no-undefined \
		$(addprefix $(NVML_O)/stubs/,libpthread.so.0 libdl.so.2 librt.so.1 libc.so.6)
	ln -sf libnvidia-ml.so.1 $(@D)/libnvidia-ml.so

# --- tests ---

$(NVML_SAN_LIB): $(addprefix $(NVML)/,$(NVML_SRC)) $(NVML_HDR)
	@mkdir -p $(@D)
	$(CC) $(NVML_CFLAGS) $(NVML_SANITIZE) -shared -Wl,-soname,libnvidia-ml.so.1 -o $@ $(filter %.c,$^) -pthread -ldl

build/test/test_nvml: $(NVML)/test_nvml.c $(NVML_HDR) $(NVML_LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(NVML_CFLAGS) -DNVML_LIBRARY='"$(abspath $(NVML_LIB))"' -o $@ $< -pthread -ldl

build/test/test_nvml-san: $(NVML)/test_nvml.c $(NVML_HDR) $(NVML_SAN_LIB)
	@mkdir -p $(@D)
	$(CC) $(NVML_CFLAGS) $(NVML_SANITIZE) -DNVML_LIBRARY='"$(abspath $(NVML_SAN_LIB))"' -o $@ $< -pthread -ldl

nvml-check: build/test/test_nvml build/test/test_nvml-san
	build/test/test_nvml
	build/test/test_nvml-san

nvml-abi:
	@mkdir -p build/test
	$(CC) -w -DTHEIRS -I$(NVML_H) -o build/test/nvml_abi_theirs $(NVML)/test_nvml_abi.c
	$(CC) -w -iquote $(NVML) -Iremoting/api -o build/test/nvml_abi_ours $(NVML)/test_nvml_abi.c
	build/test/nvml_abi_theirs >build/test/nvml_abi_theirs.txt
	build/test/nvml_abi_ours >build/test/nvml_abi_ours.txt
	@! grep -vxFf build/test/nvml_abi_ours.txt build/test/nvml_abi_theirs.txt
	@echo "nvml-abi: $$(wc -l <build/test/nvml_abi_theirs.txt) facts of $(NVML_H)/nvml.h agree"

nvml-names: $(NVML_LIB)
	@mkdir -p build/test
	@nm -D --defined-only $(NVML_LIB) | awk '{ print $$3 }' | sort >build/test/nvml_have.txt
	@tr '\n' ' ' <$(NVML_H)/nvml.h | grep -oE 'DECLDIR +(char *\* *)?nvml[A-Z][A-Za-z0-9_]* *\(' | grep -oE 'nvml[A-Za-z0-9_]+' | sort -u >build/test/nvml_want.txt
	@missing=$$(comm -13 build/test/nvml_have.txt build/test/nvml_want.txt); \
	if [ -n "$$missing" ]; then echo "nvml-names: missing:" $$missing >&2; exit 1; fi
	@echo "nvml-names: all $$(wc -l <build/test/nvml_want.txt) functions of $(NVML_H)/nvml.h are there"
