/*
 * The NVML shim against a worker that does what each test asks of it: the
 * right answers, hostile bytes, silence, a lost connection, no worker at all.
 *
 *	test_nvml [LIBRARY]               run the tests on that libnvidia-ml.so.1, or
 *	                                  on the one it was built for
 *	test_nvml --serve PATH [CAP_MIB]  be such a worker on the Unix socket PATH,
 *	                                  until standard input ends
 *
 * The library is loaded as programs load it. The worker is a thread that
 * serves one connection at a time; a test sets how the next ones behave.
 */
#define _GNU_SOURCE
#include "nvml_conn.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB (1024ull * 1024)

/* ---- the worker ---- */

enum mode {
	GOOD,
	BEATS,			/* keep-alives before each reply */
	NO_READINGS,		/* everything that may be unknown is */
	MANY,			/* as many processes as the format allows */
	REFUSE_VERSION, REFUSE_FINGERPRINT, REFUSE_LEASE, REFUSE_BUSY,
	BAD_MAGIC, BAD_VERSION, WELCOME_HUGE, WELCOME_SHORT, WELCOME_LONG,
	DEVICES_HUGE, ATTRS_HUGE, SILENT,
	OBS_SHORT, OBS_HUGE, OBS_PROCS_HUGE, OBS_PROCS_LIE, OBS_CALL, OBS_RESULT, OBS_BYE, OBS_CLOSE,
	OBS_BEAT_FOREVER,	/* keep-alives and never a reply */
	ONE_REPLY,		/* closes after the first reply */
	OTHER_DEVICE,
	MUTATED,		/* honest bytes with some of them changed */
};

static struct {
	atomic_int mode;
	atomic_uint seed;
	atomic_int connections, observes, mores;
	uint64_t cap, used, free;
	int listen_fd;
} w = { .cap = 20480 * MIB, .used = 5120 * MIB, .free = 15360 * MIB };

struct bytes {
	uint8_t b[256 * 1024];
	size_t n;
};

static void add(struct bytes *o, const void *p, size_t n)
{
	memcpy(o->b + o->n, p, n);
	o->n += n;
}

static void add32(struct bytes *o, uint32_t v) { add(o, &v, 4); }
static void add64(struct bytes *o, uint64_t v) { add(o, &v, 8); }

static void add_text(struct bytes *o, const char *s, size_t n)
{
	memset(o->b + o->n, 0, n);
	memcpy(o->b + o->n, s, strlen(s));
	o->n += n;
}

static void add_device(struct bytes *o, int i, enum mode m)
{
	int32_t attr[150] = { [13] = 1980000, [16] = 132, [20] = 0, [32] = 1, [36] = 3201000, [37] = 6144,
			      [84] = 0, [139] = 0x233510de, [140] = 0x18be10de };
	uint8_t ok[150] = { [13] = 1, [16] = 1, [20] = 1, [32] = 1, [36] = 1, [37] = 1, [84] = 1, [139] = 1, [140] = 1 };
	uint8_t uuid[16] = { 0xa1, 0xb2, 0xc3, 0xd4, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, (uint8_t)i };
	char id[24];

	if (m == OTHER_DEVICE)
		uuid[0] = 0xff;
	add_text(o, "NVIDIA H200", 96);
	add(o, uuid, 16);
	add64(o, w.cap);
	add64(o, 143771 * MIB);
	add32(o, 0);
	add32(o, 0x41 + (uint32_t)i);
	add32(o, 0);
	add32(o, 0);
	snprintf(id, sizeof id, "0000:%02x:00.0", 0x41 + i);
	add_text(o, id, 24);
	add64(o, 2 * MIB);
	add64(o, 2 * MIB);
	add32(o, 0);
	add32(o, (uint32_t)-5);
	add64(o, 0);
	for (int k = 0; k < 8; k++)
		add64(o, ~0ull);
	add32(o, 9);
	add32(o, 0);
	add32(o, m == ATTRS_HUGE ? 0x40000000 : 150);
	add(o, attr, sizeof attr);
	add(o, ok, sizeof ok);
	while (o->n % 8)
		o->b[o->n++] = 0;
}

static bool mutate(struct bytes *o, unsigned *seed)
{
	size_t before = o->n;
	int changes = rand_r(seed) % 6;

	for (int k = changes; k > 0; k--)
		o->b[(unsigned)rand_r(seed) % o->n] = (uint8_t)rand_r(seed);
	if (rand_r(seed) % 4 == 0)
		o->n = (unsigned)rand_r(seed) % (o->n + 1);
	return changes || o->n != before;
}

static bool push(int fd, const void *p, size_t n)
{
	const uint8_t *b = p;

	while (n) {
		ssize_t r = send(fd, b, n, MSG_NOSIGNAL);

		if (r <= 0)
			return false;
		b += r;
		n -= (size_t)r;
	}
	return true;
}

static bool pull(int fd, void *p, size_t n)
{
	return recv(fd, p, n, MSG_WAITALL) == (ssize_t)n;
}

static bool welcome(int fd, enum mode m, unsigned *seed)
{
	static struct bytes snap, out;
	uint32_t status = 0, ndev = 2;
	const char *reason = "because the test says so";

	snap.n = out.n = 0;
	if (m >= REFUSE_VERSION && m <= REFUSE_BUSY) {
		status = m == REFUSE_VERSION ? 1 : m == REFUSE_FINGERPRINT ? 2 : m == REFUSE_LEASE ? 3 : 6;
		add(&snap, reason, strlen(reason));
	} else {
		add32(&snap, 13010);
		add32(&snap, m == DEVICES_HUGE ? 0xffffff : ndev);
		add32(&snap, 10000);
		add32(&snap, 0);
		add_text(&snap, "580.159.04", 32);
		add_text(&snap, "r580_00", 80);
		for (uint32_t i = 0; i < ndev; i++)
			add_device(&snap, (int)i, m);
		if (m == WELCOME_LONG)
			add64(&snap, 0);
	}
	add32(&out, m == BAD_MAGIC ? 0x20545448 : 0x4c43574c);
	add32(&out, m == BAD_VERSION ? 2 : 1);
	add32(&out, status);
	add32(&out, m == WELCOME_HUGE ? 0xfffffff0 : (uint32_t)snap.n);
	add(&out, snap.b, m == WELCOME_SHORT ? snap.n / 2 : snap.n);
	if (m == MUTATED && mutate(&out, seed)) {
		/* A length that grew must not cost the test five seconds of waiting. */
		push(fd, out.b, out.n);
		shutdown(fd, SHUT_WR);
		return true;
	}
	return push(fd, out.b, out.n) && m != WELCOME_SHORT;
}

