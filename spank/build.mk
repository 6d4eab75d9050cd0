# The SPANK plug-in, and its tests. From the root of the repository:
#
#   make spank                                  one plug-in for Slurm 22.05 to 26.05: build/spank/spank_sluice.so
#   make spank-release SLURM_PREFIX=/opt/slurm  one for that release alone: build/spank/VERSION/spank_sluice.so
#   make spank-check                            what it exports and needs; its tests, plain and under ASan and UBSan
#
# spank.h is the installed Slurm's (Debian: libslurm-dev). The functions of Slurm stay undefined: the program that
# loads the plug-in has them.

SPANK := spank
SPANK_OUT ?= $(or $(B),build)/spank
SPANK_SRC := $(addprefix $(SPANK)/,dispatch.c settings.c option.c allocator.c local.c remote.c ask.c answer.c)
SPANK_HDR := $(addprefix $(SPANK)/,plugin.h version.h options.h)
SPANK_CFLAGS := -ffile-prefix-map=$(CURDIR)=. -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fvisibility=hidden -fPIC -fstack-protector-strong
SPANK_LDFLAGS := -shared -Wl,--version-script=$(SPANK)/plugin.map -Wl,-z,relro,-z,now,-z,noexecstack -Wl,--hash-style=both
CFLAGS ?= -O2 -g
GO ?= go

.PHONY: spank spank-release spank-check spank-elf
spank: $(SPANK_OUT)/spank_sluice.so

# Made aside: slurmd and every step of a running cluster have the old one mapped.
$(SPANK_OUT)/spank_sluice.so: $(SPANK_SRC) $(SPANK_HDR) $(SPANK)/plugin.map
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(SPANK_CFLAGS) $(SPANK_LDFLAGS) -o $@.new $(SPANK_SRC)
	mv $@.new $@

# The release whose header it is, as 24.11: SLURM_VERSION_NUMBER is 0x180b05 in 24.11.5.
SLURM_PREFIX ?= /usr
SPANK_NUMBER = $(shell sed -n 's/^\#define SLURM_VERSION_NUMBER *\(0x[0-9a-f]*\).*/\1/p' $(SLURM_PREFIX)/include/slurm/slurm_version.h)
SPANK_RELEASE = $(shell n=$$(($(SPANK_NUMBER))) && printf %d.%02d $$((n >> 16)) $$((n >> 8 & 255)))
# By way of a link, lest the C library's headers are that root's too.
spank-release:
	@test -n "$(SPANK_NUMBER)" || { echo "spank: $(SLURM_PREFIX)/include/slurm has no Slurm headers; give SLURM_PREFIX=" >&2; exit 1; }
	@mkdir -p $(SPANK_OUT)/$(SPANK_RELEASE)/include
	@ln -sfn $(abspath $(SLURM_PREFIX)/include/slurm) $(SPANK_OUT)/$(SPANK_RELEASE)/include/slurm
	$(CC) $(CFLAGS) $(SPANK_CFLAGS) -isystem $(SPANK_OUT)/$(SPANK_RELEASE)/include -DSLUICE_RELEASE_BUILD $(SPANK_LDFLAGS) \
		-o $(SPANK_OUT)/$(SPANK_RELEASE)/spank_sluice.so.new $(SPANK_SRC)
	mv $(SPANK_OUT)/$(SPANK_RELEASE)/spank_sluice.so.new $(SPANK_OUT)/$(SPANK_RELEASE)/spank_sluice.so

spank-elf: spank spank-release
	$(SPANK)/check_elf.sh $(SPANK_OUT)/spank_sluice.so $(SPANK)/plugin.map
	$(SPANK)/check_elf.sh $(SPANK_OUT)/$(SPANK_RELEASE)/spank_sluice.so $(SPANK)/plugin.map

# Under the sanitizers the C of the plug-in runs in the test's process, with a stand-in for Slurm's functions.
spank-check: spank-elf
	$(GO) run ./$(SPANK)/cmd/spankgen -check
	$(GO) test -count=1 ./$(SPANK)/...
	$(GO) test -count=1 -asan ./$(SPANK)
	CGO_CFLAGS="-O1 -g -fsanitize=undefined -fno-sanitize-recover=undefined" CGO_LDFLAGS="-fsanitize=undefined" $(GO) test -count=1 ./$(SPANK)
