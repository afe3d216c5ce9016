/* Events: what a record captures, who waits for what, times. */
#include "gate.h"

static aclrtStream stream, other;

static aclrtEventRecordedStatus status_of(aclrtEvent event)
{
    aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    CHECK_OK(aclrtQueryEventStatus(event, &status));
    return status;
}

TEST(test_complete_is_one_and_not_ready_is_zero)
{
    CHECK_EQ(ACL_EVENT_RECORDED_STATUS_COMPLETE, 1);
    CHECK_EQ(ACL_EVENT_RECORDED_STATUS_NOT_READY, 0);
}

TEST(test_a_record_captures_what_was_submitted_before)
{
    aclrtEvent event = new_event();
    gate held = GATE, later = GATE;
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_COMPLETE);       /* never recorded */
    CHECK_OK(aclrtSynchronizeEvent(event));
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &later));
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_NOT_READY);
    CHECK_ERR(aclrtSynchronizeEventWithTimeout(event, 1), ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeEventWithTimeout(event, -1));  /* does not wait for what came later */
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_COMPLETE);
    gate_open(&later);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtDestroyEvent(event));
}

TEST(test_a_wait_means_the_latest_record_before_it)
{
    aclrtEvent event = new_event();
    gate first = GATE, second = GATE;
    _Atomic int ran = 0, ran_again = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &first));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    CHECK_OK(aclrtLaunchHostFunc(other, set_flag, (void *)&ran));
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &second));
    CHECK_OK(aclrtRecordEvent(event, stream));              /* again: the wait above does not mean this one */
    CHECK_EQ(ran, 0);
    gate_open(&first);
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_EQ(ran, 1);
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_NOT_READY);
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    CHECK_OK(aclrtLaunchHostFunc(other, set_flag, (void *)&ran_again));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(other, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_EQ(ran_again, 0);
    gate_open(&second);
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_EQ(ran_again, 1);
    CHECK_OK(aclrtDestroyEvent(event));
}

TEST(test_waiting_for_an_unrecorded_event_is_no_wait)
{
    aclrtEvent event = new_event();
    CHECK_OK(aclrtStreamWaitEvent(stream, event));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtDestroyEvent(event));
}