static void add_frame(struct bytes *o, uint32_t size, uint16_t kind, uint32_t call, int32_t result)
{
	uint16_t op = CTL_OBSERVE;

	add32(o, size);
	add(o, &kind, 2);
	add(o, &op, 2);
	add32(o, call);
	add32(o, (uint32_t)result);
	add32(o, 0);
	add32(o, 0);
}

static bool readings(int fd, enum mode m, uint32_t dev, uint32_t call, unsigned *seed)
{
	static struct bytes body, out;
	uint32_t nproc = m == MANY ? SL_MAX_PROCESSES : dev == 0 ? 2 : 0;
	uint32_t na = m == NO_READINGS ? NV_NA : 0;

	body.n = out.n = 0;
	add64(&body, w.cap);
	add64(&body, w.used);
	add64(&body, w.free);
	add32(&body, 37 | na);		/* gpu % */
	add32(&body, 12 | na);		/* memory % */
	add32(&body, 41 | na);
	add32(&body, 312500 | na);
	add32(&body, 700000 | na);
	add32(&body, 1755 | na);
	add32(&body, 3201 | na);
	add32(&body, 0 | na);		/* pstate */
	add32(&body, NV_NA);		/* no fan */
	add32(&body, 1 | na);		/* persistence */
	add32(&body, m == OBS_PROCS_HUGE ? 0x4924925 : m == OBS_PROCS_LIE ? nproc + 3 : nproc);
	for (uint32_t i = 0; i < nproc; i++) {
		add32(&body, i ? 4242 + i : (uint32_t)getpid());
		add32(&body, 0);
		add64(&body, i ? 1024 * MIB : 4096 * MIB);
		add_text(&body, i ? "train\x1b.py" : "python3", 40);
	}
	if (m == BEATS || m == OBS_BEAT_FOREVER) {
		add_frame(&out, 0, 8, 0, 0);
		add_frame(&out, 0, 8, 0, 0);
	}
	if (m == OBS_BYE) {
		add_frame(&out, 4, 7, 0, 0);
		add(&out, "bye!", 4);
	} else if (m != OBS_BEAT_FOREVER) {
		add_frame(&out, m == OBS_HUGE ? 0xffffffff : (uint32_t)body.n, 1, call + (m == OBS_CALL), m == OBS_RESULT ? 999 : 0);
		add(&out, body.b, m == OBS_SHORT ? body.n / 2 : body.n);
	}
	if (m == MUTATED && mutate(&out, seed)) {
		push(fd, out.b, out.n);
		return false;
	}
	return push(fd, out.b, out.n) && m != OBS_SHORT && m != OBS_BYE && m != ONE_REPLY;
}

/* Each reading is its number plus a hundred, but for one that nobody knows; traffic is there if it was asked for. */
static bool more(int fd, enum mode m, uint32_t call, bool traffic)
{
	static struct bytes out;

	out.n = 0;
	add_frame(&out, m == OBS_SHORT ? 4 : 4 * SL_READING_COUNT, 1, call, 0);
	for (uint32_t i = 0; i < (m == OBS_SHORT ? 1 : SL_READING_COUNT); i++) {
		bool known = i != SL_READING_TEMP_MEM_MAX && (traffic || (i != SL_READING_PCIE_SENT && i != SL_READING_PCIE_RECEIVED));

		add32(&out, m == NO_READINGS || !known ? NV_NA : 100 + i);
	}
	atomic_fetch_add(&w.mores, 1);
	return push(fd, out.b, out.n);
}

/* Two devices that read each other's memory and have one NVLink each, whose values are its numbers plus ten. */
static bool links(int fd, enum mode m, uint32_t call)
{
	struct wire_observe_links_reply r;
	static struct bytes out;
	size_t n = m == OBS_SHORT ? 4 : sizeof r;

	memset(&r, 0xff, sizeof r);
	if (m != NO_READINGS) {
		memset(r.peer, 0, 10 * sizeof *r.peer);
		r.peer[4] = r.peer[9] = 5;
		r.ancestor[0] = 0;
		r.ancestor[1] = 40;
		for (uint32_t i = 0; i < SL_NVLINK_VALUES; i++)
			r.nvlink[i] = 10 + i;
		r.nvlink[SL_NVLINK_CAPS] = 5;
		r.nvlink[SL_NVLINK_DOMAIN] = 0;
	}
	out.n = 0;
	add_frame(&out, (uint32_t)n, 1, call, 0);
	add(&out, &r, n);
	return push(fd, out.b, out.n);
}

/* Each fact is its number plus a thousand, but for one that nobody knows. */
static bool facts(int fd, enum mode m, uint32_t call)
{
	static struct bytes out;
	uint32_t n = m == OBS_SHORT ? 1 : SL_FACT_COUNT;

	out.n = 0;
	add_frame(&out, 4 * n, 1, call, 0);
	for (uint32_t i = 0; i < n; i++)
		add32(&out, m == NO_READINGS || i == SL_FACT_FANS ? NV_NA : 1000 + i);
	return push(fd, out.b, out.n);
}

/* Each text is its number and what a terminal would obey; that of the GSP is all the bytes there can be. */
static bool words(int fd, enum mode m, uint32_t call, uint32_t which)
{
	struct wire_observe_text_reply r = { 0 };
	static struct bytes out;
	size_t n = m == OBS_SHORT ? 4 : sizeof r;

	if (m != NO_READINGS)
		snprintf(r.text, sizeof r.text, "text\x1b%u", which);
	if (which == SL_TEXT_GSP)
		memset(r.text, 'g', sizeof r.text);
	out.n = 0;
	add_frame(&out, (uint32_t)n, 1, call, 0);
	add(&out, &r, n);
	return push(fd, out.b, out.n);
}

static void serve(int fd)
{
	enum mode m = atomic_load(&w.mode);
	unsigned seed = atomic_load(&w.seed);
	uint8_t hello[128], req[24];
	uint32_t v;

	atomic_fetch_add(&w.connections, 1);
	if (!pull(fd, hello, sizeof hello) || memcmp(hello, "SLUICE\r\n\1\0\0\0\2\0\0\0", 16)) {
		fprintf(stderr, "worker: not an observer's HELLO\n");
		return;
	}
	memcpy(&v, hello + 64, 4);
	if (v == 0 || !hello[88] || hello[127])
		fprintf(stderr, "worker: HELLO without process or program\n");
	if (m == SILENT) {
		pull(fd, req, 1); /* until the other side gives up */
		return;
	}
	if (!welcome(fd, m, &seed))
		return;
	while (pull(fd, req, 20)) {
		uint32_t dev, call;

		memcpy(&call, req + 8, 4);
		memcpy(&dev, req + 16, 4);
		if (!memcmp(req, "\10\0\0\0\x1a\xf0\1\0", 8) && pull(fd, req + 20, 4)) {
			if (!more(fd, m, call, req[20]))
				return;
			continue;
		}
		if (!memcmp(req, "\4\0\0\0\x1e\xf0\1\0", 8)) {
			atomic_fetch_add(&w.mores, 1);
			if (!links(fd, m, call))
				return;
			continue;
		}
		if (!memcmp(req, "\4\0\0\0\x21\xf0\1\0", 8)) {
			if (!facts(fd, m, call))
				return;
			continue;
		}
		if (!memcmp(req, "\10\0\0\0\x20\xf0\1\0", 8) && pull(fd, req + 20, 4)) {
			if (!words(fd, m, call, req[20]))
				return;
			continue;
		}
		atomic_fetch_add(&w.observes, 1);
		if (memcmp(req, "\4\0\0\0\x0e\xf0\1\0", 8) || !call) {
			fprintf(stderr, "worker: not an OBSERVE\n");
			return;
		}
		if (m == OBS_CLOSE)
			return;
		if (m == OBS_BEAT_FOREVER) {
			while (readings(fd, m, dev, call, &seed))
				usleep(50000);
			return;
		}
		if (!readings(fd, m, dev, call, &seed))
			return;
	}
}

