/* HcclSend, HcclRecv, HcclBatchSendRecv and HcclBarrier are one kind of task: a list of sends and receives that make
 * progress side by side, except that those on one channel take turns in the order of the list. A barrier is an empty send
 * to and an empty receive from every rank.                                                                                */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>
#include "hccl_soft.h"

#define ITEMS_MAX 1024

typedef struct meeting {
    soft_task task;
    hccl_comm *comm;
    bool held;                                          /* counted in by hccl_comm_hold */
    int epoll;                                          /* -1: one operation, whose socket is waited for directly */
    uint32_t count;
    hccl_op ops[];
} meeting;

/* ---- running ---- */

static void watch(const meeting *all, hccl_op *op, short events)
{
    struct epoll_event interest = {.events = (uint32_t)events};       /* POLLIN and POLLOUT are EPOLLIN and EPOLLOUT */
    int change = !events ? EPOLL_CTL_DEL : op->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (all->epoll < 0 || events == op->watched)
        return;
    epoll_ctl(all->epoll, change, op->channel->fd, &interest);
    op->watched = events;
}

static void leave(const meeting *all, hccl_op *op)
{
    watch(all, op, 0);
    hccl_op_stop(op);
}

/* One round. *open: how many operations are not finished; *crowded: one waits for a channel that another task has. */
static aclError step_all(meeting *all, uint32_t *open, bool *crowded, aclError *first)
{
    *open = 0;
    *crowded = false;
    for (uint32_t i = 0; i < all->count; i++) {
        hccl_op *op = &all->ops[i];
        if (op->finished)
            continue;
        ++*open;
        if (op->after >= 0 && !all->ops[op->after].finished)
            continue;
        aclError code = hccl_op_step(op);
        if (code && !op->finished)
            return code;
        if (code && !*first)
            *first = code;
        if (op->finished) {
            leave(all, op);
            --*open;
        } else if (op->claimed) {
            watch(all, op, hccl_op_events(op));
        } else {
            *crowded = true;
        }
    }
    return ACL_SUCCESS;
}

static aclError wait_for_progress(meeting *all, bool crowded, int64_t deadline)
{
    int fd = all->epoll;
    short events = POLLIN;
    if (fd < 0 && all->ops[0].claimed) {
        fd = all->ops[0].channel->fd;
        events = hccl_op_events(&all->ops[0]);
    }
    int ready = soft_task_poll(&all->task, fd, events, crowded ? 1 : 1000);   /* a busy channel does not say when it is free */
    if (ready < 0)
        return ACL_ERROR_RT_STREAM_ABORT;
    if (ready == 0 && soft_now_ns() >= deadline)
        return soft_error(ACL_ERROR_RT_TASK_TIMEOUT, "the peers did not come within HCCL_EXEC_TIMEOUT");
    return ACL_SUCCESS;
}

static aclError meet(meeting *all)
{
    int64_t deadline = hccl_exec_deadline();
    aclError first = ACL_SUCCESS;
    for (;;) {
        uint32_t open;
        bool crowded;
        aclError code = step_all(all, &open, &crowded, &first);
        if (!code && open)
            code = wait_for_progress(all, crowded, deadline);
        if (code || !open)
            return code ? code : first;
    }
}

static aclError run(soft_task *task)
{
    meeting *all = (meeting *)task;
    if (all->count > 1 && (all->epoll = epoll_create1(EPOLL_CLOEXEC)) < 0)
        return soft_error(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "epoll: %s", strerror(errno));
    aclError code = meet(all);
    for (uint32_t i = 0; i < all->count; i++)
        leave(all, &all->ops[i]);
    if (all->epoll >= 0)
        close(all->epoll);
    return code;
}

static void drop(soft_task *task)
{
    meeting *all = (meeting *)task;
    if (all->held)
        hccl_comm_release(all->comm);
    hccl_comm_put(all->comm);
    free(all);
}

/* ---- submitting ---- */

static HcclResult check_item(const char *function, const hccl_comm *comm, uint32_t i, const HcclSendRecvItem *item,
                             uint64_t *bytes)
{
    if (item->sendRecvType != HCCL_SEND && item->sendRecvType != HCCL_RECV)
        return soft_hccl_error(HCCL_E_PARA, "%s: item %u is neither a send nor a receive", function, i);
    if (item->remoteRank >= comm->size || item->remoteRank == comm->rank)
        return soft_hccl_error(HCCL_E_PARA, "%s: item %u: remote rank %u; we are rank %u of %u", function, i,
                               item->remoteRank, comm->rank, comm->size);
    if (!item->buf)
        return soft_hccl_error(HCCL_E_PTR, "%s: item %u: the buffer is NULL", function, i);
    if (!hccl_bytes(item->count, item->dataType, bytes))
        return soft_hccl_error(HCCL_E_PARA, "%s: item %u: %llu elements of data type %d", function, i,
                               (unsigned long long)item->count, (int)item->dataType);
    soft_span span;
    if (*bytes && !soft_span_of(item->buf, *bytes, &span))
        return soft_hccl_error(HCCL_E_PARA, "%s: item %u: %llu bytes at %p are not within one known range of this process",
                               function, i, (unsigned long long)*bytes, item->buf);
    return HCCL_SUCCESS;
}

