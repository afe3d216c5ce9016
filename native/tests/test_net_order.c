/* Layers land in order and are told; the ends of an ordered ring come in the order of submission, whatever ends first. */
#include "check.h"
#include "net/net_ring.h"
#include <poll.h>

enum { BYTES = 64 << 10, LAYERS = 6, LIMIT_MS = 30000 };
static char here[LAYERS * BYTES], there[LAYERS * BYTES];
static uint64_t zero, locals[LAYERS], remotes[LAYERS];

static ring_completion next(net_ring *r)
{
    ring_completion done = {0};
    struct pollfd fd = {.fd = net_fd(r), .events = POLLIN};
    while (net_reap(r, &done, 1) != 1)
        if (poll(&fd, 1, LIMIT_MS) != 1)
            abort();
    return done;
}

static net_channel *open_channel(void)
{
    net_channel *c = NULL;
    CHECK_EQ(net_channel_open(&(net_channel_options){2, 500, 0}, &c), 0);
    return c;
}

static void join(net_channel *a, net_channel *b, int connections)
{
    for (int i = 0; i < connections; i++) {
        int fds[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        CHECK_EQ(net_channel_add(a, fds[0], NULL), 0);
        CHECK_EQ(net_channel_add(b, fds[1], NULL), 0);
    }
}

static ring_step step_of(net_channel *a, int op, uint32_t tensors)
{
    for (int i = 0; i < LAYERS; i++) {
        locals[i] = (uint64_t)here + (uint64_t)i * BYTES;
        remotes[i] = (uint64_t)there + (uint64_t)i * BYTES;
    }
    return (ring_step){.op = op, .handle = a, .grid = {locals, remotes, &zero, &zero, tensors, 1, BYTES, BYTES, BYTES, BYTES}};
}

TEST(test_layers_land_group_by_group)
{
    int64_t landed_ns[LAYERS] = {0};
    ring_completion ran;
    net_channel *a = open_channel(), *b = open_channel();
    net_ring *r = NULL;
    CHECK_EQ(net_open(a, &(net_options){8, 1}, &r), 0);
    CHECK_EQ(net_lend(b, (uint64_t)there, sizeof there, NET_READ), 0);
    memset(there, 5, sizeof there);
    ring_layers layers = {.tensors = 1, .group = 2, .landed_ns = landed_ns};
    ring_step s = step_of(a, RING_GET, LAYERS);
    s.layers = &layers;
    CHECK_EQ(net_submit_as(r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(net_watch(r, 1), 0);
    join(a, b, 3);
    uint32_t told = 0;
    for (ran = next(r); ran.state == RING_UNDER_WAY; ran = next(r)) {
        CHECK(ran.step > told && ran.step % 2 == 0);
        told = ran.step;
    }
    CHECK_EQ(ran.state, RING_DONE);
    CHECK_EQ(ran.bytes, sizeof here);
    CHECK(memcmp(here, there, sizeof here) == 0);
    for (int i = 0; i < LAYERS; i++)
        CHECK(landed_ns[i] > 0 && (!i || landed_ns[i] >= landed_ns[i - 1]));
    CHECK_EQ(net_close(r, LIMIT_MS), 0);
    net_free(r);
    net_channel_free(a);
    net_channel_free(b);
}

TEST(test_ends_of_an_ordered_ring_come_in_the_order_of_submission)
{
    ring_completion ran;
    net_channel *a = open_channel(), *b = open_channel();
    net_ring *r = NULL;
    uint64_t nowhere = 64;
    CHECK_EQ(net_open(a, &(net_options){8, 1}, &r), 0);
    CHECK_EQ(net_lend(b, (uint64_t)there, sizeof there, NET_READ), 0);
    ring_step s = step_of(a, RING_GET, LAYERS), bad = step_of(a, RING_GET, 1);
    bad.grid.remote = &nowhere;
    CHECK_EQ(net_submit_as(r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(net_submit_as(r, RING_NORMAL, 2, &bad, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(net_submit_as(r, RING_NORMAL, 3, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(net_submit_as(r, RING_NORMAL, 4, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(net_cancel(r, 3), 1);
    CHECK_EQ(net_cancel(r, 3), 0);
    CHECK_EQ(net_reap(r, &ran, 1), 0);
    join(a, b, 2);
    static const int states[] = {RING_DONE, RING_FAILED, RING_CANCELLED, RING_DONE};
    for (int i = 0; i < 4; i++) {
        ran = next(r);
        CHECK_EQ(ran.id, i + 1);
        CHECK_EQ(ran.state, states[i]);
    }
    CHECK_EQ(net_close(r, LIMIT_MS), 0);
    net_free(r);
    net_channel_free(a);
    net_channel_free(b);
}

int main(void)
{
    RUN(test_layers_land_group_by_group);
    RUN(test_ends_of_an_ordered_ring_come_in_the_order_of_submission);
    return check_done();
}
