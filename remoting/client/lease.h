/*
 * A lease's socket: where a program of a job asks the node's daemon for a session,
 * and gets it as a connected descriptor. docs/protocol.md has the bytes. Used by
 * both libraries, so it includes the headers of neither.
 */
#ifndef SLUICE_LEASE_H
#define SLUICE_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How long to wait for a daemon that is not there, is restarting, or has no place left. */
#define SL_LEASE_PATIENCE_MS 5000

struct sl_lease_answer {
	uint32_t status;	/* as in WELCOME; ~0: no answer came */
	uint32_t owners;	/* how many owners the lease is spread over, 1 or more */
	bool shm;		/* shared memory may be offered to the worker */
	char reason[512];	/* when there is no descriptor: why, and what to do */
};

/*
 * Asks at path for a session (SL_SESSION_COMPUTE or SL_SESSION_OBSERVE) with one of the lease's
 * owners, counted from 0. The descriptor is connected to a worker that expects
 * HELLO, close-on-exec and non-blocking; -1 with *a saying why. Takes at most
 * SL_LEASE_PATIENCE_MS to reach the daemon, then answer_ms for its answer, and ends at
 * the time of sl_now_ms that until is, unless that is 0.
 */
int sl_lease_open(const char *path, uint32_t kind, uint32_t owner, int answer_ms, int64_t until, struct sl_lease_answer *a);

/*
 * Connects to a Unix stream socket, of any length of path; -1 with errno. Waits until
 * deadline for a place in a full backlog and, if absent is set, for a listener
 * that does not exist yet in a directory that does.
 */
int sl_unix_dial(const char *path, int64_t deadline, bool absent);

/* The program's name as the kernel has it, padded with NUL to cap bytes, the last of which is NUL. */
void sl_program_name(char *name, size_t cap);

#endif
