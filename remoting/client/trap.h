/*
 * Traps: a thread of the program's that touches memory which it may not, because its
 * mirror is not ready for that (mirror.h), waits until a thread of the shim's has made
 * it ready, and goes on. Every other SIGSEGV goes to the handler that the program has.
 *
 * System calls are not trapped: one that is given such memory fails with EFAULT.
 */
#ifndef SLUICE_TRAP_H
#define SLUICE_TRAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Begins, once: from now on touched(address, write) is called by a thread of the shim's
 * for each fault, and returns whether the memory is ready now; else the fault is the
 * program's. In a forked child, which has no such thread, left_alone is called in the
 * handler instead. False if it cannot begin.
 */
bool sl_trap_start(bool (*touched)(uint64_t p, bool write), bool (*left_alone)(uint64_t p));

/* Sees to it that the handler is this one, since programs install theirs at any time. Before memory is protected. */
void sl_trap_keep(void);

/* Writes n bytes to memory of this process, however it is protected; false if that failed. */
bool sl_trap_poke(uint64_t p, const void *from, size_t n);

#endif
