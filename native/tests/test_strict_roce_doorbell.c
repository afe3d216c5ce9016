/* Streams of one connection share its queue and its flag. */
#include "roce_kit.h"

/* [src transport_roce_mem.cc:398-399: requests are posted at call time, the stream gets the doorbell only;
 *  hccl_aicpu_utils.cc:213-246: a doorbell is cumulative] */
static void gate_does_not_hold(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        memset(end.mine, 7, QUARTER);
        shut_gate(&end);
        CHECK_OK(put(&end, end.gated, 0, 0, QUARTER));
        CHECK_OK(get(&end, end.free, QUARTER, 0, QUARTER));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        await_change(end.mine + 2 * QUARTER - 1, 0);        /* its wait may have taken the other batch's flag */
        CHECK(all_are(end.mine + QUARTER, QUARTER, 7));     /* what is behind the gate was written, and before this was read */
        CHECK_ERR(aclrtSynchronizeStreamWithTimeout(end.gated, 1), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    }
    close_end(&end);
}

TEST(test_any_doorbell_starts_all_requests_posted_before_it)
{
    run_roce(gate_does_not_hold);
}

/* [src transport_roce_mem.cc:512-514, 611, 702: a batch ends with a fenced read that sets the one notify of the connection] */
static void flag_is_shared(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        shut_gate(&end);
        CHECK_OK(get(&end, end.gated, 0, 0, 64));
        softnpu_fault("HcclBatchGet:hang");
        CHECK_OK(get(&end, end.free, QUARTER, 0, 64));
        CHECK_OK(aclrtSynchronizeStream(end.free));         /* by the gated batch's fence */
        CHECK(all_are(end.mine + QUARTER, 64, 0));          /* nothing of it has landed */
        CHECK(holds(end.mine, 64, 1));
        open_gate(&end);
        CHECK_ERR(aclrtSynchronizeStreamWithTimeout(end.gated, 50), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
    }
    close_end(&end);
}

TEST(test_a_stream_takes_the_flag_that_another_streams_fence_set)
{
    run_roce(flag_is_shared);
}

static void all_arrives(uint32_t rank, int other)
{
    enum { COUNT = 256, BLOCK = 700 };
    roce_end end = open_end(rank, other);
    HcclOneSideOpDesc items[COUNT];
    for (int i = 0; rank == 0 && i < COUNT; i++)
        items[i] = item(&end, (uint64_t)i * BLOCK, (uint64_t)(COUNT - 1 - i) * BLOCK, BLOCK);
    for (int round = 0; rank == 0 && round < 20; round++) {
        memset(end.mine, 0, LENT);
        CHECK_OK(HcclBatchGet(end.comm, 1, items, COUNT, end.free));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        for (int i = 0; i < COUNT; i++)
            CHECK_EQ(end.mine[i * BLOCK + 3], pattern(1, (uint64_t)(COUNT - 1 - i) * BLOCK + 3));
    }
    close_end(&end);
}

TEST(test_one_stream_alone_is_told_the_truth)
{
    run_roce(all_arrives);
}

int main(void)
{
    RUN(test_any_doorbell_starts_all_requests_posted_before_it);
    RUN(test_a_stream_takes_the_flag_that_another_streams_fence_set);
    RUN(test_one_stream_alone_is_told_the_truth);
    return check_done();
}
