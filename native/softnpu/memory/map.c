/* map.c: the ranges of this process that mean something to the device, for lookups on the data path. */
#include "runtime.h"
#include <stdlib.h>

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static soft_sorted map;

static soft_range *range_at(size_t index)
{
    return map.entries[index].value;
}

static soft_range *holding(uintptr_t addr)                  /* locked */
{
    size_t after = soft_sorted_after(&map, addr);
    if (!after || addr - map.entries[after - 1].base >= map.entries[after - 1].size)
        return NULL;
    return range_at(after - 1);
}

static soft_range *overlapping(uintptr_t base, uint64_t size)             /* locked; the first one */
{
    soft_range *first = holding(base);
    if (first)
        return first;
    size_t next = soft_sorted_after(&map, base);
    return next < map.count && map.entries[next].base - base < size ? range_at(next) : NULL;
}

static aclError insert(const soft_range *range)             /* locked */
{
    soft_range *copy = malloc(sizeof *copy);
    if (copy)
        *copy = *range;
    if (!copy || !soft_sorted_insert(&map, (soft_entry){ range->span.base, range->span.size, copy })) {
        free(copy);
        return soft_error(ACL_ERROR_RT_MEMORY_ALLOCATION, "no host memory left for the table of known ranges");
    }
    return ACL_SUCCESS;
}

static aclError conflict(const soft_range *want, const soft_range *have)
{
    aclError code = want->origin == SOFT_REGISTERED ? SOFT_HOST_REGISTERED : ACL_ERROR_RT_PARAM_INVALID;
    return soft_error(code, "[%#lx, +%llu) overlaps the known range [%#lx, +%llu)", (unsigned long)want->span.base,
                      (unsigned long long)want->span.size, (unsigned long)have->span.base, (unsigned long long)have->span.size);
}

aclError soft_map_add(const soft_range *range)
{
    pthread_rwlock_wrlock(&lock);
    soft_range *known = overlapping(range->span.base, range->span.size);
    aclError code = known ? conflict(range, known) : insert(range);
    pthread_rwlock_unlock(&lock);
    return code;
}

aclError soft_map_retain(const soft_range *range)
{
    pthread_rwlock_wrlock(&lock);
    soft_range *known = overlapping(range->span.base, range->span.size);
    aclError code = ACL_SUCCESS;
    if (!known)
        code = insert(range);
    else if (known->origin == SOFT_ADOPTED && known->span.base == range->span.base && known->span.size == range->span.size
             && known->span.placement == range->span.placement)
        known->refs++;
    else
        code = conflict(range, known);
    if (code == ACL_SUCCESS && !known)
        SOFT_COUNT(adopted, 1);
    pthread_rwlock_unlock(&lock);
    return code;
}

static void forget(size_t index)                            /* locked */
{
    free(range_at(index));
    soft_sorted_remove(&map, index);
}

aclError soft_map_release(const void *base, uint64_t size)
{
    bool found = false;
    pthread_rwlock_wrlock(&lock);
    size_t after = soft_sorted_after(&map, (uintptr_t)base);
    soft_range *range = after ? range_at(after - 1) : NULL;
    if (range && range->origin == SOFT_ADOPTED && range->span.base == (uintptr_t)base && range->span.size == size) {
        found = true;
        if (--range->refs == 0) {
            forget(after - 1);
            SOFT_COUNT(adopted, -1);
        }
    }
    pthread_rwlock_unlock(&lock);
    if (!found)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "[%p, +%llu) is not adopted memory", base, (unsigned long long)size);
    return ACL_SUCCESS;
}

bool soft_map_take(const void *base, soft_origin origin, soft_range *out)
{
    bool found = false;
    pthread_rwlock_wrlock(&lock);
    size_t after = soft_sorted_after(&map, (uintptr_t)base);
    if (base && after && map.entries[after - 1].base == (uintptr_t)base && range_at(after - 1)->origin == origin) {
        *out = *range_at(after - 1);
        forget(after - 1);
        found = true;
    }
    pthread_rwlock_unlock(&lock);
    return found;
}

bool soft_map_find(const void *addr, soft_range *out)
{
    pthread_rwlock_rdlock(&lock);
    const soft_range *range = holding((uintptr_t)addr);
    if (range)
        *out = *range;
    pthread_rwlock_unlock(&lock);
    return range != NULL;
}

soft_where soft_map_where(const void *addr, uint64_t size, soft_span *span)
{
    uintptr_t at = (uintptr_t)addr;
    soft_where where = SOFT_UNKNOWN;
    pthread_rwlock_rdlock(&lock);
    const soft_range *range = overlapping(at, size);
    if (range && !range->hidden) {
        bool starts_inside = at >= range->span.base;
        uint64_t offset = at - range->span.base;
        if (starts_inside && size <= range->span.size - offset)
            where = SOFT_INSIDE;
        else if (starts_inside || range->span.placement == 1)   /* a pageable buffer may have a pinned part in its middle */
            where = SOFT_OUTSIDE;
        *span = range->span;
    }
    pthread_rwlock_unlock(&lock);
    return where;
}

bool soft_span_of(const void *addr, uint64_t size, soft_span *span)
{
    soft_span found;
    if (soft_map_where(addr, size, &found) != SOFT_INSIDE)
        return false;
    if (span)
        *span = found;
    return true;
}

bool soft_span_again(const void *addr, uint64_t size, soft_span *span)
{
    uint64_t offset = (uintptr_t)addr - span->base;
    if (size && (uintptr_t)addr >= span->base && offset < span->size && size <= span->size - offset)
        return true;
    return soft_span_of(addr, size, span);
}

bool soft_map_is_ordinary(const void *addr)
{
    soft_range range;
    return soft_is_strict() && soft_map_find(addr, &range) && range.origin == SOFT_ADOPTED && range.span.placement == 0;
}
