/* Streams that are captured: what is submitted becomes part of a graph, and what else may not be done meanwhile. */
#include <pthread.h>
#include "check.h"
#include "acl.h"

static aclrtStream new_stream(void)
{
    aclrtStream stream = NULL;
    CHECK_OK(aclrtCreateStream(&stream));
    return stream;
}

static aclrtEvent new_event(void)
{
    aclrtEvent event = NULL;
    CHECK_OK(aclrtCreateEventExWithFlag(&event, ACL_EVENT_SYNC));
    return event;
}

static aclmdlRICaptureStatus status_of(aclrtStream stream)
{
    aclmdlRICaptureStatus status = ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED;
    aclmdlRI graph;
    CHECK_OK(aclmdlRICaptureGetInfo(stream, &status, &graph));
    CHECK_EQ(graph != NULL, status == ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
    return status;
}

static void end_and_destroy(aclrtStream stream)
{
    aclmdlRI graph = NULL;
    CHECK_OK(aclmdlRICaptureEnd(stream, &graph));
    CHECK_OK(aclmdlRIDestroy(graph));
}

/* [src runtime api_impl.cc:2162-2185] */
TEST(test_a_record_on_a_captured_stream_is_not_made)
{
    aclrtStream stream = new_stream();
    aclrtEvent event = new_event();
    aclrtEventRecordedStatus recorded;
    CHECK_EQ(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    CHECK_OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_GLOBAL));
    CHECK_EQ(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_ERR(aclrtQueryEventStatus(event, &recorded), ACL_ERROR_RT_EVENT_CAPTURED);
    CHECK_ERR(aclrtSynchronizeEvent(event), ACL_ERROR_RT_EVENT_CAPTURED);
    aclmdlRI graph = NULL;
    CHECK_OK(aclmdlRICaptureEnd(stream, &graph));
    CHECK_EQ(status_of(stream), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    CHECK_OK(aclrtQueryEventStatus(event, &recorded));
    CHECK_EQ(recorded, ACL_EVENT_RECORDED_STATUS_NOT_READY);
    CHECK_OK(aclmdlRIDestroy(graph));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtSynchronizeEvent(event));
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyStream(stream));
}

/* [src runtime api_impl.cc:1625-1643; api_error.cc:1484; context.cc:1232] */
TEST(test_a_wait_pulls_another_stream_in)
{
    aclrtStream stream = new_stream(), other = new_stream();
    aclrtEvent event = new_event();
    aclrtStreamStatus status;
    aclmdlRI graph = NULL;
    CHECK_OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_RELAXED));
    CHECK_OK(aclrtRecordEvent(event, stream));
    CHECK_OK(aclrtStreamWaitEvent(other, event));
    CHECK_EQ(status_of(other), ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE);
    CHECK_ERR(aclrtStreamQuery(other, &status), ACL_ERROR_RT_STREAM_CAPTURED);
    CHECK_ERR(aclrtSynchronizeStream(other), ACL_ERROR_RT_STREAM_CAPTURED);
    CHECK_ERR(aclmdlRICaptureEnd(other, &graph), ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED);
    CHECK_ERR(aclmdlRICaptureEnd(stream, &graph), ACL_ERROR_RT_STREAM_UNJOINED);
    CHECK_EQ(status_of(other), ACL_MODEL_RI_CAPTURE_STATUS_NONE);
    CHECK_OK(aclrtSynchronizeStream(other));
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyStream(other));
    CHECK_OK(aclrtDestroyStream(stream));
}

static aclrtContext context;
static void *memory;

static void *copy_elsewhere(void *code)
{
    char byte = 0;
    CHECK_OK(aclrtSetCurrentContext(context));
    *(aclError *)code = aclrtMemcpy(memory, 1, &byte, 1, ACL_MEMCPY_HOST_TO_DEVICE);
    return NULL;
}

static aclError copy_in_another_thread(void)
{
    aclError code = -1;
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, copy_elsewhere, &code), 0);
    pthread_join(thread, NULL);
    return code;
}

/* [src runtime api_impl.cc:2757, context_aclgraph.cc:230] */
TEST(test_a_global_capture_refuses_synchronous_copies_of_all_threads)
{
    aclrtStream stream = new_stream();
    char byte = 0;
    CHECK_OK(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_NORMAL_ONLY));
    CHECK_OK(aclrtGetCurrentContext(&context));
    CHECK_OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_GLOBAL));
    CHECK_ERR(aclrtMemcpy(memory, 1, &byte, 1, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);
    CHECK_ERR(aclrtMemset(memory, 64, 0, 64), ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);
    CHECK_EQ(copy_in_another_thread(), ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);
    end_and_destroy(stream);
    CHECK_OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL));
    CHECK_ERR(aclrtMemset(memory, 64, 0, 64), ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT);
    CHECK_OK(copy_in_another_thread());
    end_and_destroy(stream);
    CHECK_OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_RELAXED));
    CHECK_OK(aclrtMemset(memory, 64, 0, 64));
    end_and_destroy(stream);
    CHECK_OK(aclrtFree(memory));
    CHECK_OK(aclrtDestroyStream(stream));
}

TEST(test_wrong_calls_are_refused)
{
    aclrtStream stream = new_stream();
    aclmdlRICaptureStatus status;
    aclmdlRI graph = NULL;
    CHECK_ERR(aclmdlRICaptureEnd(stream, &graph), ACL_ERROR_RT_STREAM_NOT_CAPTURED);
    CHECK_ERR(aclmdlRICaptureBegin(stream, (aclmdlRICaptureMode)7), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclmdlRICaptureGetInfo(stream, NULL, &graph), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclmdlRICaptureGetInfo(stream, &status, NULL), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclmdlRICaptureEnd(stream, NULL), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclmdlRIDestroy(NULL), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclmdlRIDestroy((void *)(uintptr_t)0x123450), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_OK(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_RELAXED));
    CHECK_ERR(aclmdlRICaptureBegin(stream, ACL_MODEL_RI_CAPTURE_MODE_RELAXED), ACL_ERROR_RT_STREAM_CAPTURED);
    end_and_destroy(stream);
    CHECK_OK(aclrtDestroyStream(stream));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    RUN(test_a_record_on_a_captured_stream_is_not_made);
    RUN(test_a_wait_pulls_another_stream_in);
    RUN(test_a_global_capture_refuses_synchronous_copies_of_all_threads);
    RUN(test_wrong_calls_are_refused);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
