/* A net ring whose peer is played by hand: what is unconfirmed, late, passed, unreadable or added late; and threads that end. */
#include "check.h"
#include "net/frames.h"
#include "net/net_ring.h"
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>

enum { MIB = 1 << 20, LIMIT_MS = 30000, HOUR_MS = 3600000, LOST = 507057 };
static char here[8 * MIB], there[MIB];
static uint64_t numbers[8] = {0, 1, 2, 3, 4, 5, 6, 7}, remote_base = 1 << 20, local_base;

typedef struct hand { net_channel *c; net_ring *r; int peers[2]; } hand;

static hand open_patient_hand(int connections, int64_t patience_ms)
{
    hand h = {.peers = {-1, -1}};
    CHECK_EQ(net_channel_open(&(net_channel_options){2, patience_ms, 0}, &h.c), 0);
    CHECK_EQ(net_open(h.c, &(net_options){16, 0}, &h.r), 0);
    for (int i = 0; i < connections; i++) {
        int fds[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
        CHECK_EQ(net_channel_add(h.c, fds[0], NULL), 0);
        h.peers[i] = fds[1];
    }
    return h;
}

static hand open_hand(int connections)
{
    return open_patient_hand(connections, 200);
}

static void close_hand(hand *h)
{
    CHECK_EQ(net_close(h->r, LIMIT_MS), 0);
    net_free(h->r);
    net_channel_free(h->c);
    for (int i = 0; i < 2; i++)
        if (h->peers[i] >= 0)
            close(h->peers[i]);
}

static ring_step step_of(const hand *h, int op, uint32_t blocks, uint64_t bytes)
{
    return (ring_step){.op = op, .handle = h->c,
                       .grid = {&local_base, &remote_base, numbers, numbers, 1, blocks, bytes, bytes, bytes, bytes}};
}

static int submit(hand *h, int priority, uint64_t id, const ring_step *steps, uint32_t count, int64_t timeout_ms)
{
    ring_completion ran;
    return net_submit_as(h->r, priority, id, steps, count, timeout_ms, &ran);
}

static ring_completion next(net_ring *r)
{
    ring_completion done = {0};
    struct pollfd fd = {.fd = net_fd(r), .events = POLLIN};
    while (net_reap(r, &done, 1) != 1)
        if (poll(&fd, 1, LIMIT_MS) != 1) {
            printf("no completion came\n");
            abort();
        }
    return done;
}

static net_frame hear_head(int fd, net_range *ranges)
{
    net_frame head = {0};
    CHECK_EQ(recv(fd, &head, sizeof head, MSG_WAITALL), sizeof head);
    CHECK_EQ(recv(fd, ranges, head.ranges * sizeof *ranges, MSG_WAITALL), head.ranges * sizeof *ranges);
    return head;
}

TEST(test_push_that_the_peer_never_confirmed_fails_when_the_channel_is_closed)
{
    for (int cancelled = 0; cancelled < 2; cancelled++) {
        hand h = open_hand(1);
        ring_step put = step_of(&h, RING_PUT, 1, 64), get = step_of(&h, RING_GET, 1, 64);
        CHECK_EQ(submit(&h, RING_NORMAL, 1, &put, 1, LIMIT_MS), RING_QUEUED);
        CHECK_EQ(cancelled ? net_cancel(h.r, 1) : 1, 1);
        CHECK_EQ(submit(&h, RING_NORMAL, 2, &get, 1, LIMIT_MS), RING_QUEUED);
        net_channel_close(h.c);
        ring_completion done = next(h.r);
        CHECK_EQ(done.id, 1);
        CHECK_EQ(done.state, RING_FAILED);
        CHECK_EQ(done.code, LOST);
        done = next(h.r);
        CHECK_EQ(done.id, 2);
        CHECK_EQ(done.state, RING_CANCELLED);
        close_hand(&h);
    }
}

TEST(test_push_of_which_no_byte_left_is_cancelled_when_the_channel_is_closed)
{
    hand h = open_hand(0);
    ring_step put = step_of(&h, RING_PUT, 1, 64);
    CHECK_EQ(submit(&h, RING_NORMAL, 1, &put, 1, LIMIT_MS), RING_QUEUED);
    net_channel_close(h.c);
    CHECK_EQ(next(h.r).state, RING_CANCELLED);
    close_hand(&h);
}

TEST(test_empty_steps_are_passed_over)
{
    net_range ranges[NET_MOST_RANGES];
    hand h = open_hand(1);
    ring_step steps[] = {step_of(&h, RING_PUT, 0, 64), step_of(&h, RING_GET, 1, 64), step_of(&h, RING_PUT, 0, 64)};
    CHECK_EQ(submit(&h, RING_NORMAL, 1, steps, 3, LIMIT_MS), RING_QUEUED);
    net_frame head = hear_head(h.peers[0], ranges);
    CHECK_EQ(head.op, NET_OP_READ);
    CHECK_EQ(head.ranges, 1);
    CHECK_EQ(head.bytes, 64);
    head = (net_frame){.op = NET_OP_DATA, .part = head.part, .bytes = 64};
    tell(h.peers[0], &head, sizeof head);
    tell(h.peers[0], there, 64);
    ring_completion done = next(h.r);
    CHECK_EQ(done.state, RING_DONE);
    CHECK_EQ(done.bytes, 64);
    CHECK_EQ(done.step, 3);
    close_hand(&h);
}

/* The thread of the first connection keeps the time. It sleeps while another one begins the program. */
TEST(test_time_limit_of_a_program_that_another_thread_begins)
{
    net_range ranges[NET_MOST_RANGES];
    hand h = open_hand(2);
    ring_step all = step_of(&h, RING_GET, 6, MIB), small = step_of(&h, RING_GET, 1, 64);
    CHECK_EQ(submit(&h, RING_NORMAL, 1, &all, 1, HOUR_MS), RING_QUEUED);
    CHECK_EQ(submit(&h, RING_NORMAL, 2, &small, 1, 50), RING_QUEUED);
    net_frame head = hear_head(h.peers[1], ranges);
    head = (net_frame){.op = NET_OP_ENDED, .status = NET_NOT_LENT, .part = head.part};
    tell(h.peers[1], &head, sizeof head);
    ring_completion done = next(h.r);
    CHECK_EQ(done.id, 1);
    CHECK_EQ(done.code, ACL_ERROR_RT_PARAM_INVALID);
    done = next(h.r);
    CHECK_EQ(done.id, 2);
    CHECK_EQ(done.state, RING_TIMED_OUT);
    close_hand(&h);
}

TEST(test_time_limit_goes_on_once_nothing_more_urgent_waits)
{
    net_range ranges[NET_MOST_RANGES];
    hand h = open_hand(1);
    ring_step large = step_of(&h, RING_GET, 5, MIB), small = step_of(&h, RING_GET, 1, 64);
    CHECK_EQ(submit(&h, RING_BACKGROUND, 1, &large, 1, 300), RING_QUEUED);
    net_frame head = hear_head(h.peers[0], ranges);
    head = (net_frame){.op = NET_OP_DATA, .part = head.part, .bytes = MIB};
    tell(h.peers[0], &head, sizeof head);
    tell(h.peers[0], there, MIB);
    for (int i = 0; i < 3; i++)
        hear_head(h.peers[0], ranges);    /* no slot is left for the last part */
    CHECK_EQ(submit(&h, RING_CRITICAL, 2, &small, 1, HOUR_MS), RING_QUEUED);
    hear_head(h.peers[0], ranges);
    CHECK_EQ(net_cancel(h.r, 2), 1);
    CHECK_EQ(next(h.r).state, RING_CANCELLED);
    ring_completion done = next(h.r);
    CHECK_EQ(done.id, 1);
    CHECK_EQ(done.state, RING_TIMED_OUT);
    close_hand(&h);
}

/* The pulls ended at once, but the connection is not free before the peer has answered them. */
TEST(test_peer_that_never_answers_cancelled_pulls_breaks_the_channel)
{
    net_reason why;
    hand h = open_hand(1);
    ring_step get = step_of(&h, RING_GET, 1, 64);
    for (uint64_t id = 1; id <= 3; id++) {
        CHECK_EQ(submit(&h, RING_NORMAL, id, &get, 1, 100), RING_QUEUED);
        CHECK_EQ(net_cancel(h.r, id), 1);
        CHECK_EQ(next(h.r).state, RING_CANCELLED);
    }
    CHECK_EQ(submit(&h, RING_NORMAL, 4, &get, 1, 100), RING_QUEUED);
    ring_completion done = next(h.r);
    CHECK_EQ(done.state, RING_FAILED);
    CHECK_EQ(done.code, LOST);
    CHECK_EQ(net_channel_why(h.c, &why), NET_LATE);
    close_hand(&h);
}

/* Reads `bytes` of what comes in small pieces, with a pause behind each. */
static void hear_slowly(int fd, uint64_t bytes, uint64_t piece, int pause_ms)
{
    for (uint64_t heard = 0; heard < bytes;) {
        ssize_t got = recv(fd, there, bytes - heard < piece ? bytes - heard : piece, 0);
        CHECK(got > 0);
        heard += got > 0 ? (uint64_t)got : bytes;
        poll(NULL, 0, pause_ms);
    }
}

/* Four times the patience pass until the peer has confirmed it. */
TEST(test_cancelled_push_over_a_slow_network_waits_while_its_bytes_move)
{
    net_range ranges[NET_MOST_RANGES];
    net_reason why;
    for (int times_out = 0; times_out < 2; times_out++) {
        hand h = open_patient_hand(1, 400);
        ring_step put = step_of(&h, RING_PUT, 1, MIB), get = step_of(&h, RING_GET, 1, 64);
        CHECK_EQ(submit(&h, RING_NORMAL, 1, &put, 1, times_out ? 20 : LIMIT_MS), RING_QUEUED);
        net_frame head = hear_head(h.peers[0], ranges);
        CHECK_EQ(times_out ? 1 : net_cancel(h.r, 1), 1);
        hear_slowly(h.peers[0], MIB, MIB / 40, 40);
        head = (net_frame){.op = NET_OP_ENDED, .part = head.part};
        tell(h.peers[0], &head, sizeof head);
        ring_completion done = next(h.r);
        CHECK_EQ(done.state, times_out ? RING_TIMED_OUT : RING_CANCELLED);
        CHECK_EQ(done.bytes, MIB);
        CHECK_EQ(net_channel_why(h.c, &why), NET_WHOLE);
        CHECK_EQ(submit(&h, RING_NORMAL, 2, &get, 1, LIMIT_MS), RING_QUEUED);
        hear_head(h.peers[0], ranges);
        close_hand(&h);
    }
}

/* The peer answers a pull that was late, and then cancelled, bit by bit. */
TEST(test_late_pull_over_a_slow_network_leaves_the_channel_whole)
{
    net_range ranges[NET_MOST_RANGES];
    net_reason why;
    hand h = open_patient_hand(1, 400);
    ring_step get = step_of(&h, RING_GET, 1, MIB);
    CHECK_EQ(submit(&h, RING_NORMAL, 1, &get, 1, 1), RING_QUEUED);
    net_frame head = hear_head(h.peers[0], ranges);
    CHECK_EQ(next(h.r).state, RING_TIMED_OUT);
    head = (net_frame){.op = NET_OP_DATA, .part = head.part, .bytes = MIB};
    tell(h.peers[0], &head, sizeof head);
    for (uint64_t told = 0; told < MIB; told += MIB / 32) {
        tell(h.peers[0], there, MIB / 32);
        poll(NULL, 0, 40);
    }
    CHECK_EQ(net_channel_why(h.c, &why), NET_WHOLE);
    close_hand(&h);
}

/* It takes a few bytes now and then, so that something always moves, and would take minutes. */
TEST(test_peer_that_takes_a_cancelled_push_too_slowly_breaks_the_channel)
{
    enum { PIECE = 1024 };
    net_reason why;
    struct pollfd fd;
    uint64_t heard = 0;
    hand h = open_patient_hand(1, 40);
    ring_step put = step_of(&h, RING_PUT, 2, MIB);
    CHECK_EQ(submit(&h, RING_NORMAL, 1, &put, 1, LIMIT_MS), RING_QUEUED);
    CHECK_EQ(net_cancel(h.r, 1), 1);
    fd = (struct pollfd){.fd = net_fd(h.r), .events = POLLIN};
    while (poll(&fd, 1, 5) == 0 && heard < MIB) {
        ssize_t got = recv(h.peers[0], there, PIECE, MSG_DONTWAIT);
        heard += got > 0 ? (uint64_t)got : 0;
    }
    CHECK(heard < MIB);
    ring_completion done = next(h.r);
    CHECK_EQ(done.state, RING_FAILED);
    CHECK_EQ(done.code, LOST);
    CHECK_EQ(net_channel_why(h.c, &why), NET_LATE);
    close_hand(&h);
}

/* The peer reads or writes in the middle of it, and the call returns when it cannot go on. */
TEST(test_memory_that_the_peer_uses_is_taken_back)
{
    net_reason why;
    for (int op = NET_OP_READ; op <= NET_OP_WRITE; op += NET_OP_WRITE - NET_OP_READ) {
        hand h = open_hand(1);
        net_range range = {(uint64_t)here, MIB};
        net_frame head = {.op = (uint8_t)op, .ranges = 1, .part = 1, .bytes = MIB};
        CHECK_EQ(net_lend(h.c, range.address, MIB, NET_READ | NET_WRITE), 0);
        memset(here, 7, MIB);
        tell(h.peers[0], &head, sizeof head);
        tell(h.peers[0], &range, sizeof range);
        if (op == NET_OP_READ) {
            CHECK_EQ(recv(h.peers[0], there, 64, MSG_WAITALL), 64);
        } else {
            net_counts counts = {0};
            tell(h.peers[0], there, 64);
            while (!counts.received)
                net_channel_count(h.c, &counts);
        }
        CHECK_EQ(net_take_back(h.c, range.address, MIB, NET_READ | NET_WRITE), 0);
        memset(here, 9, MIB);             /* a sanitizer would tell if a thread still used it */
        CHECK_EQ(net_channel_why(h.c, &why), NET_TAKEN_BACK);
        CHECK_EQ(net_take_back(h.c, range.address, MIB, NET_READ | NET_WRITE), -ENOENT);
        close_hand(&h);
    }
}

/* Both parts leave in one call, which reports nothing but that some of the memory cannot be read. */
TEST(test_only_the_push_whose_memory_cannot_be_read_fails)
{
    net_range ranges[NET_MOST_RANGES];
    int fds[2];
    char got[64];
    char *gone = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t gone_base = (uint64_t)gone;
    hand h = open_hand(0);
    ring_step good = step_of(&h, RING_PUT, 1, 64), bad = good;
    bad.grid.local = &gone_base;
    memset(here, 7, 64);
    CHECK_EQ(submit(&h, RING_NORMAL, 1, &good, 1, LIMIT_MS), RING_QUEUED);
    CHECK_EQ(submit(&h, RING_NORMAL, 2, &bad, 1, LIMIT_MS), RING_QUEUED);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(h.c, fds[0], NULL), 0);
    h.peers[0] = fds[1];
    for (int i = 1; i <= 2; i++) {
        net_frame head = hear_head(fds[1], ranges);
        CHECK_EQ(recv(fds[1], got, sizeof got, MSG_WAITALL), sizeof got);
        CHECK_EQ(got[0], i == 1 ? 7 : 0);
        head = (net_frame){.op = NET_OP_ENDED, .part = head.part};
        tell(fds[1], &head, sizeof head);
        ring_completion done = next(h.r);
        CHECK_EQ(done.id, i);
        CHECK_EQ(done.state, i == 1 ? RING_DONE : RING_FAILED);
        CHECK(i == 1 || strstr(done.message, "spoilt"));
    }
    close_hand(&h);
    munmap(gone, 4096);
}

