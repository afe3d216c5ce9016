/* What tells that a stream failed, what a time-out costs, how long an abort takes. [src runtime api_impl.cc, stream.cc, event.cc] */
#include "strict_kit.h"

static void fail_a_task(aclrtStream stream, void *memory)
{
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507057"), 0);
    CHECK_OK(aclrtMemsetAsync(memory, 64, 0, 64, stream));
}

/* Without looking at the stream: a synchronize would take the failure. */
static aclrtStreamStatus until_complete(aclrtStream stream, aclError *code)
{
    aclrtStreamStatus status;
    do
        *code = aclrtStreamQuery(stream, &status);
    while (!*code && status == ACL_STREAM_STATUS_NOT_READY);
    return status;
}

/* [src api_impl.cc:1767-1785, stream.cc:2119-2160: a query compares head and tail; event.cc:931-957] */
static void silent(void)
{
    aclrtStream stream = new_stream();
    aclrtEvent event;
    void *memory;
    aclError code;
    CHECK_OK(aclrtMalloc(&memory, 4096, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtCreateEvent(&event));
    fail_a_task(stream, memory);
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtSynchronizeEvent(event));
    CHECK_EQ(until_complete(stream, &code), ACL_STREAM_STATUS_COMPLETE);
    CHECK_OK(code);
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1000), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);     /* only this tells */
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(memory));
}

TEST(test_neither_query_nor_event_tells_that_a_stream_failed)
{
    run_alone("hccs", silent);
    run_alone("roce", silent);
}

/* [src api_impl.cc StreamQuery: CheckContextStatus] */
static void stops(void)
{
    aclrtStream stream = new_stream();
    void *memory;
    aclError code;
    CHECK_OK(aclrtMalloc(&memory, 4096, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtSetStreamFailureMode(stream, ACL_STOP_ON_FAILURE));
    fail_a_task(stream, memory);
    until_complete(stream, &code);
    CHECK_EQ(code, ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(memory));
}

TEST(test_a_query_tells_in_a_context_that_stops_on_failure)
{
    run_alone("hccs", stops);
}

/* [src api_impl.cc:1732-1742, 6360-6384: each is a record in the error log] */
static void counted(void)
{
    aclrtStream stream = new_stream();
    aclrtNotify gate;
    aclrtEvent event;
    softnpu_counters before, after;
    CHECK_OK(aclrtCreateNotify(&gate, 0));
    CHECK_OK(aclrtCreateEvent(&event));
    CHECK_OK(aclrtWaitAndResetNotify(gate, stream, 0));
    CHECK_OK(aclrtRecordEvent(event, stream));
    softnpu_get_counters(&before);
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_ERR(aclrtSynchronizeEventWithTimeout(event, 1), ACL_ERROR_RT_EVENT_SYNC_TIMEOUT);
    CHECK_ERR(aclrtSynchronizeDeviceWithTimeout(1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    softnpu_get_counters(&after);
    CHECK_EQ(after.sync_timeouts - before.sync_timeouts, 3);
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 1000));
    softnpu_get_counters(&after);
    CHECK_EQ(after.sync_timeouts - before.sync_timeouts, 3);
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtDestroyNotify(gate));
}

TEST(test_a_synchronize_that_times_out_is_counted)
{
    run_alone("hccs", counted);
}

/* [src runtime context.cc:77, 2781-2850: an abort may take up to 60 s] */
static void slow(void)
{
    aclrtStream stream = new_stream();
    aclrtNotify gate;
    CHECK_OK(aclrtCreateNotify(&gate, 0));
    CHECK_OK(aclrtWaitAndResetNotify(gate, stream, 0));
    CHECK_EQ(softnpu_fault("aclrtStreamAbort:delay=100"), 0);
    double start = seconds_now();
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK(seconds_now() - start >= 0.1);
    CHECK_OK(aclrtSynchronizeStreamWithTimeout(stream, 1000));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtDestroyNotify(gate));
}

TEST(test_an_abort_takes_as_long_as_a_delay_says)
{
    run_alone("hccs", slow);
}

int main(void)
{
    RUN(test_neither_query_nor_event_tells_that_a_stream_failed);
    RUN(test_a_query_tells_in_a_context_that_stops_on_failure);
    RUN(test_a_synchronize_that_times_out_is_counted);
    RUN(test_an_abort_takes_as_long_as_a_delay_says);
    return check_done();
}
