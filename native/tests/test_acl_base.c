/* What needs no stream: init and finalize, versions, messages, devices, contexts, fork. */
#include "gate.h"

TEST(test_nothing_works_before_init)
{
    uint32_t count;
    aclrtContext context;
    CHECK_ERR(aclrtGetDeviceCount(&count), ACL_ERROR_UNINITIALIZE);
    CHECK_ERR(aclrtSetDevice(0), ACL_ERROR_UNINITIALIZE);
    CHECK_ERR(aclrtCreateContext(&context, 0), ACL_ERROR_UNINITIALIZE);
    CHECK_ERR(aclFinalize(), ACL_ERROR_UNINITIALIZE);
}

TEST(test_bad_settings_are_refused_by_init)
{
    const char *const bad[][2] = {
        { "SOFTNPU_DEVICES", "0" }, { "SOFTNPU_DEVICES", "65" }, { "SOFTNPU_DEVICES", "-1" }, { "SOFTNPU_DEVICE_MEMORY", "1G" },
        { "SOFTNPU_MAX_STREAMS", "many" }, { "SOFTNPU_STRICT", "rdma" },
        { "SOFTNPU_INLINE_BYTES", "99999999999999999999" }, { "SOFTNPU_FAULTS", "aclrtMalloc:explode" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv(bad[i][0], bad[i][1], 1);
        CHECK_ERR(aclInit(NULL), ACL_ERROR_INVALID_PARAM);
        unsetenv(bad[i][0]);
    }
    CHECK_ERR(aclInit("/nowhere/acl.json"), ACL_ERROR_INVALID_PARAM);
}

TEST(test_init_counts)
{
    uint64_t left = 99;
    CHECK_OK(aclInit(NULL));
    CHECK_ERR(aclInit(NULL), ACL_ERROR_REPEAT_INITIALIZE);
    CHECK_OK(aclFinalizeReference(&left));
    CHECK_EQ(left, 1);
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalizeReference(NULL));
    CHECK_ERR(aclrtSetDevice(0), ACL_ERROR_UNINITIALIZE);
    CHECK_ERR(aclFinalize(), ACL_ERROR_REPEAT_FINALIZE);
    CHECK_OK(aclInit(""));
}

TEST(test_versions)
{
    int32_t major = 0, minor = 0, patch = -1, number = 0;
    char name[] = "runtime", unknown[] = "nonesuch", text[128] = "";
    aclrtRunMode mode = ACL_DEVICE;
    CHECK_OK(aclrtGetVersion(&major, &minor, &patch));
    CHECK(major == 1 && minor > 0 && patch >= 0);
    CHECK_OK(aclsysGetVersionNum(name, &number));
    CHECK(number > 0);
    CHECK_OK(aclsysGetVersionStr(name, text));
    CHECK(strstr(text, "softnpu") != NULL);
    CHECK_ERR(aclsysGetVersionNum(unknown, &number), ACL_ERROR_INVALID_PARAM);
    CHECK(aclrtGetSocName() != NULL);
    CHECK_OK(aclrtGetRunMode(&mode));
    CHECK_EQ(mode, ACL_HOST);
}

TEST(test_messages_are_returned_and_cleared_newest_first)
{
    CHECK(aclGetRecentErrMsg() == NULL);
    aclrtSetDevice(-7);
    aclrtSetDevice(1234);
    const char *text = aclGetRecentErrMsg();
    CHECK(text && strstr(text, "1234") && strstr(text, "-7") && strstr(text, "1234") < strstr(text, "-7"));
    CHECK(text && strstr(text, "107001"));
    CHECK(aclGetRecentErrMsg() == NULL);
    for (int i = 0; i < 1000; i++)
        aclrtSetDevice(-i - 1);
    text = aclGetRecentErrMsg();
    CHECK(text && strstr(text, "-1000") && strlen(text) < 2048);
}

static void *look_at_errors(void *unused)
{
    CHECK(aclGetRecentErrMsg() == NULL);
    CHECK_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), 0);
    return unused;
}

TEST(test_errors_belong_to_the_thread)
{
    pthread_t thread;
    aclrtSetDevice(-1);
    pthread_create(&thread, NULL, look_at_errors, NULL);
    pthread_join(thread, NULL);
    CHECK_EQ(aclrtPeekAtLastError(ACL_RT_THREAD_LEVEL), ACL_ERROR_RT_INVALID_DEVICEID);
    CHECK_EQ(aclrtGetLastError(ACL_RT_THREAD_LEVEL), ACL_ERROR_RT_INVALID_DEVICEID);
    CHECK_EQ(aclrtGetLastError(ACL_RT_THREAD_LEVEL), 0);
    CHECK_ERR(aclrtGetLastError((aclrtLastErrLevel)5), ACL_ERROR_RT_PARAM_INVALID);
    aclrtGetLastError(ACL_RT_THREAD_LEVEL);
}