static void *accept_all(void *arg)
{
	(void)arg;
	for (;;) {
		int fd = accept4(w.listen_fd, NULL, NULL, SOCK_CLOEXEC);

		if (fd < 0)
			return NULL;
		serve(fd);
		close(fd);
	}
}

static void *serve_one(void *arg)
{
	serve((int)(intptr_t)arg);
	close((int)(intptr_t)arg);
	return NULL;
}

static int listen_on(const char *path)
{
	struct sockaddr_un un = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(un.sun_path, sizeof un.sun_path, "%s", path);
	unlink(path);
	if (fd < 0 || bind(fd, (struct sockaddr *)&un, sizeof un) || listen(fd, 16)) {
		perror(path);
		exit(1);
	}
	return fd;
}

static int serve_until_eof(const char *path, uint64_t cap)
{
	w.cap = cap;
	w.used = cap / 4;
	w.free = cap - w.used;
	w.listen_fd = listen_on(path);
	puts("ready");
	fflush(stdout);
	for (;;) {
		struct pollfd p[2] = { { .fd = 0, .events = POLLIN }, { .fd = w.listen_fd, .events = POLLIN } };
		pthread_t t;
		int fd;

		if (poll(p, 2, -1) < 0)
			return 1;
		if (p[0].revents) {
			unlink(path);
			return 0;
		}
		fd = accept4(w.listen_fd, NULL, NULL, SOCK_CLOEXEC);
		if (fd >= 0 && !pthread_create(&t, NULL, serve_one, (void *)(intptr_t)fd))
			pthread_detach(t);
	}
}

/* ---- the library, as a program has it ---- */

static void *lib;
static int failed, passed;

