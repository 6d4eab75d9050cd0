/*
 * Flow: a block is page-locked memory that kernels reach. The parts of it that are compared
 * are its pieces. A piece keeps the bytes that both sides had when they were last made
 * equal; a side that differs from them has written. The sender compares its side and sends
 * what has changed (HOST_MERGE). The receiver writes what the worker has found (HOST frames).
 *
 * Locks, in the order in which they are taken:
 *
 *	making   held while a block is made, which may wait for the worker
 *	sending  held while changes are sent, in the order in which they were found, and while the list changes
 *	lock     guards the list and the kept bytes. It is never held while anything is sent or
 *	         awaited, because the receiver takes it
 */
#include "mapped.h"
#include "area.h"
#include "codec.h"
#include "copy.h"
#include "ctx.h"
#include "entry.h"
#include "gen.h"
#include "log.h"
#include "piece.h"
#include "poller.h"
#include "ranges.h"
#include "route.h"
#include "send.h"
#include "session.h"
#include "stream.h"
#include "upload.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE SL_MIRROR_PAGE

enum {
	SMALL = 4096,		/* a block of at most this many bytes is always compared */
	MEDIUM = 64 << 10,	/* one of at most this many is, while at most COMPARED_MAX bytes are compared in all */
	COMPARED_MAX = 256 << 10,
	SHARED_MAX = 16 << 20,	/* most bytes of a block that other processes may write to */
};

struct block {
	uint64_t base;
	size_t n;
	struct sl_other other;
	struct sl_area_use area;
	bool registered, read_only;
	bool shared;		/* the worker shares it */
	bool reached;		/* it is shared, and kernels were given its address */
	uint64_t mirror;	/* where its mirror begins; 0 for none */
	unsigned pieces;
	struct sl_piece piece[2];
};

_Atomic unsigned sl_mapped_blocks, sl_mapped_shared, sl_mapped_reached;

static struct block **blocks;	/* sorted by address */
static size_t count, capacity;
static unsigned moved;		/* blocks that the device has at another address */
static size_t compared;		/* bytes of all pieces */
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER, sending = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;

/* --- the list --- */

