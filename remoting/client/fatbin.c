/*
 * See fatbin.h. Nothing here keeps state. Trimming is conservative: a container
 * that does not parse as expected is sent whole, and PTX is left out only where
 * every device has code made exactly for it.
 */
#include "fatbin.h"

#include <elf.h>
#include <stdlib.h>
#include <string.h>

#define WRAPPER_MAGIC 0x466243b1u
#define CONTAINER_MAGIC 0xba55ed50u
#define CONTAINER_HEAD 16
#define FILE_HEAD_MIN 32
#define FILE_PTX 1
#define FILE_ELF 2
#define MAX_FILES 4096

struct wrapper {
	uint32_t magic;
	uint32_t version; /* 2: the last pointer is a list of the objects' containers */
	const void *data; /* with version 2 the image that nvlink made of them */
	const void *name_or_list;
};

static uint16_t u16(const uint8_t *p)
{
	uint16_t v;

	memcpy(&v, p, sizeof v);
	return v;
}

static uint32_t u32(const uint8_t *p)
{
	uint32_t v;

	memcpy(&v, p, sizeof v);
	return v;
}

static uint64_t u64(const uint8_t *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof v);
	return v;
}

/* Size of an ELF image, which ends with the last of its tables and sections. 0 if it is not one. */
static size_t elf_size(const uint8_t *p)
{
	Elf64_Ehdr e;
	size_t end;

	memcpy(&e, p, sizeof e);
	if (memcmp(e.e_ident, ELFMAG, SELFMAG) || e.e_ident[EI_CLASS] != ELFCLASS64)
		return 0;
	end = sizeof e;
	if (e.e_shnum && e.e_shentsize == sizeof(Elf64_Shdr)) {
		if (e.e_shoff + (size_t)e.e_shnum * sizeof(Elf64_Shdr) > end)
			end = e.e_shoff + (size_t)e.e_shnum * sizeof(Elf64_Shdr);
		for (unsigned i = 0; i < e.e_shnum; i++) {
			Elf64_Shdr s;

			memcpy(&s, p + e.e_shoff + i * sizeof s, sizeof s);
			if (s.sh_type != SHT_NOBITS && s.sh_offset + s.sh_size > end)
				end = s.sh_offset + s.sh_size;
		}
	}
	if (e.e_phnum && e.e_phentsize == sizeof(Elf64_Phdr)) {
		if (e.e_phoff + (size_t)e.e_phnum * sizeof(Elf64_Phdr) > end)
			end = e.e_phoff + (size_t)e.e_phnum * sizeof(Elf64_Phdr);
		for (unsigned i = 0; i < e.e_phnum; i++) {
			Elf64_Phdr h;

			memcpy(&h, p + e.e_phoff + i * sizeof h, sizeof h);
			if (h.p_offset + h.p_filesz > end)
				end = h.p_offset + h.p_filesz;
		}
	}
	return end;
}

struct file {
	const uint8_t *p;
	size_t n;
	unsigned kind;
	int major, minor;
	bool keep;
};

/* Appends the files of a container to f. False if it does not parse as one. */
static bool list_files(const uint8_t *c, struct file *f, unsigned *nf)
{
	size_t head = u16(c + 6), size = u64(c + 8), off = 0;
	unsigned n = *nf;

	if (u32(c) != CONTAINER_MAGIC || head < CONTAINER_HEAD)
		return false;
	while (size - off >= FILE_HEAD_MIN) {
		const uint8_t *p = c + head + off;
		uint64_t fh = u32(p + 4), payload = u64(p + 8);
		uint32_t sm = u32(p + 28);

		if (fh < FILE_HEAD_MIN || fh > size - off || payload > size - off - fh || n == MAX_FILES || sm > 10000)
			return false;
		f[n].p = p;
		f[n].n = fh + payload;
		f[n].kind = u16(p);
		f[n].major = (int)(sm / 10);
		f[n].minor = (int)(sm % 10);
		f[n].keep = false;
		n++;
		off += fh + payload;
	}
	*nf = n;
	return off == size;
}

