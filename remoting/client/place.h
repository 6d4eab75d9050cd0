/*
 * Devices in structures. The program counts the devices that it sees, the worker those of its
 * session; where they differ, the structure travels with the worker's number, to its owner.
 */
#ifndef SLUICE_PLACE_H
#define SLUICE_PLACE_H

#include "codec.h"

void sl_put_CUmemLocation(sl_buf *b, const CUmemLocation *p, size_t n);
void sl_put_CUmemAccessDesc(sl_buf *b, const CUmemAccessDesc *p, size_t n);
void sl_put_CUmemAllocationProp(sl_buf *b, const CUmemAllocationProp *p, size_t n);
void sl_put_CUmemPoolProps(sl_buf *b, const CUmemPoolProps *p, size_t n);
void sl_get_CUmemAllocationProp(sl_reply *r, CUmemAllocationProp *p);

#endif
