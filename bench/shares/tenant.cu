// tenant POOLSIZE [PERCENT,PERCENT...]: a pool of tenant processes and their
// controller. Each line on standard input is one cell of the experiment:
//
//   NAME mode=free|turns secs=S warm=S q=US period=US bound=US early=US idle=US
//        wait=spin|futex|alert charge=held|gpu lend=0|1 end=kill|stop KIND:PERCENT...
//
// and gives one line of JSON. The percentages on the command line are what each
// tenant sets as its active threads for MPS before it opens the GPU.
//
// A tenant submits while what is in flight will end within its turn, by an estimate of what an item
// takes; then it waits for the rest and passes the token on. docs/shares.md says what is wrong in
// this: it is left as it was, since the log in bench/logs/shares is this program's.
#include "work.cuh"
#include "arbiter.h"

#include <algorithm>
#include <csignal>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <vector>

static const int SLOTS = 2000;	// of 10 ms each
static const int64_t GRACE = 20000000;	// past its deadline a tenant loses the token
static const int LATENCIES = 1 << 17, STAMPS = 1 << 16;

enum { WAIT_SPIN, WAIT_FUTEX, WAIT_ALERT };

struct Cell {
	int turns, wait, n;
	int64_t start, measure, end;	// ns
	int64_t bound, early, idle;	// ns
	int kind[MAX_TENANTS];
};

struct Report {
	unsigned done[SLOTS];	// items, by 10 ms since the start of measuring
	unsigned lat[LATENCIES];	// ns from one item's end to the next one's, for SYNC
	unsigned nlat;
	double event_us, stamp_us;
	int64_t max_gap, est;	// between ends of items; what one takes
};

struct Stamp { int tenant, epoch; int64_t first, last; };

struct Shared {
	Arbiter arb;
	Cell cell;
	std::atomic<int> round, ready, finished;
	std::atomic<unsigned> nstamps;
	Stamp stamps[STAMPS];
	Report report[MAX_TENANTS];
};

static Shared *sh;

static void futex_wait(std::atomic<int> *at, int value, int64_t ns)
{
	timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
	syscall(SYS_futex, at, FUTEX_WAIT, value, &t, nullptr, 0);
}

class Tenant {
	int me, kind = IDLE;
	Gpu gpu;
	Report *r;
	const Cell *c;
	Arbiter *arb;
	int64_t sent[RING], last_end = 0, busy_since = 0, est_of[KINDS] = {};
	bool fresh = false;	// the first item of this turn is still out

	// the turn
	bool holding = false, ended = false, alerted = false;
	int epoch = 0, turn = 0, given = 0, submitted = 0, unread = -1, unread_epoch = 0;
	int64_t empty_since = 0;

	bool has_work(int64_t now) const
	{
		if (kind == IDLE)
			return false;
		return kind != BURST || (now - c->start) / 1000000 % 50 < 20;
	}

	void note(int64_t now)
	{
		if (last_end && now >= c->measure && now < c->end) {
			int64_t gap = now - last_end;
			if (last_end >= c->measure)
				r->max_gap = std::max(r->max_gap, gap);
			r->done[(now - c->measure) / 10000000]++;
			if (kind == SYNC && r->nlat < LATENCIES)
				r->lat[r->nlat++] = (unsigned)std::min<int64_t>(gap, 4000000000ll);
		}
		last_end = now;
	}

	// reap takes what has ended off the queue and learns from it what an item takes.
	void reap()
	{
		int n = 0;
		int64_t since = std::max(busy_since, sent[gpu.tail % RING]);
		while (gpu.flying() && gpu.oldest_done()) {
			gpu.retire();
			n++;
		}
		if (!n)
			return;
		int64_t now = now_ns();
		for (int i = 0; i < n; i++)
			note(now);
		if (!fresh) {
			int64_t took = (now - since) / n, &e = est_of[kind];
			e = e ? e + (std::min(took, 4 * e) - e) / 8 : took;	// one hiccup of ours is not believed
		}
		fresh = false;
		busy_since = now;
		if (!gpu.flying())
			empty_since = now;
	}

	// rest_of_queue is how long the GPU will be busy with what it was given.
	int64_t rest_of_queue(int64_t now)
	{
		if (!gpu.flying())
			return 0;
		int64_t e = est_of[kind], since = std::max(busy_since, sent[gpu.tail % RING]);
		return std::max<int64_t>(e - (now - since), 0) + (gpu.flying() - 1) * e;
	}

	void submit()
	{
		sent[gpu.head % RING] = now_ns();
		gpu.submit(kind);
		submitted++;
		empty_since = 0;
	}

