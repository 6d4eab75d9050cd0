/*
 * The session: one ordered command stream from this process to one worker.
 *
 * Flow out: a call is encoded into an sl_buf on its thread's stack and appended to
 * the session's ring under the order lock, which gives all calls of all threads one
 * order. A sender thread drains the ring; a waiting call and a bulk transfer drain
 * it themselves, so that nothing waits for that thread. Flow in: a receiver thread
 * reads frames. A REPLY wakes its caller, DATA goes directly from the socket to the
 * program's memory, everything else is handed to the part it belongs to (the
 * sl_on_* functions). send.c, wait.c and receive.c are these three; session.c
 * starts and ends them.
 *
 * A lease over several owners has a session with each (sl_sessions of them, with as
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
 * Connects on first use; later calls return the first outcome. Failures are CUDA's
 * own codes: no address of a worker is CUDA_ERROR_NO_DEVICE, an unreachable worker
 * CUDA_ERROR_SYSTEM_NOT_READY, a version or table mismatch
 * CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
 */
CUresult sl_session_start(void);
/* The devices as described at connect; NULL before sl_session_start succeeded. */
const struct sl_snapshot *sl_snapshot(void);
/* Returns 0 while the session is live and there is no sticky error, otherwise the error that every call now returns. */
CUresult sl_dead(void);
/* True when no more frames will come; a sticky CUDA error does not end the session. */
bool sl_ended(void);
/* True in a child forked after the session started. */
bool sl_forked(void);
/* True once exit handlers run: no call may block on the network any more. */
bool sl_exiting(void);

/* How many owners this process has sessions with. */
extern unsigned sl_sessions;
/* The session of a device by its place in the snapshot, and the place of a session's first device. */
unsigned sl_dev_session(uint32_t place);
uint32_t sl_session_first(unsigned session);

#endif
