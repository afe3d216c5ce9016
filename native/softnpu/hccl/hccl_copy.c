/* The task of HcclBatchPut and HcclBatchGet: copies between our memory and a peer's, done entirely on this side, in pieces of
 * about a MiB. Before each it looks up: a stream abort ends it there, and so does a peer that hung up. That peer's memory
 * may be in another's use by now, so going on would be wrong even where it still works. A put is inside of the link's gate
 * while it copies a piece, so that the peer knows whether we may still write (hccl_gate.c). A get needs none: what it read
 * too late it does not report, because it looks up behind the last piece, too.                                           */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include "hccl_soft.h"

#define PARTS_MAX 64                                    /* ranges per system call; small blocks are moved many at a time */

static const char gone[] = "the peer has ended or has destroyed the communicator";

static aclError lost(const hccl_transfer *transfer, const char *why)
{
    return soft_error(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "rank %u: %s", transfer->rank, why);
}

static aclError look_up(hccl_transfer *transfer)
{
    transfer->unchecked = 0;
    if (soft_task_aborted(&transfer->task))
        return ACL_ERROR_RT_STREAM_ABORT;
    if (hccl_socket_alive(transfer->link))
        return ACL_SUCCESS;
    return lost(transfer, gone);
}

static void leave(hccl_transfer *transfer)
{
    if (transfer->inside)
        hccl_gate_leave(transfer->gate, hccl_side(transfer->comm, transfer->rank), transfer->link);
    transfer->inside = false;
}

static aclError begin_piece(hccl_transfer *transfer)
{
    aclError code = look_up(transfer);
    if (code || !transfer->put)
        return code;
    transfer->inside = true;
    if (hccl_gate_enter(transfer->gate, hccl_side(transfer->comm, transfer->rank)))
        return ACL_SUCCESS;
    return lost(transfer, gone);
}

static aclError moved(hccl_transfer *transfer, uint64_t bytes)
{
    transfer->unchecked += bytes;
    if (transfer->unchecked < HCCL_PIECE)
        return ACL_SUCCESS;
    leave(transfer);
    return begin_piece(transfer);
}

/* Memory may have been freed while the task was queued. */
static aclError check_ranges(const hccl_transfer *transfer)
{
    soft_span span;
    for (uint32_t i = 0; i < transfer->count; i++) {
        const hccl_copy *copy = &transfer->copies[i];
        if (!soft_span_of(copy->local, copy->bytes, &span))
            return soft_error(ACL_ERROR_RT_PARAM_INVALID, "local memory at %p was freed before the transfer ran",
                              (void *)copy->local);
        if (transfer->here && !soft_span_of((void *)(uintptr_t)copy->remote, copy->bytes, &span))
            return lost(transfer, "its memory was freed before the transfer ran");
    }
    return ACL_SUCCESS;
}

static const char *source(const hccl_transfer *transfer, const hccl_copy *copy)
{
    return transfer->put ? copy->local : (const char *)(uintptr_t)copy->remote;
}

/* Where the copy after this one reads from, if it is one of the same kind. */
static const char *source_after(const hccl_transfer *transfer, const hccl_copy *copy)
{
    bool is_last = copy + 1 == transfer->copies + transfer->count;
    return is_last || !copy[1].mapped ? NULL : source(transfer, copy + 1);
}

static aclError copy_mapped(hccl_transfer *transfer, const hccl_copy *copy)
{
    const char *from = source(transfer, copy), *next = source_after(transfer, copy);
    char *to = transfer->put ? (char *)(uintptr_t)copy->remote : copy->local;
    aclError code = ACL_SUCCESS;
    for (uint64_t done = 0, bytes; !code && done < copy->bytes; done += bytes) {
        bytes = copy->bytes - done < HCCL_PIECE ? copy->bytes - done : HCCL_PIECE;
        soft_copy(&transfer->task, to + done, from + done, bytes, done + bytes < copy->bytes ? from + done + bytes : next);
        code = moved(transfer, bytes);
    }
    return code;
}

/* ---- private memory of another process ---- */

