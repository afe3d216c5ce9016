/* A peer's memory, as that peer described it. Nothing it says is believed: sizes are bounded, overlaps refused, and what
 * it hands over is mapped only after soft_mem_import has looked at the file itself. Transfers are checked against this. */
#include <stdlib.h>
#include <string.h>
#include "hccl_soft.h"

#define BYTES_MAX ((uint64_t)1 << 40)

/* The first entry that ends above `base`. */
static size_t position(const hccl_remotes *remotes, uint64_t base)
{
    size_t low = 0, high = remotes->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const hccl_remote *entry = &remotes->item[middle];
        if (entry->base + entry->size <= base)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

hccl_remote *hccl_remote_find(const hccl_remotes *remotes, uint64_t base, uint64_t size)
{
    size_t at = position(remotes, base);
    if (at == remotes->count || remotes->item[at].base > base)
        return NULL;
    hccl_remote *entry = &remotes->item[at];
    return size <= entry->size - (base - entry->base) ? entry : NULL;
}

static void remove_at(hccl_remotes *remotes, size_t at)
{
    if (remotes->item[at].local)
        soft_mem_unimport(remotes->item[at].local);
    memmove(&remotes->item[at], &remotes->item[at + 1], (--remotes->count - at) * sizeof remotes->item[at]);
}

void hccl_remotes_clear(hccl_remotes *remotes)
{
    for (size_t i = 0; i < remotes->count; i++)
        if (remotes->item[i].local)
            soft_mem_unimport(remotes->item[i].local);
    free(remotes->item);
    *remotes = (hccl_remotes){NULL, 0, 0};
}

static bool makes_sense(const hccl_wire_region *wire)
{
    return !(wire->shared & ~(uint32_t)(HCCL_SHARED | HCCL_READABLE)) && wire->base && wire->size && wire->size <= BYTES_MAX && wire->base <= UINT64_MAX - wire->size
        && wire->fd_offset <= INT64_MAX - wire->size && (wire->type == COMM_MEM_TYPE_DEVICE
                                                         || wire->type == COMM_MEM_TYPE_HOST);
}

/* Ranges that were never enabled are of no use once the peer has put something else in their place. */
static bool make_room(hccl_remotes *remotes, const hccl_wire_region *wire)
{
    size_t at = position(remotes, wire->base);
    while (at < remotes->count && remotes->item[at].base < wire->base + wire->size) {
        if (remotes->item[at].enabled)
            return false;
        remove_at(remotes, at);
    }
    return true;
}

static HcclResult insert(hccl_remotes *remotes, const hccl_remote *entry)
{
    if (remotes->count == HCCL_REGIONS_MAX)
        return HCCL_E_INTERNAL;
    if (remotes->count == remotes->capacity) {
        size_t capacity = remotes->capacity ? remotes->capacity * 2 : 16;
        hccl_remote *item = realloc(remotes->item, capacity * sizeof *item);
        if (!item)
            return HCCL_E_MEMORY;
        remotes->item = item;
        remotes->capacity = capacity;
    }
    size_t at = position(remotes, entry->base);
    memmove(&remotes->item[at + 1], &remotes->item[at], (remotes->count++ - at) * sizeof *entry);
    remotes->item[at] = *entry;
    return HCCL_SUCCESS;
}

/* Under the lock. Told about the same region again? */
static bool known(hccl_remotes *remotes, const hccl_wire_region *wire, bool enable)
{
    hccl_remote *entry = hccl_remote_find(remotes, wire->base, wire->size);
    if (!entry || entry->id != wire->id || entry->base != wire->base || entry->size != wire->size
        || entry->type != wire->type || entry->readable != (bool)(wire->shared & HCCL_READABLE))
        return false;
    entry->enabled |= enable;
    return true;
}

static HcclResult add_locked(hccl_peer *peer, const hccl_wire_region *wire, const hccl_remote *entry)
{
    return make_room(&peer->remotes, wire) ? insert(&peer->remotes, entry) : HCCL_E_INTERNAL;
}

/* `fd` (or -1) stays the caller's. Mapping may take long and is done without the lock; only one thread sets up at a time. */
HcclResult hccl_remote_add(hccl_comm *comm, uint32_t rank, const hccl_wire_region *wire, int fd, bool enable)
{
    hccl_peer *peer = &comm->peers[rank];
    bool readable = wire->shared & HCCL_READABLE;
    hccl_remote entry = {wire->id, wire->base, wire->size, wire->type, enable, readable, NULL};
    if (!makes_sense(wire))
        return HCCL_E_INTERNAL;
    pthread_mutex_lock(&comm->lock);
    bool have = known(&peer->remotes, wire, enable);
    pthread_mutex_unlock(&comm->lock);
    if (have)
        return HCCL_SUCCESS;
    if (fd >= 0 && soft_mem_import(fd, wire->fd_offset, wire->size, wire->type == COMM_MEM_TYPE_DEVICE, !readable, &entry.local))
        return HCCL_E_MEMORY;
    pthread_mutex_lock(&comm->lock);
    HcclResult code = add_locked(peer, wire, &entry);
    pthread_mutex_unlock(&comm->lock);
    if (code && entry.local)
        soft_mem_unimport(entry.local);
    return code;
}
