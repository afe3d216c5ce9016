/* An abort ends what the stream has: the doorbell and the wait, not what the host has posted.
 * [src transport_roce_mem.cc:398-399, 702; vendor documentation: a link is to be made anew after LLM_TIMEOUT of a transfer] */
#include "roce_kit.h"

static void runs_later(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        memset(end.mine, 7, QUARTER);
        shut_gate(&end);
        CHECK_OK(put(&end, end.gated, 0, 0, QUARTER));
        CHECK_OK(aclrtStreamAbort(end.gated));
        CHECK_OK(aclrtSynchronizeStream(end.gated));
        memset(end.mine, 9, QUARTER);                       /* given back, and in another use */
        CHECK_OK(get(&end, end.free, QUARTER, 0, QUARTER));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        await_change(end.mine + 2 * QUARTER - 1, 0);
        CHECK(all_are(end.mine + QUARTER, QUARTER, 9));     /* the other use's bytes were sent */
    }
    close_end(&end);
}

TEST(test_aborted_requests_run_at_the_next_doorbell_with_the_memory_as_it_then_is)
{
    run_roce(runs_later);
}

static void ends_early(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        shut_gate(&end);
        CHECK_OK(get(&end, end.gated, 0, 0, 64));
        CHECK_OK(aclrtStreamAbort(end.gated));
        CHECK_OK(aclrtSynchronizeStream(end.gated));
        softnpu_fault("HcclBatchGet:hang");
        CHECK_OK(get(&end, end.free, QUARTER, 0, 64));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        CHECK(all_are(end.mine + QUARTER, 64, 0));
    }
    close_end(&end);
}

TEST(test_the_fence_of_an_aborted_batch_ends_the_next_transfer_early)
{
    run_roce(ends_early);
}

static void goes_on(uint32_t rank, int other)
{
    roce_end end = open_end(rank, other);
    if (rank == 0) {
        softnpu_fault("HcclBatchGet:delay=2000");       /* it must still run when the memory is cleared */
        CHECK_OK(get(&end, end.free, 0, 0, LENT));
        CHECK_OK(aclrtStreamAbort(end.free));
        CHECK_OK(aclrtSynchronizeStream(end.free));
        memset(end.mine, 0, LENT);
        await_change(end.mine + LENT - 1, 0);
        CHECK(holds(end.mine, LENT, 1));
    }
    close_end(&end);
}

TEST(test_a_request_that_was_started_goes_on_after_the_abort)
{
    run_roce(goes_on);
}

int main(void)
{
    RUN(test_aborted_requests_run_at_the_next_doorbell_with_the_memory_as_it_then_is);
    RUN(test_the_fence_of_an_aborted_batch_ends_the_next_transfer_early);
    RUN(test_a_request_that_was_started_goes_on_after_the_abort);
    return check_done();
}
