/* hccl.h: the part of the Ascend collective communication ABI (HCCL) that aiodatadist uses. See acl.h for who reads it.
 *   @prefix      the vendor's struct may be longer, our fields must agree
 *   @internal    declared in a package-internal vendor header, absent from the torch-npu wheel
 *   @noheader    exported by the library, declared in no installed header                                             */
#pragma once
#include "acl.h"

typedef void *HcclComm;

typedef enum {
    HCCL_SUCCESS = 0, HCCL_E_PARA = 1, HCCL_E_PTR = 2, HCCL_E_MEMORY = 3,
    HCCL_E_INTERNAL = 4, HCCL_E_NOT_SUPPORT = 5, HCCL_E_NOT_FOUND = 6,
    HCCL_E_UNAVAIL = 7, HCCL_E_SYSCALL = 8, HCCL_E_TIMEOUT = 9,
    HCCL_E_OPEN_FILE_FAILURE = 10, HCCL_E_TCP_CONNECT = 11,
    HCCL_E_ROCE_CONNECT = 12, HCCL_E_TCP_TRANSFER = 13,
    HCCL_E_ROCE_TRANSFER = 14, HCCL_E_RUNTIME = 15, HCCL_E_DRV = 16,
    HCCL_E_PROFILING = 17, HCCL_E_CCE = 18, HCCL_E_NETWORK = 19,
    HCCL_E_AGAIN = 20, HCCL_E_REMOTE = 21, HCCL_E_SUSPENDING = 22
} HcclResult;
#define HCCL_E_OPRETRY_FAIL 23   /* @since 8.5 */
#define HCCL_E_OOM          24   /* @since 8.5 */

typedef enum {
    HCCL_DATA_TYPE_INT8 = 0, HCCL_DATA_TYPE_INT16 = 1, HCCL_DATA_TYPE_INT32 = 2,
    HCCL_DATA_TYPE_FP16 = 3, HCCL_DATA_TYPE_FP32 = 4, HCCL_DATA_TYPE_INT64 = 5,
    HCCL_DATA_TYPE_UINT64 = 6, HCCL_DATA_TYPE_UINT8 = 7, HCCL_DATA_TYPE_UINT16 = 8,
    HCCL_DATA_TYPE_UINT32 = 9, HCCL_DATA_TYPE_FP64 = 10, HCCL_DATA_TYPE_BFP16 = 11,
    HCCL_DATA_TYPE_INT128 = 12, HCCL_DATA_TYPE_RESERVED = 255
} HcclDataType;
typedef enum { HCCL_SEND = 0, HCCL_RECV = 1 } HcclSendRecvType;

#define HCCL_ROOT_INFO_BYTES                   4108
#define HCCL_COMM_CONFIG_INFO_BYTES            24
#define HCCL_COMM_CONFIG_MAGIC_WORD            0xf0f0f0f0
#define HCCL_COMM_DEFAULT_BUFFSIZE             200
#define HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET      0xffffffff
#define HCCL_COMM_TRAFFIC_CLASS_CONFIG_NOT_SET 0xffffffff
#define HCCL_COMM_SERVICE_LEVEL_CONFIG_NOT_SET 0xffffffff
#define HCCL_COMM_CONFIG_OP_EXPANSION_MODE     3        /* understood if HcclGetCommConfigCapability() is greater */

typedef struct HcclRootInfoDef { char internal[4108]; } HcclRootInfo;

/* Tail-extensible: the library copies min(sizeof seen in the first 8 bytes, its own size)
 * and reads only what the version field announces. We declare the version-5 prefix.  */
typedef struct HcclCommConfigDef {                  /* @prefix */
    char     reserved[24];
    uint32_t hcclBufferSize;
    uint32_t hcclDeterministic;
    char     hcclCommName[128];
    char     hcclUdi[128];
    uint32_t hcclOpExpansionMode;
    uint32_t hcclRdmaTrafficClass;
    uint32_t hcclRdmaServiceLevel;
} HcclCommConfig;
typedef struct HcclSendRecvItemDef {
    HcclSendRecvType sendRecvType; void *buf; uint64_t count;
    HcclDataType dataType; uint32_t remoteRank;
} HcclSendRecvItem;

