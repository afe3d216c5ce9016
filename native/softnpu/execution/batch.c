/* batch.c: many copies in one call, all from host to device or all from device to host. Nothing is copied unless the
 * whole batch is right. */
#include "runtime.h"
#include <stdlib.h>

/* The arrays are the caller's and their length cannot be checked; this bounds what one call may ask of us. */
#define MOST_ITEMS ((size_t)1 << 20)

typedef struct batch {
    void **dsts;
    size_t *dest_maxs;
    void **srcs;
    size_t *sizes;
    size_t count;
    aclrtMemcpyBatchAttr *attrs;
    size_t *attr_indexes;
    size_t nattrs;
} batch;

typedef struct item { void *dst; const void *src; uint64_t bytes; } item;
typedef struct batch_task { soft_task task; size_t count; item items[]; } batch_task;

static aclError bad(const char *why)
{
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "%s", why);
}

static aclError check_arrays(const batch *all)
{
    if (!all->dsts || !all->dest_maxs || !all->srcs || !all->sizes || !all->attrs || !all->attr_indexes)
        return bad("an array of the batch is NULL");
    if (!all->count || all->count > MOST_ITEMS)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "numBatches %zu: want 1 to %zu", all->count, MOST_ITEMS);
    if (!all->nattrs || all->nattrs > all->count)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "numAttrs %zu: want 1 to numBatches (%zu)", all->nattrs, all->count);
    if (all->attr_indexes[0] != 0)
        return bad("attrsIndexes[0] must be 0");
    for (size_t k = 1; k < all->nattrs; k++)
        if (all->attr_indexes[k] <= all->attr_indexes[k - 1] || all->attr_indexes[k] >= all->count)
            return soft_error(ACL_ERROR_RT_PARAM_INVALID, "attrsIndexes[%zu] is %zu: they increase, and stay below numBatches (%zu)", k,
                              all->attr_indexes[k], all->count);
    return ACL_SUCCESS;
}

static bool is_device(aclrtMemLocation where)
{
    return where.type == ACL_MEM_LOCATION_TYPE_DEVICE;
}

static aclError check_location(aclrtMemLocation where)
{
    if (where.type != ACL_MEM_LOCATION_TYPE_HOST && !is_device(where))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "location type %d: want 0 (host) or 1 (device)", (int)where.type);
    return is_device(where) ? soft_device_check(where.id) : ACL_SUCCESS;
}

static aclError check_attr(const batch *all, size_t k)
{
    const aclrtMemcpyBatchAttr *attr = &all->attrs[k];
    SOFT_TRY(check_location(attr->dstLoc));
    SOFT_TRY(check_location(attr->srcLoc));
    if (is_device(attr->dstLoc) == is_device(attr->srcLoc))
        return bad("a batch copies between host and device, one of them on each side");
    if (is_device(attr->dstLoc) != is_device(all->attrs[0].dstLoc))
        return bad("a batch copies in one direction");
    return ACL_SUCCESS;
}

static aclError check_sizes(const batch *all, size_t i)
{
    if (!all->dsts[i] || !all->srcs[i])
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "item %zu: %s is NULL", i, all->dsts[i] ? "src" : "dst");
    if (!all->sizes[i] || all->sizes[i] > all->dest_maxs[i])
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "item %zu: size %zu: want 1 to destMax (%zu)", i, all->sizes[i], all->dest_maxs[i]);
    return ACL_SUCCESS;
}

static aclError check_side(size_t i, const char *name, soft_spot spot, aclrtMemLocation where)
{
    if ((spot.place == SOFT_DEVICE) != is_device(where))
        return soft_error(ACL_ERROR_RT_INVALID_MEMORY_TYPE, "item %zu: %s is %s memory, but its attribute says %s", i, name,
                          spot.place == SOFT_DEVICE ? "device" : "host", is_device(where) ? "device" : "host");
    if (is_device(where) && spot.device != (int)where.id)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "item %zu: %s is on device %d, but its attribute says %u", i, name, spot.device,
                          where.id);
    return ACL_SUCCESS;
}

typedef struct found { uint64_t bytes; bool pageable; size_t offender; } found;   /* offender: of attribute and direction errors */

static aclError check_item(const batch *all, size_t i, const aclrtMemcpyBatchAttr *attr, found *out)
{
    soft_spot to, from;
    SOFT_TRY(check_sizes(all, i));
    SOFT_TRY(soft_place_of("dst", all->dsts[i], all->sizes[i], &to));
    SOFT_TRY(soft_place_of("src", all->srcs[i], all->sizes[i], &from));
    out->offender = i;
    SOFT_TRY(check_side(i, "dst", to, attr->dstLoc));
    SOFT_TRY(check_side(i, "src", from, attr->srcLoc));
    out->offender = SIZE_MAX;
    out->bytes += all->sizes[i];
    out->pageable |= to.place == SOFT_PAGEABLE || from.place == SOFT_PAGEABLE;
    return ACL_SUCCESS;
}

