/* Faults by name: what is refused, when they strike, what they do. */
#include "gate.h"

static aclrtStream stream;
static char *device;

static aclError memset_once(void)
{
    return aclrtMemsetAsync(device, 64, 1, 64, stream);
}

TEST(test_bad_specs_are_refused_whole)
{
    const char *const bad[] = {
        NULL, "aclrtMalloc", "aclrtMalloc:", ":fail=1", "aclrtMalloc:fail", "aclrtMalloc:fail=", "aclrtMalloc:fail=x", "aclrtMalloc:fail=0",
        "aclrtMalloc:fail=-3", "aclrtMalloc:fail=1@0", "aclrtMalloc:fail=1@-1", "aclrtMalloc:fail=1@x", "aclrtMalloc:fail=1@1x",
        "aclrtMalloc:delay=-1", "aclrtMalloc:hang=1", "aclrtMalloc:fly", "aclrtMallocate:fail=1", "notExported:hang",
        "aclrtMalloc:hold", "aclrtMalloc:hold=", "aclrtMalloc:hold=a b", "aclrtMalloc:hold=a@0", "aclrtMalloc:half=x.y",
        "aclrtMalloc:hold=a123456789b123456789c123456789d1", "HcclBatchGet:flip", "HcclBatchGet:flip=", "HcclBatchGet:flip=x", "aclrtMemcpyAsync:flip=1", "aclrtGetDevice:fail=1;aclrtMalloc:fly", "aclrtMalloc:fail=99999999999999999999",
    };
    int32_t id;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_EQ(softnpu_fault(bad[i]), -1);
        CHECK(aclGetRecentErrMsg() != NULL || !bad[i]);
    }
    CHECK_OK(aclrtGetDevice(&id));                          /* the good half of the pair was not applied */
    CHECK_EQ(softnpu_fault(""), 0);
}

TEST(test_fail_strikes_at_the_nth_call_once)
{
    int32_t id;
    CHECK_EQ(softnpu_fault("aclrtGetDevice:fail=507899@3"), 0);
    CHECK_OK(aclrtGetDevice(&id));
    CHECK_OK(aclrtGetDevice(&id));
    CHECK_ERR(aclrtGetDevice(&id), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    CHECK_OK(aclrtGetDevice(&id));
    CHECK_EQ(softnpu_fault("aclrtGetDevice:fail=507899@*"), 0);
    for (int i = 0; i < 5; i++)
        CHECK_ERR(aclrtGetDevice(&id), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    softnpu_fault_clear();
    CHECK_OK(aclrtGetDevice(&id));
}

TEST(test_fail_does_nothing_else)
{
    device[0] = 0;
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:fail=507899"), 0);
    CHECK_ERR(memset_once(), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[0], 0);
}

TEST(test_exec_fails_when_the_task_runs)
{
    device[0] = 0;
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507053@2"), 0);
    CHECK_OK(memset_once());
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(device[0], 1);
    device[0] = 0;
    CHECK_OK(memset_once());
    CHECK_EQ(device[0], 0);
    CHECK_ERR(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    CHECK_EQ(softnpu_fault("aclrtMemcpy:exec=507052"), 0);  /* no task: the call itself */
    CHECK_ERR(aclrtMemcpy(device, 64, device + 32, 1, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_COPY_DATA);
}

TEST(test_exec_faults_have_a_message_that_names_the_call)
{
    aclGetRecentErrMsg();
    aclrtGetLastError(ACL_RT_THREAD_LEVEL);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:exec=507053"), 0);
    CHECK_OK(memset_once());
    CHECK(aclGetRecentErrMsg() == NULL);                    /* accepted: nothing to say yet */
    CHECK_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), 0);
    CHECK_EQ(aclrtSynchronizeStream(stream), ACL_ERROR_RT_DEVICE_MEM_ERROR);
    const char *why = aclGetRecentErrMsg();
    CHECK(why && strstr(why, "aclrtMemsetAsync"));
    aclrtGetLastError(ACL_RT_THREAD_LEVEL);
}

TEST(test_delay_and_hang)
{
    aclrtEvent start = new_event(), end = new_event();
    float ms = 0;
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:delay=5;aclrtMemsetAsync:delay=6"), 0);      /* both strike the first call */
    CHECK_OK(aclrtRecordEvent(start, stream));
    CHECK_OK(memset_once());
    CHECK_OK(aclrtRecordEvent(end, stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtEventElapsedTime(&ms, start, end));
    CHECK(ms >= 11);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hang"), 0);
    CHECK_OK(memset_once());
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_OK(aclrtStreamAbort(stream));
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_OK(aclrtDestroyEvent(start));
    CHECK_OK(aclrtDestroyEvent(end));
}

TEST(test_the_environment_holds_a_spec_for_the_start)
{
    int32_t id;
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    setenv("SOFTNPU_FAULTS", "aclrtGetDevice:fail=507899", 1);
    CHECK_OK(aclInit(NULL));
    unsetenv("SOFTNPU_FAULTS");
    CHECK_OK(aclrtSetDevice(0));
    CHECK_ERR(aclrtGetDevice(&id), ACL_ERROR_RT_DRV_INTERNAL_ERROR);
    CHECK_OK(aclrtGetDevice(&id));
}

int main(void)
{
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    stream = new_stream();
    device = device_bytes(64);
    RUN(test_bad_specs_are_refused_whole);
    RUN(test_fail_strikes_at_the_nth_call_once);
    RUN(test_fail_does_nothing_else);
    RUN(test_exec_fails_when_the_task_runs);
    RUN(test_exec_faults_have_a_message_that_names_the_call);
    RUN(test_delay_and_hang);
    RUN(test_the_environment_holds_a_spec_for_the_start);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