static void add(meeting *all, int32_t last[2][HCCL_RANKS_MAX], hccl_op op)
{
    hccl_peer *peer = &all->comm->peers[op.rank];
    op.channel = op.sending ? &peer->send : &peer->recv;
    op.after = last[op.sending][op.rank];
    last[op.sending][op.rank] = (int32_t)all->count;
    all->ops[all->count++] = op;
}

static meeting *new_meeting(const char *function, hccl_comm *comm, const soft_exec_fault *fault, uint32_t capacity)
{
    meeting *all = calloc(1, sizeof *all + capacity * sizeof all->ops[0]);
    if (!all)
        return NULL;
    all->task = (soft_task){.function = function, .run = run, .drop = drop, .bytes = SOFT_MAY_BLOCK, .fault = *fault};
    all->epoll = -1;
    soft_ref(&comm->object);
    all->comm = comm;
    return all;
}

/* A list of NULL is a barrier. */
static HcclResult fill(meeting *all, const HcclSendRecvItem *items, uint32_t count)
{
    int32_t last[2][HCCL_RANKS_MAX];
    const hccl_comm *comm = all->comm;
    memset(last, 0xff, sizeof last);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes;
        HcclResult code = check_item(all->task.function, comm, i, &items[i], &bytes);
        if (code)
            return code;
        add(all, last, (hccl_op){.rank = items[i].remoteRank, .sending = items[i].sendRecvType == HCCL_SEND,
                                 .buffer = items[i].buf, .bytes = bytes});
    }
    for (uint32_t rank = 0; !items && rank < comm->size; rank++) {
        if (rank == comm->rank)
            continue;
        add(all, last, (hccl_op){.rank = rank, .sending = true, .barrier = true});
        add(all, last, (hccl_op){.rank = rank, .sending = false, .barrier = true});
    }
    return HCCL_SUCCESS;
}

static HcclResult submit(const char *function, hccl_comm *comm, const soft_exec_fault *fault, const HcclSendRecvItem *items,
                         uint32_t count, soft_stream *stream)
{
    meeting *all = new_meeting(function, comm, fault, items ? count : 2 * comm->size);
    if (!all)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", function);
    HcclResult code = hccl_comm_hold(function, comm);
    all->held = !code;
    if (!code)
        code = fill(all, items, count);
    if (!code && all->count)
        return soft_submit(stream, &all->task) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
    drop(&all->task);
    return code;
}

static HcclResult start(const char *function, const soft_exec_fault *fault, const HcclSendRecvItem *items, uint32_t count,
                        HcclComm handle, aclrtStream stream_handle)
{
    hccl_comm *comm;
    soft_stream *stream = NULL;
    HcclResult code = hccl_comm_find(function, handle, &comm);
    if (code)
        return code;
    if (!stream_handle)
        code = soft_hccl_error(HCCL_E_PTR, "%s: stream is NULL", function);
    else if (comm->one_sided)
        code = soft_hccl_error(HCCL_E_NOT_SUPPORT, "%s: a one-sided communicator has no channels; make one from a root info",
                               function);
    else if (!(stream = soft_stream_get(stream_handle)))
        code = HCCL_E_PARA;
    if (!code)
        code = submit(function, comm, fault, items, count, stream);
    if (stream)
        soft_stream_put(stream);
    hccl_comm_put(comm);
    return code;
}

HcclResult HcclSend(void *sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, HcclComm comm,
                    aclrtStream stream)
{
    soft_exec_fault fault;
    HcclSendRecvItem item = {HCCL_SEND, sendBuf, count, dataType, destRank};
    HCCL_ENTER_TASK(&fault);
    return start(__func__, &fault, &item, 1, comm, stream);
}

HcclResult HcclRecv(void *recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, HcclComm comm,
                    aclrtStream stream)
{
    soft_exec_fault fault;
    HcclSendRecvItem item = {HCCL_RECV, recvBuf, count, dataType, srcRank};
    HCCL_ENTER_TASK(&fault);
    return start(__func__, &fault, &item, 1, comm, stream);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem *sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream)
{
    soft_exec_fault fault;
    HCCL_ENTER_TASK(&fault);
    if (!sendRecvInfo)
        return soft_hccl_error(HCCL_E_PTR, "%s: sendRecvInfo is NULL", __func__);
    if (itemNum == 0 || itemNum > ITEMS_MAX)
        return soft_hccl_error(HCCL_E_PARA, "%s: %u items: must be 1 to %d", __func__, itemNum, ITEMS_MAX);
    return start(__func__, &fault, sendRecvInfo, itemNum, comm, stream);
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream)
{
    soft_exec_fault fault;
    HCCL_ENTER_TASK(&fault);
    return start(__func__, &fault, NULL, 0, comm, stream);
}
