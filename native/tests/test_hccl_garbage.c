/* Every function of hccl.h with arguments that mean nothing: an error code with a message, and never a crash. */
#include "hccl_pair.h"

static void *const garbage[] = { (void *)1, (void *)0x1000, (void *)~0ull, (void *)0x5a60000001000077ull,
        (void *)0x5a70000001000003ull, (void *)garbage };
enum { GARBAGE = sizeof garbage / sizeof *garbage };

static HcclComm comm;                                       /* a live one, unprepared */
static aclrtStream stream;
static char memory[4096];

TEST(test_null_outputs_and_inputs)
{
    HcclRootInfo info;
    HcclComm made;
    void *handle;
    CommMem mem = { COMM_MEM_TYPE_HOST, memory, sizeof memory };
    HcclCommConfig config = named_config("null");
    CHECK_OK(HcclGetRootInfo(&info));
    CHECK_ERR(HcclGetRootInfo(NULL), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitRootInfo(2, NULL, 0, &made), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitRootInfo(2, &info, 0, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitRootInfoConfig(2, &info, 0, NULL, &made), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitClusterInfo(NULL, 0, &made), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitClusterInfo("/", 0, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitClusterInfoConfig("/", 0, NULL, &made), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitAll(1, NULL, &made), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitAll(1, (int32_t[]){ 0 }, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(NULL, 0, &config, &made), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, NULL, &made), HCCL_E_PTR);
    CHECK_ERR(HcclCommInitClusterInfoMemConfig(two_ranks, 0, &config, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclGetRankSize(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclGetRankId(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclGetCommName(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclGetCommAsyncError(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclCommPrepare(comm, NULL, 1), HCCL_E_PTR);
    CHECK_ERR(HcclRegisterGlobalMem(NULL, &handle), HCCL_E_PTR);
    CHECK_ERR(HcclRegisterGlobalMem(&mem, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclDeregisterGlobalMem(NULL), HCCL_E_PTR);
    CHECK_ERR(HcclCommBindMem(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclCommUnbindMem(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclRemapRegistedMemory(NULL, &mem, 1, 1), HCCL_E_PTR);
    CHECK_ERR(HcclRemapRegistedMemory(&comm, NULL, 1, 1), HCCL_E_PTR);
}

TEST(test_null_in_the_descriptor_calls)
{
    HcclMemDesc desc;
    HcclMemDescs none = { NULL, 0 }, missing = { NULL, 1 };
    CommMem mem;
    uint32_t count;
    memset(&desc, 0xa5, sizeof desc);
    CHECK_ERR(HcclRegisterMem(comm, 1, 0, memory, 64, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclRegisterMem(comm, 1, 0, NULL, 64, &desc), HCCL_E_PTR);
    CHECK_ERR(HcclRegisterMem(comm, 1, 7, memory, 64, &desc), HCCL_E_PARA);
    CHECK_ERR(HcclRegisterMem(comm, 0, 0, memory, 64, &desc), HCCL_E_PARA);
    CHECK_ERR(HcclRegisterMem(comm, 2, 0, memory, 64, &desc), HCCL_E_PARA);
    CHECK_ERR(HcclDeregisterMem(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclDeregisterMem(comm, &desc), HCCL_E_PARA);
    CHECK_ERR(HcclEnableMemAccess(comm, NULL, &mem), HCCL_E_PTR);
    CHECK_ERR(HcclEnableMemAccess(comm, &desc, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclEnableMemAccess(comm, &desc, &mem), HCCL_E_PARA);
    CHECK_ERR(HcclDisableMemAccess(comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclDisableMemAccess(comm, &desc), HCCL_E_PARA);
    CHECK_ERR(HcclExchangeMemDesc(comm, 1, NULL, 1, &none, &count), HCCL_E_PTR);
    CHECK_ERR(HcclExchangeMemDesc(comm, 1, &none, 1, NULL, &count), HCCL_E_PTR);
    CHECK_ERR(HcclExchangeMemDesc(comm, 1, &none, 1, &none, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclExchangeMemDesc(comm, 1, &missing, 1, &none, &count), HCCL_E_PTR);
    CHECK_ERR(HcclExchangeMemDesc(comm, 1, &none, 1, &missing, &count), HCCL_E_PTR);
    CHECK_ERR(HcclExchangeMemDesc(comm, 0, &none, 1, &none, &count), HCCL_E_PARA);
    CHECK_ERR(HcclExchangeMemDesc(comm, 9, &none, 1, &none, &count), HCCL_E_PARA);
    CHECK_ERR(HcclExchangeMemDesc(comm, 1, &none, -2, &none, &count), HCCL_E_PARA);
    HcclMemDescs absurd = { &desc, UINT32_MAX };
    CHECK_ERR(HcclExchangeMemDesc(comm, 1, &absurd, 1, &none, &count), HCCL_E_PARA);
}

TEST(test_absurd_numbers)
{
    HcclComm made[3];
    HcclRootInfo info;
    CommMem mem = { COMM_MEM_TYPE_HOST, memory, sizeof memory };
    CHECK_OK(HcclGetRootInfo(&info));
    CHECK_ERR(HcclCommInitRootInfo(0, &info, 0, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitRootInfo(65, &info, 0, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitRootInfo(UINT32_MAX, &info, 0, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitRootInfo(2, &info, 2, made), HCCL_E_PARA);
    memset(&info, 0x5a, sizeof info);
    CHECK_ERR(HcclCommInitRootInfo(2, &info, 0, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitAll(0, (int32_t[]){ 0 }, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitAll(UINT32_MAX, (int32_t[]){ 0 }, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitAll(1, (int32_t[]){ -1 }, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitAll(1, (int32_t[]){ 1 << 20 }, made), HCCL_E_PARA);
    CHECK_ERR(HcclCommInitAll(2, (int32_t[]){ 1, 1 }, made), HCCL_E_PARA);
    CHECK_ERR(prepare(comm, -2), HCCL_E_PARA);
    HcclPrepareConfig ring = { (HcclTopoType)1, 0, 0, 0 };
    CHECK_ERR(HcclCommPrepare(comm, &ring, 1), HCCL_E_PARA);
    CHECK_ERR(HcclRemapRegistedMemory(&comm, &mem, 0, 1), HCCL_E_PARA);
    CHECK_ERR(HcclRemapRegistedMemory(&comm, &mem, 1, UINT64_MAX), HCCL_E_PARA);
    CHECK_ERR(HcclRemapRegistedMemory(&comm, &mem, 1, 1), HCCL_E_PARA);      /* unknown memory */
}

/* Its first whole huge page would be behind the last address. */
TEST(test_memory_at_the_end_of_all_addresses)
{
    void *handle;
    CommMem mem = { COMM_MEM_TYPE_HOST, (void *)(UINTPTR_MAX - 0x1fff), 0x1000 };
    CHECK_ERR(HcclRegisterGlobalMem(&mem, &handle), HCCL_E_PARA);
}

TEST(test_handles_that_are_none)
{
    uint32_t number;
    char name[128];
    HcclResult error;
    HcclMemDesc desc;
    HcclMemDescs none = { NULL, 0 };
    CommMem mem = { COMM_MEM_TYPE_HOST, memory, sizeof memory };
    HcclOneSideOpDesc op = { memory, memory, 1, HCCL_DATA_TYPE_INT8 };
    HcclSendRecvItem item = { HCCL_SEND, memory, 1, HCCL_DATA_TYPE_INT8, 1 };
    memset(&desc, 0, sizeof desc);
    for (int i = -1; i < GARBAGE; i++) {
        HcclComm bad = i < 0 ? NULL : garbage[i];
        HcclResult want = i < 0 ? HCCL_E_PTR : HCCL_E_NOT_FOUND;
        if (bad)
            CHECK_ERR(HcclCommDestroy(bad), want);
        CHECK_ERR(HcclGetRankSize(bad, &number), want);
        CHECK_ERR(HcclGetRankId(bad, &number), want);
        CHECK_ERR(HcclGetCommName(bad, name), want);
        CHECK_ERR(HcclGetCommAsyncError(bad, &error), want);
        CHECK_ERR(HcclCommSuspend(bad), want);
        CHECK_ERR(HcclCommResume(bad), want);
        CHECK_ERR(HcclSend(memory, 1, HCCL_DATA_TYPE_INT8, 1, bad, stream), want);
        CHECK_ERR(HcclRecv(memory, 1, HCCL_DATA_TYPE_INT8, 1, bad, stream), want);
        CHECK_ERR(HcclBatchSendRecv(&item, 1, bad, stream), want);
        CHECK_ERR(HcclBarrier(bad, stream), want);
        CHECK_ERR(HcclRegisterMem(bad, 1, 1, memory, 64, &desc), want);
        CHECK_ERR(HcclDeregisterMem(bad, &desc), want);
        CHECK_ERR(HcclExchangeMemDesc(bad, 1, &none, 1, &none, &number), want);
        CHECK_ERR(HcclEnableMemAccess(bad, &desc, &mem), want);
        CHECK_ERR(HcclDisableMemAccess(bad, &desc), want);
        CHECK_ERR(HcclBatchPut(bad, 1, &op, 1, stream), want);
        CHECK_ERR(HcclBatchGet(bad, 1, &op, 1, stream), want);
        CHECK_ERR(HcclRemapRegistedMemory(&bad, &mem, 1, 1), want);
        CHECK_ERR(HcclCommBindMem(bad, bad), want);
        CHECK_ERR(HcclCommUnbindMem(bad, bad), want);
        CHECK_ERR(prepare(bad, 1), want);
    }
    for (int i = 0; i < GARBAGE; i++) {
        CHECK_ERR(HcclDeregisterGlobalMem(garbage[i]), HCCL_E_NOT_FOUND);
        CHECK_ERR(HcclCommBindMem(comm, garbage[i]), HCCL_E_NOT_FOUND);
        CHECK_ERR(HcclCommUnbindMem(comm, garbage[i]), HCCL_E_NOT_FOUND);
    }
    CHECK_ERR(HcclDeregisterGlobalMem(comm), HCCL_E_NOT_FOUND);               /* a handle of another kind */
}

TEST(test_transfers_that_make_no_sense)
{
    HcclOneSideOpDesc op = { memory, memory, 1, HCCL_DATA_TYPE_INT8 };
    CHECK_OK(softnpu_adopt(memory, sizeof memory, 1));
    CHECK_ERR(HcclBatchPut(comm, 0, &op, 1, stream), HCCL_E_PARA);            /* ourselves */
    CHECK_ERR(HcclBatchPut(comm, 2, &op, 1, stream), HCCL_E_PARA);
    CHECK_ERR(HcclBatchPut(comm, UINT32_MAX, &op, 1, stream), HCCL_E_PARA);
    CHECK_ERR(HcclBatchPut(comm, 1, NULL, 1, stream), HCCL_E_PTR);
    CHECK_ERR(HcclBatchPut(comm, 1, &op, UINT32_MAX, stream), HCCL_E_PARA);
    CHECK_ERR(HcclBatchPut(comm, 1, &op, 1, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclBatchPut(comm, 1, &op, 1, garbage[0]), HCCL_E_PARA);
    CHECK_ERR(HcclBatchPut(comm, 1, &op, 1, comm), HCCL_E_PARA);
    op.localAddr = NULL;
    CHECK_ERR(HcclBatchGet(comm, 1, &op, 1, stream), HCCL_E_PTR);
    op.localAddr = garbage[2];
    CHECK_ERR(HcclBatchGet(comm, 1, &op, 1, stream), HCCL_E_PARA);
    op = (HcclOneSideOpDesc){ memory, NULL, 1, HCCL_DATA_TYPE_INT8 };
    CHECK_ERR(HcclBatchGet(comm, 1, &op, 1, stream), HCCL_E_PTR);
    op = (HcclOneSideOpDesc){ memory, memory, 1, HCCL_DATA_TYPE_RESERVED };
    CHECK_ERR(HcclBatchGet(comm, 1, &op, 1, stream), HCCL_E_PARA);
    op.dataType = (HcclDataType)-1;
    CHECK_ERR(HcclBatchGet(comm, 1, &op, 1, stream), HCCL_E_PARA);
    /* a one-sided communicator */
    CHECK_ERR(HcclSend(memory, 1, HCCL_DATA_TYPE_INT8, 1, comm, stream), HCCL_E_NOT_SUPPORT);
    CHECK_ERR(HcclSend(memory, 1, HCCL_DATA_TYPE_INT8, 1, comm, NULL), HCCL_E_PTR);
    CHECK_ERR(HcclBatchSendRecv(NULL, 1, comm, stream), HCCL_E_PTR);
    HcclSendRecvItem item = { HCCL_SEND, memory, 1, HCCL_DATA_TYPE_INT8, 1 };
    CHECK_ERR(HcclBatchSendRecv(&item, 0, comm, stream), HCCL_E_PARA);
    CHECK_ERR(HcclBatchSendRecv(&item, UINT32_MAX, comm, stream), HCCL_E_PARA);
    CHECK_OK(softnpu_release(memory, sizeof memory));
}

TEST(test_transfers_that_make_no_sense_between_two_ranks)
{
    HcclComm comms[2];
    CHECK_OK(HcclCommInitAll(2, (int32_t[]){ 0, 1 }, comms));
    CHECK_OK(softnpu_adopt(memory, sizeof memory, 1));
    CHECK_ERR(HcclSend(memory, 1, HCCL_DATA_TYPE_INT8, 0, comms[0], stream), HCCL_E_PARA);
    CHECK_ERR(HcclSend(memory, 1, HCCL_DATA_TYPE_INT8, 2, comms[0], stream), HCCL_E_PARA);
    CHECK_ERR(HcclSend(NULL, 1, HCCL_DATA_TYPE_INT8, 1, comms[0], stream), HCCL_E_PTR);
    CHECK_ERR(HcclSend(memory, 4097, HCCL_DATA_TYPE_INT8, 1, comms[0], stream), HCCL_E_PARA);
    CHECK_ERR(HcclSend(memory, UINT64_MAX / 2 + 2, HCCL_DATA_TYPE_FP16, 1, comms[0], stream), HCCL_E_PARA);
    CHECK_ERR(HcclRecv(memory, 1, HCCL_DATA_TYPE_RESERVED, 1, comms[0], stream), HCCL_E_PARA);
    CHECK_ERR(HcclRecv(garbage[2], 1, HCCL_DATA_TYPE_INT8, 1, comms[0], stream), HCCL_E_PARA);
    CHECK_ERR(HcclRecv(memory, 1, HCCL_DATA_TYPE_INT8, 1, comms[0], garbage[1]), HCCL_E_PARA);
    CHECK_ERR(HcclBarrier(comms[0], NULL), HCCL_E_PTR);
    HcclSendRecvItem items[2] = { { HCCL_SEND, memory, 1, HCCL_DATA_TYPE_INT8, 1 }, { (HcclSendRecvType)2, memory, 1,
            HCCL_DATA_TYPE_INT8, 1 } };
    CHECK_ERR(HcclBatchSendRecv(items, 2, comms[0], stream), HCCL_E_PARA);
    CHECK_OK(aclrtSynchronizeStream(stream));               /* none of them left anything behind */
    CHECK_OK(HcclCommDestroy(comms[0]));
    CHECK_OK(HcclCommDestroy(comms[1]));
    CHECK_OK(softnpu_release(memory, sizeof memory));
}

int main(void)
{
    open_device(0);
    comm = new_one_sided("garbage", 0);
    stream = new_stream();
    RUN(test_null_outputs_and_inputs);
    RUN(test_null_in_the_descriptor_calls);
    RUN(test_absurd_numbers);
    RUN(test_memory_at_the_end_of_all_addresses);
    RUN(test_handles_that_are_none);
    RUN(test_transfers_that_make_no_sense);
    RUN(test_transfers_that_make_no_sense_between_two_ranks);
    CHECK_OK(aclrtDestroyStream(stream));
    CHECK_OK(HcclCommDestroy(comm));
    close_device(0);
    return check_done();
}
