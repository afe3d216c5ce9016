/* One send or one receive on a channel, as a small machine that never blocks. A channel is a stream socket that carries the
 * sends of one direction, one after the other:
 *
 *     sender      OFFER -------->      <-------- ACCEPT      DATA -------->      <-------- DONE
 *     receiver          OFFER    ACCEPT                           DATA     DONE
 *
 * So a send ends after the receive that took it, and neither can run ahead. If sizes differ the receiver says so in ACCEPT,
 * no data follows, and the channel stays usable. A machine that is stopped halfway breaks its channel: the peer could not tell
 * where the next offer starts.                                                                                           */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include "hccl_soft.h"

#define MAGIC 0x534e4332u
enum { OFFER, ACCEPT, DATA, DONE };

static bool outgoing(const hccl_op *op)
{
    return op->sending == (op->step == OFFER || op->step == DATA);
}

static char *place(hccl_op *op, uint64_t *length)
{
    *length = op->step == DATA ? op->bytes : op->step == OFFER ? sizeof op->small.offer : sizeof op->small.answer;
    return op->step == DATA ? op->buffer : (char *)&op->small;
}

short hccl_op_events(const hccl_op *op)
{
    return outgoing(op) ? POLLOUT : POLLIN;
}

static void go_to(hccl_op *op, int step, int32_t status)
{
    op->step = step;
    op->moved = 0;
    if (!outgoing(op) || step == DATA)
        return;
    if (step == OFFER) {
        op->small.offer.magic = MAGIC;
        op->small.offer.barrier = op->barrier;
        op->small.offer.bytes = op->bytes;
    } else {
        op->small.answer.magic = MAGIC;
        op->small.answer.status = status;
    }
}

static const char *what_kind(bool barrier)
{
    return barrier ? " (a barrier)" : "";
}

/* The receiver has an offer; it answers whether the news is good or bad. */
static void judge(hccl_op *op)
{
    uint64_t offered = op->small.offer.bytes;
    bool barrier = op->small.offer.barrier, fits = offered == op->bytes && barrier == op->barrier;
    if (!fits)
        soft_error(ACL_ERROR_RT_PARAM_INVALID, "rank %u sends %llu bytes%s, but %llu%s are expected", op->rank,
                   (unsigned long long)offered, what_kind(barrier), (unsigned long long)op->bytes, what_kind(op->barrier));
    go_to(op, ACCEPT, fits ? HCCL_SUCCESS : HCCL_E_PARA);
}

static aclError refused(const hccl_op *op)
{
    if (!op->sending)
        return ACL_ERROR_RT_PARAM_INVALID;              /* we refused: judge() has said why */
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "rank %u does not receive the %llu bytes%s that are sent here", op->rank,
                      (unsigned long long)op->bytes, what_kind(op->barrier));
}

static aclError next(hccl_op *op)
{
    bool incoming = !outgoing(op);
    if (incoming && op->step != DATA && op->small.answer.magic != MAGIC)
        return soft_error(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "rank %u sent bytes that are no message", op->rank);
    switch (op->step) {
    case OFFER:
        if (incoming)
            judge(op);
        else
            go_to(op, ACCEPT, 0);
        return ACL_SUCCESS;
    case ACCEPT:
        op->finished = op->small.answer.status != HCCL_SUCCESS;
        if (op->finished)
            return refused(op);
        go_to(op, op->bytes ? DATA : DONE, HCCL_SUCCESS);
        return ACL_SUCCESS;
    case DATA:
        go_to(op, DONE, HCCL_SUCCESS);
        return ACL_SUCCESS;
    default:
        op->finished = true;
        return ACL_SUCCESS;
    }
}

static aclError broken(const hccl_op *op, int error)
{
    if (error == EFAULT)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "local memory at %p was freed before the transfer ran",
                          (void *)op->buffer);
    return soft_error(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "%s rank %u: the peer ended, stopped the transfer, or destroyed the communicator",
                      op->sending ? "send to" : "receive from", op->rank);
}

static bool take_channel(hccl_op *op)
{
    if (!op->claimed)
        /* acquire, with the release in hccl_op_stop(): the operation before is done with the socket */
        op->claimed = !atomic_exchange_explicit(&op->channel->busy, true, memory_order_acquire);
    return op->claimed;
}

/* 1: a piece moved, 0: would block, -1: broken, see errno */
static int move_piece(hccl_op *op)
{
    uint64_t length;
    char *at = place(op, &length) + op->moved;
    uint64_t piece = length - op->moved < HCCL_PIECE ? length - op->moved : HCCL_PIECE;
    errno = 0;
    ssize_t done = outgoing(op) ? send(op->channel->fd, at, piece, MSG_DONTWAIT | MSG_NOSIGNAL)
                                : recv(op->channel->fd, at, piece, MSG_DONTWAIT);
    if (done < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (done <= 0)
        return -1;
    op->moved += (uint64_t)done;
    return 1;
}

aclError hccl_op_step(hccl_op *op)
{
    if (!op->claimed) {
        if (!take_channel(op))
            return ACL_SUCCESS;
        go_to(op, OFFER, 0);
    }
    for (uint64_t length, left = HCCL_PIECE; left && !op->finished;) {   /* then the caller looks for an abort */
        uint64_t before = op->moved;
        int moved = move_piece(op);
        if (moved < 0)
            return broken(op, errno);
        if (moved == 0)
            return ACL_SUCCESS;
        left -= op->moved - before < left ? op->moved - before : left;
        place(op, &length);
        aclError code = op->moved == length ? next(op) : ACL_SUCCESS;
        if (code)
            return code;
    }
    return ACL_SUCCESS;
}

void hccl_op_stop(hccl_op *op)
{
    if (!op->claimed)
        return;
    if (!op->finished && (op->step != OFFER || op->moved))
        shutdown(op->channel->fd, SHUT_RDWR);
    op->claimed = false;
    /* what we did to the socket comes before the next claim */
    atomic_store_explicit(&op->channel->busy, false, memory_order_release);
}
