/* socket_shim.c: calls of sockets that fail, loaded in front of the C library (LD_PRELOAD) by tests/faults/test_no_buffers.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SOCKET, CONNECT, ACCEPT, SEND, KINDS };

static atomic_int left[KINDS], why, family = AF_INET;

/* The next `count` calls of this kind fail with this errno, on sockets of this family; returns how many were left before. */
int shim_arm(int kind, int count, int number, int of)
{
    atomic_store(&why, number);
    atomic_store(&family, of);
    return atomic_exchange(&left[kind], count);
}

static int take(int kind)
{
    int now = atomic_load(&left[kind]);
    while (now > 0)
        if (atomic_compare_exchange_weak(&left[kind], &now, now - 1)) {
            errno = atomic_load(&why);
            return 1;
        }
    return 0;
}

static int concerns(int fd)
{
    int domain = 0, before = errno;
    socklen_t size = sizeof domain;
    int known = getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
    errno = before;
    return !known && domain == atomic_load(&family);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAILS(kind, fd) (atomic_load(&left[kind]) > 0 && concerns(fd) && take(kind))

int socket(int domain, int type, int protocol)
{
    return domain == atomic_load(&family) && take(SOCKET) ? -1 : NEXT(socket)(domain, type, protocol);
}

int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    return FAILS(CONNECT, fd) ? -1 : NEXT(connect)(fd, address, size);
}

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
    return FAILS(ACCEPT, fd) ? -1 : NEXT(accept4)(fd, address, size, flags);
}

ssize_t send(int fd, const void *bytes, size_t size, int flags)
{
    return FAILS(SEND, fd) ? -1 : NEXT(send)(fd, bytes, size, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    return FAILS(SEND, fd) ? -1 : NEXT(sendmsg)(fd, message, flags);
}

ssize_t write(int fd, const void *bytes, size_t size)
{
    return FAILS(SEND, fd) ? -1 : NEXT(write)(fd, bytes, size);
}

ssize_t writev(int fd, const struct iovec *pieces, int count)
{
    return FAILS(SEND, fd) ? -1 : NEXT(writev)(fd, pieces, count);
}
