/* shared_fetch.c: the keys and the socket of share.c, and the side that fetches. */
#include "share.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "socket_names.h"

enum { LISTENERS = 16, TOKEN_BITS = 38, NUMBER_BITS = 4, ANSWER_MS = 5000 };

/* ---- keys ---- */

uint64_t soft_key_of(int32_t pid, unsigned number, uint64_t token)
{
    return (uint64_t)pid << (TOKEN_BITS + NUMBER_BITS) | (uint64_t)number << TOKEN_BITS | (token & ((1ull << TOKEN_BITS) - 1));
}

int32_t soft_key_pid(uint64_t key)
{
    return (int32_t)(key >> (TOKEN_BITS + NUMBER_BITS));
}

void soft_key_print(uint64_t key, char *text)
{
    sprintf(text, "softnpu:%016llx", (unsigned long long)key);
}

aclError soft_key_parse(const char *text, uint64_t *key)
{
    char again[SOFT_KEY_TEXT];
    if (!text)
        return soft_null("key");
    if (!strncmp(text, "softnpu:", 8) && strnlen(text, SOFT_KEY_TEXT) == 24) {
        *key = strtoull(text + 8, NULL, 16);
        soft_key_print(*key, again);
        if (!strcmp(again, text))                           /* nothing but 16 hexadecimal digits */
            return ACL_SUCCESS;
    }
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "this is not a key that softnpu exported");
}

/* ---- the socket ---- */

static socklen_t address_of(int32_t pid, unsigned number, struct sockaddr_un *address)
{
    return soft_socket_name(address, "softnpu-%d-%u", pid, number);
}

int soft_share_listen(unsigned *number)
{
    struct sockaddr_un address;
    int socket_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    for (*number = 0; socket_fd >= 0 && *number < LISTENERS; ++*number) {  /* a number is taken while an older server goes away */
        socklen_t length = address_of(getpid(), *number, &address);
        if (!soft_socket_bind(socket_fd, &address, length, SOCK_SEQPACKET) && !listen(socket_fd, 64))
            return socket_fd;
    }
    if (socket_fd >= 0)
        close(socket_fd);
    return -1;
}

int32_t soft_share_peer(int socket_fd)
{
    struct ucred who;
    socklen_t length = sizeof who;
    if (getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &who, &length) || who.uid != geteuid())
        return -1;
    return who.pid;
}

void soft_share_limit(int socket_fd, int ms)
{
    struct timeval limit = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };
    setsockopt(socket_fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(socket_fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

typedef union carrier { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } carrier;   /* aligned for a cmsghdr */

void soft_share_send(int socket_fd, const soft_share_reply *reply, int fd)
{
    carrier control = { .bytes = { 0 } };
    struct iovec data = { .iov_base = (void *)(uintptr_t)reply, .iov_len = sizeof *reply };
    struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1 };
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        *rights = (struct cmsghdr){ .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd) };
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    sendmsg(socket_fd, &message, MSG_NOSIGNAL);             /* a caller that left needs no answer */
}

static bool receive(int socket_fd, soft_share_reply *reply, int *fd)
{
    carrier control;
    struct iovec data = { .iov_base = reply, .iov_len = sizeof *reply };
    struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes };
    *fd = -1;
    ssize_t got = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *rights = got >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS && rights->cmsg_len == CMSG_LEN(sizeof *fd))
        memcpy(fd, CMSG_DATA(rights), sizeof *fd);
    if (got == sizeof *reply && (reply->code || *fd >= 0))
        return true;
    if (*fd >= 0)
        close(*fd);
    return false;
}

/* ---- fetching ---- */

static aclError unreachable(int32_t pid, const char *why)
{
    return soft_error(ACL_ERROR_RT_IPC_ERROR, "process %d, which exported this key: %s", pid, why);
}

static aclError call(int32_t pid, unsigned number, int *out)
{
    struct sockaddr_un address;
    socklen_t length = address_of(pid, number, &address);
    int socket_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (socket_fd < 0)
        return unreachable(pid, strerror(errno));
    soft_share_limit(socket_fd, ANSWER_MS);
    aclError code = ACL_SUCCESS;
    if (connect(socket_fd, (struct sockaddr *)&address, length))
        code = unreachable(pid, "it has ended, or withdrawn all it exported");
    else if (soft_share_peer(socket_fd) != pid)
        code = unreachable(pid, "someone else answers in its name");
    if (code)
        close(socket_fd);
    else
        *out = socket_fd;
    return code;
}

aclError soft_share_fetch(uint64_t key, soft_offer_kind kind, soft_offer *what, int *fd)
{
    int32_t pid = soft_key_pid(key);
    soft_share_request request = { .key = key, .kind = kind };
    soft_share_reply reply;
    int socket_fd = -1;
    SOFT_TRY(call(pid, key >> TOKEN_BITS & (LISTENERS - 1), &socket_fd));
    bool answered = send(socket_fd, &request, sizeof request, MSG_NOSIGNAL) == sizeof request && receive(socket_fd, &reply, fd);
    close(socket_fd);
    if (!answered)
        return unreachable(pid, "no answer");
    if (reply.code == ACL_ERROR_RT_NO_PERMISSION)
        return soft_error(reply.code, "process %d has not allowed process %d to import this key", pid, getpid());
    if (reply.code)
        return soft_error(reply.code, "process %d has not exported this key, or has taken it back", pid);
    *what = reply.what;
    return ACL_SUCCESS;
}
