/* stream_wait.c: waiting for a stream's work, asking about it, ending it. queue.c tells what an abort promises. */
#include "runtime.h"
#include <sys/eventfd.h>
#include <unistd.h>

void soft_queue_init(soft_stream *stream)
{
    pthread_mutex_init(&stream->lock, NULL);
    soft_cond_init(&stream->work);
    soft_cond_init(&stream->progress);
    stream->tail = &stream->head;
    stream->abort_fd = -1;
}

void soft_queue_destroy(soft_stream *stream)
{
    if (stream->abort_fd >= 0)
        close(stream->abort_fd);
    pthread_cond_destroy(&stream->work);
    pthread_cond_destroy(&stream->progress);
    pthread_mutex_destroy(&stream->lock);
}

/* ---- waiting ---- */

aclError soft_queue_aborted(const soft_stream *stream)
{
    return soft_error(stream->abort_code, "stream %d was aborted", stream->id);
}

/* Locked. Until task `number` and all before it finished, or an abort ended them and has taken effect. */
aclError soft_queue_await(soft_stream *stream, uint64_t number, uint64_t aborts, const struct timespec *deadline)
{
    for (bool late = false; ; late = pthread_cond_timedwait(&stream->progress, &stream->lock, deadline) != 0) {
        bool ended = stream->aborts != aborts;
        if (ended && !stream->dropping && !atomic_load_explicit(&stream->abort_running, memory_order_relaxed))
            return soft_queue_aborted(stream);
        if (!ended && stream->finished >= number)
            return ACL_SUCCESS;
        if (late)
            return soft_error(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d: %llu of %llu tasks not finished in time; they continue",
                              stream->id, (unsigned long long)(stream->submitted - stream->finished), (unsigned long long)stream->submitted);
    }
}

static aclError take_failure(soft_stream *stream)           /* locked; reported once, unless the stream stopped for good */
{
    aclError code = stream->failure;
    if (!code)
        return ACL_SUCCESS;
    soft_error(code, "%s", stream->failure_text);
    if (!stream->stopped)
        stream->failure = ACL_SUCCESS;
    return code;
}

aclError soft_queue_refuse_inside(const soft_stream *stream)
{
    if (soft_queue_inside() == stream)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "stream %d: a callback running on a stream cannot wait for that stream", stream->id);
    return ACL_SUCCESS;
}

aclError soft_queue_outside(void)
{
    if (soft_queue_inside())
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "a callback running on a stream cannot end a context, a device or the runtime");
    return ACL_SUCCESS;
}

aclError soft_queue_wait(soft_stream *stream, const struct timespec *deadline)
{
    SOFT_TRY(soft_queue_refuse_inside(stream));
    SOFT_TRY(soft_capture_refuse_stream(stream));
    pthread_mutex_lock(&stream->lock);
    aclError code = soft_queue_await(stream, stream->submitted, stream->aborts, deadline);
    if (code == ACL_SUCCESS)
        code = take_failure(stream);
    pthread_mutex_unlock(&stream->lock);
    return code;
}

/* With SOFTNPU_STRICT a query compares two counters and tells no failure, unless the context stops on failures: that it tells.
 * [src runtime api_impl.cc:1767-1785 StreamQuery, stream.cc:2119-2160 Query] */
static bool query_tells(const soft_stream *stream)
{
    return !soft_is_strict() || stream->context->stop_on_failure;
}

aclError soft_queue_query(soft_stream *stream, aclrtStreamStatus *status)
{
    SOFT_TRY(soft_capture_refuse_stream(stream));
    pthread_mutex_lock(&stream->lock);
    *status = stream->finished == stream->submitted ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    aclError code = query_tells(stream) ? take_failure(stream) : ACL_SUCCESS;
    pthread_mutex_unlock(&stream->lock);
    return code;
}

/* ---- ending ---- */

static void signal_abort(soft_stream *stream)               /* locked */
{
    atomic_store_explicit(&stream->abort_running, true, memory_order_relaxed);
    if (stream->abort_fd >= 0)
        eventfd_write(stream->abort_fd, 1);
}

void soft_queue_abort(soft_stream *stream, aclError code)
{
    pthread_mutex_lock(&stream->lock);
    soft_task *list = soft_queue_detach(stream);
    if (stream->running && !atomic_load_explicit(&stream->abort_running, memory_order_relaxed))
        signal_abort(stream);
    if (list || stream->running || stream->dropping || stream->failure) {  /* a thread that waits for any of this hears of the abort */
        stream->aborts++;
        stream->abort_code = code;
    }
    stream->failure = ACL_SUCCESS;
    stream->stopped = false;
    pthread_cond_broadcast(&stream->progress);
    pthread_mutex_unlock(&stream->lock);
    soft_queue_drop(stream, list);
}

aclError soft_queue_close(soft_stream *stream, bool force)
{
    SOFT_TRY(soft_queue_refuse_inside(stream));
    pthread_mutex_lock(&stream->lock);
    bool first = !stream->closing;
    stream->closing = true;
    pthread_mutex_unlock(&stream->lock);
    if (!first)
        return soft_error(ACL_ERROR_RT_INVALID_HANDLE, "stream %d is being destroyed already", stream->id);
    if (force)
        soft_queue_abort(stream, ACL_ERROR_RT_STREAM_ABORT);
    pthread_mutex_lock(&stream->lock);
    while (stream->finished < stream->submitted)
        pthread_cond_wait(&stream->progress, &stream->lock);
    pthread_cond_signal(&stream->work);
    pthread_mutex_unlock(&stream->lock);
    if (stream->has_worker)
        pthread_join(stream->worker, NULL);
    return ACL_SUCCESS;
}
