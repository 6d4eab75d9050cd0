/*
 * Sends what the program has written to mirrors (mirror.h): of page-locked memory the bytes that were changed, of managed
 * memory whole pages, or the bytes that were changed while work may have run.
 */
#include "mirrors.h"
#include "changes.h"
#include "log.h"
#include "trap.h"
#include "wire.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static unsigned looks;	/* for clashes, still to be made after this wait: each is a round trip */
static _Atomic bool clash;	/* in managed memory, and not yet told */

CUresult sl_mirrors_read(const struct mirror *m, uint64_t p, size_t n, const uint8_t **got)
{
	static uint8_t *room;
	static size_t size;

	if (n > size) {
		free(room);
		room = malloc(n);
		size = room ? n : 0;
		if (!room)
			return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*got = room;
	return (m->kind & SL_MIRROR_MANAGED ? sl_transfer_copy : sl_transfer_read)(&m->other, p, room, n);
}

/* Pages whose changes are sent together; a mask has a bit for each of their bytes. */
enum { MERGE_PAGES = 64, PAGE_MASK = PAGE / 8, LOOKS = 16, LOOK_PAGES = 256 };

_Static_assert(MERGE_PAGES * PAGE <= SL_MAX_MERGE, "a merge");

static void send_merge(const struct mirror *m, size_t page, size_t from, size_t to, const uint8_t *masks)
{
	static uint8_t before[MERGE_PAGES * PAGE]; /* the lock is held */
	uint64_t p = address(m, page) + from;

	for (size_t i = 0; m->raced && i * PAGE < to; i++)
		memcpy(before + i * PAGE, m->was[page + i], PAGE);
	sl_transfer_merge(&m->other, p, to - from, masks + from / 8, (const uint8_t *)(uintptr_t)p, m->raced ? before + from : NULL);
}

/* Sends what changed in pages [from, to): pages of which much changed together, of others the part that did. */
static void send_changes(const struct mirror *m, size_t from, size_t to)
{
	uint8_t masks[MERGE_PAGES * PAGE_MASK];
	size_t first = from;	/* page of which masks begin */

	for (size_t i = from; i < to; i++) {
		struct sl_changes c = sl_changes((const uint8_t *)(uintptr_t)address(m, i), m->was[i], PAGE, masks + (i - first) * PAGE_MASK);
		bool much = c.words >= PAGE / 8 / 4;

		if (much && i + 1 < to && i + 1 - first < MERGE_PAGES)
			continue;
		if (much || first < i)
			send_merge(m, first, 0, (i - first + much) * PAGE, masks);
		if (!much && c.words)
			send_merge(m, i, c.from, c.to, masks + (i - first) * PAGE_MASK);
		first = i + 1;
	}
}

static void send_variables(const struct mirror *m, size_t from, size_t to)
{
	for (unsigned i = 0; i < m->nspans; i++) {
		struct span s = within(m, &m->spans[i], from, to);

		if (s.n)
			sl_transfer_send(&m->other, s.p, s.n);
	}
}

/* What the device has of pages [from, to): all of it, or the part in the k-th variable. */
static struct span part(const struct mirror *m, unsigned k, size_t from, size_t to)
{
	return m->spans ? within(m, &m->spans[k], from, to) : (struct span){ address(m, from), bytes(m, from, to) };
}

/* Sends what changed in s, part of a page of managed memory. */
static void send_runs(const struct mirror *m, struct span s)
{
	const uint8_t *now = (const uint8_t *)(uintptr_t)s.p, *was = m->was[(s.p - m->base) / PAGE] + (s.p - m->base) % PAGE;

	for (size_t i = 0, j; i < s.n; i = j) {
		for (j = i + 1; j < s.n && (now[j] != was[j]) == (now[i] != was[i]); j++)
			;
		if (now[i] != was[i])
			sl_transfer_send(&m->other, s.p + i, j - i);
	}
}

/* After a wait: looks for bytes in s, a part of managed memory, that both sides have changed. */
static void look_for_clash(const struct mirror *m, struct span s)
{
	const uint8_t *theirs;

	if (!s.n || sl_mirrors_read(m, s.p, s.n, &theirs))
		return;
	for (uint64_t p = s.p, k; p < s.p + s.n; p += k) {
		size_t off = (p - m->base) % PAGE;

		k = PAGE - off < s.p + s.n - p ? PAGE - off : s.p + s.n - p;
		if (!sl_changes_clash((const uint8_t *)(uintptr_t)p, theirs + (p - s.p), m->was[(p - m->base) / PAGE] + off, k))
			continue;
		sl_mirror_clashed();
		atomic_store(&clash, true);
		return;
	}
}

/* Sends what changed in pages [from, to) of managed memory, which were written while work may have run. */
static void send_raced(const struct mirror *m, size_t from, size_t to)
{
	unsigned parts = m->spans ? m->nspans : 1;

	for (size_t i = from, j; !sl_mirrors_busy && looks && i < to; i = j) {
		j = to - i < LOOK_PAGES ? to : i + LOOK_PAGES;
		looks--;
		for (unsigned k = 0; k < parts; k++)
			look_for_clash(m, part(m, k, i, j));
	}
	for (size_t i = from; i < to; i++)
		for (unsigned k = 0; k < parts; k++)
			send_runs(m, part(m, k, i, i + 1));
}

/* Sends pages [from, to), which are written, and notes them as the same. */
static void send_pages(struct mirror *m, size_t from, size_t to)
{
	sl_trap_keep();
	sl_mirrors_protect(m, from, to, PROT_READ);
	if (m->gone)
		return;
	for (size_t i = from, j; i < to; i = j) {
		j = i + 1;
		if (m->was && m->was[i]) {
			while (j < to && m->was[j])
				j++;
			(m->kind & SL_MIRROR_MANAGED ? send_raced : send_changes)(m, i, j);
			for (size_t k = i; k < j; k++) {
				free(m->was[k]);
				m->was[k] = NULL;
			}
			continue;
		}
		if (m->spans) {
			send_variables(m, i, j);
			continue;
		}
		/* Page-locked memory that was never sent: the other side may hold zeroes. */
		if (m->kind & SL_MIRROR_FRESH && sl_zeroes((const uint8_t *)(uintptr_t)address(m, i), bytes(m, i, j)))
			continue;
		while (j < to && (!m->was || !m->was[j]) && !(m->kind & SL_MIRROR_FRESH && sl_zeroes((const uint8_t *)(uintptr_t)address(m, j), bytes(m, j, j + 1))))
			j++;
		sl_transfer_send(&m->other, address(m, i), bytes(m, i, j));
	}
	sl_mirrors_set(m, from, to, SAME);
}

void sl_mirrors_send(struct mirror *m)
{
	for (size_t i = 0, j; m->written && !m->gone && i < m->pages; i = j) {
		const uint8_t *at = memchr(m->state + i, WRITTEN, m->pages - i);

		if (!at)
			return;
		i = (size_t)(at - m->state);
		j = run(m, i, m->pages);
		send_pages(m, i, j);
	}
	m->raced = false;
}

void sl_mirrors_waited(void)
{
	looks = LOOKS;
}

void sl_mirror_clashed(void)
{
	static _Atomic bool told;

	if (!atomic_exchange(&told, true))
		sl_log(SL_ERROR, "the program and a kernel have written different values to the same bytes of host or managed memory at a time; see docs/limits.md");
}

CUresult sl_mirror_clash_slow(void)
{
	return atomic_exchange(&clash, false) ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
