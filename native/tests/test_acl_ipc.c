/* Two processes: memory, events, notifies and physical memory by key. The peer exports, we import. */
#include "gate.h"

enum { SIZE = 3 << 20, PART = 12345, OFFSET = 54321, STEP = 2 << 20 };

typedef struct exports {
    int32_t pid;
    char open_key[65], listed_key[65], closed_key[65], notify_key[65];
    uint64_t shareable;
    aclrtMemFabricHandle fabric;
    aclrtIpcEventHandle event;
} exports;

static check_peer peer;
static exports theirs;

static void ask(char what)                                  /* and wait until it is done */
{
    tell(peer.socket, &what, 1);
    hear(peer.socket, &what, 1);
}

/* ---- the peer ---- */

typedef struct owned { char *memory, *mapped; aclrtNotify notify; aclrtEvent event; aclrtStream stream; aclrtDrvMemHandle physical; } owned;

static void export_memory(const owned *own, exports *out, int32_t importer)
{
    int32_t stranger = 1;
    CHECK_OK(aclrtIpcMemGetExportKey(own->memory + OFFSET, PART, out->open_key, 65, ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION));
    CHECK_OK(aclrtIpcMemGetExportKey(own->memory, SIZE, out->listed_key, 65, ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT));
    CHECK_OK(aclrtIpcMemSetImportPid(out->listed_key, &importer, 1));
    CHECK_OK(aclrtIpcMemGetExportKey(own->memory, SIZE, out->closed_key, 65, ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT));
    CHECK_OK(aclrtIpcMemSetImportPid(out->closed_key, &stranger, 1));
}

static void export_physical(owned *own, exports *out)
{
    aclrtPhysicalMemProp prop = { .memAttr = ACL_HBM_MEM_HUGE, .location = { 0, ACL_MEM_LOCATION_TYPE_DEVICE } };
    CHECK_OK(aclrtMallocPhysical(&own->physical, STEP, &prop, 0));
    CHECK_OK(aclrtReserveMemAddress((void **)&own->mapped, STEP, 0, NULL, 0));
    CHECK_OK(aclrtMapMem(own->mapped, STEP, 0, own->physical, 0));
    own->mapped[STEP - 1] = 42;
    CHECK_OK(aclrtMemExportToShareableHandle(own->physical, ACL_MEM_HANDLE_TYPE_NONE, ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION,
                                             &out->shareable));
    CHECK_OK(aclrtMemExportToShareableHandleV2(own->physical, ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION,
                                               ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, &out->fabric));
    aclrtDrvMemHandle again;
    CHECK_ERR(aclrtMemImportFromShareableHandle(out->shareable, 0, &again), ACL_ERROR_RT_PARAM_INVALID);
}

static void serve(const owned *own, exports *out, int socket)
{
    char what = 0;
    while (hear(socket, &what, 1), what != 'q') {
        switch (what) {
        case 'w': CHECK_EQ(own->memory[OFFSET + 1], 77); break;           /* they wrote through their mapping */
        case 'm': CHECK_EQ(own->mapped[0], 43); break;
        case 'n': CHECK_OK(aclrtRecordNotify(own->notify, own->stream)); break;
        case 'r': CHECK_OK(aclrtRecordEvent(own->event, own->stream)); break;
        case 'h':
            CHECK_EQ(softnpu_fault("aclrtMemsetAsync:hang"), 0);
            CHECK_OK(aclrtMemsetAsync(own->memory, 1, 0, 1, own->stream));
            CHECK_OK(aclrtRecordEvent(own->event, own->stream));
            break;
        case 'a':
            CHECK_OK(aclrtStreamAbort(own->stream));
            CHECK_OK(aclrtRecordEvent(own->event, own->stream));
            break;
        case 'c': CHECK_OK(aclrtIpcMemClose(out->open_key)); break;
        }
        tell(socket, &what, 1);
    }
}

