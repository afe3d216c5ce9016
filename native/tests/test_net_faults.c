/* Faults of programs of net rings, which tests begin: they stand before their bytes or half-way, fail, or damage a byte. */
#include "check.h"
#include "net/net_ring.h"
#include <poll.h>

enum { BLOCK = 5000, BLOCKS = 600, BYTES = BLOCK * BLOCKS, LIMIT_MS = 30000, TIMED_MS = 50, CODE = 507053 };
static char here[BYTES], there[BYTES];
static uint64_t numbers[BLOCKS], here_base, there_base;
static net_channel *a, *b;
static net_ring *r;

static void open_all(void)
{
    CHECK_EQ(net_channel_open(&(net_channel_options){2, LIMIT_MS, 0}, &a), 0);
    CHECK_EQ(net_channel_open(&(net_channel_options){2, LIMIT_MS, 0}, &b), 0);
    for (int i = 0; i < 2; i++) {
        int fds[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        CHECK_EQ(net_channel_add(a, fds[0], NULL), 0);
        CHECK_EQ(net_channel_add(b, fds[1], NULL), 0);
    }
    CHECK_EQ(net_open(a, &(net_options){64, 0}, &r), 0);
    CHECK_EQ(net_lend(b, (uint64_t)there, BYTES, NET_READ | NET_WRITE), 0);
    here_base = (uint64_t)here;
    there_base = (uint64_t)there;
    for (uint64_t i = 0; i < BLOCKS; i++)
        numbers[i] = i;
}

static void close_all(void)
{
    CHECK_EQ(net_close(r, LIMIT_MS), 0);
    net_free(r);
    net_channel_free(a);
    net_channel_free(b);
}

/* Moves all blocks. The two sides differ in each byte before. */
static void submit(int op, uint64_t id, int64_t timeout_ms)
{
    static ring_step s[2];
    ring_completion ran;
    memset(op == RING_GET ? there : here, 6, BYTES);
    memset(op == RING_GET ? here : there, 9, BYTES);
    s[op == RING_GET] = (ring_step){.op = op, .handle = a,
                                    .grid = {&here_base, &there_base, numbers, numbers, 1, BLOCKS, BLOCK, BLOCK, BLOCK, BLOCK}};
    CHECK_EQ(net_submit_as(r, RING_NORMAL, id, &s[op == RING_GET], 1, timeout_ms, &ran), RING_QUEUED);
}

static size_t landed(int op)
{
    const char *to = op == RING_GET ? here : there;
    size_t count = 0;
    for (size_t i = 0; i < BYTES; i++)
        count += to[i] == 6;
    return count;
}

static ring_completion next(void)
{
    net_counts counts;
    ring_completion done = {0};
    struct pollfd fd = {.fd = net_fd(r), .events = POLLIN};
    while (net_reap(r, &done, 1) != 1)
        if (poll(&fd, 1, LIMIT_MS) != 1)
            abort();
    net_channel_count(b, &counts);        /* its lock tells ThreadSanitizer that the owner's threads are done with the bytes */
    return done;
}

static void arrive(int fault)
{
    uint64_t count = 0;
    struct pollfd fd = {.fd = net_fault_fd(fault), .events = POLLIN};
    CHECK_EQ(poll(&fd, 1, LIMIT_MS), 1);
    CHECK_EQ(read(fd.fd, &count, sizeof count), sizeof count);
    CHECK_EQ(count, 1);
}

TEST(test_program_stands_at_a_hold_until_it_is_released)
{
    net_counts counts;
    for (int half = 0; half < 2; half++)
        for (int op = RING_GET; op <= RING_PUT; op++) {
            open_all();
            int hold = net_fault_begin(half ? NET_HOLD_HALF : NET_HOLD, op, 1, 0);
            submit(op, 1, LIMIT_MS);
            arrive(hold);
            net_channel_count(b, &counts);
            CHECK_EQ(landed(op), half ? BYTES / 2 : 0);
            net_fault_end(hold);
            CHECK_EQ(net_fault_fd(hold), -1);
            ring_completion done = next();
            CHECK_EQ(done.state, RING_DONE);
            CHECK_EQ(done.bytes, BYTES);
            CHECK_EQ(landed(op), BYTES);
            net_fault_end(hold);
            close_all();
        }
}

TEST(test_program_that_stands_is_stopped_and_its_time_limit_runs)
{
    for (int late = 0; late < 2; late++)
        for (int op = RING_GET; op <= RING_PUT; op++) {
            open_all();
            int hold = net_fault_begin(NET_HOLD_HALF, op, 0, 0), stop = net_fault_begin(NET_HOLD, NET_STOP, 0, 0);
            submit(op, 1, late ? TIMED_MS : LIMIT_MS);
            arrive(hold);
            CHECK_EQ(late ? 1 : net_cancel(r, 1), 1);
            arrive(stop);
            ring_completion done = next();
            CHECK_EQ(done.state, late ? RING_TIMED_OUT : RING_CANCELLED);
            CHECK_EQ(done.bytes, BYTES / 2);
            net_fault_end(hold);
            net_fault_end(stop);
            submit(op, 2, LIMIT_MS);
            CHECK_EQ(next().state, RING_DONE);
            close_all();
        }
}

TEST(test_only_the_nth_program_fails_or_is_damaged)
{
    for (int op = RING_GET; op <= RING_PUT; op++) {
        open_all();
        int fail = net_fault_begin(NET_FAIL, op, 2, CODE), of_other = net_fault_begin(NET_FAIL, RING_GET + RING_PUT - op, 0, CODE);
        for (uint64_t id = 1; id <= 3; id++) {
            submit(op, id, LIMIT_MS);
            ring_completion done = next();
            CHECK_EQ(done.state, id == 2 ? RING_FAILED : RING_DONE);
            CHECK_EQ(done.code, id == 2 ? CODE : 0);
        }
        net_fault_end(fail);
        net_fault_end(of_other);
        const int64_t bytes[] = {0, -1, BLOCK * 7 + 1, 1 << 20, (1 << 20) - 1};
        for (uint64_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
            int flip = net_fault_begin(NET_FLIP, op, 1, bytes[i]);
            submit(op, 10 + i, LIMIT_MS);
            CHECK_EQ(next().state, RING_DONE);
            CHECK_EQ(landed(op), BYTES - 1);
            CHECK_EQ((op == RING_GET ? here : there)[bytes[i] < 0 ? BYTES + bytes[i] : bytes[i]], 6 ^ 1);
            net_fault_end(flip);
        }
        close_all();
    }
}

TEST(test_faults_that_make_no_sense_are_refused)
{
    int all[NET_MOST_FAULTS];
    CHECK_EQ(net_fault_begin(0, RING_GET, 1, 0), -22);
    CHECK_EQ(net_fault_begin(NET_FLIP + 1, RING_GET, 1, 0), -22);
    CHECK_EQ(net_fault_begin(NET_HOLD, RING_COPY, 1, 0), -22);
    CHECK_EQ(net_fault_begin(NET_FAIL, NET_STOP, 1, CODE), -22);
    for (int i = 0; i < NET_MOST_FAULTS; i++)
        CHECK((all[i] = net_fault_begin(NET_HOLD, RING_GET, 1, 0)) >= 0);
    CHECK_EQ(net_fault_begin(NET_HOLD, RING_GET, 1, 0), -28);
    for (int i = 0; i < NET_MOST_FAULTS; i++)
        net_fault_end(all[i]);
    int again = net_fault_begin(NET_HOLD, RING_GET, 1, 0);
    CHECK_EQ(again, all[NET_MOST_FAULTS - 1] + 1);
    net_fault_end(all[0]);
    CHECK(net_fault_fd(again) >= 0);
    net_fault_end(again);
}

int main(void)
{
    RUN(test_program_stands_at_a_hold_until_it_is_released);
    RUN(test_program_that_stands_is_stopped_and_its_time_limit_runs);
    RUN(test_only_the_nth_program_fails_or_is_damaged);
    RUN(test_faults_that_make_no_sense_are_refused);
    return check_done();
}
