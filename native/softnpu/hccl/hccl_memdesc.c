/* The older, per-peer way: RegisterMem gives a descriptor, ExchangeMemDesc swaps descriptors with one peer, EnableMemAccess
 * opens what one describes. A descriptor names a region; it is compared with what the peer's link told, never followed.
 * ExchangeMemDesc itself does not look at the descriptors that it carries, so they can be any 512 bytes.                */
#include <string.h>
#include "hccl_queue_pair.h"

static const char descriptor_magic[8] = "softmem";

typedef struct descriptor {
    uint32_t owner, reader;                             /* the vendor's descriptors start with these two ranks, too */
    char magic[8];
    uint64_t id, base, size;
    int32_t type;
    char rest[512 - 44];
} __attribute__((packed)) descriptor;
_Static_assert(sizeof(descriptor) == sizeof(HcclMemDesc), "a descriptor fills an HcclMemDesc");

static HcclResult check_rank(const char *function, const hccl_comm *comm, uint32_t rank)
{
    if (rank < comm->size && rank != comm->rank)
        return HCCL_SUCCESS;
    return soft_hccl_error(HCCL_E_PARA, "%s: remote rank %u; we are rank %u of %u", function, rank, comm->rank, comm->size);
}

static bool readable(const descriptor *text)
{
    return !memcmp(text->magic, descriptor_magic, sizeof descriptor_magic);
}

static void describe(const hccl_comm *comm, uint32_t reader, const hccl_region *region, HcclMemDesc *desc)
{
    descriptor text = {.owner = comm->rank, .reader = reader, .id = region->id, .base = (uintptr_t)region->mem.addr,
                       .size = region->mem.size, .type = region->mem.type};
    memcpy(text.magic, descriptor_magic, sizeof descriptor_magic);
    memcpy(desc->desc, &text, sizeof text);
}

static HcclResult offer(const char *function, hccl_comm *comm, uint32_t rank, hccl_region *region)
{
    pthread_mutex_lock(&comm->lock);
    bool bound = !comm->closed && hccl_region_bind(region);
    bool added = bound && hccl_regions_add(&comm->peers[rank].offered, region);
    pthread_mutex_unlock(&comm->lock);
    if (added)
        return HCCL_SUCCESS;
    if (bound)
        hccl_region_unbind(region);
    return soft_hccl_error(bound ? HCCL_E_MEMORY : HCCL_E_NOT_FOUND, "%s: %s", function,
                           bound ? "out of memory" : "the communicator was destroyed");
}

HcclResult HcclRegisterMem(HcclComm handle, uint32_t remoteRank, int type, void *addr, uint64_t size, HcclMemDesc *desc)
{
    hccl_comm *comm;
    hccl_region *region;
    const CommMem mem = {(CommMemType)type, addr, size};
    HCCL_ENTER();
    if (!desc)
        return soft_hccl_error(HCCL_E_PTR, "%s: desc is NULL", __func__);
    HcclResult code = hccl_comm_find(__func__, handle, &comm);
    if (code)
        return code;
    code = check_rank(__func__, comm, remoteRank);
    if (!code)
        code = hccl_region_acquire(__func__, &mem, &region);
    if (!code) {
        code = offer(__func__, comm, remoteRank, region);
        if (code)
            hccl_region_release(__func__, region);
        else
            describe(comm, remoteRank, region, desc);
        soft_unref(&region->object);
    }
    hccl_comm_put(comm);
    return code;
}

/* Under the lock. The registration that the descriptor names, taken out of the peer's list. */
static hccl_region *take_offered(hccl_comm *comm, const descriptor *text)
{
    hccl_regions *offered = &comm->peers[text->reader].offered;
    for (size_t i = 0; i < offered->count; i++) {
        hccl_region *region = offered->item[i];
        if (region->id != text->id)
            continue;
        hccl_regions_remove(offered, region);
        return region;
    }
    return NULL;
}