static void export_everything(int socket)
{
    owned own;
    exports out = { .pid = getpid() };
    int32_t importer;
    softnpu_counters counters;
    hear(socket, &importer, sizeof importer);
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    own.stream = new_stream();
    own.memory = device_bytes(SIZE);
    memset(own.memory, 5, SIZE);
    own.memory[OFFSET] = 6;
    export_memory(&own, &out, importer);
    export_physical(&own, &out);
    CHECK_OK(aclrtCreateNotify(&own.notify, 0));
    CHECK_ERR(aclrtNotifySetImportPid(own.notify, &importer, 1), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtNotifyGetExportKey(own.notify, out.notify_key, 65, 0));
    CHECK_OK(aclrtNotifySetImportPid(own.notify, &importer, 1));
    CHECK_OK(aclrtCreateEventExWithFlag(&own.event, ACL_EVENT_IPC));
    CHECK_OK(aclrtIpcGetEventHandle(own.event, &out.event));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.threads, 1);                          /* who answers importers */
    tell(socket, &out, sizeof out);
    serve(&own, &out, socket);
    CHECK_OK(aclrtIpcMemClose(out.listed_key));
    CHECK_OK(aclrtIpcMemClose(out.closed_key));
    CHECK_OK(aclrtUnmapMem(own.mapped));
    CHECK_OK(aclrtFreePhysical(own.physical));
    CHECK_OK(aclrtReleaseMemAddress(own.mapped));
    CHECK_OK(aclrtDestroyNotify(own.notify));
    CHECK_OK(aclrtDestroyEvent(own.event));
    CHECK_OK(aclrtDestroyStream(own.stream));
    CHECK_OK(aclrtFree(own.memory));
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.threads + counters.allocations, 0);   /* nothing exported, no thread to answer */
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
}

/* ---- us ---- */

TEST(test_memory_of_a_peer_is_the_same_memory)
{
    char *part = NULL, *whole = NULL, *again = NULL, own[8] = { 0 };
    softnpu_counters counters;
    CHECK_OK(aclrtIpcMemImportByKey((void **)&part, theirs.open_key, ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS));
    CHECK_OK(aclrtIpcMemImportByKey((void **)&whole, theirs.listed_key, ACL_RT_IPC_MEM_IMPORT_FLAG_DEFAULT));
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&again, theirs.open_key, 0), ACL_ERROR_RT_PARAM_INVALID);
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.imported, 2);
    CHECK_EQ(part[0], 6);
    CHECK_EQ(whole[SIZE - 1], 5);
    CHECK(whole + OFFSET != part && whole[OFFSET] == 6);
    own[0] = 77;
    CHECK_OK(aclrtMemcpy(part + 1, PART - 1, own, 1, ACL_MEMCPY_HOST_TO_DEVICE));
    CHECK_EQ(whole[OFFSET + 1], 77);
    ask('w');
    CHECK_ERR(aclrtMemcpy(part, PART + 1, whole, PART + 1, ACL_MEMCPY_DEFAULT), ACL_ERROR_RT_PARAM_INVALID);       /* the part's bounds */
    CHECK_ERR(aclrtFree(part), ACL_ERROR_RT_PARAM_INVALID);
    char key[65];
    CHECK_ERR(aclrtIpcMemGetExportKey(part, 1, key, 65, 0), ACL_ERROR_RT_FEATURE_NOT_SUPPORT);
    CHECK_OK(aclrtIpcMemClose(theirs.open_key));
    CHECK_OK(aclrtIpcMemClose(theirs.listed_key));
    CHECK_ERR(aclrtIpcMemClose(theirs.open_key), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_ERR(aclrtMemset(whole, 1, 0, 1), ACL_ERROR_RT_PARAM_INVALID);
    softnpu_get_counters(&counters);
    CHECK_EQ(counters.imported, 0);
}

TEST(test_keys_are_for_the_processes_that_were_named)
{
    char *memory = NULL, key[65];
    int32_t me = getpid();
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&memory, theirs.closed_key, 0), ACL_ERROR_RT_NO_PERMISSION);
    CHECK_ERR(aclrtIpcMemSetImportPid(theirs.closed_key, &me, 1), ACL_ERROR_RT_PARAM_INVALID);     /* not ours to allow */
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&memory, theirs.notify_key, 0), ACL_ERROR_RT_PARAM_INVALID);
    memcpy(key, theirs.open_key, 65);
    key[23] = key[23] == '0' ? '1' : '0';                   /* another token: no such offer */
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&memory, key, 0), ACL_ERROR_RT_PARAM_INVALID);
    key[8] = key[8] == '0' ? '1' : '0';                     /* a process that is not there */
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&memory, key, 0), ACL_ERROR_RT_IPC_ERROR);
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&memory, "garbage", 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK(memory == NULL);
    ask('c');
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&memory, theirs.open_key, 0), ACL_ERROR_RT_PARAM_INVALID);   /* taken back */
}

