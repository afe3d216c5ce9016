/* Framed messages of a link. A SEQPACKET socket keeps them apart; the length, the count and the descriptors that came
 * along are checked against each other before any of them is read.                                                   */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "hccl_soft.h"

void hccl_message_init(hccl_message *message, uint16_t kind, uint16_t flags, uint32_t count)
{
    memset(message, 0, sizeof *message);
    message->head = (hccl_head){HCCL_MAGIC, kind, flags, count, 0};
}

/* SIZE_MAX: no such message */
static size_t body_bytes(const hccl_head *head)
{
    switch (head->kind) {
    case HCCL_HELLO:       return head->count == 1 ? sizeof(hccl_hello) : SIZE_MAX;
    case HCCL_REGIONS:     return head->count <= HCCL_MESSAGE_REGIONS ? head->count * sizeof(hccl_wire_region) : SIZE_MAX;
    case HCCL_DESCRIPTORS: return head->count <= HCCL_MESSAGE_DESCRIPTORS ? head->count * sizeof(HcclMemDesc) : SIZE_MAX;
    case HCCL_STATUS:      return head->count == 0 ? 0 : SIZE_MAX;
    default:               return SIZE_MAX;
    }
}

typedef union control { struct cmsghdr align; char bytes[CMSG_SPACE(HCCL_MESSAGE_REGIONS * sizeof(int))]; } control;

static void attach(struct msghdr *out, control *buffer, const hccl_message *message)
{
    size_t length = (size_t)message->nfds * sizeof(int);
    memset(buffer, 0, sizeof *buffer);
    out->msg_control = buffer->bytes;
    out->msg_controllen = CMSG_SPACE(length);
    struct cmsghdr *rights = CMSG_FIRSTHDR(out);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(length);
    memcpy(CMSG_DATA(rights), message->fds, length);
}

static bool hung_up(int error)
{
    return error == EPIPE || error == ECONNRESET || error == ENOTCONN;
}

static void collect(struct msghdr *in, hccl_message *message)
{
    for (struct cmsghdr *part = CMSG_FIRSTHDR(in); part; part = CMSG_NXTHDR(in, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        /* the kernel merges them: one part, within `control` */
        size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(message->fds + message->nfds, CMSG_DATA(part), count * sizeof(int));
        message->nfds += (int)count;
    }
}

void hccl_message_close(hccl_message *message)
{
    while (message->nfds > 0) {
        int fd = message->fds[--message->nfds];
        if (fd >= 0)
            close(fd);
    }
}

static HcclResult check(const hccl_message *message, size_t length, int flags)
{
    if (flags & MSG_CTRUNC)                             /* descriptors were lost on the way: we have too many open */
        return errno = EMFILE, HCCL_E_SYSCALL;
    if (flags & MSG_TRUNC || length < sizeof message->head || message->head.magic != HCCL_MAGIC)
        return HCCL_E_INTERNAL;
    size_t body = body_bytes(&message->head);
    return body != SIZE_MAX && length == offsetof(hccl_message, body) + body ? HCCL_SUCCESS : HCCL_E_INTERNAL;
}

static HcclResult receive_any(const hccl_wait *wait, int fd, hccl_message *message)
{
    struct iovec part = {message, offsetof(hccl_message, nfds)};
    control buffer;
    for (;;) {
        struct msghdr in = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &buffer, .msg_controllen = sizeof buffer};
        ssize_t length = recvmsg(fd, &in, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        message->nfds = 0;
        if (length > 0) {
            collect(&in, message);
            return check(message, (size_t)length, in.msg_flags);
        }
        if (length == 0 || hung_up(errno))
            return HCCL_E_UNAVAIL;
        HcclResult code = errno == EAGAIN ? hccl_wait_fd(wait, fd, POLLIN) : errno == EINTR ? HCCL_SUCCESS : HCCL_E_SYSCALL;
        if (code)
            return code;
    }
}

/* The peer's reasons are passed on where they tell our caller something; otherwise it has merely given up. */
static HcclResult peer_code(int32_t status)
{
    if (status < 0 || status > HCCL_E_OOM)
        return HCCL_E_INTERNAL;
    if (status == HCCL_SUCCESS || status == HCCL_E_PARA || status == HCCL_E_MEMORY || status == HCCL_E_NOT_SUPPORT)
        return (HcclResult)status;
    return HCCL_E_UNAVAIL;
}

/* A peer that gave up said why before it hung up. */
static HcclResult last_words(int fd)
{
    hccl_message message;
    const hccl_wait at_once = {NULL, 0, -1};
    HcclResult code = receive_any(&at_once, fd, &message);
    if (!code)
        code = message.head.kind == HCCL_STATUS ? peer_code(message.head.status) : HCCL_E_UNAVAIL;
    hccl_message_close(&message);
    return code == HCCL_E_PARA || code == HCCL_E_MEMORY || code == HCCL_E_NOT_SUPPORT ? code : HCCL_E_UNAVAIL;
}

HcclResult hccl_message_send(const hccl_wait *wait, int fd, const hccl_message *message)
{
    struct iovec part = {(void *)message, offsetof(hccl_message, body) + body_bytes(&message->head)};
    struct msghdr out = {.msg_iov = &part, .msg_iovlen = 1};
    control buffer;
    if (message->nfds)
        attach(&out, &buffer, message);
    for (;;) {
        HcclResult code = HCCL_SUCCESS;
        if (sendmsg(fd, &out, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
            return HCCL_SUCCESS;
        if (hung_up(errno))
            return last_words(fd);
        if (errno == EAGAIN)
            code = hccl_wait_fd(wait, fd, POLLOUT);
        else if (errno == ETOOMANYREFS)
            code = hccl_wait_pause(wait, 1);            /* descriptors under way are limited per user */
        else if (errno != EINTR)
            return HCCL_E_SYSCALL;
        if (code)
            return code;
    }
}

HcclResult hccl_message_receive(const hccl_wait *wait, int fd, uint16_t kind, uint16_t flags, hccl_message *message)
{
    HcclResult code = receive_any(wait, fd, message);
    if (!code && message->head.kind == HCCL_STATUS)
        code = peer_code(message->head.status);
    if (!code && (message->head.kind != kind || (message->head.flags & ~HCCL_LAST) != flags))
        code = HCCL_E_INTERNAL;
    if (code)
        hccl_message_close(message);
    return code;
}

HcclResult hccl_message_confirm(const hccl_wait *wait, int fd, HcclResult mine)
{
    hccl_message message;
    hccl_wait at_once = {wait->function, 0, -1};        /* bad news wait for no peer */
    hccl_message_init(&message, HCCL_STATUS, 0, 0);
    message.head.status = mine;
    HcclResult sent = hccl_message_send(mine ? &at_once : wait, fd, &message);
    if (mine || sent)
        return mine ? mine : sent;
    HcclResult code = hccl_message_receive(wait, fd, HCCL_STATUS, 0, &message);
    if (!code)
        hccl_message_close(&message);
    return code;
}
