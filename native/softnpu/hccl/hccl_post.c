/* A batch on its way into the queue pair: item by item, at call time, then one fence for all of them, and two tasks for the stream.
 * A full queue blocks the caller in the middle of it. A batch that is given up stays half posted: its first items have no
 * fence and no doorbell of their own, and the next doorbell of the connection starts them.                              */
#include "hccl_queue_pair.h"

static HcclResult find_pair(hccl_posting *posting)
{
    HcclResult code = hccl_connect_deadline(posting->function, 0, &posting->deadline);
    return code ? code : hccl_queue_pair_of(posting->function, posting->comm, posting->rank, &posting->pair);
}

static HcclResult post(hccl_posting *posting, const hccl_request *request)
{
    if (hccl_queue_pair_post(posting->pair, request, posting->deadline))
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_ROCE_TRANSFER, "%s: %d requests to rank %u are unanswered, the most there may be, and none was "
                           "answered in time (HCCL_CONNECT_TIMEOUT)", posting->function, HCCL_QUEUE_ROOM, posting->rank);
}

/* The part of the call's fault that hits a request of this size. The rest is left for the requests behind it. */
static soft_exec_fault part_of_fault(hccl_posting *posting, uint64_t bytes)
{
    soft_exec_fault mine = posting->fault;
    mine.flip = mine.flip && (uint64_t)mine.flip_at < bytes;
    posting->fault = (soft_exec_fault){ .flip = posting->fault.flip && !mine.flip, .flip_at = mine.flip_at - (int64_t)bytes };
    return mine;
}

HcclResult hccl_post_item(hccl_posting *posting, const hccl_copy *copy)
{
    HcclResult code = posting->pair ? HCCL_SUCCESS : find_pair(posting);
    soft_exec_fault fault = part_of_fault(posting, copy->bytes);
    hccl_request request = { false, posting->put, copy->mapped, copy->local, copy->remote, copy->bytes, fault };
    return code ? code : post(posting, &request);
}

HcclResult hccl_post_end(hccl_posting *posting, soft_stream *stream)
{
    hccl_request fence = { .fence = true };
    HcclResult code = post(posting, &fence);
    return code ? code : hccl_doorbell_submit(posting->pair, posting->function, stream);
}