/* Marks the files that the devices can use. False if there are none. */
static bool choose(struct file *f, unsigned n, const struct sl_cc *cc, unsigned ncc)
{
	bool any = false, ptx = false;

	for (unsigned d = 0; d < ncc; d++) {
		bool exact = false;

		for (unsigned i = 0; i < n; i++) {
			if (f[i].kind != FILE_ELF || f[i].major != cc[d].major || f[i].minor > cc[d].minor)
				continue;
			f[i].keep = any = true;
			exact |= f[i].minor == cc[d].minor;
		}
		ptx |= !exact;
	}
	for (unsigned i = 0; i < n; i++) {
		if (f[i].kind == FILE_ELF)
			continue;
		/* Files of other kinds than these two are kept. */
		if (f[i].kind != FILE_PTX || ptx)
			f[i].keep = any = true;
	}
	return any;
}

static void whole(struct sl_image *out, const void *p, size_t n)
{
	out->one.p = p;
	out->one.n = n;
	out->parts = &out->one;
	out->nparts = 1;
	out->size = n;
}

/*
 * True if each device has code made exactly for it. Code for an earlier minor version may be of a
 * kind that does not run there.
 */
static bool covers(const struct file *f, unsigned n, const struct sl_cc *cc, unsigned ncc)
{
	for (unsigned d = 0; d < ncc; d++) {
		unsigned i = 0;

		while (i < n && (f[i].kind != FILE_ELF || f[i].major != cc[d].major || f[i].minor != cc[d].minor))
			i++;
		if (i == n)
			return false;
	}
	return ncc;
}

static void add(struct sl_image *out, const void *p, size_t n)
{
	struct sl_part *last = &out->parts[out->nparts];

	out->size += n;
	if (out->nparts && last[-1].p + last[-1].n == (const uint8_t *)p) {
		last[-1].n += n;
		return;
	}
	last->p = p;
	last->n = n;
	out->nparts++;
}

/* Adds the container c, of which f are the files, with those that are kept. head is room for its header. */
static void add_container(struct sl_image *out, const uint8_t *c, const struct file *f, unsigned n, uint8_t *head)
{
	uint64_t size = 0;

	for (unsigned i = 0; i < n; i++)
		size += f[i].keep ? f[i].n : 0;
	memcpy(head, c, CONTAINER_HEAD);
	head[6] = CONTAINER_HEAD;
	head[7] = 0;
	memcpy(head + 8, &size, sizeof size);
	add(out, head, CONTAINER_HEAD);
	for (unsigned i = 0; i < n; i++)
		if (f[i].keep)
			add(out, f[i].p, f[i].n);
}

/* Returns the container c, reduced to what the devices can use. It is whole if that cannot be determined. */
static bool open_container(const uint8_t *c, const struct sl_cc *cc, unsigned ncc, struct sl_image *out)
{
	struct file *f = malloc(MAX_FILES * sizeof *f);
	unsigned n = 0;

	if (!f || !list_files(c, f, &n) || !ncc || !choose(f, n, cc, ncc)) {
		free(f);
		whole(out, c, u16(c + 6) + u64(c + 8));
		return true;
	}
	out->parts = malloc((n + 1) * sizeof *out->parts);
	out->heads = malloc(CONTAINER_HEAD);
	if (out->parts && out->heads)
		add_container(out, c, f, n, out->heads);
	free(f);
	if (!out->nparts)
		sl_image_free(out);
	return out->nparts;
}

/*
 * The linked set of the containers c: the linked image and the objects. A container
 * with nothing for the devices stays whole: the driver will report what is wrong.
 */
