/* stream_find.c: from the handle that a caller gave to the stream, if the calling thread may use it. */
#include "runtime.h"

static aclError find_default(soft_stream **out)
{
    soft_context *context;
    SOFT_TRY(soft_context_current(&context));
    *out = soft_handle_get(SOFT_STREAM, context->default_stream);
    soft_unref(&context->object);
    return *out ? ACL_SUCCESS : soft_error(ACL_ERROR_RT_CONTEXT_NULL, "this thread's context is being destroyed");
}

aclError soft_stream_find(aclrtStream handle, soft_stream **out)
{
    if (!handle)
        return find_default(out);
    *out = soft_handle_get(SOFT_STREAM, handle);
    if (*out && (*out)->context->handle == soft_context_handle())
        return ACL_SUCCESS;
    aclError code = soft_context_need();
    if (code == ACL_SUCCESS && *out)
        code = soft_error(ACL_ERROR_RT_STREAM_CONTEXT, "stream %d belongs to another context than this thread's", (*out)->id);
    if (*out)
        soft_stream_put(*out);
    *out = NULL;
    return code ? code : soft_bad_handle("stream", handle);
}

soft_stream *soft_stream_get(aclrtStream handle)
{
    soft_stream *stream;
    return soft_stream_find(handle, &stream) == ACL_SUCCESS ? stream : NULL;
}

void soft_stream_put(soft_stream *stream)
{
    soft_unref(&stream->object);
}
