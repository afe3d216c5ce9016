/* context.c: owners of streams, each of one device: making, ending and choosing them.
 *
 * Default contexts live from the first aclrtSetDevice of a device to the last aclrtResetDevice (primary.c).          */
#include "runtime.h"
#include <stdlib.h>

static void destroy(soft_object *object)
{
    free(object);                                           /* its first member */
}

/* From here on no stream is made in it. True for the one caller that must do the rest. */
static bool start_closing(soft_context *context)
{
    soft_device *device = context->device;
    pthread_mutex_lock(&device->lock);
    bool first = !context->closing;
    context->closing = true;
    soft_context **at = &device->contexts;
    while (*at && *at != context)
        at = &(*at)->next_in_device;
    if (*at)
        *at = context->next_in_device;
    pthread_mutex_unlock(&device->lock);
    return first;
}

aclError soft_context_new(soft_device *device, bool primary, soft_context **out)
{
    soft_context *context = calloc(1, sizeof *context);
    if (!context)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a context");
    context->object = (soft_object){ .refs = 1, .destroy = destroy };
    context->device = device;
    context->primary = primary;
    context->handle = soft_handle_new(SOFT_CONTEXT, &context->object);
    if (!context->handle) {
        free(context);
        return soft_error(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "no handle left for a context");
    }
    soft_ref(&context->object);                             /* ours, besides the table's */
    pthread_mutex_lock(&device->lock);
    context->next_in_device = device->contexts;
    device->contexts = context;
    pthread_mutex_unlock(&device->lock);
    soft_stream *stream;
    aclError code = soft_stream_new(context, &stream);
    if (code) {
        soft_context_close(context, true);
        return code;
    }
    context->default_stream = stream->handle;
    soft_stream_put(stream);
    *out = context;
    return ACL_SUCCESS;
}

void soft_context_close(soft_context *context, bool force)
{
    if (start_closing(context)) {
        size_t count;
        soft_stream **streams = soft_device_streams(context->device, context, &count);
        for (size_t i = 0; i < count; i++) {
            soft_stream_close(streams[i], force);
            soft_stream_put(streams[i]);
        }
        free(streams);
        if (soft_handle_remove(SOFT_CONTEXT, context->handle))
            soft_unref(&context->object);
    }
    soft_unref(&context->object);
}

aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!context)
        return soft_null("context");
    SOFT_TRY(soft_device_check(deviceId));
    soft_context *made;
    SOFT_TRY(soft_context_new(soft_device_of(deviceId), false, &made));
    *context = made->handle;
    soft_context_bind(made->handle);
    soft_unref(&made->object);
    return ACL_SUCCESS;
}

aclError aclrtDestroyContext(aclrtContext context)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!context)
        return soft_null("context");
    SOFT_TRY(soft_queue_outside());
    soft_context *found = soft_handle_get(SOFT_CONTEXT, context);
    if (!found)
        return soft_bad_handle("context", context);
    if (found->primary) {
        soft_unref(&found->object);
        return soft_error(ACL_ERROR_RT_CONTEXT_RELEASE_ERROR, "a default context ends with aclrtResetDevice, it cannot be destroyed");
    }
    soft_context_close(found, false);
    if (soft_context_handle() == context)
        soft_context_bind(NULL);
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!context)
        return soft_null("context");
    soft_context *found = soft_handle_get(SOFT_CONTEXT, context);
    if (!found)
        return soft_bad_handle("context", context);
    soft_unref(&found->object);
    soft_context_bind(context);
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!context)
        return soft_null("context");
    SOFT_TRY(soft_context_need());
    *context = soft_context_handle();
    return ACL_SUCCESS;
}

aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *stream)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!stream)
        return soft_null("stream");
    soft_stream *found;
    SOFT_TRY(soft_stream_find(NULL, &found));
    *stream = found->handle;
    soft_stream_put(found);
    return ACL_SUCCESS;
}
