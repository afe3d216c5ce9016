/* HcclBatchPut and HcclBatchGet: everything is checked here, in the caller's thread and before anything happens. HCCL walks
 * the items in order instead: the first bad one ends the call with its code, and those before it are on their way. So it is
 * with SOFTNPU_STRICT: the good beginning is submitted, or posted (roce) item by item. [src hccl_one_sided_conn.cc:328-383] */
#include "hccl_queue_pair.h"
#include "hccl_unfold.h"

typedef struct batch_call {
    const char *function;
    bool put;
    uint32_t rank, count;
    const HcclOneSideOpDesc *desc;
    soft_exec_fault fault;
} batch_call;

static HcclResult check_call(const batch_call *call, const hccl_comm *comm)
{
    if (call->rank >= comm->size || call->rank == comm->rank)
        return soft_hccl_error(HCCL_E_PARA, "%s: remote rank %u; we are rank %u of %u", call->function, call->rank,
                               comm->rank, comm->size);
    if (call->count > HCCL_BATCH_MAX)
        return soft_hccl_error(HCCL_E_PARA, "%s: %u items: must be at most %d", call->function, call->count,
                               HCCL_BATCH_MAX);
    if (call->count && !call->desc)
        return soft_hccl_error(HCCL_E_PTR, "%s: desc is NULL", call->function);
    return HCCL_SUCCESS;
}

/* Under the communicator's lock. */
static HcclResult check_local(const batch_call *call, uint32_t i, const hccl_comm *comm, soft_span *span, hccl_copy *copy)
{
    const HcclOneSideOpDesc *desc = &call->desc[i];
    const hccl_regions *offered = &comm->peers[call->rank].offered;
    if (!desc->localAddr || !desc->remoteAddr)
        return soft_hccl_error(HCCL_E_PTR, "%s: item %u: %s is NULL", call->function, i,
                               desc->localAddr ? "remoteAddr" : "localAddr");
    if (!hccl_bytes(desc->count, desc->dataType, &copy->bytes))
        return soft_hccl_error(HCCL_E_PARA, "%s: item %u: %llu elements of data type %d", call->function, i,
                               (unsigned long long)desc->count, (int)desc->dataType);
    HcclResult code = soft_is_strict() ? hccl_strict_item(call->function, &comm->bound, offered, i, desc->localAddr, copy->bytes)
                                       : HCCL_SUCCESS;
    if (code)
        return code;
    if (copy->bytes && !soft_span_again(desc->localAddr, copy->bytes, span))
        return soft_hccl_error(HCCL_E_PARA, "%s: item %u: %llu bytes at %p are not within one known range of this process",
                               call->function, i, (unsigned long long)copy->bytes, desc->localAddr);
    copy->local = desc->localAddr;
    copy->local_range = copy->bytes ? span->base : 0;
    return HCCL_SUCCESS;
}

/* Under the communicator's lock. */
static HcclResult check_remote(const batch_call *call, uint32_t i, const hccl_peer *peer, hccl_copy *copy)
{
    uint64_t address = (uintptr_t)call->desc[i].remoteAddr;
    if (!copy->bytes)
        return HCCL_SUCCESS;
    const hccl_remote *remote = hccl_remote_find(&peer->remotes, address, copy->bytes);
    if (!remote || !remote->enabled)
        return soft_hccl_error(HCCL_E_INTERNAL, "%s: item %u: %llu bytes at %#llx are not within one region that rank %u %s%s",
                               call->function, i, (unsigned long long)copy->bytes, (unsigned long long)address, call->rank,
                               peer->remotes.count ? "has bound" : "has shown; has HcclCommPrepare succeeded?",
                               soft_is_hccs() ? " (over HCCS it shows DEVICE memory only)" : "");
    if (call->put && remote->readable)
        return soft_hccl_error(HCCL_E_INTERNAL, "%s: item %u: rank %u lets its %llu bytes at %#llx be read, not written",
                               call->function, i, call->rank, (unsigned long long)copy->bytes, (unsigned long long)address);
    copy->mapped = remote->local != NULL;
    copy->remote = copy->mapped ? (uint64_t)(uintptr_t)remote->local + (address - remote->base) : address;
    copy->remote_range = remote->base;
    return HCCL_SUCCESS;
}

