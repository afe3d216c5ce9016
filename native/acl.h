/* acl.h: the part of the Ascend runtime ABI (aclrt) that aiodatadist uses. Declarations only: names, types, values.
 *
 * One truth, two readers: cffi parses this file to call the library at run time, and softnpu is compiled against it.
 * tests/abi proves every line equal to the vendor's headers. Tags in trailing comments are for that check:
 *   @since X.Y   first vendor version in which the symbol was seen                                                    */
#pragma once
#include <stddef.h>
#include <stdint.h>


/* ---- scalar and handle types ---- */
typedef int   aclError;
typedef void *aclrtStream;
typedef void *aclrtEvent;
typedef void *aclrtContext;
typedef void *aclrtNotify;                               /* @since 8.5 */
typedef void *aclrtDrvMemHandle;
typedef void *aclmdlRI;                                 /* @since 8.5 */
typedef void (*aclrtCallback)(void *userData);
typedef void (*aclrtHostFunc)(void *args);              /* @since 8.5 */

/* ---- result codes ---- */
#define ACL_SUCCESS                               0
#define ACL_ERROR_INVALID_PARAM                   100000
#define ACL_ERROR_UNINITIALIZE                    100001
#define ACL_ERROR_REPEAT_INITIALIZE               100002
#define ACL_ERROR_WAIT_CALLBACK_TIMEOUT           100036
#define ACL_ERROR_REPEAT_FINALIZE                 100037
#define ACL_ERROR_BAD_ALLOC                       200000
#define ACL_ERROR_API_NOT_SUPPORT                 200001
#define ACL_ERROR_INVALID_DEVICE                  200002
#define ACL_ERROR_MEMORY_ADDRESS_UNALIGNED        200003
#define ACL_ERROR_RESOURCE_NOT_MATCH              200004
#define ACL_ERROR_INVALID_RESOURCE_HANDLE         200005
#define ACL_ERROR_FEATURE_UNSUPPORTED             200006
#define ACL_ERROR_STORAGE_OVER_LIMIT              300000
#define ACL_ERROR_INTERNAL_ERROR                  500000
#define ACL_ERROR_FAILURE                         500001
#define ACL_ERROR_RT_FAILURE                      500003
#define ACL_ERROR_DRV_FAILURE                     500004

#define ACL_ERROR_RT_PARAM_INVALID                107000
#define ACL_ERROR_RT_INVALID_DEVICEID             107001
#define ACL_ERROR_RT_CONTEXT_NULL                 107002
#define ACL_ERROR_RT_STREAM_CONTEXT               107003
#define ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID      107006
#define ACL_ERROR_RT_ADDR_UNALIGNED               107008
#define ACL_ERROR_RT_STREAM_SUBSCRIBE             107011
#define ACL_ERROR_RT_THREAD_SUBSCRIBE             107012
#define ACL_ERROR_RT_STREAM_NO_CB_REG             107015
#define ACL_ERROR_RT_INVALID_MEMORY_TYPE          107016
#define ACL_ERROR_RT_INVALID_HANDLE               107017
#define ACL_ERROR_RT_WAIT_TIMEOUT                 107019
#define ACL_ERROR_RT_TASK_TIMEOUT                 107020
#define ACL_ERROR_RT_DEVICE_TASK_ABORT            107022
#define ACL_ERROR_RT_STREAM_ABORT                 107023
#define ACL_ERROR_RT_STREAM_UNJOINED              107025 /* @since 8.5 */
#define ACL_ERROR_RT_STREAM_CAPTURED              107027 /* @since 8.5 */
#define ACL_ERROR_RT_EVENT_CAPTURED               107028 /* @since 8.5 */
#define ACL_ERROR_RT_STREAM_NOT_CAPTURED          107029 /* @since 8.5 */
#define ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT     107030 /* @since 8.5 */
#define ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED     107036 /* @since 8.5 */
#define ACL_ERROR_RT_FEATURE_NOT_SUPPORT          207000
#define ACL_ERROR_RT_MEMORY_ALLOCATION            207001
#define ACL_ERROR_RT_MEMORY_FREE                  207002
#define ACL_ERROR_RT_NO_DEVICE                    207004
#define ACL_ERROR_RT_RESOURCE_ALLOC_FAIL          207005
#define ACL_ERROR_RT_NO_PERMISSION                207006
#define ACL_ERROR_RT_NO_EVENT_RESOURCE            207007
#define ACL_ERROR_RT_NO_STREAM_RESOURCE           207008
#define ACL_ERROR_RT_NO_NOTIFY_RESOURCE           207009
#define ACL_ERROR_RT_OVER_LIMIT                   207012
#define ACL_ERROR_RT_REPEATED_INIT                207015
#define ACL_ERROR_RT_INTERNAL_ERROR               507000
#define ACL_ERROR_RT_STREAM_TASK_FULL             507002
#define ACL_ERROR_RT_STREAM_NOT_COMPLETE          507004
#define ACL_ERROR_RT_EVENT_NOT_COMPLETE           507006
#define ACL_ERROR_RT_CONTEXT_RELEASE_ERROR        507007
#define ACL_ERROR_RT_LOST_HEARTBEAT               507010
#define ACL_ERROR_RT_REPORT_TIMEOUT               507012
#define ACL_ERROR_RT_SYS_DMA                      507013
#define ACL_ERROR_RT_IPC_ERROR                    507022
#define ACL_ERROR_RT_DEV_SETUP_ERROR              507033
#define ACL_ERROR_RT_STREAM_SYNC_TIMEOUT          507046
#define ACL_ERROR_RT_EVENT_SYNC_TIMEOUT           507047
#define ACL_ERROR_RT_COPY_DATA                    507052
#define ACL_ERROR_RT_DEVICE_MEM_ERROR             507053
#define ACL_ERROR_RT_LINK_ERROR                   507056  /* @since 8.5 */
#define ACL_ERROR_RT_SUSPECT_REMOTE_ERROR         507057  /* @since 8.5 */
#define ACL_ERROR_RT_DRV_INTERNAL_ERROR           507899
#define ACL_ERROR_RT_SOCKET_CLOSE                 507901

