/* Sealed connections: right bytes, and none that a process on the way has changed, repeated, dropped or added. */
#include "check.h"
#include "net/net_ring.h"
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>

enum { BLOCK = 5000, BLOCKS = 500, LIMIT_MS = 30000, HEAD = 4, TAG = 16 };
static char here[BLOCKS * BLOCK], there[BLOCKS * BLOCK];
static uint64_t order[BLOCKS], local_base, remote_base;
static uint8_t keys[2 * NET_KEY], other_keys[2 * NET_KEY];      /* of the one end, and of the other */

static void make_keys(void)
{
    for (int i = 0; i < NET_KEY; i++) {
        keys[i] = other_keys[NET_KEY + i] = (uint8_t)(3 * i + 1);
        keys[NET_KEY + i] = other_keys[i] = (uint8_t)(5 * i + 2);
    }
}

static net_channel *open_channel(void)
{
    net_channel *c = NULL;
    CHECK_EQ(net_channel_open(&(net_channel_options){2, 500, 0}, &c), 0);
    return c;
}

static ring_step step_of(net_channel *c, int op, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++)
        order[i] = blocks - 1 - i;
    local_base = (uint64_t)here;
    remote_base = (uint64_t)there;
    return (ring_step){.op = op, .handle = c, .grid = {&local_base, &remote_base, order, order, 1, blocks, BLOCK, BLOCK, BLOCK, BLOCK}};
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

/* ---- two ends, and a relay between them ---- */

enum act { NOTHING, FLIP, REPEAT, DROP, CUT };
typedef struct relay {
    int one, other;                       /* towards the end that asks, and towards the owner */
    enum act act;
    size_t at;                            /* of the first record that the asking end sends, or of the owner's with `back` */
    bool back, slow;
    pthread_t thread;
} relay;

static bool receive_all(int fd, uint8_t *to, size_t size)
{
    for (size_t got = 0; got < size;) {
        ssize_t n = recv(fd, to + got, size - got, 0);
        if (n <= 0)
            return false;
        got += (size_t)n;
    }
    return true;
}

static void send_all(int fd, const uint8_t *from, size_t size, bool slow)
{
    for (size_t sent = 0; sent < size;) {
        ssize_t n = send(fd, from + sent, slow && sent < 64 ? 1 : size - sent, MSG_NOSIGNAL);
        if (n <= 0)
            return;
        sent += (size_t)n;
    }
}

/* Passes records on from one socket to the other; does its act to the first one. */
static void pass_records(relay *r, int from, int to, bool acts)
{
    static __thread uint8_t record[HEAD + (1 << 16) + TAG];
    for (bool is_first = true; receive_all(from, record, HEAD); is_first = false) {
        uint32_t bytes;
        memcpy(&bytes, record, HEAD);
        size_t size = HEAD + bytes + TAG;
        if (size > sizeof record || !receive_all(from, record + HEAD, size - HEAD))
            break;
        enum act act = acts && is_first ? r->act : NOTHING;
        if (act == FLIP)
            record[r->at == SIZE_MAX ? size - 1 : r->at] ^= 0x10;
        if (act == CUT) {
            send_all(to, record, size - 1, false);
            break;
        }
        if (act != DROP)
            send_all(to, record, size, r->slow);
        if (act == REPEAT)
            send_all(to, record, size, false);
    }
    shutdown(to, SHUT_WR);
}

static void *back(void *arg)
{
    relay *r = arg;
    pass_records(r, r->other, r->one, r->back);
    return NULL;
}

static void *forth(void *arg)
{
    relay *r = arg;
    pthread_t thread;
    pthread_create(&thread, NULL, back, r);
    pass_records(r, r->one, r->other, !r->back);
    pthread_join(thread, NULL);
    return NULL;
}

typedef struct ends { net_channel *a, *b; net_ring *r; relay relays[4]; int count; } ends;