TEST(test_an_unfinished_event_can_be_destroyed)
{
    aclrtEvent event = new_event();
    gate held = GATE;
    _Atomic int ran = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    CHECK_OK(aclrtLaunchHostFunc(other, set_flag, (void *)&ran));
    CHECK_OK(aclrtDestroyEvent(event));                     /* does not block, and the wait still means it */
    CHECK_ERR(aclrtDestroyEvent(event), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_ERR(aclrtRecordEvent(event, stream), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_EQ(ran, 0);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_EQ(ran, 1);
    CHECK_OK(aclrtSynchronizeStream(stream));
}

TEST(test_abort_wakes_a_stream_that_waits_for_an_event)
{
    aclrtEvent event = new_event();
    gate held = GATE;
    _Atomic int ran = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    CHECK_OK(aclrtLaunchHostFunc(other, set_flag, (void *)&ran));
    CHECK_OK(aclrtStreamAbort(other));
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_EQ(ran, 0);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtDestroyEvent(event));
}

TEST(test_a_record_that_was_dropped_never_completes)
{
    aclrtEvent event = new_event();
    gate held = GATE;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    gate_await(&held);
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    CHECK_OK(aclrtStreamAbort(stream));
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_NOT_READY);
    CHECK_ERR(aclrtSynchronizeEvent(event), ACL_ERROR_RT_STREAM_ABORT);
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(other, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_OK(aclrtStreamAbort(other));
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_OK(aclrtRecordEvent(event, stream));              /* recorded again it is as good as ever */
    CHECK_OK(aclrtSynchronizeEvent(event));
    CHECK_OK(aclrtDestroyEvent(event));
}

TEST(test_elapsed_time)
{
    aclrtEvent start = new_event(), end = new_event(), timeless;
    float ms = -1;
    char *device = device_bytes(64);
    gate held = GATE;
    CHECK_OK(aclrtCreateEventExWithFlag(&timeless, ACL_EVENT_SYNC));
    CHECK_ERR(aclrtEventElapsedTime(&ms, start, end), ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:delay=15"), 0);
    CHECK_OK(aclrtRecordEvent(start, stream));
    CHECK_OK(aclrtMemsetAsync(device, 64, 0, 64, stream));
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtRecordEvent(end, stream));
    CHECK_ERR(aclrtEventElapsedTime(&ms, start, end), ACL_ERROR_RT_EVENT_NOT_COMPLETE);
    gate_open(&held);
    CHECK_OK(aclrtRecordEvent(timeless, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtEventElapsedTime(&ms, start, end));
    CHECK(ms >= 15 && ms < 60000);
    CHECK_ERR(aclrtEventElapsedTime(&ms, start, timeless), ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
    CHECK_OK(aclrtDestroyEvent(start));
    CHECK_OK(aclrtDestroyEvent(end));
    CHECK_OK(aclrtDestroyEvent(timeless));
    CHECK_OK(aclrtFree(device));
}

TEST(test_flags)
{
    aclrtEvent event;
    CHECK_ERR(aclrtCreateEventWithFlag(&event, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtCreateEventExWithFlag(&event, 0x4), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtCreateEventExWithFlag(&event, ACL_EVENT_IPC | ACL_EVENT_SYNC), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_CAPTURE_STREAM_PROGRESS));
    CHECK_ERR(aclrtStreamWaitEvent(stream, event), ACL_ERROR_RT_PARAM_INVALID);            /* SYNC is missing */
    CHECK_ERR(aclrtResetEvent(event, stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtDestroyEvent(event));
}

TEST(test_reset_makes_an_event_unrecorded)
{
    aclrtEvent events[2];
    float ms;
    CHECK_OK(aclrtCreateEvent(&events[0]));
    CHECK_OK(aclrtCreateEventWithFlag(&events[1], ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(aclrtRecordEvent(events[i], stream));
        CHECK_OK(aclrtSynchronizeEvent(events[i]));
    }
    CHECK_OK(aclrtEventElapsedTime(&ms, events[0], events[1]));
    CHECK_OK(aclrtResetEvent(events[0], stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_ERR(aclrtEventElapsedTime(&ms, events[0], events[1]), ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID);
    CHECK_OK(aclrtDestroyEvent(events[0]));
    CHECK_OK(aclrtDestroyEvent(events[1]));
}

TEST(test_nothing_is_left_behind)
{
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.events, 0);
}

TEST(test_ipc_events_work_in_one_process_too)
{
    aclrtEvent event;
    gate held = GATE;
    CHECK_OK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_IPC));
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_COMPLETE);
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_NOT_READY);
    CHECK_ERR(aclrtSynchronizeEventWithTimeout(event, 1), ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    CHECK_OK(aclrtStreamAbort(other));
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_OK(aclrtSynchronizeEvent(event));
    CHECK_EQ(status_of(event), ACL_EVENT_RECORDED_STATUS_COMPLETE);
    CHECK_ERR(aclrtResetEvent(event, stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtDestroyEvent(event));
}

TEST(test_a_refused_record_changes_nothing)
{
    aclrtContext before, context;
    aclrtEvent first, plain, shared;
    aclrtStream stopped;
    CHECK_OK(aclrtGetCurrentContext(&before));
    CHECK_OK(aclrtCreateContext(&context, 0));
    stopped = new_stream();
    plain = new_event();
    CHECK_OK(aclrtCreateEventExWithFlag(&shared, ACL_EVENT_IPC));
    CHECK_OK(aclrtSetStreamFailureMode(stopped, ACL_STOP_ON_FAILURE));
    CHECK_EQ(softnpu_fault("aclrtRecordEvent:exec=507053"), 0);
    first = new_event();
    CHECK_OK(aclrtRecordEvent(first, stopped));
    CHECK_ERR(aclrtRecordEvent(plain, stopped), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_ERR(aclrtRecordEvent(shared, stopped), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_EQ(status_of(plain), ACL_EVENT_RECORDED_STATUS_COMPLETE);
    CHECK_EQ(status_of(shared), ACL_EVENT_RECORDED_STATUS_COMPLETE);
    CHECK_OK(aclrtDestroyEvent(first));
    CHECK_OK(aclrtDestroyEvent(plain));
    CHECK_OK(aclrtDestroyEvent(shared));
    CHECK_OK(aclrtDestroyContext(context));
    CHECK_OK(aclrtSetCurrentContext(before));
}

TEST(test_notifies_are_one_shot)
{
    aclrtNotify notify;
    _Atomic int ran = 0;
    CHECK_OK(aclrtCreateNotify(&notify, 0));
    CHECK_OK(aclrtWaitAndResetNotify(notify, other, 0));
    CHECK_OK(aclrtLaunchHostFunc(other, set_flag, (void *)&ran));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(other, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_EQ(ran, 0);
    CHECK_OK(aclrtRecordNotify(notify, stream));
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_EQ(ran, 1);
    CHECK_OK(aclrtRecordNotify(notify, stream));
    CHECK_OK(aclrtRecordNotify(notify, stream));            /* a flag, not a counter */
    CHECK_OK(aclrtWaitAndResetNotify(notify, other, 60));
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_OK(aclrtWaitAndResetNotify(notify, other, 0));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(other, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_OK(aclrtStreamAbort(other));
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_OK(aclrtWaitAndResetNotify(notify, other, 1));    /* one second: the one real wait in these tests */
    CHECK_ERR(aclrtSynchronizeStream(other), ACL_ERROR_RT_WAIT_TIMEOUT);
    CHECK_OK(aclrtDestroyNotify(notify));
    CHECK_ERR(aclrtDestroyNotify(notify), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_ERR(aclrtCreateNotify(&notify, 8), ACL_ERROR_RT_PARAM_INVALID);
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    stream = new_stream();
    other = new_stream();
    RUN(test_complete_is_one_and_not_ready_is_zero);
    RUN(test_a_record_captures_what_was_submitted_before);
    RUN(test_a_wait_means_the_latest_record_before_it);
    RUN(test_waiting_for_an_unrecorded_event_is_no_wait);
    RUN(test_an_unfinished_event_can_be_destroyed);
    RUN(test_abort_wakes_a_stream_that_waits_for_an_event);
    RUN(test_a_record_that_was_dropped_never_completes);
    RUN(test_elapsed_time);
    RUN(test_flags);
    RUN(test_reset_makes_an_event_unrecorded);
    RUN(test_ipc_events_work_in_one_process_too);
    RUN(test_a_refused_record_changes_nothing);
    RUN(test_notifies_are_one_shot);
    RUN(test_nothing_is_left_behind);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtDestroyStream(other));
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
