/* raw_tcp.c: blocks over a socket, from their places or into them. raw_tcp.py compiles it, and says when it is called. */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum { PART = 1 << 20, MOST_BLOCKS = 1024 };

static void skip(struct msghdr *m, uint64_t bytes)
{
    while (m->msg_iovlen && bytes >= m->msg_iov->iov_len) {
        bytes -= m->msg_iov->iov_len;
        m->msg_iov++;
        m->msg_iovlen--;
    }
    if (m->msg_iovlen) {
        m->msg_iov->iov_base = (char *)m->msg_iov->iov_base + bytes;
        m->msg_iov->iov_len -= bytes;
    }
}

/* Sends or receives these blocks in this order, at most 1 MiB in a call. Returns 0, a negative errno, or 1 if the peer ended before. */
int raw_tcp_move(int fd, char *memory, uint64_t block, const uint64_t *order, uint64_t blocks, int sends)
{
    struct iovec iov[MOST_BLOCKS];
    uint64_t most = block < PART ? PART / block : 1;
    most = most < MOST_BLOCKS ? most : MOST_BLOCKS;
    for (uint64_t done = 0, n; done < blocks; done += n) {
        n = blocks - done < most ? blocks - done : most;
        for (uint64_t i = 0; i < n; i++)
            iov[i] = (struct iovec){memory + order[done + i] * block, block};
        struct msghdr m = {.msg_iov = iov, .msg_iovlen = n};
        while (m.msg_iovlen) {
            ssize_t got = sends ? sendmsg(fd, &m, MSG_NOSIGNAL) : recvmsg(fd, &m, MSG_WAITALL);
            if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {     /* a socket with a time limit */
                struct pollfd wait = {.fd = fd, .events = sends ? POLLOUT : POLLIN};
                poll(&wait, 1, -1);
                continue;
            }
            if (got < 0 && errno == EINTR)
                continue;
            if (got <= 0)
                return got ? -errno : 1;
            skip(&m, (uint64_t)got);
        }
    }
    return 0;
}