HcclResult HcclDeregisterMem(HcclComm handle, HcclMemDesc *desc)
{
    hccl_comm *comm;
    descriptor text;
    HCCL_ENTER();
    if (!desc)
        return soft_hccl_error(HCCL_E_PTR, "%s: desc is NULL", __func__);
    HcclResult code = hccl_comm_find(__func__, handle, &comm);
    if (code)
        return code;
    memcpy(&text, desc->desc, sizeof text);
    hccl_region *region = NULL;
    if (!readable(&text) || text.owner != comm->rank || text.reader >= comm->size) {
        code = soft_hccl_error(HCCL_E_PARA, "%s: this is not a descriptor that HcclRegisterMem gave on this communicator",
                               __func__);
    } else {
        pthread_mutex_lock(&comm->lock);
        region = take_offered(comm, &text);
        pthread_mutex_unlock(&comm->lock);
        if (!region)
            code = soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the region is no longer registered for rank %u", __func__,
                                   text.reader);
    }
    if (region) {
        soft_ref(&region->object);                      /* the binding held it until now */
        hccl_region_unbind(region);
        code = hccl_region_release(__func__, region);
        soft_unref(&region->object);
    }
    hccl_comm_put(comm);
    return code;
}

static HcclResult send_all(const hccl_wait *wait, int link, const HcclMemDescs *local)
{
    hccl_message message;
    uint32_t at = 0;
    do {
        uint32_t left = local->arrayLength - at, count = left < HCCL_MESSAGE_DESCRIPTORS ? left : HCCL_MESSAGE_DESCRIPTORS;
        hccl_message_init(&message, HCCL_DESCRIPTORS, HCCL_EXCHANGE, count);
        if (count)
            memcpy(message.body.descriptors, local->array + at, count * sizeof(HcclMemDesc));
        at += count;
        if (at == local->arrayLength)
            message.head.flags |= HCCL_LAST;
        HcclResult code = hccl_message_send(wait, link, &message);
        if (code)
            return code;
    } while (at < local->arrayLength);
    return HCCL_SUCCESS;
}

/* E_PARA: there are more than there is room for */
static HcclResult receive_all(const hccl_wait *wait, int link, HcclMemDescs *remote, uint32_t *total)
{
    hccl_message message;
    *total = 0;
    for (;;) {
        HcclResult code = hccl_message_receive(wait, link, HCCL_DESCRIPTORS, HCCL_EXCHANGE, &message);
        if (code)
            return code;
        uint32_t count = message.head.count;
        bool last = message.head.flags & HCCL_LAST;
        hccl_message_close(&message);
        if (count > remote->arrayLength - *total)
            return HCCL_E_PARA;
        if (!count && !last)
            return HCCL_E_INTERNAL;
        if (count)
            memcpy(remote->array + *total, message.body.descriptors, count * sizeof(HcclMemDesc));
        *total += count;
        if (last)
            return HCCL_SUCCESS;
    }
}

static HcclResult swap_descriptors(hccl_comm *comm, const hccl_wait *wait, uint32_t rank, const HcclMemDescs *local,
                                   HcclMemDescs *remote, uint32_t *total)
{
    int link = comm->peers[rank].link;
    bool first = comm->rank < rank;
    HcclResult code = HCCL_SUCCESS;
    if (first)
        code = send_all(wait, link, local);
    if (!code)
        code = receive_all(wait, link, remote, total);
    if (!code && !first)
        code = send_all(wait, link, local);
    code = hccl_message_confirm(wait, link, code);
    if (code == HCCL_E_PARA)
        return soft_hccl_error(code, "%s: one side has more descriptors than the other has room for; here %u go out, %u fit in",
                               wait->function, local->arrayLength, remote->arrayLength);
    return hccl_wait_failed(wait, rank, code);
}

static HcclResult exchange(hccl_comm *comm, const hccl_wait *wait, uint32_t rank, const HcclMemDescs *local,
                           HcclMemDescs *remote, uint32_t *total)
{
    hccl_regions offered;
    pthread_mutex_lock(&comm->lock);
    bool copied = hccl_regions_copy(&comm->peers[rank].offered, &offered), connected = comm->prepared;
    pthread_mutex_unlock(&comm->lock);
    if (!copied)
        return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", wait->function);
    HcclResult code = connected ? HCCL_SUCCESS : hccl_mesh_connect(comm, wait, rank);   /* a connection is made once */
    if (!code)
        code = hccl_swap(comm, wait, rank, &offered, HCCL_EXCHANGE);
    if (!code)
        code = swap_descriptors(comm, wait, rank, local, remote, total);
    if (code)
        hccl_mesh_break(comm, rank);
    hccl_regions_drop(&offered);
    return code;
}

