/*
 * Compiling and linking, as far as a program can see it. Nothing is compiled: a linked
 * image is a cubin that holds what its inputs held, so that it names the twins they named
 * (image.c). The logs say what is wrong: PTX whose braces do not match, and functions that no
 * input has.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

#define SPARE 64	/* zeroes behind what is parsed */

struct link {
	struct obj obj;
	struct jit jit;
	struct text text;	/* of the inputs */
	char *cubin;
};

void text_add(struct text *t, const char *p, size_t n)
{
	t->p = xgrow(t->p, t->n + n + SPARE, &t->cap, 1);
	memcpy(t->p + t->n, p, n);
	t->n += n;
	memset(t->p + t->n, 0, SPARE);
}

/* options and logs */

static void log_open(struct jit_log *l)
{
	if (l->to && l->cap)
		l->to[0] = 0;
	*l->size = NULL;
}

CUresult jit_open(struct jit *j, unsigned int n, const CUjit_option *opt, void **val)
{
	*j = (struct jit){ .begun = sim_now() };
	if (n && (!opt || !val))
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned int i = 0; i < n; i++) {
		struct jit_log *l = opt[i] <= CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES ? &j->info : &j->error;

		if (opt[i] >= CU_JIT_NUM_OPTIONS)
			return CUDA_ERROR_INVALID_VALUE;
		switch (opt[i]) {
		case CU_JIT_WALL_TIME:
			j->wall = &val[i];
			break;
		case CU_JIT_INFO_LOG_BUFFER:
		case CU_JIT_ERROR_LOG_BUFFER:
			l->to = val[i];
			break;
		case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES:
		case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES:
			l->size = &val[i];
			l->cap = (unsigned int)(uintptr_t)val[i];
			break;
		case CU_JIT_LOG_VERBOSE:
			j->verbose = val[i];
			break;
		default:
			break;
		}
	}
	if ((j->info.to && !j->info.size) || (j->error.to && !j->error.size))
		return CUDA_ERROR_INVALID_VALUE;
	if (j->info.size)
		log_open(&j->info);
	if (j->error.size)
		log_open(&j->error);
	jit_time(j);
	return CUDA_SUCCESS;
}

/* Adds a line. A log that is full is as long as its buffer. */
static void log_add(struct jit_log *l, const char *format, va_list ap)
{
	char line[512];
	int n = vsnprintf(line, sizeof(line), format, ap);

	if (n >= (int)sizeof(line))
		n = sizeof(line) - 1;
	if (!l->to || !l->cap || n < 0)
		return;
	if (l->n && l->n < l->cap)
		l->to[l->n++] = '\n';
	if ((size_t)n > l->cap - l->n)
		n = (int)(l->cap - l->n);
	memcpy(l->to + l->n, line, (size_t)n);
	l->n += (size_t)n;
	l->to[l->n < l->cap ? l->n : l->cap - 1] = 0;
	*l->size = (void *)(uintptr_t)l->n;
}

void jit_info(struct jit *j, const char *format, ...)
{
	va_list ap;

	if (!j->verbose)
		return;
	va_start(ap, format);
	log_add(&j->info, format, ap);
	va_end(ap);
}

void jit_error(struct jit *j, const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	log_add(&j->error, format, ap);
	va_end(ap);
}

/* Milliseconds since it began. */
void jit_time(struct jit *j)
{
	float ms = (float)((double)(sim_now() - j->begun + 1) / 1e6);

	if (j->wall)
		memcpy(j->wall, &ms, sizeof(ms));
}

/* compiling */

/* Skips a comment or a text, and counts the lines in it. */
static size_t skip(const char *p, size_t n, size_t i, unsigned int *line)
{
	size_t end = i + 1;

	if (p[i] == '"')
		while (end < n && p[end] != '"')
			end++;
	else if (p[i] == '/' && i + 1 < n && p[i + 1] == '/')
		while (end + 1 < n && p[end + 1] != '\n')
			end++;
	else if (p[i] == '/' && i + 1 < n && p[i + 1] == '*')
		for (end += 2; end < n && (p[end] != '/' || p[end - 1] != '*'); end++)
			*line += p[end] == '\n';
	else
		return i;
	return end;
}

