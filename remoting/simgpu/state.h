/*
 * What all processes share that use the simulated GPUs of a machine: the
 * configuration and, for each process and device, bytes in use and busy time.
 */
#ifndef SLUICE_SIM_STATE_H
#define SLUICE_SIM_STATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#define SIM_MAX_DEV 8
#define SIM_MAX_PROC 256
#define SIM_MAX_SHARE 4096

struct sim_config {
	int ndev;
	uint64_t mem;			/* bytes per device */
	uint64_t ctx_mem, module_mem, stream_mem; /* bytes that a context, a module image, a stream costs */
	int driver;			/* 13000 */
	int sm;				/* 90 */
};

struct sim_proc {
	int32_t pid;			/* 0: free */
	uint64_t start;			/* start time from /proc, against pid reuse */
	uint64_t used[SIM_MAX_DEV];
	uint64_t contexts[SIM_MAX_DEV];
	/*
	 * Busy time up to the last moment without a kernel, and the start of the present busy time,
	 * 0 if no kernel runs.
	 */
	_Atomic uint64_t busy_ns[SIM_MAX_DEV], since_ns[SIM_MAX_DEV];
	/*
	 * For the engine: when the process last did something, in real and in simulated ns, and the real time
	 * for which it was found idle.
	 */
	_Atomic uint64_t stir_ns[SIM_MAX_DEV], stir_clock[SIM_MAX_DEV], idle_ns[SIM_MAX_DEV];
	_Atomic int up[SIM_MAX_DEV];	/* timers that are awake, and since when: */
	_Atomic uint64_t up_ns[SIM_MAX_DEV], up_clock[SIM_MAX_DEV];
	_Atomic int entering;		/* threads that wait for an engine's lock */
};

/* A thread that sleeps until a time of the simulated clock, see engine.c. */
struct sim_wait {
	int32_t pid;			/* 0: free */
	int32_t slot;			/* of its process */
	uint32_t ring;			/* futex: look again */
	bool blocked;			/* its process can give no work before that time */
	uint64_t until, seen;		/* seen: real time at which it last found no reason to wake */
};

#define SIM_MAX_WAIT 512

/*
 * The clock asks: is process pid idle, with every process on whose behalf it works, since it last did something at
 * a time? The answer is the same time in asleep. By slots of processes.
 */
struct sim_watch {
	_Atomic int32_t pid;
	_Atomic uint64_t want, asleep;
};

/* What one process did on the engine without a pause; an entry of the trace. */
struct sim_span {
	uint32_t dev;			/* the machine's number */
	int32_t pid;
	uint64_t start, end, busy;	/* simulated ns; busy: of the work itself */
	uint64_t items, real;		/* real: CLOCK_MONOTONIC at its end */
	uint64_t tag;			/* as the process says */
};

/* What a process has made for others to open: memory, which lies in the heap, or an event. It ends with its last user. */
struct sim_share {
	uint64_t secret[2];		/* 0: free */
	uint64_t off, size;		/* in the heap; size 0: an event */
	uint64_t users[SIM_MAX_PROC / 64];	/* bits, by slots of processes */
	bool closed;			/* its maker has let it go: nobody opens it again */
	int32_t recorder;		/* the slot that recorded the event last */
	_Atomic uint64_t recorded, completed;	/* how often the event was recorded; the newest record that is complete */
};

/* The engine of one device, under its own lock. */
struct sim_engine {
	pthread_mutex_t lock;
	uint64_t clock, real;		/* the simulated time at a real time, in ns */
	uint64_t ask;			/* real time since which no process seems to have work; 0: one has */
	int32_t owner;			/* the slot whose context is on the device, + 1 */
	struct sim_span span;
	struct sim_wait wait[SIM_MAX_WAIT];
};

/* The file itself. Behind it lies the heap, which is sparse: memory that several processes have. */
struct sim_shared {
	char magic[8];
	uint64_t size;
	int32_t ndev;
	int32_t sm;
	uint64_t mem;
	pthread_mutex_t lock;
	struct sim_proc proc[SIM_MAX_PROC];
	struct sim_engine engine[SIM_MAX_DEV];
	struct sim_share share[SIM_MAX_SHARE];
};

/* The busy time of one device by one process, in ns. */
struct sim_load {
	int32_t pid;
	uint64_t start, busy;
};

/* Reads the environment; returns 0, or -1 if a value is invalid. */
int state_config(struct sim_config *cfg);
/* Opens the shared state; own: takes a slot. Returns 0 or -errno. */
int state_open(struct sim_config *cfg, bool own);
/* Keeps only the devices that CUDA_VISIBLE_DEVICES names, by number or UUID; once, for libcuda. */
void state_visible(struct sim_config *cfg);
/* The machine's number of a device of this process. */
int state_phys(int dev);
void state_leave(void);
/* Takes bytes of a device's memory for this process. Returns false if there are not that many. */
bool state_charge(int dev, uint64_t bytes);
void state_uncharge(int dev, uint64_t bytes);
void state_contexts(int dev, int delta);
uint64_t state_used(int dev);
/* Notes that a kernel of this process begins or ends; any number may run at a time. */
void state_begin(int dev);
void state_end(int dev);
/* Copies the live slots; returns how many. */
int state_procs(struct sim_proc *out, int max);
/* The total that live processes have used of a device so far. */
int state_loads(int dev, struct sim_load *out, int max);
/* The engine of a device of this process; NULL before state_open. */
struct sim_engine *state_engine(int dev);
/* The slots of all processes, and the index of this one's, or -1. */
struct sim_proc *state_slots(void);
int state_slot(void);
/* A new share, of memory of so many bytes or, with 0, of an event; its number, or -1. This process is its first user. */
int state_share_new(uint64_t size);
/* Makes this process a user of a share that its maker still has; NULL if the secret is not the share's. */
struct sim_share *state_share_open(uint32_t number, const uint64_t secret[2]);
struct sim_share *state_share(int number);
/* This process uses the share no longer; closed: and nobody may open it any more. */
void state_share_drop(int number, bool closed);
/* Counts a record of an event; gives its number. */
uint64_t state_share_record(int number);
/* Maps the memory of a share, at an address or with NULL anywhere; NULL if that fails. */
void *state_share_map(int number, void *at);
/* Field 22 of /proc/PID/stat, or 0 when the process is gone or only waits to be reaped. */
uint64_t state_start_time(int pid);
void state_uuid(int dev, unsigned char uuid[16]);

#define SIM_DRIVER_STRING "580.159.04"
#define SIM_DRIVER_BRANCH "r580_00"
#define SIM_NAME "Sluice Simulated GPU"
#define SIM_PCI_BUS(dev) ((dev) + 1)

#endif