static bool open_set(const uint8_t *const *c, unsigned n, const struct sl_cc *cc, unsigned ncc, struct sl_image *out)
{
	struct file *f = malloc(MAX_FILES * sizeof *f);
	unsigned nf = 0, *end = malloc(n * sizeof *end);
	size_t table = sizeof(struct wire_linked_set) + n * sizeof(uint64_t);
	bool ok = f && end;

	for (unsigned i = 0; ok && i < n; i++) {
		unsigned from = nf;

		ok = list_files(c[i], f, &nf);
		end[i] = nf;
		if (ok && ncc && choose(f + from, nf - from, cc, ncc))
			continue;
		for (unsigned k = from; k < nf; k++)
			f[k].keep = true;
	}
	if (ok) {
		out->parts = malloc((1 + (size_t)n + nf) * sizeof *out->parts);
		out->heads = malloc(table + n * (size_t)CONTAINER_HEAD);
		ok = out->parts && out->heads;
	}
	if (ok) {
		memcpy(out->heads, &(struct wire_linked_set){ .magic = SL_LINKED_MAGIC, .count = n }, sizeof(struct wire_linked_set));
		add(out, out->heads, table);
	}
	for (unsigned i = 0; ok && i < n; i++) {
		unsigned from = i ? end[i - 1] : 0;
		uint64_t was = out->size;

		add_container(out, c[i], f + from, end[i] - from, out->heads + table + i * (size_t)CONTAINER_HEAD);
		was = out->size - was;
		memcpy(out->heads + sizeof(struct wire_linked_set) + i * sizeof was, &was, sizeof was);
	}
	free(f);
	free(end);
	return ok;
}

/* What a separately compiled program registers, see fatbin.h. */
static bool open_linked(const struct wrapper *w, const struct sl_cc *cc, unsigned ncc, struct sl_image *out)
{
	const uint8_t *const *objects = w->name_or_list;
	const uint8_t **all;
	struct file *f;
	unsigned n = 0, k = 0;
	bool ok;

	if (u32(w->data) != CONTAINER_MAGIC)
		return sl_image_open(w->data, cc, ncc, out);
	f = malloc(MAX_FILES * sizeof *f);
	ok = f && list_files(w->data, f, &n) && covers(f, n, cc, ncc);
	free(f);
	while (!ok && objects[k]) {
		if (k == SL_MAX_LINKED - 1 || u32(objects[k]) != CONTAINER_MAGIC)
			return false;
		k++;
	}
	if (!k)
		return open_container(w->data, cc, ncc, out);
	all = malloc((k + 1) * sizeof *all);
	if (!all)
		return false;
	all[0] = w->data;
	memcpy(all + 1, objects, k * sizeof *all);
	ok = open_set(all, k + 1, cc, ncc, out);
	free(all);
	if (!ok)
		sl_image_free(out);
	return ok;
}

bool sl_image_open(const void *image, const struct sl_cc *cc, unsigned ncc, struct sl_image *out)
{
	const uint8_t *p = image;
	size_t n;

	memset(out, 0, sizeof *out);
	if (!p)
		return false;
	if (u32(p) == WRAPPER_MAGIC) {
		struct wrapper w;

		memcpy(&w, p, sizeof w);
		if (!w.data || u32(w.data) == WRAPPER_MAGIC)
			return false;
		if (w.version == 2 && w.name_or_list)
			return open_linked(&w, cc, ncc, out);
		return sl_image_open(w.data, cc, ncc, out);
	}
	if (u32(p) == CONTAINER_MAGIC)
		return open_container(p, cc, ncc, out);
	if (p[0] == 0x7f) {
		n = elf_size(p);
		whole(out, p, n);
		return n;
	}
	/* PTX is text, sent with its NUL. */
	if (p[0] >= ' ' || p[0] == '\n' || p[0] == '\t' || p[0] == '\r') {
		whole(out, p, strlen((const char *)p) + 1);
		return true;
	}
	return false;
}

void sl_image_free(struct sl_image *image)
{
	if (image->parts != &image->one)
		free(image->parts);
	free(image->heads);
	image->parts = NULL;
	image->heads = NULL;
}

void sl_image_copy(const struct sl_image *image, size_t offset, void *to, size_t n)
{
	uint8_t *d = to;

	for (unsigned i = 0; i < image->nparts && n; i++) {
		const struct sl_part *p = &image->parts[i];
		size_t m;

		if (offset >= p->n) {
			offset -= p->n;
			continue;
		}
		m = p->n - offset < n ? p->n - offset : n;
		memcpy(d, p->p + offset, m);
		d += m;
		n -= m;
		offset = 0;
	}
}