static void open_ends(ends *e, int count, relay like)
{
    *e = (ends){open_channel(), open_channel(), NULL, .count = count};
    make_keys();
    fill();
    for (int i = 0; i < count; i++) {
        int first[2], second[2];
        relay *r = &e->relays[i];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, first), 0);
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, second), 0);
        *r = like;
        r->one = first[1];
        r->other = second[0];
        CHECK_EQ(net_channel_add(e->a, first[0], keys), 0);
        CHECK_EQ(net_channel_add(e->b, second[1], other_keys), 0);
        CHECK_EQ(pthread_create(&r->thread, NULL, forth, r), 0);
    }
    CHECK_EQ(net_open(e->a, &(net_options){64, 0}, &e->r), 0);
    CHECK_EQ(net_lend(e->b, (uint64_t)there, sizeof there, NET_READ | NET_WRITE), 0);
}

static void close_ends(ends *e)
{
    CHECK_EQ(net_close(e->r, LIMIT_MS), 0);
    net_free(e->r);
    net_channel_free(e->a);
    net_channel_free(e->b);
    for (int i = 0; i < e->count; i++) {
        pthread_join(e->relays[i].thread, NULL);
        close(e->relays[i].one);
        close(e->relays[i].other);
    }
}

static void move(int op, int count, bool slow)
{
    ring_completion ran;
    ends e;
    open_ends(&e, count, (relay){.slow = slow});
    ring_step s = step_of(e.a, op, BLOCKS);
    CHECK_EQ(net_submit_as(e.r, RING_NORMAL, 7, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    ring_completion done = next(e.r);
    CHECK_EQ(done.state, RING_DONE);
    CHECK_EQ(done.bytes, sizeof here);
    CHECK(memcmp(here, there, sizeof here) == 0);
    close_ends(&e);
}

TEST(test_sealed_bytes_arrive_in_both_directions)
{
    for (int op = RING_GET; op <= RING_PUT; op++) {
        move(op, 1, true);
        move(op, 4, false);
    }
}

/* What is done to a record of either end breaks the channel, and no byte lands. */
static void tamper(int op, relay how)
{
    ring_completion ran;
    net_reason why;
    ends e;
    open_ends(&e, 1, how);
    static char before[sizeof here];
    memcpy(before, op == RING_GET ? here : there, sizeof before);
    ring_step s = step_of(e.a, op, 4);
    CHECK_EQ(net_submit_as(e.r, RING_NORMAL, 7, &s, 1, 2000, &ran), RING_QUEUED);
    ring_completion done = next(e.r);
    CHECK(done.state == RING_FAILED || done.state == RING_TIMED_OUT);
    CHECK(memcmp(before, op == RING_GET ? here : there, sizeof before) == 0);
    net_channel *victim = how.back ? e.a : e.b;
    if (how.act != DROP) {
        struct pollfd fd = {.fd = net_channel_fd(victim), .events = POLLIN};
        CHECK_EQ(poll(&fd, 1, LIMIT_MS), 1);
        CHECK_EQ(net_channel_why(victim, &why), NET_PROTOCOL);
        CHECK(strstr(why.message, "wrong seal") != NULL);
    }
    close_ends(&e);
}

TEST(test_what_was_changed_on_the_way_is_not_believed)
{
    static const size_t places[] = {2, HEAD, HEAD + 20, SIZE_MAX};
    for (int op = RING_GET; op <= RING_PUT; op++)
        for (size_t i = 0; i < sizeof places / sizeof *places; i++)
            for (int way = 0; way < (op == RING_GET ? 2 : 1); way++)
                tamper(op, (relay){.act = FLIP, .at = places[i], .back = way});
}

TEST(test_record_that_is_cut_off_is_not_believed)
{
    tamper(RING_GET, (relay){.act = CUT, .back = true});
    tamper(RING_PUT, (relay){.act = CUT});
}

TEST(test_record_that_comes_twice_breaks_the_channel)
{
    ring_completion ran;
    net_reason why;
    ends e;
    open_ends(&e, 1, (relay){.act = REPEAT});
    ring_step s = step_of(e.a, RING_PUT, 4);
    CHECK_EQ(net_submit_as(e.r, RING_NORMAL, 7, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    next(e.r);
    struct pollfd fd = {.fd = net_channel_fd(e.b), .events = POLLIN};
    CHECK_EQ(poll(&fd, 1, LIMIT_MS), 1);
    CHECK_EQ(net_channel_why(e.b, &why), NET_PROTOCOL);
    close_ends(&e);
}

/* The next record comes in the place of the one that is missing. */
TEST(test_record_that_is_dropped_breaks_the_channel)
{
    ring_completion ran;
    net_reason why;
    ends e;
    open_ends(&e, 1, (relay){.act = DROP});
    ring_step s = step_of(e.a, RING_GET, 1);
    for (uint64_t id = 1; id <= 2; id++)
        CHECK_EQ(net_submit_as(e.r, RING_NORMAL, id, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    struct pollfd fd = {.fd = net_channel_fd(e.b), .events = POLLIN};
    CHECK_EQ(poll(&fd, 1, LIMIT_MS), 1);
    CHECK_EQ(net_channel_why(e.b, &why), NET_PROTOCOL);
    CHECK_EQ(next(e.r).state, RING_FAILED);
    close_ends(&e);
}

TEST(test_plain_bytes_are_not_believed_where_seals_are_due)
{
    ring_completion ran;
    net_reason why;
    int fds[2];
    net_channel *a = open_channel(), *b = open_channel();
    net_ring *r;
    make_keys();
    fill();
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(a, fds[0], NULL), 0);
    CHECK_EQ(net_channel_add(b, fds[1], other_keys), 0);
    CHECK_EQ(net_open(a, &(net_options){8, 0}, &r), 0);
    CHECK_EQ(net_lend(b, (uint64_t)there, sizeof there, NET_READ | NET_WRITE), 0);
    ring_step s = step_of(a, RING_PUT, 400);
    char before = there[0];
    CHECK_EQ(net_submit_as(r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
    CHECK_EQ(next(r).state, RING_FAILED);
    CHECK_EQ(net_channel_why(b, &why), NET_PROTOCOL);
    CHECK_EQ(there[0], before);
    CHECK_EQ(net_close(r, LIMIT_MS), 0);
    net_free(r);
    net_channel_free(a);
    net_channel_free(b);
}

/* Unlike plain bytes, sealed ones are read and written by the process itself. */
TEST(test_memory_that_was_unmapped_fails_its_program_and_ends_no_process)
{
    enum { MANY = 100 };
    for (int op = RING_GET; op <= RING_PUT; op++)
        for (int is_theirs = 0; is_theirs < 2; is_theirs++) {
            net_channel *a = open_channel(), *b = open_channel();
            net_ring *r = NULL;
            net_reason why;
            ring_completion ran;
            int fds[2];
            char *gone = mmap(NULL, MANY * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
            CHECK_EQ(net_channel_add(a, fds[0], keys), 0);
            CHECK_EQ(net_channel_add(b, fds[1], other_keys), 0);
            CHECK_EQ(net_open(a, &(net_options){16, 0}, &r), 0);
            CHECK_EQ(net_lend(b, (uint64_t)there, sizeof there, NET_READ | NET_WRITE), 0);
            CHECK_EQ(net_lend(b, (uint64_t)gone, MANY * BLOCK, NET_READ | NET_WRITE), 0);
            ring_step s = step_of(a, op, MANY);
            munmap(gone, MANY * BLOCK);
            *(is_theirs ? &remote_base : &local_base) = (uint64_t)gone;
            CHECK_EQ(net_submit_as(r, RING_NORMAL, 1, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
            CHECK_EQ(next(r).state, RING_FAILED);
            if (is_theirs && op == RING_GET) {       /* nothing but its end tells the peer that such bytes do not come */
                CHECK_EQ(net_channel_why(b, &why), NET_FAILED);
            } else {
                s = step_of(a, op, MANY);
                CHECK_EQ(net_submit_as(r, RING_NORMAL, 2, &s, 1, LIMIT_MS, &ran), RING_QUEUED);
                CHECK_EQ(next(r).state, RING_DONE);
            }
            CHECK_EQ(net_close(r, LIMIT_MS), 0);
            net_free(r);
            net_channel_free(a);
            net_channel_free(b);
        }
}

int main(void)
{
    RUN(test_sealed_bytes_arrive_in_both_directions);
    RUN(test_what_was_changed_on_the_way_is_not_believed);
    RUN(test_record_that_is_cut_off_is_not_believed);
    RUN(test_record_that_comes_twice_breaks_the_channel);
    RUN(test_record_that_is_dropped_breaks_the_channel);
    RUN(test_plain_bytes_are_not_believed_where_seals_are_due);
    RUN(test_memory_that_was_unmapped_fails_its_program_and_ends_no_process);
    return check_done();
}
