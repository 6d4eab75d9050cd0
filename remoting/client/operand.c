/* Operands: see operand.h. The ranges (ranges.c) answer every question; the worker is asked only about addresses that are in none of them. */
#include "operand.h"
#include "ctx.h"
#include "entry.h"
#include "gen.h"
#include "mapped.h"
#include "ranges.h"

/* Reports whether the worker's driver knows p as a device address. It is asked about memory that was not allocated through the shim. */
static bool known_to_worker(uint64_t p)
{
	struct sl_ctx *c;
	uint64_t type = 0;

	return !sl_ctx_use(&c) && !fw_cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p) &&
	       (uint32_t)type == CU_MEMORYTYPE_DEVICE;
}

/* Returns how many bytes from p on are mapped, and counts no further than n. Adjacent mappings count as one. */
static size_t mapped_room(uint64_t p, const struct sl_range *r, size_t n)
{
	size_t room = r->size - (p - r->base);
	struct sl_range next;

	while (room < n && sl_range_find(p + room, &next) && next.type == SL_RANGE_MAPPED)
		room += next.size;
	return room;
}

struct sl_operand sl_operand(uint64_t p, size_t n, bool device)
{
	struct sl_operand o = { .place = SL_NULL, .p = p, .room = SIZE_MAX };
	struct sl_range r;

	if (!p)
		return o;
	if (!sl_range_find(p, &r)) {
		o.place = device && known_to_worker(p) ? SL_DEVICE : SL_PAGEABLE;
		return o;
	}
	o.room = r.size - (p - r.base);
	switch (r.type) {
	case SL_RANGE_HOST:
	case SL_RANGE_REGISTERED:
		o.place = SL_LOCKED;
		if (sl_mapped_twin(&o.p)) {
			o.place = SL_DEVICE;
			o.twin = true;
		}
		return o;
	case SL_RANGE_VA: /* reserved, but nothing is mapped at p */
		o.room = 0;
		break;
	case SL_RANGE_MAPPED:
		o.room = mapped_room(p, &r, n);
		break;
	default:
		o.twin = sl_mapped_is_twin(p);
		o.shadowed = r.shadowed;
	}
	o.place = SL_DEVICE;
	return o;
}

void sl_operand_check(uint64_t p, const char *function, CUresult *err)
{
	struct sl_operand o;

	if (*err)
		return;
	o = sl_operand(p, 1, true);
	if (o.place == SL_LOCKED || (o.twin && o.p != p))
		*err = sl_refuse_with(function, "host memory");
	else if (o.place != SL_DEVICE || !o.room)
		*err = CUDA_ERROR_INVALID_VALUE;
	else if (o.twin)
		sl_mapped_send();
}

void sl_operand_check_CUDA_MEMSET_NODE_PARAMS(const CUDA_MEMSET_NODE_PARAMS *p, const char *function, CUresult *err)
{
	sl_operand_check(p->dst, function, err);
}

void sl_operand_check_CUstreamBatchMemOpParams(const CUstreamBatchMemOpParams *p, const char *function, CUresult *err)
{
	switch (p->operation) {
	case CU_STREAM_MEM_OP_WAIT_VALUE_32:
	case CU_STREAM_MEM_OP_WAIT_VALUE_64:
		sl_operand_check(p->waitValue.address, function, err);
		break;
	case CU_STREAM_MEM_OP_WRITE_VALUE_32:
	case CU_STREAM_MEM_OP_WRITE_VALUE_64:
		sl_operand_check(p->writeValue.address, function, err);
		break;
	default:
		break;
	}
}