static pthread_barrier_t together;

static void *open_and_free(void *arg)
{
    (void)arg;
    for (int i = 0; i < 100; i++) {
        hand h = open_hand(2);
        ring_step get = step_of(&h, RING_GET, 3, 64);
        CHECK_EQ(submit(&h, RING_NORMAL, 1, &get, 1, LIMIT_MS), RING_QUEUED);
        pthread_barrier_wait(&together);
        close_hand(&h);
        pthread_barrier_wait(&together);
    }
    return NULL;
}

TEST(test_last_channels_are_freed_at_the_same_time)
{
    pthread_t threads[3];
    local_base = (uint64_t)here;
    pthread_barrier_init(&together, NULL, 3);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, open_and_free, NULL), 0);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&together);
}

static void *add_late(void *arg)
{
    hand *h = arg;
    int fds[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(h->c, fds[0], NULL), 0);
    h->peers[0] = fds[1];
    return NULL;
}

TEST(test_connection_is_added_while_programs_are_submitted)
{
    for (int i = 0; i < 20; i++) {
        pthread_t adder;
        hand h = open_hand(0);
        ring_step get = step_of(&h, RING_GET, 1, 64);
        CHECK_EQ(pthread_create(&adder, NULL, add_late, &h), 0);
        for (uint64_t id = 1; id < 8; id++)
            CHECK_EQ(submit(&h, RING_NORMAL, id, &get, 1, LIMIT_MS), RING_QUEUED);
        pthread_join(adder, NULL);
        close_hand(&h);
    }
}

int main(void)
{
    local_base = (uint64_t)here;
    RUN(test_push_that_the_peer_never_confirmed_fails_when_the_channel_is_closed);
    RUN(test_push_of_which_no_byte_left_is_cancelled_when_the_channel_is_closed);
    RUN(test_empty_steps_are_passed_over);
    RUN(test_time_limit_of_a_program_that_another_thread_begins);
    RUN(test_time_limit_goes_on_once_nothing_more_urgent_waits);
    RUN(test_peer_that_never_answers_cancelled_pulls_breaks_the_channel);
    RUN(test_cancelled_push_over_a_slow_network_waits_while_its_bytes_move);
    RUN(test_late_pull_over_a_slow_network_leaves_the_channel_whole);
    RUN(test_peer_that_takes_a_cancelled_push_too_slowly_breaks_the_channel);
    RUN(test_memory_that_the_peer_uses_is_taken_back);
    RUN(test_only_the_push_whose_memory_cannot_be_read_fails);
    RUN(test_last_channels_are_freed_at_the_same_time);
    RUN(test_connection_is_added_while_programs_are_submitted);
    return check_done();
}