	void drain()
	{
		while (gpu.flying())
			reap();
	}

	void free_run(int64_t now)
	{
		reap();
		if (!has_work(now)) {
			usleep(50);
			return;
		}
		if (gpu.flying() < 2 || (gpu.flying() < RING - 2 && rest_of_queue(now) < c->bound))
			submit();
	}

	// read_turn takes the GPU's times of the turn before.
	double read_turn()
	{
		if (unread < 0)
			return 0;
		TurnTime t = gpu.turn_time(unread);
		unread = -1;
		if (now_ns() >= c->measure) {
			r->event_us += t.event_us;
			r->stamp_us += (t.last - t.first) / 1e3;
			unsigned i = sh->nstamps++;
			if (i < (unsigned)STAMPS)
				sh->stamps[i] = {me, unread_epoch, t.first, t.last};
		}
		return t.event_us * 1e3;
	}

	bool wait_for_turn()
	{
		Seat *s = &arb->seat[me];
		for (int64_t asked = now_ns();;) {
			int go = s->go.load();
			if (go == GO && arb->holder == me) {
				epoch = arb->epoch;
				return true;
			}
			int64_t now = now_ns();
			if (now >= c->end)
				return false;
			// Without lending the clock lets somebody in again, and nobody else says when.
			if (now - asked > (arb->holder < 0 ? 20000 : 1000000)) {
				arb->ask(me);
				asked = now;
			}
			if (c->wait == WAIT_SPIN || go == WATCH)
				__builtin_ia32_pause();
			else
				futex_wait(&s->go, go, arb->holder < 0 ? 50000 : 1000000);
		}
	}

	void end_turn(bool more)
	{
		if (!ended && submitted) {
			gpu.turn_end(turn);
			unread = turn;
			unread_epoch = epoch;
		}
		ended = true;
		int64_t now = now_ns();
		reap();
		if (gpu.flying() && (rest_of_queue(now) > c->early || !more))
			return;
		double ns = arb->charge_gpu ? read_turn() : 0;
		arb->rest(me, epoch, (int64_t)ns, more);
		holding = false;
	}

	void turn_run(int64_t now)
	{
		if (!holding) {
			reap();
			if (!has_work(now)) {
				usleep(50);
				return;
			}
			arb->ask(me);
			if (!wait_for_turn())
				return;
			holding = true, ended = false, alerted = false, fresh = true, submitted = 0;
			turn++;
			gpu.turn_begin(turn);
			submit();
			read_turn();	// of the turn before, while the GPU has something to do
			return;
		}
		reap();
		now = now_ns();
		if (arb->holder != me || arb->epoch != epoch) {	// taken away
			drain();
			holding = false;
			return;
		}
		int64_t left = arb->deadline - now, e = est_of[kind], rest = rest_of_queue(now);
		if (ended) {
			end_turn(true);
			return;
		}
		if (c->wait == WAIT_ALERT && !alerted && left < 150000) {
			arb->alert(me);
			alerted = true;
		}
		if (!has_work(now)) {
			if (!gpu.flying() && now - empty_since > c->idle)
				end_turn(false);
			return;
		}
		if (rest + e / 2 <= left) {	// one more ends nearer to the deadline than none
			if (gpu.flying() < 2 || (gpu.flying() < RING - 2 && rest < c->bound))
				submit();
			return;
		}
		if (arb->renew(me, epoch)) {
			alerted = false;
			return;
		}
		end_turn(true);
	}

public:
	explicit Tenant(int i) : me(i), r(&sh->report[i]), c(&sh->cell), arb(&sh->arb) {}

	void open()
	{
#ifdef SIMULATED
		gpu.self = me;
#endif
		gpu.init(nullptr);
		for (kind = 0; kind < IDLE; kind++)	// modules are loaded now, not in the first cell
			for (int i = 0; i < 3; i++) {
				submit();
				drain();
			}
	}

	void run()
	{
		kind = c->kind[me];
		last_end = 0;
		holding = false;
		unread = -1;
		while (now_ns() < c->start)
			usleep(200);
		for (int64_t now; (now = now_ns()) < c->end;) {
			if (c->turns)
				turn_run(now);
			else
				free_run(now);
		}
		while (holding)
			end_turn(false);
		drain();
		read_turn();
		r->est = est_of[kind];
	}
};

static void tenant(int i, const char *percent)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (percent)
		setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent, 1);
	Tenant *t = new Tenant(i);
	t->open();
	sh->ready++;
	for (int round = 0;;) {
		while (sh->round == round)
			futex_wait(&sh->round, round, 1000000000);
		round = sh->round;
		if (round < 0)
			exit(0);
		if (i < sh->cell.n)
			t->run();
		sh->finished++;
	}
}