#define CHECK(cond) \
	do { \
		if (cond) { \
			passed++; \
		} else { \
			failed++; \
			printf("%s:%d: %s\n", __FILE__, __LINE__, #cond); \
		} \
	} while (0)

static void *sym(const char *name)
{
	void *p = dlsym(lib, name);

	if (!p) {
		printf("%s is missing\n", name);
		exit(1);
	}
	return p;
}

/* Calls a function of the library with whatever arguments; all are words or pointers. */
#define CALL(name, ...) (((int (*)())sym(#name))(__VA_ARGS__))

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* A fresh start against a worker of this mode; what nvmlInit says. */
static int start(enum mode m)
{
	while (!CALL(nvmlShutdown))
		;
	atomic_store(&w.mode, m);
	return CALL(nvmlInit_v2);
}

static nvmlDevice_t first(void)
{
	nvmlDevice_t d = NULL;

	CALL(nvmlDeviceGetHandleByIndex_v2, 0, &d);
	return d;
}

static int read_memory(void)
{
	nvmlMemory_t m;

	return CALL(nvmlDeviceGetMemoryInfo, first(), &m);
}

static void test_library(void)
{
	nvmlSystemDriverBranchInfo_v1_t branch = { .version = NVML_VERSION_OF(nvmlSystemDriverBranchInfo_v1_t, 1) };
	unsigned int n;
	char text[80];
	const size_t *table;
	int v;

	CHECK(CALL(nvmlShutdown) == NVML_ERROR_UNINITIALIZED);
	CHECK(CALL(nvmlDeviceGetCount_v2, &n) == NVML_ERROR_UNINITIALIZED);
	CHECK(CALL(nvmlDeviceGetSerial, NULL, NULL, 0) == NVML_ERROR_UNINITIALIZED);
	CHECK(start(GOOD) == 0 && CALL(nvmlInit) == 0 && CALL(nvmlInitWithFlags, 1) == 0);
	CHECK(CALL(nvmlShutdown) == 0 && CALL(nvmlShutdown) == 0);
	CHECK(CALL(nvmlDeviceGetCount, &n) == 0 && n == 2);
	CHECK(CALL(nvmlShutdown) == 0);
	CHECK(CALL(nvmlDeviceGetCount, &n) == NVML_ERROR_UNINITIALIZED);

	CHECK(start(GOOD) == 0);
	CHECK(CALL(nvmlSystemGetDriverVersion, text, 80) == 0 && !strcmp(text, "580.159.04"));
	CHECK(CALL(nvmlSystemGetDriverVersion, text, 4) == NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(CALL(nvmlSystemGetDriverBranch, &branch, 80) == 0 && !strcmp(branch.branch, "r580_00"));
	CHECK(CALL(nvmlSystemGetDriverBranch, &branch, 7) == NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(CALL(nvmlSystemGetDriverBranch, NULL, 80) == NVML_ERROR_INVALID_ARGUMENT);
	branch.version++;
	CHECK(CALL(nvmlSystemGetDriverBranch, &branch, 80) == NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	CHECK(CALL(nvmlSystemGetNVMLVersion, text, 80) == 0 && !strcmp(text, "13.580.159.04"));
	CHECK(CALL(nvmlSystemGetCudaDriverVersion_v2, &v) == 0 && v == 13000);
	CHECK(CALL(nvmlSystemGetCudaDriverVersion, &v) == 0 && v == 13000);
	CHECK(CALL(nvmlUnitGetCount, &n) == 0 && n == 0);
	CHECK(CALL(nvmlInternalGetExportTable, &table, "\xc4\xfe\x3e\x6c\xc9\x8f\x6c\x4e\xa3\x27\xee\x69\x6e\x12\xf7\xc4") == 0 && table[0] == 8192);
	CHECK(CALL(nvmlInternalGetExportTable, &table, "0123456789abcdef") == NVML_ERROR_NOT_FOUND);
	CHECK(!strcmp(((const char *(*)(int))sym("nvmlErrorString"))(3), "Not Supported"));
	CHECK(((const char *(*)(int))sym("nvmlErrorString"))(-7) != NULL);
	/* Refused by name, with NVML's codes. */
	CHECK(CALL(nvmlDeviceGetSerial, first(), text, 80) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetGpuFabricInfoV, first(), text) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceSetComputeMode, first(), 1) == NVML_ERROR_NO_PERMISSION);
	CHECK(CALL(nvmlDeviceSetPersistenceMode, first(), 0) == NVML_ERROR_NO_PERMISSION);
}

static void test_finding(void)
{
	nvmlUUID_v1_t u = { .version = NVML_VERSION_OF(nvmlUUID_v1_t, 1), .type = NVML_UUID_TYPE_ASCII };
	nvmlDevice_t a, b, d = NULL;
	nvmlPciInfoExt_v1_t ext = { .version = NVML_VERSION_OF(nvmlPciInfoExt_v1_t, 1) };
	struct { nvmlPciInfo_v1_t p; uint32_t guard; } p1 = { .guard = 0xabad1dea };
	struct { nvmlPciInfo_v2_t p; uint32_t guard; } p2 = { .guard = 0xabad1dea };
	struct { nvmlPciInfo_t p; uint32_t guard; } p3 = { .guard = 0xabad1dea };
	unsigned int i;
	char uuid[80];

	CHECK(start(GOOD) == 0);
	CHECK(CALL(nvmlDeviceGetHandleByIndex, 0, &a) == 0 && CALL(nvmlDeviceGetHandleByIndex_v2, 1, &b) == 0 && a != b);
	CHECK(CALL(nvmlDeviceGetHandleByIndex_v2, 2, &d) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetIndex, b, &i) == 0 && i == 1);
	CHECK(CALL(nvmlDeviceGetIndex, NULL, &i) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetIndex, &i, &i) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetIndex, a, NULL) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetUUID, b, uuid, 80) == 0 && !strcmp(uuid, "GPU-a1b2c3d4-0102-0304-0506-0708090a0b01"));
	CHECK(CALL(nvmlDeviceGetUUID, b, uuid, 40) == NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(CALL(nvmlDeviceGetHandleByUUID, "GPU-A1B2C3D4-0102-0304-0506-0708090A0B01", &d) == 0 && d == b);
	CHECK(CALL(nvmlDeviceGetHandleByUUID, "a1b2c3d4-0102-0304-0506-0708090a0b01", &d) == 0 && d == b);
	CHECK(CALL(nvmlDeviceGetHandleByUUID, "GPU-a1b2c3d4", &d) == NVML_ERROR_NOT_FOUND);
	strcpy(u.value.str, "GPU-a1b2c3d4-0102-0304-0506-0708090a0b00");
	CHECK(CALL(nvmlDeviceGetHandleByUUIDV, &u, &d) == 0 && d == a);
	u.type = NVML_UUID_TYPE_BINARY;
	memcpy(u.value.bytes, "\xa1\xb2\xc3\xd4\1\2\3\4\5\6\7\x08\x09\x0a\x0b\1", 16);
	CHECK(CALL(nvmlDeviceGetHandleByUUIDV, &u, &d) == 0 && d == b);
	u.version++;
	CHECK(CALL(nvmlDeviceGetHandleByUUIDV, &u, &d) == NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	CHECK(CALL(nvmlDeviceGetHandleByPciBusId_v2, "00000000:42:00.0", &d) == 0 && d == b);
	CHECK(CALL(nvmlDeviceGetHandleByPciBusId, "0000:41:00.0", &d) == 0 && d == a);
	CHECK(CALL(nvmlDeviceGetHandleByPciBusId_v2, "41:0", &d) == 0 && d == a);
	CHECK(CALL(nvmlDeviceGetHandleByPciBusId_v2, "0001:41:00.0", &d) == NVML_ERROR_NOT_FOUND);
	for (const char *const *s = (const char *const[]){ "", ":", "41", "41:00.9", "41:00.0x", "0:0:41:00.0", "fffffffff:41:0", "zz:00.0", NULL }; *s; s++)
		CHECK(CALL(nvmlDeviceGetHandleByPciBusId_v2, *s, &d) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetPciInfo_v3, b, &p3) == 0 && p3.guard == 0xabad1dea && p3.p.bus == 0x42 && p3.p.pciDeviceId == 0x233510de);
	CHECK(!strcmp(p3.p.busId, "00000000:42:00.0") && !strcmp(p3.p.busIdLegacy, "0000:42:00.0"));
	CHECK(CALL(nvmlDeviceGetPciInfo_v2, b, &p2) == 0 && p2.guard == 0xabad1dea && !strcmp(p2.p.busId, "0000:42:00.0"));
	CHECK(CALL(nvmlDeviceGetPciInfo, b, &p1) == 0 && p1.guard == 0xabad1dea && !strcmp(p1.p.busId, "0000:42:00.0"));
	CHECK(CALL(nvmlDeviceGetPciInfoExt, b, &ext) == 0 && !strcmp(ext.busId, "00000000:42:00.0"));
	/* What CUDA_VISIBLE_DEVICES hides from CUDA it does not hide from NVML. */
	setenv("CUDA_VISIBLE_DEVICES", "1", 1);
	CHECK(start(GOOD) == 0 && CALL(nvmlDeviceGetCount_v2, &i) == 0 && i == 2);
	unsetenv("CUDA_VISIBLE_DEVICES");
}

