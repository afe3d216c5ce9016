/* Streams: order, life, failure modes, timeouts. */
#include "gate.h"
#include <signal.h>

TEST(test_work_runs_in_order_of_submission)
{
    aclrtStream stream = new_stream();
    char *device = device_bytes(64);
    gate held = GATE;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    for (int i = 1; i <= 50; i++)
        CHECK_OK(aclrtMemsetAsync(device, 64, i, 64, stream));
    aclrtStreamStatus status = ACL_STREAM_STATUS_COMPLETE;
    CHECK_OK(aclrtStreamQuery(stream, &status));
    CHECK_EQ(status, ACL_STREAM_STATUS_NOT_READY);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtStreamQuery(stream, &status));
    CHECK_EQ(status, ACL_STREAM_STATUS_COMPLETE);
    CHECK_EQ(device[63], 50);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
}

TEST(test_small_work_on_an_idle_stream_needs_no_thread)
{
    softnpu_counters before, after;
    aclrtStream stream = new_stream();
    char *device = device_bytes(1024);
    softnpu_get_counters(&before);
    CHECK_OK(aclrtMemsetAsync(device, 1024, 5, 1024, stream));
    CHECK_EQ(device[1023], 5);                              /* done already */
    softnpu_get_counters(&after);
    CHECK_EQ(after.threads, before.threads);
    CHECK_EQ(after.tasks_inline, before.tasks_inline + 1);
    CHECK_EQ(after.tasks_queued, before.tasks_queued);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
}

TEST(test_a_thread_that_would_only_wait_does_the_work_itself)
{
    enum { LARGE = 4 << 20 };
    softnpu_counters before, after;
    aclrtStream stream = new_stream();
    char *device = device_bytes(LARGE);
    CHECK_EQ(softnpu_run_here(LARGE), 0);
    softnpu_get_counters(&before);
    CHECK_OK(aclrtMemsetAsync(device, LARGE, 5, LARGE, stream));
    CHECK_EQ(device[LARGE - 1], 5);                         /* done already */
    softnpu_get_counters(&after);
    CHECK_EQ(after.tasks_inline, before.tasks_inline + 1);
    gate held = GATE;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtMemsetAsync(device, LARGE, 6, LARGE, stream));            /* behind other work it waits as ever */
    CHECK_EQ(device[LARGE - 1], 5);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[LARGE - 1], 6);
    CHECK_EQ(softnpu_run_here(0), LARGE);
    softnpu_get_counters(&before);
    CHECK_OK(aclrtMemsetAsync(device, LARGE, 7, LARGE, stream));
    softnpu_get_counters(&after);
    CHECK_EQ(after.tasks_queued, before.tasks_queued + 1);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
}

TEST(test_workers_end_with_their_streams)
{
    softnpu_counters before, during, after;
    softnpu_get_counters(&before);
    aclrtStream stream = new_stream();
    _Atomic int ran = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    softnpu_get_counters(&during);
    CHECK_EQ(during.threads, before.threads + 1);
    CHECK_EQ(during.streams, before.streams + 1);
    CHECK_OK(aclrtDestroyStream(stream));                   /* waits for what is queued */
    CHECK_EQ(ran, 1);
    softnpu_get_counters(&after);
    CHECK_EQ(after.threads, before.threads);
    CHECK_EQ(after.streams, before.streams);
}

static void read_signal_mask(void *argument)
{
    sigset_t mask;
    char name[16] = "";
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    pthread_getname_np(pthread_self(), name, sizeof name);
    aclrtContext context = NULL;
    aclrtGetCurrentContext(&context);
    atomic_store((_Atomic int *)argument, sigismember(&mask, SIGINT) == 1 && !strncmp(name, "softnpu-s", 9) && context != NULL);
}

TEST(test_workers_are_deaf_to_signals_named_and_in_context)
{
    aclrtStream stream = new_stream();
    _Atomic int good = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, read_signal_mask, (void *)&good));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(good, 1);
    CHECK_OK(aclrtDestroyStream(stream));
}

TEST(test_timeout_leaves_the_work_running)
{
    aclrtStream stream = new_stream();
    gate held = GATE;
    _Atomic int ran = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_ERR(aclrtSynchronizeDeviceWithTimeout(1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, -2), ACL_ERROR_RT_PARAM_INVALID);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, -1));
    CHECK_OK(aclrtSynchronizeDevice());
    CHECK_EQ(ran, 1);
    CHECK_OK(aclrtDestroyStream(stream));
}