HcclResult HcclExchangeMemDesc(HcclComm handle, uint32_t remoteRank, HcclMemDescs *local, int timeout, HcclMemDescs *remote,
                               uint32_t *actualNum)
{
    hccl_comm *comm;
    uint32_t total = 0;
    hccl_wait wait = {__func__, 0, -1};
    HCCL_ENTER();
    if (!local || !remote || !actualNum || (local->arrayLength && !local->array) || (remote->arrayLength && !remote->array))
        return soft_hccl_error(HCCL_E_PTR, "%s: local, remote, actualNum or an array is NULL", __func__);
    if (local->arrayLength > HCCL_REGIONS_MAX || remote->arrayLength > HCCL_REGIONS_MAX)
        return soft_hccl_error(HCCL_E_PARA, "%s: %u and %u descriptors: must be at most %d", __func__,
                               local->arrayLength, remote->arrayLength, HCCL_REGIONS_MAX);
    HcclResult code = hccl_connect_deadline(__func__, timeout, &wait.deadline);
    if (!code)
        code = hccl_comm_find(__func__, handle, &comm);
    if (code)
        return code;
    code = check_rank(__func__, comm, remoteRank);
    if (!code)
        code = hccl_setup_begin(comm, &wait);
    if (!code)
        code = hccl_setup_end(comm, &wait, exchange(comm, &wait, remoteRank, local, remote, &total));
    if (!code)
        *actualNum = total;
    hccl_comm_put(comm);
    return code;
}

/* Under the lock. */
static HcclResult find_described(const char *function, hccl_comm *comm, const HcclMemDesc *desc, hccl_remote **remote)
{
    descriptor text;
    memcpy(&text, desc->desc, sizeof text);
    if (!readable(&text) || text.reader != comm->rank || text.owner >= comm->size || text.owner == comm->rank || !text.size)
        return soft_hccl_error(HCCL_E_PARA, "%s: this is not a descriptor of a peer of this communicator", function);
    hccl_remote *entry = hccl_remote_find(&comm->peers[text.owner].remotes, text.base, text.size);
    if (!entry || entry->id != text.id || entry->base != text.base || entry->size != text.size || entry->type != text.type)
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: rank %u has not described such a region: exchange descriptors first",
                               function, text.owner);
    *remote = entry;
    return HCCL_SUCCESS;
}

HcclResult HcclEnableMemAccess(HcclComm handle, HcclMemDesc *remoteMemDesc, CommMem *remoteMem)
{
    hccl_comm *comm;
    hccl_remote *remote;
    HCCL_ENTER();
    if (!remoteMemDesc || !remoteMem)
        return soft_hccl_error(HCCL_E_PTR, "%s: %s is NULL", __func__, remoteMemDesc ? "remoteMem" : "remoteMemDesc");
    HcclResult code = hccl_comm_find(__func__, handle, &comm);
    if (code)
        return code;
    pthread_mutex_lock(&comm->lock);
    code = find_described(__func__, comm, remoteMemDesc, &remote);
    if (!code) {
        remote->enabled = true;
        *remoteMem = (CommMem){(CommMemType)remote->type, (void *)(uintptr_t)remote->base, remote->size};
    }
    pthread_mutex_unlock(&comm->lock);
    hccl_comm_put(comm);
    return code;
}

/* Under the lock. */
static bool is_busy(const hccl_comm *comm)
{
    bool busy = comm->tasks > 0;
    for (uint32_t rank = 0; rank < comm->size; rank++)
        busy = busy || !hccl_queue_pair_idle(comm->peers[rank].queue_pair);
    return busy;
}

HcclResult HcclDisableMemAccess(HcclComm handle, HcclMemDesc *remoteMemDesc)
{
    hccl_comm *comm;
    hccl_remote *remote;
    HCCL_ENTER();
    if (!remoteMemDesc)
        return soft_hccl_error(HCCL_E_PTR, "%s: remoteMemDesc is NULL", __func__);
    HcclResult code = hccl_comm_find(__func__, handle, &comm);
    if (code)
        return code;
    pthread_mutex_lock(&comm->lock);
    code = find_described(__func__, comm, remoteMemDesc, &remote);
    if (!code && !remote->enabled)
        code = soft_hccl_error(HCCL_E_NOT_FOUND, "%s: access to this region is not enabled", __func__);
    else if (!code && is_busy(comm))
        code = soft_hccl_error(HCCL_E_AGAIN, "%s: transfers of this communicator are queued or running", __func__);
    if (!code)
        remote->enabled = false;                        /* stays mapped: it may be enabled again */
    pthread_mutex_unlock(&comm->lock);
    hccl_comm_put(comm);
    return code;
}