static double percentile(std::vector<double> v, double p)
{
	if (v.empty())
		return 0;
	std::sort(v.begin(), v.end());
	return v[(size_t)(p * (v.size() - 1))];
}

static std::vector<pid_t> pids;
static bool broken, stopped;	// a tenant was killed: the pool takes no more cells

// gaps are the times between one tenant's last kernel and the next one's first, by the GPU's clock.
static std::vector<double> gaps()
{
	std::vector<Stamp> s(sh->stamps, sh->stamps + std::min<unsigned>(sh->nstamps, STAMPS));
	std::sort(s.begin(), s.end(), [](const Stamp &a, const Stamp &b) { return a.epoch < b.epoch; });
	std::vector<double> g;
	for (size_t i = 1; i < s.size(); i++)
		if (s[i].epoch == s[i - 1].epoch + 1 && s[i].tenant != s[i - 1].tenant)
			g.push_back((s[i].first - s[i - 1].last) / 1e3);
	return g;
}

static void watch(const Cell &c, const std::string &finish)
{
	Arbiter *a = &sh->arb;
	bool done = finish.empty();
	while (sh->finished < (int)pids.size() - (broken ? 1 : 0)) {
		int64_t now = now_ns();
		int h = a->holder;
		if (!done && now > c.measure + (c.end - c.measure) / 2 && (h == 0 || !c.turns)) {
			kill(pids[0], finish == "kill" ? SIGKILL : SIGSTOP);
			done = broken = true, stopped = finish != "kill";
		}
		if (broken && finish == "kill" && h == 0 && waitpid(pids[0], nullptr, WNOHANG) == pids[0])
			a->revoke(0);
		if (c.turns && h >= 0 && now > a->deadline + GRACE)
			a->revoke(h);
		if (now > c.end + 20000000000ll) {
			fprintf(stderr, "cell does not end\n");
			_exit(4);
		}
		usleep(500);
	}
}