/* ---- communicators ---- */
HcclResult  HcclGetRootInfo(HcclRootInfo *rootInfo);
HcclResult  HcclCommInitRootInfo(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank, HcclComm *comm);
HcclResult  HcclCommInitRootInfoConfig(uint32_t nRanks, const HcclRootInfo *rootInfo, uint32_t rank, const HcclCommConfig *config, HcclComm *comm);
HcclResult  HcclCommInitClusterInfo(const char *clusterInfo, uint32_t rank, HcclComm *comm);
HcclResult  HcclCommInitClusterInfoConfig(const char *clusterInfo, uint32_t rank, HcclCommConfig *config, HcclComm *comm);
HcclResult  HcclCommInitAll(uint32_t ndev, int32_t *devices, HcclComm *comms);
HcclResult  HcclCommDestroy(HcclComm comm);
uint32_t    HcclGetCommConfigCapability(void);
HcclResult  HcclGetRankSize(HcclComm comm, uint32_t *rankSize);
HcclResult  HcclGetRankId(HcclComm comm, uint32_t *rank);
HcclResult  HcclGetCommName(HcclComm comm, char *commName);
HcclResult  HcclGetCommAsyncError(HcclComm comm, HcclResult *asyncError);
const char *HcclGetErrorString(HcclResult code);
HcclResult  HcclCommSuspend(HcclComm comm);
HcclResult  HcclCommResume(HcclComm comm);
HcclResult  HcclGroupStart(void);                                                   /* @since 9.0 */
HcclResult  HcclGroupEnd(void);                                                     /* @since 9.0 */

/* ---- two-sided ---- */
HcclResult HcclSend(void *sendBuf, uint64_t count, HcclDataType dataType, uint32_t destRank, HcclComm comm, aclrtStream stream);
HcclResult HcclRecv(void *recvBuf, uint64_t count, HcclDataType dataType, uint32_t srcRank, HcclComm comm, aclrtStream stream);
HcclResult HcclBatchSendRecv(HcclSendRecvItem *sendRecvInfo, uint32_t itemNum, HcclComm comm, aclrtStream stream);
HcclResult HcclBarrier(HcclComm comm, aclrtStream stream);

/* ---- one-sided family. CommMem was named HcclMem before mid-2026; the layout is the same. ---- */
typedef enum { COMM_MEM_TYPE_INVALID = -1, COMM_MEM_TYPE_DEVICE = 0, COMM_MEM_TYPE_HOST = 1 } CommMemType; /* @internal */
typedef struct { CommMemType type; void *addr; uint64_t size; } CommMem; /* @internal */
typedef struct { char desc[512]; } HcclMemDesc; /* @internal */
typedef struct { HcclMemDesc *array; uint32_t arrayLength; } HcclMemDescs; /* @internal */
typedef struct { void *localAddr; void *remoteAddr; uint64_t count; HcclDataType dataType; } HcclOneSideOpDesc; /* @internal */
typedef enum { HCCL_TOPO_FULLMESH = 0 } HcclTopoType; /* @internal */
typedef struct { HcclTopoType topoType; uint64_t rsvd0; uint64_t rsvd1; uint64_t rsvd2; } HcclPrepareConfig; /* @internal */

HcclResult HcclRegisterMem(HcclComm comm, uint32_t remoteRank, int type, void *addr, uint64_t size, HcclMemDesc *desc); /* @internal */
HcclResult HcclDeregisterMem(HcclComm comm, HcclMemDesc *desc); /* @internal */
HcclResult HcclExchangeMemDesc(HcclComm comm, uint32_t remoteRank, HcclMemDescs *local, int timeout, HcclMemDescs *remote, uint32_t *actualNum); /* @internal */
HcclResult HcclEnableMemAccess(HcclComm comm, HcclMemDesc *remoteMemDesc, CommMem *remoteMem); /* @internal */
HcclResult HcclDisableMemAccess(HcclComm comm, HcclMemDesc *remoteMemDesc); /* @internal */
HcclResult HcclBatchPut(HcclComm comm, uint32_t remoteRank, HcclOneSideOpDesc *desc, uint32_t descNum, aclrtStream stream); /* @internal */
HcclResult HcclBatchGet(HcclComm comm, uint32_t remoteRank, HcclOneSideOpDesc *desc, uint32_t descNum, aclrtStream stream); /* @internal */
HcclResult HcclRemapRegistedMemory(HcclComm *comm, CommMem *memInfoArray, uint64_t commSize, uint64_t arraySize); /* @internal */
HcclResult HcclRegisterGlobalMem(const CommMem *mem, void **memHandle); /* @internal */
HcclResult HcclDeregisterGlobalMem(void *memHandle); /* @internal */
HcclResult HcclCommBindMem(HcclComm comm, void *memHandle); /* @internal */
HcclResult HcclCommUnbindMem(HcclComm comm, void *memHandle); /* @internal */
HcclResult HcclCommPrepare(HcclComm comm, const HcclPrepareConfig *prepareConfig, const int timeout); /* @internal */

/* exported by the library, declared in no installed header (@noheader) */
HcclResult HcclCommInitClusterInfoMemConfig(const char *rankTableString, uint32_t rank, HcclCommConfig *config, HcclComm *comm); /* @noheader */