CUresult ptx_check(const char *p, size_t n, struct jit *j)
{
	unsigned int line = 1;
	int depth = 0;

	for (size_t i = 0; i < n && depth >= 0; i++) {
		size_t end = skip(p, n, i, &line);

		if (end != i) {
			i = end;
			continue;
		}
		line += p[i] == '\n';
		depth += (p[i] == '{') - (p[i] == '}');
	}
	if (!depth) {
		jit_info(j, "ptxas info: %zu bytes of PTX", n);
		return CUDA_SUCCESS;
	}
	jit_error(j, "ptxas, line %u: error: braces that do not match", line);
	return CUDA_ERROR_INVALID_PTX;
}

/* linking */

static const char *const builtin[] = { "vprintf", "malloc", "free", "__assertfail" };

static bool word(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$';
}

/* Whether a function is defined: its declaration begins without ".extern". */
static bool defined(const struct text *t, const char *name, size_t len)
{
	for (size_t i = 0; i < sizeof(builtin) / sizeof(*builtin); i++)
		if (strlen(builtin[i]) == len && !memcmp(name, builtin[i], len))
			return true;
	for (const char *p = t->p; (p = memmem(p, (size_t)(t->p + t->n - p), name, len)); p += len) {
		const char *from = p;

		if (word(p[len]) || (p > t->p && word(p[-1])))
			continue;
		while (from > t->p && from[-1] && from[-1] != ';' && from[-1] != '}' && from[-1] != '{')
			from--;
		if (!memmem(from, (size_t)(p - from), ".extern", 7) && (!memmem(from, (size_t)(p - from), "call", 4)))
			return true;
	}
	return false;
}

/* Looks at the functions that PTX declares to be elsewhere. */
static CUresult resolve(struct link *l)
{
	static const char want[] = ".extern .func";
	const char *end = l->text.p + l->text.n;

	for (const char *p = l->text.p; p && (p = memmem(p, (size_t)(end - p), want, sizeof(want) - 1));) {
		const char *name = p + sizeof(want) - 1, *stop;

		while (name < end && (*name == ' ' || *name == '\n'))
			name++;
		if (*name == '(')	/* what it returns */
			while (name < end && *name++ != ')')
				;
		while (name < end && !word(*name))
			name++;
		for (stop = name; stop < end && word(*stop); stop++)
			;
		if (!defined(&l->text, name, (size_t)(stop - name))) {
			jit_error(&l->jit, "linker: error: no input has '%.*s'", (int)(stop - name), name);
			return CUDA_ERROR_UNKNOWN;
		}
		p = stop;
	}
	return CUDA_SUCCESS;
}

/* A cubin with one section, which holds the text. */
static char *cubin_make(const struct text *t, size_t *n)
{
	Elf64_Shdr section[2] = { 0 };
	Elf64_Ehdr head = { .e_type = ET_EXEC, .e_machine = 190, .e_version = 1, .e_ehsize = sizeof(head), .e_shoff = sizeof(head),
			    .e_shentsize = sizeof(*section), .e_shnum = 2, .e_flags = (unsigned int)sim.cfg.sm };
	char *p = xcalloc(1, sizeof(head) + sizeof(section) + t->n + SPARE);

	memcpy(head.e_ident, ELFMAG, SELFMAG);
	head.e_ident[EI_CLASS] = ELFCLASS64;
	head.e_ident[EI_DATA] = ELFDATA2LSB;
	head.e_ident[EI_VERSION] = 1;
	head.e_ident[EI_OSABI] = 51;
	head.e_ident[EI_ABIVERSION] = 7;
	section[1].sh_type = SHT_PROGBITS;
	section[1].sh_offset = sizeof(head) + sizeof(section);
	section[1].sh_size = t->n;
	memcpy(p, &head, sizeof(head));
	memcpy(p + sizeof(head), section, sizeof(section));
	if (t->n)
		memcpy(p + section[1].sh_offset, t->p, t->n);
	*n = section[1].sh_offset + t->n;
	return p;
}