static void test_device(void)
{
	nvmlTemperature_v1_t t = { .version = NVML_VERSION_OF(nvmlTemperature_v1_t, 1) };
	nvmlFieldValue_t f[3] = { { .fieldId = NVML_FI_DEV_POWER_AVERAGE }, { .fieldId = 95 }, { .fieldId = NVML_FI_DEV_GPU_TEMP } };
	nvmlMemory_v2_t m2 = { .version = NVML_VERSION_OF(nvmlMemory_v2_t, 2) };
	nvmlMemory_t m;
	nvmlUtilization_t u;
	unsigned int n, k;
	int major, minor;
	char name[96];
	nvmlDevice_t d;

	CHECK(start(GOOD) == 0);
	d = first();
	CHECK(CALL(nvmlDeviceGetName, d, name, 96) == 0 && !strcmp(name, "NVIDIA H200"));
	CHECK(CALL(nvmlDeviceGetCudaComputeCapability, d, &major, &minor) == 0 && major == 9 && minor == 0);
	CHECK(CALL(nvmlDeviceGetArchitecture, d, &n) == 0 && n == NVML_DEVICE_ARCH_HOPPER);
	CHECK(CALL(nvmlDeviceGetBrand, d, &n) == 0 && n == NVML_BRAND_NVIDIA);
	CHECK(CALL(nvmlDeviceGetNumGpuCores, d, &n) == 0 && n == 132 * 128);
	CHECK(CALL(nvmlDeviceGetMemoryBusWidth, d, &n) == 0 && n == 6144);
	CHECK(CALL(nvmlDeviceGetComputeMode, d, &n) == 0 && n == 0);
	CHECK(CALL(nvmlDeviceGetEccMode, d, &n, &k) == 0 && n == 1 && k == 1);
	CHECK(CALL(nvmlDeviceGetMigMode, d, &n, &k) == 0 && n == 0 && k == 0);
	CHECK(CALL(nvmlDeviceGetMaxClockInfo, d, NVML_CLOCK_SM, &n) == 0 && n == 1980);
	CHECK(CALL(nvmlDeviceGetMaxClockInfo, d, NVML_CLOCK_MEM, &n) == 0 && n == 3201);

	CHECK(CALL(nvmlDeviceGetMemoryInfo, d, &m) == 0 && m.total == w.cap && m.free == w.free && m.used == w.used);
	CHECK(CALL(nvmlDeviceGetMemoryInfo_v2, d, &m2) == 0 && m2.total == w.cap && m2.free == w.free && m2.used == w.used && !m2.reserved);
	m2.version = 0;
	CHECK(CALL(nvmlDeviceGetMemoryInfo_v2, d, &m2) == NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	CHECK(CALL(nvmlDeviceGetUtilizationRates, d, &u) == 0 && u.gpu == 37 && u.memory == 12);
	CHECK(CALL(nvmlDeviceGetTemperature, d, 0, &n) == 0 && n == 41);
	CHECK(CALL(nvmlDeviceGetTemperature, d, 1, &n) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetTemperatureV, d, &t) == 0 && t.temperature == 41);
	CHECK(CALL(nvmlDeviceGetPowerUsage, d, &n) == 0 && n == 312500);
	CHECK(CALL(nvmlDeviceGetEnforcedPowerLimit, d, &n) == 0 && n == 700000);
	CHECK(CALL(nvmlDeviceGetClockInfo, d, NVML_CLOCK_MEM, &n) == 0 && n == 3201);
	CHECK(CALL(nvmlDeviceGetClock, d, NVML_CLOCK_SM, 0, &n) == 0 && n == 1755);
	CHECK(CALL(nvmlDeviceGetPerformanceState, d, &n) == 0 && n == 0);
	CHECK(CALL(nvmlDeviceGetFanSpeed, d, &n) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetPersistenceMode, d, &n) == 0 && n == 1);
	CHECK(CALL(nvmlDeviceGetFieldValues, d, 3, f) == 0 && f[0].nvmlReturn == 0 && f[0].value.uiVal == 312500);
	CHECK(f[1].nvmlReturn == NVML_ERROR_NOT_SUPPORTED && f[2].value.uiVal == 41);

	/* What the worker cannot read is not supported; a sentinel is never a value. */
	CHECK(start(NO_READINGS) == 0);
	CHECK(CALL(nvmlDeviceGetUtilizationRates, d, &u) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetTemperature, d, 0, &n) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetPowerUsage, d, &n) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetPerformanceState, d, &n) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetFieldValues, d, 1, f) == 0 && f[0].nvmlReturn == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetMemoryInfo, d, &m) == 0 && m.total == w.cap);
}

static void test_processes(void)
{
	nvmlProcessInfo_v1_t p1[4];
	nvmlProcessInfo_v2_t p2[4];
	nvmlProcessDetail_v1_t pd[4];
	nvmlProcessDetailList_v1_t l = { .version = NVML_VERSION_OF(nvmlProcessDetailList_v1_t, 1), .numProcArrayEntries = 4, .procArray = pd };
	unsigned int n = 0, me = (unsigned int)getpid();
	static nvmlProcessInfo_v2_t many[SL_MAX_PROCESSES];
	nvmlDevice_t d, second;
	char name[80];

	CHECK(start(GOOD) == 0);
	d = first();
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3, d, &n, NULL) == NVML_ERROR_INSUFFICIENT_SIZE && n == 2);
	n = 1;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3, d, &n, p2) == NVML_ERROR_INSUFFICIENT_SIZE && n == 2);
	n = 4;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3, d, &n, p2) == 0 && n == 2);
	CHECK(p2[0].pid == me && p2[0].usedGpuMemory == 4096 * MIB && p2[0].gpuInstanceId == ~0u && p2[1].pid == 4243);
	n = 4;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v2, d, &n, p2) == 0 && n == 2);
	n = 4;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses, d, &n, p1) == 0 && n == 2 && p1[1].usedGpuMemory == 1024 * MIB);
	CHECK(CALL(nvmlDeviceGetRunningProcessDetailList, d, &l) == 0 && l.numProcArrayEntries == 2 && pd[0].pid == me);
	n = 4;
	CHECK(CALL(nvmlDeviceGetGraphicsRunningProcesses_v3, d, &n, p2) == 0 && n == 0);
	CHECK(CALL(nvmlDeviceGetHandleByIndex_v2, 1, &second) == 0);
	n = 0;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3, second, &n, NULL) == 0 && n == 0);
	CHECK(CALL(nvmlSystemGetProcessName, me, name, 80) == 0 && !strcmp(name, "python3"));
	CHECK(CALL(nvmlSystemGetProcessName, 4243, name, 80) == 0 && !strcmp(name, "train?.py")); /* no escape gets through */
	CHECK(CALL(nvmlSystemGetProcessName, me, name, 3) == NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(CALL(nvmlSystemGetProcessName, 1, name, 80) == NVML_ERROR_NOT_FOUND);
	CHECK(start(MANY) == 0);
	n = SL_MAX_PROCESSES;
	CHECK(CALL(nvmlDeviceGetComputeRunningProcesses_v3, first(), &n, many) == 0 && n == SL_MAX_PROCESSES && many[1023].pid == 4242 + 1023);
}