static aclError check_batch(const batch *all, found *out)
{
    *out = (found){ .offender = SIZE_MAX };
    SOFT_TRY(check_arrays(all));
    for (size_t i = 0, k = 0; i < all->count; i++) {
        k += k + 1 < all->nattrs && all->attr_indexes[k + 1] == i;
        if (i == all->attr_indexes[k]) {
            out->offender = i;
            SOFT_TRY(check_attr(all, k));
            out->offender = SIZE_MAX;
        }
        SOFT_TRY(check_item(all, i, &all->attrs[k], out));
    }
    return ACL_SUCCESS;
}

static aclError copy_now(const batch *all, size_t *fail_index)
{
    found facts = { .offender = SIZE_MAX };
    aclError code = soft_capture_refuses();
    if (code == ACL_SUCCESS)
        code = check_batch(all, &facts);
    if (fail_index)
        *fail_index = facts.offender;
    for (size_t i = 0; code == ACL_SUCCESS && i < all->count; i++)
        soft_copy(NULL, all->dsts[i], all->srcs[i], all->sizes[i], NULL);
    return code;
}

aclError aclrtMemcpyBatch(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs,
                          size_t *attrsIndexes, size_t numAttrs, size_t *failIndex)
{
    batch all = { dsts, destMaxs, srcs, sizes, numBatches, attrs, attrsIndexes, numAttrs };
    SOFT_TRY(soft_fault(__func__, NULL));
    return copy_now(&all, failIndex);
}

aclError aclrtMemcpyBatchV2(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs,
                            size_t *attrsIndexes, size_t numAttrs)
{
    batch all = { dsts, destMaxs, srcs, sizes, numBatches, attrs, attrsIndexes, numAttrs };
    SOFT_TRY(soft_fault(__func__, NULL));
    return copy_now(&all, NULL);
}

/* ---- in a stream ---- */

static aclError run(soft_task *task)
{
    batch_task *copies = (batch_task *)task;
    for (size_t i = 0; i < copies->count && !soft_task_aborted(task); i++)
        soft_copy(task, copies->items[i].dst, copies->items[i].src, copies->items[i].bytes,
                  i + 1 < copies->count ? copies->items[i + 1].src : NULL);
    return ACL_SUCCESS;
}

static void drop(soft_task *task)
{
    free(task);
}

static aclError submit(soft_stream *stream, const batch *all, soft_task task, bool pageable)
{
    batch_task *made = malloc(sizeof *made + all->count * sizeof *made->items);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    made->task = task;
    made->count = all->count;
    for (size_t i = 0; i < all->count; i++)
        made->items[i] = (item){ all->dsts[i], all->srcs[i], all->sizes[i] };
    return pageable ? soft_submit_wait(stream, &made->task) : soft_submit(stream, &made->task);
}

static aclError copy_in_stream(const batch *all, size_t *fail_index, soft_task task, aclrtStream handle)
{
    found facts = { .offender = SIZE_MAX };
    soft_stream *stream = NULL;
    aclError code = soft_stream_find(handle, &stream);
    if (code == ACL_SUCCESS)
        code = check_batch(all, &facts);
    if (fail_index)
        *fail_index = facts.offender;
    task.bytes = facts.bytes;
    if (code == ACL_SUCCESS)
        code = submit(stream, all, task, facts.pageable);
    if (stream)
        soft_stream_put(stream);
    return code;
}

aclError aclrtMemcpyBatchAsync(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs,
                               size_t *attrsIndexes, size_t numAttrs, size_t *failIndex, aclrtStream stream)
{
    batch all = { dsts, destMaxs, srcs, sizes, numBatches, attrs, attrsIndexes, numAttrs };
    soft_task task = { .function = __func__, .run = run, .drop = drop };
    SOFT_TRY(soft_fault(__func__, &task.fault));
    return copy_in_stream(&all, failIndex, task, stream);
}

aclError aclrtMemcpyBatchAsyncV2(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs,
                                 size_t *attrsIndexes, size_t numAttrs, aclrtStream stream)
{
    batch all = { dsts, destMaxs, srcs, sizes, numBatches, attrs, attrsIndexes, numAttrs };
    soft_task task = { .function = __func__, .run = run, .drop = drop };
    SOFT_TRY(soft_fault(__func__, &task.fault));
    return copy_in_stream(&all, NULL, task, stream);
}