/* Under the communicator's lock. `span`: where the item before it is, or zero. */
static HcclResult check_item(const batch_call *call, uint32_t i, const hccl_comm *comm, soft_span *span, hccl_copy *copy)
{
    *copy = (hccl_copy){0};
    HcclResult code = check_local(call, i, comm, span, copy);
    return code ? code : check_remote(call, i, &comm->peers[call->rank], copy);
}

static void begin(const batch_call *call, hccl_comm *comm, hccl_transfer *transfer)
{
    soft_ref(&comm->object);
    transfer->comm = comm;
    transfer->task.function = call->function;
    transfer->task.fault = call->fault;
    transfer->rank = call->rank;
    transfer->put = call->put;
}

/* Under the communicator's lock: the way to the peer. */
static void lead(const hccl_comm *comm, hccl_transfer *transfer)
{
    const hccl_peer *peer = &comm->peers[transfer->rank];
    transfer->link = peer->link;
    transfer->gate = peer->gate;
    transfer->pid = peer->pid;
}

/* After a failure `transfer` has the items before the bad one. */
static HcclResult check_items(const batch_call *call, hccl_comm *comm, hccl_transfer *transfer)
{
    HcclResult code = HCCL_SUCCESS;
    soft_span span = {0};
    pthread_mutex_lock(&comm->lock);
    for (uint32_t i = 0; !code && i < call->count; i++) {
        hccl_copy copy;
        code = check_item(call, i, comm, &span, &copy);
        if (!code)
            hccl_transfer_add(transfer, copy);
    }
    lead(comm, transfer);
    pthread_mutex_unlock(&comm->lock);
    return code;
}

