/* capture.c: streams that are captured. What is submitted to one does not run: it becomes part of a graph, which softnpu only
 * keeps. A wait for an event whose record is part of it pulls the waiting stream into the capture. While a global capture is
 * under way no thread of the context may make a synchronous copy. [src runtime api_impl.cc:1625-1643, 2162-2185, 2757;
 * api_error.cc:1484; context.cc:1232; context_aclgraph.cc:230]
 *
 * Its lock comes after a stream's.                                                                                   */
#include "runtime.h"
#include <stdlib.h>

struct soft_capture {
    soft_object object;
    aclmdlRI handle;
    aclmdlRICaptureMode mode;
    pthread_t thread;                                       /* that began it */
    soft_context *context;                                  /* a reference */
    pthread_mutex_t lock;                                   /* everything below */
    bool active;
    soft_stream **streams;                                  /* references; the first one is its origin */
    size_t count;
    soft_task *head, **tail;                                /* the graph */
};

static _Thread_local unsigned thread_captures;              /* thread-local ones that this thread began */

static void destroy(soft_object *object)
{
    soft_capture *capture = (soft_capture *)object;         /* its first member */
    for (soft_task *task = capture->head, *next; task; task = next) {
        next = task->next;
        task->drop(task);
    }
    free(capture->streams);
    pthread_mutex_destroy(&capture->lock);
    soft_unref(&capture->context->object);
    free(capture);
}

void soft_capture_take(soft_capture *capture, soft_task *task)
{
    pthread_mutex_lock(&capture->lock);
    *capture->tail = task;
    capture->tail = &task->next;
    pthread_mutex_unlock(&capture->lock);
}

soft_capture *soft_capture_of(soft_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    soft_capture *capture = stream->capture;
    if (capture)
        soft_ref(&capture->object);
    pthread_mutex_unlock(&stream->lock);
    return capture;
}

bool soft_capture_is_active(soft_capture *capture)
{
    if (!capture)
        return false;
    pthread_mutex_lock(&capture->lock);
    bool active = capture->active;
    pthread_mutex_unlock(&capture->lock);
    return active;
}

/* The stream's lock is not held. */
static aclError enter(soft_capture *capture, soft_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    pthread_mutex_lock(&capture->lock);
    soft_stream **streams = realloc(capture->streams, (capture->count + 1) * sizeof *streams);
    bool other = stream->capture && stream->capture != capture, is_in = stream->capture == capture;
    if (streams)
        capture->streams = streams;
    bool goes_in = streams && capture->active && !stream->capture;
    if (goes_in) {
        streams[capture->count++] = stream;
        soft_ref(&stream->object);
        soft_ref(&capture->object);
        stream->capture = capture;
    }
    pthread_mutex_unlock(&capture->lock);
    pthread_mutex_unlock(&stream->lock);
    if (other)
        return soft_error(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured into another graph", stream->id);
    return goes_in || is_in ? ACL_SUCCESS : soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a graph");
}

aclError soft_capture_join(soft_capture *capture, soft_stream *stream)
{
    return soft_capture_is_active(capture) ? enter(capture, stream) : ACL_SUCCESS;
}

aclError soft_capture_refuse_stream(soft_stream *stream)
{
    soft_capture *capture = soft_capture_of(stream);
    if (!capture)
        return ACL_SUCCESS;
    soft_unref(&capture->object);
    return soft_error(ACL_ERROR_RT_STREAM_CAPTURED, "stream %d is captured into a graph: it can be neither waited for nor asked",
                      stream->id);
}

aclError soft_capture_refuses(void)
{
    soft_context *context;
    SOFT_TRY(soft_context_current(&context));
    bool refused = thread_captures || atomic_load(&context->captures);
    soft_unref(&context->object);
    if (!refused)
        return ACL_SUCCESS;
    return soft_error(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a graph is captured: no synchronous call is possible meanwhile");
}

static soft_capture *create(aclmdlRICaptureMode mode, soft_context *context)
{
    soft_capture *capture = calloc(1, sizeof *capture);
    if (!capture)
        return NULL;
    *capture = (soft_capture){ .object = { 1, destroy }, .mode = mode, .thread = pthread_self(), .context = context, .active = true };
    capture->tail = &capture->head;
    soft_ref(&context->object);
    pthread_mutex_init(&capture->lock, NULL);
    capture->handle = soft_handle_new(SOFT_GRAPH, &capture->object);       /* takes the reference over */
    if (capture->handle)
        return capture;
    soft_unref(&capture->object);
    return NULL;
}

static void count(const soft_capture *capture, int more)
{
    if (capture->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL)
        atomic_fetch_add(&capture->context->captures, (unsigned)more);
    else if (capture->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL)
        thread_captures += (unsigned)more;
}

static void forget(soft_capture *capture)
{
    if (soft_handle_remove(SOFT_GRAPH, capture->handle))
        soft_unref(&capture->object);
}

static aclError begin(soft_stream *stream, aclmdlRICaptureMode mode)
{
    SOFT_TRY(soft_capture_refuse_stream(stream));
    soft_capture *capture = create(mode, stream->context);
    if (!capture)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a graph");
    aclError code = enter(capture, stream);
    if (code)
        forget(capture);
    else
        count(capture, 1);
    return code;
}

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode)
{
    soft_stream *found;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (mode < ACL_MODEL_RI_CAPTURE_MODE_GLOBAL || mode > ACL_MODEL_RI_CAPTURE_MODE_RELAXED)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "capture mode %d: want 0 to 2", (int)mode);
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = begin(found, mode);
    soft_stream_put(found);
    return code;
}

aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *modelRI)
{
    soft_stream *found;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!status || !modelRI)
        return soft_null(status ? "modelRI" : "status");
    SOFT_TRY(soft_stream_find(stream, &found));
    soft_capture *capture = soft_capture_of(found);
    *status = capture ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    *modelRI = capture ? capture->handle : NULL;
    if (capture)
        soft_unref(&capture->object);
    soft_stream_put(found);
    return ACL_SUCCESS;
}

/* Lets go of all streams. How many there were. */
static size_t release_all(soft_capture *capture)
{
    pthread_mutex_lock(&capture->lock);
    soft_stream **streams = capture->streams;
    size_t count = capture->count;
    capture->active = false;
    capture->streams = NULL;
    capture->count = 0;
    pthread_mutex_unlock(&capture->lock);
    for (size_t i = 0; i < count; i++) {
        pthread_mutex_lock(&streams[i]->lock);
        streams[i]->capture = NULL;
        pthread_mutex_unlock(&streams[i]->lock);
        soft_stream_put(streams[i]);
        soft_unref(&capture->object);
    }
    free(streams);
    return count;
}

static bool begun_on(soft_capture *capture, const soft_stream *stream)
{
    pthread_mutex_lock(&capture->lock);
    bool is_origin = capture->active && capture->streams[0] == stream;
    pthread_mutex_unlock(&capture->lock);
    return is_origin;
}

/* A stream that was pulled in spoils the graph. (The vendor forgives it if the origin then waits for it, which is not modelled.) */
static aclError end(soft_stream *stream, aclmdlRI *out)
{
    soft_capture *capture = soft_capture_of(stream);
    if (!capture)
        return soft_error(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "stream %d is not captured", stream->id);
    if (!begun_on(capture, stream)) {
        soft_unref(&capture->object);
        return soft_error(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED, "stream %d was pulled into a capture that another one began", stream->id);
    }
    size_t streams = release_all(capture);
    count(capture, -1);
    *out = streams > 1 ? NULL : capture->handle;
    if (streams > 1)
        forget(capture);
    soft_unref(&capture->object);
    if (streams > 1)
        return soft_error(ACL_ERROR_RT_STREAM_UNJOINED, "%zu other streams were pulled into the capture", streams - 1);
    return ACL_SUCCESS;
}

aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI)
{
    soft_stream *found;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!modelRI)
        return soft_null("modelRI");
    SOFT_TRY(soft_stream_find(stream, &found));
    aclError code = end(found, modelRI);
    soft_stream_put(found);
    return code;
}

aclError aclmdlRIDestroy(aclmdlRI modelRI)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!modelRI)
        return soft_null("modelRI");
    soft_capture *found = soft_handle_get(SOFT_GRAPH, modelRI);
    if (!found)
        return soft_bad_handle("graph", modelRI);
    bool active = soft_capture_is_active(found);
    if (!active)
        forget(found);
    soft_unref(&found->object);
    return active ? soft_error(ACL_ERROR_RT_STREAM_CAPTURED, "the graph is still being captured") : ACL_SUCCESS;
}