/* ---- enumerations (only the members we use) ---- */
typedef enum aclrtRunMode { ACL_DEVICE = 0, ACL_HOST = 1 } aclrtRunMode;
typedef enum aclrtEventRecordedStatus {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE  = 1
} aclrtEventRecordedStatus;
typedef enum aclrtStreamStatus {
    ACL_STREAM_STATUS_COMPLETE  = 0,
    ACL_STREAM_STATUS_NOT_READY = 1,
    ACL_STREAM_STATUS_RESERVED  = 0xFFFF
} aclrtStreamStatus;
typedef enum aclrtCallbackBlockType {
    ACL_CALLBACK_NO_BLOCK = 0,
    ACL_CALLBACK_BLOCK    = 1
} aclrtCallbackBlockType;
typedef enum aclrtMemcpyKind {
    ACL_MEMCPY_HOST_TO_HOST     = 0,
    ACL_MEMCPY_HOST_TO_DEVICE   = 1,
    ACL_MEMCPY_DEVICE_TO_HOST   = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
    ACL_MEMCPY_DEFAULT          = 4
} aclrtMemcpyKind;
typedef enum aclrtMemMallocPolicy {
    ACL_MEM_MALLOC_HUGE_FIRST      = 0,
    ACL_MEM_MALLOC_HUGE_ONLY       = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY     = 2,
    ACL_MEM_MALLOC_HUGE_FIRST_P2P  = 3,
    ACL_MEM_MALLOC_HUGE_ONLY_P2P   = 4,
    ACL_MEM_MALLOC_NORMAL_ONLY_P2P = 5
} aclrtMemMallocPolicy;
typedef enum aclrtMemAttr {
    ACL_DDR_MEM         = 0,
    ACL_HBM_MEM         = 1,
    ACL_DDR_MEM_HUGE    = 2,
    ACL_DDR_MEM_NORMAL  = 3,
    ACL_HBM_MEM_HUGE    = 4,
    ACL_HBM_MEM_NORMAL  = 5,
    ACL_DDR_MEM_P2P_HUGE   = 6,
    ACL_DDR_MEM_P2P_NORMAL = 7,
    ACL_HBM_MEM_P2P_HUGE   = 8,
    ACL_HBM_MEM_P2P_NORMAL = 9
} aclrtMemAttr;
typedef enum { ACL_HOST_REGISTER_MAPPED = 0 } aclrtHostRegisterType;
typedef enum aclrtMemLocationType {
    ACL_MEM_LOCATION_TYPE_HOST   = 0,
    ACL_MEM_LOCATION_TYPE_DEVICE = 1
} aclrtMemLocationType;
typedef enum aclrtMemAllocationType { ACL_MEM_ALLOCATION_TYPE_PINNED = 0 } aclrtMemAllocationType;
typedef enum aclrtMemHandleType { ACL_MEM_HANDLE_TYPE_NONE = 0 } aclrtMemHandleType;
typedef enum aclrtMemGranularityOptions {
    ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM     = 0,
    ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
    ACL_RT_MEM_ALLOC_GRANULARITY_UNDEF       = 0xFFFF
} aclrtMemGranularityOptions;
typedef enum aclrtMemSharedHandleType {                                  /* @since 8.5 */
    ACL_MEM_SHARE_HANDLE_TYPE_DEFAULT = 1,
    ACL_MEM_SHARE_HANDLE_TYPE_FABRIC  = 2
} aclrtMemSharedHandleType;
typedef enum aclrtDeviceStatus {
    ACL_RT_DEVICE_STATUS_NORMAL   = 0,
    ACL_RT_DEVICE_STATUS_ABNORMAL = 1,
    ACL_RT_DEVICE_STATUS_END      = 0xFFFF
} aclrtDeviceStatus;
typedef enum aclrtLastErrLevel { ACL_RT_THREAD_LEVEL = 0 } aclrtLastErrLevel;
typedef enum {                                                           /* @since 8.5 */
    ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE = 301,
    ACL_DEV_ATTR_PHY_CHIP_ID           = 402,
    ACL_DEV_ATTR_SUPER_POD_DEVIDE_ID   = 403,
    ACL_DEV_ATTR_SUPER_POD_SERVER_ID   = 404,
    ACL_DEV_ATTR_SUPER_POD_ID          = 405
} aclrtDevAttr;

