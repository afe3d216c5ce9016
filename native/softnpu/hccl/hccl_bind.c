/* Binding says which regions a communicator will show to its peers. Peers learn of them once, in HcclCommPrepare, so
 * binding after it is refused: success would promise an access that never comes. Unbinding is always possible. It ends our
 * hold on the region, but does not take back the mapping that a peer made: HcclCommDestroy ends that peer's transfers.   */
#include <stdlib.h>
#include "hccl_soft.h"
#include "softnpu.h"

bool hccl_regions_add(hccl_regions *regions, hccl_region *region)
{
    if (regions->count == regions->capacity) {
        size_t capacity = regions->capacity ? regions->capacity * 2 : 8;
        hccl_region **item = realloc(regions->item, capacity * sizeof *item);
        if (!item)
            return false;
        regions->item = item;
        regions->capacity = capacity;
    }
    regions->item[regions->count++] = region;
    return true;
}

bool hccl_regions_remove(hccl_regions *regions, const hccl_region *region)
{
    for (size_t i = regions->count; i-- > 0;)
        if (regions->item[i] == region) {
            for (regions->count--; i < regions->count; i++)
                regions->item[i] = regions->item[i + 1];
            return true;
        }
    return false;
}

bool hccl_regions_copy(const hccl_regions *from, hccl_regions *to)
{
    *to = (hccl_regions){NULL, 0, 0};
    for (size_t i = 0; i < from->count; i++) {
        if (!hccl_regions_add(to, from->item[i]))
            return hccl_regions_drop(to), false;
        soft_ref(&from->item[i]->object);
    }
    return true;
}

void hccl_regions_drop(hccl_regions *copy)
{
    for (size_t i = 0; i < copy->count; i++)
        soft_unref(&copy->item[i]->object);
    free(copy->item);
    *copy = (hccl_regions){NULL, 0, 0};
}

void hccl_regions_clear(hccl_regions *regions, bool release)
{
    for (size_t i = 0; i < regions->count; i++) {
        hccl_region *region = regions->item[i];
        soft_ref(&region->object);                      /* the binding held it until now */
        hccl_region_unbind(region);
        if (release)
            hccl_region_release(__func__, region);
        soft_unref(&region->object);
    }
    free(regions->item);
    *regions = (hccl_regions){NULL, 0, 0};
}

bool hccl_regions_contain(const hccl_regions *regions, const hccl_region *region)
{
    for (size_t i = 0; i < regions->count; i++)
        if (regions->item[i] == region)
            return true;
    return false;
}

/* Under the communicator's lock. */
static HcclResult bind_locked(const char *function, hccl_comm *comm, hccl_region *region)
{
    if (comm->closed)
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the communicator was destroyed", function);
    if (comm->setting_up)
        return soft_hccl_error(HCCL_E_AGAIN, "%s: the communicator is being prepared", function);
    if (comm->prepared)
        return soft_hccl_error(HCCL_E_PARA, "%s: bind before HcclCommPrepare: peers learn of memory only there",
                               function);
    if (hccl_regions_contain(&comm->bound, region))
        return soft_hccl_error(HCCL_E_PARA, "%s: the region is already bound to this communicator", function);
    if (comm->bound.count == HCCL_REGIONS_MAX)
        return soft_hccl_error(HCCL_E_PARA, "%s: a communicator shows at most %d regions", function, HCCL_REGIONS_MAX);
    if (!hccl_region_bind(region))
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the region was deregistered by another thread", function);
    hccl_regions_remove(&comm->hidden, region);         /* marks of an earlier region at the same place */
    hccl_regions_remove(&comm->readable, region);
    if (hccl_regions_add(&comm->bound, region))
        return HCCL_SUCCESS;
    hccl_region_unbind(region);
    return soft_hccl_error(HCCL_E_MEMORY, "%s: out of memory", function);
}

static HcclResult unbind_locked(const char *function, hccl_comm *comm, hccl_region *region)
{
    if (!hccl_regions_remove(&comm->bound, region))
        return soft_hccl_error(HCCL_E_NOT_FOUND, "%s: the region is not bound to this communicator", function);
    hccl_region_unbind(region);
    return HCCL_SUCCESS;
}

typedef HcclResult action(const char *function, hccl_comm *comm, hccl_region *region);

static HcclResult with_both(const char *function, HcclComm handle, void *memHandle, action *act)
{
    hccl_comm *comm;
    HcclResult code = hccl_comm_find(function, handle, &comm);
    if (code)
        return code;
    hccl_region *region = memHandle ? soft_handle_get(SOFT_REGION, memHandle) : NULL;
    if (region) {
        pthread_mutex_lock(&comm->lock);
        code = act(function, comm, region);
        pthread_mutex_unlock(&comm->lock);
        soft_unref(&region->object);
    } else {
        code = soft_hccl_error(memHandle ? HCCL_E_NOT_FOUND : HCCL_E_PTR, "%s: %p is not a registered region", function,
                               memHandle);
    }
    hccl_comm_put(comm);
    return code;
}

HcclResult HcclCommBindMem(HcclComm comm, void *memHandle)
{
    HCCL_ENTER();
    return with_both(__func__, comm, memHandle, bind_locked);
}

HcclResult HcclCommUnbindMem(HcclComm comm, void *memHandle)
{
    HCCL_ENTER();
    return with_both(__func__, comm, memHandle, unbind_locked);
}

enum { SHOW_NOTHING = 0, SHOW_READ = 1, SHOW_ALL = 3 };

/* Under the communicator's lock. */
static bool mark_locked(hccl_comm *comm, hccl_region *region, int access)
{
    if (comm->prepared || comm->setting_up || !hccl_regions_contain(&comm->bound, region))
        return false;
    hccl_regions_remove(&comm->hidden, region);
    hccl_regions_remove(&comm->readable, region);
    if (access == SHOW_ALL)
        return true;
    return hccl_regions_add(access == SHOW_READ ? &comm->readable : &comm->hidden, region);
}

int softnpu_comm_show(void *handle, void *memHandle, int access)
{
    hccl_comm *comm = handle ? soft_handle_get(SOFT_COMM, handle) : NULL;
    if (!comm)
        return -1;
    hccl_region *region = memHandle ? soft_handle_get(SOFT_REGION, memHandle) : NULL;
    bool known = access == SHOW_NOTHING || access == SHOW_READ || access == SHOW_ALL, done = false;
    if (region) {
        pthread_mutex_lock(&comm->lock);
        done = known && mark_locked(comm, region, access);
        pthread_mutex_unlock(&comm->lock);
        soft_unref(&region->object);
    }
    hccl_comm_put(comm);
    return done ? 0 : -1;
}
