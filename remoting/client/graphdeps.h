/*
 * Which graph a node belongs to, and what a new node may depend on. graph.c
 *
 * The handle of a node has its graph's id (sl_handle_whole). The generated stubs note it when a node is made and when the
 * worker lists a graph's nodes. So a call that adds a node can be refused before it is sent: most of them are one-way.
 */
#ifndef SLUICE_GRAPHDEPS_H
#define SLUICE_GRAPHDEPS_H

#include <stddef.h>

#include "cuabi.h"

/* Notes that a node is one of a graph. */
void sl_graph_has(CUgraph graph, CUgraphNode node);
/* Notes that a node is one of the graph that another one belongs to, if that is known. */
void sl_graph_beside(CUgraphNode known, CUgraphNode node);
/*
 * Whether a new node of a graph may depend on n others: CUDA_ERROR_INVALID_VALUE if the graph or a node does not exist, or a node
 * belongs to another graph or is named twice. Asks the worker only about nodes whose graph is not known.
 */
CUresult sl_graph_dependencies(CUgraph graph, const CUgraphNode *deps, size_t n);

#endif
