# The CUDA shim, build/shim/libcuda.so.1, and its tests. From the root of the repository:
#
#   make -f remoting/client/build.mk            both libraries, into build/shim
#   make -f remoting/client/build.mk check      and their tests, plain and under ASan and UBSan
#
# Variables: CC, CFLAGS, SHIM_OUT, SAN (for example address,undefined: the library
# is then built with it, into build/shim-SAN, and linked with this machine's libc).
#
# The library must load on any glibc since 2.17 and on musl. So it is linked not with
# this machine's libc but with empty libraries that have the names it imports, at the
# oldest version there is; check_elf.sh checks what came of it.

SHIM := remoting/client
SHIM_COMMA := ,
SHIM_OUT ?= build/shim$(if $(SAN),-$(subst $(SHIM_COMMA),-,$(SAN)))
CFLAGS ?= -O2 -g
SHIM_SAN := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer $(if $(findstring undefined,$(SAN)),-fno-sanitize-recover=undefined))
SHIM_OLD := $(if $(SAN),,-fno-stack-protector -U_FORTIFY_SOURCE)
# Descriptor-based thread-local storage needs no symbol of the C library.
SHIM_CFLAGS := -std=gnu11 -Wall -Wextra -Werror -fvisibility=hidden -fPIC -pthread -fno-plt -mtls-dialect=gnu2 \
	-I$(SHIM) -Iremoting/api $(SHIM_OLD) $(SHIM_SAN)

SHIM_SRC := session send resume wait receive print stats timeline waits entry errlog coredump checkpoint notify managedbatch attention route place peeraccess delivery connect dial rdmalink forms conf exchange lease log codec shmring handles error errstate device ctx ctxprops ctxlocal upload background bulk bulkup bulkdown compress content throughput stream capture event record hostfn export_tables compilecache integrity procaddr \
	load jit link module kernel fatbin sha256 version launch legacy ranges guard memory hostmem hostpool operand fill copy copy3d vmm occupancy profiler graph graphnode graphhost graphread pool ipc tensormap texref green mapped piece pointers mirror mirrorsend ahead changes trap managed \
	poller area shared staged nccl transfer gen_stubs gen_exports gen_names gen_forms gen_fingerprint
