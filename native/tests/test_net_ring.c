/* Two channels joined by pairs of sockets: pulls, pushes, ranges that are not lent, cancels and ends. */
#include "check.h"
#include "net/net_ring.h"
#include <poll.h>

enum { BLOCK = 8192, BLOCKS = 600, LIMIT_MS = 30000 };
static char here[BLOCKS * BLOCK], there[BLOCKS * BLOCK];
static uint64_t order[BLOCKS], local_base, remote_base;

typedef struct pair { net_channel *a, *b; net_ring *r; } pair;

static net_channel *open_channel(void)
{
    net_channel *c = NULL;
    CHECK_EQ(net_channel_open(&(net_channel_options){2, 500, 0}, &c), 0);
    return c;
}

static pair open_pair(int connections, bool ordered)
{
    pair p = {open_channel(), open_channel(), NULL};
    for (int i = 0; i < connections; i++) {
        int fds[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        CHECK_EQ(net_channel_add(p.a, fds[0], NULL), 0);
        CHECK_EQ(net_channel_add(p.b, fds[1], NULL), 0);
    }
    CHECK_EQ(net_open(p.a, &(net_options){64, ordered}, &p.r), 0);
    return p;
}

static void close_pair(pair *p)
{
    CHECK_EQ(net_close(p->r, LIMIT_MS), 0);
    net_free(p->r);
    net_channel_free(p->a);
    net_channel_free(p->b);
}

static ring_step step_of(pair *p, int op, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++)
        order[i] = blocks - 1 - i;
    local_base = (uint64_t)here;
    remote_base = (uint64_t)there;
    return (ring_step){.op = op, .handle = p->a, .grid = {&local_base, &remote_base, order, order, 1, blocks, BLOCK, BLOCK, BLOCK, BLOCK}};
}

static ring_completion next(net_ring *r)
{
    ring_completion done = {0};
    struct pollfd fd = {.fd = net_fd(r), .events = POLLIN};
    while (net_reap(r, &done, 1) != 1)
        if (poll(&fd, 1, LIMIT_MS) != 1)
            abort();
    return done;
}

static void fill(void)
{
    for (size_t i = 0; i < sizeof here; i++) {
        here[i] = (char)(i * 7);
        there[i] = (char)(i * 13 + i / BLOCK);
    }
}

static void move(int op, int connections, bool ordered)
{
    ring_completion ran;
    pair p = open_pair(connections, ordered);
    fill();
    CHECK_EQ(net_lend(p.b, (uint64_t)there, sizeof there, NET_READ | NET_WRITE), 0);
    ring_step s = step_of(&p, op, BLOCKS);
    CHECK(memcmp(here, there, sizeof here) != 0);
    CHECK_EQ(net_submit_as(p.r, RING_NORMAL, 7, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    ring_completion done = next(p.r);
    CHECK_EQ(done.id, 7);
    CHECK_EQ(done.state, RING_DONE);
    CHECK_EQ(done.bytes, sizeof here);
    CHECK(memcmp(here, there, sizeof here) == 0);
    close_pair(&p);
}

TEST(test_pulls_move_all_bytes)
{
    move(RING_GET, 1, false);
    move(RING_GET, 4, true);
}

TEST(test_pushes_move_all_bytes)
{
    move(RING_PUT, 1, true);
    move(RING_PUT, 4, false);
}

TEST(test_range_that_is_not_lent_is_refused)
{
    ring_completion ran;
    for (int op = RING_GET; op <= RING_PUT; op++) {
        pair p = open_pair(2, false);
        fill();
        CHECK_EQ(net_lend(p.b, (uint64_t)there, sizeof there, op == RING_GET ? NET_WRITE : NET_READ), 0);
        ring_step s = step_of(&p, op, 3);
        char before = there[0];
        CHECK_EQ(net_submit_as(p.r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
        ring_completion done = next(p.r);
        CHECK_EQ(done.state, RING_FAILED);
        CHECK_EQ(done.code, ACL_ERROR_RT_PARAM_INVALID);
        CHECK_EQ(done.bytes, 0);
        CHECK(strstr(done.message, "does not lend") != NULL);
        CHECK_EQ(there[0], before);
        net_counts counts;
        net_channel_count(p.b, &counts);
        CHECK_EQ(counts.connections, 2);
        close_pair(&p);
    }
}

TEST(test_cancelled_pull_ends_at_once_though_the_peer_says_nothing)
{
    ring_completion ran;
    int fds[2];
    pair p = {open_channel(), open_channel(), NULL};
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(p.a, fds[0], NULL), 0);
    CHECK_EQ(net_open(p.a, &(net_options){8, 0}, &p.r), 0);
    ring_step s = step_of(&p, RING_GET, BLOCKS);
    CHECK_EQ(net_submit_as(p.r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(net_cancel(p.r, 1), 1);
    CHECK_EQ(net_reap(p.r, &ran, 1), 1);
    CHECK_EQ(ran.state, RING_CANCELLED);
    CHECK_EQ(ran.bytes, 0);
    close(fds[1]);
    close_pair(&p);
}

TEST(test_program_fails_when_the_peer_goes)
{
    ring_completion ran;
    net_reason why;
    int fds[2];
    pair p = {open_channel(), open_channel(), NULL};
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(p.a, fds[0], NULL), 0);
    CHECK_EQ(net_open(p.a, &(net_options){8, 0}, &p.r), 0);
    ring_step s = step_of(&p, RING_GET, BLOCKS);
    CHECK_EQ(net_submit_as(p.r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    close(fds[1]);
    ran = next(p.r);
    CHECK_EQ(ran.state, RING_FAILED);
    CHECK_EQ(ran.code, 507057);
    CHECK_EQ(net_channel_why(p.a, &why), NET_ENDED);
    close_pair(&p);
}

TEST(test_cancelled_push_that_the_peer_never_confirms_breaks_the_channel)
{
    ring_completion ran;
    net_reason why;
    int fds[2];
    pair p = {open_channel(), open_channel(), NULL};
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(p.a, fds[0], NULL), 0);
    CHECK_EQ(net_open(p.a, &(net_options){8, 0}, &p.r), 0);
    ring_step s = step_of(&p, RING_PUT, BLOCKS);
    CHECK_EQ(net_submit_as(p.r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(net_cancel(p.r, 1), 1);
    ran = next(p.r);
    CHECK_EQ(ran.state, RING_FAILED);
    CHECK_EQ(ran.code, 507057);
    CHECK_EQ(ran.bytes, 0);
    CHECK_EQ(net_channel_why(p.a, &why), NET_LATE);
    close(fds[1]);
    close_pair(&p);
}

int main(void)
{
    RUN(test_pulls_move_all_bytes);
    RUN(test_pushes_move_all_bytes);
    RUN(test_range_that_is_not_lent_is_refused);
    RUN(test_cancelled_pull_ends_at_once_though_the_peer_says_nothing);
    RUN(test_program_fails_when_the_peer_goes);
    RUN(test_cancelled_push_that_the_peer_never_confirms_breaks_the_channel);
    return check_done();
}
