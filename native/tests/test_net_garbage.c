/* Frames by hand, one byte at a time: what the rules of frames.h refuse ends the channel, and nothing else does. */
#include "check.h"
#include "net/frames.h"
#include "net/net_ring.h"
#include <poll.h>

enum { LIMIT_MS = 30000, ANSWER = 100, DATA_CAME = ANSWER + NET_OP_DATA * 10, REFUSED = ANSWER + NET_OP_ENDED * 10 + NET_NOT_LENT };
static char memory[4096];

static void trickle(int fd, const void *bytes, size_t size)
{
    for (size_t i = 0; i < size && send(fd, (const char *)bytes + i, 1, MSG_NOSIGNAL) == 1; i++)
        ;
}

/* The reason why the channel broke, or what it answered. */
static int outcome(net_frame head, uint64_t address, uint64_t bytes, bool with_range)
{
    int fds[2];
    net_channel *c = NULL;
    net_reason why;
    net_range range = {address, bytes};
    net_frame answer = {0};
    CHECK_EQ(net_channel_open(&(net_channel_options){2, 500, 0}, &c), 0);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    CHECK_EQ(net_channel_add(c, fds[0], NULL), 0);
    CHECK_EQ(net_lend(c, (uint64_t)memory, sizeof memory, NET_READ), 0);
    trickle(fds[1], &head, sizeof head);
    if (with_range)
        trickle(fds[1], &range, sizeof range);
    struct pollfd fd[2] = {{.fd = net_channel_fd(c), .events = POLLIN}, {.fd = fds[1], .events = POLLIN}};
    CHECK(poll(fd, 2, LIMIT_MS) > 0);
    int got = -1;
    if (fd[1].revents && recv(fds[1], &answer, sizeof answer, MSG_WAITALL) == sizeof answer)
        got = ANSWER + answer.op * 10 + answer.status;
    else if (poll(fd, 1, LIMIT_MS) == 1)
        got = net_channel_why(c, &why);
    close(fds[1]);
    net_channel_free(c);
    return got;
}

static const net_frame read_64 = {.op = NET_OP_READ, .ranges = 1, .part = 1, .bytes = 64};

TEST(test_ranges_are_looked_up)
{
    uint64_t start = (uint64_t)memory;
    CHECK_EQ(outcome(read_64, start, 64, true), DATA_CAME);
    CHECK_EQ(outcome(read_64, start + sizeof memory - 64, 64, true), DATA_CAME);
    CHECK_EQ(outcome(read_64, start + sizeof memory - 63, 64, true), REFUSED);
    CHECK_EQ(outcome(read_64, start - 1, 64, true), REFUSED);
    CHECK_EQ(outcome(read_64, UINT64_MAX - 10, 64, true), REFUSED);
    CHECK_EQ(outcome(read_64, 0, 64, true), REFUSED);
}

static int with_field(size_t at, size_t size, uint64_t value)
{
    net_frame head = read_64;
    memcpy((char *)&head + at, &value, size);
    return outcome(head, (uint64_t)memory, 64, true);
}

#define WITH(field, value) with_field(offsetof(net_frame, field), sizeof read_64.field, value)

TEST(test_each_wrong_field_ends_the_channel)
{
    CHECK_EQ(WITH(op, 0), NET_PROTOCOL);
    CHECK_EQ(WITH(op, 9), NET_PROTOCOL);
    CHECK_EQ(WITH(op, 255), NET_PROTOCOL);
    CHECK_EQ(WITH(status, 1), NET_PROTOCOL);
    CHECK_EQ(WITH(ranges, 0), NET_PROTOCOL);
    CHECK_EQ(WITH(ranges, NET_MOST_RANGES + 1), NET_PROTOCOL);
    CHECK_EQ(WITH(ranges, UINT16_MAX), NET_PROTOCOL);
    CHECK_EQ(WITH(zero, 1), NET_PROTOCOL);
    CHECK_EQ(WITH(part, 0), NET_PROTOCOL);
    CHECK_EQ(WITH(bytes, 0), NET_PROTOCOL);
    CHECK_EQ(WITH(bytes, 63), NET_PROTOCOL);
    CHECK_EQ(WITH(bytes, 65), NET_PROTOCOL);
    CHECK_EQ(WITH(bytes, NET_MOST_BYTES + 1), NET_PROTOCOL);
    CHECK_EQ(WITH(bytes, UINT64_MAX), NET_PROTOCOL);
    CHECK_EQ(WITH(offset, 1), NET_PROTOCOL);
}

TEST(test_wrong_ranges_and_answers_to_nothing_end_the_channel)
{
    CHECK_EQ(outcome(read_64, (uint64_t)memory, 0, true), NET_PROTOCOL);
    CHECK_EQ(outcome(read_64, (uint64_t)memory, UINT64_MAX, true), NET_PROTOCOL);
    CHECK_EQ(outcome((net_frame){.op = NET_OP_DATA, .part = 1, .bytes = 4}, 0, 0, false), NET_PROTOCOL);
    CHECK_EQ(outcome((net_frame){.op = NET_OP_ENDED, .part = 1}, 0, 0, false), NET_PROTOCOL);
    CHECK_EQ(outcome((net_frame){.op = NET_OP_ENDED}, 0, 0, false), NET_PROTOCOL);
}

int main(void)
{
    RUN(test_ranges_are_looked_up);
    RUN(test_each_wrong_field_ends_the_channel);
    RUN(test_wrong_ranges_and_answers_to_nothing_end_the_channel);
    return check_done();
}
