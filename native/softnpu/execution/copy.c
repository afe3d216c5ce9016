/* copy.c: one copy, now or in a stream.
 *
 * The synchronous copy looks at the pointers and ignores the kind. The asynchronous one believes the kind, so a kind
 * that the pointers contradict is refused: on a device it would be followed. With pageable host memory an asynchronous
 * copy is complete when the call returns, because no page of it is pinned.                             */
#include "runtime.h"
#include <stdlib.h>

typedef struct copy_task {
    soft_task task;
    void *dst;
    const void *src;
    bool pageable;
} copy_task;

/* Memory may have been freed while the task was queued. A device finds that out when it copies. */
static aclError still_there(const char *name, const void *addr, uint64_t bytes)
{
    if (soft_span_of(addr, bytes, NULL))
        return ACL_SUCCESS;
    return soft_error(ACL_ERROR_RT_COPY_DATA, "%s at %p was freed before the copy ran", name, (void *)(uintptr_t)addr);
}

static aclError run(soft_task *task)
{
    copy_task *copy = (copy_task *)task;
    if (!copy->pageable) {
        SOFT_TRY(still_there("dst", copy->dst, task->bytes));
        SOFT_TRY(still_there("src", copy->src, task->bytes));
    }
    soft_copy(task, copy->dst, copy->src, task->bytes, NULL);
    return ACL_SUCCESS;
}

static void drop(soft_task *task)
{
    free(task);
}

static aclError check_sizes(size_t destMax, size_t count)
{
    if (!count)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "count is 0: a copy has at least one byte");
    if (count > destMax)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "count %zu is more than destMax %zu", count, destMax);
    return ACL_SUCCESS;
}

static aclError find_places(const void *dst, const void *src, size_t count, soft_spot *to, soft_spot *from)
{
    SOFT_TRY(soft_place_of("dst", dst, count, to));
    return soft_place_of("src", src, count, from);
}

aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind)
{
    (void)kind;
    soft_spot to, from;
    SOFT_TRY(soft_fault(__func__, NULL));
    SOFT_TRY(check_sizes(destMax, count));
    SOFT_TRY(soft_capture_refuses());
    SOFT_TRY(find_places(dst, src, count, &to, &from));
    soft_copy(NULL, dst, src, count, NULL);
    return ACL_SUCCESS;
}

static aclError want(const char *name, soft_spot spot, bool device)
{
    if ((spot.place == SOFT_DEVICE) == device)
        return ACL_SUCCESS;
    return soft_error(ACL_ERROR_RT_INVALID_MEMORY_TYPE, "%s is %s memory, but the kind says %s", name, device ? "host" : "device",
                      device ? "device" : "host");
}

static aclError check_kind(aclrtMemcpyKind kind, soft_spot to, soft_spot from)
{
    bool both_host = to.place != SOFT_DEVICE && from.place != SOFT_DEVICE;
    switch (kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE:
    case ACL_MEMCPY_DEVICE_TO_HOST:
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
        SOFT_TRY(want("dst", to, kind != ACL_MEMCPY_DEVICE_TO_HOST));
        return want("src", from, kind != ACL_MEMCPY_HOST_TO_DEVICE);
    case ACL_MEMCPY_DEFAULT:
        if (!both_host)
            return ACL_SUCCESS;
        /* fall through */
    case ACL_MEMCPY_HOST_TO_HOST:
        return soft_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "an asynchronous copy from host to host is not supported");
    }
    return soft_error(ACL_ERROR_RT_PARAM_INVALID, "copy kind %d: want 0 to 4", (int)kind);
}

static aclError submit(soft_stream *stream, copy_task copy)
{
    copy_task *made = malloc(sizeof *made);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    *made = copy;
    return copy.pageable ? soft_submit_wait(stream, &made->task) : soft_submit(stream, &made->task);
}

static aclError copy_async(copy_task copy, size_t destMax, aclrtMemcpyKind kind, aclrtStream handle)
{
    soft_spot to, from;
    soft_stream *stream;
    SOFT_TRY(check_sizes(destMax, copy.task.bytes));
    SOFT_TRY(soft_stream_find(handle, &stream));
    aclError code = find_places(copy.dst, copy.src, copy.task.bytes, &to, &from);
    if (code == ACL_SUCCESS)
        code = check_kind(kind, to, from);
    copy.pageable = to.place == SOFT_PAGEABLE || from.place == SOFT_PAGEABLE;
    if (code == ACL_SUCCESS)
        code = submit(stream, copy);
    soft_stream_put(stream);
    return code;
}

aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream)
{
    copy_task copy = { .task = { .function = __func__, .run = run, .drop = drop, .bytes = count }, .dst = dst, .src = src };
    SOFT_TRY(soft_fault(__func__, &copy.task.fault));
    return copy_async(copy, destMax, kind, stream);
}

/* Undocumented. Taken for what its name and its users suggest: the same copy, where the runtime checks what is needed. */
aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream)
{
    copy_task copy = { .task = { .function = __func__, .run = run, .drop = drop, .bytes = count }, .dst = dst, .src = src };
    SOFT_TRY(soft_fault(__func__, &copy.task.fault));
    return copy_async(copy, destMax, kind, stream);
}