/* ---- flag bits ---- */
#define ACL_EVENT_SYNC                            0x1
#define ACL_EVENT_CAPTURE_STREAM_PROGRESS         0x2
#define ACL_EVENT_TIME_LINE                       0x8
#define ACL_EVENT_IPC                             0x40   /* @since 8.5 */
#define ACL_STREAM_FAST_LAUNCH                    0x1
#define ACL_STREAM_FAST_SYNC                      0x2
#define ACL_CONTINUE_ON_FAILURE                   0
#define ACL_STOP_ON_FAILURE                       1
#define ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT                0x0  /* @since 8.5 */
#define ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION 0x1  /* @since 8.5 */
#define ACL_RT_IPC_MEM_IMPORT_FLAG_DEFAULT                0x0  /* @since 8.5 */
#define ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS     0x1  /* @since 8.5 */
#define ACL_RT_NOTIFY_EXPORT_FLAG_DISABLE_PID_VALIDATION  0x2  /* @since 8.5 */
#define ACL_RT_NOTIFY_IMPORT_FLAG_ENABLE_PEER_ACCESS      0x2  /* @since 8.5 */
#define ACL_RT_VMM_EXPORT_FLAG_DEFAULT                    0x0  /* @since 8.5 */
#define ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION     0x1  /* @since 8.5 */
#define ACL_HOST_REG_MAPPED                       0x2         /* @since 8.5 */
#define ACL_HOST_REG_PINNED                       0x10000000  /* @since 8.5 */

typedef enum {                                                          /* @since 8.5 */
    ACL_MODEL_RI_CAPTURE_MODE_GLOBAL       = 0,
    ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL = 1,
    ACL_MODEL_RI_CAPTURE_MODE_RELAXED      = 2
} aclmdlRICaptureMode;
typedef enum {                                                          /* @since 8.5 */
    ACL_MODEL_RI_CAPTURE_STATUS_NONE        = 0,
    ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE      = 1,
    ACL_MODEL_RI_CAPTURE_STATUS_INVALIDATED = 2
} aclmdlRICaptureStatus;

