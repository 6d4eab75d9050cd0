#include "place.h"
#include "device.h"
#include "route.h"
#include "session.h"

static CUmemLocation theirs(sl_buf *b, CUmemLocation at)
{
	if (at.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return at;
	sl_route_dev(b, at.id);
	/* A device that the program does not see may well be one of the worker's. */
	at.id = sl_dev(at.id) ? sl_dev_wire(at.id) : CU_DEVICE_INVALID;
	return at;
}

#define PUT(type, field) \
	void sl_put_##type(sl_buf *b, const type *p, size_t n) \
	{ \
		for (size_t i = 0; i < n; i++) { \
			type v = p[i]; \
\
			v.field = theirs(b, v.field); \
			sl_put_bytes(b, &v, sizeof v); \
		} \
	}

PUT(CUmemAccessDesc, location)
PUT(CUmemAllocationProp, location)
PUT(CUmemPoolProps, location)

void sl_put_CUmemLocation(sl_buf *b, const CUmemLocation *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		CUmemLocation v = theirs(b, p[i]);

		sl_put_bytes(b, &v, sizeof v);
	}
}

void sl_get_CUmemAllocationProp(sl_reply *r, CUmemAllocationProp *p)
{
	sl_get_bytes(r, p, sizeof *p);
	if (p->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
		p->location.id = sl_dev_of(r->session, p->location.id);
}