TEST(test_physical_memory_of_a_peer)
{
    aclrtDrvMemHandle plain, fabric;
    char *addr;
    uint64_t again;
    CHECK_OK(aclrtMemImportFromShareableHandle(theirs.shareable, 0, &plain));
    CHECK_OK(aclrtMemImportFromShareableHandleV2(&theirs.fabric, ACL_MEM_SHARE_HANDLE_TYPE_FABRIC, 0, &fabric));
    CHECK_OK(aclrtReserveMemAddress((void **)&addr, 2 * STEP, 0, NULL, 0));
    CHECK_OK(aclrtMapMem(addr, STEP, 0, plain, 0));
    CHECK_OK(aclrtMapMem(addr + STEP, STEP, 0, fabric, 0));
    CHECK_EQ(addr[STEP - 1], 42);
    volatile char *seen = addr;                             /* two addresses of one byte: the compiler must not assume otherwise */
    seen[STEP] = 43;
    CHECK_EQ(seen[0], 43);
    ask('m');
    CHECK_ERR(aclrtMemExportToShareableHandle(plain, ACL_MEM_HANDLE_TYPE_NONE, 0, &again), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtUnmapMem(addr));
    CHECK_OK(aclrtUnmapMem(addr + STEP));
    CHECK_OK(aclrtFreePhysical(plain));
    CHECK_OK(aclrtFreePhysical(fabric));
    CHECK_OK(aclrtReleaseMemAddress(addr));
}

TEST(test_a_notify_of_a_peer_wakes_our_stream)
{
    aclrtNotify notify;
    aclrtStream stream = new_stream();
    char key[65];
    CHECK_OK(aclrtNotifyImportByKey(&notify, theirs.notify_key, ACL_RT_NOTIFY_IMPORT_FLAG_ENABLE_PEER_ACCESS));
    CHECK_OK(aclrtWaitAndResetNotify(notify, stream, 60));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    ask('n');
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_ERR(aclrtNotifyGetExportKey(notify, key, 65, 0), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtDestroyNotify(notify));
    CHECK_OK(aclrtDestroyStream(stream));
}

TEST(test_an_event_of_a_peer)
{
    aclrtEvent event;
    aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
    aclrtStream stream = new_stream();
    aclrtIpcEventHandle handle;
    _Atomic int ran = 0;
    CHECK_OK(aclrtIpcOpenEventHandle(theirs.event, &event));
    CHECK_OK(aclrtQueryEventStatus(event, &status));
    CHECK_EQ(status, ACL_EVENT_RECORDED_STATUS_COMPLETE);
    ask('r');
    CHECK_OK(aclrtSynchronizeEvent(event));
    ask('h');                                               /* recorded, behind work that hangs */
    CHECK_OK(aclrtQueryEventStatus(event, &status));
    CHECK_EQ(status, ACL_EVENT_RECORDED_STATUS_NOT_READY);
    CHECK_OK(aclrtStreamWaitEvent(stream, event));
    CHECK_OK(aclrtLaunchHostFunc(stream, set_flag, (void *)&ran));
    CHECK_ERR(aclrtSynchronizeStreamWithTimeout(stream, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    CHECK_EQ(ran, 0);
    ask('a');                                               /* aborted there, and recorded again */
    CHECK_OK(aclrtSynchronizeStream(stream));
    CHECK_EQ(ran, 1);
    CHECK_ERR(aclrtIpcGetEventHandle(event, &handle), ACL_ERROR_RT_PARAM_INVALID);
    CHECK_OK(aclrtDestroyEvent(event));
    CHECK_OK(aclrtDestroyStream(stream));
    memset(&handle, 'x', sizeof handle);
    CHECK_ERR(aclrtIpcOpenEventHandle(handle, &event), ACL_ERROR_RT_PARAM_INVALID);
}

TEST(test_keys_of_a_process_that_ended)
{
    char *memory = NULL, *kept = NULL;
    char quit = 'q';
    CHECK_OK(aclrtIpcMemImportByKey((void **)&kept, theirs.listed_key, 0));
    tell(peer.socket, &quit, 1);
    finish_peer(peer);
    CHECK_EQ(kept[SIZE - 1], 5);                            /* our mapping keeps the memory */
    CHECK_OK(aclrtIpcMemClose(theirs.listed_key));
    CHECK_ERR(aclrtIpcMemImportByKey((void **)&memory, theirs.listed_key, 0), ACL_ERROR_RT_IPC_ERROR);
}

int main(void)
{
    int32_t me = getpid();
    peer = start_peer(export_everything);
    tell(peer.socket, &me, sizeof me);
    hear(peer.socket, &theirs, sizeof theirs);
    CHECK_EQ(theirs.pid, peer.pid);
    CHECK_OK(aclInit(NULL));
    CHECK_OK(aclrtSetDevice(0));
    RUN(test_memory_of_a_peer_is_the_same_memory);
    RUN(test_keys_are_for_the_processes_that_were_named);
    RUN(test_physical_memory_of_a_peer);
    RUN(test_a_notify_of_a_peer_wakes_our_stream);
    RUN(test_an_event_of_a_peer);
    RUN(test_keys_of_a_process_that_ended);
    CHECK_OK(aclrtResetDevice(0));
    CHECK_OK(aclFinalize());
    return check_done();
}
