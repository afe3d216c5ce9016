/* The task of HcclBatchPut and HcclBatchGet: copies between our memory and a peer's, done entirely on this side, in pieces of
 * at most a MiB, which copiers share. Before each a copier looks up: a stream abort ends it there, and so does a peer that hung
 * up. That peer's memory may be in another's use by now, so going on would be wrong even where it still works. A put is inside
 * of the link's gate while it copies a piece, so that the peer knows whether we may still write (hccl_gate.c). A get needs none:
 * what it read too late it does not report, because it looks up behind the last piece, too. That look is enough for a task of
 * one piece of mapped memory: each is a system call, a third of what a copy of some KiB takes.                            */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include "big_copy.h"
#include "copiers.h"
#include "hccl_soft.h"
#include "runtime.h"

#define PARTS_MAX  256                                  /* ranges of a piece: small blocks are moved many at a time */
#define SHARED     ((uint64_t)512 << 10)                /* bytes of a task from which on it is shared */
#define PIECE_MIN  ((uint64_t)64 << 10)
#define PIECES_PER_COPIER 2                             /* of what is left: the last ones are short, so that they end together */

static const char gone[] = "the peer has ended or has destroyed the communicator";

/* Why a copy ended early. Told by the task's own thread: what a copier reports would not be the task's. */
typedef struct fault { aclError code; const char *why; } fault;

static fault lost(const char *why)
{
    return (fault){ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, why};
}

static aclError told(const hccl_transfer *transfer, fault what)
{
    return what.why ? soft_error(what.code, "rank %u: %s", transfer->rank, what.why) : what.code;
}

static fault look_up(const hccl_transfer *transfer)
{
    if (soft_task_aborted(&transfer->task))
        return (fault){ACL_ERROR_RT_STREAM_ABORT, NULL};
    return hccl_socket_alive(transfer->link) ? (fault){ACL_SUCCESS, NULL} : lost(gone);
}

/* Memory may have been freed while the task was queued. */
static aclError check_ranges(const hccl_transfer *transfer)
{
    soft_span span = {0};
    for (uint32_t i = 0; i < transfer->count; i++) {
        const hccl_copy *copy = &transfer->copies[i];
        if (!soft_span_again(copy->local, copy->bytes, &span))
            return soft_error(ACL_ERROR_RT_PARAM_INVALID, "local memory at %p was freed before the transfer ran",
                              (void *)copy->local);
    }
    return ACL_SUCCESS;
}

/* ---- pieces ---- */

typedef struct piece { struct iovec local[PARTS_MAX], remote[PARTS_MAX]; unsigned long parts; uint64_t bytes, end; bool mapped; } piece;

typedef struct work {                                   /* a task's pieces, as its copiers take them */
    const hccl_transfer *transfer;
    pthread_mutex_t lock;
    uint64_t left;                                      /* bytes that are in no piece yet */
    uint32_t copy;                                      /* the next piece starts in this one, */
    uint64_t done;                                      /* behind this many bytes of it */
    fault first;
} work;

static uint64_t piece_size(const work *all)
{
    uint64_t bytes = all->left / ((uint64_t)soft_setting.copiers * PIECES_PER_COPIER);
    if (soft_setting.copiers == 1 || all->transfer->task.bytes < SHARED || bytes > HCCL_PIECE)
        return HCCL_PIECE;
    return bytes < PIECE_MIN ? PIECE_MIN : bytes & ~(uint64_t)4095;
}

/* Locked. Ranges of one kind: mapped, or private memory of another process. */
static void cut(work *all, piece *next)
{
    const hccl_transfer *transfer = all->transfer;
    uint64_t size = piece_size(all);
    next->parts = 0;
    next->bytes = 0;
    next->mapped = all->copy < transfer->count && transfer->copies[all->copy].mapped;
    while (all->copy < transfer->count && transfer->copies[all->copy].mapped == next->mapped && next->parts < PARTS_MAX
           && next->bytes < size) {
        const hccl_copy *copy = &transfer->copies[all->copy];
        uint64_t left = copy->bytes - all->done, room = size - next->bytes, bytes = left < room ? left : room;
        next->local[next->parts] = (struct iovec){copy->local + all->done, bytes};
        next->remote[next->parts++] = (struct iovec){(void *)(uintptr_t)(copy->remote + all->done), bytes};
        next->bytes += bytes;
        all->done += bytes;
        if (all->done == copy->bytes) {
            all->copy++;
            all->done = 0;
        }
    }
    all->left -= next->bytes;
    next->end = transfer->task.bytes - all->left;
}

/* The next piece of a task that has not failed. */
static bool take(work *all, piece *next)
{
    pthread_mutex_lock(&all->lock);
    next->parts = 0;
    if (!all->first.code)
        cut(all, next);
    pthread_mutex_unlock(&all->lock);
    return next->parts != 0;
}