/* Returns the index of the first block that ends above p. */
static size_t first_above(uint64_t p)
{
	size_t lo = 0, hi = count;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (blocks[mid]->base + blocks[mid]->n <= p)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static struct block *find(uint64_t p)
{
	size_t i = first_above(p);

	return i < count && blocks[i]->base <= p ? blocks[i] : NULL;
}

/* Reports whether kernels may use a block. A block that is shared for copies only is page-locked memory like any other. */
static bool is_twin(const struct block *b)
{
	return !b->shared || b->reached;
}

/* Returns the block that contains the device address p. */
static struct block *find_by_device(uint64_t p)
{
	struct block *b = find(p);

	if (b && !b->other.delta)
		return is_twin(b) ? b : NULL;
	for (size_t i = 0; moved && i < count; i++)
		if (is_twin(blocks[i]) && blocks[i]->other.delta && p - blocks[i]->other.delta - blocks[i]->base < blocks[i]->n)
			return blocks[i];
	return NULL;
}

bool sl_mapped_twin_slow(uint64_t *p)
{
	struct block *b;

	pthread_mutex_lock(&lock);
	b = find(*p);
	if (b && !is_twin(b))
		b = NULL;
	if (b)
		*p += b->other.delta;
	pthread_mutex_unlock(&lock);
	return b || sl_mirror_has(*p, 1);
}

bool sl_mapped_is_twin_slow(uint64_t p)
{
	bool found;

	pthread_mutex_lock(&lock);
	found = find_by_device(p);
	pthread_mutex_unlock(&lock);
	return found || sl_mirror_has(p, 1);
}

struct sl_ctx *sl_mapped_ctx_slow(uint64_t p)
{
	struct sl_ctx *c;
	struct block *b;

	pthread_mutex_lock(&lock);
	b = find(p);
	c = b ? b->other.ctx : NULL;
	pthread_mutex_unlock(&lock);
	return c;
}

/* --- host to device --- */

/* Reports whether the memory of a piece is still mapped: a program may unmap registered memory before it unregisters it. */
static bool still_mapped(const struct block *b, const struct sl_piece *p)
{
	unsigned char in[64];

	for (uint64_t at = p->lo & ~(PAGE - 1); b->registered && at < p->hi; at += sizeof in * PAGE) {
		size_t n = p->hi - at < sizeof in * PAGE ? p->hi - at : sizeof in * PAGE;

		if (mincore((void *)(uintptr_t)at, n, in) && errno == ENOMEM)
			return false;
	}
	return true;
}

/* Sends what the program has written to a piece, and reports whether that was anything. sending is held. */
static bool send_piece(const struct block *b, const struct sl_piece *p)
{
	static struct sl_part part;
	struct sl_part *t = &part;
	bool some = false;

	if (!still_mapped(b, p))
		return false;
	for (t->lo = p->lo; t->lo < p->hi; t->lo += SL_PIECE_PART) {
		bool changed;

		pthread_mutex_lock(&lock);
		changed = sl_piece_take(p, t);
		pthread_mutex_unlock(&lock);
		if (changed)
			sl_transfer_merge(&b->other, t->lo + t->c.from, t->c.to - t->c.from, t->mask + t->c.from / 8, t->bytes + t->c.from, NULL);
		some |= changed;
	}
	return some;
}

/* Reports whether the program has changed nothing in a block, or false if that takes longer to find out. It runs before every launch. */
static inline bool same(const struct block *b)
{
	for (unsigned k = 0; k < b->pieces; k++)
		if (b->registered || b->piece[k].n > SMALL || !sl_piece_same(&b->piece[k]))
			return false;
	return true;
}

static bool send_pieces(size_t most)
{
	bool some = false;

	pthread_mutex_lock(&sending);
	for (size_t i = 0; i < count; i++) {
		const struct block *b = blocks[i];

		if (__builtin_expect(same(b), 1))
			continue;
		for (unsigned k = 0; k < b->pieces; k++)
			if (b->piece[k].n <= most)
				some |= send_piece(b, &b->piece[k]);
	}
	pthread_mutex_unlock(&sending);
	return some;
}

void sl_mapped_send_slow(void)
{
	send_pieces(SIZE_MAX);
	sl_poller_work();
}

static enum sl_poll poll(void)
{
	if (!atomic_load(&sl_mapped_blocks) || sl_dead())
		return SL_POLL_STOP;
	return send_pieces(MEDIUM) ? SL_POLL_FOUND : SL_POLL_NOTHING;
}

/* --- device to host --- */

/* Applies changes to a block. Two blocks may each have bytes of one word; each takes its own. */
static void change(struct block *b, uint64_t p, size_t n, const uint8_t *mask, const uint8_t *bytes)
{
	for (unsigned k = 0; k < b->pieces; k++) {
		struct sl_piece *own = &b->piece[k];
		uint64_t from = p > own->lo ? p : own->lo, to = p + n < own->hi ? p + n : own->hi;

		if (from < to && still_mapped(b, own))
			sl_piece_change(own, from, to, mask + (from - p) / 8, bytes + (from - p));
	}
}

void sl_mapped_changed(uint64_t p, size_t n, const uint8_t *mask, const uint8_t *bytes)
{
	if (p % 8 || p + n < p)
		return;
	pthread_mutex_lock(&lock);
	for (size_t i = moved ? 0 : first_above(p); i < count && (moved || blocks[i]->base < p + n); i++)
		change(blocks[i], p - blocks[i]->other.delta, n, mask, bytes);
	pthread_mutex_unlock(&lock);
}

/* --- making and dropping blocks --- */

/* Reads from /proc/self/maps how the memory is mapped. */
static void read_maps(uint64_t p, size_t n, bool *shared, bool *writable, bool *nccl)
{
	FILE *f = fopen("/proc/self/maps", "rce"); /* c: no cancellation point, since making is held */
	char line[512], flags[5];
	unsigned long lo, hi;
	bool begins = true;

	*shared = *nccl = false;
	*writable = true;
	while (f && fgets(line, sizeof line, f)) {
		if (begins && sscanf(line, "%lx-%lx %4s", &lo, &hi, flags) == 3 && lo < p + n && p < hi) {
			*shared |= flags[3] == 's';
			*writable &= flags[1] == 'w';
			*nccl |= strstr(line, "/dev/shm/nccl-") != NULL;
		}
		begins = strchr(line, '\n');
	}
	if (f)
		fclose(f);
}

/* Makes [p, p+n) a piece of the block, unless it is empty. */
static bool add_piece(struct block *b, uint64_t p, size_t n)
{
	if (n && !sl_piece_init(&b->piece[b->pieces], p, n, b->area.fresh))
		return false;
	b->pieces += n != 0;
	return true;
}

static bool insert(struct block *b)
{
	size_t i;
	bool ok = true;

	pthread_mutex_lock(&sending);
	pthread_mutex_lock(&lock);
	if (count == capacity) {
		struct block **more = realloc(blocks, (capacity ? 2 * capacity : 16) * sizeof *blocks);

		ok = more;
		if (ok) {
			blocks = more;
			capacity = capacity ? 2 * capacity : 16;
		}
	}
	if (ok) {
		i = first_above(b->base);
		memmove(blocks + i + 1, blocks + i, (count - i) * sizeof *blocks);
		blocks[i] = b;
		count++;
		moved += b->other.delta != 0;
		for (unsigned k = 0; k < b->pieces; k++)
			compared += b->piece[k].n;
		atomic_fetch_add(b->shared ? &sl_mapped_shared : &sl_mapped_blocks, 1);
	}
	pthread_mutex_unlock(&lock);
	pthread_mutex_unlock(&sending);
	return ok;
}

static void unlist(size_t i)
{
	struct block *b = blocks[i];

	memmove(blocks + i, blocks + i + 1, (--count - i) * sizeof *blocks);
	moved -= b->other.delta != 0;
	for (unsigned k = 0; k < b->pieces; k++)
		compared -= b->piece[k].n;
	atomic_fetch_sub(b->shared ? &sl_mapped_shared : &sl_mapped_blocks, 1);
	if (b->reached)
		atomic_fetch_sub(&sl_mapped_reached, 1);
}

static void watch(const struct block *b, bool on)
{
	for (unsigned k = 0; k < b->pieces; k++) {
		const struct sl_piece *p = &b->piece[k];
		sl_buf buf;

		if (b->read_only)
			return;
		sl_buf_init(&buf);
		sl_put(&buf, struct wire_host_watch, .address = p->lo + b->other.delta, .size = on ? p->hi - p->lo : 0);
		sl_oneway(CTL_HOST_WATCH, &buf);
		sl_buf_free(&buf);
	}
}

static void discard(struct block *b)
{
	for (unsigned k = 0; k < b->pieces; k++)
		sl_piece_free(&b->piece[k]);
	free(b);
}

/* Frees a block, which is in no list any more, and its copy on the device. It runs in the block's context. */
static CUresult end(void *arg)
{
	struct block *b = arg;

	if (b->mirror)
		sl_mirror_drop(b->mirror, b->registered);
	watch(b, false);
	sl_area_release(&b->area);
	discard(b);
	return CUDA_SUCCESS;
}

/* Divides a block into pieces, which are compared, and a mirror of the given kind. If whole is set, the block is one piece. */
static CUresult divide(struct block *b, bool whole, unsigned kind)
{
	uint64_t last = b->base + b->n, lo = (b->base + PAGE - 1) & ~(PAGE - 1), hi = b->registered ? last & ~(PAGE - 1) : last;
	CUresult err;

	if (whole || hi <= lo)
		return add_piece(b, b->base, b->n) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	if (!add_piece(b, b->base, lo - b->base) || !add_piece(b, hi, last - hi))
		return CUDA_ERROR_OUT_OF_MEMORY;
	err = sl_mirror_pinned(&b->other, lo, hi - lo, kind | (b->area.fresh ? SL_MIRROR_FRESH : 0));
	if (!err)
		b->mirror = lo;
	return err;
}

/* Makes a block of r. One of at most compare bytes is compared as a whole, unless too many bytes are compared already. making is held. */
static CUresult make(const struct sl_range *r, size_t compare)
{
	struct block *b = calloc(1, sizeof *b);
	bool shared = false, writable = true, nccl = false, whole;
	unsigned kind = 0;
	CUresult err;

	if (!b)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*b = (struct block){ .base = r->base, .n = r->size, .registered = r->type == SL_RANGE_REGISTERED };
	if (b->registered) {
		read_maps(b->base, b->n, &shared, &writable, &nccl);
		b->read_only = r->flags & CU_MEMHOSTREGISTER_READ_ONLY;
		kind = SL_MIRROR_REGISTERED | (b->read_only ? SL_MIRROR_READ_ONLY : 0) | (writable ? 0 : SL_MIRROR_FIXED | SL_MIRROR_READ_ONLY);
		shared &= writable;
	}
	if (r->use == SL_HOST_NCCL_QUEUE)
		kind |= SL_MIRROR_READ_ONLY;
	whole = b->n <= SMALL || shared || (b->n <= compare && compared + b->n <= COMPARED_MAX);
	/* Kernels of two processes would use it to wait for each other, but each worker has a copy of its own. */
	if (shared && nccl) {
		sl_log(SL_WARN, "NCCL's shared memory between processes is not supported: the processes' GPUs do not reach each other's memory, or NCCL_P2P_DISABLE is set");
		free(b);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	if (shared && (b->n > SHARED_MAX || compared + b->n > SL_MAX_HOST_WATCH / 2)) {
		sl_log(SL_WARN, "kernels cannot reach %zu bytes of host memory: other processes may write to it, and the limit for such memory is %d bytes", b->n, SHARED_MAX);
		free(b);
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	err = sl_area_hold(b->base, b->n, 0, &b->area);
	if (err) {
		free(b);
		return err;
	}
	err = sl_transfer_begin(&b->other, b->area.delta);
	if (!err)
		err = divide(b, whole, kind);
	if (!err && !insert(b))
		err = CUDA_ERROR_OUT_OF_MEMORY;
	if (err) {
		end(b);
		return err;
	}
	watch(b, true);
	if (b->pieces)
		sl_poller_start(poll);
	sl_mapped_send();
	return CUDA_SUCCESS;
}

/* Makes the worker share page-locked memory. There is nothing to keep equal then. making is held. */
static CUresult make_shared(const struct sl_range *r)
{
	struct block *b = calloc(1, sizeof *b);
	struct sl_ctx *c;
	CUresult err;

	if (!b)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*b = (struct block){ .base = r->base, .n = r->size, .shared = true };
	err = sl_ctx_use(&c);
	if (!err)
		err = sl_area_hold(b->base, b->n, r->memfd, &b->area);
	if (err) {
		free(b);
		return err;
	}
	b->other = (struct sl_other){ .ctx = c, .ctx_id = atomic_load(&c->id), .delta = b->area.delta };
	if (insert(b))
		return CUDA_SUCCESS;
	end(b);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Sets *there to the worker's address of [p, p+n), and reports whether the worker shares it. */
static bool find_shared(uint64_t p, size_t n, uint64_t *there)
{
	struct block *b;
	bool ok;

	pthread_mutex_lock(&lock);
	b = find(p);
	ok = b && b->shared && n <= b->n - (p - b->base);
	if (ok)
		*there = p + b->other.delta;
	pthread_mutex_unlock(&lock);
	return ok;
}

bool sl_mapped_share_slow(uint64_t p, size_t n, bool make, uint64_t *there)
{
	struct sl_range r;
	CUresult err = CUDA_SUCCESS;

	if (find_shared(p, n, there))
		return true;
	if (!make || !sl_range_find(p, &r) || !r.memfd || n > r.size - (p - r.base))
		return false;
	/* Queued copies and host functions that write to the memory here must have ended before the device uses it. */
	if (sl_copy_source_ready((void *)(uintptr_t)r.base, r.size))
		return false;
	pthread_mutex_lock(&making);
	if (!sl_mapped_ctx(p) && (err = make_shared(&r)))
		sl_shared_stop(err);
	pthread_mutex_unlock(&making);
	return !err && find_shared(p, n, there);
}

/* Notes that kernels were given the address of a shared block. */
static void note_reached(uint64_t p)
{
	struct block *b;

	pthread_mutex_lock(&lock);
	b = find(p);
	if (b && b->shared && !b->reached) {
		b->reached = true;
		atomic_fetch_add(&sl_mapped_reached, 1);
	}
	pthread_mutex_unlock(&lock);
}

static CUresult reach(CUdeviceptr *dptr, uint64_t p, const struct sl_range *r, size_t compare)
{
	uint64_t reached = p;
	struct sl_ctx *c;
	CUresult err;

	*dptr = p;
	if (sl_mapped_twin(&reached) && sl_sessions == 1) {
		*dptr = reached;
		return CUDA_SUCCESS;
	}
	err = sl_ctx_use(&c);
	if (err)
		return err;
	/* Queued copies and host functions that write to the memory must have ended before the device's copy is made from it. */
	err = sl_copy_source_ready((void *)(uintptr_t)r->base, r->size);
	if (err)
		return err;
	pthread_mutex_lock(&making);
	sl_upload_stop();
	c = sl_mapped_ctx(p);
	if (!c) {
		if (r->memfd && sl_shared_can() && (err = make_shared(r)))
			sl_shared_stop(err);
		if (!r->memfd || !sl_shared_can())
			err = make(r, compare);
	} else if (sl_ctx_foreign(c)) {
		sl_log(SL_WARN, "host memory can be reached by kernels on one owner's devices only, and another owner's reach it already");
		err = CUDA_ERROR_NOT_SUPPORTED;
	}
	sl_upload_go();
	pthread_mutex_unlock(&making);
	if (!err) {
		note_reached(p);
		sl_mapped_twin(&p);
		*dptr = p;
	}
	return err;
}

CUresult sl_mapped_address(CUdeviceptr *dptr, uint64_t p, const struct sl_range *r)
{
	return reach(dptr, p, r, MEDIUM);
}

CUresult sl_mapped_found(uint64_t p, const struct sl_range *r)
{
	CUdeviceptr there;

	return reach(&there, p, r, SMALL);
}

/* Removes the first block that which selects from the list. It returns NULL if there is none. */
static struct block *remove_block(bool (*which)(const struct block *, uint64_t), uint64_t key)
{
	struct block *b = NULL;

	pthread_mutex_lock(&sending);
	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < count && !b; i++) {
		if (!which(blocks[i], key))
			continue;
		b = blocks[i];
		unlist(i);
	}
	pthread_mutex_unlock(&lock);
	pthread_mutex_unlock(&sending);
	return b;
}

static bool at_base(const struct block *b, uint64_t base)
{
	return b->base == base;
}

static bool in_ctx(const struct block *b, uint64_t ctx_id)
{
	return b->other.ctx_id == ctx_id;
}

void sl_mapped_drop(const struct sl_range *r)
{
	struct sl_ctx *c = sl_mapped_ctx(r->base);
	struct block *b;

	if (!c)
		return;
	/* As the driver does, wait for work that uses the memory. Afterwards the program's memory has what that work has written. */
	if (r->type == SL_RANGE_REGISTERED && !sl_capturing_any())
		sl_ctx_synchronize(c);
	b = remove_block(at_base, r->base);
	if (b)
		sl_ctx_with(c, end, b);
}

void sl_mapped_drop_ctx(uint32_t ctx_id)
{
	struct block *b;

	while ((b = remove_block(in_ctx, ctx_id))) {
		b->registered = true; /* another context may go on using the memory, so its contents are kept */
		sl_ctx_with(b->other.ctx, end, b);
	}
	sl_managed_drop_ctx(ctx_id);
	sl_mirror_drop_ctx(ctx_id);
	sl_transfer_end(ctx_id);
}
