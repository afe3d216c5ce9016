/* No call crashes, hangs or succeeds on garbage: every function of acl.h, with arguments that mean nothing. */
#include "gate.h"

static char out[256];                                       /* somewhere to put a result that must not come */

/* An error with a message and nothing else. */
#define BAD(call) do { aclGetRecentErrMsg(); aclError code_ = (call); if (!code_ || !aclGetRecentErrMsg()) { check_failures++; \
        printf("%s:%d: %s is %d\n", __FILE__, __LINE__, #call, code_); } } while (0)
#define ANY(call) ((void)(call))                            /* may succeed; must come back */

static void null_results(void)
{
    int32_t number;
    size_t size;
    char name[] = "runtime";
    BAD(aclrtGetVersion(NULL, &number, &number));
    BAD(aclsysGetVersionNum(NULL, &number));
    BAD(aclsysGetVersionNum(name, NULL));
    BAD(aclsysGetVersionStr(NULL, out));
    BAD(aclsysGetVersionStr(name, NULL));
    BAD(aclrtGetRunMode(NULL));
    BAD(aclrtGetDeviceCount(NULL));
    BAD(aclrtGetDevice(NULL));
    BAD(aclrtQueryDeviceStatus(0, NULL));
    BAD(aclrtGetDeviceInfo(0, ACL_DEV_ATTR_PHY_CHIP_ID, NULL));
    BAD(aclrtGetPhyDevIdByLogicDevId(0, NULL));
    BAD(aclrtGetLogicDevIdByUserDevId(0, NULL));
    BAD(aclrtDeviceCanAccessPeer(NULL, 0, 1));
    BAD(aclrtDeviceGetBareTgid(NULL));
    BAD(aclrtCreateContext(NULL, 0));
    BAD(aclrtGetCurrentContext(NULL));
    BAD(aclrtCtxGetCurrentDefaultStream(NULL));
    BAD(aclrtCreateStream(NULL));
    BAD(aclrtCreateStreamWithConfig(NULL, 0, 0));
    BAD(aclrtStreamQuery(NULL, NULL));
    BAD(aclrtStreamGetId(NULL, NULL));
    BAD(aclrtCreateEvent(NULL));
    BAD(aclrtCreateEventWithFlag(NULL, ACL_EVENT_SYNC));
    BAD(aclrtCreateEventExWithFlag(NULL, ACL_EVENT_SYNC));
    BAD(aclrtQueryEventStatus(NULL, NULL));
    BAD(aclrtEventElapsedTime(NULL, NULL, NULL));
    BAD(aclrtIpcGetEventHandle(NULL, NULL));
    BAD(aclrtIpcOpenEventHandle((aclrtIpcEventHandle){ { 0 } }, NULL));
    BAD(aclrtCreateNotify(NULL, 0));
    BAD(aclrtMalloc(NULL, 1, ACL_MEM_MALLOC_HUGE_FIRST));
    BAD(aclrtMallocAlign32(NULL, 1, ACL_MEM_MALLOC_HUGE_FIRST));
    BAD(aclrtMallocHost(NULL, 1));
    BAD(aclrtGetMemInfo(ACL_HBM_MEM, NULL, &size));
    BAD(aclrtGetMemInfo(ACL_HBM_MEM, &size, NULL));
    BAD(aclrtPointerGetAttributes(out, NULL));
    BAD(aclrtHostRegister(out, 1, ACL_HOST_REGISTER_MAPPED, NULL));
    BAD(aclrtHostGetDevicePointer(out, NULL, 0));
    BAD(aclrtIpcMemGetExportKey(out, 1, NULL, 65, 0));
    BAD(aclrtIpcMemImportByKey(NULL, "softnpu:0000000000000000", 0));
    BAD(aclrtReserveMemAddress(NULL, 2 << 20, 0, NULL, 0));
    BAD(aclrtMallocPhysical(NULL, 2 << 20, NULL, 0));
    BAD(aclrtMemGetAllocationGranularity(NULL, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, &size));
    BAD(aclrtMemGetAllocationGranularity(NULL, ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM, NULL));
    BAD(aclrtMemExportToShareableHandle(NULL, ACL_MEM_HANDLE_TYPE_NONE, 0, NULL));
    BAD(aclrtMemImportFromShareableHandle(0, 0, NULL));
    BAD(aclrtMemImportFromShareableHandleV2(NULL, ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT, 0, NULL));
    BAD(aclrtNotifyImportByKey(NULL, "softnpu:0000000000000000", 0));
}

static void bad_numbers(int32_t device)
{
    int32_t number = 0;
    int64_t value;
    void *made;
    aclrtDeviceStatus status;
    size_t size;
    BAD(aclrtSetDevice(device));
    BAD(aclrtResetDevice(device));
    BAD(aclrtResetDeviceForce(device));
    BAD(aclrtQueryDeviceStatus(device, &status));
    BAD(aclrtGetDeviceInfo((uint32_t)device, ACL_DEV_ATTR_PHY_CHIP_ID, &value));
    BAD(aclrtGetPhyDevIdByLogicDevId(device, &number));
    BAD(aclrtGetLogicDevIdByUserDevId(device, &number));
    BAD(aclrtDeviceCanAccessPeer(&number, device, 0));
    BAD(aclrtDeviceCanAccessPeer(&number, 0, device));
    BAD(aclrtDeviceEnablePeerAccess(device, 0));
    BAD(aclrtDeviceDisablePeerAccess(device));
    BAD(aclrtDeviceTaskAbort(device, 0));
    BAD(aclrtCreateContext(&made, device));
    BAD(aclrtMemImportFromShareableHandle(0, device, &made));
    BAD(aclrtSynchronizeDeviceWithTimeout(-2));
    BAD(aclrtSynchronizeStreamWithTimeout(NULL, -2));
    BAD(aclrtSetStreamFailureMode(NULL, 2));
    BAD(aclrtCreateEventWithFlag(&made, 0xffffffff));
    BAD(aclrtCreateEventExWithFlag(&made, 0));
    BAD(aclrtCreateNotify(&made, ~0ull));
    BAD(aclrtMalloc(&made, 0, ACL_MEM_MALLOC_HUGE_FIRST));
    BAD(aclrtMalloc(&made, 1, (aclrtMemMallocPolicy)-1));
    BAD(aclrtMallocAlign32(&made, SIZE_MAX, ACL_MEM_MALLOC_HUGE_FIRST));
    BAD(aclrtMallocHost(&made, 0));
    BAD(aclrtGetMemInfo((aclrtMemAttr)99, &size, &size));
    BAD(aclrtProcessReport(0));
    BAD(aclrtProcessReport(1));
    BAD(aclrtSubscribeReport(0, NULL));
    BAD(aclrtUnSubscribeReport(1, NULL));
    BAD(aclrtLaunchCallback(set_flag, NULL, ACL_CALLBACK_BLOCK, NULL));
    BAD(aclrtLaunchCallback(NULL, NULL, ACL_CALLBACK_BLOCK, NULL));
    BAD(aclrtLaunchCallback(set_flag, NULL, (aclrtCallbackBlockType)7, NULL));
    BAD(aclrtLaunchHostFunc(NULL, NULL, NULL));
    BAD(aclrtReserveMemAddress(&made, SIZE_MAX, 0, NULL, 0));
    BAD(aclrtReserveMemAddress(&made, SIZE_MAX - (2 << 20) + 1, 0, NULL, 0));
    BAD(aclInit("/nowhere/acl.json"));
    BAD(aclrtGetLastError((aclrtLastErrLevel)1));
    BAD(aclrtPeekAtLastError((aclrtLastErrLevel)1));
}

/* `handle` is no handle of anything, or of something else. */
static void bad_handles(void *handle)
{
    int32_t number = 1;
    float ms;
    char key[65];
    aclrtStreamStatus stream_status;
    aclrtEventRecordedStatus event_status;
    aclrtIpcEventHandle ipc;
    uint64_t shareable;
    BAD(aclrtDestroyContext(handle));
    BAD(aclrtSetCurrentContext(handle));
    BAD(aclrtDestroyEvent(handle));
    BAD(aclrtRecordEvent(handle, NULL));
    BAD(aclrtResetEvent(handle, NULL));
    BAD(aclrtQueryEventStatus(handle, &event_status));
    BAD(aclrtSynchronizeEvent(handle));
    BAD(aclrtSynchronizeEventWithTimeout(handle, 1));
    BAD(aclrtEventElapsedTime(&ms, handle, handle));
    BAD(aclrtIpcGetEventHandle(handle, &ipc));
    BAD(aclrtStreamWaitEvent(NULL, handle));
    BAD(aclrtDestroyNotify(handle));
    BAD(aclrtRecordNotify(handle, NULL));
    BAD(aclrtWaitAndResetNotify(handle, NULL, 1));
    BAD(aclrtNotifyGetExportKey(handle, key, 65, 0));
    BAD(aclrtNotifySetImportPid(handle, &number, 1));
    BAD(aclrtFreePhysical(handle));
    BAD(aclrtMapMem(out, 2 << 20, 0, handle, 0));
    BAD(aclrtMemExportToShareableHandle(handle, ACL_MEM_HANDLE_TYPE_NONE, 0, &shareable));
    BAD(aclrtMemExportToShareableHandleV2(handle, 0, ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT, &shareable));
    BAD(aclrtDestroyStream(handle));
    BAD(aclrtDestroyStreamForce(handle));
    if (!handle)
        return;                                             /* the default stream, from here on */
    BAD(aclrtSynchronizeStream(handle));
    BAD(aclrtSynchronizeStreamWithTimeout(handle, 1));
    BAD(aclrtStreamQuery(handle, &stream_status));
    BAD(aclrtStreamAbort(handle));
    BAD(aclrtSetStreamFailureMode(handle, 0));
    BAD(aclrtStreamWaitEvent(handle, NULL));
    BAD(aclrtStreamGetId(handle, &number));
    BAD(aclrtRecordEvent(NULL, handle));
    BAD(aclrtMemsetAsync(out, 1, 0, 1, handle));
    BAD(aclrtMemcpyAsync(out, 1, out, 1, ACL_MEMCPY_DEFAULT, handle));
    BAD(aclrtMemcpyAsyncWithCondition(out, 1, out, 1, ACL_MEMCPY_DEFAULT, handle));
    BAD(aclrtMemcpyBatchAsync(NULL, NULL, NULL, NULL, 1, NULL, NULL, 1, NULL, handle));
    BAD(aclrtMemcpyBatchAsyncV2(NULL, NULL, NULL, NULL, 1, NULL, NULL, 1, handle));
    BAD(aclrtSubscribeReport(1, handle));
    BAD(aclrtUnSubscribeReport(1, handle));
    BAD(aclrtLaunchCallback(set_flag, out, ACL_CALLBACK_BLOCK, handle));
    BAD(aclrtLaunchHostFunc(handle, set_flag, out));
}

/* `address` is neither this process's memory nor the device's. */
static void bad_addresses(void *address)
{
    void *made, *list[1] = { address };
    char key[65];
    size_t size = 1, index = 0, fail;
    aclrtMemcpyBatchAttr attr = { .dstLoc = { 0, ACL_MEM_LOCATION_TYPE_DEVICE } };
    aclrtPtrAttributes attributes;
    BAD(aclrtFree(address));
    BAD(aclrtFreeHost(address));
    BAD(aclrtMemset(address, 64, 0, 64));
    BAD(aclrtMemsetAsync(address, 64, 0, 64, NULL));
    BAD(aclrtMemcpy(address, 64, out, 64, ACL_MEMCPY_DEFAULT));
    BAD(aclrtMemcpy(out, 64, address, 64, ACL_MEMCPY_DEFAULT));
    BAD(aclrtMemcpyAsync(address, 64, out, 64, ACL_MEMCPY_HOST_TO_DEVICE, NULL));
    BAD(aclrtMemcpyAsyncWithCondition(out, 64, address, 64, ACL_MEMCPY_DEVICE_TO_HOST, NULL));
    BAD(aclrtMemcpyBatch(list, &size, list, &size, 1, &attr, &index, 1, &fail));
    BAD(aclrtMemcpyBatchAsync(list, &size, list, &size, 1, &attr, &index, 1, NULL, NULL));
    BAD(aclrtMemcpyBatchV2(list, &size, list, &size, 1, &attr, &index, 1));
    BAD(aclrtMemcpyBatchAsyncV2(list, &size, list, &size, 1, &attr, &index, 1, NULL));
    BAD(aclrtMemGetAddressRange(address, &made, &size));
    BAD(aclrtHostRegister(address, 4096, ACL_HOST_REGISTER_MAPPED, &made));
    BAD(aclrtHostRegisterV2(address, SIZE_MAX, ACL_HOST_REG_PINNED));
    BAD(aclrtHostGetDevicePointer(address, &made, 0));
    BAD(aclrtHostUnregister(address));
    BAD(aclrtIpcMemGetExportKey(address, 1, key, 65, 0));
    BAD(aclrtIpcMemGetExportKey(address, SIZE_MAX, key, 65, 0));
    BAD(aclrtReleaseMemAddress(address));
    BAD(aclrtUnmapMem(address));
    BAD(softnpu_adopt(address, 1 << 20, 1));
    BAD(softnpu_release(address, 1 << 20));
    ANY(aclrtPointerGetAttributes(address, &attributes));
}

static void bad_keys(const char *key)
{
    void *made;
    int32_t pid = 1;
    aclrtIpcEventHandle handle;
    aclrtMemFabricHandle fabric;
    memset(&handle, 0xff, sizeof handle);
    memset(&fabric, 0xff, sizeof fabric);
    BAD(aclrtIpcMemImportByKey(&made, key, 0));
    BAD(aclrtIpcMemImportByKey(&made, key, ~0ull));
    BAD(aclrtIpcMemSetImportPid(key, &pid, 1));
    BAD(aclrtIpcMemSetImportPid(key, NULL, SIZE_MAX));
    BAD(aclrtIpcMemClose(key));
    BAD(aclrtNotifyImportByKey(&made, key, 0));
    BAD(aclrtIpcOpenEventHandle(handle, &made));
    BAD(aclrtMemImportFromShareableHandle(0xdeadbeefdeadbeef, 0, &made));
    BAD(aclrtMemSetPidToShareableHandle(0xdeadbeefdeadbeef, &pid, 1));
    BAD(aclrtMemSetPidToShareableHandle(0, NULL, 0));
    BAD(aclrtMemImportFromShareableHandleV2(&fabric, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, 0, &made));
    BAD(aclrtMemImportFromShareableHandleV2(&fabric, (aclrtMemSharedHandleType)9, 0, &made));
    BAD(aclrtMemSetPidToShareableHandleV2(&fabric, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, &pid, 1));
    BAD(aclrtMemSetPidToShareableHandleV2(NULL, ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT, &pid, 1));
}

static void everything(void *const *handles, size_t count)
{
    static const char *const keys[] = { NULL, "", "softnpu:", "softnpu:zzzzzzzzzzzzzzzz", "softnpu:00000000000000001", "softnpu:0000000000000000" };
    char unterminated[65];
    memset(unterminated, 'a', sizeof unterminated);
    null_results();
    bad_numbers(-1);
    bad_numbers(INT32_MIN);
    bad_numbers(8);
    for (size_t i = 0; i < count; i++)
        bad_handles(handles[i]);
    bad_addresses(NULL);
    bad_addresses((void *)8);
    bad_addresses((void *)(UINTPTR_MAX - 1));
    bad_addresses((void *)(UINTPTR_MAX >> 1));
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        bad_keys(keys[i]);
    bad_keys(unterminated);
}

TEST(test_garbage_before_init)
{
    void *handles[] = { NULL, (void *)1, out };
    everything(handles, 3);
    BAD(aclFinalize());
    BAD(aclFinalizeReference(NULL));
    BAD(aclrtSynchronizeDevice());
}

TEST(test_garbage_without_a_context)
{
    void *handles[] = { NULL, (void *)1, out };
    CHECK_OK(aclInit(NULL));
    everything(handles, 3);
    BAD(aclrtSynchronizeDevice());
    BAD(aclrtSynchronizeStream(NULL));
}

TEST(test_garbage_in_a_context)
{
    aclrtContext context;
    aclrtStream stream = NULL;
    aclrtEvent event = NULL;
    aclrtNotify notify = NULL;
    CHECK_OK(aclrtCreateContext(&context, 0));
    stream = new_stream();
    event = new_event();
    CHECK_OK(aclrtCreateNotify(&notify, 0));
    char *freed = device_bytes(100);
    CHECK_OK(aclrtFree(freed));
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyNotify(notify));
    void *handles[] = { NULL, (void *)1, (void *)UINTPTR_MAX, out, stream, event, notify, (char *)stream + 1, (void *)((uintptr_t)stream ^ 1ull << 40) };
    everything(handles, sizeof handles / sizeof *handles);
    bad_addresses(freed);
    CHECK_ERR(aclrtSynchronizeStream(context), ACL_ERROR_RT_INVALID_HANDLE);        /* a handle of another kind */
    CHECK_ERR(aclrtSetCurrentContext(stream), ACL_ERROR_RT_INVALID_HANDLE);
    CHECK_OK(aclrtDestroyContext(context));
}

TEST(test_nothing_is_left_behind)
{
    softnpu_counters counters;
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.device_bytes + counters.pinned_bytes + counters.allocations + counters.adopted + counters.imported, 0);
    CHECK_EQ(counters.streams + counters.events + counters.contexts + counters.threads, 0);
    softnpu_get_counters(NULL);
}

int main(void)
{
    RUN(test_garbage_before_init);
    RUN(test_garbage_without_a_context);
    RUN(test_garbage_in_a_context);
    RUN(test_nothing_is_left_behind);
    CHECK_OK(aclFinalize());
    return check_done();
}
