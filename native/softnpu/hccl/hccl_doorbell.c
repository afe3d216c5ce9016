/* What a stream gets of a batch: a task that rings the doorbell, and one that waits for the connection's flag. The doorbell
 * tells how many requests had been posted when the batch was, by whichever stream; all of them are started. An abort drops
 * both tasks, and leaves the requests in the queue.                                                                     */
#include <stdlib.h>
#include "hccl_queue_pair.h"

typedef struct doorbell { soft_task task; hccl_queue_pair *pair; uint64_t posted; } doorbell;

static void drop(soft_task *task)
{
    hccl_queue_pair_put(((doorbell *)task)->pair);
    free(task);
}

static aclError ring(soft_task *task)
{
    const doorbell *bell = (doorbell *)task;
    hccl_queue_pair_start(bell->pair, bell->posted);
    return ACL_SUCCESS;
}

static aclError await_flag(soft_task *task)
{
    hccl_queue_pair *pair = ((doorbell *)task)->pair;
    switch (hccl_flag_await(task, pair->flag)) {
    case HCCL_FLAG_SET:     return ACL_SUCCESS;
    case HCCL_FLAG_BROKEN:  return hccl_queue_pair_failed(pair);
    case HCCL_FLAG_ABORTED: return ACL_ERROR_RT_STREAM_ABORT;
    default:                return soft_error(ACL_ERROR_RT_WAIT_TIMEOUT, "rank %u: the connection's flag was not set "
                                              "(HCCL_EXEC_TIMEOUT)", pair->rank);
    }
}

static HcclResult submit(soft_stream *stream, doorbell value)
{
    doorbell *made = malloc(sizeof *made);
    if (!made)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", value.task.function);
    *made = value;
    soft_ref(&value.pair->object);
    return soft_submit(stream, &made->task) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

HcclResult hccl_doorbell_submit(hccl_queue_pair *pair, const char *function, soft_stream *stream)
{
    uint64_t posted = hccl_queue_pair_posted(pair);
    doorbell bell = { { .function = function, .run = ring, .drop = drop }, pair, posted };
    doorbell wait = { { .function = function, .run = await_flag, .drop = drop, .bytes = SOFT_MAY_BLOCK }, pair, posted };
    HcclResult code = submit(stream, bell);
    return code ? code : submit(stream, wait);
}