static HcclResult submit(const batch_call *call, hccl_comm *comm, soft_stream *stream)
{
    hccl_transfer *transfer = hccl_transfer_new(call->count);
    if (!transfer)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", call->function);
    begin(call, comm, transfer);
    HcclResult code = hccl_comm_hold(call->function, comm);  /* from here on no set-up call replaces the table or the link */
    transfer->held = !code;
    if (!code)
        code = check_items(call, comm, transfer);
    if (code && !(soft_is_strict() && transfer->count)) {
        hccl_transfer_drop(&transfer->task);
        return code;
    }
    aclError submitted = soft_submit(stream, &transfer->task);
    return code ? code : submitted ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

static HcclResult post_items(const batch_call *call, hccl_comm *comm, hccl_posting *posting)
{
    HcclResult code = HCCL_SUCCESS;
    for (uint32_t i = 0; !code && i < call->count; i++) {
        soft_span span = {0};
        hccl_copy copy;
        pthread_mutex_lock(&comm->lock);
        code = check_item(call, i, comm, &span, &copy);
        pthread_mutex_unlock(&comm->lock);
        if (!code)
            code = hccl_post_item(posting, &copy);
    }
    return code;
}

/* The byte that `flip` means must be known before the first item is posted. */
static soft_exec_fault placed(const batch_call *call)
{
    soft_exec_fault fault = call->fault;
    uint64_t total = 0, bytes;
    for (uint32_t i = 0; fault.flip && i < call->count; i++)
        total += hccl_bytes(call->desc[i].count, call->desc[i].dataType, &bytes) ? bytes : 0;
    fault.flip = total != 0;
    fault.flip_at = fault.flip ? (int64_t)hccl_flip_place(fault.flip_at, total) : 0;
    return fault;
}

static HcclResult post(const batch_call *call, hccl_comm *comm, soft_stream *stream)
{
    hccl_posting posting = {call->function, comm, call->rank, call->put, placed(call), NULL, 0};
    HcclResult code = hccl_comm_hold(call->function, comm);  /* while this call lasts: what was posted holds nothing up */
    if (code)
        return code;
    code = post_items(call, comm, &posting);
    if (!code)
        code = hccl_post_end(&posting, stream);
    hccl_queue_pair_put(posting.pair);
    hccl_comm_release(comm);
    return code;
}

/* A batch with a bad item launches no kernel: its items are looked at first. */
static HcclResult note_items(const batch_call *call, hccl_comm *comm, hccl_unfolding *unfolding)
{
    HcclResult code = HCCL_SUCCESS;
    for (uint32_t i = 0; !code && i < call->count; i++) {
        soft_span span = {0};
        hccl_copy copy;
        pthread_mutex_lock(&comm->lock);
        code = check_item(call, i, comm, &span, &copy);
        pthread_mutex_unlock(&comm->lock);
        if (!code)
            hccl_unfolding_note(unfolding, i, &copy);
    }
    return code;
}

static HcclResult launch(const batch_call *call, hccl_comm *comm, hccl_unfolding *unfolding, soft_stream *stream)
{
    hccl_transfer *transfer = hccl_transfer_new(call->count);
    if (!transfer)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", call->function);
    begin(call, comm, transfer);
    transfer->outlives = true;
    pthread_mutex_lock(&comm->lock);
    lead(comm, transfer);
    pthread_mutex_unlock(&comm->lock);
    return hccl_unfolding_launch(unfolding, transfer, call->count, stream);
}

static HcclResult unfold(const batch_call *call, hccl_comm *comm, soft_stream *stream)
{
    hccl_unfolding *unfolding = NULL;
    if (soft_capture_refuses())                             /* its arguments are copied to the device by a synchronous copy */
        return HCCL_E_RUNTIME;
    HcclResult code = hccl_comm_hold(call->function, comm);  /* while this call lasts, as in post() */
    if (code)
        return code;
    code = hccl_unfolding_of(call->function, comm, stream, &unfolding);
    if (!code)
        code = note_items(call, comm, unfolding);
    if (!code)
        code = launch(call, comm, unfolding, stream);
    hccl_unfolding_put(unfolding);
    hccl_comm_release(comm);
    return code;
}

static HcclResult issue(const batch_call *call, hccl_comm *comm, soft_stream *stream)
{
    if (comm->unfolds)
        return unfold(call, comm, stream);
    return soft_setting.strict == SOFT_STRICT_ROCE ? post(call, comm, stream) : submit(call, comm, stream);
}

static HcclResult transfer_items(const batch_call *call, HcclComm handle, aclrtStream stream_handle)
{
    hccl_comm *comm;
    HcclResult code = hccl_comm_find(call->function, handle, &comm);
    if (code)
        return code;
    code = check_call(call, comm);
    soft_stream *stream = NULL;
    if (!code && !stream_handle)
        code = soft_hccl_error(HCCL_E_PTR, "%s: stream is NULL", call->function);
    if (!code && !(stream = soft_stream_get(stream_handle)))
        code = HCCL_E_PARA;
    if (!code && call->count)
        code = issue(call, comm, stream);
    if (stream)
        soft_stream_put(stream);
    hccl_comm_put(comm);
    return code;
}

HcclResult HcclBatchPut(HcclComm comm, uint32_t remoteRank, HcclOneSideOpDesc *desc, uint32_t descNum, aclrtStream stream)
{
    batch_call call = {__func__, true, remoteRank, descNum, desc, {0}};
    HCCL_ENTER_TASK(&call.fault);
    return transfer_items(&call, comm, stream);
}

HcclResult HcclBatchGet(HcclComm comm, uint32_t remoteRank, HcclOneSideOpDesc *desc, uint32_t descNum, aclrtStream stream)
{
    batch_call call = {__func__, false, remoteRank, descNum, desc, {0}};
    HCCL_ENTER_TASK(&call.fault);
    return transfer_items(&call, comm, stream);
}