static void test_more(void)
{
	nvmlFieldValue_t f[3] = { { .fieldId = NVML_FI_DEV_MEMORY_TEMP }, { .fieldId = NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION }, { .fieldId = 9999 } };
	unsigned int v, u;
	unsigned long long l;
	nvmlDevice_t d;
	int before;

	CHECK(start(GOOD) == 0);
	d = first();
	CHECK(CALL(nvmlDeviceGetCurrPcieLinkGeneration, d, &v) == 0 && v == 100 + SL_READING_PCIE_GENERATION);
	before = atomic_load(&w.mores);
	CHECK(CALL(nvmlDeviceGetCurrPcieLinkWidth, d, &v) == 0 && v == 100 + SL_READING_PCIE_WIDTH);
	CHECK(CALL(nvmlDeviceGetPowerManagementLimitConstraints, d, &v, &u) == 0 && v == 100 + SL_READING_POWER_MIN && u == 100 + SL_READING_POWER_MAX);
	CHECK(CALL(nvmlDeviceGetTemperatureThreshold, d, 3, &v) == 0 && v == 100 + SL_READING_TEMP_GPU_MAX);
	CHECK(CALL(nvmlDeviceGetTemperatureThreshold, d, 2, &v) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetTemperatureThreshold, d, 4, &v) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetApplicationsClock, d, NVML_CLOCK_MEM, &v) == 0 && v == 100 + SL_READING_APP_MEM_MHZ);
	CHECK(CALL(nvmlDeviceGetClockInfo, d, NVML_CLOCK_VIDEO, &v) == 0 && v == 100 + SL_READING_VIDEO_MHZ);
	CHECK(CALL(nvmlDeviceGetCurrentClocksEventReasons, d, &l) == 0 && l == ((100 + SL_READING_THROTTLED) | (101ull + SL_READING_THROTTLED) << 32));
	CHECK(CALL(nvmlDeviceGetFieldValues, d, 3, f) == 0 && !f[0].nvmlReturn && f[0].value.uiVal == 100 + SL_READING_TEMP_MEM);
	CHECK(!f[1].nvmlReturn && f[1].valueType == NVML_VALUE_TYPE_UNSIGNED_LONG_LONG && f[1].value.ullVal >> 32 == 101 + SL_READING_ENERGY);
	CHECK(f[2].nvmlReturn == NVML_ERROR_NOT_SUPPORTED);
	CHECK(atomic_load(&w.mores) - before <= 1);
	CHECK(CALL(nvmlDeviceGetPcieThroughput, d, NVML_PCIE_UTIL_RX_BYTES, &v) == 0 && v == 100 + SL_READING_PCIE_RECEIVED);
	CHECK(CALL(nvmlDeviceGetPcieThroughput, d, 2, &v) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetEncoderUtilization, d, &v, NULL) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(start(NO_READINGS) == 0);
	CHECK(CALL(nvmlDeviceGetMaxPcieLinkWidth, first(), &v) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetTotalEnergyConsumption, first(), &l) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(start(OBS_SHORT) == 0);
	CHECK(CALL(nvmlDeviceGetMaxPcieLinkWidth, first(), &v) == NVML_ERROR_GPU_IS_LOST);
}

static void test_words(void)
{
	nvmlDeviceCurrentClockFreqs_v1_t c = { .version = NVML_VERSION_OF(nvmlDeviceCurrentClockFreqs_v1_t, 1) };
	nvmlDeviceCapabilities_v1_t caps = { .version = NVML_VERSION_OF(nvmlDeviceCapabilities_v1_t, 1) };
	unsigned int v, u[4];
	unsigned long set[128];
	nvmlDevice_t d;
	char s[80];

	CHECK(start(GOOD) == 0);
	d = first();
	CHECK(CALL(nvmlDeviceGetVbiosVersion, d, s, 32) == 0 && !strcmp(s, "text?0"));
	CHECK(CALL(nvmlDeviceGetVbiosVersion, NULL, s, 32) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetInforomVersion, d, 1, s, 16) == 0 && !strcmp(s, "text?4"));
	CHECK(CALL(nvmlDeviceGetInforomVersion, d, 3, s, 16) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetGspFirmwareVersion, d, s) == NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(CALL(nvmlDeviceGetCurrentClockFreqs, d, &c) == 0 && !strcmp(c.str, "text?7"));
	CHECK(CALL(nvmlDeviceGetModuleId, d, &v) == 0 && v == 1000 + SL_FACT_MODULE_ID);
	CHECK(CALL(nvmlDeviceGetNumFans, d, &v) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetCapabilities, d, &caps) == 0 && caps.capMask == 1000 + SL_FACT_CAPABILITIES);
	CHECK(CALL(nvmlDeviceGetRemappedRows, d, u, u + 1, u + 2, u + 3) == 0 && u[3] == 1000 + SL_FACT_ROWS_FAILED);
	CHECK(CALL(nvmlDeviceGetRemappedRows, d, u, NULL, u + 2, u + 3) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceValidateInforom, d) == 0);
	/* All processors and memory of this machine are near; a set that is too small is not filled in part in silence. */
	CHECK(CALL(nvmlDeviceGetCpuAffinity, d, 128, set) == 0 && *set & 1);
	CHECK(CALL(nvmlDeviceGetCpuAffinityWithinScope, d, 128, set, 1) == 0 && *set & 1);
	CHECK(CALL(nvmlDeviceGetCpuAffinity, d, 0, set) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetMemoryAffinity, d, 128, set, 0) == 0 && *set);
	CHECK(CALL(nvmlDeviceGetMemoryAffinity, d, 128, set, 2) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(start(NO_READINGS) == 0);
	CHECK(CALL(nvmlDeviceGetVbiosVersion, first(), s, 32) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetRemappedRows, first(), u, u + 1, u + 2, u + 3) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceValidateInforom, first()) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(start(OBS_SHORT) == 0);
	CHECK(CALL(nvmlDeviceGetVbiosVersion, first(), s, 32) == NVML_ERROR_GPU_IS_LOST);
}

