/*
 * Trimming: containers made here, with every mixture of architectures, and the
 * ones that nvcc put into the programs named on the command line.
 */
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fatbin.h"
#include "test.h"

struct made {
	_Alignas(8) uint8_t b[8192];
	size_t n;
};

static void start(struct made *m)
{
	const uint32_t magic = 0xba55ed50;

	memset(m, 0, sizeof *m);
	memcpy(m->b, &magic, 4);
	m->b[4] = 1;
	m->b[6] = 16;
	m->n = 16;
}

static void file(struct made *m, uint16_t kind, uint32_t sm, uint64_t payload)
{
	uint8_t *p = m->b + m->n;
	const uint32_t head = 64;
	uint64_t all;

	memcpy(p, &kind, 2);
	memcpy(p + 4, &head, 4);
	memcpy(p + 8, &payload, 8);
	memcpy(p + 28, &sm, 4);
	memset(p + 64, (int)sm, payload);
	m->n += 64 + payload;
	all = m->n - 16;
	memcpy(m->b + 8, &all, 8);
}

/* The files that are left, as "kind:sm" in order. */
static const char *left(const struct sl_image *image)
{
	static char text[1024];
	uint8_t *flat = malloc(image->size + 1);
	uint64_t size, off = 16;

	CHECK(flat);
	sl_image_copy(image, 0, flat, image->size);
	memcpy(&size, flat + 8, 8);
	CHECK(size + 16 == image->size && flat[6] == 16 && !flat[7], "the header says %llu of %zu", (unsigned long long)size, image->size);
	text[0] = 0;
	while (off < image->size) {
		uint16_t kind;
		uint32_t head, sm;
		uint64_t payload;

		memcpy(&kind, flat + off, 2);
		memcpy(&head, flat + off + 4, 4);
		memcpy(&payload, flat + off + 8, 8);
		memcpy(&sm, flat + off + 28, 4);
		sprintf(text + strlen(text), "%s%u:%u", text[0] ? " " : "", kind, sm);
		off += head + payload;
	}
	CHECK(off == image->size);
	free(flat);
	return text;
}

static void expect(const void *p, int major, int minor, const char *want)
{
	struct sl_cc cc = { major, minor };
	struct sl_image image;

	CHECK(sl_image_open(p, &cc, 1, &image));
	CHECK(!strcmp(left(&image), want), "%d.%d leaves \"%s\", want \"%s\"", major, minor, left(&image), want);
	sl_image_free(&image);
}

static void containers(void)
{
	struct { uint32_t magic, version; const void *data, *last; } wrapper = { 0x466243b1, 1, NULL, "a.cu" };
	const struct sl_cc both[2] = { { 8, 0 }, { 9, 0 } };
	static struct made m;
	struct sl_image image;

	start(&m);
	file(&m, 2, 70, 104);
	file(&m, 2, 80, 200);
	file(&m, 2, 86, 96);
	file(&m, 2, 90, 304);
	file(&m, 1, 90, 160);
	expect(m.b, 9, 0, "2:90");
	expect(m.b, 8, 0, "2:80");
	expect(m.b, 8, 6, "2:80 2:86");
	/* a minor version later than all: its code runs, but it may be of a kind that does not */
	expect(m.b, 8, 9, "2:80 2:86 1:90");
	expect(m.b, 7, 5, "2:70 1:90");
	expect(m.b, 10, 0, "1:90");
	wrapper.data = m.b;
	expect(&wrapper, 9, 0, "2:90");
	CHECK(sl_image_open(m.b, both, 2, &image) && !strcmp(left(&image), "2:80 2:90"));
	sl_image_free(&image);
	CHECK(sl_image_open(m.b, both, 0, &image) && image.size == m.n, "without a device nothing is left out");
	sl_image_free(&image);

	/* kinds we do not know stay */
	file(&m, 8, 90, 64);
	expect(m.b, 9, 0, "2:90 8:90");

	/* nothing that fits: sent whole, the driver will say so */
	start(&m);
	file(&m, 2, 70, 104);
	expect(m.b, 9, 0, "2:70");

	/* lengths that lie: sent as it stands */
	start(&m);
	file(&m, 2, 80, 104);
	file(&m, 2, 90, 104);
	memset(m.b + 16 + 8, 0xff, 8);
	CHECK(sl_image_open(m.b, both, 2, &image) && image.size == m.n && image.nparts == 1);
	sl_image_free(&image);
}

/* The files of each container of a linked set, as left tells them, with " | " between. */
static const char *left_of_set(const struct sl_image *image)
{
	static char text[1024];
	uint8_t *flat = malloc(image->size + 1);
	uint32_t magic, n;
	size_t at;

	CHECK(flat);
	sl_image_copy(image, 0, flat, image->size);
	memcpy(&magic, flat, 4);
	memcpy(&n, flat + 4, 4);
	CHECK(magic == SL_LINKED_MAGIC);
	at = 8 + 8 * (size_t)n;
	text[0] = 0;
	for (uint32_t i = 0; i < n; i++) {
		struct sl_part part = { flat + at, 0 };
		struct sl_image one = { .nparts = 1, .parts = &part };
		uint64_t size;

		memcpy(&size, flat + 8 + 8 * (size_t)i, 8);
		CHECK(at + size <= image->size);
		part.n = one.size = size;
		sprintf(text + strlen(text), "%s%s", i ? " | " : "", left(&one));
		at += size;
	}
	CHECK(at == image->size, "%zu of %zu", at, image->size);
	free(flat);
	return text;
}