TEST(test_a_failure_is_reported_once_and_the_stream_goes_on)
{
    aclrtStream stream = new_stream();
    char *device = device_bytes(64);
    aclrtStreamStatus status;
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507053"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, stream));
    CHECK_OK(aclrtMemsetAsync(device, 64, 2, 64, stream));
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_EQ(device[0], 2);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507053"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, stream));
    CHECK_ERR(aclrtStreamQuery(stream, &status), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_OK(aclrtStreamQuery(stream, &status));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
}

TEST(test_stop_on_failure_sticks_and_spreads_in_the_context)
{
    aclrtContext context;
    aclrtStream stream, other;
    _Atomic int ran = 0;
    gate held = GATE;
    char *device = device_bytes(64);
    CHECK_OK(aclrtCreateContext(&context, 0));
    stream = new_stream();
    other = new_stream();
    CHECK_OK(aclrtSetStreamFailureMode(stream, ACL_STOP_ON_FAILURE));
    CHECK_ERR(aclrtSetStreamFailureMode(stream, ACL_STOP_ON_FAILURE), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507053@1; aclrtMemsetAsync:exec=507057@2"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, stream));
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    gate_open(&held);
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_ERR(aclrtMemsetAsync(device, 64, 1, 64, stream), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_EQ(ran, 0);
    softnpu_fault_clear();
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507057"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, other));   /* has not failed itself until now */
    CHECK_ERR(aclrtMemsetAsync(device, 64, 1, 64, other), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    CHECK_OK(aclrtStreamAbort(stream));                     /* an abort makes it usable again */
    CHECK_OK(aclrtMemsetAsync(device, 64, 3, 64, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[0], 3);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtDestroyStream(other));
    CHECK_OK(aclrtDestroyContext(context));
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(aclrtFree(device));
}

static void wait_for_own_stream(void *argument)
{
    aclrtStream stream = *(aclrtStream *)argument;
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtDestroyStream(stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtDestroyStreamForce(stream), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtResetDevice(0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclFinalize(), ACL_ERROR_RT_PARAM_INVALID);
}

TEST(test_a_callback_cannot_wait_for_its_own_stream)
{
    aclrtStream stream = new_stream();
    CHECK_OK(aclrtLaunchHostFunc(stream, wait_for_own_stream, &stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtDestroyStream(stream));
}

TEST(test_streams_belong_to_their_context)
{
    aclrtContext mine, other;
    aclrtStream stream = new_stream(), found = NULL;
    int32_t id = -1, default_id = -1;
    CHECK_OK(aclrtGetCurrentContext(&mine));
    CHECK_OK(aclrtStreamGetId(stream, &id));
    CHECK_OK(aclrtStreamGetId(NULL, &default_id));
    CHECK(id >= 0 && default_id >= 0 && id != default_id);
    CHECK_OK(aclrtCreateContext(&other, 1));
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_STREAM_CONTEXT);
    CHECK_ERR(aclrtDestroyStream(stream), ACL_ERROR_RT_STREAM_CONTEXT);
    CHECK_OK(aclrtCtxGetCurrentDefaultStream(&found));
    CHECK_ERR(aclrtDestroyStream(found), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtSynchronizeStream(found));
    CHECK_OK(aclrtDestroyContext(other));
    CHECK_ERR(aclrtSynchronizeStream(NULL), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK_OK(aclrtSetCurrentContext(mine));
    CHECK_OK(aclrtDestroyStream(stream));
}

TEST(test_streams_are_limited)
{
    aclrtStream streams[16];
    int made = 0;
    while (made < 16 && aclrtCreateStream(&streams[made]) == ACL_SUCCESS)
        made++;
    CHECK_EQ(made, 9);                                      /* SOFTNPU_MAX_STREAMS is 10 here, and the default stream counts */
    CHECK_ERR(aclrtCreateStream(&streams[made]), ACL_ERROR_RT_NO_STREAM_RESOURCE);
    while (made > 0)
        CHECK_OK(aclrtDestroyStream(streams[--made]));
    CHECK_OK(aclrtCreateStreamWithConfig(&streams[0], 0, ACL_STREAM_FAST_LAUNCH | ACL_STREAM_FAST_SYNC));
    CHECK_OK(aclrtDestroyStream(streams[0]));
    CHECK_ERR(aclrtCreateStreamWithConfig(&streams[0], 0, 0x100), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtCreateStreamWithConfig(&streams[0], 8, 0), ACL_ERROR_RT_PARAM_INVALID);
}

int main(void)
{
    setenv("SOFTNPU_MAX_STREAMS", "10", 1);
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    RUN(test_work_runs_in_order_of_submission);
    RUN(test_small_work_on_an_idle_stream_needs_no_thread);
    RUN(test_a_thread_that_would_only_wait_does_the_work_itself);
    RUN(test_workers_end_with_their_streams);
    RUN(test_workers_are_deaf_to_signals_named_and_in_context);
    RUN(test_timeout_leaves_the_work_running);
    RUN(test_a_failure_is_reported_once_and_the_stream_goes_on);
    RUN(test_stop_on_failure_sticks_and_spreads_in_the_context);
    RUN(test_a_callback_cannot_wait_for_its_own_stream);
    RUN(test_streams_belong_to_their_context);
    RUN(test_streams_are_limited);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclrtResetDevice(0));                          /* one test sets the device again */
    CHECK_OK(aclFinalize());
    return check_done();
}
