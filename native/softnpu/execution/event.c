/* event.c: events. A record makes a new fence and sends a task down the stream to set it; a wait or a query refers to the
 * fence of the latest record. So recording again, or destroying an event that is not complete, disturbs no waiter.
 *
 * When an abort drops a record its fence is lost: queries keep answering "not ready", host waits end with 107023, and
 * streams that wait for it keep waiting until they are aborted, too, as on a device.                                  */
#include "runtime.h"
#include <stdlib.h>

#define ALL_FLAGS ((uint32_t)(ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS | ACL_EVENT_TIME_LINE))

typedef struct event_task { soft_task task; soft_fence *fence; } event_task;

static void destroy(soft_object *object)
{
    soft_event *event = (soft_event *)object;               /* its first member */
    if (event->latest)
        soft_unref(&event->latest->object);
    if (event->shared)
        soft_unref(&event->shared->object);
    if (event->capture)
        soft_unref((soft_object *)event->capture);
    pthread_mutex_destroy(&event->lock);
    free(event);
}

aclError soft_event_new(uint32_t flags, bool extended, bool imported, soft_shared_event *shared, aclrtEvent *handle)
{
    soft_event *event = calloc(1, sizeof *event);
    if (!event)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for an event");
    event->object = (soft_object){ .refs = 1, .destroy = destroy };
    event->flags = flags;
    event->extended = extended;
    event->imported = imported;
    event->shared = shared;
    pthread_mutex_init(&event->lock, NULL);
    void *made = soft_handle_new(SOFT_EVENT, &event->object);
    if (!made) {
        event->shared = NULL;                               /* the caller's again */
        soft_unref(&event->object);
        return soft_error(ACL_ERROR_RT_NO_EVENT_RESOURCE, "no handle left for an event");
    }
    *handle = made;
    return ACL_SUCCESS;
}

soft_event *soft_event_get(aclrtEvent handle, aclError *code)
{
    soft_event *event = handle ? soft_handle_get(SOFT_EVENT, handle) : NULL;
    *code = event ? ACL_SUCCESS : handle ? soft_bad_handle("event", handle) : soft_null("event");
    return event;
}

static aclError create(aclrtEvent *event, uint32_t flags, bool extended)
{
    soft_shared_event *shared = NULL;
    if (!event)
        return soft_null("event");
    if (!flags || (flags & ~ALL_FLAGS && flags != ACL_EVENT_IPC))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "event flag %#x: want SYNC (0x1), CAPTURE_STREAM_PROGRESS (0x2), TIME_LINE "
                          "(0x8) in any mixture, or IPC (0x40) alone", flags);
    SOFT_TRY(soft_context_need());
    if (flags == ACL_EVENT_IPC)
        SOFT_TRY(soft_shared_event_new(-1, &shared));
    aclError code = soft_event_new(flags, extended, false, shared, event);
    if (code && shared)
        soft_unref(&shared->object);
    return code;
}

aclError aclrtCreateEvent(aclrtEvent *event)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return create(event, ALL_FLAGS, false);
}

aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return create(event, flag, false);
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return create(event, flag, true);
}

aclError aclrtDestroyEvent(aclrtEvent event)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!event)
        return soft_null("event");
    SOFT_TRY(soft_context_need());
    soft_event *found = soft_handle_remove(SOFT_EVENT, event);
    if (!found)
        return soft_bad_handle("event", event);
    pthread_mutex_lock(&found->lock);
    uint64_t key = found->key;
    pthread_mutex_unlock(&found->lock);
    if (key)
        soft_share_withdraw(key);
    soft_unref(&found->object);
    return ACL_SUCCESS;
}

/* ---- record and reset ---- */

static aclError run_record(soft_task *task)
{
    soft_fence_set(((event_task *)task)->fence, SOFT_DONE);
    return ACL_SUCCESS;
}

static void drop_record(soft_task *task)
{
    soft_fence *fence = ((event_task *)task)->fence;
    soft_fence_set(fence, SOFT_LOST);                       /* unless it is done */
    soft_unref(&fence->object);
    free(task);
}

static void set_latest(soft_event *event, soft_fence *fence)  /* takes the reference over */
{
    pthread_mutex_lock(&event->lock);
    soft_fence *before = event->latest;
    event->latest = fence;
    pthread_mutex_unlock(&event->lock);
    if (before)
        soft_unref(&before->object);
}

static soft_fence *shared_fence(soft_event *event, uint64_t number)
{
    soft_fence *fence = soft_fence_new();
    if (!fence)
        return NULL;
    fence->shared = event->shared;
    soft_ref(&event->shared->object);
    fence->number = number;
    return fence;
}

aclError soft_event_latest(soft_event *event, soft_fence **out)
{
    uint64_t number = event->shared ? soft_shared_event_latest(event->shared) : 0;
    if (event->shared) {
        *out = number ? shared_fence(event, number) : NULL;
        return number && !*out ? soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for an event") : ACL_SUCCESS;
    }
    pthread_mutex_lock(&event->lock);
    *out = event->latest;
    if (*out)
        soft_ref(&(*out)->object);
    pthread_mutex_unlock(&event->lock);
    return ACL_SUCCESS;
}

