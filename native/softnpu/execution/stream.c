/* stream.c: the stream calls: creation, synchronization and end. */
#include "runtime.h"
#include <stdlib.h>

static void destroy(soft_object *object)
{
    soft_stream *stream = (soft_stream *)object;            /* its first member */
    soft_queue_destroy(stream);
    soft_unref(&stream->context->object);
    free(stream);
}

/* Enters the stream into its device's list, unless the device is full or the context is closing. */
static aclError link_stream(soft_stream *stream)
{
    soft_device *device = stream->context->device;
    aclError code = ACL_SUCCESS;
    pthread_mutex_lock(&device->lock);
    if (stream->context->closing)
        code = soft_error(ACL_ERROR_RT_CONTEXT_NULL, "this thread's context is being destroyed");
    else if (device->nstreams >= soft_setting.max_streams)
        code = soft_error(ACL_ERROR_RT_NO_STREAM_RESOURCE, "device %d has %u streams, the limit (SOFTNPU_MAX_STREAMS; default streams "
                          "count)", device->id, device->nstreams);
    else {
        stream->next_in_device = device->streams;
        device->streams = stream;
        device->nstreams++;
    }
    pthread_mutex_unlock(&device->lock);
    return code;
}

static void unlink_stream(soft_stream *stream)
{
    soft_device *device = stream->context->device;
    pthread_mutex_lock(&device->lock);
    soft_stream **at = &device->streams;
    while (*at != stream)
        at = &(*at)->next_in_device;
    *at = stream->next_in_device;
    device->nstreams--;
    pthread_mutex_unlock(&device->lock);
}

soft_stream **soft_device_streams(soft_device *device, const soft_context *only, size_t *count)
{
    *count = 0;
    pthread_mutex_lock(&device->lock);
    soft_stream **list = malloc((device->nstreams + 1) * sizeof *list);
    for (soft_stream *stream = device->streams; list && stream; stream = stream->next_in_device) {
        if (only && stream->context != only)
            continue;
        soft_ref(&stream->object);
        list[(*count)++] = stream;
    }
    pthread_mutex_unlock(&device->lock);
    return list;
}

aclError soft_stream_new(soft_context *context, soft_stream **out)
{
    static atomic_int ids;
    soft_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a stream");
    stream->object = (soft_object){ .refs = 1, .destroy = destroy };
    stream->id = atomic_fetch_add(&ids, 1);
    stream->context = context;
    soft_ref(&context->object);
    soft_queue_init(stream);
    soft_ref(&stream->object);                              /* the table's, besides the caller's */
    stream->handle = soft_handle_new(SOFT_STREAM, &stream->object);
    aclError code = stream->handle ? link_stream(stream) : soft_error(ACL_ERROR_RT_NO_STREAM_RESOURCE, "no handle left for a stream");
    if (code == ACL_SUCCESS) {
        *out = stream;
        return ACL_SUCCESS;
    }
    if (stream->handle)
        soft_handle_remove(SOFT_STREAM, stream->handle);
    soft_unref(&stream->object);
    soft_unref(&stream->object);
    return code;
}

aclError soft_stream_close(soft_stream *stream, bool force)
{
    SOFT_TRY(soft_queue_close(stream, force));
    soft_handle_remove(SOFT_STREAM, stream->handle);        /* only now: until here an abort can still reach it */
    unlink_stream(stream);
    soft_reporter_forget(stream);
    soft_unref(&stream->object);
    return ACL_SUCCESS;
}

static aclError create(aclrtStream *stream)
{
    if (!stream)
        return soft_null("stream");
    soft_context *context;
    soft_stream *made;
    SOFT_TRY(soft_context_current(&context));
    aclError code = soft_stream_new(context, &made);
    soft_unref(&context->object);
    if (code)
        return code;
    *stream = made->handle;
    soft_stream_put(made);
    return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream *stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return create(stream);
}

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (priority > 7)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "priority %u: want 0 to 7", priority);
    if (flag & ~(uint32_t)(ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "flag %#x: known are FAST_LAUNCH (0x1) and FAST_SYNC (0x2)", flag);
    return create(stream);                                  /* both flags buy speed with resources; we have no use for them */
}

static aclError destroy_stream(aclrtStream handle, bool force)
{
    if (!handle)
        return soft_null("stream");
    soft_stream *stream;
    SOFT_TRY(soft_stream_find(handle, &stream));
    aclError code = handle == stream->context->default_stream
        ? soft_error(ACL_ERROR_RT_PARAM_INVALID, "a default stream ends with its context, it cannot be destroyed")
        : soft_stream_close(stream, force);
    soft_stream_put(stream);
    return code;
}

aclError aclrtDestroyStream(aclrtStream stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return destroy_stream(stream, false);
}

aclError aclrtDestroyStreamForce(aclrtStream stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return destroy_stream(stream, true);
}

static aclError synchronize(aclrtStream handle, int32_t timeout)
{
    if (timeout < -1)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "timeout %d: want milliseconds, or -1 for no limit", timeout);
    soft_stream *stream;
    SOFT_TRY(soft_stream_find(handle, &stream));
    struct timespec deadline;
    soft_deadline(&deadline, timeout);
    aclError code = soft_queue_wait(stream, &deadline);
    soft_stream_put(stream);
    return soft_count_timeout(code);
}

aclError aclrtSynchronizeStream(aclrtStream stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return synchronize(stream, -1);
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return synchronize(stream, timeout);
}

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!status)
        return soft_null("status");
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = soft_queue_query(found, status);
    soft_stream_put(found);
    return code;
}

aclError aclrtStreamAbort(aclrtStream stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    soft_queue_abort(found, ACL_ERROR_RT_STREAM_ABORT);
    soft_stream_put(found);
    return ACL_SUCCESS;
}

static aclError set_mode(soft_stream *stream, bool stop)
{
    pthread_mutex_lock(&stream->lock);
    bool first = !stream->mode_set;
    stream->mode_set = true;
    pthread_mutex_unlock(&stream->lock);
    if (!first)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "stream %d: the failure mode can be set once", stream->id);
    if (stop)
        stream->context->stop_on_failure = true;
    return ACL_SUCCESS;
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (mode > ACL_STOP_ON_FAILURE)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "failure mode %llu: want 0 (continue) or 1 (stop)", (unsigned long long)mode);
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = set_mode(found, mode == ACL_STOP_ON_FAILURE);
    soft_stream_put(found);
    return code;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!streamId)
        return soft_null("streamId");
    soft_stream *found;
    SOFT_TRY(soft_stream_find(stream, &found));
    *streamId = found->id;
    soft_stream_put(found);
    return ACL_SUCCESS;
}
