/* 512 requests deep, of which 510 can be used; who finds no room waits in the call, for HCCL_CONNECT_TIMEOUT at most.
 * [src adapter_hccp.h:46, 49; adapter_hccp.cc:771-820, 2474; ra_hdc_lite.c:1264-1302] */
#include "roce_kit.h"

static HcclResult get_many(const roce_end *end, aclrtStream stream, uint32_t count)
{
    HcclOneSideOpDesc items[256];
    for (uint32_t i = 0; i < count; i++)
        items[i] = item(end, i * 64, i * 64, 64);
    return HcclBatchGet(end->comm, 1, items, count, stream);
}

static void fill_queue(roce_end *end)                       /* 254 + 1 and 254 + 1: each batch has a fence */
{
    shut_gate(end);
    CHECK_OK(get_many(end, end->gated, 254));
    CHECK_OK(get_many(end, end->gated, 254));
}

static void times_out(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        fill_queue(&end);
        setenv("SOFTNPU_CONNECT_TIMEOUT", "1", 1);
        double began = seconds_now();
        CHECK_ERR(get(&end, end.free, LENT / 2, 0, 64), HCCL_E_ROCE_TRANSFER);
        CHECK(seconds_now() - began > 0.9);
        open_gate(&end);
        CHECK_OK(aclrtSynchronizeStream(end.gated));
        CHECK(holds(end.mine, 254 * 64, 1));
        CHECK_OK(get(&end, end.free, LENT / 2, LENT / 2, 64));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        CHECK_EQ(end.mine[LENT / 2], pattern(1, LENT / 2));
    }
    close_end(&end);
}

TEST(test_a_full_queue_makes_the_call_wait_and_then_fail)
{
    run_roce(times_out);
}

static _Atomic int returned;

static void *get_one(void *argument)
{
    const roce_end *end = argument;
    CHECK_OK(aclrtSetDevice(0));
    CHECK_OK(get(end, end->free, LENT / 2, LENT / 2, 64));
    returned = 1;
    CHECK_OK(aclrtResetDevice(0));
    return NULL;
}

static void goes_on(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        pthread_t caller;
        setenv("SOFTNPU_CONNECT_TIMEOUT", "120", 1);
        fill_queue(&end);
        pthread_create(&caller, NULL, get_one, &end);
        CHECK_ERR(aclrtSynchronizeStreamWithTimeout(end.gated, 50), ACL_ERROR_RT_STREAM_SYNC_TIMEOUT);
        CHECK_EQ(returned, 0);
        open_gate(&end);
        pthread_join(caller, NULL);
        await_change(end.mine + LENT / 2, 0);
        CHECK_EQ(end.mine[LENT / 2], pattern(1, LENT / 2));
    }
    close_end(&end);
}

TEST(test_a_caller_that_waits_for_room_goes_on_when_there_is_some)
{
    run_roce(goes_on);
}

int main(void)
{
    RUN(test_a_full_queue_makes_the_call_wait_and_then_fail);
    RUN(test_a_caller_that_waits_for_room_goes_on_when_there_is_some);
    return check_done();
}
