/* event_host.c: host calls on events: query one, wait for one, measure the time between two. */
#include "runtime.h"

static aclError refuse_captured(soft_event *event)
{
    soft_capture *capture = soft_event_capture(event);
    bool active = soft_capture_is_active(capture);
    if (capture)
        soft_unref((soft_object *)capture);
    return active ? soft_error(ACL_ERROR_RT_EVENT_CAPTURED, "the event's record is being captured into a graph") : ACL_SUCCESS;
}

/* Context checked, the event looked up, the fence of its latest record (NULL: none). */
static aclError look(aclrtEvent handle, soft_event **event, soft_fence **fence)
{
    aclError code;
    SOFT_TRY(soft_context_need());
    *event = soft_event_get(handle, &code);
    if (!*event)
        return code;
    code = refuse_captured(*event);
    if (code == ACL_SUCCESS)
        code = soft_event_latest(*event, fence);
    if (code)
        soft_unref(&(*event)->object);
    return code;
}

static void done_looking(soft_event *event, soft_fence *fence)
{
    if (fence)
        soft_unref(&fence->object);
    soft_unref(&event->object);
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!status)
        return soft_null("status");
    soft_event *found;
    soft_fence *fence;
    SOFT_TRY(look(event, &found, &fence));
    bool complete = !fence || soft_fence_get(fence) == SOFT_DONE;
    *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    done_looking(found, fence);
    return ACL_SUCCESS;
}

static aclError wait(soft_fence *fence, int32_t timeout)
{
    if (soft_fence_wait(fence, NULL, timeout) == 0)
        return soft_error(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "the event was not complete within %d ms; the work before it continues", timeout);
    if (soft_fence_get(fence) == SOFT_LOST)
        return soft_error(ACL_ERROR_RT_STREAM_ABORT, "the event will not complete: its record was dropped with the rest of its stream");
    return ACL_SUCCESS;
}

static aclError synchronize(aclrtEvent event, int32_t timeout)
{
    if (timeout < -1)
        return soft_error(ACL_ERROR_RT_PARAM_INVALID, "timeout %d: want milliseconds, or -1 for no limit", timeout);
    soft_event *found;
    soft_fence *fence;
    SOFT_TRY(look(event, &found, &fence));
    aclError code = fence ? wait(fence, timeout) : ACL_SUCCESS;
    done_looking(found, fence);
    return soft_count_timeout(code);
}

aclError aclrtSynchronizeEvent(aclrtEvent event)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return synchronize(event, -1);
}

aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout)
{
    SOFT_TRY(soft_fault(__func__, NULL));
    return synchronize(event, timeout);
}

static aclError time_of(aclrtEvent handle, const char *name, int64_t *at_ns)
{
    soft_event *event;
    soft_fence *fence;
    SOFT_TRY(look(handle, &event, &fence));
    aclError code = ACL_SUCCESS;
    if (!(event->flags & ACL_EVENT_TIME_LINE) || !fence)
        code = soft_error(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "%s has no time: it was %s", name,
                          fence ? "made without ACL_EVENT_TIME_LINE (0x8)" : "never recorded");
    else if (soft_fence_get(fence) != SOFT_DONE)
        code = soft_error(ACL_ERROR_RT_EVENT_NOT_COMPLETE, "%s is not complete", name);
    else
        *at_ns = fence->at_ns;
    done_looking(event, fence);
    return code;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent)
{
    int64_t start, end;
    SOFT_TRY(soft_fault(__func__, NULL));
    if (!ms)
        return soft_null("ms");
    SOFT_TRY(time_of(startEvent, "startEvent", &start));
    SOFT_TRY(time_of(endEvent, "endEvent", &end));
    *ms = (float)(end - start) / 1e6f;
    return ACL_SUCCESS;
}
