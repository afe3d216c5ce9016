/* Questions about a communicator, and the calls that on softnpu have next to nothing to do. */
#include <string.h>
#include "hccl_soft.h"

typedef struct question { uint32_t *number; char *name; HcclResult *error; } question;

static HcclResult ask(const char *function, HcclComm handle, const void *out, void (*answer)(hccl_comm *, question),
                      question what)
{
    hccl_comm *comm;
    if (!out)
        return soft_hccl_error(HCCL_E_PTR, "%s: the output is NULL", function);
    HcclResult code = hccl_comm_find(function, handle, &comm);
    if (code)
        return code;
    answer(comm, what);
    hccl_comm_put(comm);
    return HCCL_SUCCESS;
}

static void rank_size(hccl_comm *comm, question what)
{
    *what.number = comm->size;
}

static void rank_id(hccl_comm *comm, question what)
{
    *what.number = comm->rank;
}

static void comm_name(hccl_comm *comm, question what)
{
    strcpy(what.name, comm->name);                      /* 128 bytes at most, the documented size of the buffer */
}

static bool is_lost(int fd)
{
    return fd >= 0 && !hccl_socket_alive(fd);
}

/* A link that only tried to prepare a two-sided communicator is not missed. */
static bool peer_is_lost(const hccl_comm *comm, const hccl_peer *peer)
{
    bool needs_link = comm->one_sided || comm->prepared;
    return (needs_link && is_lost(peer->link)) || is_lost(peer->send.fd) || is_lost(peer->recv.fd);
}

static void async_error(hccl_comm *comm, question what)
{
    *what.error = HCCL_SUCCESS;
    pthread_mutex_lock(&comm->lock);
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (peer_is_lost(comm, &comm->peers[rank]))
            *what.error = HCCL_E_REMOTE;
    pthread_mutex_unlock(&comm->lock);
}

HcclResult HcclGetRankSize(HcclComm comm, uint32_t *rankSize)
{
    HCCL_ENTER();
    return ask(__func__, comm, rankSize, rank_size, (question){.number = rankSize});
}

HcclResult HcclGetRankId(HcclComm comm, uint32_t *rank)
{
    HCCL_ENTER();
    return ask(__func__, comm, rank, rank_id, (question){.number = rank});
}

HcclResult HcclGetCommName(HcclComm comm, char *commName)
{
    HCCL_ENTER();
    return ask(__func__, comm, commName, comm_name, (question){.name = commName});
}

HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError)
{
    HCCL_ENTER();
    return ask(__func__, comm, asyncError, async_error, (question){.error = asyncError});
}

const char *HcclGetErrorString(HcclResult code)
{
    static const char *const texts[] = {
        "no error", "parameter error", "null pointer", "out of host memory", "internal error", "not supported",
        "not found", "unavailable", "system call failed", "timeout", "open file failure", "connection failed (TCP)",
        "connection failed (RoCE)", "transfer failed (TCP)", "transfer failed (RoCE)", "runtime failed", "driver failed",
        "profiling failed", "communication engine failed", "network failed", "busy, try again", "remote error",
        "suspended", "operator retry failed", "out of device memory",
    };
    soft_fault(__func__, NULL);                         /* a delay, perhaps; there is no code to return */
    return (unsigned)code < sizeof texts / sizeof *texts ? texts[code] : "unknown HCCL error";
}

/* A suspended communicator refuses new transfers. What was submitted before continues. */
static HcclResult set_suspended(const char *function, HcclComm handle, bool suspended)
{
    hccl_comm *comm;
    HcclResult code = hccl_comm_find(function, handle, &comm);
    if (code)
        return code;
    pthread_mutex_lock(&comm->lock);
    comm->suspended = suspended;
    pthread_mutex_unlock(&comm->lock);
    hccl_comm_put(comm);
    return HCCL_SUCCESS;
}

HcclResult HcclCommSuspend(HcclComm comm)
{
    HCCL_ENTER();
    return set_suspended(__func__, comm, true);
}

HcclResult HcclCommResume(HcclComm comm)
{
    HCCL_ENTER();
    return set_suspended(__func__, comm, false);
}

/* Calls between the two start at once: a group is only counted. Sends and receives that must not wait for each other
 * belong into one HcclBatchSendRecv, or on two streams.                                                              */
static _Thread_local uint32_t group_depth;

HcclResult HcclGroupStart(void)
{
    HCCL_ENTER();
    group_depth++;
    return HCCL_SUCCESS;
}

HcclResult HcclGroupEnd(void)
{
    HCCL_ENTER();
    if (!group_depth)
        return soft_hccl_error(HCCL_E_PARA, "%s: no group was started on this thread", __func__);
    group_depth--;
    return HCCL_SUCCESS;
}

/* After a repair of device memory the vendor's library registers the ranges again. Memory of softnpu does not wear out, so
 * all that is left is to say whether the arguments make sense: live communicators, and ranges that lie in known memory.   */
HcclResult HcclRemapRegistedMemory(HcclComm *comm, CommMem *memInfoArray, uint64_t commSize, uint64_t arraySize)
{
    hccl_comm *found;
    soft_span span;
    HCCL_ENTER();
    if (!comm || !memInfoArray)
        return soft_hccl_error(HCCL_E_PTR, "%s: %s is NULL", __func__, comm ? "memInfoArray" : "comm");
    if (!commSize || !arraySize || commSize > HCCL_REGIONS_MAX || arraySize > HCCL_REGIONS_MAX)
        return soft_hccl_error(HCCL_E_PARA, "%s: %llu communicators and %llu ranges: must be 1 to %d", __func__,
                               (unsigned long long)commSize, (unsigned long long)arraySize, HCCL_REGIONS_MAX);
    for (uint64_t i = 0; i < commSize; i++) {
        HcclResult code = hccl_comm_find(__func__, comm[i], &found);
        if (code)
            return code;
        hccl_comm_put(found);
    }
    for (uint64_t i = 0; i < arraySize; i++)
        if (!memInfoArray[i].size || !soft_span_of(memInfoArray[i].addr, memInfoArray[i].size, &span))
            return soft_hccl_error(HCCL_E_PARA, "%s: range %llu is not memory that the device knows", __func__, (unsigned long long)i);
    return HCCL_SUCCESS;
}

int softnpu_comm_rdma(void *handle, uint32_t *traffic_class, uint32_t *service_level)
{
    hccl_comm *comm = handle ? soft_handle_get(SOFT_COMM, handle) : NULL;
    if (!comm)
        return -1;
    *traffic_class = comm->traffic_class;
    *service_level = comm->service_level;
    hccl_comm_put(comm);
    return 0;
}