static aclError submit(soft_stream *stream, event_task value)
{
    event_task *made = malloc(sizeof *made);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    *made = value;
    soft_ref(&value.fence->object);
    return soft_submit(stream, &made->task);
}

/* Looks up what the two handles name, and holds both while `act` makes a task of it. */
static aclError with_both(aclrtEvent event, aclrtStream stream, soft_task task,
                          aclError (*act)(soft_event *, soft_stream *, soft_task))
{
    aclError code;
    soft_stream *on;
    SOFT_TRY(soft_fault(task.function, &task.fault));
    soft_event *found = soft_event_get(event, &code);
    if (!found)
        return code;
    code = soft_stream_find(stream, &on);
    if (code == ACL_SUCCESS) {
        code = act(found, on, task);
        soft_stream_put(on);
    }
    soft_unref(&found->object);
    return code;
}

/* Whether the record about to be made is part of a graph. */
static void set_capture(soft_event *event, soft_stream *stream)
{
    soft_capture *capture = soft_capture_of(stream);
    pthread_mutex_lock(&event->lock);
    soft_capture *before = event->capture;
    event->capture = capture;
    pthread_mutex_unlock(&event->lock);
    if (before)
        soft_unref((soft_object *)before);
}

soft_capture *soft_event_capture(soft_event *event)
{
    pthread_mutex_lock(&event->lock);
    soft_capture *capture = event->capture;
    if (capture)
        soft_ref((soft_object *)capture);
    pthread_mutex_unlock(&event->lock);
    return capture;
}

static aclError record(soft_event *event, soft_stream *stream, soft_task task)
{
    set_capture(event, stream);
    soft_fence *fence = event->shared ? shared_fence(event, soft_shared_event_number(event->shared)) : soft_fence_new();
    if (!fence)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for an event");
    aclError code = submit(stream, (event_task){ task, fence });
    if (code == ACL_SUCCESS && !event->shared) {            /* only now: a record that was refused changes nothing */
        set_latest(event, fence);
        return ACL_SUCCESS;
    }
    if (code == ACL_SUCCESS)
        soft_shared_event_record(event->shared, fence->number);
    soft_unref(&fence->object);
    return code;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)
{
    soft_task task = { .function = __func__, .run = run_record, .drop = drop_record };
    return with_both(event, stream, task, record);
}

typedef struct reset_task { soft_task task; soft_event *event; } reset_task;

static aclError run_reset(soft_task *task)                  /* back to "never recorded", once the stream gets here */
{
    set_latest(((reset_task *)task)->event, NULL);
    return ACL_SUCCESS;
}

static void drop_reset(soft_task *task)
{
    soft_unref(&((reset_task *)task)->event->object);
    free(task);
}

static aclError reset(soft_event *event, soft_stream *stream, soft_task task)
{
    if (event->extended || event->shared)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "an event made with aclrtCreateEventExWithFlag, or for IPC, cannot be reset: "
                          "record it again");
    reset_task *made = malloc(sizeof *made);
    if (!made)
        return soft_error(ACL_ERROR_BAD_ALLOC, "no host memory for a task");
    *made = (reset_task){ task, event };
    soft_ref(&event->object);
    return soft_submit(stream, &made->task);
}

aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream)
{
    soft_task task = { .function = __func__, .run = run_reset, .drop = drop_reset };
    return with_both(event, stream, task, reset);
}

/* ---- waiting: a stream ---- */

static aclError run_wait(soft_task *task)
{
    soft_fence *fence = ((event_task *)task)->fence;
    if (soft_fence_wait(fence, task, -1) > 0 && soft_fence_get(fence) == SOFT_LOST)
        soft_task_poll(task, -1, 0, -1);                    /* what it waits for will not come */
    return ACL_SUCCESS;
}

static void drop_wait(soft_task *task)
{
    soft_unref(&((event_task *)task)->fence->object);
    free(task);
}

static aclError join(soft_event *event, soft_stream *stream)
{
    soft_capture *capture = soft_event_capture(event);
    aclError code = soft_capture_join(capture, stream);
    if (capture)
        soft_unref((soft_object *)capture);
    return code;
}

static aclError stream_wait(soft_event *event, soft_stream *stream, soft_task task)
{
    soft_fence *fence;
    SOFT_TRY(join(event, stream));
    if (!(event->flags & (ACL_EVENT_SYNC | ACL_EVENT_IPC)))
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "event flag %#x: a stream can only wait for an event with ACL_EVENT_SYNC (0x1)",
                          event->flags);
    SOFT_TRY(soft_event_latest(event, &fence));
    if (!fence)
        return ACL_SUCCESS;                                 /* never recorded: nothing to wait for */
    task.bytes = soft_fence_get(fence) == SOFT_DONE ? 0 : SOFT_MAY_BLOCK;
    aclError code = submit(stream, (event_task){ task, fence });
    soft_unref(&fence->object);
    return code;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)
{
    soft_task task = { .function = __func__, .run = run_wait, .drop = drop_wait };
    return with_both(event, stream, task, stream_wait);
}