/* ---- structures ---- */
typedef struct aclrtMemLocation { uint32_t id; aclrtMemLocationType type; } aclrtMemLocation;
typedef struct aclrtPtrAttributes {
    aclrtMemLocation location; uint32_t pageSize; uint32_t rsv[4];
} aclrtPtrAttributes;
typedef struct aclrtPhysicalMemProp {
    aclrtMemHandleType handleType; aclrtMemAllocationType allocationType;
    aclrtMemAttr memAttr; aclrtMemLocation location; uint64_t reserve;
} aclrtPhysicalMemProp;
typedef struct aclrtMemFabricHandle { uint8_t data[128]; } aclrtMemFabricHandle;    /* @since 8.5 */
typedef struct { aclrtMemLocation dstLoc; aclrtMemLocation srcLoc; uint8_t rsv[16]; } aclrtMemcpyBatchAttr; /* @since 8.3 */
typedef struct aclrtIpcEventHandle { char reserved[64]; } aclrtIpcEventHandle;      /* @since 8.5 */

/* ---- init / finalize / version ---- */
aclError    aclInit(const char *configPath);
aclError    aclFinalize(void);
aclError    aclFinalizeReference(uint64_t *refCount);                               /* @since 8.5 */
aclError    aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);
aclError    aclsysGetVersionNum(char *pkgName, int32_t *versionNum);                /* @since 8.5 */
aclError    aclsysGetVersionStr(char *pkgName, char *versionStr);                   /* @since 8.5 */
const char *aclrtGetSocName(void);
aclError    aclrtGetRunMode(aclrtRunMode *runMode);

/* ---- errors ---- */
const char *aclGetRecentErrMsg(void);
aclError    aclrtGetLastError(aclrtLastErrLevel level);
aclError    aclrtPeekAtLastError(aclrtLastErrLevel level);

/* ---- device ---- */
aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtSetDevice(int32_t deviceId);
aclError aclrtResetDevice(int32_t deviceId);
aclError aclrtResetDeviceForce(int32_t deviceId);                                   /* @since 8.1 */
aclError aclrtGetDevice(int32_t *deviceId);
aclError aclrtSynchronizeDevice(void);
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout);                        /* @since 8.1 */
aclError aclrtQueryDeviceStatus(int32_t deviceId, aclrtDeviceStatus *deviceStatus); /* @since 8.1 */
aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value);  /* @since 8.5 */
aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logicDevId, int32_t *const phyDevId);     /* @since 8.5 */
aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId);   /* @since 8.5 */
aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId);
aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags);
aclError aclrtDeviceDisablePeerAccess(int32_t peerDeviceId);
aclError aclrtDeviceGetBareTgid(int32_t *pid);                                      /* @since 8.1 */
aclError aclrtDeviceTaskAbort(int32_t deviceId, uint32_t timeout);

/* ---- context ---- */
aclError aclrtCreateContext(aclrtContext *context, int32_t deviceId);
aclError aclrtDestroyContext(aclrtContext context);
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext *context);
aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *stream);                      /* @since 8.5 */

/* ---- stream ---- */
aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtDestroyStreamForce(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtStreamAbort(aclrtStream stream);                                      /* @since 8.1 */
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtStreamGetId(aclrtStream stream, int32_t *streamId);                   /* @since 8.1 */

/* ---- event ---- */
aclError aclrtCreateEvent(aclrtEvent *event);
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t timeout);       /* @since 8.1 */
aclError aclrtEventElapsedTime(float *ms, aclrtEvent startEvent, aclrtEvent endEvent);
aclError aclrtIpcGetEventHandle(aclrtEvent event, aclrtIpcEventHandle *handle);     /* @since 8.5 */
aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent *event);    /* @since 8.5 */

/* ---- notify ---- */
aclError aclrtCreateNotify(aclrtNotify *notify, uint64_t flag);                     /* @since 8.5 */
aclError aclrtDestroyNotify(aclrtNotify notify);                                    /* @since 8.5 */
aclError aclrtRecordNotify(aclrtNotify notify, aclrtStream stream);                 /* @since 8.5 */
aclError aclrtWaitAndResetNotify(aclrtNotify notify, aclrtStream stream, uint32_t timeout);    /* @since 8.5 */
aclError aclrtNotifyGetExportKey(aclrtNotify notify, char *key, size_t len, uint64_t flags);   /* @since 8.5 */
aclError aclrtNotifyImportByKey(aclrtNotify *notify, const char *key, uint64_t flags);         /* @since 8.5 */
aclError aclrtNotifySetImportPid(aclrtNotify notify, int32_t *pid, size_t num);                /* @since 8.5 */