TEST(test_devices)
{
    uint32_t count = 0;
    int32_t id = -1, can = -1, pid = 0;
    int64_t value = -1;
    aclrtDeviceStatus status = ACL_RT_DEVICE_STATUS_END;
    CHECK_OK(aclrtGetDeviceCount(&count));
    CHECK_EQ(count, 3);                                     /* SOFTNPU_DEVICES in main */
    CHECK_ERR(aclrtGetDevice(&id), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK_ERR(aclrtSetDevice(3), ACL_ERROR_RT_INVALID_DEVICEID);
    CHECK_ERR(aclrtResetDevice(2), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK_OK(aclrtSetDevice(2));
    CHECK_OK(aclrtGetDevice(&id));
    CHECK_EQ(id, 2);
    CHECK_OK(aclrtQueryDeviceStatus(2, &status));
    CHECK_EQ(status, ACL_RT_DEVICE_STATUS_NORMAL);
    CHECK_OK(aclrtGetDeviceInfo(2, ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE, &value));
    CHECK_EQ(value, 64ll << 30);
    CHECK_OK(aclrtGetDeviceInfo(2, ACL_DEV_ATTR_PHY_CHIP_ID, &value));
    CHECK_EQ(value, 2);
    CHECK_OK(aclrtGetDeviceInfo(2, ACL_DEV_ATTR_SUPER_POD_ID, &value));
    CHECK_ERR(aclrtGetDeviceInfo(2, (aclrtDevAttr)1, &value), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    CHECK_OK(aclrtGetPhyDevIdByLogicDevId(1, &id));
    CHECK_EQ(id, 1);
    CHECK_OK(aclrtGetLogicDevIdByUserDevId(2, &id));
    CHECK_EQ(id, 2);
    CHECK_OK(aclrtDeviceCanAccessPeer(&can, 0, 1));
    CHECK_EQ(can, 1);
    CHECK_OK(aclrtDeviceCanAccessPeer(&can, 1, 1));
    CHECK_EQ(can, 0);
    CHECK_OK(aclrtDeviceEnablePeerAccess(0, 0));
    CHECK_ERR(aclrtDeviceEnablePeerAccess(2, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtDeviceEnablePeerAccess(0, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtDeviceDisablePeerAccess(0));
    CHECK_ERR(aclrtDeviceDisablePeerAccess(0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtDeviceGetBareTgid(&pid));
    CHECK_EQ(pid, getpid());
    CHECK_OK(aclrtResetDevice(2));
    CHECK_ERR(aclrtGetDevice(&id), ACL_ERROR_RT_CONTEXT_NULL);
}

static void *share_primary(void *context)
{
    aclrtContext mine = NULL;
    CHECK_ERR(aclrtGetCurrentContext(&mine), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(aclrtGetCurrentContext(&mine));
    CHECK(mine == context);
    CHECK_OK(aclrtResetDevice(1));
    CHECK_OK(aclrtGetCurrentContext(&mine));                /* the main thread still holds the device */
    return NULL;
}

TEST(test_default_context_is_shared_and_counted)
{
    aclrtContext first = NULL, second = NULL;
    pthread_t thread;
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(aclrtGetCurrentContext(&first));
    CHECK_ERR(aclrtDestroyContext(first), ACL_ERROR_RT_CONTEXT_RELEASE_ERROR);
    pthread_create(&thread, NULL, share_primary, first);
    pthread_join(thread, NULL);
    CHECK_OK(aclrtResetDevice(1));
    CHECK_OK(aclrtGetCurrentContext(&second));
    CHECK_OK(aclrtResetDevice(1));
    CHECK_ERR(aclrtGetCurrentContext(&second), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK_ERR(aclrtSetCurrentContext(first), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(aclrtGetCurrentContext(&second));
    CHECK(first != second);
    CHECK_OK(aclrtSetDevice(1));
    CHECK_OK(aclrtResetDeviceForce(1));                     /* all references at once */
    CHECK_ERR(aclrtResetDevice(1), ACL_ERROR_RT_CONTEXT_NULL);
}

TEST(test_reset_waits_for_the_work_of_the_default_context)
{
    char *device;
    _Atomic int ran = 0;
    CHECK_OK(aclrtSetDevice(0));
    device = device_bytes(64);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:delay=20"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 3, 64, NULL));
    CHECK_OK(aclrtLaunchHostFunc(NULL, set_flag, (void *)&ran));
    CHECK_OK(aclrtResetDevice(0));
    CHECK_EQ(ran, 1);
    CHECK_EQ(device[63], 3);                                /* memory outlives the reset */
    CHECK_ERR(aclrtFree(device), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtResetDevice(0));
}

TEST(test_explicit_contexts)
{
    aclrtContext first, second, now;
    aclrtStream stream;
    int32_t id;
    softnpu_counters counters;
    CHECK_OK(aclrtCreateContext(&first, 0));
    CHECK_OK(aclrtCreateContext(&second, 2));
    CHECK_OK(aclrtGetCurrentContext(&now));
    CHECK(now == second);
    CHECK_OK(aclrtSetCurrentContext(first));
    CHECK_OK(aclrtGetDevice(&id));
    CHECK_EQ(id, 0);
    CHECK_OK(aclrtCreateStream(&stream));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.contexts, 2);
    CHECK_EQ(counters.streams, 3);                          /* two default ones */
    CHECK_OK(aclrtDestroyContext(first));                   /* and its streams */
    CHECK_ERR(aclrtGetDevice(&id), ACL_ERROR_RT_CONTEXT_NULL);
    CHECK_ERR(aclrtDestroyContext(first), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_OK(aclrtDestroyContext(second));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.contexts, 0);
    CHECK_EQ(counters.streams, 0);
}

TEST(test_finalize_ends_what_is_left)
{
    aclrtContext context;
    aclrtStream stream;
    softnpu_counters counters;
    char *device;
    CHECK_OK(aclrtSetDevice(0));
    device = device_bytes(64);
    CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hang@*"), 0);
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, NULL));
    CHECK_OK(aclrtCreateContext(&context, 1));
    CHECK_OK(aclrtCreateStream(&stream));
    CHECK_OK(aclrtMemsetAsync(device, 64, 1, 64, stream));
    softnpu_fault_clear();
    CHECK_OK(aclFinalize());
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.streams + counters.contexts + counters.threads, 0);
    CHECK_EQ(counters.allocations, 1);                      /* memory stays its owner's */
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(aclrtFree(device));
    CHECK_OK(aclrtResetDevice(0));
}

TEST(test_a_forked_child_gets_an_error_not_a_hang)
{
    int status = -1;
    uint32_t count;
    CHECK_OK(aclrtSetDevice(0));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        bool good = aclrtGetDeviceCount(&count) == ACL_ERROR_RT_INTERNAL_ERROR && aclInit(NULL) == ACL_ERROR_RT_INTERNAL_ERROR
            && aclrtSynchronizeStream(NULL) == ACL_ERROR_RT_INTERNAL_ERROR && aclrtGetSocName() == NULL && softnpu_fault("") == -1;
        const char *why = aclGetRecentErrMsg();
        _exit(good && why && strstr(why, "forked") ? 0 : 1);
    }
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(aclrtGetDeviceCount(&count));                  /* the parent continues */
    CHECK_OK(aclrtResetDevice(0));
}

static void init_in_child(int socket)
{
    (void)socket;
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
}

TEST(test_a_child_of_a_finalized_process_can_start_afresh)
{
    CHECK_OK(aclFinalize());
    finish_peer(start_peer(init_in_child));
    CHECK_OK(aclInit(NULL));
}

int main(void)
{
    RUN(test_nothing_works_before_init);
    RUN(test_bad_settings_are_refused_by_init);
    aclGetRecentErrMsg();
    setenv("SOFTNPU_DEVICES", "3", 1);
    RUN(test_init_counts);
    RUN(test_versions);
    aclGetRecentErrMsg();
    RUN(test_messages_are_returned_and_cleared_newest_first);
    RUN(test_errors_belong_to_the_thread);
    RUN(test_devices);
    RUN(test_default_context_is_shared_and_counted);
    RUN(test_reset_waits_for_the_work_of_the_default_context);
    RUN(test_explicit_contexts);
    RUN(test_finalize_ends_what_is_left);
    RUN(test_a_forked_child_gets_an_error_not_a_hang);
    RUN(test_a_child_of_a_finalized_process_can_start_afresh);
    CHECK_OK(aclFinalize());
    return check_done();
}