static CUresult enter(CUlinkState h, struct link **l)
{
	CUresult r = sim_enter();

	if (r)
		return r;
	*l = obj_get(h, K_LINK);
	return *l ? CUDA_SUCCESS : sim_leave(CUDA_ERROR_INVALID_HANDLE);
}

API CUresult cuLinkCreate_v2(unsigned int n, CUjit_option *opt, void **val, CUlinkState *out)
{
	struct link *l;
	struct jit j;
	struct ctx *c;
	CUresult r = sim_enter_ctx(&c);

	if (r)
		return r;
	r = out ? jit_open(&j, n, opt, val) : CUDA_ERROR_INVALID_VALUE;
	if (r)
		return sim_leave(r);
	l = obj_new(K_LINK, NULL, sizeof(*l));
	if (!l)
		return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
	l->jit = j;
	*out = HANDLE(CUlinkState, l);
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuLinkCreate(unsigned int n, CUjit_option *opt, void **val, CUlinkState *out) { return cuLinkCreate_v2(n, opt, val, out); }

static CUresult add(struct link *l, CUjitInputType type, const void *data, size_t size, unsigned int n, const CUjit_option *opt)
{
	struct text in = { 0 };
	CUresult r;

	if (!data || !size || type >= CU_JIT_NUM_INPUT_TYPES || l->cubin)
		return CUDA_ERROR_INVALID_VALUE;
	for (unsigned int i = 0; i < n; i++)
		if (!opt || (opt[i] >= CU_JIT_WALL_TIME && opt[i] <= CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES) || opt[i] >= CU_JIT_NUM_OPTIONS)
			return CUDA_ERROR_INVALID_VALUE;
	text_add(&in, data, size);
	r = image_input(in.p, in.n, type, &l->jit, &l->text);
	free(in.p);
	jit_time(&l->jit);
	return r;
}

API CUresult cuLinkAddData_v2(CUlinkState h, CUjitInputType type, void *data, size_t size, const char *name, unsigned int n,
			      CUjit_option *opt, void **val)
{
	struct link *l;
	CUresult r = enter(h, &l);

	(void)name, (void)val;
	return r ? r : sim_leave(add(l, type, data, size, n, opt));
}

API CUresult cuLinkAddData(CUlinkState h, CUjitInputType type, void *data, size_t size, const char *name, unsigned int n,
			   CUjit_option *opt, void **val)
{
	return cuLinkAddData_v2(h, type, data, size, name, n, opt, val);
}

API CUresult cuLinkComplete(CUlinkState h, void **out, size_t *size)
{
	struct link *l;
	CUresult r = enter(h, &l);
	size_t n;

	if (r)
		return r;
	if (!out)
		return sim_leave(CUDA_ERROR_INVALID_VALUE);
	if (l->cubin)
		return sim_leave(CUDA_ERROR_INVALID_HANDLE);
	r = l->text.unread ? CUDA_SUCCESS : resolve(l);
	jit_time(&l->jit);
	if (r)
		return sim_leave(r);
	l->cubin = cubin_make(&l->text, &n);
	jit_info(&l->jit, "linker: %zu bytes", n);
	*out = l->cubin;
	if (size)
		*size = n;
	return sim_leave(CUDA_SUCCESS);
}

API CUresult cuLinkDestroy(CUlinkState h)
{
	struct link *l;
	CUresult r = enter(h, &l);

	if (r)
		return r;
	jit_time(&l->jit);
	free(l->text.p);
	free(l->cubin);
	obj_del(l);
	return sim_leave(CUDA_SUCCESS);
}
