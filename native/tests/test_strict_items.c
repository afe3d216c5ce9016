/* A batch is walked item by item: the first bad one ends the call with its code, those before it run, without a fence.
 * [src hcomm hccl_one_sided_conn.cc:328-354, 357-383: BatchWrite, BatchRead] */
#include "strict_kit.h"

static void half_issued(uint32_t rank, int other)
{
    strict_end end = open_end(rank, other);
    if (rank == 0) {
        HcclOneSideOpDesc items[] = { item(&end, 0, 100), item(&end, 1000, 100), item(&end, LENT, 100), item(&end, 2000, 100) };
        CHECK_ERR(HcclBatchGet(end.comm, 1, items, 4, end.stream), HCCL_E_INTERNAL);
        CHECK_OK(aclrtSynchronizeStream(end.stream));       /* the call's code is all that tells */
        CHECK(holds(end.mine, 100, 1));
        CHECK_EQ(end.mine[1000], pattern(1, 1000));
        CHECK(all_are(end.mine + 2000, 100, 0));
    }
    close_end(&end);
}

TEST(test_items_before_a_bad_one_run)
{
    run_strict("hccs", half_issued);
}

static void empty(uint32_t rank, int other)
{
    strict_end end = open_end(rank, other);
    if (rank == 0) {
        HcclOneSideOpDesc items[] = { item(&end, 0, 100), item(&end, 500, 0), item(&end, 2000, 100) };
        CHECK_ERR(HcclBatchGet(end.comm, 1, items, 3, end.stream), HCCL_E_PARA);
        drain(&end);
        CHECK(holds(end.mine, 100, 1));
        CHECK(all_are(end.mine + 2000, 100, 0));
    }
    close_end(&end);
}

TEST(test_an_item_of_0_bytes_is_refused_over_hccs)
{
    run_strict("hccs", empty);
}

TEST(test_an_item_of_0_bytes_is_refused_over_roce)
{
    run_strict("roce", empty);
}

/* [src transport_ipc_mem.cc, transport_roce_mem.cc: the local address is looked up among registered buffers] */
static void unregistered(uint32_t rank, int other)
{
    strict_end end = open_end(rank, other);
    if (rank == 0) {
        void *more = NULL, *handle = NULL;
        CHECK_OK(aclrtMalloc(&more, LENT, ACL_MEM_MALLOC_HUGE_FIRST));
        HcclOneSideOpDesc one = { more, end.remote, 100, HCCL_DATA_TYPE_UINT8 };
        CHECK_ERR(HcclBatchGet(end.comm, 1, &one, 1, end.stream), HCCL_E_INTERNAL);
        CHECK_ERR(HcclBatchPut(end.comm, 1, &one, 1, end.stream), HCCL_E_INTERNAL);
        CommMem mem = { COMM_MEM_TYPE_DEVICE, more, LENT };
        CHECK_OK(HcclRegisterGlobalMem(&mem, &handle));
        CHECK_ERR(HcclBatchGet(end.comm, 1, &one, 1, end.stream), HCCL_E_INTERNAL);    /* registered, but not bound */
        one.localAddr = end.mine + LENT - 99;
        CHECK_ERR(HcclBatchGet(end.comm, 1, &one, 1, end.stream), HCCL_E_INTERNAL);    /* one byte too far */
        one.localAddr = end.mine + LENT - 100;
        CHECK_OK(HcclBatchGet(end.comm, 1, &one, 1, end.stream));
        CHECK_OK(aclrtSynchronizeStream(end.stream));
        CHECK_OK(HcclDeregisterGlobalMem(handle));
        CHECK_OK(aclrtFree(more));
    }
    close_end(&end);
}

TEST(test_local_memory_is_registered_and_bound_over_hccs)
{
    run_strict("hccs", unregistered);
}

TEST(test_local_memory_is_registered_and_bound_over_roce)
{
    run_strict("roce", unregistered);
}

int main(void)
{
    RUN(test_items_before_a_bad_one_run);
    RUN(test_an_item_of_0_bytes_is_refused_over_hccs);
    RUN(test_an_item_of_0_bytes_is_refused_over_roce);
    RUN(test_local_memory_is_registered_and_bound_over_hccs);
    RUN(test_local_memory_is_registered_and_bound_over_roce);
    return check_done();
}