static void cell(char *line)
{
	Arbiter *a = &sh->arb;
	Cell &c = sh->cell;
	std::string name, finish, text = line;
	double secs = 1.5, warm = 0.25;
	memset(sh->report, 0, sizeof sh->report);
	memset((void *)a, 0, sizeof *a);
	memset(&c, 0, sizeof c);
	c.bound = 1000000, c.idle = 50000, c.wait = WAIT_ALERT;
	a->quantum = 5000000, a->lend = 1;
	while (!text.empty() && text.back() == '\n')
		text.pop_back();
	for (char *w = strtok(line, " \n"); w; w = strtok(nullptr, " \n")) {
		char *v = strpbrk(w, "=:");
		if (!v) {
			name = w;
			continue;
		}
		bool load = *v == ':';
		*v++ = 0;
		if (load) {
			c.kind[c.n] = kind_of(w);
			a->seat[c.n].weight = atof(v) / 100;
			if (c.kind[c.n++] < 0 || c.n > (int)pids.size()) {
				fprintf(stderr, "%s: no load %s, or too many tenants\n", name.c_str(), w);
				_exit(2);
			}
		} else if (!strcmp(w, "mode")) c.turns = !strcmp(v, "turns");
		else if (!strcmp(w, "secs")) secs = atof(v);
		else if (!strcmp(w, "warm")) warm = atof(v);
		else if (!strcmp(w, "q")) a->quantum = atof(v) * 1e3;
		else if (!strcmp(w, "period")) a->period = atof(v) * 1e3;
		else if (!strcmp(w, "bound")) c.bound = atof(v) * 1e3;
		else if (!strcmp(w, "early")) c.early = atof(v) * 1e3;
		else if (!strcmp(w, "idle")) c.idle = atof(v) * 1e3;
		else if (!strcmp(w, "wait")) c.wait = !strcmp(v, "spin") ? WAIT_SPIN : !strcmp(v, "futex") ? WAIT_FUTEX : WAIT_ALERT;
		else if (!strcmp(w, "charge")) a->charge_gpu = !strcmp(v, "gpu");
		else if (!strcmp(w, "lend")) a->lend = atoi(v);
		else if (!strcmp(w, "end")) finish = v;
		else {
			fprintf(stderr, "%s: no setting %s\n", name.c_str(), w);
			exit(2);
		}
	}
	const char *until = getenv("SHARES_UNTIL");	// seconds since 1970
	if (broken || (until && time(nullptr) + warm + secs > atof(until))) {
		fprintf(stderr, "%s: not run, %s\n", name.c_str(), broken ? "the pool lost a tenant" : "the time is over");
		return;
	}
	a->n = c.n;
	a->holder = -1;
	c.start = now_ns() + 5000000;
	a->t0 = c.start;
	c.measure = c.start + (int64_t)(warm * 1e9);
	c.end = c.measure + (int64_t)(std::min(secs, SLOTS * 0.01) * 1e9);
	sh->nstamps = 0;
	sh->finished = 0;
	sh->round++;
	syscall(SYS_futex, &sh->round, FUTEX_WAKE, 1000, nullptr, nullptr, 0);
	watch(c, finish);

	std::vector<double> g = gaps();
	printf("{\"cell\": \"%s\", \"line\": \"%s\", \"secs\": %.3f, \"turns\": %d, \"q_us\": %.0f, \"switches\": %zu, "
	       "\"gap_us\": [%.1f, %.1f, %.1f], \"tenants\": [",
	       name.c_str(), text.c_str(), (c.end - c.measure) / 1e9, c.turns, a->quantum / 1e3, g.size(),
	       percentile(g, 0.1), percentile(g, 0.5), percentile(g, 0.9));
	for (int i = 0; i < c.n; i++) {
		Report &r = sh->report[i];
		Seat &s = a->seat[i];
		std::vector<double> lat(r.lat, r.lat + r.nlat);
		printf("%s{\"kind\": \"%s\", \"percent\": %g, \"est_us\": %.1f, \"held_ms\": %.2f, \"event_ms\": %.2f, \"stamp_ms\": %.2f, "
		       "\"turns\": %d, \"revoked\": %d, \"over_us\": [%.1f, %.1f], \"max_gap_ms\": %.3f, "
		       "\"lat_ns\": [%.1f, %.1f, %.1f, %.1f], \"done\": [",
		       i ? ", " : "", kind_names[c.kind[i]], s.weight * 100, r.est / 1e3, s.held / 1e6, r.event_us / 1e3,
		       r.stamp_us / 1e3, s.turns, s.revoked, s.turns ? s.over_sum / 1e3 / s.turns : 0, s.over_max / 1e3,
		       r.max_gap / 1e6, percentile(lat, 0.5), percentile(lat, 0.9), percentile(lat, 0.99), percentile(lat, 1));
		int slots = (int)((c.end - c.measure) / 10000000);
		for (int k = 0; k < slots; k++)
			printf("%s%u", k ? "," : "", r.done[k]);
		printf("]}");
	}
	printf("]}\n");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	int n = argc > 1 ? atoi(argv[1]) : 0;
	if (n < 1 || n > MAX_TENANTS) {
		fprintf(stderr, "usage: tenant POOLSIZE [PERCENT,...] < CELLS\n");
		return 2;
	}
	sh = (Shared *)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
#ifdef SIMULATED
	sim_clock = (SimClock *)mmap(nullptr, sizeof(SimClock), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
#endif
	char *save = nullptr, *percent = argc > 2 ? strtok_r(argv[2], ",", &save) : nullptr;
	int64_t begun = now_ns();
	for (int i = 0; i < n; i++) {
		pid_t p = fork();
		if (p == 0)
			tenant(i, percent);
		pids.push_back(p);
		if (percent)
			percent = strtok_r(nullptr, ",", &save);
	}
	while (sh->ready < n) {
		int status;
		pid_t p = waitpid(-1, &status, WNOHANG);
		if (p > 0 || now_ns() - begun > 60000000000ll) {
			fprintf(stderr, "a tenant did not start\n");
			for (pid_t q : pids)
				kill(q, SIGKILL);
			return 3;
		}
		usleep(1000);
	}
	fprintf(stderr, "pool of %d ready after %.1f s\n", n, (now_ns() - begun) / 1e9);
	char line[4096];
	while (fgets(line, sizeof line, stdin))
		if (line[0] != '\n' && line[0] != '#')
			cell(line);
	if (stopped)	// it cannot hear of it
		kill(pids[0], SIGKILL);
	sh->round = -1;
	syscall(SYS_futex, &sh->round, FUTEX_WAKE, 1000, nullptr, nullptr, 0);
	begun = now_ns();
	for (; !pids.empty() && now_ns() - begun < 3000000000ll; usleep(2000))
		pids.erase(std::remove_if(pids.begin(), pids.end(), [](pid_t p) { return waitpid(p, nullptr, WNOHANG) != 0; }),
			   pids.end());
	for (pid_t p : pids)	// who is left does not end by itself
		kill(p, SIGKILL);
	return 0;
}