/* ---- device and host memory ---- */
aclError aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *devPtr);
aclError aclrtMallocHost(void **hostPtr, size_t size);
aclError aclrtFreeHost(void *hostPtr);
aclError aclrtMemset(void *devPtr, size_t maxCount, int32_t value, size_t count);
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);
aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes);           /* @since 8.1 */
aclError aclrtMemGetAddressRange(void *ptr, void **pbase, size_t *psize);                      /* @since 9.0 */
aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr); /* @since 8.1 */
aclError aclrtHostRegisterV2(void *ptr, uint64_t size, uint32_t flag);                         /* @since 8.5 */
aclError aclrtHostGetDevicePointer(void *pHost, void **pDevice, uint32_t flag);                /* @since 8.5 */
aclError aclrtHostUnregister(void *ptr);                                                       /* @since 8.1 */

/* ---- memory IPC ---- */
aclError aclrtIpcMemGetExportKey(void *devPtr, size_t size, char *key, size_t len, uint64_t flags); /* @since 8.5 */
aclError aclrtIpcMemImportByKey(void **devPtr, const char *key, uint64_t flags);               /* @since 8.5 */
aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pid, size_t num);                   /* @since 8.5 */
aclError aclrtIpcMemClose(const char *key);                                                    /* @since 8.5 */

/* ---- virtual memory management and shareable handles ---- */
aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr, uint64_t flags);
aclError aclrtReleaseMemAddress(void *virPtr);
aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop, uint64_t flags);
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void *virPtr);
aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option, size_t *granularity); /* @since 8.1 */
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType handleType, uint64_t flags, uint64_t *shareableHandle); /* @since 8.1 */
aclError aclrtMemImportFromShareableHandle(uint64_t shareableHandle, int32_t deviceId, aclrtDrvMemHandle *handle); /* @since 8.1 */
aclError aclrtMemSetPidToShareableHandle(uint64_t shareableHandle, int32_t *pid, size_t pidNum); /* @since 8.1 */
aclError aclrtMemExportToShareableHandleV2(aclrtDrvMemHandle handle, uint64_t flags, aclrtMemSharedHandleType shareType, void *shareableHandle); /* @since 8.5 */
aclError aclrtMemImportFromShareableHandleV2(void *shareableHandle, aclrtMemSharedHandleType shareType, uint64_t flags, aclrtDrvMemHandle *handle); /* @since 8.5 */
aclError aclrtMemSetPidToShareableHandleV2(void *shareableHandle, aclrtMemSharedHandleType shareType, int32_t *pid, size_t pidNum); /* @since 8.5 */

/* ---- copies ---- */
aclError aclrtMemcpy(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind);
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream);
aclError aclrtMemcpyAsyncWithCondition(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind, aclrtStream stream); /* @since 8.1 */
aclError aclrtMemcpyBatch(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex); /* @since 8.3 */
aclError aclrtMemcpyBatchAsync(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex, aclrtStream stream); /* @since 8.3 */
aclError aclrtMemcpyBatchV2(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs); /* @since 9.1 */
aclError aclrtMemcpyBatchAsyncV2(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches, aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, aclrtStream stream); /* @since 9.1 */

/* ---- host callbacks ---- */
aclError aclrtSubscribeReport(uint64_t threadId, aclrtStream stream);
aclError aclrtUnSubscribeReport(uint64_t threadId, aclrtStream stream);
aclError aclrtProcessReport(int32_t timeout);
aclError aclrtLaunchCallback(aclrtCallback fn, void *userData, aclrtCallbackBlockType blockType, aclrtStream stream);
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args);     /* @since 8.5 */

/* ---- graphs: what is submitted to a captured stream becomes part of one ---- */
aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode); /* @since 8.5 */
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *modelRI); /* @since 8.5 */
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *modelRI); /* @since 8.5 */
aclError aclmdlRIDestroy(aclmdlRI modelRI); /* @since 8.5 */
