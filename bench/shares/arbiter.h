// Turns on one GPU, kept by the tenants themselves in memory that they share.
//
// A tenant's virtual time is what it used over what it is due. The token goes to the
// tenant with work that is furthest behind. Without lending nobody may be ahead of
// the clock, so that an idle tenant's time stays unused; with it, whoever has work.
#pragma once
#include <atomic>
#include <cstdint>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

static const int MAX_TENANTS = 32;

enum { SLEEP, WATCH, GO };	// what a tenant that waits is told

struct Seat {
	double weight;		// 0..1
	double vt;		// ns used / weight
	std::atomic<int> want, go;
	int64_t held;		// ns
	int turns, revoked;
	int64_t over_max, over_sum;	// past the deadline, ns
};

struct Arbiter {
	std::atomic<int> lock;
	std::atomic<int> holder;	// -1: nobody
	std::atomic<int64_t> deadline;
	std::atomic<int> epoch;		// one more with each turn, also with one that was taken away
	int64_t begun, t0;
	int n, lend, charge_gpu;
	int64_t quantum, period;	// ns; a period makes quanta follow the weights
	Seat seat[MAX_TENANTS];

	void acquire()
	{
		for (int zero = 0; !lock.compare_exchange_weak(zero, 1, std::memory_order_acquire); zero = 0)
			__builtin_ia32_pause();
	}
	void release() { lock.store(0, std::memory_order_release); }

	void wake(int i, int what)
	{
		seat[i].go.store(what);
		syscall(SYS_futex, &seat[i].go, FUTEX_WAKE, 1, nullptr, nullptr, 0);
	}

	int64_t quantum_of(int i)
	{
		return period ? (int64_t)(period * seat[i].weight) : quantum;
	}

	// best is who is due, or -1; self counts as wanting.
	int best(int64_t now, int self)
	{
		int b = -1;
		for (int i = 0; i < n; i++) {
			if (!seat[i].want.load() && i != self)
				continue;
			if (!lend && seat[i].vt > now - t0)
				continue;
			if (b < 0 || seat[i].vt < seat[b].vt)
				b = i;
		}
		return b;
	}

	void grant(int i, int64_t now)
	{
		begun = now;
		deadline = now + quantum_of(i);
		epoch++;
		holder = i;
		seat[i].turns++;
		wake(i, GO);
	}

	void charge(int i, int64_t ns) { seat[i].vt += ns / seat[i].weight; }

	// ask says that tenant i has work; it may get the token at once.
	void ask(int i)
	{
		acquire();
		int64_t now = now_ns();
		if (!seat[i].want.load()) {
			double least = -1;	// who comes back does not bring its past along
			for (int j = 0; j < n; j++)
				if (j != i && (seat[j].want.load() || holder == j) && (least < 0 || seat[j].vt < least))
					least = seat[j].vt;
			double floor = lend ? least : now - t0 - 100e6;
			if (floor > 0 && seat[i].vt < floor)
				seat[i].vt = floor;
			seat[i].want = 1;
		}
		if (holder < 0) {
			int b = best(now, -1);
			if (b >= 0)
				grant(b, now);
		}
		release();
	}

	// rest gives the token back and passes it on; gpu_ns is what the turn took by the
	// GPU's measure. False: it had been taken away.
	bool rest(int i, int at, int64_t gpu_ns, bool more)
	{
		acquire();
		int64_t now = now_ns();
		bool mine = holder == i && epoch == at;
		if (mine) {
			int64_t over = now - deadline;
			seat[i].held += now - begun;
			if (over > seat[i].over_max)
				seat[i].over_max = over;
			seat[i].over_sum += over;
			charge(i, charge_gpu ? gpu_ns : now - begun);
			seat[i].want = more;
			seat[i].go = SLEEP;
			holder = -1;
			int b = best(now, -1);
			if (b >= 0)
				grant(b, now);
		} else {
			seat[i].want = more;
		}
		release();
		return mine;
	}

	// renew lengthens the turn of the holder if it would be the next one anyway.
	bool renew(int i, int at)
	{
		bool yes = false;
		acquire();
		if (holder == i && epoch == at) {
			int64_t end = deadline;
			double was = seat[i].vt;
			charge(i, end - begun);
			yes = best(end, i) == i;
			if (yes) {
				seat[i].held += end - begun;
				begun = end;
				deadline = end + quantum_of(i);
			} else {
				seat[i].vt = was;
			}
		}
		release();
		return yes;
	}

	// alert wakes who is likely to be next, so that it need not be woken at the moment itself.
	void alert(int i)
	{
		acquire();
		int b = -1;
		for (int j = 0; j < n; j++)
			if (j != i && seat[j].want.load() && (b < 0 || seat[j].vt < seat[b].vt))
				b = j;
		if (b >= 0 && seat[b].go == SLEEP)
			wake(b, WATCH);
		release();
	}

	// revoke takes the token from a tenant that died or stalled.
	void revoke(int i)
	{
		acquire();
		int64_t now = now_ns();
		seat[i].want = 0;
		if (holder == i) {
			seat[i].held += now - begun;
			charge(i, now - begun);
			seat[i].revoked++;
			holder = -1;
			epoch++;
			int b = best(now, -1);
			if (b >= 0)
				grant(b, now);
		}
		release();
	}
};
