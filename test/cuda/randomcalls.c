/*
 * randomcalls SEED CALLS: makes CALLS random driver calls, the same ones for the same seed, and prints
 * what each form of call answered, so that two drivers can be compared line by line.
 *
 * A form is a function with the kind of memory of each operand and what is odd about the call (no bytes,
 * beyond the end, a misaligned address, a bad handle). One line is printed for each form, sorted: the form
 * and the results it had, with counts. What the calls should have done to memory is kept in a model in
 * the program: every call that succeeds is applied to the model, and all memory is compared with it
 * whenever the program has waited for the device, and, after calls that CUDA's manual calls synchronous,
 * at once. The last line counts the differences; the exit status is 1 when there are any.
 *
 * Kinds of memory: dev (cuMemAlloc), pool (cuMemAllocAsync), pin and map (cuMemHostAlloc without and with
 * DEVICEMAP), mapdev (map by the address that cuMemHostGetDevicePointer gives), reg (cuMemHostRegister), heap
 * (malloc), null. No call is made that may touch memory which is
 * not there: wild addresses, and lengths beyond memory that the driver does not know, are left out.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuprotos.h"

#define FUNCTIONS(X) \
	X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxSynchronize) \
	X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuMemHostAlloc) X(cuMemFreeHost) \
	X(cuMemHostRegister_v2) X(cuMemHostUnregister) X(cuMemHostGetFlags) X(cuMemHostGetDevicePointer_v2) \
	X(cuMemsetD8_v2) X(cuMemsetD16_v2) X(cuMemsetD32_v2) X(cuMemsetD8Async) X(cuMemsetD16Async) X(cuMemsetD32Async) \
	X(cuMemsetD2D8_v2) X(cuMemsetD2D16_v2) X(cuMemsetD2D32_v2) X(cuMemsetD2D8Async) X(cuMemsetD2D16Async) X(cuMemsetD2D32Async) \
	X(cuMemcpyHtoD_v2) X(cuMemcpyHtoDAsync_v2) X(cuMemcpyDtoH_v2) X(cuMemcpyDtoHAsync_v2) X(cuMemcpyDtoD_v2) \
	X(cuMemcpyDtoDAsync_v2) X(cuMemcpy) X(cuMemcpyAsync) X(cuMemcpyPeer) X(cuMemcpyPeerAsync) \
	X(cuMemcpy2D_v2) X(cuMemcpy2DUnaligned_v2) X(cuMemcpy2DAsync_v2) X(cuMemcpy3D_v2) X(cuMemcpy3DAsync_v2) \
	X(cuStreamCreate) X(cuStreamDestroy_v2) X(cuStreamSynchronize) X(cuStreamQuery) X(cuStreamWaitEvent) \
	X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord) X(cuEventQuery) X(cuEventSynchronize) X(cuEventElapsedTime_v2) \
	X(cuLaunchHostFunc) X(cuPointerGetAttribute) X(cuMemGetAddressRange_v2) X(cuCtxGetFlags) X(cuStreamGetFlags)

#define X(f) static __typeof__(f) *p_##f;
FUNCTIONS(X)
#undef X

static uint64_t seed;

static uint64_t rnd(void)
{
	uint64_t z = seed += 0x9e3779b97f4a7c15u;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
	z = (z ^ z >> 27) * 0x94d049bb133111ebu;
	return z ^ z >> 31;
}

static unsigned pick(unsigned n) { return (unsigned)(rnd() % n); }
static bool chance(unsigned percent) { return pick(100) < percent; }

/* --- what is printed --- */

struct form {
	struct form *next;
	char *text;
	int code;
	unsigned long count;
};

static struct form *forms[4096];
static unsigned long differences, calls;
static bool verbose;

