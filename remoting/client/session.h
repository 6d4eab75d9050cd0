/*
 * The session: one ordered command stream from this process to one worker.
 *
 * Flow out: a call is encoded into an sl_buf on its thread's stack and appended
 * to the session's ring under the order lock, which is what gives all calls of
 * all threads one order. A sender thread drains the ring; a waiting call and a
 * bulk transfer drain it themselves, so that nothing waits for that thread.
 * Flow in: a receiver thread reads frames. A REPLY wakes its caller, DATA goes
 * straight from the socket to the program's memory, everything else is handed
 * to the part it belongs to (the sl_on_* functions). send.c, wait.c and receive.c
 * are these three; session.c starts and ends them.
 *
 * A lease over several owners has a session with each (sl_sessions of them, and as
 * many rings, sockets and threads). A call goes to the owner of the current
 * context's device, unless what it names belongs to another (sl_route). With one
 * owner all of this is one test of a constant.
 *
 * The wire is described in docs/protocol.md.
 */
#ifndef SLUICE_SESSION_H
#define SLUICE_SESSION_H

#include <stdbool.h>
#include <stdint.h>

#include "cuabi.h"
#include "snapshot.h"

/*
 * Connects on first use; later calls return the first outcome. NOT_FOUND-like
 * conditions map to CUDA's own codes: no SLUICE_WORKER is CUDA_ERROR_NO_DEVICE,
 * an unreachable worker CUDA_ERROR_SYSTEM_NOT_READY, a version or table
 * mismatch CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
 */
CUresult sl_session_start(void);
/* The devices as described at connect; NULL before sl_session_start succeeded. */
const struct sl_snapshot *sl_snapshot(void);
/* 0 while the session lives, else the error every call now returns. */
CUresult sl_dead(void);
/* True when no frame will come any more; a sticky error of CUDA's does not end the session. */
bool sl_ended(void);
/* True in a child forked after the session started. */
bool sl_forked(void);
/* True once exit handlers run: no call may block on the network any more. */
bool sl_exiting(void);

/* How many owners this process has sessions with. */
extern unsigned sl_sessions;
/* The session of a device by its place in the snapshot, and a session's first place. */
unsigned sl_dev_session(uint32_t place);
uint32_t sl_session_first(unsigned session);

#endif
