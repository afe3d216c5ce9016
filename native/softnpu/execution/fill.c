/* fill.c: aclrtMemset, now or in a stream. */
#include "runtime.h"
#include <stdlib.h>

typedef struct fill_task {
    soft_task task;
    void *dst;
    int value;
} fill_task;

static aclError run(soft_task *task)
{
    fill_task *fill = (fill_task *)task;
    soft_fill(task, fill->dst, fill->value, task->bytes);
    return ACL_SUCCESS;
}

static void drop(soft_task *task)
{
    free(task);
}

static aclError check(const void *devPtr, size_t maxCount, size_t count)
{
    soft_spot spot;
    if (!count || count > maxCount)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "count %zu: want 1 to maxCount (%zu)", count, maxCount);
    SOFT_TRY(soft_place_of("devPtr", devPtr, count, &spot));
    if (spot.place == SOFT_PAGEABLE)
        return soft_error(ACL_ERROR_RT_INVALID_MEMORY_TYPE, "devPtr %p: the runtime did not allocate this memory, setting it is undefined",
                          devPtr);
    return ACL_SUCCESS;
}

aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(soft_capture_refuses());
    SOFT_TRY(check(devPtr, maxCount, count));
    soft_fill(NULL, devPtr, value, count);
    return ACL_SUCCESS;
}

static aclError submit(fill_task fill, soft_stream *stream)
{
    fill_task *made = malloc(sizeof *made);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    *made = fill;
    return soft_submit(stream, &made->task);
}

aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream)
{
    fill_task fill = { .task = { .function = __func__, .run = run, .drop = drop, .bytes = count }, .dst = devPtr, .value = value };
    SOFT_TRY(soft_fault(__func__, &fill.task.fault));
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = check(devPtr, maxCount, count);
    if (code == ACL_SUCCESS)
        code = submit(fill, found);
    soft_stream_put(found);
    return code;
}
