/* Graphs: copies of this process's memory (graphhost.c), and what belongs to nodes. */
#ifndef SLUICE_GRAPHHOST_H
#define SLUICE_GRAPHHOST_H

#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"

/* Whether a side of a copy, which sl_copy3d_sides has put in order, is memory of this process. */
static inline bool sl_graph_copy_host(const CUDA_MEMCPY3D *c)
{
	return c->srcMemoryType == CU_MEMORYTYPE_HOST || c->dstMemoryType == CU_MEMORYTYPE_HOST;
}

/*
 * The copy that is asked for as a graph's node: c with its sides in order becomes what goes on the wire, *fn the function
 * that moves this process's bytes. graph says whose worker that is.
 */
CUresult sl_graph_copy_new(const CUDA_MEMCPY3D *asked, CUDA_MEMCPY3D *c, CUgraph graph, uint32_t *fn);
/* Puts such a copy into a stream that captures; *captured is false, and nothing is done, if it does not. */
CUresult sl_graph_copy_capture(const CUDA_MEMCPY3D *c, CUstream s, bool *captured);
/* For a copy that is a node already, by its function: what was asked for, and the two sides. */
bool sl_graph_copy_asked(uint32_t fn, CUDA_MEMCPY3D *asked, CUmemorytype *src, CUmemorytype *dst);

/* Notes n bytes of device memory at p as a graph's. memory.c */
CUresult sl_graph_memory(CUdeviceptr p, size_t n);
/* Memory of n bytes, zeroed, that belongs to a node: it stays until the node is given other memory or destroyed. graphread.c */
void *sl_graph_node_keep(CUgraphNode node, size_t n);

#endif
