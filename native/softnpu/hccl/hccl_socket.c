/* Where ranks meet: sockets that no process outside the machine can reach, and that talk only to processes of our own user. */
#include <errno.h>
#include <poll.h>
#include <unistd.h>
#include "hccl_soft.h"
#include "socket_names.h"

static socklen_t address_of(const hccl_key *key, uint32_t rank, struct sockaddr_un *address)
{
    return soft_socket_name(address, "softnpu-hccl.%u.%016llx%016llx.%u", geteuid(), (unsigned long long)key->word[0],
                           (unsigned long long)key->word[1], rank);
}

static int close_keeping_errno(int fd)
{
    int why = errno;
    close(fd);
    errno = why;
    return -1;
}

int hccl_socket_listen(const hccl_key *key, uint32_t rank)
{
    struct sockaddr_un address;
    socklen_t length = address_of(key, rank, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (soft_socket_bind(fd, &address, length, SOCK_SEQPACKET) || listen(fd, HCCL_RANKS_MAX))
        return close_keeping_errno(fd);
    return fd;
}

int hccl_socket_connect(const hccl_key *key, uint32_t rank)
{
    struct sockaddr_un address;
    socklen_t length = address_of(key, rank, &address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&address, length))
        return close_keeping_errno(fd);
    return fd;
}

bool hccl_socket_ours(int fd, pid_t *pid)
{
    struct ucred who;
    socklen_t length = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) || who.uid != geteuid())
        return false;
    *pid = who.pid;                                     /* 0: in a pid namespace that we cannot see */
    return true;
}

bool hccl_socket_alive(int fd)
{
    struct pollfd state = {fd, POLLRDHUP, 0};
    if (fd < 0)
        return false;
    int ready = poll(&state, 1, 0);
    return ready == 0 || (ready < 0 && errno == EINTR);
}