static void fail(work *all, fault what)
{
    pthread_mutex_lock(&all->lock);
    if (!all->first.code)
        all->first = what;
    pthread_mutex_unlock(&all->lock);
}

static fault copy_mapped(const hccl_transfer *transfer, const piece *now)
{
    const struct iovec *from = transfer->put ? now->local : now->remote, *to = transfer->put ? now->remote : now->local;
    for (unsigned long i = 0; i < now->parts; i++)
        if (transfer->task.bytes < BIG_COPY_WORTH)
            memmove(to[i].iov_base, from[i].iov_base, from[i].iov_len);
        else
            big_copy(to[i].iov_base, from[i].iov_base, from[i].iov_len, i + 1 < now->parts ? from[i + 1].iov_base : NULL);
    big_copy_fence();
    SOFT_COUNT(bytes_copied, now->bytes);
    return (fault){ACL_SUCCESS, NULL};
}

/* By a system call also within this process, if the transfer outlives its caller's interest: memory that was given back
 * meanwhile is a failed transfer and not a crash. By the bare one, as hccl_request.c says. */
static fault copy_private(const hccl_transfer *transfer, const piece *now)
{
    pid_t pid = now->mapped ? getpid() : transfer->pid;
    long done = syscall(transfer->put ? SYS_process_vm_writev : SYS_process_vm_readv, (long)pid, now->local, now->parts,
                        now->remote, now->parts, 0L);
    if (done >= 0 && (uint64_t)done == now->bytes)
        return (fault){ACL_SUCCESS, NULL};
    if (done >= 0 || errno == EFAULT)
        return lost("its private memory is no longer mapped");   /* the system call stops before the hole */
    return lost(errno == ESRCH ? "the process has ended" : strerror(errno));
}

static fault look_up_before(const hccl_transfer *transfer, const piece *now)
{
    if (now->mapped && now->bytes == transfer->task.bytes)
        return (fault){soft_task_aborted(&transfer->task) ? ACL_ERROR_RT_STREAM_ABORT : ACL_SUCCESS, NULL};
    return look_up(transfer);
}

static fault copy_piece(const hccl_transfer *transfer, const piece *now)
{
    fault what = look_up_before(transfer, now);
    if (what.code)
        return what;
    int side = hccl_side(transfer->comm, transfer->rank);
    if (transfer->put && !hccl_gate_enter(transfer->gate, side))
        what = lost(gone);
    if (!what.code)
        soft_task_half(&transfer->task, now->end);          /* beyond the last look: these bytes arrive */
    if (!what.code)
        what = now->mapped && !transfer->outlives ? copy_mapped(transfer, now) : copy_private(transfer, now);
    if (transfer->put)
        hccl_gate_leave(transfer->gate, side, transfer->link);
    return what;
}

static void copy_pieces(void *argument)
{
    work *all = argument;
    piece now;
    while (take(all, &now)) {
        fault what = copy_piece(all->transfer, &now);
        if (what.code)
            fail(all, what);
    }
}

/* ---- the task ---- */

static fault copy_all(const hccl_transfer *transfer)
{
    uint64_t total = transfer->task.bytes;
    work all = {.transfer = transfer, .left = total, .lock = PTHREAD_MUTEX_INITIALIZER};
    soft_thread_copies(total >= SHARED);
    unsigned helpers = total < SHARED ? 0 : (unsigned)(total / (2 * PIECE_MIN));   /* with a piece or two for each, at least */
    soft_copiers_run(copy_pieces, &all, helpers);
    pthread_mutex_destroy(&all.lock);
    return all.first;
}

/* The fault of this name. What a put wrote belongs to the peer: its gate is entered, too. */
static aclError flip(const hccl_transfer *transfer)
{
    uint64_t at = hccl_flip_place(transfer->task.fault.flip_at, transfer->task.bytes);
    const hccl_copy *copy = transfer->copies;
    for (; at >= copy->bytes; copy++)
        at -= copy->bytes;
    if (!transfer->put)
        return hccl_flip(copy->local + at, getpid());
    int side = hccl_side(transfer->comm, transfer->rank);
    void *place = (void *)(uintptr_t)(copy->remote + at);
    aclError code = hccl_gate_enter(transfer->gate, side) ? hccl_flip(place, copy->mapped ? getpid() : transfer->pid) : ACL_SUCCESS;
    hccl_gate_leave(transfer->gate, side, transfer->link);
    return code;
}

static aclError run(soft_task *task)
{
    hccl_transfer *transfer = (hccl_transfer *)task;
    aclError code = check_ranges(transfer);
    if (code)
        return code;
    fault what = copy_all(transfer);
    code = told(transfer, what.code ? what : look_up(transfer));
    return !code && task->fault.flip && task->bytes ? flip(transfer) : code;
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
