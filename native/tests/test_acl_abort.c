/* Aborts: what they end, what they leave usable, and when they have taken effect. */
#include "gate.h"
#include <sys/resource.h>

typedef struct waiter { aclrtContext context; aclrtStream stream; char *device; _Atomic int done; } waiter;

static void *wait_until_aborted(void *argument)             /* an abort can come before the synchronize: then once more */
{
    waiter *it = argument;
    aclError code = ACL_SUCCESS;
    CHECK_OK(aclrtSetCurrentContext(it->context));
    while (code == ACL_SUCCESS) {
        CHECK_OK(aclrtMemsetAsync(it->device, 64, 1, 64, it->stream));
        code = aclrtSynchronizeStream(it->stream);
    }
    CHECK_EQ(code, ACL_ERROR_RT_STREAM_ABORT);
    it->done = 1;
    return NULL;
}

TEST(test_abort_ends_a_task_that_never_would)
{
    waiter it = { .stream = new_stream(), .device = device_bytes(64) };
    pthread_t thread;
    CHECK_OK(aclrtGetCurrentContext(&it.context));
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hang@*"), 0);
    it.device[0] = 0;
    pthread_create(&thread, NULL, wait_until_aborted, &it);
    while (!it.done)
        CHECK_OK(aclrtStreamAbort(it.stream));
    pthread_join(thread, NULL);
    softnpu_fault_clear();
    CHECK_OK(aclrtSynchronizeStream(it.stream));
    CHECK_EQ(it.device[0], 0);
    CHECK_OK(aclrtMemsetAsync(it.device, 64, 7, 64, it.stream));
    CHECK_OK(aclrtSynchronizeStream(it.stream));
    CHECK_EQ(it.device[0], 7);
    CHECK_OK(aclrtDestroyStream(it.stream));
    CHECK_OK(aclrtFree(it.device));
}

TEST(test_abort_drops_what_is_queued)
{
    aclrtStream stream = new_stream();
    gate held = GATE;
    _Atomic int ran = 0;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    gate_await(&held);
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    CHECK_OK(aclrtStreamAbort(stream));                     /* does not wait for the function that is running */
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    gate_open(&held);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(ran, 0);
    CHECK_OK(aclrtDestroyStream(stream));
}

typedef struct witness { aclrtContext context; aclrtStream stream; _Atomic int waiting, let_go; } witness;

static void *wait_through_an_abort(void *argument)
{
    witness *it = argument;
    CHECK_OK(aclrtSetCurrentContext(it->context));
    it->waiting = 1;
    aclError code = aclrtSynchronizeStream(it->stream);
    CHECK(it->let_go);                                      /* whatever it says, the function was no longer held */
    CHECK(code == ACL_SUCCESS || code == ACL_ERROR_RT_STREAM_ABORT);
    return NULL;
}

TEST(test_a_synchronize_that_was_aborted_returns_when_the_work_has_stopped)
{
    for (int round = 0; round < 20; round++) {
        witness it = { .stream = new_stream() };
        gate held = GATE;
        pthread_t thread;
        CHECK_OK(aclrtGetCurrentContext(&it.context));
        CHECK_OK(aclrtLaunchHostFunc(it.stream, gate_hold, &held));
        gate_await(&held);
        pthread_create(&thread, NULL, wait_through_an_abort, &it);
        while (!it.waiting)
            sched_yield();
        for (int i = 0; i < 100; i++)                       /* let it get inside; should it not, this round proves little */
            sched_yield();
        CHECK_OK(aclrtStreamAbort(it.stream));
        for (int i = 0; i < 100; i++)
            sched_yield();
        it.let_go = 1;
        gate_open(&held);
        pthread_join(thread, NULL);
        CHECK_OK(aclrtDestroyStream(it.stream));
    }
}

TEST(test_aborts_work_without_a_descriptor_to_wake_by)
{
    struct rlimit before, low;
    aclrtStream stream = new_stream(), waiting = new_stream();
    aclrtEvent event = new_event();
    char *device = device_bytes(64);
    getrlimit(RLIMIT_NOFILE, &before);
    low = before;
    low.rlim_cur = 3;
    setrlimit(RLIMIT_NOFILE, &low);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hang"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, stream));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtStreamWaitEvent(waiting, event));
    CHECK_ERR(aclrtSynchronizeEventWithTimeout(event, 5), ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    CHECK_OK(aclrtStreamAbort(waiting));
    CHECK_OK(aclrtSynchronizeStream(waiting));
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    setrlimit(RLIMIT_NOFILE, &before);
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtDestroyStream(waiting));
    CHECK_OK(aclrtFree(device));
}

TEST(test_after_abort_and_synchronize_nothing_is_written_any_more)
{
    enum { SIZE = 64 << 20 };
    aclrtStream stream = new_stream();
    char *device = device_bytes(SIZE);
    memset(device, 0, SIZE);
    for (int round = 1; round <= 5; round++) {
        CHECK_OK(aclrtMemsetAsync(device, SIZE, round, SIZE, stream));
        CHECK_OK(aclrtMemsetAsync(device, SIZE, round + 100, SIZE, stream));
        CHECK_OK(aclrtStreamAbort(stream));
        CHECK_OK(aclrtMemsetAsync(device, SIZE, 99, 16, stream));         /* runs after the aborted one really stopped */
        CHECK_OK(aclrtSynchronizeStream(stream));
        CHECK_EQ(device[0], 99);
        memset(device, 0, SIZE);                            /* TSan would see a late write */
        CHECK_EQ(device[15], 0);
    }
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
}

TEST(test_force_destroy_drops_the_queue)
{
    aclrtStream stream = new_stream();
    char *device = device_bytes(64);
    _Atomic int ran = 0;
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hang"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, stream));
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    CHECK_OK(aclrtDestroyStreamForce(stream));
    CHECK_EQ(ran, 0);
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_OK(aclrtFree(device));
}

TEST(test_device_abort_ends_all_streams)
{
    aclrtStream first = new_stream(), second = new_stream();
    char *device = device_bytes(64);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hang@*"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, first));
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, second));
    softnpu_fault_clear();
    CHECK_OK(aclrtDeviceTaskAbort(0, 5000));
    CHECK_OK(aclrtSynchronizeDevice());
    CHECK_OK(aclrtDestroyStream(first));
    CHECK_OK(aclrtDestroyStream(second));
    CHECK_OK(aclrtFree(device));
}

TEST(test_device_abort_says_when_work_goes_on)
{
    aclrtStream stream = new_stream();
    gate held = GATE;
    CHECK_OK(aclrtLaunchHostFunc(stream, gate_hold, &held));
    gate_await(&held);                                      /* an abort cannot stop a function of the user's */
    CHECK_ERR(aclrtDeviceTaskAbort(0, 1), ACL_ERROR_RT_WAIT_TIMEOUT);
    gate_open(&held);
    CHECK_OK(aclrtDestroyStream(stream));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    RUN(test_abort_ends_a_task_that_never_would);
    RUN(test_abort_drops_what_is_queued);
    RUN(test_a_synchronize_that_was_aborted_returns_when_the_work_has_stopped);
    RUN(test_aborts_work_without_a_descriptor_to_wake_by);
    RUN(test_after_abort_and_synchronize_nothing_is_written_any_more);
    RUN(test_force_destroy_drops_the_queue);
    RUN(test_device_abort_ends_all_streams);
    RUN(test_device_abort_says_when_work_goes_on);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