typedef struct batch { struct iovec local[PARTS_MAX], remote[PARTS_MAX]; unsigned long parts; uint64_t bytes; } batch;
typedef struct cursor { uint32_t copy; uint64_t done; } cursor;        /* done: bytes of that copy */

static void fill(const hccl_transfer *transfer, cursor *at, batch *next)
{
    next->parts = 0;
    next->bytes = 0;
    while (at->copy < transfer->count && !transfer->copies[at->copy].mapped && next->parts < PARTS_MAX
           && next->bytes < HCCL_PIECE) {
        const hccl_copy *copy = &transfer->copies[at->copy];
        uint64_t left = copy->bytes - at->done, room = HCCL_PIECE - next->bytes, bytes = left < room ? left : room;
        next->local[next->parts] = (struct iovec){copy->local + at->done, bytes};
        next->remote[next->parts++] = (struct iovec){(void *)(uintptr_t)(copy->remote + at->done), bytes};
        next->bytes += bytes;
        at->done += bytes;
        if (at->done == copy->bytes)
            *at = (cursor){at->copy + 1, 0};
    }
}

static aclError copy_batch(const hccl_transfer *transfer, const batch *next)
{
    ssize_t done = transfer->put ? process_vm_writev(transfer->pid, next->local, next->parts, next->remote, next->parts, 0)
                                 : process_vm_readv(transfer->pid, next->local, next->parts, next->remote, next->parts, 0);
    if (done >= 0 && (uint64_t)done == next->bytes)
        return ACL_SUCCESS;
    if (done >= 0 || errno == EFAULT)
        return lost(transfer, "its private memory is no longer mapped");   /* the system call stops before the hole */
    return lost(transfer, errno == ESRCH ? "the process has ended" : strerror(errno));
}

static aclError copy_private(hccl_transfer *transfer, uint32_t *copy)
{
    cursor at = {*copy, 0};
    aclError code = ACL_SUCCESS;
    batch next;
    for (fill(transfer, &at, &next); !code && next.parts; fill(transfer, &at, &next)) {
        code = copy_batch(transfer, &next);
        if (!code)
            code = moved(transfer, next.bytes);
    }
    *copy = at.copy;
    return code;
}

/* ---- the task ---- */

static aclError copy_all(hccl_transfer *transfer)
{
    aclError code = ACL_SUCCESS;
    for (uint32_t i = 0; !code && i < transfer->count;) {
        if (transfer->copies[i].mapped)
            code = copy_mapped(transfer, &transfer->copies[i++]);
        else
            code = copy_private(transfer, &i);
    }
    return code;
}

static aclError run(soft_task *task)
{
    hccl_transfer *transfer = (hccl_transfer *)task;
    aclError code = begin_piece(transfer);
    if (!code)
        code = check_ranges(transfer);
    if (!code)
        code = copy_all(transfer);
    leave(transfer);
    return code ? code : look_up(transfer);
}

/* Comes before the stream reports the task as ended: a thread that has synchronized may destroy the communicator at once. */
void hccl_transfer_drop(soft_task *task)
{
    hccl_transfer *transfer = (hccl_transfer *)task;
    if (transfer->held)
        hccl_comm_release(transfer->comm);
    hccl_comm_put(transfer->comm);
    free(transfer);
}

hccl_transfer *hccl_transfer_new(uint32_t capacity)
{
    hccl_transfer *transfer = calloc(1, sizeof *transfer + capacity * sizeof transfer->copies[0]);
    if (!transfer)
        return NULL;
    transfer->task.run = run;
    transfer->task.drop = hccl_transfer_drop;
    return transfer;
}

void hccl_transfer_add(hccl_transfer *transfer, hccl_copy copy)
{
    hccl_copy *last = transfer->count ? &transfer->copies[transfer->count - 1] : NULL;
    transfer->task.bytes += copy.bytes;                 /* at most 256 times 2^47 */
    bool same_ranges = last && last->local_range == copy.local_range && last->remote_range == copy.remote_range;
    if (same_ranges && last->local + last->bytes == copy.local && last->remote + last->bytes == copy.remote)
        last->bytes += copy.bytes;
    else if (copy.bytes)
        transfer->copies[transfer->count++] = copy;
}
