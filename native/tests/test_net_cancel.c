/* Programs of both directions are cancelled at random points. After the completion no byte lands, and what is done has landed. */
#include "check.h"
#include "net/net_ring.h"
#include <poll.h>

enum { BLOCK = 4096, BLOCKS = 96, LIMIT_MS = 30000 };
static char here[BLOCKS * BLOCK], there[BLOCKS * BLOCK], copy[BLOCKS * BLOCK];
static uint32_t rounds = 250;             /* of both directions each; the program's argument, if it has one */
static uint64_t numbers[BLOCKS], here_base, there_base, seed = 88172645463325252ull;

static uint64_t dice(uint64_t sides)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % sides;
}

static net_channel *owner;

/* The owner's threads are done with it when this returns; its locks tell ThreadSanitizer so, which sockets do not. */
static ring_completion next(net_ring *r)
{
    net_counts counts;
    ring_completion done = {0};
    struct pollfd fd = {.fd = net_fd(r), .events = POLLIN};
    while (net_reap(r, &done, 1) != 1)
        if (poll(&fd, 1, LIMIT_MS) != 1)
            abort();
    net_channel_count(owner, &counts);
    return done;
}

/* Waits until the peer has answered all that was sent: these pulls are behind it on the only connection. */
static void settle(net_ring *r, net_channel *a)
{
    static char spare[64];
    static uint64_t zero, base;
    ring_completion ran;
    base = (uint64_t)spare;
    ring_step s = {.op = RING_GET, .handle = a, .grid = {&base, &there_base, &zero, &zero, 1, 1, 64, 64, 64, 64}};
    for (uint64_t id = 0; id < 4; id++)
        CHECK_EQ(net_submit_as(r, RING_NORMAL, 1000000 + id, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(next(r).state, RING_DONE);
}

static void one_round(net_channel *a, net_ring *r, int op, uint64_t id, uint32_t *cancelled)
{
    char *to = op == RING_GET ? here : there, *from = op == RING_GET ? there : here;
    uint32_t blocks = 1 + (uint32_t)dice(BLOCKS);
    size_t bytes = (size_t)blocks * BLOCK;
    ring_completion ran;
    ring_step s = {.op = op, .handle = a, .grid = {&here_base, &there_base, numbers, numbers, 1, blocks, BLOCK, BLOCK, BLOCK, BLOCK}};
    memset(from, (int)(id * 2 % 255), bytes);
    memset(to, (int)(id * 2 % 255) + 1, bytes);
    CHECK_EQ(net_submit_as(r, (int)dice(3), id, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    for (uint64_t spin = dice(2) ? dice(8000) : dice(200); spin; spin--)
        __asm__ volatile("");
    net_cancel(r, id);
    ring_completion done = next(r);
    CHECK_EQ(done.id, id);
    if (done.state == RING_DONE) {
        CHECK_EQ(done.bytes, bytes);
        CHECK(memcmp(to, from, bytes) == 0);
        return;
    }
    CHECK_EQ(done.state, RING_CANCELLED);
    ++*cancelled;
    size_t landed = 0;
    memcpy(copy, to, bytes);
    if (op == RING_PUT)
        memset(from, 255, bytes);         /* nothing reads it now; a sanitizer would tell */
    settle(r, a);
    CHECK(memcmp(copy, to, bytes) == 0);
    for (size_t i = 0; i < bytes; i++)
        landed += copy[i] != (char)((int)(id * 2 % 255) + 1);
    CHECK_EQ(landed, done.bytes);
}

TEST(test_no_byte_lands_after_a_cancelled_program_has_ended)
{
    net_channel *a = NULL, *b = NULL;
    net_ring *r = NULL;
    uint32_t cancelled = 0;
    int fds[2];
    here_base = (uint64_t)here;
    there_base = (uint64_t)there;
    for (uint64_t i = 0; i < BLOCKS; i++)
        numbers[i] = i;
    CHECK_EQ(net_channel_open(&(net_channel_options){2, LIMIT_MS, 0}, &a), 0);
    CHECK_EQ(net_channel_open(&(net_channel_options){2, LIMIT_MS, 0}, &b), 0);
    owner = b;
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(a, fds[0], NULL), 0);
    CHECK_EQ(net_channel_add(b, fds[1], NULL), 0);
    CHECK_EQ(net_open(a, &(net_options){64, 0}, &r), 0);
    CHECK_EQ(net_lend(b, there_base, sizeof there, NET_READ | NET_WRITE), 0);
    for (uint64_t i = 1; i <= rounds && !check_failures; i++) {
        one_round(a, r, RING_GET, 2 * i, &cancelled);
        one_round(a, r, RING_PUT, 2 * i + 1, &cancelled);
    }
    CHECK(cancelled > 0);
    printf("     %u of %u were cancelled\n", cancelled, 2 * rounds);
    CHECK_EQ(net_close(r, LIMIT_MS), 0);
    net_free(r);
    net_channel_free(a);
    net_channel_free(b);
}

int main(int argc, char **argv)
{
    rounds = argc > 1 ? (uint32_t)atoi(argv[1]) : rounds;
    RUN(test_no_byte_lands_after_a_cancelled_program_has_ended);
    return check_done();
}
