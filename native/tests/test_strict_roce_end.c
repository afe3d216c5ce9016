/* What ends a connection: its communicator's end, and a request that fails. */
#include "roce_kit.h"

/* [src adapt.cc HcclBatchPut, HcclBatchGet: they do not mark the communicator as in use; it is destroyed with its queue pairs] */
static void requests_are_dropped(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        shut_gate(&end);
        CHECK_OK(put(&end, end.gated, 0, 0, QUARTER));
        CHECK_OK(HcclCommDestroy(end.comm));                /* at once, under a stream that has yet to ring its doorbell */
        end.comm = NULL;
        open_gate(&end);
        CHECK_ERR(aclrtSynchronizeStream(end.gated), ACL_ERROR_RT_SUSPECT_REMOTE_ERROR);
    }
    in_step(other);
    if (rank)
        CHECK(holds(end.mine, LENT, 1));
    close_end(&end);
}

TEST(test_a_destroyed_communicators_requests_are_gone)
{
    run_roce(requests_are_dropped);
}

static void nothing_lands(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    HcclOneSideOpDesc items[64];
    for (int i = 0; rank == 0 && i < 64; i++)
        items[i] = item(&end, 0, 0, LENT);
    if (rank == 0) {
        CHECK_OK(HcclBatchGet(end.comm, 1, items, 64, end.free));
        await_change(end.mine, 0);                          /* in the middle of it */
        CHECK_OK(HcclCommDestroy(end.comm));
        end.comm = NULL;
        memset(end.mine, 9, LENT);
        sched_yield();
        CHECK(all_are(end.mine, LENT, 9));
    }
    close_end(&end);
}

TEST(test_nothing_lands_after_the_communicator_was_destroyed)
{
    for (int i = 0; i < 5; i++)
        run_roce(nothing_lands);
}

/* [src transport_roce_mem.cc:606-620, heartbeat.cc:1636: only HCCL's heartbeat thread reads error completions] */
static bool is_silent(aclrtStream stream)
{
    return aclrtSynchronizeStreamWithTimeout(stream, 50) == ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
}

static void freed(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        HcclOneSideOpDesc one = { end.spare, end.remote, SPARE, HCCL_DATA_TYPE_UINT8 };
        shut_gate(&end);
        CHECK_OK(HcclBatchGet(end.comm, 1, &one, 1, end.gated));
        CHECK_OK(aclrtStreamAbort(end.gated));
        CHECK_OK(HcclCommUnbindMem(end.comm, end.spare_handle));
        CHECK_OK(HcclDeregisterGlobalMem(end.spare_handle));
        CHECK_OK(aclrtFree(end.spare));
        end.spare = NULL;
        CHECK_OK(get(&end, end.free, 0, 0, 64));            /* rings the doorbell for it */
        CHECK(is_silent(end.free));
        CHECK_OK(get(&end, end.free, 0, 0, 64));            /* its own memory is fine, the connection is not */
        CHECK(is_silent(end.free));
        CHECK(all_are(end.mine, 64, 0));
    }
    close_end(&end);
}

TEST(test_memory_freed_meanwhile_fails_the_request_and_that_ends_the_connection_silently)
{
    run_roce(freed);
}

static void peer_dies(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    char token;
    if (rank == 1)
        raise(SIGKILL);
    CHECK_EQ(recv(other, &token, 1, 0), 0);                 /* it is gone */
    CHECK_OK(get(&end, end.free, 0, 0, 64));
    CHECK(is_silent(end.free));
    CHECK_OK(put(&end, end.gated, 0, 0, 64));
    CHECK(is_silent(end.gated));
    CHECK_OK(HcclCommDestroy(end.comm));
    CHECK_OK(HcclDeregisterGlobalMem(end.handle));
    CHECK_OK(aclrtDestroyStream(end.gated));
    CHECK_OK(aclrtDestroyStream(end.free));
    CHECK_OK(aclrtDestroyNotify(end.gate));
    CHECK_OK(aclrtFree(end.mine));
}

TEST(test_a_peer_that_died_wakes_no_stream)
{
    setenv("SOFTNPU_STRICT", "roce", 1);
    run_mortals(peer_dies);
}

int main(void)
{
    RUN(test_a_destroyed_communicators_requests_are_gone);
    RUN(test_nothing_lands_after_the_communicator_was_destroyed);
    RUN(test_memory_freed_meanwhile_fails_the_request_and_that_ends_the_connection_silently);
    RUN(test_a_peer_that_died_wakes_no_stream);
    return check_done();
}