static void note(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void note(int code, const char *fmt, ...)
{
	char text[256];
	unsigned h = 0;
	struct form *f;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	calls++;
	if (verbose)
		fprintf(stderr, "%lu %s -> %d\n", calls, text, code);
	for (const char *c = text; *c; c++)
		h = h * 31 + (unsigned char)*c;
	h = (h * 31 + (unsigned)code) % 4096;
	for (f = forms[h]; f && (f->code != code || strcmp(f->text, text)); f = f->next)
		;
	if (!f) {
		f = calloc(1, sizeof *f);
		f->text = strdup(text);
		f->code = code;
		f->next = forms[h];
		forms[h] = f;
	}
	f->count++;
}

static int by_text(const void *a, const void *b)
{
	const struct form *x = *(struct form *const *)a, *y = *(struct form *const *)b;
	int c = strcmp(x->text, y->text);

	return c ? c : x->code - y->code;
}

static void print_forms(void)
{
	struct form **all;
	size_t n = 0, i = 0;

	for (unsigned h = 0; h < 4096; h++)
		for (struct form *f = forms[h]; f; f = f->next)
			n++;
	all = calloc(n + 1, sizeof *all);
	for (unsigned h = 0; h < 4096; h++)
		for (struct form *f = forms[h]; f; f = f->next)
			all[i++] = f;
	qsort(all, n, sizeof *all, by_text);
	for (i = 0; i < n; i++)
		printf("%s -> %d x%lu\n", all[i]->text, all[i]->code, all[i]->count);
	free(all);
}

/* --- memory and its model --- */

enum kind { DEV, POOL, PIN, MAP, REG, HEAP, NKINDS, NONE = NKINDS };

static const char *const kind_name[] = { "dev", "pool", "pin", "map", "reg", "heap", "null" };

struct object {
	enum kind kind;
	uint8_t *p;		/* the program's memory, or the device's address */
	size_t n;
	uint8_t *model;
	void *raw;		/* of heap and registered memory */
	CUdeviceptr mapped;	/* the device's address of mapped memory */
	int stream;		/* on which it was last used; -1: none since the last wait */
};

#define OBJECTS 40
#define STREAMS 5
#define EVENTS 6

static struct object objects[OBJECTS];
static CUstream streams[STREAMS]; /* legacy default, per-thread, blocking, two non-blocking */
static const char *const stream_name[] = { "null", "perthread", "blocking", "nonblocking", "nonblocking" };
static CUevent events[EVENTS];
static bool recorded[EVENTS];
static CUcontext ctx;

static bool on_host(const struct object *o) { return o->kind >= PIN && o->kind <= HEAP; }

static void differ(const char *what, const struct object *o, const uint8_t *have)
{
	size_t i;

	for (i = 0; i < o->n && have[i] == o->model[i]; i++)
		;
	if (i == o->n)
		return;
	if (differences++ < 40)
		fprintf(stderr, "call %lu: %s: byte %zu of %zu of %s memory is %02x, should be %02x\n", calls, what, i, o->n,
			kind_name[o->kind], have[i], o->model[i]);
	memcpy(o->model, have, o->n); /* once for each cause */
}

static void compare(const char *what, const struct object *o)
{
	static uint8_t buf[1 << 20];

	if (!o->n)
		return;
	if (on_host(o)) {
		differ(what, o, o->p);
	} else {
		int rc = p_cuMemcpyDtoH_v2(buf, (CUdeviceptr)o->p, o->n);

		if (rc) {
			differences++;
			fprintf(stderr, "call %lu: %s: reading back %s memory: %d\n", calls, what, kind_name[o->kind], rc);
			return;
		}
		differ(what, o, buf);
	}
}

/* Waits for everything and compares all memory with the model. */
static void settle(const char *what)
{
	int rc = p_cuCtxSynchronize();

	note(rc, "cuCtxSynchronize");
	for (int i = 0; i < OBJECTS; i++) {
		objects[i].stream = -1;
		if (objects[i].n)
			compare(what, &objects[i]);
	}
}

/* Memory that another stream may still be using is waited for: the calls must not race natively. */
static void use(int stream, struct object *a, struct object *b, struct object *c)
{
	struct object *all[] = { a, b, c };
	bool race = false;

	for (int i = 0; i < 3; i++)
		race |= all[i] && all[i]->stream >= 0 && all[i]->stream != stream;
	if (race) {
		p_cuCtxSynchronize();
		for (int i = 0; i < OBJECTS; i++)
			objects[i].stream = -1;
	}
	for (int i = 0; i < 3; i++)
		if (all[i])
			all[i]->stream = stream;
}

static size_t some_size(void)
{
	switch (pick(6)) {
	case 0:
		return 1 + pick(64);
	case 1:
		return 4096;
	case 2:
		return 1 + pick(200000);
	default:
		return 4 * (1 + pick(3000));
	}
}

static void make(struct object *o)
{
	enum kind k = (enum kind)pick(NKINDS);
	size_t n = some_size();
	CUdeviceptr d = 0;
	void *h = NULL;
	int rc = 0;

	if (chance(2)) { /* calls that must be refused */
		switch (pick(5)) {
		case 0:
			note(p_cuMemAlloc_v2(&d, 0), "cuMemAlloc no bytes");
			break;
		case 1:
			h = &d;
			rc = p_cuMemHostAlloc(&h, 0, 0);
			note(rc, "cuMemHostAlloc no bytes gives %s", !h ? "null" : h == &d ? "nothing" : "memory");
			break;
		case 2:
			note(p_cuMemHostAlloc(&h, 64, 0x100), "cuMemHostAlloc unknown flag");
			break;
		case 3:
			note(p_cuMemFreeHost(&d), "cuMemFreeHost stack");
			break;
		default:
			note(p_cuMemHostUnregister(&d), "cuMemHostUnregister stack");
		}
		return;
	}
	*o = (struct object){ .kind = k, .stream = -1 };
	switch (k) {
	case DEV:
		rc = p_cuMemAlloc_v2(&d, n);
		note(rc, "cuMemAlloc");
		break;
	case POOL:
		rc = p_cuMemAllocAsync(&d, n, streams[2]);
		note(rc, "cuMemAllocAsync");
		if (!rc)
			rc = p_cuStreamSynchronize(streams[2]);
		break;
	case PIN:
	case MAP:
		if (k == MAP && n > 4096)
			n = 4 + n % 4092;
		rc = p_cuMemHostAlloc(&h, n, k == MAP ? CU_MEMHOSTALLOC_DEVICEMAP : chance(20) ? CU_MEMHOSTALLOC_PORTABLE : 0);
		note(rc, "cuMemHostAlloc");
		if (!rc && k == MAP)
			note(p_cuMemHostGetDevicePointer_v2(&o->mapped, h, 0), "cuMemHostGetDevicePointer map");
		break;
	default:
		n = (n + 4095) & ~(size_t)4095;
		if (posix_memalign(&h, 4096, n))
			exit(2);
		memset(h, 0, n);
		o->raw = h;
		if (k == REG) {
			rc = p_cuMemHostRegister_v2(h, n, 0);
			note(rc, "cuMemHostRegister");
			if (!rc && chance(30))
				note(p_cuMemHostRegister_v2(h, n, 0), "cuMemHostRegister again");
		}
	}
	if (rc) {
		free(o->raw);
		*o = (struct object){ .stream = -1 };
		return;
	}
	o->p = h ? h : (void *)d;
	o->n = n;
	o->model = calloc(1, n);
	if (h) {
		memset(h, 0x5a, n);
	} else {
		rc = p_cuMemsetD8_v2(d, 0x5a, n);
		note(rc, "cuMemsetD8 first %s", kind_name[k]);
		p_cuCtxSynchronize();
	}
	memset(o->model, 0x5a, n);
}

static void unmake(struct object *o)
{
	enum kind k = o->kind;

	if (!o->n)
		return;
	settle("before a free");
	switch (k) {
	case DEV:
		note(p_cuMemFree_v2((CUdeviceptr)o->p), "cuMemFree dev");
		if (chance(20))
			note(p_cuMemFree_v2((CUdeviceptr)o->p), "cuMemFree dev twice");
		break;
	case POOL:
		if (chance(50)) {
			note(p_cuMemFreeAsync((CUdeviceptr)o->p, streams[2]), "cuMemFreeAsync pool");
			p_cuStreamSynchronize(streams[2]);
		} else {
			note(p_cuMemFree_v2((CUdeviceptr)o->p), "cuMemFree pool");
		}
		break;
	case PIN:
	case MAP:
		note(p_cuMemFreeHost(o->p), "cuMemFreeHost %s", kind_name[k]);
		break;
	case REG:
		note(p_cuMemHostUnregister(o->p), "cuMemHostUnregister");
		if (chance(20))
			note(p_cuMemHostUnregister(o->p), "cuMemHostUnregister twice");
		break;
	default:
		break;
	}
	free(o->raw);
	free(o->model);
	*o = (struct object){ .stream = -1 };
}

/* An operand: a place in an object, or none. */
struct place {
	struct object *o;
	size_t at;
	uint64_t addr;
	const char *name;
};

/* A place of one of the kinds that fit, or now and then of any kind. */
static struct place operand(unsigned fit, unsigned odd)
{
	struct place p = { .name = "null" };
	bool any = chance(odd);

	if (any && chance(15))
		return p;
	for (int tries = 0; tries < 200; tries++) {
		struct object *o = &objects[pick(OBJECTS)];

		if (!o->n || !(any || fit >> o->kind & 1))
			continue;
		p.o = o;
		p.at = chance(50) ? 0 : chance(50) ? 4 * (pick((unsigned)(o->n / 4 + 1))) : pick((unsigned)o->n);
		if (p.at >= o->n)
			p.at = 0;
		p.addr = (uint64_t)o->p + p.at;
		p.name = kind_name[o->kind];
		if (o->kind == MAP && o->mapped && chance(40)) {
			p.addr = o->mapped + p.at;
			p.name = "mapdev";
		}
		return p;
	}
	return p;
}

static size_t room(const struct place *p) { return p->o ? p->o->n - p->at : 64; }
static size_t least(size_t a, size_t b) { return a < b ? a : b; }

#define DEVICE_KINDS (1u << DEV | 1u << POOL)
#define HOST_KINDS (1u << PIN | 1u << MAP | 1u << REG | 1u << HEAP)
#define ALL_KINDS (DEVICE_KINDS | HOST_KINDS)

/* After a call whose effect on these n bytes CUDA promises on return. */
static void at_once(const char *what, const struct place *p, size_t n)
{
	size_t i;

	if (!p->o || !on_host(p->o))
		return;
	for (i = 0; i < n && p->o->p[p->at + i] == p->o->model[p->at + i]; i++)
		;
	if (i < n && differences++ < 40)
		fprintf(stderr, "call %lu: %s: byte %zu of %zu at %zu of %s memory is %02x, should be %02x\n", calls, what, i, n, p->at,
			kind_name[p->o->kind], p->o->p[p->at + i], p->o->model[p->at + i]);
}

static bool page_locked(const struct place *p)
{
	return p->o && (p->o->kind == PIN || p->o->kind == MAP || p->o->kind == REG);
}

/* --- the calls --- */

static void fill(void)
{
	struct place d = operand(DEVICE_KINDS | 1u << PIN | 1u << MAP | 1u << REG, 15);
	unsigned width = 1u << pick(3), value = (unsigned)rnd();
	bool async = chance(50), over = d.o && d.o->kind == DEV && chance(4), flat = chance(70);
	int s = async ? (int)pick(STREAMS) : 0, rc;
	size_t n = chance(4) ? 0 : 1 + pick((unsigned)least(room(&d) / width + 1, 20000)), w = 0, h = 0, pitch = 0;
	const char *odd = "";
	uint8_t bytes[4];

	if (n * width > room(&d))
		n = room(&d) / width;
	memcpy(bytes, &value, 4);
	if (over) {
		n = room(&d) / width + 1 + pick(8);
		odd = " beyond";
	} else if (!n) {
		odd = " none";
	} else if (d.addr % width) {
		odd = " misaligned";
	}
	use(s, d.o, NULL, NULL);
	if (flat) {
		if (width == 1)
			rc = async ? p_cuMemsetD8Async(d.addr, (unsigned char)value, n, streams[s]) : p_cuMemsetD8_v2(d.addr, (unsigned char)value, n);
		else if (width == 2)
			rc = async ? p_cuMemsetD16Async(d.addr, (unsigned short)value, n, streams[s]) : p_cuMemsetD16_v2(d.addr, (unsigned short)value, n);
		else
			rc = async ? p_cuMemsetD32Async(d.addr, value, n, streams[s]) : p_cuMemsetD32_v2(d.addr, value, n);
		note(rc, "cuMemsetD%u%s %s%s", width * 8, async ? "Async" : "", d.name, odd);
		if (!rc && d.o && !over)
			for (size_t i = 0; i < n * width; i++)
				d.o->model[d.at + i] = bytes[i % width];
	} else {
		w = 1 + pick(40);
		pitch = w * width + pick(3) * width;
		h = 1 + pick(10);
		while (h > 1 && (h - 1) * pitch + w * width > room(&d))
			h--;
		if (w * width > room(&d)) {
			w = room(&d) / width;
			pitch = w * width;
		}
		if (h > 1 && width > 1 && chance(5) && room(&d) > h * pitch) {
			pitch++;
			odd = " odd pitch";
		} else if (h > 1 && w > 1 && chance(5)) {
			pitch = (w - 1) * width;
			odd = " short pitch";
		}
		if (!w || d.addr % width)
			odd = !w ? " none" : " misaligned";
		if (width == 1)
			rc = async ? p_cuMemsetD2D8Async(d.addr, pitch, (unsigned char)value, w, h, streams[s]) : p_cuMemsetD2D8_v2(d.addr, pitch, (unsigned char)value, w, h);
		else if (width == 2)
			rc = async ? p_cuMemsetD2D16Async(d.addr, pitch, (unsigned short)value, w, h, streams[s]) : p_cuMemsetD2D16_v2(d.addr, pitch, (unsigned short)value, w, h);
		else
			rc = async ? p_cuMemsetD2D32Async(d.addr, pitch, value, w, h, streams[s]) : p_cuMemsetD2D32_v2(d.addr, pitch, value, w, h);
		note(rc, "cuMemsetD2D%u%s %s%s", width * 8, async ? "Async" : "", d.name, odd);
		if (!rc && d.o)
			for (size_t y = 0; y < h; y++)
				for (size_t i = 0; i < w * width; i++)
					d.o->model[d.at + y * pitch + i] = bytes[i % width];
	}
	if (!rc && !async && page_locked(&d) && !over)
		at_once("after a memset", &d, flat ? n * width : w * width);
}

static bool overlap(const struct place *a, const struct place *b, size_t n)
{
	return a->o && a->o == b->o && a->at < b->at + n && b->at < a->at + n;
}

static void copy(void)
{
	static const struct { const char *name; unsigned dst, src; bool async; } form[] = {
		{ "cuMemcpyHtoD", DEVICE_KINDS, HOST_KINDS, false }, { "cuMemcpyHtoDAsync", DEVICE_KINDS, HOST_KINDS, true },
		{ "cuMemcpyDtoH", HOST_KINDS, DEVICE_KINDS, false }, { "cuMemcpyDtoHAsync", HOST_KINDS, DEVICE_KINDS, true },
		{ "cuMemcpyDtoD", DEVICE_KINDS, DEVICE_KINDS, false }, { "cuMemcpyDtoDAsync", DEVICE_KINDS, DEVICE_KINDS, true },
		{ "cuMemcpy", ALL_KINDS, ALL_KINDS, false }, { "cuMemcpyAsync", ALL_KINDS, ALL_KINDS, true },
		{ "cuMemcpyPeer", DEVICE_KINDS, DEVICE_KINDS, false }, { "cuMemcpyPeerAsync", DEVICE_KINDS, DEVICE_KINDS, true },
	};
	unsigned f = pick(10);
	struct place d = operand(form[f].dst, 25), s = operand(form[f].src, 25);
	size_t n = chance(4) ? 0 : 1 + pick((unsigned)least(room(&d), room(&s)));
	bool over = d.o && s.o && d.o->kind == DEV && s.o->kind == DEV && chance(3);
	int st = form[f].async ? (int)pick(STREAMS) : 0, rc = -1;
	void *hd = (void *)d.addr, *hs = (void *)s.addr;

	if (over)
		n = room(&d) + 1 + pick(8);
	if (overlap(&d, &s, n) || (over && d.o == s.o))
		return;
	/* What the driver would follow into nowhere. */
	if (n && (!d.o || !s.o) && f >= 6 && f <= 7)
		return;
	use(st, d.o, s.o, NULL);
	switch (f) {
	case 0: rc = p_cuMemcpyHtoD_v2(d.addr, hs, n); break;
	case 1: rc = p_cuMemcpyHtoDAsync_v2(d.addr, hs, n, streams[st]); break;
	case 2: rc = p_cuMemcpyDtoH_v2(hd, s.addr, n); break;
	case 3: rc = p_cuMemcpyDtoHAsync_v2(hd, s.addr, n, streams[st]); break;
	case 4: rc = p_cuMemcpyDtoD_v2(d.addr, s.addr, n); break;
	case 5: rc = p_cuMemcpyDtoDAsync_v2(d.addr, s.addr, n, streams[st]); break;
	case 6: rc = p_cuMemcpy(d.addr, s.addr, n); break;
	case 7: rc = p_cuMemcpyAsync(d.addr, s.addr, n, streams[st]); break;
	case 8: rc = p_cuMemcpyPeer(d.addr, ctx, s.addr, ctx, n); break;
	case 9: rc = p_cuMemcpyPeerAsync(d.addr, ctx, s.addr, ctx, n, streams[st]); break;
	}
	note(rc, "%s %s from %s%s", form[f].name, d.name, s.name, over ? " beyond" : n ? "" : " none");
	if (rc || !n || over || !d.o || !s.o)
		return;
	memcpy(d.o->model + d.at, s.o->model + s.at, n);
	if ((f == 2 || f == 6) || (f == 3 && d.o->kind == HEAP))
		at_once("after a copy to the host", &d, n);
}

static CUmemorytype type_of(const struct place *p)
{
	if (p->name[0] == 'm' && p->name[3])
		return chance(50) ? CU_MEMORYTYPE_UNIFIED : CU_MEMORYTYPE_DEVICE;
	if (!on_host(p->o) && chance(10))
		return CU_MEMORYTYPE_HOST;
	return chance(30) ? CU_MEMORYTYPE_UNIFIED : on_host(p->o) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

static const char *type_name(CUmemorytype t)
{
	return t == CU_MEMORYTYPE_UNIFIED ? "unified" : t == CU_MEMORYTYPE_HOST ? "host" : "device";
}

static void copy_box(void)
{
	struct place d = operand(ALL_KINDS, 0), s = operand(ALL_KINDS, 0);
	bool async = chance(50), deep = chance(40);
	size_t w = 1 + pick(48), h = 1 + pick(6), z = deep ? 1 + pick(3) : 1;
	size_t sp = w + pick(9), dp = w + pick(9), sh = h + pick(2), dh = h + pick(2);
	int st = async ? (int)pick(STREAMS) : 0, rc;
	CUmemorytype td, ts;
	const char *name;

	if (!d.o || !s.o || d.o == s.o)
		return;
	while (z > 1 && (((z - 1) * sh + h) * sp > room(&s) || ((z - 1) * dh + h) * dp > room(&d)))
		z--;
	while (h > 1 && (h * sp > room(&s) || h * dp > room(&d)))
		h--;
	if (h * sp > room(&s) || h * dp > room(&d))
		return;
	if (sh < h)
		sh = h;
	td = type_of(&d);
	ts = type_of(&s);
	/* Now and then page-locked host memory is called device memory, as unified addressing allows. */
	if (page_locked(&d) && chance(20))
		td = CU_MEMORYTYPE_DEVICE;
	if (page_locked(&s) && chance(20))
		ts = CU_MEMORYTYPE_DEVICE;
	use(st, d.o, s.o, NULL);
	if (z == 1 && !deep) {
		CUDA_MEMCPY2D c = { .srcMemoryType = ts, .dstMemoryType = td, .srcPitch = sp, .dstPitch = dp, .WidthInBytes = w, .Height = h };
		bool unaligned = !async && chance(30);

		c.srcHost = (void *)s.addr;
		c.srcDevice = s.addr;
		c.dstHost = (void *)d.addr;
		c.dstDevice = d.addr;
		name = async ? "cuMemcpy2DAsync" : unaligned ? "cuMemcpy2DUnaligned" : "cuMemcpy2D";
		rc = async ? p_cuMemcpy2DAsync_v2(&c, streams[st]) : unaligned ? p_cuMemcpy2DUnaligned_v2(&c) : p_cuMemcpy2D_v2(&c);
	} else {
		CUDA_MEMCPY3D c = { .srcMemoryType = ts, .dstMemoryType = td, .srcPitch = sp, .dstPitch = dp, .srcHeight = sh, .dstHeight = dh,
				    .WidthInBytes = w, .Height = h, .Depth = z };

		c.srcHost = (void *)s.addr;
		c.srcDevice = s.addr;
		c.dstHost = (void *)d.addr;
		c.dstDevice = d.addr;
		name = async ? "cuMemcpy3DAsync" : "cuMemcpy3D";
		rc = async ? p_cuMemcpy3DAsync_v2(&c, streams[st]) : p_cuMemcpy3D_v2(&c);
	}
	note(rc, "%s %s as %s from %s as %s", name, d.name, type_name(td), s.name, type_name(ts));
	if (rc)
		return;
	for (size_t k = 0; k < z; k++)
		for (size_t y = 0; y < h; y++)
			memcpy(d.o->model + d.at + (k * dh + y) * dp, s.o->model + s.at + (k * sh + y) * sp, w);
	if (!async)
		at_once("after a copy of a box", &d, w);
}

/* A host function looks at memory that work before it in the stream wrote, and writes what work behind it reads. */
struct hostwork {
	struct object *o;
	uint8_t *want;
	uint8_t fill;
	volatile int ran;
	bool right;
};

static void look(void *arg)
{
	struct hostwork *w = arg;

	w->right = !memcmp(w->o->p, w->want, w->o->n);
	memset(w->o->p, w->fill, w->o->n);
	w->ran = 1;
}

static void host_function(void)
{
	struct place d = operand(1u << PIN | 1u << REG, 0), s = operand(DEVICE_KINDS, 0), back = operand(DEVICE_KINDS, 0);
	int st = (int)pick(STREAMS), rc;
	struct hostwork w = { .o = d.o, .fill = (uint8_t)rnd() };
	size_t n;

	if (!d.o || !s.o || !back.o)
		return;
	use(st, d.o, s.o, back.o);
	n = least(d.o->n, room(&s));
	rc = p_cuMemcpyDtoDAsync_v2((CUdeviceptr)d.o->p, s.addr, n, streams[st]);
	note(rc, "cuMemcpyDtoDAsync %s from %s before a host function", d.name, s.name);
	if (!rc)
		memcpy(d.o->model, s.o->model + s.at, n);
	w.want = malloc(d.o->n);
	memcpy(w.want, d.o->model, d.o->n);
	rc = p_cuLaunchHostFunc(streams[st], look, &w);
	note(rc, "cuLaunchHostFunc %s", stream_name[st]);
	if (!rc)
		memset(d.o->model, w.fill, d.o->n);
	n = least(d.o->n, room(&back));
	rc = p_cuMemcpyDtoDAsync_v2(back.addr, (CUdeviceptr)d.o->p, n, streams[st]);
	note(rc, "cuMemcpyDtoDAsync %s from %s behind a host function", back.name, d.name);
	if (!rc)
		memcpy(back.o->model + back.at, d.o->model, n);
	settle("after a host function");
	if (!w.ran || !w.right) {
		differences++;
		fprintf(stderr, "call %lu: a host function %s\n", calls, w.ran ? "saw other bytes than were copied before it" : "did not run");
	}
	free(w.want);
}

static void order(void)
{
	int e = (int)pick(EVENTS), s = (int)pick(STREAMS), t = (int)pick(STREAMS);
	float ms;

	switch (pick(9)) {
	case 0:
	case 1:
		note(p_cuEventRecord(events[e], streams[s]), "cuEventRecord %s", stream_name[s]);
		recorded[e] = true;
		break;
	case 2:
		note(p_cuStreamWaitEvent(streams[t], events[e], 0), "cuStreamWaitEvent %s", stream_name[t]);
		break;
	case 3:
		note(p_cuEventSynchronize(events[e]), "cuEventSynchronize");
		note(p_cuEventQuery(events[e]), "cuEventQuery after a wait");
		break;
	case 4:
		note(p_cuStreamSynchronize(streams[s]), "cuStreamSynchronize %s", stream_name[s]);
		note(p_cuStreamQuery(streams[s]), "cuStreamQuery %s after a wait", stream_name[s]);
		break;
	case 5:
		note(p_cuEventDestroy_v2(events[e]), "cuEventDestroy");
		note(p_cuEventCreate(&events[e], chance(50) ? CU_EVENT_DISABLE_TIMING : 0), "cuEventCreate");
		recorded[e] = false;
		break;
	case 6:
		settle("after a wait for the context");
		note(p_cuEventElapsedTime_v2(&ms, events[4], events[5]), "cuEventElapsedTime%s", recorded[4] && recorded[5] ? "" : " not recorded");
		break;
	case 7:
		note(p_cuEventRecord(NULL, streams[s]), "cuEventRecord null event");
		note(p_cuStreamWaitEvent(streams[s], NULL, 0), "cuStreamWaitEvent null event");
		note(p_cuEventQuery(NULL), "cuEventQuery null event");
		break;
	default:
		settle("after a wait for the context");
		note(p_cuStreamDestroy_v2(streams[3]), "cuStreamDestroy");
		note(p_cuStreamCreate(&streams[3], CU_STREAM_NON_BLOCKING), "cuStreamCreate nonblocking");
	}
}

static void question(void)
{
	static const struct {
		const char *name;
		CUpointer_attribute a;
	} attr[] = {
		{ "MEMORY_TYPE", CU_POINTER_ATTRIBUTE_MEMORY_TYPE }, { "IS_MANAGED", CU_POINTER_ATTRIBUTE_IS_MANAGED },
		{ "DEVICE_ORDINAL", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL }, { "MAPPED", CU_POINTER_ATTRIBUTE_MAPPED },
	};
	struct place p = operand(ALL_KINDS, 10);
	unsigned i = pick(4);
	int rc;

	if (p.o)
		p.addr = (uint64_t)p.o->p + p.at;
	if (p.o && p.o->kind == MAP)
		p.name = "map";

	switch (pick(4)) {
	case 0:
	case 1: {
		unsigned v[4] = { 0 };

		rc = p_cuPointerGetAttribute(v, attr[i].a, p.addr);
		note(rc, "cuPointerGetAttribute %s of %s gives %u", attr[i].name, p.name, rc ? 0 : attr[i].a == CU_POINTER_ATTRIBUTE_MAPPED ? v[0] & 0xff : v[0]);
		break;
	}
	case 2: {
		CUdeviceptr base = 0;
		size_t n = 0;

		if (p.o && p.o->kind == POOL)
			return; /* the driver rounds these up */
		rc = p_cuMemGetAddressRange_v2(&base, &n, p.addr);
		note(rc, "cuMemGetAddressRange of %s%s", p.name, rc ? "" : base == (CUdeviceptr)p.o->p ? " base right" : " base wrong");
		break;
	}
	default: {
		unsigned flags = 0;

		rc = p_cuMemHostGetFlags(&flags, (void *)p.addr);
		note(rc, "cuMemHostGetFlags of %s gives %u", p.name, rc ? 0 : flags);
	}
	}
}

int main(int argc, char **argv)
{
	unsigned long want;
	void *cu;

	if (argc < 3) {
		fprintf(stderr, "usage: randomcalls SEED CALLS\n");
		return 2;
	}
	seed = strtoull(argv[1], NULL, 0);
	want = strtoul(argv[2], NULL, 0);
	verbose = argc > 3;
	cu = dlopen("libcuda.so.1", RTLD_NOW);
	if (!cu) {
		fprintf(stderr, "randomcalls: %s\n", dlerror());
		return 2;
	}
#define X(f) p_##f = (__typeof__(p_##f))dlsym(cu, #f);
	FUNCTIONS(X)
#undef X
	if (!p_cuEventElapsedTime_v2)
		p_cuEventElapsedTime_v2 = (__typeof__(p_cuEventElapsedTime_v2))dlsym(cu, "cuEventElapsedTime");
	if (p_cuInit(0) || p_cuDevicePrimaryCtxRetain(&ctx, 0) || p_cuCtxSetCurrent(ctx)) {
		fprintf(stderr, "randomcalls: no device\n");
		return 2;
	}
	streams[1] = CU_STREAM_PER_THREAD;
	p_cuStreamCreate(&streams[2], CU_STREAM_DEFAULT);
	p_cuStreamCreate(&streams[3], CU_STREAM_NON_BLOCKING);
	p_cuStreamCreate(&streams[4], CU_STREAM_NON_BLOCKING);
	for (int i = 0; i < EVENTS; i++)
		p_cuEventCreate(&events[i], i < 4 ? CU_EVENT_DISABLE_TIMING : 0);
	for (int i = 0; i < OBJECTS; i++)
		objects[i].stream = -1;
	while (calls < want && differences < 1000) {
		unsigned w = pick(100);
		struct object *o = &objects[pick(OBJECTS)];

		if (w < 4)
			unmake(o);
		else if (w < 10) {
			if (!o->n)
				make(o);
		} else if (w < 30)
			fill();
		else if (w < 60)
			copy();
		else if (w < 75)
			copy_box();
		else if (w < 77)
			host_function();
		else if (w < 90)
			order();
		else
			question();
	}
	settle("at the end");
	print_forms();
	printf("randomcalls: %lu calls, %lu differences from the model\n", calls, differences);
	return differences != 0;
}
