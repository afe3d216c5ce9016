"""A slip of each kind that a declaration can suffer."""

from __future__ import annotations

from typing import NamedTuple

from .findings import Status


class Change(NamedTuple):
    """Replace ``old``, which stands once in our headers, by ``new``: what is to be reported about ``name``?"""

    old: str
    new: str
    name: str
    status: Status = Status.DIFFERENT


CHANGES = {
    "two parameters of different types swapped": Change(
        "FailureMode(aclrtStream stream, uint64_t mode)",
        "FailureMode(uint64_t mode, aclrtStream stream)",
        "aclrtSetStreamFailureMode",
    ),
    "two parameters of one type swapped": Change(
        "aclrtRecordEvent(aclrtEvent event, aclrtStream stream)",
        "aclrtRecordEvent(aclrtStream stream, aclrtEvent event)",
        "aclrtRecordEvent",
    ),
    "two pointers of one type swapped": Change(
        "size_t *free, size_t *total", "size_t *total, size_t *free", "aclrtGetMemInfo"
    ),
    "parameter narrower": Change(
        "aclrtDevAttr attr, int64_t *value", "aclrtDevAttr attr, int32_t *value", "aclrtGetDeviceInfo"
    ),
    "parameter with another sign": Change(
        "aclrtProcessReport(int32_t", "aclrtProcessReport(uint32_t", "aclrtProcessReport"
    ),
    "parameter an int instead of an enum": Change(
        "aclrtMalloc(void **devPtr, size_t size, aclrtMemMallocPolicy",
        "aclrtMalloc(void **devPtr, size_t size, uint32_t",
        "aclrtMalloc",
    ),
    "parameter another enum": Change(
        "aclrtGetRunMode(aclrtRunMode ", "aclrtGetRunMode(aclrtMemAttr ", "aclrtGetRunMode"
    ),
    "parameter loses const": Change("aclrtIpcMemClose(const char", "aclrtIpcMemClose(char", "aclrtIpcMemClose"),
    "parameter loses a star": Change("aclrtMallocHost(void **", "aclrtMallocHost(void *", "aclrtMallocHost"),
    "parameter of a type that the headers lack": Change(
        "HcclResult HcclBarrier(HcclComm comm", "typedef void *Comm;\nHcclResult HcclBarrier(Comm comm", "HcclBarrier"
    ),
    "parameter dropped": Change(
        "HcclGetRankId(HcclComm comm, uint32_t *rank)", "HcclGetRankId(HcclComm comm)", "HcclGetRankId"
    ),
    "parameter added": Change("HcclGroupStart(void)", "HcclGroupStart(int flags)", "HcclGroupStart"),
    "result of another type": Change(
        "uint32_t    HcclGetComm", "uint64_t    HcclGetComm", "HcclGetCommConfigCapability"
    ),
    "function misspelled": Change("aclrtFreeHost(", "aclrtFreeHots(", "aclrtFreeHots", Status.MISSING),
    "constant altered": Change("507056", "507058", "ACL_ERROR_RT_LINK_ERROR"),
    "flag bit altered": Change(
        "ACL_EVENT_TIME_LINE                       0x8", "ACL_EVENT_TIME_LINE 0x4", "ACL_EVENT_TIME_LINE"
    ),
    "constant misspelled": Change("#define HCCL_E_OOM ", "#define HCCL_E_OMM ", "HCCL_E_OMM", Status.MISSING),
    "enum value altered": Change("STATUS_COMPLETE  = 1", "STATUS_COMPLETE  = 2", "ACL_EVENT_RECORDED_STATUS_COMPLETE"),
    "enum member misspelled": Change("HCCL_RECV = 1", "HCCL_RECIEVE = 1", "HCCL_RECIEVE", Status.MISSING),
    "enum misspelled": Change(
        "} HcclSendRecvType;", "} HcclSendRecvTyp; typedef int HcclSendRecvType;", "HcclSendRecvTyp", Status.MISSING
    ),
    "enum that is an integer": Change("typedef int   aclError;", "typedef enum { E = 0 } aclError;", "aclError"),
    "integer that is an enum": Change(
        "typedef enum aclrtLastErrLevel { ACL_RT_THREAD_LEVEL = 0 } aclrtLastErrLevel;",
        "typedef int aclrtLastErrLevel;",
        "aclrtLastErrLevel",
    ),
    "field of another type of the same size": Change(
        "{ uint32_t id; aclrtMem", "{ float id; aclrtMem", "aclrtMemLocation.id"
    ),
    "field with another sign": Change("{ uint32_t id; aclrtMem", "{ int32_t id; aclrtMem", "aclrtMemLocation.id"),
    "field narrower": Change("void *buf; uint64_t count", "void *buf; uint32_t count", "HcclSendRecvItem.count"),
    "fields swapped": Change(
        "HcclDataType dataType; uint32_t remoteRank;\n",
        "uint32_t remoteRank; HcclDataType dataType;\n",
        "HcclSendRecvItem.dataType",
    ),
    "field misspelled": Change(
        "uint32_t pageSize; ", "uint32_t pagesize; ", "aclrtPtrAttributes.pagesize", Status.MISSING
    ),
    "array field shorter": Change("hcclUdi[128]", "hcclUdi[120]", "HcclCommConfig.hcclUdi"),
    "struct shorter without a tag": Change(
        "aclrtMemLocation srcLoc; uint8_t rsv[16]; }", "aclrtMemLocation srcLoc; }", "aclrtMemcpyBatchAttr"
    ),
    "struct longer than the vendor's": Change(
        "hcclRdmaServiceLevel;\n", "hcclRdmaServiceLevel; char more[4096];\n", "HcclCommConfig"
    ),
    "tag of a longer struct lost": Change("/* @prefix */", "", "HcclCommConfig"),
    "handle that is an integer": Change("typedef void *aclrtStream;", "typedef uint64_t aclrtStream;", "aclrtStream"),
    "scalar of another width": Change("typedef int   aclError;", "typedef long aclError;", "aclError"),
    "callback of another type": Change("(*aclrtCallback)(void *", "(*aclrtCallback)(int *", "aclrtCallback"),
    "typedef misspelled": Change(
        "typedef void *HcclComm;", "typedef void *HcclComm; typedef void *HcclCom;", "HcclCom", Status.MISSING
    ),
    "tag lost": Change(
        "CommUnbindMem(HcclComm comm, void *memHandle); /* @internal */",
        "CommUnbindMem(HcclComm comm, void *memHandle);",
        "HcclCommUnbindMem",
        Status.MISSING,
    ),
    "tag on what the headers do have": Change(
        "HcclGroupEnd(void); ", "HcclGroupEnd(void); /* @internal */", "HcclGroupEnd", Status.UNEXPECTED
    ),
}