static void test_links(void)
{
	nvmlFieldValue_t f[3] = { { .fieldId = NVML_FI_DEV_NVLINK_GET_STATE, .scopeId = 0 }, { .fieldId = NVML_FI_DEV_NVLINK_GET_STATE, .scopeId = 1 },
				  { .fieldId = NVML_FI_DEV_NVLINK_LINK_COUNT } };
	struct { nvmlPciInfo_t p; uint32_t guard; } pci = { .guard = 0xabad1dea };
	struct { nvmlPciInfo_v2_t p; uint32_t guard; } old = { .p.reserved[3] = 7, .guard = 0xabad1dea };
	nvmlDevice_t a, b;
	unsigned int n;
	int before;

	CHECK(start(GOOD) == 0);
	a = first();
	CHECK(CALL(nvmlDeviceGetHandleByIndex_v2, 1, &b) == 0);
	before = atomic_load(&w.mores);
	/* NCCL asks for every pair, a device and itself included, and takes no error. */
	CHECK(CALL(nvmlDeviceGetP2PStatus, a, a, 0, &n) == 0 && n == 0);
	CHECK(CALL(nvmlDeviceGetP2PStatus, a, b, 1, &n) == 0 && n == 0);
	CHECK(CALL(nvmlDeviceGetP2PStatus, a, b, 4, &n) == 0 && n == 5);
	CHECK(CALL(nvmlDeviceGetP2PStatus, a, NULL, 0, &n) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetP2PStatus, a, a, 5, &n) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetTopologyCommonAncestor, a, b, &n) == 0 && n == 40);
	CHECK(CALL(nvmlDeviceGetTopologyCommonAncestor, a, a, &n) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetNvLinkState, a, 0, &n) == 0 && n == 10 + SL_NVLINK_ACTIVE);
	CHECK(CALL(nvmlDeviceGetNvLinkState, a, 1, &n) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetNvLinkState, a, 18, &n) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetNvLinkState, a, 0, NULL) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetNvLinkCapability, a, 0, 0, &n) == 0 && n == 1);
	CHECK(CALL(nvmlDeviceGetNvLinkCapability, a, 0, 1, &n) == 0 && n == 0);
	CHECK(CALL(nvmlDeviceGetNvLinkCapability, a, 0, 6, &n) == NVML_ERROR_INVALID_ARGUMENT);
	CHECK(CALL(nvmlDeviceGetNvLinkVersion, a, 0, &n) == 0 && n == 10 + SL_NVLINK_VERSION);
	CHECK(CALL(nvmlDeviceGetNvLinkRemoteDeviceType, a, 0, &n) == 0 && n == 10 + SL_NVLINK_REMOTE_TYPE);
	CHECK(CALL(nvmlDeviceGetNvLinkRemotePciInfo_v2, a, 0, &pci.p) == 0 && pci.p.bus == 15 && !strcmp(pci.p.busId, "00000000:0F:10.0"));
	CHECK(!strcmp(pci.p.busIdLegacy, "0000:0F:10.0") && pci.guard == 0xabad1dea);
	CHECK(CALL(nvmlDeviceGetNvLinkRemotePciInfo, a, 0, &old.p) == 0 && !strcmp(old.p.busId, "0000:0F:10.0") && old.p.bus == 15);
	CHECK(old.p.reserved[3] == 7 && old.guard == 0xabad1dea);
	CHECK(CALL(nvmlDeviceGetNvLinkRemotePciInfo, a, 1, &pci.p) == NVML_ERROR_NOT_SUPPORTED);
	CHECK(CALL(nvmlDeviceGetFieldValues, a, 3, f) == 0 && !f[0].nvmlReturn && f[0].value.uiVal == 10 + SL_NVLINK_ACTIVE);
	CHECK(f[1].nvmlReturn == NVML_ERROR_NOT_SUPPORTED && !f[2].nvmlReturn && f[2].value.uiVal == 1);
	CHECK(atomic_load(&w.mores) - before == 1);
	CHECK(start(NO_READINGS) == 0 && CALL(nvmlDeviceGetHandleByIndex_v2, 1, &b) == 0);
	CHECK(CALL(nvmlDeviceGetP2PStatus, first(), b, 0, &n) == 0 && n == 5);
	CHECK(CALL(nvmlDeviceGetTopologyCommonAncestor, first(), b, &n) == 0 && n == 50);
	CHECK(start(OBS_SHORT) == 0 && CALL(nvmlDeviceGetHandleByIndex_v2, 1, &b) == 0);
	CHECK(CALL(nvmlDeviceGetP2PStatus, first(), b, 0, &n) == NVML_ERROR_GPU_IS_LOST);
}

/* Readings within 200 ms are one question; a keep-alive in between is no answer. */
static void test_cache(void)
{
	nvmlUtilization_t u;
	int before;

	CHECK(start(BEATS) == 0);
	before = atomic_load(&w.observes);
	for (int64_t until = now() + 100; now() < until;)
		if (CALL(nvmlDeviceGetUtilizationRates, first(), &u))
			break;
	CHECK(CALL(nvmlDeviceGetUtilizationRates, first(), &u) == 0);
	CHECK(atomic_load(&w.observes) - before <= 2);
	/* but memory is asked for each time */
	before = atomic_load(&w.observes);
	CHECK(read_memory() == 0 && read_memory() == 0);
	CHECK(atomic_load(&w.observes) - before == 2);
}

static void test_refusals(void)
{
	static const struct { enum mode m; int rc; } t[] = {
		{ REFUSE_VERSION, NVML_ERROR_LIB_RM_VERSION_MISMATCH }, { REFUSE_FINGERPRINT, NVML_ERROR_LIB_RM_VERSION_MISMATCH },
		{ REFUSE_LEASE, NVML_ERROR_NO_PERMISSION }, { REFUSE_BUSY, NVML_ERROR_UNKNOWN },
		{ BAD_VERSION, NVML_ERROR_LIB_RM_VERSION_MISMATCH }, { BAD_MAGIC, NVML_ERROR_UNKNOWN },
		{ WELCOME_HUGE, NVML_ERROR_UNKNOWN }, { WELCOME_SHORT, NVML_ERROR_UNKNOWN }, { WELCOME_LONG, NVML_ERROR_UNKNOWN },
		{ DEVICES_HUGE, NVML_ERROR_UNKNOWN }, { ATTRS_HUGE, NVML_ERROR_UNKNOWN },
	};
	unsigned int n;

	for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
		CHECK(start(t[i].m) == t[i].rc);
		CHECK(CALL(nvmlDeviceGetCount_v2, &n) == NVML_ERROR_UNINITIALIZED);
	}
	CHECK(start(GOOD) == 0 && read_memory() == 0);
}

static void test_hostile_readings(void)
{
	static const enum mode modes[] = { OBS_SHORT, OBS_HUGE, OBS_PROCS_HUGE, OBS_PROCS_LIE, OBS_CALL, OBS_RESULT, OBS_BYE, OBS_CLOSE };

	for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
		int64_t t = now(), calls;

		CHECK(start(modes[i]) == 0);
		CHECK(read_memory() == NVML_ERROR_GPU_IS_LOST);
		/* Told at once from here on, not after another attempt each. */
		calls = atomic_load(&w.connections);
		for (int k = 0; k < 20; k++)
			read_memory();
		CHECK(atomic_load(&w.connections) == calls && now() - t < 1000);
	}
	/* And found again when the worker is itself again. */
	atomic_store(&w.mode, GOOD);
	for (int64_t until = now() + 5000; read_memory() && now() < until;)
		usleep(20000);
	CHECK(read_memory() == 0);
}

/* A connection closed between two questions costs a new one, not an error. */
static void test_reconnect(void)
{
	int before;

	CHECK(start(ONE_REPLY) == 0 && read_memory() == 0);
	before = atomic_load(&w.connections);
	usleep(250000); /* until the reading is stale: there is no event for that */
	CHECK(read_memory() == 0);
	CHECK(atomic_load(&w.connections) == before + 1);
	/* Other devices behind the same address are not the program's devices. */
	atomic_store(&w.mode, OTHER_DEVICE);
	usleep(250000);
	CHECK(read_memory() == NVML_ERROR_GPU_IS_LOST);
}

static void test_silence(void)
{
	int64_t t = now();

	CHECK(start(SILENT) == NVML_ERROR_UNKNOWN);
	CHECK(now() - t >= 4500 && now() - t < 7000);
	CHECK(start(OBS_BEAT_FOREVER) == 0);
	t = now();
	CHECK(read_memory() == NVML_ERROR_GPU_IS_LOST);
	CHECK(now() - t < 12000);
}