/* A separately compiled program: the linked image runs, the objects go along where it has no code. */
static void linked(void)
{
	static struct made image, a, b;
	const void *objects[3] = { a.b, b.b, NULL };
	struct { uint32_t magic, version; const void *data, *last; } wrapper = { 0x466243b1, 2, image.b, objects };
	const struct sl_cc both[2] = { { 8, 0 }, { 9, 0 } }, cc = { 10, 0 }, ada = { 8, 9 };
	struct sl_image out;

	start(&image);
	file(&image, 2, 80, 200);
	file(&image, 2, 90, 304);
	start(&a);
	file(&a, 2, 80, 104);
	file(&a, 2, 90, 120);
	file(&a, 1, 90, 96);
	start(&b);
	file(&b, 2, 80, 128);
	file(&b, 8, 80, 64);
	file(&b, 1, 90, 72);
	expect(&wrapper, 9, 0, "2:90");
	CHECK(sl_image_open(&wrapper, both, 2, &out) && !strcmp(left(&out), "2:80 2:90"));
	sl_image_free(&out);
	CHECK(sl_image_open(&wrapper, &cc, 1, &out));
	CHECK(!strcmp(left_of_set(&out), "2:80 2:90 | 1:90 | 8:80 1:90"), "%s", left_of_set(&out));
	sl_image_free(&out);

	/* code for an earlier minor version: the driver chooses */
	CHECK(sl_image_open(&wrapper, &ada, 1, &out));
	CHECK(!strcmp(left_of_set(&out), "2:80 | 2:80 1:90 | 2:80 8:80 1:90"), "%s", left_of_set(&out));
	sl_image_free(&out);

	/* PTX alone: the linked image is empty */
	start(&image);
	start(&a);
	file(&a, 1, 80, 96);
	start(&b);
	file(&b, 1, 80, 72);
	CHECK(sl_image_open(&wrapper, both, 2, &out));
	CHECK(!strcmp(left_of_set(&out), " | 1:80 | 1:80"), "%s", left_of_set(&out));
	sl_image_free(&out);

	/* a list of nothing, and one of something else */
	objects[0] = NULL;
	CHECK(sl_image_open(&wrapper, both, 2, &out) && out.size == 16);
	sl_image_free(&out);
	objects[0] = "no container at all";
	CHECK(!sl_image_open(&wrapper, both, 2, &out));

	/* an object whose lengths lie */
	objects[0] = a.b;
	memset(a.b + 16 + 8, 0xff, 8);
	CHECK(!sl_image_open(&wrapper, both, 2, &out));
}

static void other_forms(void)
{
	const char ptx[] = "//\n.version 8.0\n.target sm_90\n";
	static uint64_t elf[64];
	Elf64_Ehdr *e = (Elf64_Ehdr *)elf;
	const struct sl_cc cc = { 9, 0 };
	struct sl_image image;

	CHECK(sl_image_open(ptx, &cc, 1, &image) && image.size == sizeof ptx);
	sl_image_free(&image);
	memcpy(e->e_ident, ELFMAG, SELFMAG);
	e->e_ident[EI_CLASS] = ELFCLASS64;
	e->e_shoff = 128;
	e->e_shentsize = sizeof(Elf64_Shdr);
	e->e_shnum = 2;
	((Elf64_Shdr *)((char *)elf + 128))[1] = (Elf64_Shdr){ .sh_type = SHT_PROGBITS, .sh_offset = 300, .sh_size = 77 };
	CHECK(sl_image_open(elf, &cc, 1, &image) && image.size == 377, "%zu", image.size);
	sl_image_free(&image);
	elf[0] = 0;
	CHECK(!sl_image_open(elf, &cc, 1, &image) && !sl_image_open(NULL, &cc, 1, &image));
}

/* Every container in a program's .nv_fatbin section keeps code for the device, and not much else. */
static void program(const char *name)
{
	int fd = open(name, O_RDONLY);
	struct stat st;
	const uint8_t *f;
	const Elf64_Ehdr *e;
	const Elf64_Shdr *s;
	const char *names;
	unsigned containers = 0;

	CHECK(fd >= 0 && !fstat(fd, &st), "%s", name);
	f = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	CHECK(f != MAP_FAILED);
	e = (const void *)f;
	s = (const void *)(f + e->e_shoff);
	names = (const char *)f + s[e->e_shstrndx].sh_offset;
	for (unsigned i = 0; i < e->e_shnum; i++) {
		const uint8_t *p = f + s[i].sh_offset, *end = p + s[i].sh_size;

		if (strcmp(names + s[i].sh_name, ".nv_fatbin"))
			continue;
		while (end - p >= 16) {
			const struct sl_cc cc = { 9, 0 };
			struct sl_image image;
			uint64_t size;

			memcpy(&size, p + 8, 8);
			CHECK(!memcmp(p, "\x50\xed\x55\xba", 4));
			CHECK(sl_image_open(p, &cc, 1, &image));
			CHECK(image.size <= size + 16);
			if (strstr(left(&image), "2:90"))
				CHECK(!strcmp(left(&image), "2:90") && image.size < size + 16, "%s: %s", name, left(&image));
			sl_image_free(&image);
			containers++;
			p += 16 + size;
			while (end - p >= 8 && !*(const uint64_t *)p)
				p += 8;
		}
	}
	CHECK(containers, "%s has no device code", name);
	munmap((void *)(uintptr_t)f, (size_t)st.st_size);
	close(fd);
}

int main(int argc, char **argv)
{
	containers();
	linked();
	other_forms();
	for (int i = 1; i < argc; i++)
		program(argv[i]);
	printf("test_fatbin: ok, %d programs of nvcc\n", argc - 1);
	return 0;
}
