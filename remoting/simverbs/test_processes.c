/* The simulated libibverbs between two processes, and across fork. */
#include "testing.h"

enum { PEER_UNREACHED = 12 };	/* the peer's exit status if its message was not answered */

static char self[4000];

static void exchange(int fd, struct end *e, struct address *to)
{
	struct address own = address(e);

	MUST(write(fd, &own, sizeof(own)) == sizeof(own));
	MUST(read(fd, to, sizeof(*to)) == sizeof(*to));
	to_rtr(e, *to);
	to_rts(e);
}

/*
 * The peer: sends each message back, from the second half of its buffer, until its socket ends. It has a child that keeps on living, as
 * a program may: its end is an end for all that.
 */
static int peer(int fd)
{
	struct vb_context *c = open_sim();
	struct end e = begin_end(c, 2 << 20, 16);
	struct vb_wc wc = { 0 };
	struct address to;

	for (uint64_t i = 0; i < 16; i++)
		MUST(!post_recv(&e, i));
	exchange(fd, &e, &to);
	for (;;) {
		char byte;

		if (e.c->ops.poll_cq(e.rcq, 1, &wc)) {
			MUST(!wc.status && !post_recv(&e, 0));
			if (!wc.imm && !fork())		/* the first; the connections are there */
				_exit(read(fd, &byte, 1) != 0);
			memcpy(e.buf + (1 << 20), e.buf, wc.length);
			MUST(!post(&e, to, VB_WRITE_WITH_IMM, wc.imm, 1 << 20, wc.length, VB_SIGNALED));
			wc = next(&e, e.scq);
			if (wc.status == RETRY_EXCEEDED)
				break;
			MUST(!wc.status);
		} else if (!recv(fd, &byte, 1, MSG_DONTWAIT)) {
			break;
		}
		sched_yield();
	}
	end_end(&e);
	ib->close_device(c);
	return bad ? 1 : wc.status ? PEER_UNREACHED : 0;
}

static pid_t start_peer(int *fd)
{
	char arg[20];
	int two[2];
	pid_t pid;

	MUST(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, two));
	snprintf(arg, sizeof(arg), "%d", two[1]);
	pid = fork();
	if (!pid) {
		fcntl(two[1], F_SETFD, 0);
		execl(self, self, "peer", arg, NULL);
		_exit(4);
	}
	close(two[1]);
	*fd = two[0];
	return pid;
}

static void t_processes(void)
{
	for (int round = 0; round < 2; round++) {
		struct vb_context *c = open_sim();
		struct end e = begin_end(c, 2 << 20, 16);
		struct address to;
		int fd, st;
		pid_t pid = start_peer(&fd);

		exchange(fd, &e, &to);
		for (uint32_t i = 0; i < 100; i++) {
			uint32_t n = i % 10 == 9 ? 1 << 20 : i * 17;

			memset(e.buf, (int)i + 1, n);
			IS(post_recv(&e, i), 0);
			IS(post(&e, to, VB_WRITE_WITH_IMM, i, 0, n, VB_SIGNALED), 0);
			EXPECT(&e, scq, i, 0);
			EXPECT(&e, rcq, i, 0);
			MUST(!memcmp(e.buf, e.buf + (1 << 20), n));
		}
		IS(post_recv(&e, 200), 0);
		if (round) {
			kill(pid, SIGKILL);
			MUST(waitpid(pid, &st, 0) == pid);
			CHECK(none(&e, e.rcq, 50));
			IS(post(&e, to, VB_WRITE_WITH_IMM, 1, 0, 1, 0), 0);
			EXPECT(&e, scq, 1, RETRY_EXCEEDED);
			EXPECT(&e, rcq, 200, VB_WC_FLUSHED);
		}
		close(fd);
		if (!round) {
			MUST(waitpid(pid, &st, 0) == pid);
			IS(st, 0);
		}
		end_end(&e);
		IS(ib->close_device(c), 0);
	}
}

/* "cut=2": what is sent until then arrives, and nothing comes back; the peer sees that it does not. */
static void t_cut_between(void)
{
	struct vb_context *c = open_sim();
	struct end e = begin_end(c, 2 << 20, 16);
	struct address to;
	int fd, st;
	pid_t pid;

	unsetenv("SLUICE_SIMVERBS_FAULT");	/* not the peer's */
	pid = start_peer(&fd);
	exchange(fd, &e, &to);
	for (uint64_t i = 0; i < 2; i++) {
		IS(post_recv(&e, i), 0);
		IS(post(&e, to, VB_WRITE_WITH_IMM, i, 0, 8, VB_SIGNALED), 0);
		EXPECT(&e, scq, i, 0);
		if (!i)
			EXPECT(&e, rcq, i, 0);
	}
	MUST(waitpid(pid, &st, 0) == pid);
	IS(WEXITSTATUS(st), PEER_UNREACHED);
	CHECK(none(&e, e.rcq, 0));
	IS(post(&e, to, VB_WRITE_WITH_IMM, 9, 0, 8, 0), 0);
	EXPECT(&e, scq, 9, RETRY_EXCEEDED);
	EXPECT(&e, rcq, 1, VB_WC_FLUSHED);
	close(fd);
	end_end(&e);
	IS(ib->close_device(c), 0);
}

/* A child of fork ends what its parent has, and nothing happens to that. */
static void t_fork(void)
{
	struct end a, b;

	pair(&a, &b, 64, 4);
	for (uint64_t i = 0; i < 20; i++) {
		pid_t pid;
		int st;

		IS(post_recv(&b, i), 0);
		IS(post(&a, address(&b), VB_WRITE_WITH_IMM, i, 0, 8, VB_SIGNALED), 0);
		pid = fork();
		if (!pid) {
			struct vb_wc wc;

			alarm(20);
			CHECK(post(&a, address(&b), OP_WRITE, 1, 0, 8, 0));
			CHECK(b.c->ops.poll_cq(b.rcq, 1, &wc) < 0);
			end_pair(&a, &b);
			_exit(bad != 0);
		}
		EXPECT(&b, rcq, i, 0);
		EXPECT(&a, scq, i, 0);
		MUST(waitpid(pid, &st, 0) == pid);
		IS(st, 0);
	}
	end_pair(&a, &b);
}

static const struct test tests[] = {
	{ "processes", t_processes, NULL, 0 },
	{ "cut between processes", t_cut_between, "SLUICE_SIMVERBS_FAULT=cut=2", 0 },
	{ "fork", t_fork, NULL, 0 },
	{ NULL, NULL, NULL, 0 },
};

int main(int argc, char **argv)
{
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

	if (n < 0)
		return 1;
	self[n] = 0;
	if (argc == 3 && !strcmp(argv[1], "peer"))
		return peer(atoi(argv[2]));
	return run_tests(tests, argc, argv);
}