static void test_fork(void)
{
	int st = -1;
	pid_t pid;

	CHECK(start(GOOD) == 0 && read_memory() == 0);
	fflush(stdout);
	pid = fork();
	if (!pid) {
		/* The child has no thread to serve it: its own worker is the parent's, over the socket. */
		unsigned int n = 0;
		int rc = CALL(nvmlDeviceGetCount_v2, &n);

		_exit(rc || n != 2 || CALL(nvmlShutdown) != 0);
	}
	CHECK(waitpid(pid, &st, 0) == pid && st == 0);
	usleep(250000);
	CHECK(read_memory() == 0); /* the child's shutdown left our connection alone */
	/* A child that reads gets a connection of its own, once the worker is free for it. */
	pid = fork();
	if (!pid)
		_exit(read_memory() != 0);
	CALL(nvmlShutdown); /* this worker serves one at a time */
	CHECK(waitpid(pid, &st, 0) == pid && st == 0);
}

static void *hammer(void *arg)
{
	(void)arg;
	for (int i = 0; i < 200; i++) {
		unsigned int n = 0;

		if (CALL(nvmlInit_v2))
			return "init";
		if (read_memory())
			return "memory";
		CALL(nvmlDeviceGetComputeRunningProcesses_v3, first(), &n, NULL);
		if (n != 2)
			return "processes";
		CALL(nvmlShutdown);
	}
	return NULL;
}

static void test_threads(void)
{
	pthread_t t[4];

	CHECK(start(GOOD) == 0);
	for (int i = 0; i < 4; i++)
		pthread_create(&t[i], NULL, hammer, NULL);
	for (int i = 0; i < 4; i++) {
		void *why;

		pthread_join(t[i], &why);
		CHECK(!why);
	}
}

/* Any bytes at all: the only duty is to stay alive and to say yes or no. */
static void test_mutated(void)
{
	int yes = 0;

	for (unsigned int i = 1; i <= 400; i++) {
		atomic_store(&w.seed, i * 2654435761u);
		if (start(MUTATED) == 0) {
			nvmlProcessInfo_v2_t p[8];
			unsigned int n = 8;
			char text[96];

			CALL(nvmlDeviceGetName, first(), text, 96);
			CALL(nvmlDeviceGetUUID, first(), text, 96);
			CALL(nvmlDeviceGetArchitecture, first(), &n);
			CALL(nvmlDeviceGetNumGpuCores, first(), &n);
			yes += read_memory() == 0;
			n = 8;
			CALL(nvmlDeviceGetComputeRunningProcesses_v3, first(), &n, p);
		}
	}
	CHECK(yes > 0);
}

static void test_no_worker(const char *dir)
{
	char path[256];
	unsigned int n;

	start(GOOD);
	while (!CALL(nvmlShutdown))
		;
	for (const char *const *s = (const char *const[]){ "", "nonsense", "unix:/nonexistent/socket", "tcp:127.0.0.1:1", "tcp:", "tcp:nohost", NULL }; *s; s++) {
		setenv("SLUICE_WORKER", *s, 1);
		CHECK(CALL(nvmlInit_v2) == NVML_ERROR_DRIVER_NOT_LOADED);
		CHECK(CALL(nvmlDeviceGetCount_v2, &n) == NVML_ERROR_UNINITIALIZED);
	}
	unsetenv("SLUICE_WORKER");
	CHECK(CALL(nvmlInit_v2) == NVML_ERROR_DRIVER_NOT_LOADED);
	snprintf(path, sizeof path, "unix:%s/worker.sock", dir);
	setenv("SLUICE_WORKER", path, 1);
	setenv("SLUICE_LEASE", "0123", 1);
	CHECK(CALL(nvmlInit_v2) == NVML_ERROR_NO_PERMISSION);
	setenv("SLUICE_LEASE", "00112233445566778899aAbBcCdDeEfF", 1);
	CHECK(CALL(nvmlInit_v2) == 0);
	CALL(nvmlShutdown);
	unsetenv("SLUICE_LEASE");
}

/* A copy of the library with sluice.conf beside it, and no environment. */
static void test_conf(const char *library, const char *dir)
{
	char cmd[1024], path[256];
	void *copy;
	FILE *f;

	snprintf(cmd, sizeof cmd, "cp '%s' '%s/libnvidia-ml.so.1'", library, dir);
	CHECK(system(cmd) == 0);
	snprintf(path, sizeof path, "%s/sluice.conf", dir);
	f = fopen(path, "w");
	fprintf(f, "# where the worker is\nSLUICE_WORKERX=unix:/nonexistent\nSLUICE_WORKER=unix:%s/worker.sock \r\n"
		   "SLUICE_LEASE=00112233445566778899aabbccddeeff\n", dir);
	fclose(f);
	unsetenv("SLUICE_WORKER");
	snprintf(path, sizeof path, "%s/libnvidia-ml.so.1", dir);
	copy = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	CHECK(copy != NULL);
	if (copy) {
		atomic_store(&w.mode, GOOD);
		CHECK(((int (*)(void))dlsym(copy, "nvmlInit_v2"))() == 0);
		CHECK(((int (*)(void))dlsym(copy, "nvmlShutdown"))() == 0);
	}
	unlink(path);
	snprintf(path, sizeof path, "%s/sluice.conf", dir);
	unlink(path);
}

int main(int argc, char **argv)
{
	char dir[] = "/tmp/sluice-nvml-XXXXXX", path[256], env[300];
#ifdef NVML_LIBRARY
	const char *library = NVML_LIBRARY;
#else
	const char *library = NULL;
#endif
	pthread_t t;

	if (argc >= 3 && !strcmp(argv[1], "--serve"))
		return serve_until_eof(argv[2], (argc > 3 ? strtoull(argv[3], NULL, 10) : 20480) * MIB);
	if (argc > 1)
		library = argv[1];
	if (argc > 2 || !library || !mkdtemp(dir)) {
		fprintf(stderr, "usage: test_nvml [LIBRARY] | test_nvml --serve PATH [CAP_MIB]\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	snprintf(path, sizeof path, "%s/worker.sock", dir);
	w.listen_fd = listen_on(path);
	pthread_create(&t, NULL, accept_all, NULL);
	unsetenv("SLUICE_LEASE");
	snprintf(env, sizeof env, "unix:%s", path);
	setenv("SLUICE_WORKER", env, 1);

	lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	CHECK(atomic_load(&w.connections) == 0); /* loading does nothing */
	test_library();
	test_finding();
	test_device();
	test_processes();
	test_more();
	test_words();
	test_links();
	test_cache();
	test_refusals();
	test_hostile_readings();
	test_reconnect();
	test_fork();
	test_threads();
	test_mutated();
	test_silence();
	test_no_worker(dir);
	test_conf(library, dir);
	unlink(path);
	rmdir(dir);
	printf("test_nvml: %d passed, %d failed\n", passed, failed);
	return failed != 0;
}