SHIM_VERBS := stream device library
SHIM_OBJ := $(SHIM_SRC:%=$(SHIM_OUT)/o/%.o) $(SHIM_VERBS:%=$(SHIM_OUT)/o/verbs_%.o)
SHIM_HDR := $(wildcard $(SHIM)/*.h remoting/verbs/*.h) remoting/api/cuabi.h remoting/api/cuprotos.h remoting/api/wire.h
SHIM_LIB := $(SHIM_OUT)/libcuda.so.1

.PHONY: shim shim-check
shim: $(SHIM_LIB) build/shim/libnvidia-ml.so.1

-include $(SHIM)/nvml.mk

# The Makefile says of which commit this is.
$(SHIM_OUT)/o/version.o: SHIM_CFLAGS += -DSLUICE_VERSION='"$(or $(VERSION),unknown)"'
$(SHIM_OUT)/o/version.o: $(VERSION_FILE)

$(SHIM_OUT)/o/verbs_%.o: remoting/verbs/%.c $(SHIM_HDR)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SHIM_CFLAGS) -c -o $@ $<

$(SHIM_OUT)/o/%.o: $(SHIM)/%.c $(SHIM_HDR)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SHIM_CFLAGS) -c -o $@ $<

# What the objects import, each name in the library that had it before glibc 2.34 put all into one.
$(SHIM_OUT)/o/stubs: $(SHIM_OBJ)
	@rm -rf $@ && mkdir -p $@
	nm $^ | awk '$$1 == "U" { want[$$2] } $$2 ~ /^[A-TV-Z]$$/ { have[$$3] } \
		END { for (s in want) if (!(s in have) && s != "_GLOBAL_OFFSET_TABLE_") print s }' | sort >$@/imports
	@! grep -E '^(sl|fw|nv)_' $@/imports || { echo 'the shim uses these functions of its own, and nothing defines them'; exit 1; }
	awk '/^pthread_/' $@/imports >$@/libpthread.so.0.names
	awk '/^dl/' $@/imports >$@/libdl.so.2.names
	awk '/^clock_/' $@/imports >$@/librt.so.1.names
	awk '!/^(pthread_|dl|clock_)/' $@/imports >$@/libc.so.6.names
	printf '%s\n' 'GLIBC_2.2.5 { global: *; };' 'GLIBC_2.3 { global: __ctype_b_loc; __ctype_tolower_loc; __ctype_toupper_loc; };' \
		'GLIBC_2.3.2 { global: pthread_cond_*; };' 'GLIBC_2.3.3 { global: pthread_condattr_setclock; };' 'GLIBC_2.7 { global: __isoc99_*; };' >$@/version.map
	for lib in libpthread.so.0 libdl.so.2 librt.so.1 libc.so.6; do \
		sed 's/.*/void &(void);void &(void){}/' $@/$$lib.names >$@/stub.c; \
		$(CC) -shared -nostdlib -fPIC -fno-builtin -w -Wl,-soname,$$lib -Wl,--version-script=$@/version.map -o $@/$$lib $@/stub.c; \
	done
	@touch $@

# Exports carry no version, as the driver's do. Never unloaded: its threads run its code.
$(SHIM_OUT)/o/exports.map:
	@mkdir -p $(@D)
	echo '{ global: cu*; local: *; };' >$@

SHIM_LDFLAGS := -shared -Wl,-soname,libcuda.so.1 -Wl,--hash-style=both -Wl,-z,now,-z,relro,-z,nodelete,-z,noexecstack

ifeq ($(SAN),)
$(SHIM_LIB): $(SHIM_OBJ) $(SHIM_OUT)/o/stubs $(SHIM_OUT)/o/exports.map
	$(CC) $(SHIM_LDFLAGS) -nostdlib -Wl,--version-script=$(SHIM_OUT)/o/exports.map -Wl,--no-undefined -o $@ $(SHIM_OBJ) \
		$(addprefix $(SHIM_OUT)/o/stubs/,libpthread.so.0 libdl.so.2 librt.so.1 libc.so.6)
	ln -sf libcuda.so.1 $(@D)/libcuda.so
else
$(SHIM_LIB): $(SHIM_OBJ) $(SHIM_OUT)/o/exports.map
	$(CC) $(SHIM_LDFLAGS) $(SHIM_SAN) -Wl,--version-script=$(SHIM_OUT)/o/exports.map -o $@ $(SHIM_OBJ) -pthread -ldl -lrt
endif

# --- tests ---

SHIM_T := build/test/shim$(if $(SAN),-$(subst $(SHIM_COMMA),-,$(SAN)))
SHIM_TESTS := $(addprefix $(SHIM_T)/test_,attention background bulk compilecache compress connect content entry errstate fatbin forms handles integrity lease piece ranges record refuse sha256 throughput upload)
# The programs nvcc built, where they are there: test_fatbin looks into them.
SHIM_NVCC := $(wildcard build/test/cuda-11.8/vecadd build/test/cuda-11.8/reduce build/test/cuda-13.0/vecadd)

$(SHIM_T)/test_attention: $(SHIM)/attention.c
$(SHIM_T)/test_background: $(SHIM)/background.c
$(SHIM_T)/test_bulk: $(addprefix $(SHIM_OUT)/o/,attention.o codec.o conf.o delivery.o log.o) $(addprefix $(SHIM)/,bulk.c bulkup.c bulkdown.c)
$(SHIM_T)/test_compilecache: $(SHIM_OUT)/o/compilecache.o $(SHIM_OUT)/o/sha256.o
$(SHIM_T)/test_compress: $(SHIM_OUT)/o/compress.o
$(SHIM_T)/test_errstate: $(SHIM_OUT)/o/errstate.o
$(SHIM_T)/test_connect: $(addprefix $(SHIM_OUT)/o/,connect.o dial.o conf.o exchange.o lease.o log.o forms.o gen_forms.o gen_fingerprint.o)
$(SHIM_T)/test_content: $(addprefix $(SHIM_OUT)/o/,codec.o sha256.o) $(SHIM)/content.c
$(SHIM_T)/test_forms: $(addprefix $(SHIM_OUT)/o/,forms.o gen_forms.o)
$(SHIM_T)/test_fatbin: $(SHIM_OUT)/o/fatbin.o
$(SHIM_T)/test_handles: $(SHIM_OUT)/o/handles.o
$(SHIM_T)/test_integrity: $(SHIM_OUT)/o/integrity.o
$(SHIM_T)/test_lease: $(SHIM_OUT)/o/lease.o $(SHIM_OUT)/o/exchange.o
$(SHIM_T)/test_piece: $(addprefix $(SHIM_OUT)/o/,piece.o changes.o)
$(SHIM_T)/test_ranges: $(SHIM_OUT)/o/ranges.o
$(SHIM_T)/test_record: $(SHIM_OUT)/o/record.o
$(SHIM_T)/test_refuse: $(SHIM_OUT)/o/entry.o
$(SHIM_T)/test_sha256: $(SHIM_OUT)/o/sha256.o
$(SHIM_T)/test_throughput: $(addprefix $(SHIM_OUT)/o/,throughput.o conf.o)
$(SHIM_T)/test_upload: $(SHIM_OUT)/o/codec.o $(SHIM)/upload.c

$(SHIM_T)/test_%: $(SHIM)/test_%.c $(SHIM_HDR)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SHIM_CFLAGS) -o $@ $< $(filter %.o,$^) -pthread -ldl

.PHONY: shim-test shim-race shim-elf
shim-race: $(addprefix $(SHIM_T)/test_,background bulk content record upload)
	$(SHIM_T)/test_background
	$(SHIM_T)/test_bulk
	$(SHIM_T)/test_content
	$(SHIM_T)/test_record
	$(SHIM_T)/test_upload

shim-test: $(SHIM_TESTS) $(SHIM_LIB)
	@set -e; for t in attention background bulk compilecache compress connect content errstate forms handles integrity lease piece ranges record refuse sha256 throughput upload; do $(SHIM_T)/test_$$t; done; \
	$(SHIM_T)/test_fatbin $(SHIM_NVCC); ASAN_OPTIONS=detect_leaks=0 $(SHIM_T)/test_entry $(abspath $(SHIM_LIB))

shim-elf: $(SHIM_LIB) build/shim/libnvidia-ml.so.1
	$(SHIM)/check_elf.sh $(SHIM_LIB) libcuda.so.1 cu
	$(SHIM)/check_elf.sh build/shim/libnvidia-ml.so.1 libnvidia-ml.so.1 nvml

shim-check: shim-elf shim-test nvml-check
	$(MAKE) -f $(firstword $(MAKEFILE_LIST)) SAN=address,undefined shim-test
	$(MAKE) -f $(firstword $(MAKEFILE_LIST)) SAN=thread shim-race

ifeq ($(firstword $(MAKEFILE_LIST)),remoting/client/build.mk)
.PHONY: check
check: shim-check
endif
